"""A network looked at before anything is inserted: what a block would cost at each stage, and where to try one."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call

from vision_attn.attention.patterns import Window
from vision_attn.checks import check_count, check_counts
from vision_attn.networks.insertion import InsertedBlock, InsertionReport, inserted_blocks, plain_network
from vision_attn.networks.insertion.backbone import Example, end_of_sequential, make_example
from vision_attn.networks.insertion.costs import Cost, describe_added, percent
from vision_attn.networks.insertion.dry_run import DryRun
from vision_attn.networks.insertion.hooks import RECORD
from vision_attn.networks.insertion.insert import new_block
from vision_attn.networks.insertion.makers import fitting_heads
from vision_attn.networks.insertion.sites import find_stages
from vision_attn.text import Report, Table

#: Sides of the maps that full attention suits: below, it mixes little; above, its cost outgrows the network's.
SHORTEST, LONGEST = 7, 32

#: Sides of windows, the most usual first.
WINDOWS = (7, 8, 6, 9, 10, 5)

MEBI, GIBI = 2**20, 2**30


@dataclass(frozen=True)
class Site(InsertedBlock):
    """A place of a network, and what a block there costs."""

    #: bytes that training keeps for the backward pass of a batch, with the implementation that runs
    saved: int = 0
    #: its index among the stages
    stage: int = 0
    #: whether a block is inserted there already, so that no other can be
    occupied: bool = False


@dataclass(frozen=True)
class Proposal:
    """What to insert where, and why."""

    #: where, and what the block costs there
    sites: tuple[Site, ...]
    #: of :func:`vision_attn.insert_`: ``stages`` and what differs from the default block
    arguments: Mapping[str, Any]
    why: str

    def call(self, example_input: object = None) -> str:
        """The call, as one writes it, with what the dry run needs; for images of another size, with their shape."""
        words = self.arguments if example_input is None else {**self.arguments, "example_input": example_input}
        return f"va.insert_(model, {written(words)})"


@dataclass(frozen=True, repr=False)
class Inspection(Report):
    """What a network is made of, what a block costs in it, and where one is worth trying; prints as tables.

    >>> inspect_model(nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1)), input_size=32, batch_size=1).parts()[0]
    'Sequential on images of 3×32×32: 224 parameters, 55,296 multiply-adds an image'
    """

    #: its name, or that of its class
    model: str
    #: of one image: 1, channels, rows, columns
    input_shape: tuple[int, ...]
    #: what ``insert_`` needs as example_input; None where the model's own size does
    example_input: object
    #: images that one step of training holds
    batch_size: int
    #: of the block and its maps
    dtype: torch.dtype
    #: of the block, beyond its heads
    options: Mapping[str, Any]
    #: what the network itself has and does
    whole: Cost
    #: every stage
    sites: tuple[Site, ...]
    #: of the GPU or else of the machine, in bytes; infinite where the system does not say
    memory_limit: float
    #: where to begin, the best first
    proposals: tuple[Proposal, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """A line each for maps that are too small or large for a block, and for what does not fit into memory."""
        free = [site for site in self.sites if not site.occupied]
        large = [f"{one.saved / GIBI:,.2f} GiB of {one.site}" for one in free if one.saved > self.memory_limit]
        what = f"training keeps {', '.join(large)}, more than the memory limit of {self.memory_limit / GIBI:,.2f} GiB"
        lines = [f"{what}: take a smaller input or batch, va.Window(7) or a later stage"] if large else []
        return (*InsertionReport(tuple(free)).warnings, *lines)

    def parts(self) -> list[str | Table]:
        size = "×".join(map(str, self.input_shape[1:]))
        has = f"{self.whole.parameters:,} parameters, {self.whole.multiply_adds:,} multiply-adds an image"
        options = f", {written(self.options)}" if self.options else ""
        dtype = str(self.dtype).removeprefix("torch.")
        reading = (
            f"A block after a stage ({self.sites[0].block}{options}, {dtype}; %: of the network; "
            f"last: MiB that training keeps of {self.batch_size:,} images):"
        )
        columns = ("stage", "module", "channels", "map", "heads", "parameters", "", "multiply-adds", "", "MiB")
        rows: list[Sequence[str]] = [columns]
        for site in self.sites:
            name = f"{site.site} (has a block)" if site.occupied else site.site
            place = f"{site.stage}", name, f"{site.channels}", site.size
            numbers = zip(cost_of([site]), self.whole, strict=True)
            costs = [text for added, own in numbers for text in (f"{added:,}", percent(added, own))]
            rows.append((*place, f"{site.options.get('num_heads', 8)}", *costs, f"{site.saved / MEBI:,.1f}"))
        heading, table = f"{self.model} on images of {size}: {has}", Table(rows, left=(1,))
        warned = [f"warning: {line}" for line in self.warnings]
        advice = ["", "No free stage has a map that attention is worth trying on."]
        if self.proposals:
            advice = ["", "Worth trying:", *map(self.advice, self.proposals)]
        return [heading, "", textwrap.fill(reading, 110), table, *warned, *advice]

    def advice(self, proposal: Proposal) -> str:
        """One of the proposals: where and why, the call, and what it costs."""
        names = " and ".join(f"{site.site} ({site.size})" for site in proposal.sites)
        call, cost = proposal.call(self.example_input), describe_added(cost_of(proposal.sites), self.whole)
        return f"- {names}: {proposal.why}\n  {call}\n  {cost}"


def cost_of(sites: Sequence[Site]) -> Cost:
    """What the blocks at several sites add to a network together."""
    return InsertionReport(tuple(sites)).added


def written(options: Mapping[str, Any]) -> str:
    """Arguments as one writes them in a call.

    >>> written({"pattern": Window(7), "stages": [-2, -1]})
    'pattern=va.Window(7), stages=[-2, -1]'
    """
    ours = {name for name, value in options.items() if type(value).__module__.startswith("vision_attn.")}
    text = ", ".join(f"{name}={'va.' if name in ours else ''}{value!r}" for name, value in options.items())
    return text.replace("(size=", "(").replace(", shift=0)", ")")


# --- looking ----------------------------------------------------------------------------------------------------------


def inspect_model(
    model: str | nn.Module,
    *,
    input_size: int | Sequence[int] | None = None,
    example_input: Any = None,
    batch_size: int = 128,
    num_heads: int | None = None,
    **block_options: Any,
) -> Inspection:
    """What an attention block would cost at each stage of a network, and where it is worth trying.

    The network is run as :func:`vision_attn.insert_` runs it; blocks are not run at all. The model is left as it is.
    What blocks at other sites cost is in the report of :func:`vision_attn.insert_`.

    Args:
        model: a network, or the name of one: as timm knows it, or ``"torchvision:resnet18"``.
        input_size: side of the images, or their height and width, in pixels; the model's own when None, else 224.
        example_input: in its place, what the network's forward takes, as in :func:`vision_attn.insert_`.
        batch_size: images that one step of training holds.
        num_heads: heads, or the largest number up to it that divides the channels; 8 when None.
        **block_options: further arguments of :class:`vision_attn.AttentionBlock2d`, such as ``pattern``.

    Returns:
        An inspection that prints as tables, with warnings and proposals.

    Raises:
        ValueError: no such model, a size that it does not take, an option that the block refuses.
        SiteError: the model declares no stages, as in :func:`vision_attn.stage_names`.

    >>> inspection = inspect_model("torchvision:resnet18", input_size=64, batch_size=1)
    >>> [(site.site, site.size) for site in inspection.sites][-2:]
    [('layer3', '4×4'), ('layer4', '2×2')]
    """
    check_count("batch_size", batch_size)
    check_counts(num_heads=num_heads)
    network = plain_network(network_of(model) if isinstance(model, str) else model)
    example = example_for(network, input_size, example_input)
    run = DryRun(network, example)
    paths = find_stages(run)
    maps = dict(zip(paths, run.select_maps([end_of_sequential(network, path) for path in paths], "after"), strict=True))

    def price(path: str, options: Mapping[str, Any], stage: int = 0) -> Site:
        one = maps[path]
        occupied = one.target in inserted_blocks(network)
        one = one._replace(form=one.form._replace(device=torch.device("meta")))
        block = new_block(run, None, one, "after", options)
        record: InsertedBlock = vars(block)[RECORD]
        shape = (batch_size, record.channels, *record.map_size)
        kept = count_saved_bytes(block, shape, one.form.dtype)
        return Site(**{**vars(record), "site": path}, saved=kept, stage=stage, occupied=occupied)

    sites = []
    for index, (path, one) in enumerate(maps.items()):
        options = dict(block_options)
        if num_heads is not None:
            options["num_heads"] = fitting_heads(one.shape[1], num_heads)
        sites.append(price(path, options, index))
    # The activation that ends a stem has learned nothing that positions could be compared by.
    learning = [site for site in sites if any(True for _ in network.get_submodule(site.site).parameters())]
    free = [site for site in learning if not site.occupied]
    proposals = propose(free, len(sites), price, num_heads or 8, block_options)
    # timm writes its name for a network into its configuration.
    known = model if isinstance(model, str) else (getattr(network, "pretrained_cfg", None) or {}).get("architecture")
    as_shape = example.shape if len(example.args) == 1 and not example.count else "example_input"
    return Inspection(
        model=known or type(network).__name__,
        input_shape=example.shape,
        example_input=None if input_size is None and example_input is None else as_shape,
        batch_size=batch_size,
        dtype=next(iter(maps.values())).form.dtype,
        options=block_options,
        whole=run.cost,
        sites=tuple(sites),
        memory_limit=machine_memory(),
        proposals=tuple(proposals),
    )


def network_of(name: str) -> nn.Module:
    """A network without weights, by a name that timm knows or, after ``torchvision:``, that torchvision knows."""
    from vision_attn.networks.models.registry import no_such_model

    library, _, wanted = name.rpartition(":")
    if library != "torchvision":
        from timm.models import get_pretrained_cfg

        from vision_attn.networks.models import create_model

        config = None
        with suppress(RuntimeError):  # there is no such tag, which is refused in the next line with those there are
            config = get_pretrained_cfg(name)
        return create_model(name, num_classes=config.num_classes if config else 1000)

    from torchvision.models import get_model, list_models

    if wanted not in list_models():
        raise no_such_model(name, wanted, list_models())

    # Weights are drawn and then never looked at: some of torchvision's networks ask, with a warning, how to draw them.
    options = {"init_weights": False} if wanted in ("googlenet", "inception_v3") else {}
    network: nn.Module = get_model(wanted, weights=None, **options)
    return network


def example_for(model: nn.Module, input_size: int | Sequence[int] | None, example_input: Any = None) -> Example:
    """What the model is run on: what is given, or one image of the size that is asked for, or of the model's own."""
    own = make_example(model, example_input)
    if input_size is None:
        return own
    sides = (input_size,) * min(2, len(own.size)) if isinstance(input_size, int) else tuple(input_size)
    size = (*own.size[:-2], *sides) if isinstance(input_size, int) else sides
    if example_input is not None or len(size) != len(own.size) or min(size) < 1:
        what = "a side or a height and a width, in pixels, and is left out with example_input"
        raise ValueError(f"input_size must be {what}; got {input_size!r}")
    return make_example(model, (*own.shape[:2], *size))


def propose(
    free: Sequence[Site], count: int, price: Callable[..., Site], num_heads: int, asked: Mapping[str, Any]
) -> list[Proposal]:
    """What is worth trying first at free ones of so many stages: late, on a good size, and windows on a larger one."""

    def proposal(chosen: Sequence[Site], why: str, **options: Any) -> Proposal:
        heads = fitting_heads(math.gcd(*(site.channels for site in chosen)), num_heads)
        options = {**({} if heads == 8 else {"num_heads": heads}), **asked, **options}
        # The last two stages are counted from the end, as one speaks of them.
        indices = [site.stage for site in chosen]
        stages = [index - count if index >= count - 2 else index for index in indices]
        sites = tuple(price(site.site, options) for site in chosen)
        return Proposal(sites, {"stages": stages, **options}, why)

    late = [site for site in free if SHORTEST <= math.sqrt(site.tokens) <= LONGEST][-2:]
    large = [site for site in free if math.sqrt(site.tokens) > LONGEST and len(site.map_size) == 2][-1:]
    found = []
    if late:
        found.append(proposal(late, "late, with enough positions to mix and few enough to compare all"))
    if large and not asked:
        # A window that divides the map; else the most usual, which pads it.
        window = next((side for side in WINDOWS if not any(length % side for length in large[0].map_size)), WINDOWS[0])
        why = f"finer detail, in windows: comparing all {large[0].tokens:,} positions costs too much"
        found.append(proposal(large, why, pattern=Window(window)))
    return found


def count_saved_bytes(block: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
    """The bytes that autograd keeps of a block for its backward pass: the map that comes in and what is made of it.

    >>> from vision_attn.attention.blocks import AttentionBlock2d
    >>> blocks = (AttentionBlock2d(64, impl=impl, device="meta") for impl in ("bmm", "auto"))
    >>> [count_saved_bytes(block, (1, 64, 56, 56)) >> 20 for block in blocks]
    [306, 5]
    """
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage  # held, so that its number is not given to another
        return tensor

    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors = (*block.named_parameters(), *block.named_buffers())
        own = {name: torch.empty_like(x, device="cpu", requires_grad=x.requires_grad) for name, x in tensors}
        x = torch.empty(shape, dtype=dtype, requires_grad=True)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            functional_call(block, own, (x,))
        for tensor in own.values():
            kept.pop(tensor.untyped_storage()._cdata, None)
        return sum(storage.nbytes() for storage in kept.values())


def machine_memory() -> float:
    """The bytes of the GPU, or of the machine's memory if there is none; infinite where the system does not say."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties("cuda").total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf

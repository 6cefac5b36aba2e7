"""Inspection of a network before the insertion: the cost of a block at each stage, and where to try one."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
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

#: Sides of windows, the most common first.
WINDOWS = (7, 8, 6, 9, 10, 5)

MEBI, GIBI = 2**20, 2**30


@dataclass(frozen=True)
class Site(InsertedBlock):
    """A stage of a network, and the cost of a block there."""

    #: bytes that the backward pass of a batch needs, with the implementation that runs
    saved: int = 0
    #: index of the stage
    stage: int = 0
    #: True if a block is inserted there already, so that no other can be
    occupied: bool = False


@dataclass(frozen=True)
class Proposal:
    """A proposal for an insertion, with the reason."""

    #: the stages, with the cost of the block
    sites: tuple[Site, ...]
    #: of :func:`vision_attn.insert_`: ``stages`` and what differs from the default block
    arguments: Mapping[str, Any]
    why: str

    def call(self, example_input: object = None) -> str:
        """Format the call, with the ``example_input`` that the dry run needs, or the shape of the images."""
        arguments = self.arguments if example_input is None else {**self.arguments, "example_input": example_input}
        return f"va.insert_(model, {format_arguments(arguments)})"

    @property
    def added(self) -> Cost:
        """Parameters and multiply-adds of the blocks at all sites."""
        return InsertionReport(self.sites).added


@dataclass(frozen=True, repr=False)
class Inspection(Report):
    """The cost of a block at each stage of a network, and where one is worth trying; prints as tables.

    >>> inspect_model(nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1)), input_size=32, batch_size=1).parts()[0]
    'Sequential on images of 3×32×32: 224 parameters, 55,296 multiply-adds an image'
    """

    #: name of the network, or of its class
    model: str
    #: of one image: 1, channels, rows, columns
    input_shape: tuple[int, ...]
    #: ``example_input`` for ``insert_``; None for the model's default size
    example_input: object
    #: images in one training step
    batch_size: int
    #: dtype of the block and its feature maps
    dtype: torch.dtype
    #: options of the block, beyond its heads
    options: Mapping[str, Any]
    #: cost of the network without blocks
    whole: Cost
    #: every stage
    sites: tuple[Site, ...]
    #: memory of the GPU or else of the machine, in bytes; infinite if unknown
    memory_limit: float
    #: what to try, the best first
    proposals: tuple[Proposal, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Lines about feature maps that are too small or large for a block, and blocks that do not fit into memory."""
        free = tuple(site for site in self.sites if not site.occupied)
        large = ", ".join(f"{one.saved / GIBI:,.2f} GiB of {one.site}" for one in free if one.saved > self.memory_limit)
        limit = f"more than the memory limit of {self.memory_limit / GIBI:,.2f} GiB"
        line = f"training keeps {large}, {limit}: take a smaller input or batch, va.Window(7) or a later stage"
        return (*InsertionReport(free).warnings, *([line] if large else []))

    def parts(self) -> list[str | Table]:
        size = "×".join(map(str, self.input_shape[1:]))
        has = f"{self.whole.parameters:,} parameters, {self.whole.multiply_adds:,} multiply-adds an image"
        options = f", {format_arguments(self.options)}" if self.options else ""
        dtype = str(self.dtype).removeprefix("torch.")
        columns = f"%: of the network; last: MiB that training keeps of {self.batch_size:,} images"
        reading = f"A block after a stage ({self.sites[0].block}{options}, {dtype}; {columns}):"
        header = ("stage", "module", "channels", "map", "heads", "parameters", "", "multiply-adds", "", "MiB")
        rows: list[Sequence[str]] = [header]
        for site in self.sites:
            name = f"{site.site} (has a block)" if site.occupied else site.site
            place = f"{site.stage}", name, f"{site.channels}", site.size
            numbers = zip(InsertionReport((site,)).added, self.whole, strict=True)
            costs = [text for added, own in numbers for text in (f"{added:,}", percent(added, own))]
            rows.append((*place, f"{site.options.get('num_heads', 8)}", *costs, f"{site.saved / MEBI:,.1f}"))
        heading, table = f"{self.model} on images of {size}: {has}", Table(rows, left=(1,))
        warned = [f"warning: {line}" for line in self.warnings]
        none = "No free stage has a map that attention is worth trying on."
        advice = ["Worth trying:", *map(self.advice, self.proposals)] if self.proposals else [none]
        return [heading, "", textwrap.fill(reading, 110), table, *warned, "", *advice]

    def advice(self, proposal: Proposal) -> str:
        """Format a proposal: the sites, the reason, the call, and its cost."""
        names = " and ".join(f"{site.site} ({site.size})" for site in proposal.sites)
        cost = describe_added(proposal.added, self.whole)
        return f"- {names}: {proposal.why}\n  {proposal.call(self.example_input)}\n  {cost}"


def format_arguments(options: Mapping[str, Any]) -> str:
    """Format the arguments of a call.

    >>> format_arguments({"pattern": Window(7), "stages": [-2, -1]})
    'pattern=va.Window(7), stages=[-2, -1]'
    """
    ours = {name for name, value in options.items() if type(value).__module__.startswith("vision_attn.")}
    text = ", ".join(f"{name}={'va.' if name in ours else ''}{value!r}" for name, value in options.items())
    return text.replace("(size=", "(").replace(", shift=0)", ")")


# --- inspecting -------------------------------------------------------------------------------------------------------


def inspect_model(
    model: str | nn.Module,
    *,
    input_size: int | Sequence[int] | None = None,
    example_input: Any = None,
    batch_size: int = 128,
    num_heads: int | None = None,
    **block_options: Any,
) -> Inspection:
    """Report what an attention block would cost at each stage of a network, and where it is worth trying.

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
    network = plain_network(create_network(model) if isinstance(model, str) else model)
    example = example_for(network, input_size, example_input)
    run = DryRun(network, example)
    paths = find_stages(run)
    maps = dict(zip(paths, run.select_maps([end_of_sequential(network, path) for path in paths], "after"), strict=True))

    def price(path: str, options: Mapping[str, Any]) -> Site:
        one = maps[path]
        occupied = one.target in inserted_blocks(network)
        one = one._replace(form=one.form._replace(device=torch.device("meta")))
        block = new_block(run, None, one, "after", options)
        record: InsertedBlock = vars(block)[RECORD]
        shape = (batch_size, record.channels, *record.map_size)
        kept = count_saved_bytes(block, shape, one.form.dtype)
        return Site(**{**vars(record), "site": path}, saved=kept, stage=paths.index(path), occupied=occupied)

    heads = {path: num_heads and fitting_heads(one.shape[1], num_heads) for path, one in maps.items()}
    sites = [price(path, {**block_options, **({"num_heads": heads[path]} if num_heads else {})}) for path in paths]
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


def create_network(name: str) -> nn.Module:
    """Create a network without weights, by timm's name or, after ``torchvision:``, by torchvision's."""
    from torchvision.models import get_model, list_models

    from vision_attn.networks.models.registry import create_model, no_such_model

    library, _, wanted = name.rpartition(":")
    if library != "torchvision":
        return create_model(name)
    if wanted not in list_models():
        raise no_such_model(name, wanted, list_models())
    # Without this option some of torchvision's networks warn about how their weights are drawn.
    options = {"init_weights": False} if wanted in ("googlenet", "inception_v3") else {}
    return get_model(wanted, weights=None, **options)


def example_for(model: nn.Module, input_size: int | Sequence[int] | None, example_input: Any = None) -> Example:
    """Return the input that the model is run on: the given one, or an image of ``input_size`` or the default size."""
    own = make_example(model, example_input)
    if input_size is None:
        return own
    if isinstance(input_size, int):
        input_size = (*own.size[:-2], *[input_size] * len(own.size[-2:]))
    if example_input is not None or len(input_size) != len(own.size) or min(input_size) < 1:
        expected = "a side or a height and a width, in pixels, and is left out with example_input"
        raise ValueError(f"input_size must be {expected}; got {input_size!r}")
    return make_example(model, (*own.shape[:2], *input_size))


def propose(
    free: Sequence[Site], count: int, price: Callable[..., Site], num_heads: int, options: Mapping[str, Any]
) -> list[Proposal]:
    """Propose late stages of a good size, and windows at a larger one, among the free ones of ``count`` stages."""

    def proposal(chosen: Sequence[Site], why: str, **further: Any) -> Proposal:
        heads = fitting_heads(math.gcd(*(site.channels for site in chosen)), num_heads)
        arguments = {**({} if heads == 8 else {"num_heads": heads}), **options, **further}
        # The last two stages are counted from the end.
        stages = [site.stage - count if site.stage >= count - 2 else site.stage for site in chosen]
        sites = tuple(price(site.site, arguments) for site in chosen)
        return Proposal(sites, {"stages": stages, **arguments}, why)

    late = [site for site in free if SHORTEST <= math.sqrt(site.tokens) <= LONGEST][-2:]
    large = [site for site in free if math.sqrt(site.tokens) > LONGEST and len(site.map_size) == 2][-1:]
    found = []
    if late:
        found.append(proposal(late, "late, with enough positions to mix and few enough to compare all"))
    if large and not options:
        # A window that divides the feature map, or else the most common one, which pads it.
        window = next((side for side in WINDOWS if not any(length % side for length in large[0].map_size)), WINDOWS[0])
        why = f"finer detail, in windows: comparing all {large[0].tokens:,} positions costs too much"
        found.append(proposal(large, why, pattern=Window(window)))
    return found


def count_saved_bytes(block: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
    """Count the bytes that autograd saves in a block for its backward pass: its input and what is computed from it.

    >>> from vision_attn.attention.blocks import AttentionBlock2d
    >>> blocks = (AttentionBlock2d(64, impl=impl, device="meta") for impl in ("bmm", "auto"))
    >>> [count_saved_bytes(block, (1, 64, 56, 56)) >> 20 for block in blocks]
    [306, 5]
    """
    saved: list[Tensor] = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors = (*block.named_parameters(), *block.named_buffers())
        own = {name: torch.empty_like(x, device="cpu", requires_grad=x.requires_grad) for name, x in tensors}
        x = torch.empty(shape, dtype=dtype, requires_grad=True)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
            functional_call(block, own, (x,))
        sizes = {storage._cdata: storage.nbytes() for storage in map(Tensor.untyped_storage, saved)}
        held = {tensor.untyped_storage()._cdata for tensor in own.values()}
        return sum(size for storage, size in sizes.items() if storage not in held)


def machine_memory() -> float:
    """Return the bytes of memory of the GPU, or of the machine if there is none; infinity if unknown."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties("cuda").total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf

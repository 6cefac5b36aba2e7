"""Inspection of a network before insertion: the cost of a block at each stage, and proposals."""

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
from vision_attn.checks import check_above
from vision_attn.networks.example import Example, make_example
from vision_attn.networks.insertion import InsertedBlock, InsertionReport, inserted_blocks
from vision_attn.networks.insertion.block_factories import fitting_heads
from vision_attn.networks.insertion.costs import Cost, describe_added, percent
from vision_attn.networks.insertion.dry_run import DryRun
from vision_attn.networks.insertion.insert import new_block
from vision_attn.networks.insertion.record import get_record
from vision_attn.networks.insertion.sites import find_stages
from vision_attn.networks.network import unwrap_model
from vision_attn.networks.selection import end_of_sequential
from vision_attn.text import Report, Table

#: Side lengths of feature maps for which full attention is proposed. Attention has little effect on smaller feature
#: maps, and costs more than the network on larger ones.
MIN_SIDE, MAX_SIDE = 7, 32

#: Side lengths of windows, the most common first.
WINDOWS = (7, 8, 6, 9, 10, 5)

MEBI, GIBI = 2**20, 2**30


@dataclass(frozen=True)
class Site(InsertedBlock):
    """A stage of a network, and the cost of a block at the stage."""

    #: bytes that autograd saves for the backward pass of a batch, with the selected implementation
    saved: int = 0
    #: index of the stage
    stage: int = 0
    #: True if a block is already inserted at the stage
    occupied: bool = False


@dataclass(frozen=True)
class Proposal:
    """A proposal for an insertion, with the reason."""

    #: the stages, with the cost of the block
    sites: tuple[Site, ...]
    #: arguments of :func:`vision_attn.insert_`: ``stages`` and options that differ from the default block
    arguments: Mapping[str, Any]
    reason: str

    def call(self, example_input: object = None) -> str:
        """Format the call, with ``example_input`` if it is given."""
        arguments = self.arguments if example_input is None else {**self.arguments, "example_input": example_input}
        return f"va.insert_(model, {format_arguments(arguments)})"

    @property
    def added(self) -> Cost:
        """Parameters and MACs of the blocks at all sites."""
        return InsertionReport(self.sites).added


@dataclass(frozen=True, repr=False)
class Inspection(Report):
    """Report on the cost of a block at each stage of a network, with proposals; prints as tables.

    >>> inspect_model(nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1)), input_size=32, batch_size=1).parts()[0]
    'Sequential on images of 3×32×32: 224 parameters, 55,296 MACs per image'
    """

    #: name of the network, or of its class
    model: str
    #: shape of one image: 1, channels, rows, columns
    input_shape: tuple[int, ...]
    #: ``example_input`` for ``insert_``; None for the model's default size
    example_input: object
    #: number of images in one training step
    batch_size: int
    #: dtype of the block and the feature maps
    dtype: torch.dtype
    #: options of the block other than the number of heads
    options: Mapping[str, Any]
    #: cost of the network without blocks
    model_cost: Cost
    #: all stages
    sites: tuple[Site, ...]
    #: memory of the GPU, or of the machine if there is no GPU, in bytes; infinite if unknown
    memory_limit: float
    #: proposals, the best first
    proposals: tuple[Proposal, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about feature maps that are too small or large for a block, and blocks that exceed the memory."""
        free = tuple(site for site in self.sites if not site.occupied)
        large = ", ".join(f"{x.saved / GIBI:,.2f} GiB at {x.site!r}" for x in free if x.saved > self.memory_limit)
        limit = f"more than the memory limit of {self.memory_limit / GIBI:,.2f} GiB"
        remedy = "Use a smaller input or batch, pattern=va.Window(7) or a later stage"
        line = f"in training, a block saves {large}, {limit}. {remedy}"
        return (*InsertionReport(free).warnings, *([line] if large else []))

    def parts(self) -> list[str | Table]:
        size = "×".join(map(str, self.input_shape[1:]))
        cost = f"{self.model_cost.parameters:,} parameters, {self.model_cost.macs:,} MACs per image"
        options = f", {format_arguments(self.options)}" if self.options else ""
        dtype = str(self.dtype).removeprefix("torch.")
        columns = f"%: relative to the network; MiB: memory saved for the backward pass of {self.batch_size:,} images"
        caption = f"Cost of a block after each stage ({self.sites[0].block}{options}, {dtype}; {columns}):"
        rows: list[Sequence[str]] = [
            ("stage", "module", "channels", "feature map", "heads", "parameters", "%", "MACs", "%", "MiB")
        ]
        for site in self.sites:
            name = f"{site.site} (has a block)" if site.occupied else site.site
            location = f"{site.stage}", name, f"{site.channels}", site.size
            numbers = zip(InsertionReport((site,)).added, self.model_cost, strict=True)
            costs = [text for added, own in numbers for text in (f"{added:,}", percent(added, own))]
            rows.append((*location, f"{site.options.get('num_heads', 8)}", *costs, f"{site.saved / MEBI:,.1f}"))
        heading, table = f"{self.model} on images of {size}: {cost}", Table(rows, left=(1,))
        warned = [f"warning: {line}" for line in self.warnings]
        none = "No proposals: no stage without a block has a feature map of a suitable size."
        advice = ["Proposals:", *map(self.advice, self.proposals)] if self.proposals else [none]
        return [heading, "", textwrap.fill(caption, 110), table, *warned, "", *advice]

    def advice(self, proposal: Proposal) -> str:
        """Format a proposal: the sites, the reason, the call and the cost."""
        names = " and ".join(f"{site.site} ({site.size})" for site in proposal.sites)
        cost = describe_added(proposal.added, self.model_cost)
        return f"- {names}: {proposal.reason}\n  {proposal.call(self.example_input)}\n  {cost}"


def format_arguments(options: Mapping[str, Any]) -> str:
    """Format the arguments of a call.

    >>> format_arguments({"pattern": Window(7), "stages": [-2, -1]})
    'pattern=va.Window(7), stages=[-2, -1]'
    """
    ours = {name for name, value in options.items() if type(value).__module__.startswith("vision_attn.")}
    text = ", ".join(f"{name}={'va.' if name in ours else ''}{value!r}" for name, value in options.items())
    return text.replace("(size=", "(").replace(", shift=0)", ")")


# --- inspection -----------------------------------------------------------------------------------------------------


def inspect_model(
    model: str | nn.Module,
    *,
    input_size: int | Sequence[int] | None = None,
    example_input: Any = None,
    batch_size: int = 128,
    num_heads: int | None = None,
    **block_options: Any,
) -> Inspection:
    """Report the cost of an attention block at each stage of a network, and propose stages.

    The network runs once, as in :func:`vision_attn.insert_`; the blocks do not run. The model is not changed. For the
    cost of blocks at other sites, see the report of :func:`vision_attn.insert_`.

    Args:
        model: a network or a name: a timm name, or a torchvision name such as ``"torchvision:resnet18"``.
        input_size: side length of the images, or height and width, in pixels. The default is the model's default size,
            or else 224.
        example_input: input of the network's forward, instead of ``input_size``, as in :func:`vision_attn.insert_`.
        batch_size: number of images in one training step.
        num_heads: maximum number of heads, 8 when None; the largest number that divides the channels is used.
        **block_options: further options of :class:`vision_attn.AttentionBlock2d`, such as ``pattern``.

    Returns:
        A report with warnings and proposals; prints as tables.

    Raises:
        ValueError: the model does not exist, does not support the image size, or an option of the block is invalid.
        SiteError: the model has no stages, as in :func:`vision_attn.stage_names`.

    >>> inspection = inspect_model("torchvision:resnet18", input_size=64, batch_size=1)
    >>> [(site.site, site.size) for site in inspection.sites][-2:]
    [('layer3', '4×4'), ('layer4', '2×2')]
    """
    check_above(0, batch_size=batch_size, num_heads=num_heads)
    network = unwrap_model(create_network(model) if isinstance(model, str) else model)
    example = example_for(network, input_size, example_input)
    run = DryRun(network, example)
    paths = find_stages(run)
    maps = dict(zip(paths, run.select_maps([end_of_sequential(network, path) for path in paths], "after"), strict=True))

    def estimate(path: str, options: Mapping[str, Any]) -> Site:
        x = maps[path]
        occupied = x.target in inserted_blocks(network)
        x = x._replace(spec=x.spec._replace(device=torch.device("meta")))
        block = new_block(run, None, x, "after", options)
        record = get_record(block)
        saved = count_saved_bytes(block, (batch_size, record.channels, *record.map_size), x.spec.dtype)
        return Site(**{**vars(record), "site": path}, saved=saved, stage=paths.index(path), occupied=occupied)

    heads = {path: num_heads and fitting_heads(x.shape[1], num_heads) for path, x in maps.items()}
    sites = [estimate(path, {**block_options, **({"num_heads": heads[path]} if num_heads else {})}) for path in paths]
    # Stages without parameters, such as the activation at the end of a stem, are not proposed.
    learned = [site for site in sites if any(True for _ in network.get_submodule(site.site).parameters())]
    free = [site for site in learned if not site.occupied]
    proposals = propose(free, len(sites), estimate, num_heads or 8, block_options)
    # timm stores the name of a network in its configuration.
    known = model if isinstance(model, str) else (getattr(network, "pretrained_cfg", None) or {}).get("architecture")
    as_shape = example.shape if len(example.args) == 1 and not example.count else "example_input"
    return Inspection(
        model=known or type(network).__name__,
        input_shape=example.shape,
        example_input=None if input_size is None and example_input is None else as_shape,
        batch_size=batch_size,
        dtype=next(iter(maps.values())).spec.dtype,
        options=block_options,
        model_cost=run.cost,
        sites=tuple(sites),
        memory_limit=machine_memory(),
        proposals=tuple(proposals),
    )


def create_network(name: str) -> nn.Module:
    """Create a network with random weights from a timm name, or from a torchvision name after ``torchvision:``."""
    from torchvision.models import get_model, list_models

    from vision_attn.networks.models.registry import create_model, unknown_model_error

    library, _, wanted = name.rpartition(":")
    if library != "torchvision":
        return create_model(name)
    if wanted not in list_models():
        raise unknown_model_error(name, wanted, list_models())
    # Without this option, some of torchvision's networks issue a warning about their initialization.
    options = {"init_weights": False} if wanted in ("googlenet", "inception_v3") else {}
    return get_model(wanted, weights=None, **options)


def example_for(model: nn.Module, input_size: int | Sequence[int] | None, example_input: Any = None) -> Example:
    """Return the input of the dry run: the given input, or an image of ``input_size`` or the default size."""
    own = make_example(model, example_input)
    if input_size is None:
        return own
    if isinstance(input_size, int):
        input_size = (*own.size[:-2], *[input_size] * len(own.size[-2:]))
    if example_input is not None or len(input_size) != len(own.size) or min(input_size) < 1:
        expected = "a side length or a height and width in pixels, without example_input"
        raise ValueError(f"input_size must be {expected}, got {input_size!r}")
    return make_example(model, (*own.shape[:2], *input_size))


def propose(
    free: Sequence[Site], count: int, estimate: Callable[..., Site], num_heads: int, options: Mapping[str, Any]
) -> list[Proposal]:
    """Propose late stages of a suitable size, and windows at a larger stage, at stages without a block."""

    def proposal(chosen: Sequence[Site], reason: str, **further: Any) -> Proposal:
        heads = fitting_heads(math.gcd(*(site.channels for site in chosen)), num_heads)
        arguments = {**({} if heads == 8 else {"num_heads": heads}), **options, **further}
        # The last two stages get negative indices.
        stages = [site.stage - count if site.stage >= count - 2 else site.stage for site in chosen]
        sites = tuple(estimate(site.site, arguments) for site in chosen)
        return Proposal(sites, {"stages": stages, **arguments}, reason)

    late = [site for site in free if MIN_SIDE <= math.sqrt(site.tokens) <= MAX_SIDE][-2:]
    large = [site for site in free if math.sqrt(site.tokens) > MAX_SIDE and len(site.map_size) == 2][-1:]
    found = []
    if late:
        found.append(proposal(late, "late stage with a feature map of a suitable size for full attention"))
    if large and not options:
        # The window size divides the feature map; if none does, the most common size is used, with padding.
        window = next((side for side in WINDOWS if not any(length % side for length in large[0].map_size)), WINDOWS[0])
        reason = f"finer detail, in windows because full attention on {large[0].tokens:,} positions is too expensive"
        found.append(proposal(large, reason, pattern=Window(window)))
    return found


def count_saved_bytes(block: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
    """Count the bytes that autograd saves for the backward pass of a block: its input and intermediate results.

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
    """Return the memory of the GPU in bytes, or of the machine if there is no GPU; infinity if it is unknown."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties("cuda").total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf

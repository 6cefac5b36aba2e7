"""An inspection, and how it prints: tables of what blocks cost, warnings, and what to try first."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from vision_attn.networks.insertion import InsertedBlock, InsertionReport
from vision_attn.text import Report, Table

#: Sides of the maps that full attention suits: below, it mixes little; above, its cost outgrows the network's.
SHORTEST, LONGEST = 7, 32

#: The implementations whose memory differs: einx and einsum keep what bmm keeps.
IMPLS_COUNTED = ("bmm", "sdpa")

MEBI, GIBI = 2**20, 2**30


class Share(NamedTuple):
    """How much of something a part of the network has, or would have."""

    #: numbers that are learned
    parameters: int
    #: in one forward of one image
    multiply_adds: int


@dataclass(frozen=True)
class Site(InsertedBlock):
    """A place of a network, and what a block there costs."""

    #: bytes that training keeps for the backward pass of a batch, by implementation
    saved: Mapping[str, int] = field(default_factory=dict)
    #: its index among the stages; None for a site that was chosen
    stage: int | None = None
    #: what the network has between the stage before and this one; None for a site that was chosen
    share: Share | None = None
    #: whether a block is inserted there already, so that no other can be
    occupied: bool = False

    @property
    def path(self) -> str:
        """Of the module, and on which side of it if not after it."""
        return self.site if self.at == "after" else f"{self.at} {self.site}"

    @property
    def sides(self) -> tuple[float, ...]:
        """Of the map, or of a square with as many positions as sound or video has."""
        return self.map_size if len(self.map_size) == 2 else (math.sqrt(self.tokens),)


@dataclass(frozen=True)
class Proposal:
    """What to insert where, and why."""

    #: where, and what the block costs there
    sites: tuple[Site, ...]
    #: of :func:`vision_attn.insert_`: ``stages`` and what differs from the default block
    arguments: Mapping[str, Any]
    #: in a few words
    why: str

    def call(self, example_input: object = None) -> str:
        """The call, as one writes it, with what the dry run needs; for images of another size, with their shape."""
        words = [f"{name}={code(value)}" for name, value in self.arguments.items()]
        words += [] if example_input is None else [f"example_input={example_input}"]
        return f"va.insert_(model, {', '.join(words)})"


@dataclass(frozen=True, repr=False)
class Inspection(Report):
    """What a network is made of, what a block costs in it, and where one is worth trying; prints as tables.

    >>> from torch import nn
    >>> from vision_attn.networks.inspection import inspect_model
    >>> inspect_model(nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1)), input_size=32, batch_size=1).heading()
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
    whole: Share
    #: every stage, or the sites that were chosen
    sites: tuple[Site, ...]
    #: whether these were chosen
    chosen: bool
    #: in bytes; None where the system does not say
    memory_limit: int | None
    #: where to begin, the best first; none where sites were chosen
    proposals: tuple[Proposal, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """A line for each map where a block can go that is too small, and for what does not fit into memory."""
        free = [site for site in self.sites if not site.occupied]
        lines = [line.removeprefix("warning: ") for line in InsertionReport(tuple(free)).warnings]
        # An image of any size up to the network's reduction makes one position: that tells no size to take.
        if any(site.size == "2×2" for site in free):
            larger = "×".join(str(-(-SHORTEST * pixels // 2)) for pixels in self.input_shape[2:])
            lines.append(f"a larger input: {larger} makes about {SHORTEST}×{SHORTEST} of a map that is 2×2")
        return (*lines, *memory_warnings(self, [free] if self.chosen else [[site] for site in free]))

    def heading(self) -> str:
        """One line that says what was looked at."""
        size = "×".join(map(str, self.input_shape[1:]))
        parameters, multiply_adds = self.whole
        return f"{self.model} on images of {size}: {parameters:,} parameters, {multiply_adds:,} multiply-adds an image"

    def parts(self) -> list[str | Table]:
        paragraphs: list[list[str | Table]] = [
            [self.heading()],
            [] if self.chosen else [stage_table(self)],
            [*cost_table(self)],
            [paragraph(f"warning: {line}", "  ") for line in self.warnings],
            [] if self.chosen else [advice(self)],
        ]
        return [line for lines in filter(None, paragraphs) for line in ("", *lines)][1:]


def cost_of(sites: Sequence[Site]) -> Share:
    """What the blocks at several sites add to a network together."""
    together = InsertionReport(tuple(sites))
    return Share(together.parameters, together.multiply_adds)


def stage_table(found: Inspection) -> Table:
    """The network as it is."""
    rows: list[tuple[str, ...]] = [("stage", "module", "channels", "map", "tokens", "parameters", "multiply-adds")]
    for site in found.sites:
        name = f"{site.path} (has a block)" if site.occupied else site.path
        shares = map(percent, site.share or (), found.whole)
        rows.append((f"{site.stage}", name, f"{site.channels}", site.size, f"{site.tokens:,}", *shares))
    return Table(rows, left=(1,))


def cost_table(found: Inspection) -> tuple[str, Table]:
    """What a block costs at each site, and chosen ones together."""
    count, chosen = len(found.sites), found.chosen
    title = f"{count} {'block' if count == 1 else 'blocks'} inserted" if chosen else "A block after a stage adds"
    block = found.sites[0].block + "".join(f", {name}={code(value)}" for name, value in found.options.items())
    reading = (
        f"{block}, {str(found.dtype).removeprefix('torch.')}; %: of the network's own; last: MiB "
        f"that training keeps of it for the backward pass of {images(found)}, with bmm, einx or einsum and with sdpa"
    )
    places = ("module", "channels", "map") if chosen else ("stage", "module")
    rows = [(*places, "heads", "parameters", "", "multiply-adds", "", *IMPLS_COUNTED)]
    for site in found.sites:
        place = (site.path, f"{site.channels}", site.size) if chosen else (f"{site.stage}", site.path)
        rows.append((*place, f"{site.options.get('num_heads', 8)}", *cost_cells(found, [site])))
    if chosen and count > 1:
        rows.append(("together", "", "", "", *cost_cells(found, found.sites)))
    return paragraph(f"{title} ({reading}):"), Table(rows, left=(places.index("module"),))


def cost_cells(found: Inspection, sites: Sequence[Site]) -> list[str]:
    numbers = zip(cost_of(sites), found.whole, strict=True)
    shares = [text for added, own in numbers for text in (f"{added:,}", f"+{percent(added, own)}")]
    return shares + [f"{saved(sites, impl) / MEBI:,.1f}" for impl in IMPLS_COUNTED]


def memory_warnings(found: Inspection, groups: Iterable[Sequence[Site]]) -> Iterator[str]:
    """What training would keep of sites for the backward pass beyond the limit, and what to do about it."""
    limit = math.inf if found.memory_limit is None else found.memory_limit
    for sites in groups:
        if over := [impl for impl in IMPLS_COUNTED if saved(sites, impl) > limit]:
            which = f"the {len(sites)} blocks together" if len(sites) > 1 else f"the block at {sites[0].path!r}"
            impls, remedy = "bmm, einx or einsum", "impl='sdpa', a pattern with fewer keys (va.Window(7)), kv_stride"
            if "sdpa" in over:
                impls, remedy = "any implementation", "a smaller input, a smaller batch"
            yield (
                f"{which}: with {impls} training keeps {gibi(min(saved(sites, impl) for impl in over))} for "
                f"{images(found)}, more than the memory limit of {gibi(limit)}: take {remedy} or a later stage"
            )


def advice(found: Inspection) -> str:
    """Where to begin."""
    lines = ["Worth trying:" if found.proposals else "No free stage has a map that attention is worth trying on."]
    for number, proposal in enumerate(found.proposals, 1):
        names = " and ".join(f"{site.path} ({site.size})" for site in proposal.sites)
        parameters, multiply_adds = map(percent, cost_of(proposal.sites), found.whole)
        kept = f"{saved(proposal.sites, 'sdpa') / MEBI:,.1f} MiB kept with sdpa"
        lines.append(paragraph(f"{number}. {names}: {proposal.why}", "   "))
        lines.append(f"     {proposal.call(found.example_input)}")
        lines.append(f"   +{multiply_adds} multiply-adds, +{parameters} parameters, {kept}")
    return "\n".join(lines)


def code(value: object) -> str:
    """A value as one writes it in a call.

    >>> from vision_attn.attention.patterns import Window
    >>> code(Window(7)), code(Window(7, shift=3)), code((1, 2))
    ('va.Window(7)', 'va.Window(7, shift=3)', '(1, 2)')
    """
    ours = type(value).__module__.startswith("vision_attn.")  # a pattern or a position
    return f"va.{value!r}".replace("(size=", "(").replace(", shift=0)", ")") if ours else repr(value)


def saved(sites: Sequence[Site], impl: str) -> int:
    return sum(site.saved[impl] for site in sites)


def images(found: Inspection) -> str:
    return f"{found.batch_size:,} {'image' if found.batch_size == 1 else 'images'}"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:,.1f} %" if whole else "–"


def gibi(count: float) -> str:
    value = count / GIBI
    return f"{value:,.1f} GiB" if value > 0.95 else f"{value:.2g} GiB"


def paragraph(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 110, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)

"""An inspection, and how it prints."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vision_attn.insertion import InsertionReport
from vision_attn.inspection.advice import Proposal, code, memory_warnings, size_warnings
from vision_attn.inspection.memory import IMPLS_COUNTED
from vision_attn.inspection.network import Share
from vision_attn.inspection.sites import Site
from vision_attn.inspection.units import compact, listed, mebi, percent

__all__ = ["Inspection"]

#: Columns of a terminal that text is wrapped to.
WIDTH = 110


@dataclass(frozen=True)
class Inspection:
    """What a network is made of, what a block costs in it, and where one is worth trying; prints as tables.

    >>> from torch import nn
    >>> from vision_attn.inspection import inspect_model
    >>> inspect_model(nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1)), input_size=32, batch_size=1).heading()
    'Sequential on images of 3×32×32: 224 parameters, 55.3 k multiply-adds an image'
    """

    #: its name, or that of its class
    model: str
    #: whether ``vision-attn train`` knows it by that name
    trainable: bool
    #: of one image: 1, channels, rows, columns
    input_shape: tuple[int, ...]
    #: whether that is the size that the model names itself
    own_size: bool
    #: images that one step of training holds
    batch_size: int
    #: of the block and its maps
    dtype: torch.dtype
    #: of the block, beyond its heads
    options: Mapping[str, Any]
    #: what the network itself has and does
    whole: Share
    #: every stage, or the sites that blocks were inserted at
    sites: tuple[Site, ...]
    #: the report of the insertion, if sites were chosen
    inserted: InsertionReport | None
    #: in bytes; None where the system does not say
    memory_limit: int | None
    #: where to begin, the best first; none where sites were chosen
    proposals: tuple[Proposal, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """A line for each map where a block can go that is too small, and for what does not fit into memory."""
        height, width = self.input_shape[2:]
        free = [site for site in self.sites if not site.occupied]
        lines = size_warnings(free, (height, width))
        if self.memory_limit is not None:
            chosen = self.inserted is not None
            lines += memory_warnings(free, self.batch_size, self.memory_limit, together=chosen)
        return tuple(lines)

    def __str__(self) -> str:
        parts = [self.heading()]
        if self.inserted is None:
            title = f"A block after a stage adds ({reading(self)}):"
            parts.append(stage_table(self))
        else:
            count = len(self.sites)
            title = f"{count} {'block' if count == 1 else 'blocks'} inserted ({reading(self)}):"
        parts.append(f"{paragraph(title)}\n{cost_table(self)}")
        parts.append("\n".join(paragraph(f"warning: {line}", "  ") for line in self.warnings))
        if self.inserted is None:
            parts += [occupied(self), advice(self)]
        return "\n\n".join(filter(None, parts))

    def command(self, proposal: Proposal) -> str | None:
        """The flags of ``vision-attn train`` that do what is proposed; None where it has none for that.

        Args:
            proposal: one of its own.
        """
        height, width = self.input_shape[2:]
        if not self.trainable or height != width:
            return None
        return proposal.command(self.model, None if self.own_size else height)

    def heading(self) -> str:
        """One line that says what was looked at."""
        size = "×".join(map(str, self.input_shape[1:]))
        return (
            f"{self.model} on images of {size}: {compact(self.whole.parameters)} parameters, "
            f"{compact(self.whole.multiply_adds)} multiply-adds an image"
        )


def reading(found: Inspection) -> str:
    """How to read the table of costs."""
    options = "".join(f", {name}={code(value)}" for name, value in found.options.items())
    images = f"{found.batch_size:,} {'image' if found.batch_size == 1 else 'images'}"
    dtype = str(found.dtype).removeprefix("torch.")
    return (
        f"AttentionBlock2d{options}, {dtype}; %: of the network's own; last: MiB that training keeps of it for the "
        f"backward pass of {images}, by implementation"
    )


def stage_table(found: Inspection) -> str:
    """The network as it is."""
    header = ("stage", "module", "channels", "map", "tokens", "parameters", "multiply-adds")
    rows = [
        (
            f"{site.stage}",
            f"{site.path} (has a block)" if site.occupied else site.path,
            f"{site.channels}",
            site.size,
            f"{site.tokens:,}",
            percent(site.share.parameters, found.whole.parameters),
            percent(site.share.multiply_adds, found.whole.multiply_adds),
        )
        for site in found.sites
        if site.share is not None
    ]
    return table([header, *rows], left=1)


def cost_table(found: Inspection) -> str:
    """What a block costs at each site."""
    costs = ("heads", "parameters", "", "multiply-adds", "", *IMPLS_COUNTED)
    if found.inserted is None:
        rows = [(f"{site.stage}", site.path, *cost_cells([site], found.whole)) for site in found.sites]
        return table([("stage", "module", *costs), *rows], left=1)
    rows = [(site.path, f"{site.channels}", site.size, *cost_cells([site], found.whole)) for site in found.sites]
    if len(rows) > 1:
        rows.append(("together", "", "", *cost_cells(found.sites, found.whole)))
    return table([("where", "channels", "map", *costs), *rows], left=0)


def cost_cells(sites: Sequence[Site], whole: Share) -> tuple[str, ...]:
    parameters = sum(site.cost.parameters for site in sites)
    multiply_adds = sum(site.cost.multiply_adds for site in sites)
    return (
        f"{sites[0].cost.num_heads}" if len(sites) == 1 else "",
        compact(parameters),
        f"+{percent(parameters, whole.parameters)}",
        compact(multiply_adds),
        f"+{percent(multiply_adds, whole.multiply_adds)}",
        *(mebi(sum(site.cost.saved[impl] for site in sites)) for impl in IMPLS_COUNTED),
    )


def occupied(found: Inspection) -> str:
    """Which stages a block cannot be inserted at."""
    paths = [site.path for site in found.sites if site.occupied]
    have = "it has" if len(paths) == 1 else "they have"
    return (
        paragraph(f"Not proposed, for {have} a block already: {listed(paths)}. remove_(model) takes blocks out.")
        if paths
        else ""
    )


def advice(found: Inspection) -> str:
    """Where to begin."""
    if all(site.occupied for site in found.sites):
        return ""
    if not found.proposals:
        which = "No other stage" if any(site.occupied for site in found.sites) else "No stage"
        return paragraph(f"{which} has a map that attention is worth trying on: see the warnings, or a larger input.")
    lines = ["Worth trying:"]
    for number, proposal in enumerate(found.proposals, 1):
        names = listed([f"{site.path} ({site.size})" for site in proposal.sites])
        lines += [
            paragraph(f"{number}. {names}: {proposal.why}", "   "),
            f"     {proposal.call(None if found.own_size else found.input_shape)}",
            *([f"     {command}"] if (command := found.command(proposal)) else []),
            f"   +{percent(proposal.cost.multiply_adds, found.whole.multiply_adds)} multiply-adds, "
            f"+{percent(proposal.cost.parameters, found.whole.parameters)} parameters, "
            f"{mebi(proposal.saved)} MiB kept with sdpa",
        ]
    return "\n".join(lines)


def paragraph(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def table(rows: Sequence[tuple[str, ...]], left: int) -> str:
    """Columns side by side, to the right but one, which is to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )

"""What was inserted or removed, as a table."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vision_attn.blocks import use_impl

__all__ = ["InsertedBlock", "InsertionReport", "describe"]


@dataclass(frozen=True)
class InsertedBlock:
    """One block in a backbone: where it is and what it costs for one image."""

    #: path of the module whose output the block works on
    site: str
    #: what the block is
    block: str
    channels: int
    #: rows and columns of the map
    height: int
    width: int
    parameters: int
    #: multiply-adds of one forward of one image
    multiply_adds: int
    #: the images that the map's size is for: batch, channels, rows, columns
    input_shape: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Positions of the map, each a token."""
        return self.height * self.width


@dataclass(frozen=True)
class InsertionReport:
    """What was inserted or removed; prints as a table."""

    blocks: tuple[InsertedBlock, ...]
    verb: str = "inserted"

    def __len__(self) -> int:
        return len(self.blocks)

    def __str__(self) -> str:
        header = ("where", "block", "channels", "map", "tokens", "parameters", "multiply-adds")
        rows = [
            (
                block.site,
                block.block,
                f"{block.channels}",
                f"{block.height}×{block.width}",
                f"{block.tokens}",
                f"{block.parameters:,}",
                f"{block.multiply_adds:,}",
            )
            for block in self.blocks
        ]
        total = ("together", "", "", "", "", f"{self.parameters:,}", f"{self.multiply_adds:,}")
        table = [header, *rows, *([total] if len(rows) > 1 else [])]
        widths = [max(len(row[column]) for row in table) for column in range(len(header))]
        lines = [
            "  ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in table
        ]
        sizes = dict.fromkeys("×".join(map(str, block.input_shape[1:])) for block in self.blocks)
        noun = "block" if len(self) == 1 else "blocks"
        return "\n".join(
            [f"{len(self)} {noun} {self.verb}, for an input of {' and '.join(sizes)}", *lines, *self.warnings]
        )

    @property
    def parameters(self) -> int:
        """Parameters of all blocks together."""
        return sum(block.parameters for block in self.blocks)

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of all blocks together, in one forward of one image."""
        return sum(block.multiply_adds for block in self.blocks)

    @property
    def warnings(self) -> tuple[str, ...]:
        """A line for each map that is too small to attend on."""
        return tuple(
            f"warning: the map at {block.site!r} is {block.height}×{block.width}: attention has next to nothing to mix "
            "there; choose an earlier site or a larger input"
            for block in self.blocks
            if block.height <= 2 and block.width <= 2
        )


def describe(site: str, block: nn.Module, shape: tuple[int, ...], input_shape: tuple[int, ...]) -> InsertedBlock:
    _, channels, height, width = shape
    # Counted on the form whose every product is a matrix product that the counter knows.
    meta = copy.deepcopy(block).to("meta").eval()
    with FlopCounterMode(display=False) as counter, use_impl(meta, "bmm"), torch.no_grad():
        parameter = next(meta.parameters(), torch.empty(0))
        x = torch.empty(1, channels, height, width, device="meta", dtype=parameter.dtype)
        y = meta(x)
    if y.shape != x.shape:
        raise ValueError(
            f"block must return maps of the shape it is given; {type(block).__name__} makes {tuple(y.shape)} "
            f"of {tuple(x.shape)}"
        )
    return InsertedBlock(
        site=site,
        block=type(block).__name__,
        channels=channels,
        height=height,
        width=width,
        parameters=sum(p.numel() for p in block.parameters()),
        multiply_adds=counter.get_total_flops() // 2,
        input_shape=input_shape,
    )

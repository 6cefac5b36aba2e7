"""What was inserted or removed, as a table."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention.blocks import use_impl
from vision_attn.checks import product
from vision_attn.networks.insertion.maps import CHILD, Map
from vision_attn.text import Report, Table

#: What is easily forgotten.
OPTIMIZERS = "Make optimizers now: one that was made before does not train these parameters."


@dataclass(frozen=True)
class InsertedBlock:
    """One block in a backbone: where it is and what it costs for one image.

    >>> from vision_attn.networks.insertion import insert_
    >>> report = insert_(nn.Sequential(nn.Conv2d(3, 8, 1)), names="0", example_input=(1, 3, 16, 12))
    >>> report.blocks[0].height, report.blocks[0].width, report.blocks[0].tokens
    (16, 12, 192)
    """

    #: path of the module at which the block runs: the target of the site that was chosen
    site: str
    #: ``"after"`` or ``"before"`` it, or ``"instead"`` of it
    at: str
    #: name of the block's class
    block: str
    #: the options it was made with
    options: Mapping[str, Any]
    #: channels of the map
    channels: int
    #: size of the map along each of its axes: rows and columns
    map_size: tuple[int, ...]
    #: numbers in the block that are learned
    parameters: int
    #: multiply-adds of one forward of one image
    multiply_adds: int
    #: the images that the map's size is for: batch, channels, rows, columns
    input_shape: tuple[int, ...]
    #: how the map lies in its tensor: ``"b c h w"``, ``"b h w c"``, ``"b (1 + h w) c"``, …
    layout: str = "b c h w"
    #: where the tensor is in what the module takes or gives: an index, a key, or None for the value itself
    element: int | str | None = None
    #: path from the module to the block
    held: str = CHILD
    #: whether the number of heads was fitted to the channels, since none was asked for
    fitted_heads: bool = False
    #: whether the output of the network depends on the map
    read: bool = True

    @property
    def height(self) -> int:
        """Rows of the map; 1 for a map with one axis."""
        return (1, *self.map_size)[-2]

    @property
    def width(self) -> int:
        """Columns of the map."""
        return self.map_size[-1]

    @property
    def size(self) -> str:
        """The size of the map in words: rows × columns."""
        return "×".join(map(str, self.map_size))

    @property
    def tokens(self) -> int:
        """Positions of the map, each a token."""
        return product(self.map_size)


@dataclass(frozen=True, repr=False)
class InsertionReport(Report):
    """What was inserted or removed; prints as a table.

    >>> from vision_attn.networks.insertion import insert_
    >>> print(insert_(nn.Sequential(nn.Conv2d(3, 8, 1)), names="0", example_input=(1, 3, 16, 16)))
    1 block inserted, for an input of 3×16×16
    where  block             channels    map  tokens  parameters  multiply-adds
    0      AttentionBlock2d         8  16×16     256         312      1,114,112
    Make optimizers now: one that was made before does not train these parameters.
    """

    #: in the order of their sites
    blocks: tuple[InsertedBlock, ...]
    #: what was done with them
    verb: str = "inserted"

    def __len__(self) -> int:
        return len(self.blocks)

    def parts(self) -> list[str | Table]:
        header = ("where", "block", "channels", "map", "tokens", "parameters", "multiply-adds")
        rows = [
            (
                block.site,
                block.block,
                f"{block.channels}",
                block.size,
                f"{block.tokens}",
                f"{block.parameters:,}",
                f"{block.multiply_adds:,}",
            )
            for block in self.blocks
        ]
        total = ("together", "", "", "", "", f"{self.parameters:,}", f"{self.multiply_adds:,}")
        sizes = dict.fromkeys("×".join(map(str, block.input_shape[1:])) for block in self.blocks)
        noun = "block" if len(self) == 1 else "blocks"
        return [
            f"{len(self)} {noun} {self.verb}" + (f", for an input of {' and '.join(sizes)}" if sizes else ""),
            Table([header, *rows, *([total] if len(rows) > 1 else [])], left=(0, 1)),
            *[
                f"num_heads={block.options['num_heads']} at {block.site!r}, as fits its {block.channels} channels"
                for block in self.blocks
                if block.fitted_heads
            ],
            *([OPTIMIZERS] if self.blocks and self.verb != "removed" else []),
            *self.warnings,
        ]

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
        """A line for each map that is too small to attend on, or that nothing comes of."""
        small = [
            f"warning: the map at {block.site!r} is {block.size}: attention has next to nothing to mix there; choose "
            "an earlier site or a larger input"
            for block in self.blocks
            if max(block.map_size) <= 2
        ]
        unread = [
            f"warning: nothing that the network gives depends on the map at {block.site!r}, as where its head reads a "
            "class token alone: the block there has no effect; choose an earlier site"
            for block in self.blocks
            if not block.read
        ]
        return (*small, *unread)


def describe(
    block: nn.Module,
    taken: Map,
    at: str,
    options: Mapping[str, Any],
    input_shape: tuple[int, ...],
    given: Map | None = None,
) -> InsertedBlock:
    """The record of a block for a map, once it is seen to make a map of the same shape, or of what it replaces."""
    shape, expected = taken.shape[1:], (given or taken).shape[1:]
    try:
        output, multiply_adds = run_on_meta(block, shape)
    except Exception as error:
        ours = {2: "AttentionBlock1d", 3: "AttentionBlock2d", 4: "AttentionBlock3d"}[len(shape)]
        raise ValueError(
            f"block must take the map at {taken.target!r}, {(1, *shape)}, as {ours} does; {type(block).__name__} "
            f"does not ({error})"
        ) from error
    if tuple(output.shape[1:]) != expected:
        wanted = "maps of the shape it is given" if given is None else f"maps of {expected}, as what it replaces"
        raise ValueError(
            f"block must return {wanted}; {type(block).__name__} makes {tuple(output.shape)} of {(1, *shape)}"
        )
    return InsertedBlock(
        site=taken.target,
        at=at,
        block=type(block).__name__,
        options=options,
        channels=shape[0],
        map_size=shape[1:],
        parameters=sum(p.numel() for p in block.parameters()),
        multiply_adds=multiply_adds,
        input_shape=input_shape,
        element=taken.element if given is None else None,
        layout=str(taken.layout),
        read=taken.read,
        held=taken.held,
    )


def count_multiply_adds(module: nn.Module, shape: tuple[int, ...]) -> int:
    """The multiply-adds of one forward of one image or map, found without computing anything.

    >>> from vision_attn.attention.blocks import Attention2d
    >>> count_multiply_adds(Attention2d(64, 4, device="meta"), (1, 64, 14, 14))  # 4·64²·196 + 2·64·196²
    8128512
    """
    return run_on_meta(module, shape[1:])[1]


def run_on_meta(module: nn.Module, shape: tuple[int, ...]) -> tuple[Tensor, int]:
    """What a module makes of a map of this shape, which has no values, and its multiply-adds."""
    from torch.utils.flop_counter import FlopCounterMode  # which loads Triton

    # Counted on the form whose every product is a matrix product that the counter knows.
    meta = copy.deepcopy(module).to("meta").eval()
    parameter = next(meta.parameters(), torch.empty(0))
    with FlopCounterMode(display=False) as counter, use_impl(meta, "bmm"), torch.no_grad():
        output = meta(torch.empty(1, *shape, device="meta", dtype=parameter.dtype))
    return output, counter.get_total_flops() // 2

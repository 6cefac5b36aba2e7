"""The record of a block: where it is, how its map lies in the tensors there, and what it costs; records as a table."""

from __future__ import annotations

import copy
import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention.blocks import use_impl
from vision_attn.checks import product
from vision_attn.text import Report, Table

#: The name under which a block becomes a child of its target, and so the part of its keys that tells it.
CHILD = "inserted"

#: An index of a tuple or list, a key of a dictionary, or None where the value is the tensor itself.
Element = int | str | None

#: What is easily forgotten.
OPTIMIZERS = "Make optimizers now: one that was made before does not train these parameters."


@dataclass(frozen=True)
class InsertedBlock:
    """One block in a backbone: where it is and what it costs for one image.

    >>> from vision_attn.networks.insertion import insert_
    >>> report = insert_(nn.Sequential(nn.Conv2d(3, 8, 1)), names="0", example_input=(1, 3, 16, 12))
    >>> report.blocks[0].map_size, report.blocks[0].tokens
    ((16, 12), 192)
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
    element: Element = None
    #: path from the module to the block
    held: str = CHILD
    #: whether the output of the network depends on the map
    read: bool = True
    #: how a block begins as the identity that does not by itself, in words
    begins: str = ""
    #: the options of the :class:`ExactBlock` that it is in; none where it is in none
    around: Mapping[str, Any] = field(default_factory=dict)

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
    #: by how much the output of the network changes, as a share of it
    changed: float = 0.0

    def __len__(self) -> int:
        return len(self.blocks)

    def parts(self) -> list[str | Table]:
        rows = [("where", "block", "channels", "map", "tokens", "parameters", "multiply-adds")]
        for one in self.blocks:
            costs = f"{one.tokens}", f"{one.parameters:,}", f"{one.multiply_adds:,}"
            rows.append((one.site, one.block, f"{one.channels}", one.size, *costs))
        if len(self) > 1:
            rows.append(("together", "", "", "", "", f"{self.parameters:,}", f"{self.multiply_adds:,}"))
        sizes = " and ".join(dict.fromkeys("×".join(map(str, one.input_shape[1:])) for one in self.blocks))
        heading = f"{len(self)} {'block' if len(self) == 1 else 'blocks'} {self.verb}, for an input of {sizes}"
        kinds = dict.fromkeys((one.block, one.begins) for one in self.blocks if one.begins)
        exact = (
            [f"{block} begins as the identity: {begins}" for block, begins in kinds] if self.verb == "inserted" else []
        )
        exact += [f"the output of the network changes by {100 * self.changed:.2g} %"] if self.changed else []
        notes = [*exact, *([OPTIMIZERS] if self.verb != "removed" else []), *self.warnings]
        return [heading, Table(rows, left=(0, 1)), *notes] if self.blocks else [f"no block {self.verb}"]

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
        """A line for each map that is too small to attend on, or that the output does not depend on."""
        lines = []
        for one in self.blocks:
            if max(one.map_size) <= 2:
                remedy = "choose an earlier site or a larger input"
                lines.append(f"warning: the map at {one.site!r} is {one.size}, with little to attend to: {remedy}")
            if not one.read:
                what = "the output of the network does not depend on the map"
                lines.append(f"warning: {what} at {one.site!r}: choose an earlier site")
        return tuple(lines)


# --- how a map lies in a tensor: "b c h w", "b h w c", or as tokens "b (1 + h w) c" after a class token ---------------


def prefix_of(layout: str) -> int:
    """How many tokens come before the grid: 5 in ``"b (5 + h w) c"``."""
    first = layout.partition("(")[2].partition(" ")[0]
    return int(first) if first.isdigit() else 0


def map_shape(shape: tuple[int, ...], layout: str, size: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Batch, channels and size of the map in a tensor of this shape; the size of a grid is not in the shape."""
    if layout.startswith("b c"):
        return shape
    return (shape[0], shape[-1], *(size if "(" in layout else shape[1:-1]))


def to_map(x: Tensor, layout: str, size: tuple[int, ...]) -> Tensor:
    """The map ``(b, c, h, w)`` in a tensor."""
    if layout.startswith("b c"):
        return x
    if "(" not in layout:
        return x.movedim(-1, 1)
    return x[:, prefix_of(layout) :].transpose(1, 2).unflatten(2, size)


def of_map(x: Tensor, y: Tensor, layout: str) -> Tensor:
    """A tensor like ``x`` with another map ``(b, c, h, w)`` for its own."""
    if layout.startswith("b c"):
        return y
    if "(" not in layout:
        return y.movedim(1, -1)
    tokens, prefix = y.flatten(2).transpose(1, 2), prefix_of(layout)
    return torch.cat([x[:, :prefix], tokens], dim=1) if prefix else tokens


def token_grid(tokens: int, rows: int, columns: int) -> tuple[int, int] | None:
    """Rows and columns of a grid of so many tokens with the aspect of the image; None where there is no such grid."""
    if tokens < 2:  # one token is a class, or a vector
        return None
    around = math.sqrt(tokens * rows / columns)
    for height in range(max(1, math.floor(around) - 1), math.ceil(around) + 2):
        width, rest = divmod(tokens, height)
        if rest == 0 and abs(width - height * columns / rows) < 1:
            return height, width
    return None


def change(value: Any, element: Element, function: Callable[[Tensor], Tensor]) -> Any:
    """A value of the same kind with a function applied to one of its tensors."""
    if element is None:
        return function(value)
    if isinstance(element, str):
        changed = value.copy()
        changed[element] = function(value[element])
        return changed
    items = [function(item) if index == element else item for index, item in enumerate(value)]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


# --- what a block costs --------------------------------------------------------------------------------------------


def cost(block: nn.Module, site: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> tuple[int, int]:
    """The parameters and multiply-adds of a block, once it is seen to make maps of the expected shape."""
    try:
        output, multiply_adds = run_on_meta(block, shape)
    except Exception as error:
        name = type(block).__name__
        why = reason(error)
        raise ValueError(f"block must take the map {(1, *shape)} at {site!r}; {name} does not ({why})") from error
    if tuple(output.shape[1:]) != expected:
        made = f"{type(block).__name__} makes {tuple(output.shape)} of {(1, *shape)}"
        raise ValueError(f"block must return a map {(1, *expected)} at {site!r}; {made}")
    return sum(p.numel() for p in block.parameters()), multiply_adds


def reason(error: BaseException) -> str:
    """What an error says or, where it says nothing, the line of code that raised it, or had it raised by a check."""
    if str(error):
        return str(error)
    library = str(Path(torch.__file__).parent)
    lines = [one.line for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(library)]
    return f"{type(error).__name__} at {lines[-1]!r}"


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

    own = next(module.parameters(), torch.empty(0))
    for device in ("meta", own.device):
        # Counted on the form whose every product is a matrix product that the counter knows.
        copied = copy.deepcopy(module).to(device).eval()
        with FlopCounterMode(display=False) as counter, use_impl(copied, "bmm"), torch.no_grad():
            try:
                return copied(torch.zeros(1, *shape, device=device, dtype=own.dtype)), counter.get_total_flops() // 2
            except Exception:
                if device != "meta":  # what makes tensors on the CPU, or reads values, runs with values alone
                    raise
    raise AssertionError


def fitting_heads(channels: int, most: int = 8) -> int:
    """The largest number of heads up to some that divides the channels.

    >>> fitting_heads(64), fitting_heads(20), fitting_heads(185), fitting_heads(64, 5)
    (8, 5, 5, 4)
    """
    return next(count for count in range(min(most, channels), 0, -1) if channels % count == 0)

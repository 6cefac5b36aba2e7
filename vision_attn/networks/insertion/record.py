"""The record of a block: where it is, how its map lies in the tensors there, and what it costs; records as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vision_attn.checks import product
from vision_attn.networks.insertion.costs import NOTHING, Share, together
from vision_attn.text import Report, Table, shorten

#: The name under which a block becomes a child of its target, and so the part of its keys that tells it.
CHILD = "inserted"

#: An index of a tuple or list, a key of a dictionary, or None where the value is the tensor itself.
Element = int | str | None

#: Tokens beyond which comparing every two of them costs more than most networks do.
MOST_TOKENS = 4096

OPTIMIZERS = "Create optimizers and EMA copies now: existing ones do not contain these parameters."
FUSE_FIRST = "{}: freeze, fuse and quantize this network before inserting blocks at norms and convolutions."


@dataclass(frozen=True)
class InsertedBlock:
    """One block in a backbone: where it is and what it costs for one image.

    >>> from torch import nn
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
    #: pairs of tokens that full attention in it compares, each with each; in no file
    compared: int = field(default=0, compare=False, repr=False)

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

    >>> from torch import nn
    >>> from vision_attn.networks.insertion import insert_
    >>> print(insert_(nn.Sequential(nn.Conv2d(3, 8, 1)), names="0", example_input=(1, 3, 16, 16)))
    1 block inserted, for an input of 3×16×16
    where  block             channels    map  tokens  parameters  multiply-adds
    0      AttentionBlock2d         8  16×16     256         312      1,114,112
    together +975.0 % parameters, +18,133.3 % multiply-adds
    Create optimizers and EMA copies now: existing ones do not contain these parameters.
    """

    #: in the order of their sites
    blocks: tuple[InsertedBlock, ...]
    #: what was done with them
    verb: str = "inserted"
    #: what the network had and did before; None where that was not looked at
    whole: Share | None = None
    #: what was taken out of it for them
    gone: Share = NOTHING
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
        notes = [] if self.whole is None else [together(self.added, self.whole)]
        kinds = dict.fromkeys((one.block, one.begins) for one in self.blocks if one.begins)
        notes += [f"{block} begins as the identity: {begins}" for block, begins in kinds if self.verb == "inserted"]
        notes += [f"the output of the network changes by {100 * self.changed:.2g} %"] if self.changed else []
        fusible = shorten(repr(one.site) for one in self.blocks if one.held.startswith("."))
        notes += [FUSE_FIRST.format(fusible)] if fusible and self.verb == "inserted" else []
        notes += [OPTIMIZERS] if self.verb != "removed" else []
        notes += [f"warning: {line}" for line in self.warnings]
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
    def added(self) -> Share:
        """What the network has and does more than before; less than nothing where the modules that went had more."""
        return Share(self.parameters - self.gone.parameters, self.multiply_adds - self.gone.multiply_adds)

    @property
    def warnings(self) -> tuple[str, ...]:
        """A line each for the maps that are too small to attend on, too large, and those that the output ignores."""
        large = [one for one in self.blocks if one.compared > MOST_TOKENS**2]
        tokens, cost = max((one.tokens for one in large), default=0), sum(one.multiply_adds for one in large) / 1e9
        remedy = "take pattern=va.Window(7), a kv_stride or another site"
        kinds = {
            "little to attend to at {}: choose an earlier site or a larger input": [
                one for one in self.blocks if max(one.map_size) <= 2
            ],
            "the output of the network does not depend on the map at {}: choose an earlier site": [
                one for one in self.blocks if not one.read
            ],
            f"full attention at {{}} compares up to {tokens:,} tokens, {cost:,.1f} G multiply-adds: {remedy}": large,
        }
        named = {text: ", ".join(f"{one.site!r} ({one.size})" for one in found) for text, found in kinds.items()}
        return tuple(text.format(sites) for text, sites in named.items() if sites)


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


def fitting_heads(channels: int, most: int = 8) -> int:
    """The largest number of heads up to some that divides the channels.

    >>> fitting_heads(64), fitting_heads(20), fitting_heads(185), fitting_heads(64, 5)
    (8, 5, 5, 4)
    """
    return next(count for count in range(min(most, channels), 0, -1) if channels % count == 0)

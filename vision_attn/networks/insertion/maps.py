"""A map of the image among the tensors of a network: where it is, how it lies in its tensor, and whether it is one.

How that is decided, here and in ``dry_run``. By its shape a tensor can be a map if it has the batch and, give or take a
cell, the aspect of the image: as ``(b, c, h, w)``, as ``(b, h, w, c)``, or as tokens ``(b, t, c)`` of a grid with class
and register tokens before them. It is none if it holds whole numbers, or a number for each pair of the tokens that a
module around it takes, which are the weights of an attention. In an image twice as wide it must be a map in the same
layout again, if the network takes such an image. Of another aspect, or with one or three axes, it is a map if each of
its axes grows with that axis of the image and with no other. What still fits two layouts is read as the network's maps
without doubt all lie. The shape of tokens says little, and any shape does where the network takes one size of image:
there a change at each of four places of the image must show most at the cell that stands for that place. Of several
maps that a module gives, the one is meant on which the output of the network depends: with NaN for it, NaN comes out.
Where a network makes images of numbers that lie nowhere, a tensor with its channels second is a map.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.networks.insertion.backbone import Example, Hook, run_quietly

#: The name under which a block becomes a child of its target, and so the part of its keys that tells it.
CHILD = "inserted"

#: An index of a tuple or list, a key of a dictionary, or ``None`` where the value is the tensor itself.
Element = int | str | None

#: How many tokens a sequence may begin with where the model does not say it: of a class, of a class and a teacher, and
#: four registers without and with the first.
PREFIXES = (0, 1, 2, 4, 5)

#: Where the image is changed, as shares of its height and width. No two are mirror images of each other.
PLACES = ((0.2, 0.3), (0.75, 0.6), (0.4, 0.85), (0.9, 0.15))

#: How much of either side is changed.
SIDE = 1 / 8


@dataclass(frozen=True)
class Form:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Layout:
    """Where batch, channels and the axes of a map are in a tensor."""

    #: ``"b c h w"``, ``"b h w c"``, the same with ``w`` or ``t h w``, or ``"b t c"`` for tokens
    axes: str
    #: rows and columns that the tokens are, row-major
    grid: tuple[int, int] | None = None
    #: class and register tokens before them, which are left alone
    prefix: int = 0

    def __str__(self) -> str:
        return self.axes if self.axes != "b t c" else f"b ({self.prefix} + h w) c" if self.prefix else "b (h w) c"

    @property
    def is_first(self) -> bool:
        """Whether channels are second, as convolutions take them."""
        return self.axes.startswith("b c")

    def map_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The batch, channels and size of the map in a tensor of a shape."""
        if self.grid is not None:
            return (shape[0], shape[2], *self.grid)
        return shape if self.is_first else (shape[0], shape[-1], *shape[1:-1])

    def to_map(self, x: Tensor) -> Tensor:
        """The map, ``(b, c, h, w)``."""
        if self.grid is None:
            return x if self.is_first else x.movedim(-1, 1)
        return x[:, self.prefix :].transpose(1, 2).unflatten(2, self.grid)

    def of_map(self, x: Tensor, y: Tensor) -> Tensor:
        """A tensor like ``x`` with another map, ``(b, c, h, w)``, for its own."""
        if self.grid is None:
            return y if self.is_first else y.movedim(1, -1)
        tokens = y.flatten(2).transpose(1, 2)
        return torch.cat([x[:, : self.prefix], tokens], dim=1) if self.prefix else tokens


def prefix_of(layout: str) -> int:
    """How many tokens come before the grid: 5 in ``"b (5 + h w) c"``."""
    first = layout.partition("(")[2].split(" ")[0]
    return int(first) if first.isdigit() else 0


def to_map(x: Tensor, layout: str, size: tuple[int, ...]) -> Tensor:
    """The map ``(b, c, h, w)`` that lies in a tensor."""
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


#: Maps with their channels second.
FIRST = Layout("b c h w")


def layouts_of(dims: int) -> tuple[Layout, ...]:
    """The layouts of a tensor with so many axes that is one map; channels second, then channels last."""
    axes = {3: "w", 4: "h w", 5: "t h w"}.get(dims)
    return () if axes is None else (Layout(f"b c {axes}"), Layout(f"b {axes} c"))


@dataclass(frozen=True)
class Map:
    """A map that a module, its **target**, takes or gives: all that a dry run measures of a place for a block."""

    #: path of the target
    target: str
    #: whether the map is what the target gives, ``"after"`` it, or takes, ``"before"`` it
    at: str
    #: where the map is in that
    element: Element
    #: of the tensor that it lies in
    form: Form
    #: how it lies there
    layout: Layout
    #: whether what the network gives depends on it
    read: bool = True
    #: path from the target to the block: a child of it, unless it minds how many children it has
    held: str = CHILD

    @property
    def shape(self) -> tuple[int, ...]:
        """Batch, channels, rows, columns, or as many axes as there are."""
        return self.layout.map_shape(self.form.shape)


def forms_in(value: object) -> dict[Element, Form]:
    """The tensors in what a module takes or gives, without their values."""
    if isinstance(value, Tensor):
        return {None: Form(tuple(value.shape), value.dtype, value.device)}
    items: list[tuple[Element, object]] = []
    if isinstance(value, Mapping):
        items = [(key, item) for key, item in value.items() if isinstance(key, str)]
    elif isinstance(value, (tuple, list)):
        items = list(enumerate(value))
    return {key: forms_in(item)[None] for key, item in items if isinstance(item, Tensor)}


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


def consistent_layouts(shape: tuple[int, ...], example: Example, prefix: int | None = None) -> set[Layout]:
    """The layouts in which a tensor of that shape can be a map of an example's images; none if it is no map.

    A map keeps the aspect of the image, give or take a cell of rounding; frames of a video may become any number.
    """
    size = example.size
    if not shape or shape[0] != example.shape[0] or 0 in shape:
        return set()
    if len(shape) == 2 + len(size):
        return {layout for layout in layouts_of(len(shape)) if same_aspect(layout.map_shape(shape)[2:], example)}
    if len(shape) == 3 and len(size) == 2:
        prefixes = PREFIXES if prefix is None else {0, prefix}
        grids = ((count, token_grid(shape[1] - count, *size)) for count in prefixes)
        return {Layout("b t c", grid, count) for count, grid in grids if grid is not None}
    return set()


def same_aspect(size: tuple[int, ...], example: Example) -> bool:
    if len(size) == 1:
        return True
    (height, width), (rows, columns) = size[-2:], example.size[-2:]
    if example.count:  # which the network scales and pads itself, to a square or to multiples
        return 0.4 < height * columns / (width * rows) < 2.5
    return abs(height * columns - width * rows) <= rows + columns


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


def misaligned(model: nn.Module, maps: Sequence[Map], example: Example) -> set[str]:
    """The targets of those maps that do not change most where the image does.

    Each of four places of the image is changed in turn, and three of them at least must show, give or take a cell: deep
    in a network every position sees the whole image, but none as much of a place as the one that stands for it.
    """
    if not maps or example.image.is_meta or len(example.size) != 2:
        return set()
    generator = torch.Generator().manual_seed(0)
    noise = example.changed(lambda images: 0.1 * torch.randn(images.shape, generator=generator).to(images))
    plain = seen(model, maps, noise)
    touched = [seen(model, maps, noise.changed(partial(touch, y=y, x=x))) for y, x in PLACES]
    wrong = set()
    for one in maps:
        changes = [one.layout.to_map(tensors[one.target] - plain[one.target])[0] for tensors in touched]
        if not shows(torch.stack(changes).double().norm(dim=1).nan_to_num()):
            wrong.add(one.target)
    return wrong


def shows(changes: Tensor) -> bool:
    """Whether what changes for each place ``(places, h, w)`` does so there.

    A cell is judged by its change, or by how much of its change is due to one place: deep in a network some cells
    change more than others with anything.
    """
    share = changes / (changes.mean(0) + 1e-3 * changes.max() + torch.finfo(changes.dtype).tiny)
    return max(hits(changes), hits(share)) >= 3


def hits(changes: Tensor) -> int:
    """For how many places the cell that changes most is within the place, or one cell beside it."""
    sides = changes.shape[1:]
    count = 0
    for place, change in zip(PLACES, changes, strict=True):
        cell = divmod(int(change.argmax()), sides[1])
        off = [
            abs(index + 0.5 - share * side) - side * SIDE / 2
            for index, share, side in zip(cell, place, sides, strict=True)
        ]
        count += max(off) <= 1.5 and bool(change.any())
    return count


def touch(images: Tensor, y: float, x: float) -> Tensor:
    """The images with a square around a place turned to large values."""
    rows, columns = images.shape[-2:]
    high, wide = math.ceil(rows * SIDE), math.ceil(columns * SIDE)
    top = min(max(0, round(y * rows - high / 2)), rows - high)
    left = min(max(0, round(x * columns - wide / 2)), columns - wide)
    touched = images.clone()
    touched[..., top : top + high, left : left + wide] += 3
    return touched


def seen(model: nn.Module, maps: Sequence[Map], example: Example) -> dict[str, Tensor]:
    """The tensors that maps lie in, for an example, by their targets."""
    found: dict[str, Tensor] = {}

    def look(one: Map) -> Hook:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            value = output if one.at == "after" else kwargs if isinstance(one.element, str) else args
            found[one.target] = (value if one.element is None else value[one.element]).clone()

        return hook

    run_quietly(model, example, {one.target: look(one) for one in maps})
    return found

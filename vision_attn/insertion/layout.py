"""How a feature map lies in a tensor: channels first, channels last, or as the tokens of a sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FIRST", "LAST", "Layout", "consistent_layouts"]

#: How many tokens a sequence may begin with where the model does not say it: of a class, of a class and a teacher, and
#: four registers without and with the first.
PREFIXES = (0, 1, 2, 4, 5)


@dataclass(frozen=True)
class Layout:
    """Where batch, channels, rows and columns of a map are in a tensor."""

    #: ``"b c h w"``, ``"b h w c"``, or ``"b t c"`` for tokens
    axes: str
    #: rows and columns that the tokens are, row-major
    grid: tuple[int, int] | None = None
    #: class and register tokens before them, which are left alone
    prefix: int = 0

    def __str__(self) -> str:
        return self.axes if self.axes != "b t c" else f"b ({self.prefix} + h w) c" if self.prefix else "b (h w) c"

    def map_shape(self, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
        """The batch, channels, rows and columns of a tensor of a shape."""
        if self.grid is not None:
            return (shape[0], shape[2], *self.grid)
        batch, *rest = shape
        channels, height, width = rest if self == FIRST else (rest[2], rest[0], rest[1])
        return batch, channels, height, width

    def to_map(self, x: Tensor) -> Tensor:
        """The map, ``(b, c, h, w)``."""
        if self.grid is None:
            return x if self == FIRST else x.permute(0, 3, 1, 2)
        return x[:, self.prefix :].transpose(1, 2).unflatten(2, self.grid)

    def of_map(self, x: Tensor, y: Tensor) -> Tensor:
        """A tensor like ``x`` with another map, ``(b, c, h, w)``, for its own."""
        if self.grid is None:
            return y if self == FIRST else y.permute(0, 2, 3, 1)
        tokens = y.flatten(2).transpose(1, 2)
        return torch.cat([x[:, : self.prefix], tokens], dim=1) if self.prefix else tokens


#: Maps with their channels second, as convolutions take them.
FIRST = Layout("b c h w")
#: Maps with their channels last.
LAST = Layout("b h w c")


def consistent_layouts(
    shape: tuple[int, ...], batch: int, image_size: tuple[int, int], prefix: int | None = None
) -> set[Layout]:
    """The layouts in which a tensor of that shape can be a map of an image of that size; none if it is no map.

    A map keeps the aspect of the image, give or take a cell of rounding.
    """
    if not shape or shape[0] != batch or 0 in shape:
        return set()
    rows, columns = image_size
    if len(shape) == 4:
        return {
            layout
            for layout in (FIRST, LAST)
            for height, width in [layout.map_shape(shape)[2:]]
            if abs(height * columns - width * rows) <= rows + columns and height <= rows and width <= columns
        }
    if len(shape) == 3:
        prefixes = PREFIXES if prefix is None else {0, prefix}
        grids = ((count, token_grid(shape[1] - count, rows, columns)) for count in prefixes)
        return {Layout("b t c", grid, count) for count, grid in grids if grid is not None}
    return set()


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

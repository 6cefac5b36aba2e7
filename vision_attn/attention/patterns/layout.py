"""Where the tokens of each group lie on a feature map: by the pattern's line, or by one flat index.

A layout that is a plain reshape has the line, which einx and torch run. The tokens of any other layout (padded,
shifted, overlapping) are gathered with one index, and put back with another. Each group is a small feature map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

from vision_attn.attention.patterns.line import BoundRearrangement, Rearrangement
from vision_attn.attention.patterns.pattern import AxisLayout
from vision_attn.checks import product

#: The lengths of the axes of a feature map.
Size = Sequence[int]


class TokenLayout:
    """The feature map of the queries or of the keys, cut into groups of tokens."""

    def __init__(
        self, size: Size, axes: Sequence[AxisLayout], line: Rearrangement | None, *, is_whole: bool, zero_padded: bool
    ) -> None:
        self.size: tuple[int, ...] = tuple(size)
        self.axes = axes
        self.is_whole = is_whole  # one group: the map
        self.zero_padded = zero_padded  # tokens beyond the map are zeros
        self.groups: int = product([axis.positions.shape[0] for axis in axes])
        #: the size of a group, a small feature map
        self.group_size: tuple[int, ...] = tuple([axis.positions.shape[1] for axis in axes])
        self.tokens: int = product(self.group_size)
        sizes = [axis.sizes for axis in axes if axis.sizes is not None]
        self.line: BoundRearrangement | None = None
        if line is not None and len(sizes) == len(axes):
            self.line = BoundRearrangement(line, sizes)
            return
        index, positions = self.index().flatten(), product(size)
        #: the position of each token, group by group; beyond the map, a row of zeros or any position
        self.gather_index: Tensor = beyond(index, positions) if zero_padded else index.clamp(min=0)
        #: the token at each position
        self.inverse_index: Tensor = inverse_index(index, positions)

    def index(self) -> Tensor:
        """Return the position of each token on the map, row-major, ``(groups, tokens)``; -1 beyond it."""
        positions = [axis.positions for axis in self.axes]
        strides = [product(self.size[axis + 1 :]) for axis in range(len(positions))]
        index = outer([at * stride for at, stride in zip(positions, strides, strict=True)], torch.add)
        return index.masked_fill(outer([at < 0 for at in positions], torch.logical_or), -1)


def is_fixed(size: Size) -> bool:
    """Return True if lengths are numbers, outside of graphs and where ``torch.export`` records a graph for one size."""
    exporting = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
    return not torch.compiler.is_compiling() or (exporting and all(type(length) is int for length in size))


def inverse_index(index: Tensor, positions: int) -> Tensor:
    """Return the token at each of so many positions, for the position ``(tokens,)`` of each token; -1 beyond them."""
    order = torch.arange(index.numel(), device=index.device)
    return index.new_zeros(positions + 1).scatter(0, beyond(index, positions), order)[:positions]


def beyond(index: Tensor, positions: int) -> Tensor:
    """Point from -1 to the row behind all positions."""
    return torch.where(index < 0, positions, index)


def outer(along: Sequence[Tensor], combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Combine the values along each axis for all axes, the first axis first.

    They are ``(tiles, tokens)`` or ``(tiles, queries, keys)`` of one axis; the result is that of all axes together.

    >>> outer([torch.tensor([[10, 20]]), torch.tensor([[1, 2, 3]])], torch.add)
    tensor([[11, 12, 13, 21, 22, 23]])
    """
    rank, kinds = len(along), along[0].dim()
    views = []
    for axis, part in enumerate(along):
        view = [1] * (kinds * rank)  # tiles of every axis, then queries of every axis, then keys
        view[axis::rank] = part.shape
        views.append(part.reshape(view))
    combined = reduce(combine, views)
    for kind in reversed(range(kinds)):
        combined = combined.flatten(kind * rank, (kind + 1) * rank - 1)
    return combined

"""The positions of the tokens of each group on the feature map.

If a layout is a plain reshape, einx and torch run the expression of the pattern. In all other cases (padded, shifted or
overlapping groups), tokens are gathered with a flat index, and scattered back with the inverse index. Each group is a
small feature map.
"""

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

from vision_attn.attention.patterns.pattern import AxisLayout
from vision_attn.attention.patterns.rearrangement import BoundRearrangement, Rearrangement
from vision_attn.checks import product

#: The lengths of the axes of a feature map.
Size = Sequence[int]


class TokenLayout:
    """The partition of a feature map of queries, or of keys, into groups of tokens."""

    def __init__(
        self, size: Size, axes: Sequence[AxisLayout], rearrangement: Rearrangement | None, zero_padded: bool = False
    ) -> None:
        self.size: tuple[int, ...] = tuple(size)
        self.axes = axes
        self.zero_padded = zero_padded  # tokens outside the feature map are zeros
        self.groups: int = product([axis.positions.shape[0] for axis in axes])
        #: The size of a group as a small feature map.
        self.group_size: tuple[int, ...] = tuple([axis.positions.shape[1] for axis in axes])
        self.tokens: int = product(self.group_size)
        sizes = [axis.sizes for axis in axes if axis.sizes is not None]
        self.rearrangement: BoundRearrangement | None = None
        #: True for one group whose tokens are all positions in row-major order.
        self.is_identity: bool = False
        if rearrangement is not None and len(sizes) == len(axes):
            self.rearrangement = BoundRearrangement(rearrangement, sizes)
            self.is_identity = rearrangement.is_identity
            return
        index, positions = self.index().flatten(), product(size)
        #: The position of each token, in the order of the groups. Padding has the index of an additional row of zeros,
        #: or, if it is masked, the index 0.
        self.gather_index: Tensor = padding_last(index, positions) if zero_padded else index.clamp(min=0)
        #: The index of the token at each position.
        self.inverse_index: Tensor = inverse_index(index, positions)

    def index(self) -> Tensor:
        """Return the row-major position of each token, ``(groups, tokens)``; -1 for padding."""
        positions = [axis.positions for axis in self.axes]
        strides = [product(self.size[axis + 1 :]) for axis in range(len(positions))]
        index = outer([at * stride for at, stride in zip(positions, strides, strict=True)], torch.add)
        return index.masked_fill(outer([at < 0 for at in positions], torch.logical_or), -1)


def inverse_index(index: Tensor, positions: int) -> Tensor:
    """Return the index of the token at each position; ``index`` is the position of each token, or -1 for padding."""
    order = torch.arange(index.numel(), device=index.device)
    return index.new_zeros(positions + 1).scatter(0, padding_last(index, positions), order)[:positions]


def padding_last(index: Tensor, positions: int) -> Tensor:
    """Replace -1 (padding) by the index of an additional position at the end, which is dropped after a scatter."""
    return torch.where(index < 0, positions, index)


def outer(values: Sequence[Tensor], combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Combine one tensor per axis into one tensor for all combinations of their elements, in row-major order.

    Args:
        values: for each axis, ``(tiles, tokens)`` or ``(tiles, queries, keys)``.
        combine: function of two tensors that broadcast.

    Returns:
        ``(groups, tokens)`` or ``(groups, queries, keys)``, each the product of the lengths of all axes.

    >>> outer([torch.tensor([[10, 20]]), torch.tensor([[1, 2, 3]])], torch.add)
    tensor([[11, 12, 13, 21, 22, 23]])
    """

    def combine_two(first: Tensor, second: Tensor) -> Tensor:
        first = first.reshape([n for length in first.shape for n in (length, 1)])
        combined = combine(first, second.reshape([n for length in second.shape for n in (1, length)]))
        for axis in range(second.dim()):  # the pair of tiles, then the pairs of queries and of keys
            combined = combined.flatten(axis, axis + 1)
        return combined

    return reduce(combine_two, values)

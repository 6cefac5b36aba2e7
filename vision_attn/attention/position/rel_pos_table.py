"""A learned bias for every relative position and head, as in Swin and CoAtNet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention.dispatch import PositionBias
from vision_attn.attention.masks import Mask, combine_masks
from vision_attn.attention.patterns.grouping import Grouping
from vision_attn.attention.position.encoding import AttentionShape, Encoded, PositionEncoding
from vision_attn.attention.position.relative_table import RelativePosition, resize_by_offset, table_lengths
from vision_attn.checks import product


@dataclass(frozen=True)
class RelPosTable(RelativePosition):
    """Adds ``table[(y_i - y_j, x_i - x_j), head]`` to the logit of query ``i`` and key ``j`` in a head, as in Swin.

    ``position.relative_position_bias_table ((2h - 1)(2w - 1), heads)`` has the row ``(y_i - y_j + h - 1)(2w - 1) +
    (x_i - x_j + w - 1)``. The bias has an element for every query and key of a group: small in windows, and as large as
    the attention matrix of one image with ``"full"``, where :class:`RelPosDecomposed` needs none. On a map of another
    size the table is interpolated linearly. A saved table does not contain its height and width: a table of another
    length is taken to be for a map of the same proportions when it is loaded, and one of the same length is used as is.

    Args:
        feat_size: size of the map that the table is learned on, in positions; of the window, in a windowed pattern,
            where it may be left out.

    Raises:
        ValueError: ``feat_size`` is not a size; or it is missing or does not fit the pattern (when the block is built).

    Source: Liu et al., *Swin Transformer*, 2021, section 3.2, https://arxiv.org/abs/2103.14030

    >>> RelPosTable()
    RelPosTable(feat_size=None)
    """

    def build(self, shape: AttentionShape, device: Any = None, dtype: Any = None) -> PositionEncoding:
        return TableEncoding(self, shape, device, dtype)


class TableEncoding(PositionEncoding):
    is_relative = True
    has_tables = True

    def __init__(self, config: RelPosTable, shape: AttentionShape, device: Any, dtype: Any) -> None:
        super().__init__(config)
        self.lengths: tuple[int, ...] = table_lengths(config, shape)
        rows = product([2 * length - 1 for length in self.lengths])
        table = torch.randn(rows, shape.num_heads, device=device, dtype=dtype) * 0.02
        self.relative_position_bias_table: nn.Parameter = nn.Parameter(table)

    def forward(self, q: Tensor, k: Tensor, grouping: Grouping) -> Encoded:
        table = self.relative_position_bias_table.t().reshape(-1, *[2 * length - 1 for length in self.lengths])
        for number, (side, axis) in enumerate(zip(grouping.window_shape, grouping.axes, strict=True), 1):
            if side is None:
                table = resize_by_offset(table, 2 * axis.extent - 1, number)
        return q, k, TableBias(table, grouping)

    def resize_pos_embed(self, name: str, saved: Tensor) -> Tensor | None:
        current = self.relative_position_bias_table
        is_table = saved.dim() == 2 and saved.shape[1] == current.shape[1]
        sides = self.infer_sides(saved.shape[0]) if is_table else None
        if sides is None:
            return None
        table = saved.view(*(2 * side - 1 for side in sides), -1)
        for axis, length in enumerate(self.lengths):
            table = resize_by_offset(table, 2 * length - 1, axis)
        return table.flatten(0, -2)

    def infer_sides(self, rows: int) -> list[int] | None:
        """Infer the sides of a saved table, of which only the product is saved, from the proportions here."""
        longest = max(self.lengths)
        for longer in range(1, (rows + 1) // 2 + 1):
            sides = [max(1, round(length * longer / longest)) for length in self.lengths]
            found = product([2 * side - 1 for side in sides])
            if found >= rows:
                return sides if found == rows else None
        return None


@dataclass
class TableBias(PositionBias):
    """A table ``(n, 2h - 1, 2w - 1)`` on the groups of a pattern."""

    table: Tensor
    grouping: Grouping

    def rows(self) -> list[Tensor]:
        """Return the row of the table for each query and key along each axis, ``(tiles or 1, queries, keys)``."""
        sizes = zip(self.grouping.relative_coords, self.table.shape[1:], strict=True)
        return [length // 2 - coords for coords, length in sizes]

    def apply(self, q: Tensor, k: Tensor, scale: float, mask: Mask) -> tuple[Tensor, Tensor, float, Mask]:
        """Look up the bias of every query and key, and combine it with the mask."""
        bias, rows = self.table, self.grouping.cached("rows", self.rows)
        # One axis after the other, the last one first, so that no index has as many elements as the bias.
        for axis in range(len(rows), 0, -1):
            bias = bias.index_select(axis, rows[axis - 1].flatten()).unflatten(axis, rows[axis - 1].shape)
        # From (n, <tiles, queries and keys of each axis>) to (1, groups or 1, n, queries, keys).
        rank, last = len(rows), 3 * len(rows) + 1
        bias = bias.permute(*range(1, last, 3), 0, *range(2, last, 3), *range(3, last, 3))
        bias = bias.flatten(2 * rank + 1).flatten(rank + 1, 2 * rank).flatten(0, rank - 1)[None]
        if mask is None or mask.dtype == torch.bool:
            return q, k, scale, bias if mask is None else torch.where(mask, bias, -torch.inf)
        return q, k, scale, combine_masks(bias, mask)

    def scores(self, q: Tensor) -> Callable[..., Tensor]:
        """Return the bias as a function of head and coordinates."""
        rows, sides = [one[0] for one in self.rows()], self.table.shape[1:]
        table = self.table.flatten(1)

        def score(b: Tensor, h: Tensor, i: Tensor, queries: Sequence[Tensor], keys: Sequence[Tensor]) -> Tensor:
            index = torch.zeros_like(i)
            for row, side, query, key in zip(rows, sides, queries, keys, strict=True):
                index = index * side + row[query, key]
            return table[h, index]

        return score

"""Relative position bias (Swin, CoAtNet): a table with one bias for every offset and head, added to the logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.checks import product
from vision_attn.patterns import Partition
from vision_attn.position.tables import check_feat_size, resample, table_lengths
from vision_attn.position.term import BlockShape, PositionTerm

__all__ = ["RelPosTable"]


@dataclass(frozen=True)
class RelPosTable:
    """The logit of query ``i`` and key ``j`` in a head grows by ``table[(y_i - y_j, x_i - x_j), head]``, as in Swin.

    ``position.relative_position_bias_table ((2h - 1)(2w - 1), heads)`` has the row ``(y_i - y_j + h - 1)(2w - 1) +
    (x_i - x_j + w - 1)``. The bias has an element for every query and key of a group: small in windows, and as large as
    the attention matrix of one image with ``"full"``, where :class:`RelPosDecomposed` needs none. On a map of another
    size the table is stretched linearly. A saved table does not say for which height and width it is: one of another
    length is taken to be for a map of the same proportions when it is loaded, and one of the same length as it is.

    Args:
        feat_size: size of the map that the table is learned on, in positions; of the window, in a windowed pattern,
            where it may be left out.

    Raises:
        ValueError: ``feat_size`` is no size; or it is missing or does not fit the pattern (when the block is made).

    Source: Liu et al., *Swin Transformer*, 2021, section 3.2, https://arxiv.org/abs/2103.14030

    >>> RelPosTable()
    RelPosTable(feat_size=None)
    """

    feat_size: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_feat_size("RelPosTable", self.feat_size)

    def build(self, shape: BlockShape, device: Any = None, dtype: Any = None) -> PositionTerm:
        return TableTerm(self, shape, device, dtype)


class TableTerm(PositionTerm):
    is_relative = True

    def __init__(self, specification: RelPosTable, shape: BlockShape, device: Any, dtype: Any) -> None:
        super().__init__(specification)
        self.lengths = table_lengths("RelPosTable", specification.feat_size, shape)
        self.fixed = tuple(side is not None for side in shape.partitioner.window_shape)
        rows = product([2 * length - 1 for length in self.lengths])
        table = torch.empty(rows, shape.num_heads, device=device, dtype=dtype)
        self.relative_position_bias_table = nn.Parameter(nn.init.trunc_normal_(table, std=0.02))

    def forward(
        self, q: Tensor, k: Tensor, scale: float, part: Partition, keys: Partition
    ) -> tuple[Tensor, Tensor, float, Tensor | None]:
        offsets = part.offsets()
        rank = len(offsets)
        table = self.relative_position_bias_table.view(*[2 * length - 1 for length in self.lengths], -1)
        # Of every group, query and key: tiles of every axis, then queries, then keys.
        row = offsets[0].new_zeros(())
        for axis, offset in enumerate(offsets):
            if not self.fixed[axis]:
                table = resample(table, 2 * offset.shape[2] - 1, axis)
            width = table.shape[axis]
            shape = [1] * (3 * rank)
            shape[axis], shape[rank + axis], shape[2 * rank + axis] = offset.shape
            row = row * width + (width // 2 - offset).view(shape)
        row = row.flatten(2 * rank).flatten(rank, -2).flatten(0, rank - 1)  # groups, queries, keys
        bias = table.flatten(0, -2)[row].permute(0, 3, 1, 2).contiguous()
        return q, k, scale, bias[None]

    def resampled(self, name: str, saved: Tensor) -> Tensor | None:
        here = self.relative_position_bias_table
        if saved.dim() != 2 or saved.shape[1] != here.shape[1]:
            return None
        sides = self.sides_of(saved.shape[0])
        if sides is None:
            return None
        table = saved.view(*(2 * side - 1 for side in sides), -1)
        for axis, length in enumerate(self.lengths):
            table = resample(table, 2 * length - 1, axis)
        return table.flatten(0, -2)

    def sides_of(self, rows: int) -> list[int] | None:
        """The sides of a saved table: only their product is saved, so they are taken to be in the proportions here."""
        longest = max(self.lengths)
        for longer in range(1, (rows + 1) // 2 + 1):
            sides = [max(1, round(length * longer / longest)) for length in self.lengths]
            if product([2 * side - 1 for side in sides]) == rows:
                return sides
        return None

"""Relative positions: a bias for every offset and head (Swin, CoAtNet), or a table for each axis (BoTNet)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention.masks import AxisBias
from vision_attn.attention.patterns import Partition
from vision_attn.attention.patterns.specifications import check_lengths
from vision_attn.attention.position.term import AXIS_NAMES, BlockShape, Placed, PositionTerm
from vision_attn.checks import product


@dataclass(frozen=True)
class RelativePosition:
    """What both have: the size of the map that their tables are learned on, None along an axis of fixed windows."""

    feat_size: int | tuple[int | None, ...] | None = None

    def __post_init__(self) -> None:
        for length in self.feat_size if isinstance(self.feat_size, tuple) else (self.feat_size,):
            if length is not None:
                check_lengths(type(self).__name__, "feat_size", length)


@dataclass(frozen=True)
class RelPosTable(RelativePosition):
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

    def build(self, shape: BlockShape, device: Any = None, dtype: Any = None) -> PositionTerm:
        return TableTerm(self, shape, device, dtype)


class TableTerm(PositionTerm):
    is_relative = True

    def __init__(self, specification: RelPosTable, shape: BlockShape, device: Any, dtype: Any) -> None:
        super().__init__(specification)
        self.lengths: tuple[int, ...] = table_lengths(specification, shape)
        self.fixed: tuple[bool, ...] = tuple(side is not None for side in shape.partitioner.window_shape)
        rows = product([2 * length - 1 for length in self.lengths])
        table = torch.randn(rows, shape.num_heads, device=device, dtype=dtype) * 0.02
        self.relative_position_bias_table: nn.Parameter = nn.Parameter(table)

    def forward(self, q: Tensor, k: Tensor, scale: float, part: Partition) -> Placed:
        table = (
            self.relative_position_bias_table.t().contiguous().view(-1, *[2 * length - 1 for length in self.lengths])
        )
        steps = part.steps()
        # One axis after the other is looked up, the last one first, so that no index has as many elements as the bias.
        for axis in range(len(steps), 0, -1):
            if not self.fixed[axis - 1]:
                table = resample(table, 2 * steps[axis - 1].shape[1] - 1, axis)
            rows = table.shape[axis] // 2 - steps[axis - 1]
            table = table.index_select(axis, rows.flatten()).unflatten(axis, rows.shape)
        # From (n, <tiles, queries and keys of each axis>) to (1, groups or 1, n, queries, keys).
        rank, last = len(steps), 3 * len(steps) + 1
        bias = table.permute(*range(1, last, 3), 0, *range(2, last, 3), *range(3, last, 3))
        bias = bias.flatten(2 * rank + 1).flatten(rank + 1, 2 * rank).flatten(0, rank - 1)
        return q, k, scale, bias[None].contiguous()

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
            found = product([2 * side - 1 for side in sides])
            if found >= rows:
                return sides if found == rows else None
        return None


@dataclass(frozen=True)
class RelPosDecomposed(RelativePosition):
    """The logit of query ``i`` and key ``j`` grows by ``q_i · R_h[y_j - y_i] + q_i · R_w[x_j - x_i]``, as in BoTNet.

    ``q`` is not scaled in it. The tables, ``position.height_rel (2h - 1, d)`` and ``position.width_rel (2w - 1, d)``,
    are shared by the heads. In groups of more than 256 tokens memory grows with tokens: on the CPU they are added for
    a block of queries at a time; elsewhere they are folded into the dot product, so that any fused kernel runs it: the
    query is extended by its logits against each row and column, the key by the one-hot vector of its own. On a map of
    another size the tables are stretched linearly.

    Args:
        feat_size: size of the map that the tables are learned on, in positions; of the window, in a windowed pattern,
            where it may be left out.

    Raises:
        ValueError: ``feat_size`` is no size; or it is missing or does not fit the pattern (when the block is made).

    Source: Srinivas et al., *Bottleneck Transformers*, 2021, appendix, https://arxiv.org/abs/2101.11605

    >>> RelPosDecomposed(feat_size=(14, 14))
    RelPosDecomposed(feat_size=(14, 14))
    """

    def build(self, shape: BlockShape, device: Any = None, dtype: Any = None) -> PositionTerm:
        return DecomposedTerm(self, shape, device, dtype)


class DecomposedTerm(PositionTerm):
    is_relative = True

    def __init__(self, specification: RelPosDecomposed, shape: BlockShape, device: Any, dtype: Any) -> None:
        super().__init__(specification)
        lengths = table_lengths(specification, shape)
        self.fixed: tuple[bool, ...] = tuple(side is not None for side in shape.partitioner.window_shape)
        self.tables: dict[int, str] = {}  # by axis
        for axis, (name, length) in enumerate(zip(AXIS_NAMES[-shape.rank :], lengths, strict=True)):
            if shape.partitioner.attended[axis]:
                self.tables[axis] = f"{name}_rel"
                table = torch.randn(2 * length - 1, shape.key_dim, device=device, dtype=dtype) * shape.key_dim**-0.5
                self.register_parameter(f"{name}_rel", nn.Parameter(table))

    def forward(self, q: Tensor, k: Tensor, scale: float, part: Partition) -> Placed:
        offsets = part.steps()

        def logits(queries: Tensor) -> dict[int, Tensor]:
            return {axis: self.logits(queries, axis, offsets) for axis in self.tables}

        return q, k, scale, AxisBias(logits, [offset.shape[2] for offset in offsets], part.groups)

    def logits(self, q: Tensor, axis: int, offsets: list[Tensor]) -> Tensor:
        """Each query's logit against each of its keys' rows (or columns), ``(b·groups, n, i, keys along the axis)``."""
        table, offset = getattr(self, self.tables[axis]).to(q.dtype), offsets[axis]
        if not self.fixed[axis]:
            table = resample(table, 2 * offset.shape[2] - 1)
        relative = table[offset + table.shape[0] // 2]  # (tiles, queries, keys, d)
        # One product for each tile and query along the axis: b T H W n t h w d, with the axis' two in front.
        rank = len(offsets)
        tiles, window, _ = zip(*[steps.shape for steps in offsets], strict=True)
        x = q.reshape(q.shape[0] // product(tiles), *tiles, q.shape[1], *window, q.shape[3])
        x = x.movedim((1 + axis, 2 + rank + axis), (0, 1))
        rest = x.shape[2:-1]
        tile, query, key, d = relative.shape
        y = torch.bmm(x.reshape(tile * query, -1, d), relative.view(tile * query, key, d).transpose(1, 2))
        y = y.view(tile, query, *rest, key).movedim((0, 1), (1 + axis, 2 + rank + axis))
        return y.reshape(*q.shape[:3], key)

    def resampled(self, name: str, saved: Tensor) -> Tensor | None:
        table = getattr(self, name)
        if saved.dim() != 2 or saved.shape[1] != table.shape[1] or saved.shape[0] % 2 == 0:
            return None
        return resample(saved, table.shape[0])


def table_lengths(specification: RelativePosition, shape: BlockShape) -> tuple[int, ...]:
    """The tokens along each axis that a table is for: one along an axis without attention."""
    owner, feat_size = type(specification).__name__, specification.feat_size
    partitioner, rank = shape.partitioner, shape.rank
    given = feat_size if isinstance(feat_size, tuple) else (feat_size,) * rank
    if len(given) != rank:
        raise ValueError(f"{owner}: feat_size must be one length, or one for each of {rank} axes; got {feat_size!r}")
    lengths = []
    for length, fixed, attended in zip(given, partitioner.window_shape, partitioner.attended, strict=True):
        if attended and fixed is None and length is None:
            raise ValueError(
                f"{owner}: feat_size must be given with a pattern whose groups grow with the map: the size of the map "
                f"that the tables are learned on, as in {owner}(feat_size=(14, 14))"
            )
        if attended and fixed is not None and length not in (None, fixed):
            raise ValueError(
                f"{owner}: feat_size must be that of the pattern's groups, {partitioner.window_shape}; "
                f"got {feat_size!r}: leave it out"
            )
        lengths.append((fixed or length or 1) if attended else 1)
    return tuple(lengths)


def resample(table: Tensor, length: int, axis: int = 0) -> Tensor:
    """A table by offset, ``2s - 1`` long along an axis, stretched linearly to another length.

    The first, the middle and the last offset stay the first, the middle and the last: a map of another size is looked
    at as the same picture, finer or coarser.

    >>> resample(torch.tensor([[0.0], [2.0], [4.0]]), 5).flatten()
    tensor([0., 1., 2., 3., 4.])
    """
    old = table.shape[axis]
    if not torch.compiler.is_compiling() and old == length:  # what is compiled may be for any length
        return table
    dtype = torch.float64 if table.dtype == torch.float64 else torch.float32
    ratio = (old - 1) / max(length - 1, 1)
    index = (torch.arange(length, device=table.device, dtype=dtype) - (length - 1) / 2) * ratio + (old - 1) / 2
    below = index.floor().clamp(0, max(old - 2, 0))
    share = (index - below).to(table.dtype).view([-1 if i == axis else 1 for i in range(table.dim())])
    low, high = (table.index_select(axis, at.long()) for at in (below, (below + 1).clamp(max=old - 1)))
    return low * (1 - share) + high * share

"""Relative position logits that are decomposed by axis: products of the query and one table per axis, as in BoTNet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention.dispatch import PositionBias
from vision_attn.attention.masks import Mask, upcast
from vision_attn.attention.patterns.grouping import Grouping
from vision_attn.attention.position.encoding import AXIS_NAMES, AttentionShape, Encoded, PositionEncoding
from vision_attn.attention.position.relative_table import RelativePosition, resize_by_offset, table_lengths
from vision_attn.checks import product


@dataclass(frozen=True)
class RelPosDecomposed(RelativePosition):
    """Relative position logits that are decomposed by axis, as in BoTNet.

    ::

        logits[i, j] = scale · q_i · k_j + q_i · R_h[y_j - y_i] + q_i · R_w[x_j - x_i]

    The tables ``position.height_rel (2h - 1, d)`` and ``position.width_rel (2w - 1, d)`` are shared by all heads. For a
    feature map of another size, they are interpolated linearly.

    Memory is linear in the number of tokens. On a CPU, the bias is computed for one chunk of queries at a time. On
    other devices, it is folded into the dot product of queries and keys, so that fused kernels support it: each query
    is extended by its logits for all rows and columns, and each key by the one-hot vectors of its row and column.

    Args:
        feat_size: size of the feature map that the tables are created for, in positions: an integer for all axes, or a
            tuple with one integer per axis. It may be omitted for patterns with a fixed size, such as windows.

    Raises:
        ValueError: ``feat_size`` is invalid, or it is missing or does not fit the pattern (when the block is built).

    Source: Srinivas et al., *Bottleneck Transformers*, 2021, appendix, https://arxiv.org/abs/2101.11605

    >>> RelPosDecomposed(feat_size=(14, 14))
    RelPosDecomposed(feat_size=(14, 14))
    """

    def build(self, shape: AttentionShape, device: Any = None, dtype: Any = None) -> PositionEncoding:
        return DecomposedEncoding(self, shape, device, dtype)


class DecomposedEncoding(PositionEncoding):
    is_relative = True
    has_tables = True

    def __init__(self, config: RelPosDecomposed, shape: AttentionShape, device: Any, dtype: Any) -> None:
        super().__init__(config)
        lengths = table_lengths(config, shape)
        self.names: dict[int, str] = {}  # the parameter name of the table for each axis
        for axis, (name, length) in enumerate(zip(AXIS_NAMES[-shape.rank :], lengths, strict=True)):
            if shape.pattern.attention_axes[axis]:
                self.names[axis] = f"{name}_rel"
                table = torch.randn(2 * length - 1, shape.key_dim, device=device, dtype=dtype) * shape.key_dim**-0.5
                self.register_parameter(f"{name}_rel", nn.Parameter(table))

    def forward(self, q: Tensor, k: Tensor, grouping: Grouping) -> Encoded:
        tables = {}
        for axis, name in self.names.items():
            tables[axis] = getattr(self, name)
            if grouping.window_shape[axis] is None:
                tables[axis] = resize_by_offset(tables[axis], 2 * grouping.axes[axis].extent - 1)
        return q, k, DecomposedBias(tables, grouping)

    def resize_pos_embed(self, name: str, saved: Tensor) -> Tensor | None:
        table = getattr(self, name)
        if saved.dim() != 2 or saved.shape[1] != table.shape[1] or saved.shape[0] % 2 == 0:
            return None
        return resize_by_offset(saved, table.shape[0])


@dataclass
class DecomposedBias(PositionBias):
    """The bias from tables ``(2s - 1, d)``, one for each axis with attention, for the groups of a pattern."""

    tables: dict[int, Tensor]
    grouping: Grouping

    def axis_logits(self, q: Tensor) -> dict[int, Tensor]:
        """Return for each axis the logits of queries and key coordinates, ``(b, <tiles>, n, <queries>, keys)``.

        The axes ``<tiles>`` exist only if relative positions differ between tiles, as in a :class:`.Neighborhood`.
        """
        layout = self.grouping.query_layout
        differ = any(len(axis.queries.coords) > 1 for axis in self.grouping.axes)
        tiles = [len(axis.positions) for axis in layout.axes] if differ else []
        x = q.unflatten(2, layout.group_size)
        x = x.reshape(-1, *tiles, *x.shape[1:]) if tiles else x
        logits = {}
        for axis, table in self.tables.items():
            rows = self.grouping.cached(("offsets", axis), partial(self.offsets, axis, table))
            relative = table.to(q.dtype).index_select(0, rows.flatten()).reshape(-1, rows.shape[2], q.shape[3])
            # One matrix product per query coordinate on this axis, and per tile if tiles differ: these axes come first.
            first = [*([1 + axis] if len(rows) > 1 else []), 2 + len(tiles) + axis]
            order = [*first, *(other for other in range(x.dim()) if other not in first)]
            front = x.permute(order)
            y = torch.bmm(front.reshape(len(relative), -1, q.shape[3]), relative.transpose(1, 2))
            back = sorted(range(x.dim()), key=order.__getitem__)
            logits[axis] = y.view(*front.shape[:-1], rows.shape[2]).permute(back)
        return logits

    def offsets(self, axis: int, table: Tensor) -> Tensor:
        """Return the table row of each query and key along an axis, ``(tiles or 1, queries, keys)``."""
        return self.grouping.relative_coords[axis] + table.shape[0] // 2

    def rel_logits(self, q: Tensor) -> list[Tensor]:
        """Return one term per axis, ``(b·groups, n, i, <keys along this axis, 1 along the others>)``."""
        window = self.grouping.key_layout.group_size
        return [
            logits.reshape(*q.shape[:3], *[length if other == axis else 1 for other, length in enumerate(window)])
            for axis, logits in self.axis_logits(upcast(q)).items()
        ]

    def apply(self, q: Tensor, k: Tensor, scale: float, mask: Mask) -> tuple[Tensor, Tensor, float, Mask]:
        """Fold the bias into queries and keys, so that memory is linear in the number of tokens in every kernel.

        Scaled queries are extended by their logits for each row and column, and keys by the one-hot vectors of their
        row and column. The width is padded to a multiple of 8, because flash attention would otherwise pad and copy
        queries, keys and values.
        """
        logits = [*self.axis_logits(q).values()]
        one_hot, zero = self.grouping.cached(("one_hot", k.dtype), lambda: self.one_hot(k))
        scaled = (scale * q).reshape(*logits[0].shape[:-1], q.shape[3])
        filler = zero.expand(*scaled.shape[:-1], one_hot.shape[1] - sum(term.shape[-1] for term in logits))
        width = q.shape[3] + one_hot.shape[1]  # not -1, because Core ML requires a width independent of the batch size
        extended = torch.cat([scaled, *logits, filler], dim=-1).reshape(-1, *q.shape[1:3], width)
        return extended, torch.cat([k, one_hot.expand(*k.shape[:2], -1, -1)], dim=-1), 1.0, mask

    def one_hot(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return one-hot rows and columns of the keys in a group, ``(j, rows + columns)``, and a zero as filler."""
        window = self.grouping.key_layout.group_size
        number, columns = torch.arange(product(window), device=k.device), []
        for axis in self.tables:
            index = number // product(window[axis + 1 :]) % window[axis]
            columns.append(index[:, None] == torch.arange(window[axis], device=k.device))
        width = k.shape[3] + sum(column.shape[1] for column in columns)
        columns.append(columns[0].new_zeros(len(number), -width % 8))
        return torch.cat(columns, dim=1).to(k.dtype), torch.zeros((), dtype=k.dtype, device=k.device)

    def scores(self, q: Tensor) -> Callable[..., Tensor]:
        """Return the bias as a function of indices; it reads the product of each query with all rows of a table."""
        tables = []
        for axis, table in self.tables.items():
            tables.append((axis, upcast(q @ table.to(q.dtype).t()), self.offsets(axis, table)[0]))

        def score(b: Tensor, h: Tensor, i: Tensor, queries: Sequence[Tensor], keys: Sequence[Tensor]) -> Tensor:
            parts = [logits[b, h, i, rows[queries[axis], keys[axis]]] for axis, logits, rows in tables]
            return sum(parts[1:], parts[0])

        return score

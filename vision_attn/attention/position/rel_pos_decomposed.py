"""Relative position logits that are decomposed by axis: products of the query and one table per axis, as in BoTNet."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_attn.attention.kind import AXIS_NAMES, AttentionConfig
from vision_attn.attention.masks import upcast
from vision_attn.attention.patterns.grouping import Grouping
from vision_attn.attention.patterns.layout import outer
from vision_attn.attention.position.encoding import Encoded, PositionBias, PositionEncoding, TableEncoding
from vision_attn.attention.position.relative_table import RelativePosition, resize_by_offset, table_lengths

#: Smallest scale by which position logits are divided; smaller ones would overflow in half precision.
MIN_DIVISOR = 2**-8


@dataclass(frozen=True)
class RelPosDecomposed(RelativePosition):
    """Relative position logits that are decomposed by axis, as in BoTNet.

    ::

        logits[i, j] = scale · q_i · k_j + q_i · R_h[y_j - y_i] + q_i · R_w[x_j - x_i]

    ``q_i`` are the queries after ``qk_norm``, which scales the position terms as well. The tables
    ``position.height_rel (2h - 1, d)`` and ``position.width_rel (2w - 1, d)`` are shared by all heads. For a feature
    map of another size, they are interpolated linearly.

    Memory is linear in the number of tokens. On a CPU, the bias is computed for one chunk of queries at a time. On
    other devices, it is folded into the dot product of queries and keys, so that fused kernels support it: each query
    is extended by its logits for all rows and columns, and each key by the one-hot vectors of its row and column.

    Args:
        feat_size: size of the feature map that the tables are created for, in positions: an integer for all axes, or a
            tuple with one integer per axis. It may be omitted for patterns with a fixed size, such as windows.

    Raises:
        ValueError: ``feat_size`` is missing or does not fit the pattern (when the block is built).

    Source: Srinivas et al., *Bottleneck Transformers*, 2021, appendix, https://arxiv.org/abs/2101.11605

    >>> RelPosDecomposed(feat_size=(14, 14))
    RelPosDecomposed(feat_size=(14, 14))
    """

    def build(self, block: AttentionConfig, device: Any = None, dtype: Any = None) -> PositionEncoding:
        return DecomposedEncoding(self, block, device, dtype)


class DecomposedEncoding(TableEncoding):
    is_relative = True

    def __init__(self, config: RelPosDecomposed, block: AttentionConfig, device: Any, dtype: Any) -> None:
        lengths, d = table_lengths(config, block), block.key_dim
        axes = zip(AXIS_NAMES[-block.rank :], block.resolved_pattern.attention_axes, strict=True)
        names = {axis: f"{name}_rel" for axis, (name, attends) in enumerate(axes) if attends}
        tables = {name: (2 * lengths[axis] - 1, d) for axis, name in names.items()}
        super().__init__(config, d**-0.5, tables, device=device, dtype=dtype)
        self.names: dict[int, str] = names  # the parameter name of the table for each axis

    def forward(self, q: Tensor, k: Tensor, grouping: Grouping) -> Encoded:
        tables = {}
        for axis, name in self.names.items():
            tables[axis], length = getattr(self, name), 2 * grouping.axes[axis].extent - 1
            if grouping.window_shape[axis] is None:
                tables[axis] = resize_by_offset(tables[axis], length)
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

    def gather_logits(self, q: Tensor, scale: float = 1.0) -> Tensor:
        """Return ``q_i · R_h[y - y_i]`` for all rows and ``q_i · R_w[x - x_i]`` for all columns, divided by ``scale``.

        One product of the queries with all offsets is followed by one gather. Returns ``(b·groups, n, i, rows +
        columns)``, padded with zeros to the width of :meth:`one_hot`.
        """
        b, n, i, d = q.shape
        index, zeros = self.grouping.cached(("offsets", q.dtype, d), lambda: self.offsets(q))
        tables = torch.cat([*[table.to(q.dtype) for table in self.tables.values()], zeros])
        tables = tables if scale == 1.0 else tables / scale
        logits = (q @ tables.t()).view(-1, index.shape[0], n, i, tables.shape[0])  # (b, groups or 1, n, i, offsets)
        return logits.gather(4, index.expand(logits.shape[0], -1, n, -1, -1)).view(b, n, i, index.shape[3])

    def offsets(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of the joint table for each query, ``(groups or 1, 1, i, width)``, and its last rows, zeros.

        The number of rows is a multiple of 8, because matrix products of other sizes are slow on a GPU.
        """
        layout, first, columns = self.grouping.query_layout, 0, []
        differ = any(axis.queries.coords.shape[0] > 1 for axis in self.grouping.axes)
        # (tiles or 1, queries, 1)
        zeros = [torch.zeros_like(axis.positions if differ else axis.positions[:1])[:, :, None] for axis in layout.axes]
        for axis, table in self.tables.items():
            offset = self.grouping.relative_coords[axis] + zeros[axis] + (table.shape[0] // 2 + first)
            columns.append(outer([*zeros[:axis], offset, *zeros[axis + 1 :]], torch.add)[:, None])
            first += table.shape[0]
        index = torch.cat(columns, dim=3)
        # Graphs would store the value of pad as a constant, also if it depends on the size.
        index = F.pad(index - first, (0, -(q.shape[3] + index.shape[3]) % 8)) + first
        rows = (16 if self.grouping.in_graph else 8) - first % 8  # a length of one would be a constant of the graph
        return index, torch.zeros(rows, q.shape[3], dtype=q.dtype, device=q.device)

    def rel_logits(self, q: Tensor) -> list[Tensor]:
        """Return one term per axis, ``(b·groups, n, i, <keys along this axis, 1 along the others>)``."""
        window, first, terms = self.grouping.key_layout.group_size, 0, []
        logits = self.gather_logits(upcast(q))
        for axis in self.tables:
            keys = [length if other == axis else 1 for other, length in enumerate(window)]
            terms.append(logits.narrow(3, first, window[axis]).view(*logits.shape[:3], *keys))
            first += window[axis]
        return terms

    def fold(self, q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor, float]:
        """Extend queries and keys, so that memory is linear in the number of tokens in every kernel.

        Queries are extended by their logits for each row and column, and keys by the one-hot vectors of their row and
        column. The width is padded to a multiple of 8, because flash attention would otherwise pad and copy queries,
        keys and values.
        """
        one_hot = self.grouping.cached(("one_hot", k.dtype, k.shape[3]), lambda: self.one_hot(k))
        if scale >= MIN_DIVISOR:  # the kernel multiplies the logits by the scale
            logits = self.gather_logits(q, scale)
        else:
            logits, q, scale = self.gather_logits(q), scale * q, 1.0
        return torch.cat([q, logits], dim=-1), torch.cat([k, one_hot.expand(*k.shape[:2], -1, -1)], dim=-1), scale

    def one_hot(self, k: Tensor) -> Tensor:
        """Return one-hot rows and columns of the keys in a group, ``(j, width)``."""
        positions = [torch.arange(length, device=k.device) for length in self.grouping.key_layout.group_size]
        coords = torch.meshgrid(positions, indexing="ij")
        one_hot = torch.cat([coords[axis].reshape(-1, 1) == positions[axis] for axis in self.tables], dim=1)
        return F.pad(one_hot, (0, -(k.shape[3] + one_hot.shape[1]) % 8)).to(k.dtype)

    def scores(self) -> None:
        """Return None: the bias is folded into queries and keys."""

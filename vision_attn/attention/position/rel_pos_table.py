"""A learned bias for each relative position and head, as in Swin and CoAtNet."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention.kind import AttentionConfig
from vision_attn.attention.masks import Mask, combine_masks
from vision_attn.attention.patterns.grouping import Grouping
from vision_attn.attention.patterns.layout import outer
from vision_attn.attention.position.encoding import Encoded, PositionBias, PositionEncoding, TableEncoding
from vision_attn.attention.position.relative_table import RelativePosition, resize_by_offset, table_lengths
from vision_attn.checks import product


@dataclass(frozen=True)
class RelPosTable(RelativePosition):
    """Relative position bias: a learned scalar for each relative position and head, as in Swin and CoAtNet.

    ::

        logits[i, j] = scale · q_i · k_j + table[row, head]
        row          = (y_i - y_j + h - 1) · (2w - 1) + (x_i - x_j + w - 1)

    The parameter is ``position.relative_position_bias_table ((2h - 1)(2w - 1), heads)``. For a feature map of another
    size, it is interpolated linearly.

    The bias has one element for each query, key and head of a group. It is small in windows. With ``pattern="full"``,
    it is as large as the attention matrix of one image; :class:`RelPosDecomposed` uses memory that is linear in the
    number of tokens.

    A saved table does not contain its height and width. When a table with another number of rows is loaded, it is
    assumed to be for feature maps of the same aspect ratio. A table with the same number of rows is loaded unchanged.

    Args:
        feat_size: size of the feature map that the table is created for, in positions: an integer for all axes, or a
            tuple with one integer per axis. It may be omitted for patterns with a fixed size, such as windows.

    Raises:
        ValueError: ``feat_size`` is missing or does not fit the pattern (when the block is built).

    Source: Liu et al., *Swin Transformer*, 2021, section 3.2, https://arxiv.org/abs/2103.14030

    >>> RelPosTable()
    RelPosTable(feat_size=None)
    """

    def build(self, block: AttentionConfig, device: Any = None, dtype: Any = None) -> PositionEncoding:
        return BiasTableEncoding(self, block, device, dtype)


class BiasTableEncoding(TableEncoding):
    is_relative = True
    relative_position_bias_table: nn.Parameter

    def __init__(self, config: RelPosTable, block: AttentionConfig, device: Any, dtype: Any) -> None:
        lengths = table_lengths(config, block)
        shape = product([2 * length - 1 for length in lengths]), block.num_heads
        super().__init__(config, 0.02, {"relative_position_bias_table": shape}, device=device, dtype=dtype)
        self.lengths: tuple[int, ...] = lengths

    def forward(self, q: Tensor, k: Tensor, grouping: Grouping) -> Encoded:
        table: Tensor = self.relative_position_bias_table
        lengths = self.lengths
        if None in grouping.window_shape:
            axes = zip(lengths, grouping.window_shape, grouping.axes, strict=True)
            lengths = tuple([axis.extent if window is None else length for length, window, axis in axes])
            table = resize_table(table, self.lengths, lengths)
        return q, k, TableBias(table.t(), lengths, grouping)

    def resize_pos_embed(self, name: str, saved: Tensor) -> Tensor | None:
        current = self.relative_position_bias_table
        is_table = saved.dim() == 2 and saved.shape[1] == current.shape[1]
        size = self.infer_size(saved.shape[0]) if is_table else None
        return None if size is None else resize_table(saved, size, self.lengths)

    def infer_size(self, rows: int) -> list[int] | None:
        """Infer the ``feat_size`` of a saved table from its number of rows and the aspect ratio of this table."""
        longest = max(self.lengths)
        for candidate in range(1, (rows + 1) // 2 + 1):  # the length of the longest axis
            size = [max(1, round(length * candidate / longest)) for length in self.lengths]
            if (offsets := product([2 * length - 1 for length in size])) >= rows:
                return size if offsets == rows else None
        return None


def resize_table(table: Tensor, lengths: Sequence[int], new_lengths: Sequence[int]) -> Tensor:
    """Interpolate a table ``((2h - 1)(2w - 1), heads)`` for feature maps of another size."""
    table = table.view(*[2 * length - 1 for length in lengths], -1)
    for axis, length in enumerate(new_lengths):
        table = resize_by_offset(table, 2 * length - 1, axis)
    return table.flatten(0, -2)


@dataclass
class TableBias(PositionBias):
    """The bias from a table ``(n, (2h - 1) · (2w - 1))`` for offsets up to ``lengths``, for the groups of a pattern."""

    table: Tensor
    lengths: Sequence[int]
    grouping: Grouping

    def rows(self) -> list[Tensor]:
        """Return for each axis the table index of each query and key, ``(tiles or 1, queries, keys)``."""
        return [length - 1 - at for at, length in zip(self.grouping.relative_coords, self.lengths, strict=True)]

    def look_up(self) -> tuple[Tensor, tuple[int, ...]]:
        """Return the element of a head's table for each query and key, and its shape ``(groups or 1, i, j)``.

        On a GPU, the rows are padded to multiples of 8 elements, as fused kernels require.
        """
        widths = [2 * length - 1 for length in self.lengths]
        strides = [product(widths[axis + 1 :]) for axis in range(len(widths))]
        index = outer([row * stride for row, stride in zip(self.rows(), strides, strict=True)], torch.add)
        index = index if index.is_cpu else F.pad(index, (0, -index.shape[2] % 8))
        return index.flatten(), index.shape

    def attn_mask(self, mask: Mask) -> Mask:
        """Look up the bias of each query and key, and combine it with the mask."""
        index, (groups, i, j) = self.grouping.cached("table", self.look_up)
        bias = self.table.index_select(1, index)  # (n, groups or 1 · i · j)
        n = bias.shape[0]
        bias = bias.view(1, 1, n, i, j) if groups == 1 else bias.view(1, n, groups, i, j).transpose(1, 2)
        if mask is None:
            return bias
        if mask.shape[4] == j and mask.dtype == bias.dtype:
            return bias + mask  # the mask of the pattern contains only zeros and -inf: exact in half precision
        return combine_masks(mask, bias[..., : self.grouping.key_layout.tokens])

    def scores(self) -> Callable[..., Tensor]:
        rows, table = [index[0] for index in self.rows()], self.table
        widths = [2 * length - 1 for length in self.lengths]

        def score(h: Tensor, queries: Sequence[Tensor], keys: Sequence[Tensor]) -> Tensor:
            index = torch.zeros_like(h)
            for row, width, query, key in zip(rows, widths, queries, keys, strict=True):
                index = index * width + row[query, key]
            return table[h, index]

        return score

"""Learned absolute position embeddings of the keys."""

from dataclasses import dataclass
from functools import reduce
from typing import Any

from torch import Tensor
from torch.nn.functional import interpolate

from vision_attn.attention.graphs import is_fixed
from vision_attn.attention.kind import AXIS_NAMES, AttentionConfig
from vision_attn.attention.patterns.grouping import Grouping
from vision_attn.attention.patterns.pattern import check_lengths, to_ntuple
from vision_attn.attention.position.encoding import Encoded, PositionEncoding, TableEncoding


@dataclass(frozen=True)
class AbsPos:
    """Learned absolute position embeddings, which are added to the keys.

    ::

        logits[i, j] = scale · q_i · (k_j + H[y_j] + W[x_j])        (y_j, x_j): position of key j

    The parameters ``position.height (h, d)`` and ``position.width (w, d)`` are shared by all heads. For a feature map
    of another size, they are interpolated linearly.

    Args:
        feat_size: size of the feature map that the parameters are created for, in positions: an integer for all axes,
            or a tuple with one integer per axis.

    Raises:
        ValueError: ``feat_size`` does not match the number of axes (when the block is built).

    Source: the baseline with absolute positions in Srinivas et al., *Bottleneck Transformers*, 2021,
    https://arxiv.org/abs/2101.11605

    >>> AbsPos(feat_size=(14, 14))
    AbsPos(feat_size=(14, 14))
    """

    feat_size: int | tuple[int, ...]

    def build(self, block: AttentionConfig, device: Any = None, dtype: Any = None) -> PositionEncoding:
        return AbsPosEncoding(self, block, device, dtype)


class AbsPosEncoding(TableEncoding):
    def __init__(self, config: AbsPos, block: AttentionConfig, device: Any, dtype: Any) -> None:
        check_lengths("AbsPos", "feat_size", config.feat_size)
        lengths = to_ntuple("AbsPos", "feat_size", config.feat_size, block.rank)
        d, names = block.key_dim, AXIS_NAMES[-block.rank :]
        tables = {name: (length, d) for name, length in zip(names, lengths, strict=True)}
        super().__init__(config, d**-0.5, tables, device=device, dtype=dtype)

    def forward(self, q: Tensor, k: Tensor, grouping: Grouping) -> Encoded:
        layout = grouping.key_layout
        lengths = zip(AXIS_NAMES[-len(layout.size) :], layout.size, strict=True)
        tables = [resize_by_position(getattr(self, name), length).to(k.dtype) for name, length in lengths]
        embedding = reduce(lambda x, table: x[..., None, :] + table, tables).flatten(0, -2)  # (key tokens, d)
        if layout.is_identity:
            return q, k + embedding, None
        index = grouping.cached("key_index", layout.index)
        embedding = embedding[index] * (index >= 0)[..., None]  # padding has no position
        k = k.reshape(-1, layout.groups, *k.shape[1:]) + embedding[:, None]
        return q, k.flatten(0, 1), None

    def resize_pos_embed(self, name: str, saved: Tensor) -> Tensor | None:
        table = getattr(self, name)
        return resize_by_position(saved, len(table)) if saved.shape[1:] == table.shape[1:] else None


def resize_by_position(table: Tensor, length: int) -> Tensor:
    """Interpolate a table ``(positions, d)`` linearly to another length.

    In a graph with dynamic sizes, the table is always interpolated, even to its own length.
    """
    if is_fixed([length]) and len(table) == length:
        return table
    return interpolate(table.T[None], size=length, mode="linear")[0].T

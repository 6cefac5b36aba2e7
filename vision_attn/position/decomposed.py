"""Decomposed relative position (BoTNet): a table of offsets for each axis, folded into queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attend import upcast
from vision_attn.checks import product
from vision_attn.patterns import Partition
from vision_attn.position.tables import check_feat_size, resample, table_lengths
from vision_attn.position.term import AXIS_NAMES, BlockShape, PositionTerm

__all__ = ["RelPosDecomposed"]

#: Keys in a group up to which the term is added to the logits, as a bias of queries by keys. Beyond, it is folded into
#: queries and keys, which grow by as many channels as a group has rows and columns: dearer than the bias in small
#: groups, cheaper in large ones, where the bias takes memory for every pair of tokens.
DENSE_KEYS = 256


@dataclass(frozen=True)
class RelPosDecomposed:
    """The logit of query ``i`` and key ``j`` grows by ``q_i · R_h[y_j - y_i] + q_i · R_w[x_j - x_i]``, as in BoTNet.

    ``q`` is not scaled in it. The tables, ``position.height_rel (2h - 1, d)`` and ``position.width_rel (2w - 1, d)``,
    are shared by the heads. In groups of more than 256 tokens they are folded into the dot product: the query is
    extended by its logits against each row and column, the key by the one-hot vector of its own, so that any fused
    kernel runs it and memory grows with tokens. On a map of another size the tables are stretched linearly.

    Args:
        feat_size: size of the map that the tables are learned on, in positions; of the window, in a windowed pattern,
            where it may be left out.

    Raises:
        ValueError: ``feat_size`` is no size; or it is missing or does not fit the pattern (when the block is made).

    Source: Srinivas et al., *Bottleneck Transformers*, 2021, appendix, https://arxiv.org/abs/2101.11605

    >>> RelPosDecomposed(feat_size=(14, 14))
    RelPosDecomposed(feat_size=(14, 14))
    """

    feat_size: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_feat_size("RelPosDecomposed", self.feat_size)

    def build(self, shape: BlockShape, device: Any = None, dtype: Any = None) -> PositionTerm:
        return DecomposedTerm(self, shape, device, dtype)


class DecomposedTerm(PositionTerm):
    is_relative = True

    def __init__(self, specification: RelPosDecomposed, shape: BlockShape, device: Any, dtype: Any) -> None:
        super().__init__(specification)
        lengths = table_lengths("RelPosDecomposed", specification.feat_size, shape)
        self.fixed = tuple(side is not None for side in shape.partitioner.window_shape)
        self.tables: dict[int, str] = {}  # by axis
        for axis, (name, length) in enumerate(zip(AXIS_NAMES[-shape.rank :], lengths, strict=True)):
            if shape.partitioner.attended[axis]:
                self.tables[axis] = f"{name}_rel"
                table = torch.randn(2 * length - 1, shape.key_dim, device=device, dtype=dtype) * shape.key_dim**-0.5
                self.register_parameter(f"{name}_rel", nn.Parameter(table))

    def forward(
        self, q: Tensor, k: Tensor, scale: float, part: Partition, keys: Partition
    ) -> tuple[Tensor, Tensor, float, Tensor | None]:
        offsets = part.offsets()
        keys_shape = [offset.shape[2] for offset in offsets]
        logits = {axis: self.logits(q, axis, offsets[axis], part) for axis in self.tables}
        # A symbol stands for any size: what is exported with it is folded.
        if set(map(type, keys_shape)) == {int} and product(keys_shape) <= DENSE_KEYS:
            along = [  # b·groups n i (keys of one axis), to be broadcast along the others
                upcast(part_of_bias).unflatten(3, [n if other == axis else 1 for other, n in enumerate(keys_shape)])
                for axis, part_of_bias in logits.items()
            ]
            bias = reduce(torch.add, along).expand(*q.shape[:3], *keys_shape).flatten(3)
            return q, k, scale, bias.unflatten(0, (-1, part.groups))
        one_hot = [key_one_hot(keys_shape, axis, k).expand(*k.shape[:2], -1, -1) for axis in logits]
        return torch.cat([scale * q, *logits.values()], dim=-1), torch.cat([k, *one_hot], dim=-1), 1.0, None

    def logits(self, q: Tensor, axis: int, offset: Tensor, part: Partition) -> Tensor:
        """Each query's logit against each of its keys' rows (or columns), ``(b·groups, n, i, keys along the axis)``."""
        table = getattr(self, self.tables[axis]).to(q.dtype)
        if not self.fixed[axis]:
            table = resample(table, 2 * offset.shape[2] - 1)
        relative = table[offset + table.shape[0] // 2]  # (tiles, queries, keys, d)
        # One product for each tile and query along the axis: b T H W n t h w d, with the axis' two in front.
        rank = len(part.size)
        x = q.reshape(q.shape[0] // product(part.tiles), *part.tiles, q.shape[1], *part.window_shape, q.shape[3])
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


def key_one_hot(shape: list[int], axis: int, k: Tensor) -> Tensor:
    """Where each key lies along an axis, ``(keys, length of the axis)``."""
    number = torch.arange(product(shape), device=k.device)
    index = number // product(shape[axis + 1 :]) % shape[axis]
    return (index[:, None] == torch.arange(shape[axis], device=k.device)).to(k.dtype)

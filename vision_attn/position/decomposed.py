"""Relative positions axis by axis, from the query: BoTNet's term, without a matrix of queries by keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vision_attn.patterns.line import AXES, product
from vision_attn.position.extents import check_feat_size, table_extents
from vision_attn.position.resample import resample
from vision_attn.position.term import AXIS_NAMES, BlockShape, PositionTerm

__all__ = ["RelPosDecomposed"]


@dataclass(frozen=True)
class RelPosDecomposed:
    """The logit of query ``i`` and key ``j`` grows by ``q_i · R_h[y_j - y_i] + q_i · R_w[x_j - x_i]``, as in BoTNet.

    ``q`` is not scaled in it. The tables, ``position.height_rel (2h - 1, d)`` and ``position.width_rel (2w - 1, d)``,
    are shared by the heads. They are folded into the dot product: the query is extended by its logits against each row
    and column, the key by the one-hot vector of its own, so that any fused kernel runs it and memory grows with tokens.
    On a map of another size the tables are stretched linearly.

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

    def build(
        self, shape: BlockShape, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> PositionTerm:
        """The term for one block, with a table for each axis that is attended along.

        Arguments are those of :meth:`vision_attn.position.Specification.build`.

        Raises:
            ValueError: ``feat_size`` is missing, or does not fit the block's pattern.
        """
        return DecomposedTerm(self, shape, device, dtype)


class DecomposedTerm(PositionTerm):
    compares_places = True

    def __init__(
        self,
        specification: RelPosDecomposed,
        shape: BlockShape,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(specification)
        extents = table_extents("RelPosDecomposed", specification.feat_size, shape)
        self.fixed = tuple(extent is not None for extent in shape.tiling.fixed_extents)
        self.tables: dict[int, str] = {}  # by axis
        for axis, (name, extent) in enumerate(zip(AXIS_NAMES[-shape.rank :], extents, strict=True)):
            if shape.tiling.attended[axis]:
                self.tables[axis] = f"{name}_rel"
                table = torch.randn(2 * extent - 1, shape.key_dim, device=device, dtype=dtype) * shape.key_dim**-0.5
                self.register_parameter(f"{name}_rel", nn.Parameter(table))

    def extend(
        self, q: Tensor, k: Tensor, scale: float, offsets: Sequence[Tensor], *, einx: bool
    ) -> tuple[Tensor, Tensor, float]:
        logits, places = [], []
        for axis, name in self.tables.items():
            table = self.table_for(getattr(self, name), axis, offsets[axis]).to(q.dtype)
            relative = table[offsets[axis] + table.shape[0] // 2]  # (tiles, queries, keys, d)
            logits.append((logits_einx if einx else logits_bmm)(q, relative, axis, offsets))
            places.append(one_hot(k, axis, offsets))
        if einx:
            return join_einx(scale * q, logits), join_einx(k, places), 1.0
        return torch.cat([scale * q, *logits], dim=-1), torch.cat([k, *places], dim=-1), 1.0

    def table_for(self, table: Tensor, axis: int, offset: Tensor) -> Tensor:
        """The table as long as the groups on this map ask for."""
        return table if self.fixed[axis] else resample(table, 2 * offset.shape[-1] - 1)

    def resampled(self, name: str, saved: Tensor) -> Tensor | None:
        table = getattr(self, name)
        if saved.dim() != 2 or saved.shape[1] != table.shape[1] or saved.shape[0] % 2 == 0:
            return None
        return resample(saved, table.shape[0])


# --- the two forms: t h w are the queries along each axis, T H W tiles of them ----------------------------------------


def logits_einx(q: Tensor, relative: Tensor, axis: int, offsets: Sequence[Tensor]) -> Tensor:
    """Each query's logit against each place of the keys along one axis, ``(b·groups, n, queries, places)``."""
    import einx

    axes = AXES[-len(offsets) :]
    tiles = " ".join(name.upper() for name in axes)
    tokens = " ".join(axes)
    along = axes[axis]
    sizes = {name: offset.shape[1] for name, offset in zip(axes, offsets, strict=True)}
    sizes.update({name.upper(): offset.shape[0] for name, offset in zip(axes, offsets, strict=True)})
    line = f"(b {tiles}) n ({tokens}) d, {along.upper()} {along} place d -> (b {tiles}) n ({tokens}) place"
    return einx.dot(line, q, relative, **sizes)


def logits_bmm(q: Tensor, relative: Tensor, axis: int, offsets: Sequence[Tensor]) -> Tensor:
    """The twin of :func:`logits_einx` without einx: one batched product for each tile and place of the queries."""
    rank = len(offsets)
    tiles, queries = [offset.shape[0] for offset in offsets], [offset.shape[1] for offset in offsets]
    n, d = q.shape[1], q.shape[3]
    x = q.reshape(-1, *tiles, n, *queries, d)  # b T H W n t h w d
    x = x.movedim((1 + axis, 2 + rank + axis), (0, 1))  # the axis' tiles and queries first
    rest = x.shape[2:-1]
    tile, query, place, _ = relative.shape
    x = torch.bmm(x.reshape(tile * query, -1, d), relative.reshape(tile * query, place, d).transpose(1, 2))
    x = x.view(tile, query, *rest, place).movedim((0, 1), (1 + axis, 2 + rank + axis))
    return x.reshape(q.shape[0], n, q.shape[2], place)


def one_hot(k: Tensor, axis: int, offsets: Sequence[Tensor]) -> Tensor:
    """Where each key lies along an axis, ``(b·groups, n, keys, places)``."""
    keys = [offset.shape[2] for offset in offsets]
    number = torch.arange(product(keys), device=k.device)
    place = number // product(keys[axis + 1 :]) % keys[axis]
    places = (place[:, None] == torch.arange(keys[axis], device=k.device)).to(k.dtype)
    return places.expand(*k.shape[:2], -1, -1)


def join_einx(x: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Queries or keys and what extends them, side by side along their width."""
    import einx

    names = [f"p{number}" for number in range(len(others))]
    parts = ", ".join(f"b n i {name}" for name in ["d", *names])
    return einx.id(f"{parts} -> b n i ({' + '.join(['d', *names])})", x, *others)

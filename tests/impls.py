"""Implementations, patterns and position encodings that several test files use."""

from collections.abc import Callable
from typing import NamedTuple

import reference as R
import torch

import vision_attn as va
from vision_attn.attention import flex

#: Implementations that support training on a CPU. FlexAttention does not support gradients there.
CPU_IMPLS = tuple(impl for impl in va.implementations.IMPLS if impl != "flex")


class Case(NamedTuple):
    """A pattern, its relations for a size, and for each axis True if the groups grow with the feature map."""

    pattern: object
    relations: Callable
    grows: tuple[bool, bool] = (False, False)


def same(relation, *sides):
    """Return a function that builds the same relation for both axes, with separate arguments for each axis."""
    return lambda h, w: (relation(h, *sides[0]), relation(w, *sides[-1]))


STRIPES = va.Pattern("b n d h (w s) -> (b s) n (h w) d", s=2)
CASES = {
    "full": Case("full", lambda h, w: (R.full(h), R.full(w)), (True, True)),
    "rows": Case("rows", lambda h, w: (R.stripes(h, h), R.full(w)), (False, True)),
    "columns": Case("columns", lambda h, w: (R.full(h), R.stripes(w, w)), (True, False)),
    "window": Case(va.Window(3), same(R.window, [3])),
    "shifted window": Case(va.Window((4, 3), shift=(2, 1)), same(R.window, [4, 2], [3, 1])),
    "grid": Case(va.Grid((2, 3)), same(R.grid, [2], [3])),
    "halo": Case(va.Halo((2, 3), (1, 2)), same(R.halo, [2, 1], [3, 2])),
    "neighborhood": Case(va.Neighborhood(3), same(R.neighborhood, [3])),
    "even, dilated": Case(va.Neighborhood((4, 3), dilation=(1, 2)), same(R.neighborhood, [4], [3, 2])),
    "strided": Case(va.Neighborhood((5, 3), (1, 2), stride=(4, 2)), same(R.neighborhood, [5, 1, 4], [3, 2, 2])),
    "causal": Case(va.Neighborhood(3, 1, (1, 3), (False, True)), same(R.neighborhood, [3], [3, 1, 3, True])),
    "stripes": Case(STRIPES, lambda h, w: (R.full(h), R.stripes(w, 2)), (True, True)),
}
PATTERNS = [case.pattern for case in CASES.values()]
#: Position encodings, and classes of encodings whose tables need a size.
POSITIONS = (None, va.RelPosDecomposed, va.RelPosTable, va.AbsPos, va.Rope(), va.ConditionalPos(3), va.SinCos())


#: Options of a block that use every feature.
OPTIONS = {
    "shifted window, table": {"pattern": va.Window(7, shift=3), "position": va.RelPosTable()},
    "decomposed": {"position": va.RelPosDecomposed(feat_size=(7, 7))},
    "causal, table": {"position": va.RelPosTable(feat_size=(7, 7)), "causal": True},
    "neighborhood, decomposed": {"pattern": va.Neighborhood(3), "position": va.RelPosDecomposed()},
    "rotary, multi-query": {"position": va.Rope(), "num_kv_heads": 1, "qk_norm": True},
    "rows, convolution": {"pattern": "rows", "position": va.ConditionalPos(3), "output_gate": True},
    "absolute": {"position": va.AbsPos((7, 7))},
    "match": {"qk_norm": "match"},
    "pooled": {"kv_stride": 2},
    "stripes, sinusoidal": {"pattern": va.Pattern("b n d h (w s) -> (b s) n (h w) d", s=7), "position": va.SinCos()},
}


def make_position(position, pattern, size):
    """Return a position encoding; tables are created for feature maps of a size, or for the windows of a pattern."""
    if not isinstance(position, type):
        return position
    return position(size if isinstance(pattern, str | va.Pattern) or position is va.AbsPos else None)


def dense_flex(q, k, v, *, score_mod, block_mask, scale, enable_gqa):
    """Compute FlexAttention as documented by torch, with all scores in memory."""
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = scale * q @ k.mT
    index = [torch.arange(n).view([-1 if i == axis else 1 for i in range(4)]) for axis, n in enumerate(scores.shape)]
    if score_mod is not None:
        scores = score_mod(scores, *index)
    if block_mask is not None:
        scores = torch.where(block_mask.mask_mod(*index), scores, -torch.inf)
    weights = torch.where((scores > -torch.inf).any(-1, keepdim=True), scores, 0.0).softmax(-1)
    return torch.where(scores > -torch.inf, weights, 0.0) @ v


def uncompile_flex(patch):
    """Make ``impl="flex"`` run uncompiled, and accept inputs that it does not support."""
    patch.setattr(flex, "compiled", lambda *shapes: dense_flex)
    patch.setattr(flex, "check_flex", lambda *inputs, **options: None)

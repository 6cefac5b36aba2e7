"""Layers that are given windows: which ones is for their caller to know, and for the pattern to say."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from vision_attn.attend import IMPLEMENTATIONS
from vision_attn.convert.proof import SIZES
from vision_attn.patterns import AnyPattern, Grid, Window, partition_of, resolve_pattern

__all__ = ["check_pattern", "proof_size", "run_in_groups"]


def check_pattern(pattern: str | AnyPattern) -> None:
    """Refuse a pattern that is neither of the two partitions of MaxViT nor the whole map."""
    resolved = resolve_pattern(pattern)
    if resolved == resolve_pattern("full") or isinstance(resolved, Grid):
        return
    if isinstance(resolved, Window):
        shifts = resolved.shift if isinstance(resolved.shift, tuple) else (resolved.shift,)
        if not any(shifts):
            return
    raise ValueError(f"pattern must be 'full', a Window without shift or a Grid, as in MaxViT; got {pattern!r}")


def proof_size(pattern: str | AnyPattern, feat_size: tuple[int, ...] | None) -> tuple[int, ...]:
    """The size of a map of two windows or grids; with a pattern that has none, the size that the tables are for."""
    height, width = resolve_pattern(pattern).partitioner(2).window_shape
    if height is None or width is None:
        return feat_size or SIZES[2]
    return height, 2 * width


def run_in_groups(attend: Callable[[Tensor], Tensor], pattern: str | AnyPattern, x: Tensor) -> Tensor:
    """What a layer gives for the groups that the pattern makes of a map, put together again, ``(b, c, h, w)``.

    The groups are made by the code that the block makes them by: what is proven so is the layer, not ``pattern``.
    """
    part = partition_of(resolve_pattern(pattern).partitioner(2), x)
    one_head = IMPLEMENTATIONS["bmm"]
    tokens = one_head.heads_apart(part.fit(x, one_head.split), 1, 1)[0, :, 0]
    return part.restore(one_head.heads_together(attend(tokens)[:, None], part.cut.window), one_head.merge)

"""Layers that are given windows: which ones is for their caller to know, and for the pattern to say."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from vision_attn.convert.proof import SIZES
from vision_attn.patterns import Grid, Specification, Window, resolve_pattern

__all__ = ["check_pattern", "proof_size", "run_in_groups"]


def check_pattern(pattern: str | Specification) -> None:
    """Refuse a pattern that is neither of the two partitions of MaxViT nor the whole map.

    Args:
        pattern: the pattern.

    Raises:
        ValueError: it is another one.
    """
    resolved = resolve_pattern(pattern)
    if resolved == resolve_pattern("full") or isinstance(resolved, Grid):
        return
    if isinstance(resolved, Window):
        shifts = resolved.shift if isinstance(resolved.shift, tuple) else (resolved.shift,)
        if not any(shifts):
            return
    raise ValueError(f"pattern must be 'full', a Window without shift or a Grid, as in MaxViT; got {pattern!r}")


def proof_size(pattern: str | Specification, feat_size: tuple[int, ...] | None) -> tuple[int, ...]:
    """The size of a map of two windows or grids; with a pattern that has none, the size that the tables are for.

    Args:
        pattern: the pattern.
        feat_size: the size that the tables are for, in positions; None without tables.
    """
    height, width = resolve_pattern(pattern).tiling(2).fixed_extents
    if height is None or width is None:
        return feat_size or SIZES[2]
    return height, 2 * width


def run_in_groups(attend: Callable[[Tensor], Tensor], pattern: str | Specification, x: Tensor) -> Tensor:
    """What a layer gives for the groups that the pattern makes of a map, put together again, ``(b, c, h, w)``.

    The groups are made by the code that the block makes them by: what is proven so is the layer, not ``pattern``.

    Args:
        attend: takes and gives tokens ``(groups, tokens, c)``.
        pattern: makes the groups.
        x: the map ``(b, c, h, w)``.
    """
    tiling = resolve_pattern(pattern).tiling(2)
    tokens = tiling.split(x[:, None])[:, 0]
    return tiling.merge(attend(tokens)[:, None], x.shape[2:])[:, 0]

"""Attention patterns: which positions of a map become the tokens of one attention.

A pattern is one line of einx, with a raw view/permute twin beside it. The block asks its pattern to split the projected
map into queries, keys and values, and to put the attended tokens back in their places; nothing else in the block knows
where a token came from.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["PATTERNS", "Full", "resolve_pattern"]


@dataclass(frozen=True)
class Full:
    """Every token of a map attends to every token of it; tokens are row-major over ``(h, w)``."""

    def split_einx(self, qkv: Tensor, num_heads: int) -> tuple[Tensor, ...]:
        """Cut ``(b, 3·n·d, h, w)`` into q, k and v, each ``(b, n, h·w, d)``."""
        import einx

        q, k, v = einx.id("b (qkv n d) h w -> qkv b n (h w) d", qkv, qkv=3, n=num_heads)
        return q, k, v

    def merge_einx(self, y: Tensor, size: tuple[int, int]) -> Tensor:
        """Put tokens ``(b, n, h·w, d)`` back on the map ``(b, n·d, h, w)``."""
        import einx

        return einx.id("b n (h w) d -> b (n d) h w", y, h=size[0], w=size[1])

    def split_bmm(self, qkv: Tensor, num_heads: int) -> tuple[Tensor, ...]:
        """The twin of :meth:`split_einx` without einx. On a channels-last map all three are views."""
        b, channels, h, w = qkv.shape
        d = channels // (3 * num_heads)
        qkv = qkv.view(b, 3, num_heads, d, h, w).flatten(4)  # b qkv n d (h w)
        q, k, v = qkv.permute(1, 0, 2, 4, 3)  # qkv b n (h w) d
        return q, k, v

    def merge_bmm(self, y: Tensor, size: tuple[int, int]) -> Tensor:
        """The twin of :meth:`merge_einx` without einx."""
        b, n, _, d = y.shape
        y = y.permute(0, 1, 3, 2)  # b n d (h w)
        return y.reshape(b, n * d, *size)


#: The patterns that have a name.
PATTERNS = {"full": Full()}


def resolve_pattern(pattern: str) -> Full:
    """The pattern of a name.

    Raises:
        ValueError: the name is none of :data:`PATTERNS`.

    >>> resolve_pattern("full")
    Full()
    """
    if pattern not in PATTERNS:
        raise ValueError(f"pattern must be one of {', '.join(map(repr, PATTERNS))}; got {pattern!r}")
    return PATTERNS[pattern]

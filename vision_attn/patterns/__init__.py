"""Attention patterns: which positions of a map become the tokens of one attention.

A pattern is one line of einx, with a twin of view, permute and reshape. The block asks the tiling of its pattern to cut
queries, keys and values into groups of tokens, and to put the attended tokens back; nothing else in the block knows
where a token came from. Letters: ``b`` batch, ``n`` heads, ``d`` width of a head, ``t h w`` the axes of the map.
"""

from vision_attn.patterns.heads import heads_apart_bmm, heads_apart_einx, heads_bmm, heads_einx, join_bmm, join_einx
from vision_attn.patterns.specifications import (
    PATTERNS,
    Grid,
    Neighborhood,
    Pattern,
    Specification,
    Tiling,
    Window,
    resolve_pattern,
)

__all__ = [
    "PATTERNS",
    "Grid",
    "Neighborhood",
    "Pattern",
    "Specification",
    "Tiling",
    "Window",
    "heads_apart_bmm",
    "heads_apart_einx",
    "heads_bmm",
    "heads_einx",
    "join_bmm",
    "join_einx",
    "resolve_pattern",
]

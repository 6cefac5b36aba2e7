"""Attention patterns: which positions of a map attend to each other.

A pattern is one line of einx. On maps of one size it is a partition into groups of tokens, which attend to each other
and to nothing else. Letters: ``b`` batch, ``n`` heads, ``d`` width of a head, ``t h w`` the axes of the map.
"""

from vision_attn.attention.patterns.line import AXES, Cut, Line
from vision_attn.attention.patterns.partition import Partition, Partitioner, Partitions, Side
from vision_attn.attention.patterns.specifications import (
    PATTERNS,
    AnyPattern,
    Grid,
    Halo,
    Neighborhood,
    Pattern,
    Window,
    resolve_pattern,
)

__all__ = [
    "AXES",
    "PATTERNS",
    "AnyPattern",
    "Cut",
    "Grid",
    "Halo",
    "Line",
    "Neighborhood",
    "Partition",
    "Partitioner",
    "Partitions",
    "Pattern",
    "Side",
    "Window",
    "resolve_pattern",
]

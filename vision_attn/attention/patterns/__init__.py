"""Attention patterns: which positions of a map attend to each other.

A pattern is one line of einx. On maps of one size it is a partition into groups of tokens, which attend to each other
and to nothing else. Letters: ``b`` batch, ``n`` heads, ``d`` width of a head, ``t h w`` the axes of the map.
"""

from vision_attn.attention.patterns.partition import Partition, Partitioner
from vision_attn.attention.patterns.specifications import (
    PATTERNS,
    AnyPattern,
    Grid,
    Halo,
    Neighborhood,
    Pattern,
    Window,
)
from vision_attn.attention.patterns.specifications import resolve_pattern as resolve_pattern

__all__ = ["PATTERNS", "AnyPattern", "Grid", "Halo", "Neighborhood", "Partition", "Partitioner", "Pattern", "Window"]

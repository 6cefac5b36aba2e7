"""Attention patterns: which positions of a feature map attend to each other.

A pattern is one line of einx. On maps of one size it is a :class:`Grouping` of tokens, which attend to each other and
to nothing else. Letters: ``b`` batch, ``n`` heads, ``d`` width of a head, ``t h w`` the axes of the map.
"""

from vision_attn.attention.patterns.grouping import Grouping, GroupingCache
from vision_attn.attention.patterns.halo import Halo
from vision_attn.attention.patterns.lines import PATTERNS, Grid, Pattern, Window, resolve_pattern
from vision_attn.attention.patterns.neighborhood import Neighborhood
from vision_attn.attention.patterns.pattern import AnyPattern

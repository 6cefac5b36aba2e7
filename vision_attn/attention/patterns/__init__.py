"""Attention patterns: which positions of a feature map attend to each other.

Most patterns are one einx expression, which partitions the feature map into groups of tokens. Tokens attend to each
other inside their group only. A :class:`Grouping` is a pattern for feature maps of one size.

Letters: ``b`` batch, ``n`` heads, ``d`` width of a head, ``t h w`` the axes of the feature map.
"""

from vision_attn.attention.patterns.expression_patterns import PATTERNS, Grid, Pattern, Window, resolve_pattern
from vision_attn.attention.patterns.grouping import Grouping
from vision_attn.attention.patterns.halo import Halo
from vision_attn.attention.patterns.neighborhood import Neighborhood
from vision_attn.attention.patterns.pattern import AnyPattern

"""All attention layers and blocks. ``Attention2d`` and ``AttentionBlock2d`` are also in ``vision_attn``.

The layers are :class:`Attention1d`, :class:`Attention2d` and :class:`Attention3d`. The blocks are
:class:`AttentionBlock1d`, :class:`AttentionBlock2d` and :class:`AttentionBlock3d`. The others are
:class:`TransformerBlock2d`, :class:`LinearAttention2d`, :class:`AugmentedConv2d` and :class:`StridedAttention2d`.
"""

from vision_attn.attention.blocks import *  # noqa: F403
from vision_attn.attention.blocks import __all__ as __all__

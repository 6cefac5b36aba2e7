"""Attention as modules."""

from vision_attn.attention.blocks.attention import (
    Attention,
    Attention1d,
    Attention2d,
    Attention3d,
    attention_modules,
)
from vision_attn.attention.blocks.augmented import AugmentedConv2d, StridedAttention2d
from vision_attn.attention.blocks.linear import LinearAttention2d
from vision_attn.attention.blocks.residual import (
    AttentionBlock1d,
    AttentionBlock2d,
    AttentionBlock3d,
    TransformerBlock2d,
)
from vision_attn.attention.blocks.specified import SWAPPED, set_impl_, use_impl

__all__ = [
    "SWAPPED",
    "Attention",
    "Attention1d",
    "Attention2d",
    "Attention3d",
    "AttentionBlock1d",
    "AttentionBlock2d",
    "AttentionBlock3d",
    "AugmentedConv2d",
    "LinearAttention2d",
    "StridedAttention2d",
    "TransformerBlock2d",
    "attention_modules",
    "set_impl_",
    "use_impl",
]

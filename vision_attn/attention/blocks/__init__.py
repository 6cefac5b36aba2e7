"""Attention layers and blocks for feature maps."""

from vision_attn.attention.blocks.attention import Attention1d, Attention2d, Attention3d
from vision_attn.attention.blocks.attention_nd import Attention
from vision_attn.attention.blocks.augmented import AugmentedConv2d, StridedAttention2d
from vision_attn.attention.blocks.gated_residual import AttentionBlock1d, AttentionBlock2d, AttentionBlock3d
from vision_attn.attention.blocks.linear import LinearAttention2d
from vision_attn.attention.blocks.transformer_block import TransformerBlock2d

__all__ = [
    "Attention1d", "Attention2d", "Attention3d", "AttentionBlock1d", "AttentionBlock2d", "AttentionBlock3d",
    "AugmentedConv2d", "LinearAttention2d", "StridedAttention2d", "TransformerBlock2d",
]  # fmt: skip

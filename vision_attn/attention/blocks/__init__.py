"""Attention as modules."""

from vision_attn.attention.blocks.attention import Attention, Attention1d, Attention2d, Attention3d
from vision_attn.attention.blocks.augmented import AugmentedConv2d
from vision_attn.attention.blocks.implementation import EXCHANGED, attention_modules, set_impl_, use_impl
from vision_attn.attention.blocks.linear import LinearAttention2d
from vision_attn.attention.blocks.residual import AttentionBlock1d, AttentionBlock2d, AttentionBlock3d
from vision_attn.attention.blocks.strided import StridedAttention2d
from vision_attn.attention.blocks.transformer import TransformerBlock2d

__all__ = [
    "EXCHANGED",
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

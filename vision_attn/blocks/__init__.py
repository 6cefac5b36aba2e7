"""Attention as modules."""

from vision_attn.blocks.attention import Attention2d
from vision_attn.blocks.implementation import attention_modules, set_impl, use_impl
from vision_attn.blocks.residual import AttentionBlock2d, ConvBlock2d

__all__ = ["Attention2d", "AttentionBlock2d", "ConvBlock2d", "attention_modules", "set_impl", "use_impl"]

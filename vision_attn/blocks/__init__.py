"""Attention as modules."""

from vision_attn.blocks.attention import Attention, Attention1d, Attention2d, Attention3d
from vision_attn.blocks.augmented import AugmentedConv2d
from vision_attn.blocks.controls import ConvBlock2d, NormBlock2d, SqueezeExciteBlock2d
from vision_attn.blocks.implementation import EXCHANGED, attention_modules, set_impl, use_impl
from vision_attn.blocks.linear import LinearAttention2d
from vision_attn.blocks.residual import AttentionBlock1d, AttentionBlock2d, AttentionBlock3d
from vision_attn.blocks.strided import StridedAttention2d
from vision_attn.blocks.transformer import TransformerBlock2d

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
    "ConvBlock2d",
    "LinearAttention2d",
    "NormBlock2d",
    "SqueezeExciteBlock2d",
    "StridedAttention2d",
    "TransformerBlock2d",
    "attention_modules",
    "set_impl",
    "use_impl",
]

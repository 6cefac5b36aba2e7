"""Attention between tokens: the implementations side by side, what they share, and their names."""

from vision_attn.attend.masks import masks_together, without_later_keys
from vision_attn.attend.registry import IMPLS, attend, attention_weights, check_impl, register_impl

__all__ = [
    "IMPLS",
    "attend",
    "attention_weights",
    "check_impl",
    "masks_together",
    "register_impl",
    "without_later_keys",
]

"""Attention between tokens: the implementations side by side, what they share, and their names."""

from vision_attn.attention.attend.implementations import Implementation
from vision_attn.attention.attend.masks import check_mask, combine_masks, open_rows, upcast, with_causal_mask
from vision_attn.attention.attend.registry import (
    IMPLEMENTATIONS,
    IMPLS,
    attend,
    attend_groups,
    attention_weights,
    check_impl,
    register_impl,
    repeat_kv,
)

__all__ = [
    "IMPLEMENTATIONS",
    "IMPLS",
    "Implementation",
    "attend",
    "attend_groups",
    "attention_weights",
    "check_impl",
    "check_mask",
    "combine_masks",
    "open_rows",
    "register_impl",
    "repeat_kv",
    "upcast",
    "with_causal_mask",
]

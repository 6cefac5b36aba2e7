"""Implementations of attention: their names, :data:`IMPLS`, and :func:`register_impl`, which adds one."""

from vision_attn.attention.implementations import IMPLS, register_impl

__all__ = ["IMPLS", "register_impl"]

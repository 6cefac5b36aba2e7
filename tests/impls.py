"""Implementations that train on a CPU. FlexAttention does not, and has separate tests."""

import vision_attn as va

CPU_IMPLS = tuple(impl for impl in va.IMPLS if impl != "flex")

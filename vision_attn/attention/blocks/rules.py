"""Checks of the arguments of :class:`Attention2d`."""

from numbers import Integral, Real
from typing import Any

from torch import Tensor

from vision_attn.attention.kind import AttentionConfig, check_causal
from vision_attn.attention.patterns import AnyPattern
from vision_attn.checks import check_above, check_bool, check_divides


def check_arguments(a: Any, pattern: AnyPattern) -> AttentionConfig:
    """Raise if arguments contradict each other, and return them with their defaults; the pattern is resolved."""
    names = ["channels", "num_heads", "num_kv_heads", "key_dim", "value_dim", "groups", "kv_stride"]
    names += ["out_channels", "context_channels"]
    check_above(0, Integral, **{name: getattr(a, name) for name in names})
    check_bool(qkv_bias=a.qkv_bias, proj_bias=a.proj_bias, output_gate=a.output_gate)
    if a.key_dim is None or a.value_dim is None:
        check_divides("num_heads", a.num_heads, "channels", a.channels)
    n, width, context = a.num_heads, a.channels // a.num_heads, a.context_channels
    m, d, e, out_channels = a.num_kv_heads or n, a.key_dim or width, a.value_dim or width, a.out_channels or a.channels
    check_divides("num_kv_heads", m, "num_heads", n)
    check_divides("groups", a.groups, "channels", a.channels)
    check_divides("groups", a.groups, "num_heads · key_dim", n * d)
    check_divides("groups", a.groups, "out_channels", out_channels)

    def reject(name: str, is_broken: bool, rule: str) -> None:
        if is_broken:
            raise ValueError(f"{name} {rule}, got {name}={getattr(a, name)!r}")

    is_scale = a.scale is None or isinstance(a.scale, Real | Tensor)
    reject("scale", not is_scale, "must be a number, or a tensor with one element")
    layer_norm, match = isinstance(a.qk_norm, bool), a.qk_norm == "match"
    reject("qk_norm", not (layer_norm or match or a.qk_norm == "cosine"), "must be False, True, 'cosine' or 'match'")
    same = "must be 1 with num_kv_heads, context_channels, or different key_dim and value_dim"
    reject("groups", a.groups > 1 and ((m, e) != (n, d) or context is not None), same)
    tied = f"must not be 'match' with context_channels={context}: queries and keys need inputs of equal width"
    reject("qk_norm", match and context not in (None, a.channels), tied)
    reject("pattern", a.kv_stride > 1 and not pattern.is_global, f"must be 'full' with kv_stride={a.kv_stride}")
    config = AttentionConfig(a.channels, n, m, d, e, out_channels, context, a.groups, a.qk_norm, a.kv_stride, pattern)
    check_causal(a.causal, config)
    return config

"""The configuration of a block, and the kind of a call, on which its plan depends, with their checks.

The kind of a call is the properties of its inputs, and not their values, and the modes in which it runs.
"""

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch

from vision_attn.attention.kernels import Kernel
from vision_attn.attention.masks import check_mask
from vision_attn.attention.patterns import AnyPattern, Neighborhood
from vision_attn.checks import check_above, check_bool, check_divides

#: Names of the axes of a feature map in state dicts and messages. A feature map with fewer axes has the last names.
AXIS_NAMES = ("depth", "height", "width")


class AttentionConfig(NamedTuple):
    """The options of a block that cannot change after it was built."""

    channels: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    out_channels: int
    context_channels: int | None
    groups: int
    qk_norm: bool | str
    kv_stride: int
    #: The pattern for the axes of the block's feature maps.
    resolved_pattern: AnyPattern
    #: True if the position encoding is relative: queries and keys must come from the same feature map.
    is_relative: bool = False

    @property
    def rank(self) -> int:
        """The number of axes of the feature map."""
        return self.resolved_pattern.rank

    @property
    def is_cross(self) -> bool:
        """True if keys come from another feature map: a pooled feature map or the context."""
        return self.kv_stride > 1 or self.context_channels is not None


class Kind(NamedTuple):
    """The kind of a call: the properties of its inputs, the modes of torch, and the options that may change."""

    kernel: Kernel
    #: The shape and the device of the feature maps.
    shape: torch.Size
    device: torch.device
    #: The shape and dtype of the mask.
    mask: tuple[torch.Size, torch.dtype] | None
    #: The shape of the context.
    context: torch.Size | None
    causal: bool
    #: The dropout probability of the weights; zero in evaluation mode.
    dropout: float
    #: True if autocast is on, which computes the logits in half precision unless it is turned off.
    autocast: bool
    #: True while a graph is traced or exported.
    in_graph: bool
    #: True if attention may run in chunks that fit into the caches of a CPU.
    can_chunk: bool


def pooled_size(size: Sequence[int], stride: int) -> tuple[int, ...]:
    """Return the size of a feature map of keys after pooling."""
    return tuple(size if stride == 1 else [(length + stride - 1) // stride for length in size])


def check_causal(causal: bool, config: AttentionConfig) -> None:
    """Raise if an option of the block would let a causal block read later positions."""
    check_bool(causal=causal)
    for is_broken, rule in (
        (config.is_cross, "must be False with kv_stride or context"),
        (isinstance(config.resolved_pattern, Neighborhood), "must be False: use Neighborhood(causal=True)"),
        (config.qk_norm == "match", "must be False with qk_norm='match': its mean includes later positions"),
    ):
        if causal and is_broken:
            raise ValueError(f"causal {rule}, got causal=True")


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

    reject("scale", not isinstance(a.scale, Real | None), "must be a number")
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


def check_kind(kind: Kind, config: AttentionConfig) -> None:
    """Raise for an invalid mask or context, or if the block may not be causal."""
    check_causal(kind.causal, config)
    context, shape = kind.context, kind.shape
    if context is None and config.context_channels is not None:
        expected = f"feature maps, because the block was created with context_channels={config.context_channels}"
        raise ValueError(f"context must be {expected}, got None")
    if context is not None:
        channels = config.context_channels or config.channels
        if len(context) != len(shape) or context[1] != channels:
            raise shape_error("context", tuple(context), channels, len(shape) - 2)
        if context[0] != shape[0]:
            raise ValueError(f"context must have the batch size of x, {shape[0]}, got {context[0]}")
        needs_size = not config.resolved_pattern.is_global or kind.causal or config.is_relative
        if needs_size and context[2:] != shape[2:]:
            cause = "with a pattern other than 'full', causal=True or relative positions"
            raise ValueError(f"context must have the size of x {cause}, got {context[2:]} and {shape[2:]}")
    if kind.mask is not None:
        keys_size = pooled_size((context or shape)[2:], config.kv_stride)
        check_mask(*kind.mask, shape[0], config.num_heads, shape[2:], keys_size)


def shape_error(name: str, got: object, channels: int, rank: int) -> ValueError:
    """Return the error for an argument that is not a batch of feature maps ``(b, channels, …)`` with ``rank`` axes."""
    shape = ", ".join(("batch", str(channels), *AXIS_NAMES[-rank:]))
    return ValueError(f"{name} must be feature maps of shape ({shape}), got {got}")

"""The kind of a call: the properties of its inputs, and not their values, and the modes in which it runs."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from vision_attn.attention.kernels import Kernel
from vision_attn.attention.masks import check_mask
from vision_attn.attention.patterns import AnyPattern, Neighborhood
from vision_attn.checks import check_bool

#: Names of the axes of a feature map in error messages, by the number of axes.
AXES_IN_WORDS = {1: "width", 2: "height, width", 3: "depth, height, width"}


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
    #: True if the position encoding may add a bias to the logits.
    adds_bias: bool = False
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
    scale: float
    causal: bool
    #: The dropout probability of the weights; zero in evaluation mode.
    dropout: float
    #: True if autocast is on, which computes the logits in half precision unless it is turned off.
    autocast: bool
    #: True while a graph is traced or exported.
    in_graph: bool
    #: True in a transform of ``torch.func``.
    in_transform: bool


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


def check_kind(kind: Kind, config: AttentionConfig) -> None:
    """Raise for an invalid mask or context, or if the block may not be causal."""
    check_causal(kind.causal, config)
    context, shape = kind.context, kind.shape
    keys_size: Sequence[int] = shape[2:]
    if context is None and config.context_channels is not None:
        expected = f"feature maps, because the block was created with context_channels={config.context_channels}"
        raise ValueError(f"context must be {expected}, got None")
    if context is not None:
        channels, keys_size = config.context_channels or config.channels, context[2:]
        if len(context) != len(shape) or context[1] != channels:
            raise shape_error("context", tuple(context), channels, len(shape) - 2)
        if context[0] != shape[0]:
            raise ValueError(f"context must have the batch size of x, {shape[0]}, got {context[0]}")
        needs_size = not config.resolved_pattern.is_global or kind.causal or config.is_relative
        if needs_size and keys_size != shape[2:]:
            cause = "with a pattern other than 'full', causal=True or relative positions"
            raise ValueError(f"context must have the size of x {cause}, got {keys_size} and {shape[2:]}")
    if kind.mask is not None:
        keys_size = pooled_size(keys_size, config.kv_stride)
        check_mask(*kind.mask, shape[0], config.num_heads, shape[2:], keys_size)


def shape_error(name: str, got: object, channels: int, rank: int) -> ValueError:
    """Return the error for an argument that is not a batch of feature maps ``(b, channels, …)`` with ``rank`` axes."""
    return ValueError(f"{name} must be feature maps of shape (batch, {channels}, {AXES_IN_WORDS[rank]}), got {got}")

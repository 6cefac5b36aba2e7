"""The interface of a position encoding: add to the feature map, change queries and keys, or add to the logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from vision_attn.attention.dispatch import PositionBias
from vision_attn.attention.patterns.grouping import Grouping
from vision_attn.attention.patterns.pattern import AnyPattern

#: Queries and keys with their positions, and the bias of the logits.
Encoded = tuple[Tensor, Tensor, PositionBias | None]

#: Names of the axes of a feature map in state dicts; a map with fewer axes has the last ones.
AXIS_NAMES = ("depth", "height", "width")


@dataclass(frozen=True)
class AttentionShape:
    """The properties of a block that a position encoding is built for."""

    channels: int
    num_heads: int
    key_dim: int
    pattern: AnyPattern
    #: whether keys are from another feature map: pooled, or of the context
    is_cross: bool = False
    context_channels: int | None = None

    @property
    def rank(self) -> int:
        """The number of axes of the feature map."""
        return self.pattern.rank


class AnyPosition(Protocol):
    """The configuration of a position encoding: small, frozen, and printed as the code that makes it."""

    def build(self, shape: AttentionShape, device: object = None, dtype: object = None) -> PositionEncoding:
        """Build the encoding for one block, with its parameters.

        Raises:
            ValueError: the encoding does not fit the block.
        """


class PositionEncoding(nn.Module):
    """A position encoding that does nothing; each encoding overrides one of its methods."""

    #: True if positions of queries and keys are subtracted, so that they must be from one feature map.
    is_relative = False
    #: True if its parameters are tables for the size of a feature map.
    has_tables = False
    #: True if it is added to the feature map, whose number of channels it depends on.
    adds_to_map = False

    def __init__(self, config: AnyPosition) -> None:
        super().__init__()
        self.config = config

    def add_to_map(self, x: Tensor, grouping: Grouping) -> Tensor:
        """Add positions to a feature map ``(b, c, *size)``."""
        return x

    def forward(self, q: Tensor, k: Tensor, grouping: Grouping) -> Encoded:
        """Add positions to queries ``(b·groups, n, i, d)`` and keys ``(b·groups, m, j, d)``, or return a bias."""
        return q, k, None

    def resize_pos_embed(self, name: str, saved: Tensor) -> Tensor | None:
        """Resize a saved parameter for another size of feature map; None if it cannot be resized."""
        return None

    def extra_repr(self) -> str:
        return repr(self.config)


def new_encoding(position: AnyPosition, shape: AttentionShape, **factory: Any) -> PositionEncoding:
    """Build the position encoding of a block; raise if it does not fit the block's other arguments."""
    if isinstance(position, type) or not hasattr(position, "build"):
        raise ValueError(f"position must be None or an encoding, for example Rope2d(); got {position!r}")
    encoding = position.build(shape, **factory)
    if encoding.is_relative and shape.is_cross:
        raise ValueError(f"position must not be {position!r} with kv_stride or context_channels. Use Rope2d()")
    if encoding.adds_to_map and shape.context_channels not in (None, shape.channels):
        raise ValueError(f"position must not be {position!r} with another number of context_channels. Use Rope2d()")
    return encoding

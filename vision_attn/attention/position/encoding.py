"""The interface of a position encoding, which changes the feature map, the queries and keys, or the logits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from vision_attn.attention.fixed_options import FixedOptions
from vision_attn.attention.kind import AttentionConfig
from vision_attn.attention.masks import Mask
from vision_attn.attention.patterns.grouping import Grouping


class PositionBias:
    """The bias that a position encoding adds to the logits; subclasses override one or more methods."""

    #: If given, ``rel_logits(q)`` returns one term of the bias per axis for the queries that it receives, which can be
    #: few: ``(b·groups, n, i, <keys along this axis, 1 along the others>)``. The bias is the sum of the terms.
    rel_logits: Callable[[Tensor], list[Tensor]] | None = None

    def fold(self, q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor, float]:
        """Return queries, keys and a scale whose scaled dot products contain the bias, or a part of it."""
        return q, k, scale

    def attn_mask(self, mask: Mask) -> Mask:
        """Combine the mask of the pattern and the user, ``(b or 1, groups or 1, n or 1, i, j)``, with the bias."""
        return mask

    def scores(self) -> Callable[..., Tensor] | None:
        """Return the part of the bias that is not folded for FlexAttention: a function of head, query and key.

        The arguments are the indices of the head, and the coordinates of query and key. The result is None if the bias
        is folded completely.
        """
        raise ValueError(f"impl='flex' does not support {type(self).__name__}. Use another implementation: impl='sdpa'")


#: Encoded queries, encoded keys, and the bias of the logits.
Encoded = tuple[Tensor, Tensor, PositionBias | None]


class AnyPosition(Protocol):
    """The configuration of a position encoding, a frozen dataclass whose repr is the code that creates it."""

    def build(self, block: AttentionConfig, device: object = None, dtype: object = None) -> PositionEncoding:
        """Build the module for one block, with its parameters.

        Raises:
            ValueError: the encoding does not fit the block.
        """


class PositionEncoding(FixedOptions):
    """Base class of position encodings, an identity; subclasses override :meth:`add_to_map` or :meth:`forward`."""

    fixed: ClassVar[Collection[str]] = ("config",)
    #: True if relative positions are encoded: queries and keys must come from the same feature map.
    is_relative = False
    #: True if the encoding is added to the feature map and depends on its number of channels.
    adds_to_map = False

    def __init__(self, config: AnyPosition) -> None:
        super().__init__()
        self.config = config

    def add_to_map(self, x: Tensor, grouping: Grouping) -> Tensor:
        """Add the encoding to a feature map ``(b, c, *size)``."""
        return x

    def forward(self, q: Tensor, k: Tensor, grouping: Grouping) -> Encoded:
        """Encode queries ``(b·groups, n, i, d)`` and keys ``(b·groups, m, j, d)``; return both and a bias or None."""
        return q, k, None

    def resize_pos_embed(self, name: str, saved: Tensor) -> Tensor | None:
        """Resize a saved parameter to the shape in this module; return None if that is not possible."""
        return None

    def extra_repr(self) -> str:
        return repr(self.config)


class TableEncoding(PositionEncoding):
    """Base class of encodings whose parameters are tables, with shapes that depend on the size of the feature map.

    The elements are normally distributed at initialization, with the standard deviation ``std``.
    """

    def __init__(self, config: AnyPosition, std: float, tables: Mapping[str, Sequence[int]], **factory: Any) -> None:
        super().__init__(config)
        self.std = std
        for name, shape in tables.items():
            self.register_parameter(name, nn.Parameter(torch.randn(*shape, **factory) * std))

    def reset_parameters(self) -> None:
        for table in self.parameters():
            nn.init.normal_(table, std=self.std)


def new_encoding(position: AnyPosition, block: AttentionConfig, **factory: Any) -> PositionEncoding:
    """Build the position encoding of a block; raise if it contradicts another argument of the block."""
    if isinstance(position, type) or not hasattr(position, "build"):
        raise ValueError(f"position must be a position encoding such as va.Rope(), got {position!r}. Pass an instance")
    encoding = position.build(block, **factory)
    if encoding.is_relative and block.is_cross:
        raise ValueError(f"position must not be {position!r} with kv_stride or context_channels. Use va.Rope()")
    if encoding.adds_to_map and block.context_channels not in (None, block.channels):
        raise ValueError(f"position must not be {position!r} if context_channels != channels. Use va.Rope()")
    return encoding

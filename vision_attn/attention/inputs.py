"""The inputs of attention in the groups of a pattern, and the bias of a position encoding."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from vision_attn.attention.masks import Mask
from vision_attn.attention.patterns.grouping import Grouping


class PositionBias:
    """The bias that a position encoding adds to the logits; subclasses override one or more methods."""

    #: True if :meth:`rel_logits` returns the bias for the queries that it receives, so that they can be few.
    is_chunkable = False

    def fold(self, q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor, float]:
        """Return queries, keys and a scale whose scaled dot products contain the bias, or a part of it."""
        return q, k, scale

    def attn_mask(self, mask: Mask) -> Mask:
        """Combine the mask of the pattern and the user, ``(b or 1, groups or 1, n or 1, i, j)``, with the bias."""
        return mask

    def rel_logits(self, q: Tensor) -> list[Tensor]:
        """Return one term per axis, ``(b·groups, n, i, <keys along this axis, 1 along the others>)``.

        The bias is the sum of the terms.
        """
        raise NotImplementedError

    def scores(self) -> Callable[..., Tensor] | None:
        """Return the part of the bias that is not folded for FlexAttention: a function of head, query and key.

        The arguments are the indices of the head, and the coordinates of query and key. The result is None if the bias
        is folded completely.
        """
        raise ValueError(f"impl='flex' does not support {type(self).__name__}. Use another implementation: impl='sdpa'")


class AttentionInputs(NamedTuple):
    """The inputs of a kernel: attention in the groups of a pattern."""

    q: Tensor  # (b·groups, n, i, d)
    k: Tensor  # (b·groups, m, j, d)
    v: Tensor  # (b·groups, m, j, e)
    scale: float
    grouping: Grouping
    bias: PositionBias | None = None
    mask: Mask = None  # the mask passed by the user, broadcastable to (b, n, tokens, key tokens)

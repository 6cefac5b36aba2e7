"""What a block gives its kernel, and the weights of it on the map, which a fused kernel never holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vision_attn.attention.implementations import repeat_kv, without_autocast
from vision_attn.attention.masks import add_mask, causal_mask, combine_masks, upcast, zero_rows
from vision_attn.attention.patterns import Partition

__all__ = ["Given", "check_queries", "looking", "weights_on_map"]


class Given(NamedTuple):
    """What a block gives its kernel."""

    part: Partition
    q: Tensor  # (b·groups, n, i, d)
    k: Tensor  # (b·groups, m, j, d)
    v: Tensor  # (b·groups, m, j, e)
    scale: float
    mask: Tensor | None  # (b or 1, groups or 1, n or 1, i, j), bool or additive, in which each row has a key
    reachable: Tensor | None  # (b or 1, groups or 1, n or 1, i, 1): the rows that had one before; None: all
    causal: bool  # whether the kernel is to hide later keys


@contextmanager
def looking(block: Any, look: Callable[[Given], None]) -> Iterator[None]:
    """Show ``look`` what the block gives its kernel in each forward pass."""
    before = block.lookers
    block.lookers = (*before, look)
    try:
        yield
    finally:
        block.lookers = before


def weights_on_map(given: Given, queries: Tensor | None = None, heads: list[int] | None = None) -> Tensor:
    """The weights that a kernel gives the keys, ``(b, n, i, j)`` with zeros outside of a query's group.

    Of chosen queries (indices of tokens) and heads: the others take no memory.
    """
    part, q, k, _, scale, mask, reachable, causal = given
    if heads is not None:
        k = repeat_kv(q, k)[:, heads]
        q = q[:, heads]
        mask, reachable = (x if x is None or x.shape[2] == 1 else x[:, :, heads] for x in (mask, reachable))
    if queries is not None and causal:
        mask, causal = combine_masks(mask, causal_mask(q.shape[2], k.shape[2], q.device)), False
    if part.is_global:
        if queries is not None:
            q = q[:, :, queries]
            mask, reachable = (x if x is None or x.shape[3] == 1 else x[:, :, :, queries] for x in (mask, reachable))
        return attention_weights(q, k, scale, mask, reachable, causal)
    group, row = part.group_and_row(queries)
    if queries is None:
        weights = attention_weights(q, k, scale, mask, reachable, causal)
        weights = weights.unflatten(0, (-1, part.groups))[:, group, :, row].movedim(0, 2)
    else:  # each query as a group of its own
        q = q.unflatten(0, (-1, part.groups))[:, group, :, row].movedim(0, 1).flatten(0, 1)[:, :, None]
        k = k.unflatten(0, (-1, part.groups))[:, group].flatten(0, 1)
        tokens = part.queries.cut.tokens
        mask, reachable = (
            x if x is None else x.expand(-1, part.groups, -1, tokens, -1)[:, group, :, row].movedim(0, 1)[:, :, :, None]
            for x in (mask, reachable)
        )
        weights = attention_weights(q, k, scale, mask, reachable, causal)
        weights = weights[:, :, 0].unflatten(0, (-1, len(queries))).transpose(1, 2)
    return part.on_map(weights, group)


def attention_weights(
    q: Tensor, k: Tensor, scale: float, mask: Tensor | None, reachable: Tensor | None, causal: bool
) -> Tensor:
    """The weights ``softmax(scale q kᵀ + mask)`` that every implementation stands for, ``(b·groups, n, i, j)``."""
    with without_autocast(q):
        logits = scale * upcast(q) @ upcast(repeat_kv(q, k)).mT
        weights = torch.softmax(add_mask(logits, mask, causal), dim=-1)
    return zero_rows(weights, reachable)


def check_queries(queries: Tensor | None, tokens: int) -> None:
    """Refuse all but indices ``(i,)`` of so many tokens, or None for all."""
    if queries is None:
        return
    if not isinstance(queries, Tensor):
        raise ValueError(f"queries must be a tensor of indices, or None for all; got {type(queries).__name__}")
    if queries.dim() != 1 or queries.is_floating_point() or queries.dtype == torch.bool:
        raise ValueError(
            "queries must be indices of tokens, whole numbers of shape (i,); got "
            f"{queries.dtype} of shape {tuple(queries.shape)}"
        )
    if queries.numel() and not 0 <= int(queries.min()) <= int(queries.max()) < tokens:
        raise ValueError(
            f"queries must be indices of {tokens} tokens; got {int(queries.min())} to {int(queries.max())}"
        )

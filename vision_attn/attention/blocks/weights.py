"""What a block gives its kernel, and the weights of it on the map, which a fused kernel never holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vision_attn.attention.implementations import Given, repeat_kv, without_autocast
from vision_attn.attention.masks import Mask, add_mask, causal_mask, combine_masks, upcast, zero_rows
from vision_attn.attention.patterns import Partition
from vision_attn.checks import product

#: Is shown how the map is cut and what the kernel gets.
Look = Callable[[Partition, Given], object]


@contextmanager
def looking(block: Any, look: Look) -> Iterator[None]:
    """Show what a block gives its kernel in each forward pass, while it runs."""
    before = block.lookers
    block.lookers = (*before, look)
    try:
        yield
    finally:
        block.lookers = before


def weights_on_map(
    part: Partition, given: Given, queries: Tensor | None = None, heads: list[int] | None = None
) -> Tensor:
    """The weights that a kernel gives the keys, ``(b, n, i, j)`` with zeros outside of a query's group.

    Of chosen queries (indices of tokens) and heads: the others take no memory.
    """
    q, k, _, scale, mask, reachable, causal = given[:7]
    if heads is not None:
        k = repeat_kv(q, k)[:, heads]
        q = q[:, heads]
        mask, reachable = (x if x is None or x.shape[2] == 1 else x[:, :, heads] for x in (mask, reachable))
    if queries is not None and causal:
        mask, causal = combine_masks(causal_mask(q.shape[2], k.shape[2], q.device), mask), False
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


def attention_weights(q: Tensor, k: Tensor, scale: float, mask: Mask, reachable: Mask, causal: bool) -> Tensor:
    """The weights ``softmax(scale q kᵀ + mask)`` that every implementation stands for, ``(b·groups, n, i, j)``."""
    with without_autocast(q):
        logits = scale * upcast(q) @ upcast(repeat_kv(q, k)).mT
        weights = torch.softmax(add_mask(logits, mask, causal), dim=-1)
    return zero_rows(weights, reachable)


def check_queries(queries: Tensor | None, size: Sequence[int]) -> None:
    """Refuse all but indices ``(i,)`` of the tokens of such a map, or None for all."""
    if queries is None:
        return
    tokens = product(size)
    whole = isinstance(queries, Tensor) and queries.dim() == 1 and queries.dtype in (torch.int32, torch.int64)
    if not whole or not ((queries >= 0) & (queries < tokens)).all():
        raise ValueError(f"queries must be a tensor (i,) of indices of {tokens} tokens, or None for all; got {queries}")

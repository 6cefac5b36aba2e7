"""The weights that a block gives its keys, on the map, for those who look at them: a fused kernel holds none."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vision_attn.attention.attend import attention_weights, repeat_kv, with_causal_mask
from vision_attn.attention.patterns import Partition

__all__ = ["Prepared", "check_queries", "weights_on_map"]


class Prepared(NamedTuple):
    """What a block gives its kernel."""

    q: Tensor  # (b·groups, n, i, d)
    k: Tensor  # (b·groups, m, j, d)
    v: Tensor  # (b·groups, m, j, e)
    scale: float
    mask: Tensor | None  # (b or 1, groups or 1, n or 1, i, j), bool or additive, in which each row has a key
    reachable: Tensor | None  # (b or 1, groups or 1, n or 1, i, 1): the rows that had one before; None: all
    causal: bool  # whether the kernel is to hide later keys


def weights_on_map(
    part: Partition, prepared: Prepared, queries: Tensor | None = None, heads: list[int] | None = None
) -> Tensor:
    """The weights that a kernel gives the keys, ``(b, n, i, j)`` with zeros outside of a query's group.

    Of chosen queries (indices of tokens) and heads no other takes memory.
    """
    q, k, _, scale, mask, reachable, causal = prepared
    if heads is not None:
        k = repeat_kv(q, k)[:, heads]
        q = q[:, heads]
        mask, reachable = (x if x is None or x.shape[2] == 1 else x[:, :, heads] for x in (mask, reachable))
    if queries is not None and causal:
        mask, causal = with_causal_mask(mask, q.shape[2], k.shape[2], q.device), False
    if part.is_global:
        if queries is not None:
            q = q[:, :, queries]
            mask, reachable = (x if x is None or x.shape[3] == 1 else x[:, :, :, queries] for x in (mask, reachable))
        return attention_weights(q, k, scale=scale, mask=mask, reachable=reachable, causal=causal)
    group, row = part.group_and_row(queries)
    if queries is None:
        weights = attention_weights(q, k, scale=scale, mask=mask, reachable=reachable, causal=causal)
        weights = weights.unflatten(0, (-1, part.groups))[:, group, :, row].movedim(0, 2)
    else:  # each query as a group of its own
        q = q.unflatten(0, (-1, part.groups))[:, group, :, row].movedim(0, 1).flatten(0, 1)[:, :, None]
        k = k.unflatten(0, (-1, part.groups))[:, group].flatten(0, 1)
        mask, reachable = (
            x if x is None else x.expand(-1, part.groups, -1, part.cut.tokens, -1)[:, group, :, row].movedim(0, 1)
            for x in (mask, reachable)
        )
        mask, reachable = (x if x is None else x[:, :, :, None] for x in (mask, reachable))
        weights = attention_weights(q, k, scale=scale, mask=mask, reachable=reachable, causal=causal)
        weights = weights[:, :, 0].unflatten(0, (-1, len(queries))).transpose(1, 2)
    return part.on_map(weights, group)


def check_queries(queries: Tensor | None, tokens: int) -> None:
    """Refuse what are no indices ``(i,)`` of so many tokens; None is for all."""
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

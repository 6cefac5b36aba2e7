"""Attention weights on the feature map, from what a block gives its kernel: a fused kernel never stores them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from vision_attn.attention import masks
from vision_attn.attention.dispatch import AttentionInputs, repeat_kv, without_autocast
from vision_attn.attention.patterns import Grouping
from vision_attn.attention.scopes import scope
from vision_attn.checks import product

#: Is called with the inputs of the kernel, in each forward pass.
AttnHook = Callable[[AttentionInputs], object]


def attn_hook(block: nn.Module, hook: AttnHook) -> AbstractContextManager[None]:
    """Call a hook with what a block gives its kernel in each forward pass of this thread, inside a ``with`` block."""
    return scope(block, "attention", {block: hook})


def weights_on_map(
    inputs: AttentionInputs,
    queries: Tensor | None = None,
    heads: Tensor | None = None,
    *,
    grouping: Grouping | None = None,
) -> Tensor:
    """Return the weights of the keys on the map, ``(b, n, i, j)``, with zeros outside of the group of a query.

    Only chosen queries (indices of tokens) and heads need memory. ``grouping`` is given for inputs whose batch are the
    groups of larger maps.
    """
    q, k, _, scale, own, bias, mask, causal = inputs
    k = repeat_kv(q, k)
    with without_autocast(q):
        mask, row_has_key, causal = own.build_attn_mask(mask, causal, bias is not None)
        if bias is not None:
            q, k, scale, mask = bias.apply(masks.upcast(q), masks.upcast(k), scale, mask)
    if grouping is not None:  # the batch of these masks is that of the groups
        groups = grouping.groups
        mask, row_has_key = (
            x if x is None or x.shape[0] == 1 else x[:, 0].unflatten(0, (-1, groups)) for x in (mask, row_has_key)
        )
    grouping = own if grouping is None else grouping
    if heads is not None:
        q, k = q[:, heads], k[:, heads]
        mask, row_has_key = (x if x is None or x.shape[2] == 1 else x[:, :, heads] for x in (mask, row_has_key))
    if queries is not None and causal:
        mask, causal = masks.combine_masks(masks.causal_mask(q.shape[2], k.shape[2], q.device), mask), False
    if grouping.query_layout.is_whole:
        if queries is not None:
            q = q[:, :, queries]
            mask, row_has_key = (
                x if x is None or x.shape[3] == 1 else x[:, :, :, queries] for x in (mask, row_has_key)
            )
        weights = attention_weights(q, k, scale, mask, row_has_key, causal)
        group = torch.zeros(weights.shape[2], dtype=torch.long, device=q.device)
        return weights if grouping.key_layout.is_whole else grouping.scatter_to_map(weights, group)
    group, row = grouping.locate(queries)
    if queries is None:
        weights = attention_weights(q, k, scale, mask, row_has_key, causal)
        weights = weights.unflatten(0, (-1, grouping.groups))[:, group, :, row].movedim(0, 2)
    else:  # each query is a separate group
        q = q.unflatten(0, (-1, grouping.groups))[:, group, :, row].movedim(0, 1).flatten(0, 1)[:, :, None]
        k = k.unflatten(0, (-1, grouping.groups))[:, group].flatten(0, 1)
        tokens = grouping.query_layout.tokens
        mask, row_has_key = (
            x
            if x is None
            else x.expand(-1, grouping.groups, -1, tokens, -1)[:, group, :, row].movedim(0, 1)[:, :, :, None]
            for x in (mask, row_has_key)
        )
        weights = attention_weights(q, k, scale, mask, row_has_key, causal)
        weights = weights[:, :, 0].unflatten(0, (-1, len(queries))).transpose(1, 2)
    return grouping.scatter_to_map(weights, group)


def attention_weights(
    q: Tensor, k: Tensor, scale: float, mask: masks.Mask, row_has_key: masks.Mask, causal: bool
) -> Tensor:
    """Return the weights ``softmax(scale q kᵀ + mask)`` of every implementation, ``(b·groups, n, i, j)``."""
    with without_autocast(q):
        weights = torch.softmax(masks.add_mask(scale * masks.upcast(q) @ masks.upcast(k).mT, mask, causal), dim=-1)
    return masks.zero_fully_masked_rows(weights, row_has_key)


def check_queries(queries: Tensor | None, size: Sequence[int]) -> None:
    """Raise unless queries are indices ``(i,)`` of the tokens of a map of this size, or None for all."""
    if queries is None:
        return
    tokens = product(size)
    integers = isinstance(queries, Tensor) and queries.dim() == 1 and queries.dtype in (torch.int32, torch.int64)
    if not integers or not ((queries >= 0) & (queries < tokens)).all():
        raise ValueError(f"queries must be a tensor (i,) of indices of {tokens} tokens, or None for all; got {queries}")

"""Attention weights on the feature map, computed from the inputs of a kernel: fused kernels never store weights."""

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


def attn_hook(block: nn.Module, hook: Callable[[AttentionInputs], object]) -> AbstractContextManager[None]:
    """Call a hook with the inputs of a block's kernel in each forward pass of this thread, inside a ``with`` block."""
    return scope(block, "attention", {block: hook})


def weights_on_map(
    inputs: AttentionInputs,
    queries: Tensor | None = None,
    heads: Tensor | None = None,
    grouping: Grouping | None = None,
) -> Tensor:
    """Return attention weights for all keys on the feature map, ``(b, n, i, j)``; zero outside a query's group.

    Weights are computed for the selected queries (token indices) and heads only, which saves memory. Pass ``grouping``
    if the batch axis of the inputs holds the groups of larger feature maps.
    """
    q, k, _, scale, inner, bias, mask, causal = inputs
    k = repeat_kv(q, k)
    with without_autocast(q):
        mask, row_has_key, causal = inner.build_attn_mask(mask, causal, bias is not None)
        if bias is not None:
            q, k, scale, mask = bias.apply(masks.upcast(q), masks.upcast(k), scale, mask)
        if queries is not None and causal:
            mask, causal = masks.combine_masks(masks.causal_mask(q.shape[2], k.shape[2], q.device), mask), False
        both = [mask, row_has_key]
        if grouping is None:
            grouping = inner
        else:  # here the batch axis of the masks runs over groups
            groups = (-1, grouping.groups)
            both = [x if x is None or x.shape[0] == 1 else x[:, 0].unflatten(0, groups) for x in both]
        if heads is not None:
            q, k, both = q[:, heads], k[:, heads], [select(x, 2, heads) for x in both]
        layout, is_identity = grouping.query_layout, grouping.query_layout.is_identity
        if is_identity:  # there is one group; class tokens may come first
            row = torch.arange(q.shape[2], device=q.device) if queries is None else queries
            group = torch.zeros_like(row)
        else:
            group, row = grouping.locate(queries)
        if queries is not None and is_identity:
            q, both = q[:, :, queries], [select(x, 3, queries) for x in both]
        elif queries is not None:  # each query becomes a separate group
            q = q.unflatten(0, (-1, layout.groups))[:, group, :, row].movedim(0, 1).flatten(0, 1)[:, :, None]
            k = k.unflatten(0, (-1, layout.groups))[:, group].flatten(0, 1)
            shape = (-1, layout.groups, -1, layout.tokens, -1)
            both = [x if x is None else x.expand(shape)[:, group, :, row].movedim(0, 1)[:, :, :, None] for x in both]
        logits = masks.add_mask(scale * masks.upcast(q) @ masks.upcast(k).mT, both[0], causal)
        weights = masks.zero_fully_masked_rows(logits.softmax(-1), both[1])  # (b·groups, n, i, j)
    if queries is None and not is_identity:
        weights = weights.unflatten(0, (-1, layout.groups))[:, group, :, row].movedim(0, 2)
    elif not is_identity:
        weights = weights[:, :, 0].unflatten(0, (-1, len(row))).transpose(1, 2)
    return weights if grouping.key_layout.is_identity else grouping.scatter_to_map(weights, group)


def select(mask: masks.Mask, axis: int, index: Tensor) -> masks.Mask:
    """Select heads or queries of a mask, if it does not broadcast along that axis."""
    return mask if mask is None or mask.shape[axis] == 1 else mask.index_select(axis, index)


def check_queries(queries: Tensor, size: Sequence[int]) -> None:
    """Raise unless queries are token indices ``(i,)`` on a feature map of this size."""
    tokens = product(size)
    integers = isinstance(queries, Tensor) and queries.dim() == 1 and queries.dtype in (torch.int32, torch.int64)
    if not integers or not ((queries >= 0) & (queries < tokens)).all():
        expected = f"a 1-d integer tensor with values from 0 to {tokens - 1}, or None for all tokens"
        raise ValueError(f"queries must be {expected}, got {queries}")

"""Attention weights on the feature map, computed from the inputs of a kernel: fused kernels never store weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vision_attn.attention import masks
from vision_attn.attention.dispatch import repeat_kv, without_autocast
from vision_attn.attention.inputs import AttentionInputs
from vision_attn.attention.patterns import Grouping


class Rows(NamedTuple):
    """Queries and keys of attention weights, with their masks ``(b or 1, groups or 1, n or 1, i, j or 1)``."""

    q: Tensor  # (b·groups, n, i, d)
    k: Tensor  # (b·groups, n, j, d)
    scale: float
    mask: masks.Mask
    row_has_key: masks.Mask


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
    outer = inputs.grouping if grouping is None else grouping
    with without_autocast(inputs.q):
        rows = select(fold_bias(inputs, grouping), 1, heads)
        if outer.query_layout.is_identity:  # there is one group; class tokens may come first
            weights = softmax_rows(select(rows, 2, queries))
            group = torch.zeros(weights.shape[2], dtype=torch.long, device=weights.device)
        else:
            group, row = outer.locate(queries)
            if queries is None:
                weights = softmax_rows(rows).unflatten(0, (-1, outer.groups))[:, group, :, row].movedim(0, 2)
            else:
                weights = softmax_rows(select_in_groups(rows, group, row, outer))[:, :, 0]
                weights = weights.unflatten(0, (-1, len(row))).transpose(1, 2)
    return weights if outer.key_layout.is_identity else outer.scatter_to_map(weights, group)


def fold_bias(inputs: AttentionInputs, outer: Grouping | None) -> Rows:
    """Include the position bias in queries, keys and mask; the batch axis may run over the groups of ``outer``."""
    q, k, _, scale, grouping, bias, mask = inputs
    k = repeat_kv(q, k)
    mask, row_has_key = (grouping.allowed(), None) if mask is None else grouping.combine(mask)
    if bias is not None:
        q, k, scale = bias.fold(masks.upcast(q), masks.upcast(k), scale)
        mask = bias.attn_mask(mask)
    mask = None if mask is None else mask[..., : k.shape[2]]
    both: Any = (mask, row_has_key)
    if outer is not None:
        groups = (-1, outer.groups)
        both = tuple(x if x is None or x.shape[0] == 1 else x[:, 0].unflatten(0, groups) for x in both)
    return Rows(q, k, scale, *both)


def select(rows: Rows, axis: int, index: Tensor | None) -> Rows:
    """Select heads (axis 1) or queries of the only group (axis 2)."""
    if index is None:
        return rows
    k = rows.k.index_select(1, index) if axis == 1 else rows.k
    masking = (x if x is None or x.shape[axis + 1] == 1 else x.index_select(axis + 1, index) for x in rows[3:])
    return Rows(rows.q.index_select(axis, index), k, rows.scale, *masking)


def select_in_groups(rows: Rows, group: Tensor, row: Tensor, grouping: Grouping) -> Rows:
    """Select queries by their group and their row in the group; each query becomes a separate group."""
    q, k, scale, *masking = rows
    shape = (-1, groups := grouping.groups, -1, grouping.query_layout.tokens, -1)
    q = q.unflatten(0, (-1, groups))[:, group, :, row].movedim(0, 1).flatten(0, 1)[:, :, None]
    k = k.unflatten(0, (-1, groups))[:, group].flatten(0, 1)
    masking = [x if x is None else x.expand(shape)[:, group, :, row].movedim(0, 1)[:, :, :, None] for x in masking]
    return Rows(q, k, scale, *masking)


def softmax_rows(rows: Rows) -> Tensor:
    """Return attention weights, ``(b·groups, n, i, j)``; rows without any allowed key are zero."""
    logits = masks.add_mask(rows.scale * masks.upcast(rows.q) @ masks.upcast(rows.k).mT, rows.mask, causal=False)
    return masks.zero_fully_masked_rows(logits.softmax(-1), rows.row_has_key)

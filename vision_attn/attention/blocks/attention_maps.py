"""Attention weights on the feature map, computed from the inputs of a kernel: fused kernels never store weights."""

from typing import Any

import torch
from torch import Tensor

from vision_attn.attention import masks
from vision_attn.attention.dispatch import repeat_kv, without_autocast
from vision_attn.attention.patterns import Grouping
from vision_attn.attention.plan import AttentionInputs


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
    is_one_group = outer.query_layout.is_identity  # class tokens may come first
    with without_autocast(inputs.q):
        tensors = fold_bias(inputs, outer)
        if heads is not None:
            tensors = [x if x is None or x.shape[2] == 1 else x.index_select(2, heads) for x in tensors]
        q, k, *masking = tensors
        group = row = torch.zeros(1, dtype=torch.long, device=q.device)
        if not is_one_group:
            group, row = outer.locate(queries)
        if queries is not None:  # in several groups, each query becomes a separate group
            groups, tokens = group[:, None], queries[None] if is_one_group else row[:, None]
            rows = [x if x is None else x.expand(-1, outer.groups, -1, q.shape[3], -1) for x in (q, *masking)]
            q, *masking = (x if x is None else x[:, groups, :, tokens].movedim((0, 1), (1, 3)) for x in rows)
            k = k if is_one_group else k[:, group]
        mask, row_has_key = masking
        logits = masks.add_mask((q @ k.mT).flatten(0, 1), mask, causal=False)
        weights = masks.zero_fully_masked_rows(logits.softmax(-1), row_has_key).unflatten(0, (-1, q.shape[1]))
    if queries is None and not is_one_group:
        weights = weights[:, group, :, row].movedim(0, 2)
    else:
        weights = weights.transpose(1, 2).flatten(2, 3)
    return weights if outer.key_layout.is_identity else outer.scatter_to_map(weights, group)


def fold_bias(inputs: AttentionInputs, outer: Grouping) -> list[Any]:
    """Include scale and position bias in queries, keys and mask; the batch axis may run over the groups of ``outer``.

    Returns:
        Queries ``(b, groups, n, i, d)``, keys ``(b, groups, n, j, d)``, the mask
        ``(b or 1, groups or 1, n or 1, i, j)``, and the rows with at least one allowed key,
        ``(b or 1, groups or 1, n or 1, i, 1)``.
    """
    q, k, _, scale, grouping, bias, mask = inputs
    q, k = masks.upcast(q), masks.upcast(repeat_kv(q, k))
    mask, row_has_key = (grouping.allowed(), None) if mask is None else grouping.combine(mask)
    if bias is not None:
        q, k, scale = bias.fold(q, k, scale)
        mask = bias.attn_mask(mask)
    groups = (-1, outer.groups)
    masking = [None if mask is None else mask[..., : k.shape[2]], row_has_key]
    if outer is not grouping:
        masking = [x if x is None or x.shape[0] == 1 else x[:, 0].unflatten(0, groups) for x in masking]
    return [(scale * q).unflatten(0, groups), k.unflatten(0, groups), *masking]

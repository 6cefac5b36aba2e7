"""Attention weights on the feature map, computed from the inputs of a kernel: fused kernels never store weights."""

import torch
from torch import Tensor

from vision_attn.attention import masks
from vision_attn.attention.dispatch import repeat_kv, without_autocast
from vision_attn.attention.inputs import AttentionInputs
from vision_attn.attention.patterns import Grouping


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
        q, k, masking = fold_bias(inputs, grouping)
        if heads is not None:
            q, k, masking = q.index_select(1, heads), k.index_select(1, heads), select(masking, 2, heads)
        if queries is not None and is_one_group:
            q, masking = q.index_select(2, queries), select(masking, 3, queries)
        elif queries is not None:
            q, k, masking = select_in_groups(q, k, masking, queries, outer)
        mask, row_has_key = masking
        weights = masks.zero_fully_masked_rows(masks.add_mask(q @ k.mT, mask, causal=False).softmax(-1), row_has_key)
    if is_one_group:
        group = torch.zeros(weights.shape[2], dtype=torch.long, device=weights.device)
    else:
        group, row = outer.locate(queries)
        if queries is None:
            weights = weights.unflatten(0, (-1, outer.groups))[:, group, :, row].movedim(0, 2)
        else:
            weights = weights[:, :, 0].unflatten(0, (-1, len(queries))).transpose(1, 2)
    return weights if outer.key_layout.is_identity else outer.scatter_to_map(weights, group)


def fold_bias(inputs: AttentionInputs, outer: Grouping | None) -> tuple[Tensor, Tensor, list[masks.Mask]]:
    """Include scale and position bias in queries, keys and mask; the batch axis may run over the groups of ``outer``.

    Returns:
        Queries ``(b·groups, n, i, d)``, keys ``(b·groups, n, j, d)``, the mask ``(b or 1, groups or 1, n or 1, i, j)``
        and the rows with at least one allowed key, ``(b or 1, groups or 1, n or 1, i, 1)``.
    """
    q, k, _, scale, grouping, bias, mask = inputs
    q, k = masks.upcast(q), masks.upcast(repeat_kv(q, k))
    mask, row_has_key = (grouping.allowed(), None) if mask is None else grouping.combine(mask)
    if bias is not None:
        q, k, scale = bias.fold(q, k, scale)
        mask = bias.attn_mask(mask)
    masking = [None if mask is None else mask[..., : k.shape[2]], row_has_key]
    if outer is not None:
        groups = (-1, outer.groups)
        masking = [x if x is None or x.shape[0] == 1 else x[:, 0].unflatten(0, groups) for x in masking]
    return scale * q, k, masking


def select(masking: list[masks.Mask], axis: int, index: Tensor) -> list[masks.Mask]:
    """Select entries of masks along an axis, unless they broadcast along it."""
    return [x if x is None or x.shape[axis] == 1 else x.index_select(axis, index) for x in masking]


def select_in_groups(
    q: Tensor, k: Tensor, masking: list[masks.Mask], queries: Tensor, grouping: Grouping
) -> tuple[Tensor, Tensor, list[masks.Mask]]:
    """Select queries, and their keys; each query becomes a separate group."""
    group, row = grouping.locate(queries)
    shape = (-1, groups := grouping.groups, -1, grouping.query_layout.tokens, -1)
    q = q.unflatten(0, (-1, groups))[:, group, :, row].movedim(0, 1).flatten(0, 1)[:, :, None]
    k = k.unflatten(0, (-1, groups))[:, group].flatten(0, 1)
    masking = [x if x is None else x.expand(shape)[:, group, :, row].movedim(0, 1)[:, :, :, None] for x in masking]
    return q, k, masking

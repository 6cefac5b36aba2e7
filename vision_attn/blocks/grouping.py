"""Masks of a whole map for the groups of a pattern, and the weights of groups on the whole map."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vision_attn.attend import masks_together
from vision_attn.patterns import Tiling
from vision_attn.patterns.line import product

__all__ = ["mask_of_groups", "weights_on_map"]


def mask_of_groups(
    tiling: Tiling,
    size: Sequence[int],
    batch: int,
    *,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    device: torch.device,
) -> Tensor | None:
    """Everything that masks the groups of a pattern, in one mask that broadcasts to ``(b·groups, n, queries, keys)``.

    Args:
        tiling: how the pattern cuts the map.
        size: of the map, in positions.
        batch: number of maps.
        mask: the user's, with four axes, for the tokens of the whole map.
        bias: what a position term adds, ``(groups or 1, n, queries, keys)``.
        causal: whether later keys are to be masked here; tilings that keep the order leave that to the kernel.
        device: where the mask is to be.

    Returns:
        The mask; None where nothing is masked.
    """
    own = tiling.mask(size, device)
    own = None if own is None else own[:, None]
    if causal and not tiling.ordered:
        queries, keys = tiling.index(size, device)
        own = masks_together(own, (keys[:, None, :] <= queries[:, :, None])[:, None])
    own = masks_together(own, bias)
    if mask is None:
        return own if own is None or own.shape[0] == 1 else own.repeat(batch, 1, 1, 1)
    if not tiling.whole:
        mask = cut_mask(mask, *tiling.index(size, device))
        mask = masks_together(mask, None if own is None else own[None])
        assert mask is not None
        return mask.expand(batch, *mask.shape[1:]).flatten(0, 1)
    return masks_together(mask, own)


def cut_mask(mask: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """A mask ``(b, n, all queries, all keys)`` as the groups see it, ``(b, groups, n, queries, keys)``."""
    # Padding (-1) takes some value of the mask: what it is does not matter, the pattern masks it.
    rows = queries.clamp(min=0) if mask.shape[2] > 1 else torch.zeros_like(queries)
    columns = keys.clamp(min=0) if mask.shape[3] > 1 else torch.zeros_like(keys)
    return mask[:, :, rows[:, :, None], columns[:, None, :]].transpose(1, 2)


def weights_on_map(weights: Tensor, tiling: Tiling, size: Sequence[int], wanted: Tensor | None) -> Tensor:
    """Weights ``(b·groups, n, queries, keys)`` of the wanted queries on the whole map, zero outside of their group.

    Args:
        weights: ``(b·groups, n, queries, keys)``.
        tiling: how the pattern cuts the map.
        size: of the map, in positions.
        wanted: indices of the queries on the map, row-major, ``(wanted,)``; all when None.

    Returns:
        ``(b, n, wanted, tokens)``.
    """
    queries, keys = tiling.index(size, weights.device)
    groups, per_group = queries.shape
    tokens = product(size)
    weights = weights.unflatten(0, (-1, groups)).transpose(1, 2).flatten(2, 3)  # b n (groups queries) keys
    # Where each token of the map is among the groups' queries. Padding (-1) goes to a place beyond the map.
    places = torch.arange(groups * per_group, device=queries.device)
    row = queries.new_zeros(tokens + 1).index_put((queries.flatten() % (tokens + 1),), places)
    row = row[:tokens] if wanted is None else row[:tokens][wanted]
    columns = (keys % (tokens + 1))[row // per_group]
    dense = weights.new_zeros(*weights.shape[:2], len(row), tokens + 1)
    return dense.scatter(3, columns.expand(*weights.shape[:2], -1, -1), weights[:, :, row])[..., :tokens]

"""Attention through several blocks: which cells of the first one what a query sees comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from vision_attn.checks import check_probability, check_type, product
from vision_attn.networks.capture.attention_map import AttentionMap

__all__ = ["rollout"]


def rollout(maps: Mapping[str, AttentionMap], *, residual: float = 0.5) -> dict[str, AttentionMap]:
    """Attention rolled out through the blocks of a residual network, from each back to the map of the first.

    ::

        A_l = residual · 1 + (1 - residual) · mean of the heads' weights, rows made to sum to one
        R_l = A_l R_{l-1}

    Where the next map has another size, each of its cells is taken for the cells of the map before that it covers,
    by area. What the convolutions in between move is not in it, nor how large a branch is beside its stream.

    Args:
        maps: of all cells, from :func:`capture` without queries, in the order of the network.
        residual: weight of the stream beside the attention.

    Returns:
        For each block the map of its queries, with one head, on the cells of the first block.

    Raises:
        ValueError: there is no map, one is of chosen queries only, or ``residual`` is not in 0…1.

    Source: Abnar and Zuidema, *Quantifying Attention Flow in Transformers*, 2020, section 3,
    https://arxiv.org/abs/2005.00928

    >>> first = AttentionMap(torch.full((1, 2, 4, 2, 2), 1 / 4), ((0, 0), (0, 1), (1, 0), (1, 1)), (8, 8))
    >>> rollout({"first": first})["first"].weights[0, 0, 0]
    tensor([[0.6250, 0.1250],
            [0.1250, 0.1250]])
    """
    check_type("maps", maps, Mapping, "maps by path, as of capture")
    for one in maps.values():
        check_type("maps", one, AttentionMap, "maps by path, as of capture")
    check_probability("residual", residual)
    if not maps:
        raise ValueError("maps must hold one at least; got none")
    found: dict[str, AttentionMap] = {}
    rolled: Tensor | None = None
    first: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    for path, one in maps.items():
        cells = product(one.map_size)
        if len(one.cells) != cells:
            raise ValueError(
                f"maps must be of all cells; {path!r} is of {len(one.cells)} of {cells}: capture without queries"
            )
        heads = one.shares().mean(1) @ overlaps(one.weights.shape[3:], one.map_size).to(one.weights.device)
        step = residual * torch.eye(cells, device=heads.device) + (1 - residual) * heads
        step = step / step.sum(2, keepdim=True).clamp(min=torch.finfo(step.dtype).tiny)
        if rolled is None:
            rolled, first = step, one.map_size
        else:
            rolled = step @ overlaps(one.map_size, before).to(step.device) @ rolled
        before = one.map_size
        weights = rolled.unflatten(2, first)[:, None]
        found[path] = AttentionMap(weights, one.cells, one.image_size, one.map_size, ("rollout",))
    return found


def overlaps(size: Sequence[int], other: Sequence[int]) -> Tensor:
    """The share of each cell of a map that lies in each cell of another over the same image, ``(cells, others)``."""
    along = []
    for n, m in zip(size, other, strict=True):
        begin, others = torch.arange(n)[:, None] / n, torch.arange(m) / m
        overlap = torch.minimum(begin + 1 / n, others + 1 / m) - torch.maximum(begin, others)
        along.append(overlap.clamp(min=0) * n)
    return reduce(torch.kron, along)

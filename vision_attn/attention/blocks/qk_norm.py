"""Normalized queries and keys: layer norm, cosines as in Swin v2, and ``qk_norm="match"``.

With ``"match"`` a position attends to similar positions from the first step. Softmax ignores what all keys have in
common, and what all queries have in common gives every query the same weights. So the mean over the map is subtracted
from queries and keys, each is normalized to length one, and both are initialized as the same isometric projection: the
product of two independent random projections is not a similarity.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention.masks import upcast

#: The initial logit of a position for an identical one: enough to outweigh thousands of others.
INIT_LOGIT_SCALE = 14.0


class CosineNorm(nn.Module):
    """Vectors ``(b, n, tokens, d)`` divided by their length, times ``exp(logit_scale)`` of their head."""

    def __init__(self, num_heads: int | None = None, scale: float = 10.0, **factory: Any) -> None:
        super().__init__()
        scales = None if num_heads is None else torch.full((num_heads, 1, 1), math.log(scale), **factory)
        self.logit_scale: nn.Parameter | None = None if scales is None else nn.Parameter(scales)

    def forward(self, x: Tensor) -> Tensor:
        x = upcast(x)
        # Clamping the square keeps derivatives of every order finite at a vector of zeros.
        x = x * x.square().sum(-1, keepdim=True).clamp(min=1e-24).rsqrt()
        return x if self.logit_scale is None else x * self.logit_scale.clamp(max=math.log(100)).exp()


def qk_norms(kind: bool | str, width: int, num_heads: int, **factory: Any) -> tuple[nn.Module | None, nn.Module | None]:
    """Build the norms of queries and keys: none, layer norms, or cosines."""
    if isinstance(kind, str):
        scale = INIT_LOGIT_SCALE if kind == "match" else 10.0
        return CosineNorm(num_heads, scale, **factory), CosineNorm()
    return (nn.LayerNorm(width, **factory), nn.LayerNorm(width, **factory)) if kind else (None, None)


@torch.no_grad()
def init_qk_tied_(queries: Any, keys: Any, num_heads: int, num_kv_heads: int, width: int) -> None:
    """Initialize the heads of queries with the rows of their keys, which are orthogonal; biases are zero.

    Args:
        queries: the convolution whose first rows are the queries.
        keys: the convolution whose first rows are the keys; if it is that of the queries, those after the queries.
        num_heads: heads of queries.
        num_kv_heads: heads of keys.
        width: width of a head.
    """
    first = num_heads * width if keys is queries else 0
    heads_of_keys = keys.weight[first : first + num_kv_heads * width].split(width)
    for rows in heads_of_keys:  # the factorization behind it has no half precision on a CPU
        rows.copy_(nn.init.orthogonal_(upcast(torch.empty_like(rows.flatten(1)))).view_as(rows))
    for head, rows in enumerate(queries.weight[: num_heads * width].split(width)):
        rows.copy_(heads_of_keys[head // (num_heads // num_kv_heads)])
    for projection in {queries, keys}:
        if projection.bias is not None:
            nn.init.zeros_(projection.bias)


def center(x: Tensor) -> Tensor:
    """Subtract from a feature map its mean over all positions."""
    return x - x.mean(tuple(range(2, x.dim())), keepdim=True)

"""Attention that matches: a product of two random projections is no similarity, one of equal ones is.

What all keys share softmax ignores, and what all queries share gives every query the same map. So queries and keys are
taken less their mean over the map, each with length one, and begin as the same isometric projection.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

#: The logit of a position for one that looks the same, at first: enough to outweigh thousands of others.
EXACT_MATCH = 14.0


@torch.no_grad()
def begin_alike_(queries: Any, keys: Any, num_heads: int, num_kv_heads: int, width: int, heads_before: int) -> None:
    """Give the heads of queries the rows of their keys, which are orthogonal; without biases, which the means remove.

    Args:
        queries: the convolution whose first rows are theirs.
        keys: that of the keys, whose rows come after those of so many heads.
        num_heads: heads of queries.
        num_kv_heads: heads of keys.
        width: of a head.
        heads_before: heads before those of the keys.
    """
    for head in range(num_kv_heads):
        first = (heads_before + head) * width
        nn.init.orthogonal_(keys.weight[first : first + width].flatten(1))
    for head in range(num_heads):
        first = (heads_before + head // (num_heads // num_kv_heads)) * width
        queries.weight[head * width : (head + 1) * width] = keys.weight[first : first + width]
    for projection in {queries, keys}:
        if projection.bias is not None:
            nn.init.zeros_(projection.bias)


def less_mean(x: Tensor) -> Tensor:
    """A map less its mean over all positions."""
    return x - x.mean(tuple(range(2, x.dim())), keepdim=True)

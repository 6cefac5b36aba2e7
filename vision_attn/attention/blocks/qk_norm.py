"""Normalized queries and keys: layer norm, cosine similarity as in Swin v2, and ``qk_norm="match"``.

With ``"match"``, every position attends to similar positions from the first training step. A component that all keys
share cancels in the softmax, and a component that all queries share gives all queries the same weights. Queries and
keys are therefore centered over the feature map and normalized to unit length. Both are initialized as the same
isometric projection, because the product of two independent random projections does not measure similarity.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention.masks import upcast

#: Initial logit between identical positions, which outweighs thousands of other positions.
INIT_LOGIT_SCALE = 14.0


class CosineNorm(nn.Module):
    """Normalize ``(b, n, tokens, d)`` to unit length and multiply by the ``exp(logit_scale)`` of each head."""

    def __init__(self, num_heads: int | None = None, scale: float = 10.0, **factory: Any) -> None:
        super().__init__()
        self.init_scale: float = math.log(scale)
        scales = None if num_heads is None else torch.full((num_heads, 1, 1), self.init_scale, **factory)
        self.logit_scale: nn.Parameter | None = None if scales is None else nn.Parameter(scales)

    def reset_parameters(self) -> None:
        if self.logit_scale is not None:
            nn.init.constant_(self.logit_scale, self.init_scale)

    def forward(self, x: Tensor) -> Tensor:
        x = upcast(x)
        # Clamping the square keeps derivatives of every order finite at a vector of zeros.
        x = x * x.square().sum(-1, keepdim=True).clamp(min=1e-24).rsqrt()
        return x if self.logit_scale is None else x * self.logit_scale.clamp(max=math.log(100)).exp()


def qk_norms(kind: bool | str, width: int, num_heads: int, **factory: Any) -> tuple[nn.Module | None, nn.Module | None]:
    """Build the normalizations of queries and keys: none, layer norms, or unit length."""
    if isinstance(kind, str):
        scale = INIT_LOGIT_SCALE if kind == "match" else 10.0
        return CosineNorm(num_heads, scale, **factory), CosineNorm()
    return (nn.LayerNorm(width, **factory), nn.LayerNorm(width, **factory)) if kind else (None, None)


def qk_weights(block: Any) -> tuple[Tensor, Tensor]:
    """Return the weights of queries ``(m, n/m, d, c, …)`` and keys ``(m, 1, d, c, …)`` of an :class:`.Attention`."""
    n, m, d = block.num_heads, block.num_kv_heads, block.key_dim
    queries, keys = block.qk_projections()
    first = n * d if keys is queries else 0  # the rows of keys follow those of queries
    return queries.weight[: n * d].unflatten(0, (m, -1, d)), keys.weight[first : first + m * d].unflatten(0, (m, 1, d))


@torch.no_grad()
def init_qk_tied_(block: Any) -> None:
    """Initialize each head of the queries with the orthogonal rows of its keys, and biases with zeros."""
    queries, keys = qk_weights(block)
    for (rows,) in keys:  # the QR factorization of orthogonal_ does not support half precision on a CPU
        rows.copy_(nn.init.orthogonal_(upcast(torch.empty_like(rows.flatten(1)))).view_as(rows))
    queries.copy_(keys)
    for projection in block.qk_projections():
        if projection.bias is not None:
            nn.init.zeros_(projection.bias)


def is_qk_tied(block: Any) -> bool:
    """Return True if each head of the queries has the rows of its keys."""
    queries, keys = qk_weights(block)
    return queries.is_meta or bool((queries == keys).all())


def center(x: Tensor, valid: Tensor | None = None) -> Tensor:
    """Subtract the mean over all positions from a feature map, or over the valid positions ``(b, 1, *size)``."""
    axes = tuple(range(2, x.dim()))
    if valid is None:
        return x - x.mean(axes, keepdim=True)
    return x - (x * valid).sum(axes, keepdim=True) / valid.sum(axes, keepdim=True).clamp(min=1)

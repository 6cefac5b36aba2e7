"""Normalisation of queries and keys over their width: by layer norm, or to cosines, as in Swin v2."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention.attend import upcast

__all__ = ["UnitLength", "qk_norms"]

#: What the logarithm of the factor on cosines is at most.
LARGEST = math.log(100)


class UnitLength(nn.Module):
    """Vectors ``(b, n, tokens, d)`` of length one, times ``exp(logit_scale)`` of their head if there is one."""

    def __init__(self, num_heads: int | None = None, **factory: Any) -> None:
        super().__init__()
        scale = None if num_heads is None else torch.full((num_heads, 1, 1), math.log(10), **factory)
        self.logit_scale = None if scale is None else nn.Parameter(scale)

    def forward(self, x: Tensor) -> Tensor:
        x = F.normalize(upcast(x), dim=-1)  # half precision has no number as small as what its length is at least
        return x if self.logit_scale is None else x * self.logit_scale.clamp(max=LARGEST).exp()


def qk_norms(kind: bool | str, width: int, num_heads: int, **factory: Any) -> tuple[nn.Module | None, nn.Module | None]:
    """Of queries and of keys."""
    if kind == "cosine":
        return UnitLength(num_heads, **factory), UnitLength()
    return (nn.LayerNorm(width, **factory), nn.LayerNorm(width, **factory)) if kind else (None, None)

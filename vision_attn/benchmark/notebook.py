"""Multi-head attention as it is usually written down: once with bmm, once with einx. What the library began from."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["NotebookBmm", "NotebookEinx"]


class Notebook(nn.Module):
    """The two projections that both forms have, with rows ordered (qkv, heads, head_dim)."""

    def __init__(self, channels: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = (channels // num_heads) ** -0.5
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj = nn.Conv2d(channels, channels, 1)


class NotebookBmm(Notebook):
    """Axes by their place: view, permute, copy, two batched products, permute, copy.

    Args:
        channels: channels of the map; divisible by ``num_heads``.
        num_heads: number of heads.
    """

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        n, tokens = self.num_heads, h * w
        d = c // n
        qkv = self.qkv(x).view(b, 3, n, d, tokens).permute(1, 0, 2, 4, 3).contiguous()
        q, k, v = qkv.view(3, b * n, tokens, d).unbind()
        weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)) * self.scale, dim=-1)
        y = torch.bmm(weights, v).view(b, n, tokens, d).permute(0, 1, 3, 2).contiguous()
        return self.proj(y.view(b, c, h, w))


class NotebookEinx(Notebook):
    """Axes by their name.

    Args:
        channels: channels of the map; divisible by ``num_heads``.
        num_heads: number of heads.
    """

    def forward(self, x: Tensor) -> Tensor:
        import einx

        h, w = x.shape[2:]
        q, k, v = einx.id("b (qkv n d) h w -> qkv b n (h w) d", self.qkv(x), qkv=3, n=self.num_heads)
        logits = einx.dot("b n i d, b n j d -> b n i j", q, k) * self.scale
        weights = einx.softmax("b n i [j]", logits)
        y = einx.dot("b n i j, b n j d -> b n i d", weights, v)
        return self.proj(einx.id("b n (h w) d -> b (n d) h w", y, h=h, w=w))

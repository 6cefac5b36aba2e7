"""Layers of libraries that are slow to import, or for which the machine has no kernel."""

import torch
import torch.nn.functional as F
from torch import nn

from vision_attn.attention.reference import neighborhood


def diffusers_attention(*given, **options):
    """What imports for seconds is imported in a test, not in every process that collects them."""
    from diffusers.models.attention_processor import Attention

    return Attention(*given, **options)


class Natten(nn.Module):
    """With the mask that natten's own reference computes for each pair of positions."""

    def __init__(self, embed_dim, num_heads, kernel_size, stride=None, dilation=None, is_causal=None, scale=0.7):
        super().__init__()
        ones = (1,) * len(kernel_size)
        self.num_heads, self.scale, self.kernel_size = num_heads, scale, kernel_size
        self.stride, self.dilation, self.is_causal = stride or ones, dilation or ones, is_causal or (False,) * len(ones)
        self.qkv, self.proj = nn.Linear(embed_dim, 3 * embed_dim), nn.Linear(embed_dim, embed_dim)
        self.proj_drop = nn.Dropout(0.0)

    def forward(self, x):
        allowed = torch.ones(1, 1, dtype=torch.bool)
        for axis in zip(x.shape[1:-1], self.kernel_size, self.dilation, self.stride, self.is_causal, strict=True):
            assert axis[1] * axis[2] <= axis[0], "natten's kernel must fit into its map"
            relation = torch.from_numpy(neighborhood(*axis).allowed)
            allowed = (allowed[:, None, :, None] & relation[:, None, :]).flatten(2).flatten(0, 1)
        q, k, v = self.qkv(x.flatten(1, -2)).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=self.scale)
        return self.proj_drop(self.proj(y.transpose(1, 2).flatten(2).view(x.shape)))


def natten(*given, **options):
    """A layer of the class for as many axes as its kernel has."""
    rank = len(given[2])
    kind = type(f"NeighborhoodAttention{rank}D", (Natten,), {"__module__": "natten.modules"})
    return kind(*given, **options)

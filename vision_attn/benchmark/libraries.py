"""Attention of other libraries with the weights of ours, so that it computes the same."""

from __future__ import annotations

from collections.abc import Callable

import timm.layers.attention2d
import timm.models.maxxvit
from timm.layers.bottleneck_attn import BottleneckAttn
from torch import Tensor, nn

from vision_attn.benchmark.notebook import Notebook, NotebookBmm, NotebookEinx
from vision_attn.blocks import Attention2d

__all__ = ["OTHERS", "OTHERS_RELATIVE"]


def notebook(form: type[Notebook]) -> Callable[[Attention2d], nn.Module]:
    def build(ours: Attention2d) -> nn.Module:
        module = form(ours.channels, ours.num_heads)
        module.load_state_dict(ours.state_dict())
        return module

    return build


class FlattenedMultihead(nn.Module):
    """torch's layer on the positions of a map as a sequence."""

    def __init__(self, channels: int, num_heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(channels, num_heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        y, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return y.transpose(1, 2).reshape(x.shape)


def torch_multihead(ours: Attention2d) -> nn.Module:
    module = FlattenedMultihead(ours.channels, ours.num_heads)
    weights = {
        "in_proj_weight": ours.qkv.weight.flatten(1),
        "in_proj_bias": ours.qkv.bias,
        "out_proj.weight": ours.proj.weight.flatten(1),
        "out_proj.bias": ours.proj.bias,
    }
    module.attention.load_state_dict(weights)
    return module


def timm_layers(ours: Attention2d) -> nn.Module:
    module = timm.layers.attention2d.Attention2d(ours.channels, num_heads=ours.num_heads)
    module.load_state_dict(ours.state_dict())
    return module


def timm_maxxvit(ours: Attention2d) -> nn.Module:
    module = timm.models.maxxvit.Attention2d(ours.channels, dim_head=ours.key_dim)
    weights = ours.state_dict()
    for key in ("qkv.weight", "qkv.bias"):  # its rows are ordered (heads, qkv, head_dim)
        weights[key] = weights[key].unflatten(0, (3, ours.num_heads, -1)).transpose(0, 1).flatten(0, 2)
    module.load_state_dict(weights)
    return module


def timm_bottleneck(ours: Attention2d) -> nn.Module:
    weights = {key.replace("position.", "pos_embed."): value for key, value in ours.state_dict().items()}
    size = tuple((len(weights[f"pos_embed.{axis}_rel"]) + 1) // 2 for axis in ("height", "width"))
    module = BottleneckAttn(ours.channels, feat_size=size, num_heads=ours.num_heads, dim_head=ours.key_dim)
    module.load_state_dict(weights)
    return module


#: What plain attention is compared with: a function that gives the module for a block of ours.
OTHERS: dict[str, Callable[[Attention2d], nn.Module]] = {
    "notebook bmm": notebook(NotebookBmm),
    "notebook einx": notebook(NotebookEinx),
    "torch MultiheadAttention": torch_multihead,
    "timm layers Attention2d": timm_layers,
    "timm maxxvit Attention2d": timm_maxxvit,
}

#: What attention with relative positions is compared with.
OTHERS_RELATIVE: dict[str, Callable[[Attention2d], nn.Module]] = {"timm BottleneckAttn": timm_bottleneck}

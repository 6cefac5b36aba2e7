"""Swin's attention in windows: torchvision's, which makes them itself, and timm's, which is given them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention.blocks import Attention, Attention2d
from vision_attn.attention.blocks.projection import in_format_of
from vision_attn.attention.patterns import Window
from vision_attn.attention.position import RelPosTable
from vision_attn.networks.convert.layer import LAYERS, Layer, converted, known
from vision_attn.networks.convert.proof import random_map
from vision_attn.networks.convert.timm_tokens import fused_rows
from vision_attn.networks.convert.weights import TABLE, Rows, Weights

__all__ = ["PaddedAttention2d", "from_timm_swin", "from_torchvision_swin"]

TORCHVISION_SWIN = "torchvision.models.swin_transformer.ShiftedWindowAttention"
TIMM_SWIN = ("timm.models.swin_transformer.WindowAttention", "timm.models.swin_transformer_v2.WindowAttention")


def from_torchvision_swin(module: nn.Module) -> Attention:
    """The block that computes what ``ShiftedWindowAttention`` of ``torchvision.models.swin_transformer`` does.

    ``module(x)`` on ``(b, h, w, c)`` becomes ``block(x)`` on ``(b, c, h, w)``, with the pattern ``Window(window_size,
    shift)``. As torchvision's, and unlike any other :class:`Attention2d`, the block pads a map that is no multiple of
    the window with zeros, and attends to them. Positions that a shift brings together have 100 taken off their logits
    by torchvision, and do not see each other here: where logits differ by less than 50 that is the same.

    Of the second version, the network that gives the biases becomes the table that it gives: the table is trained.

    Args:
        module: the layer; ``ShiftedWindowAttentionV2`` as well.

    Returns:
        The :class:`Attention2d`, of a kind that pads so, with copies of the weights.

    Raises:
        ValueError: it is no such layer.
        ConversionError: the block does not compute what the layer does.

    Source: https://github.com/pytorch/vision/blob/main/torchvision/models/swin_transformer.py

    >>> from torchvision.models.swin_transformer import ShiftedWindowAttention
    >>> block = from_torchvision_swin(ShiftedWindowAttention(64, window_size=[7, 7], shift_size=[3, 3], num_heads=4))
    >>> block(torch.randn(2, 64, 14, 21)).shape
    torch.Size([2, 64, 14, 21])
    """
    return converted(module, known(module, TORCHVISION_SWIN))


def from_timm_swin(module: Any, *, shift: int | tuple[int, int] = 0) -> Attention:
    """The block that computes what ``WindowAttention`` of timm's Swin, of either version, does in its network.

    It is given the windows of a map, and a mask where they are shifted; the block makes both itself. As in timm's
    network it pads a map that is no multiple of the window with zeros, and attends to them; with a shift, which timm
    does before it pads, the block refuses such a map. What was said of logits and of the second version at
    :func:`from_torchvision_swin` holds here too.

    Args:
        module: the layer.
        shift: ``shift_size`` of the ``SwinTransformerBlock`` around it, which the layer does not know.

    Returns:
        The :class:`Attention2d`, of a kind that pads so, with copies of the weights.

    Raises:
        ValueError: it is no such layer.
        ConversionError: the block does not compute what the layer does.

    Source: https://github.com/huggingface/pytorch-image-models/blob/main/timm/models/swin_transformer.py

    >>> from timm.models.swin_transformer import WindowAttention
    >>> layer = WindowAttention(64, num_heads=4, window_size=7)
    >>> from_timm_swin(layer, shift=3)(torch.randn(2, 64, 14, 21)).shape
    torch.Size([2, 64, 14, 21])
    """
    layer, by = known(module, *TIMM_SWIN), shift if isinstance(shift, tuple) else (shift, shift)
    kind = WholeWindows2d if any(by) else PaddedAttention2d
    return converted(module, layer, kind=kind, pattern=Window(tuple(module.window_size), by), position=RelPosTable())


class PaddedAttention2d(Attention2d):
    """Attention in windows that pads its map with zeros, as far as the windows reach, and attends to them."""

    def forward(self, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        if isinstance(x, torch.fx.Proxy):
            return super().forward(x, mask, context)
        padded = self.padded(x, mask, context)
        y = super().forward(padded, mask, context)
        return y if padded is x else in_format_of(x, y[..., : x.shape[-2], : x.shape[-1]])

    def attention_weights(self, x: Tensor, mask: Any = None, queries: Any = None, context: Any = None) -> Tensor:
        """Of the positions of the map as it is padded."""
        return super().attention_weights(self.padded(x, mask, context), mask, queries, context)

    def padded(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> Tensor:
        sides = [side or 1 for side in self.partitioner.window_shape]
        below, right = (-length % side for length, side in zip(x.shape[-2:], sides, strict=True))
        if not below and not right:
            return x
        if mask is not None or context is not None:
            raise ValueError(
                f"mask and context must be None for a map of {x.shape[-2]}×{x.shape[-1]}, which is padded to whole "
                f"windows of {'×'.join(map(str, sides))}: pad all of them yourself"
            )
        return F.pad(x, (0, right, 0, below))


class WholeWindows2d(PaddedAttention2d):
    """For a source that rolls its map before it pads it."""

    def padded(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> Tensor:
        if super().padded(x, None, None) is not x:
            raise ValueError(
                f"x must be of whole windows of {self.partitioner.window_shape}, since the layer that this block was "
                f"made of pads other maps after they are rolled; got {x.shape[-2]}×{x.shape[-1]}: pad it yourself"
            )
        return x


def swin_weights(module: Any) -> Weights:
    """The network that gives the biases of Swin v2 for every offset becomes the table that it gives."""
    rows = fused_rows(module)
    if not hasattr(module, "logit_scale"):
        return {**rows, TABLE: module.relative_position_bias_table}
    table = 16 * torch.sigmoid(module.cpb_mlp(module.relative_coords_table).flatten(0, -2))
    return {**rows, TABLE: table, "q_norm.logit_scale": module.logit_scale}


def torchvision_weights(module: Any) -> Weights:
    weights = swin_weights(module)
    rows = weights["qkv"]
    if not hasattr(module, "logit_scale") or rows.bias is None:
        return weights
    q, k, v = rows.bias.chunk(3)  # that of the keys is there and is not used
    return {**weights, "qkv": Rows(rows.weight, torch.cat([q, torch.zeros_like(k), v]))}


def attend_window(module: Any, attend: Callable[..., Tensor], x: Tensor, mask: Tensor | None = None) -> Tensor:
    bias = None if mask is None else mask.repeat(len(x) // len(mask), 1, 1)[:, None]
    y = attend(x.transpose(1, 2).unflatten(2, tuple(module.window_size)), bias)
    return y.flatten(2).transpose(1, 2)


SWIN = Layer(
    torchvision_weights,
    lambda module: {
        "num_heads": module.num_heads,
        "kind": PaddedAttention2d,
        "pattern": Window(tuple(module.window_size), tuple(module.shift_size)),
        "position": RelPosTable(),
    },
    last=True,
    linear=("qkv", "proj"),
    drops=("attention_dropout", "dropout"),
    settings=("num_heads", "window_size", "shift_size", "attention_dropout", "dropout"),
    size=lambda module: (max(1, 2 * module.window_size[0] - 1), 2 * module.window_size[1] + 1),
)
LAYERS |= dict.fromkeys((TORCHVISION_SWIN, f"{TORCHVISION_SWIN}V2"), SWIN)
LAYERS |= dict.fromkeys(
    TIMM_SWIN,
    Layer(
        swin_weights,
        lambda module: {
            "num_heads": module.num_heads,
            "position": RelPosTable(feat_size=tuple(module.window_size)),
        },
        linear=("qkv", "proj"),
        settings=("num_heads", "window_size"),
        call=attend_window,
        arguments=lambda module: (random_map(4, math.prod(module.window_size), module.qkv.in_features),),
    ),
)

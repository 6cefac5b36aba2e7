"""Conversions of the window and grid attention of timm and torchvision: MaxViT, CoAtNet, Swin and Twins."""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_attn.attention.blocks import Attention2d
from vision_attn.attention.blocks.projection import to_memory_format_of
from vision_attn.attention.patterns import Window
from vision_attn.attention.position import RelPosTable
from vision_attn.networks.convert.conversion import CONVERSIONS, FALLBACK, Attend, repeat_masks
from vision_attn.networks.convert.equivalence import random_map
from vision_attn.networks.convert.projection import Projection, named_weights
from vision_attn.networks.convert.timm_layers import CHANNELS_LAST, MAPS, maxxvit_table, relative_bias, vit_weights

#: The parameter of :class:`RelPosTable`.
BIASES = "position.relative_position_bias_table"


class PaddedAttention(Attention2d):
    """Window attention that pads its feature map with zeros to complete windows, and attends to the padding."""

    #: True if the network shifts the feature map before it pads it, which the block does not support
    shifts_before_padding = False

    def forward(self, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        padded = self.pad(x, mask, context)
        y = super().forward(padded, mask, context)
        return y if padded is x else to_memory_format_of(x, y[..., : x.shape[-2], : x.shape[-1]])

    def attention_weights(self, x: Tensor, mask: Any = None, queries: Any = None, context: Any = None) -> Tensor:
        """Return the attention weights of the padded feature map."""
        return super().attention_weights(self.pad(x, mask, context), mask, queries, context)

    def pad(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> Tensor:
        window, size = self.resolved_pattern.window_shape, x.shape[-2:]
        below, right = (-length % (side or 1) for length, side in zip(size, window, strict=True))
        if not below and not right:
            return x
        rolled = self.shifts_before_padding and any(getattr(self.resolved_pattern, "shift", ()))
        if mask is not None or context is not None or rolled:
            got = f"{tuple(size)} with a shift, a mask or a context"
            raise ValueError(f"x must have a size divisible by the window {window}, got {got}. Pad x first")
        return F.pad(x, (0, right, 0, below))


class ShiftFirstAttention2d(PaddedAttention):
    """Window attention for a layer whose network shifts the feature map before it pads it."""

    shifts_before_padding = True


def maxxvit_size(layer: Any) -> tuple[int, ...]:
    return tuple(getattr(layer.rel_pos, "window_size", (3, 4)))


def swin_weights(layer: Any) -> dict[str, Any]:
    """Read the weights; for Swin v2, the table of position biases is computed by the network of the layer."""
    weights = vit_weights(layer)
    if not hasattr(layer, "logit_scale"):
        return weights | {BIASES: layer.relative_position_bias_table}
    if layer.qkv.bias is not None:
        q, k, v = layer.qkv.bias.chunk(3)  # the bias of the keys is not used
        weights["qkv"] = Projection(layer.qkv.weight, torch.cat([q, torch.zeros_like(k), v]))
    table = 16 * torch.sigmoid(layer.cpb_mlp(layer.relative_coords_table).flatten(0, -2))
    return weights | {BIASES: table, "q_norm.logit_scale": layer.logit_scale}


def get_window_size(layer: Any) -> tuple[int, ...]:
    """Return the window size of a layer whose input is the tokens of windows."""
    return tuple(layer.window_size) if hasattr(layer, "window_size") else (layer.size, layer.size)


def attend_windows(layer: Any, attend: Attend, x: Tensor, mask: Tensor | None = None) -> Any:
    if x.shape[-2] != math.prod(get_window_size(layer)):  # MONAI shortens windows on a small feature map
        return FALLBACK
    maps = x.flatten(0, -3).mT.unflatten(2, get_window_size(layer))
    y = attend(maps, None if mask is None else repeat_masks(mask, x))
    return y.flatten(2).mT.reshape(x.shape)


MAXXVIT = replace(
    MAPS,
    weights=lambda layer: {**vit_weights(layer), BIASES: maxxvit_table(layer)},
    options={"position": lambda layer: None if maxxvit_table(layer) is None else RelPosTable(maxxvit_size(layer))},
    swap_only=("rel_pos.mlp",),
    bias=relative_bias,
    size=maxxvit_size,
    groups=lambda layer: {},
)
TORCHVISION_SWIN = replace(
    MAPS,
    weights=swin_weights,
    options={
        "kind": lambda layer: PaddedAttention,
        "pattern": lambda layer: Window(tuple(layer.window_size), tuple(layer.shift_size)),
        "position": RelPosTable(),
    },
    axes="b h w c",
    dropouts=("attention_dropout", "dropout"),
    size=lambda layer: tuple(side + 1 for side in layer.window_size),
)
TIMM_SWIN = replace(
    MAPS,
    weights=swin_weights,
    options={"position": lambda layer: RelPosTable(feat_size=get_window_size(layer))},
    call=attend_windows,
    example=lambda layer: (random_map(4, math.prod(layer.window_size), layer.qkv.in_features),),
    groups=lambda layer: {"kind": ShiftFirstAttention2d, "pattern": Window(tuple(layer.window_size))},
)
CONVERSIONS |= {
    "timm.models.maxxvit.Attention2d": MAXXVIT,
    "timm.models.maxxvit.AttentionCl": replace(MAXXVIT, axes="b h w c"),
    "timm.models.swin_transformer.WindowAttention": TIMM_SWIN,
    "timm.models.swin_transformer_v2.WindowAttention": TIMM_SWIN,
    "timm.models.twins.LocallyGroupedAttn": replace(
        CHANNELS_LAST,  # the layer pads and partitions the feature map of its tokens
        options={"kind": lambda layer: PaddedAttention, "pattern": lambda layer: Window(layer.ws)},
        call=lambda layer, attend, x, size: attend(x.mT.unflatten(2, tuple(size))).flatten(2).mT,
        example=lambda layer: (random_map(2, 3 * (layer.ws + 1), layer.dim), (3, layer.ws + 1)),
    ),
    "torchvision.models.maxvit.RelativePositionalMultiHeadAttention": replace(
        TIMM_SWIN,
        weights=lambda layer: named_weights("to_qkv", "merge")(layer) | {BIASES: layer.relative_position_bias_table},
        options={**TIMM_SWIN.options, "num_heads": "n_heads", "scale": "scale_factor"},
        example=lambda layer: (random_map(2, 3, layer.size**2, layer.to_qkv.in_features),),
        groups=lambda layer: {},
    ),
    "torchvision.models.swin_transformer.ShiftedWindowAttention": TORCHVISION_SWIN,
    "torchvision.models.swin_transformer.ShiftedWindowAttentionV2": TORCHVISION_SWIN,
    "monai.networks.nets.swin_unetr.WindowAttention": replace(
        TIMM_SWIN,  # windows have two or three axes
        options={**TIMM_SWIN.options, "rank": lambda layer: len(layer.window_size)},
        example=lambda layer: (random_map(4, math.prod(layer.window_size), layer.qkv.in_features), None),
        groups=lambda layer: {},
    ),
}

"""Attention in windows and grids: Swin's of torchvision, which makes them itself, and others, which are given them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.blocks import Attention, Attention2d
from vision_attn.blocks.projection import in_format_of
from vision_attn.convert.layer import LAYERS, OWN, Layer, converted, known
from vision_attn.convert.proof import random_map
from vision_attn.convert.refusal import check_carried, part_of
from vision_attn.convert.timm_tokens import fused_rows
from vision_attn.convert.weights import Rows, Weights, query_less_key, rows_of
from vision_attn.patterns import AnyPattern, Grid, Window, resolve_pattern
from vision_attn.position import RelPosTable

__all__ = ["from_timm_maxxvit_attention", "from_timm_swin", "from_torchvision_maxvit", "from_torchvision_swin"]

TABLE = "position.relative_position_bias_table"

# --- Swin -------------------------------------------------------------------------------------------------------------

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

# --- MaxViT -----------------------------------------------------------------------------------------------------------

TORCHVISION_MAXVIT = "torchvision.models.maxvit.RelativePositionalMultiHeadAttention"
MAXXVIT = ("timm.models.maxxvit.Attention2d", "timm.models.maxxvit.AttentionCl")
#: By the class of ``rel_pos``: how its table comes into the order of :class:`RelPosTable`.
TABLES: dict[str, Callable[[Tensor], Tensor]] = {"RelPosBias": lambda table: table, "RelPosBiasTf": query_less_key}


def from_torchvision_maxvit(module: nn.Module, *, pattern: str | AnyPattern = "full") -> Attention:
    """The block that computes what ``RelativePositionalMultiHeadAttention`` of ``torchvision.models.maxvit`` does.

    It is given the windows or the grids of a map, which the block makes itself: say which by ``pattern``. It scales by
    the channels, not by the width of a head, and so does the block.

    Args:
        module: the layer.
        pattern: ``Window(size)`` or ``Grid(size)``; ``"full"`` for maps of one window.

    Returns:
        The :class:`Attention2d`, with copies of the weights.

    Raises:
        ValueError: it is no such layer, or its table is for another size than the pattern.
        ConversionError: the block does not compute what the layer does.

    Source: https://github.com/pytorch/vision/blob/main/torchvision/models/maxvit.py

    >>> from torchvision.models.maxvit import RelativePositionalMultiHeadAttention
    >>> layer = RelativePositionalMultiHeadAttention(64, head_dim=16, max_seq_len=49)
    >>> from_torchvision_maxvit(layer, pattern=Window(7))(torch.randn(2, 64, 14, 21)).shape
    torch.Size([2, 64, 14, 21])
    """
    layer = known(module, TORCHVISION_MAXVIT)
    check_pattern(pattern)
    return converted(module, layer, pattern=pattern)


def from_timm_maxxvit_attention(module: nn.Module, *, pattern: str | AnyPattern = "full") -> Attention:
    """The block that computes what ``Attention2d`` and ``AttentionCl`` of ``timm.models.maxxvit`` do.

    In CoAtNet they see a whole map. In MaxViT they are given its windows or its grids, which the block makes itself:
    say which by ``pattern``. Their rows are ordered (heads, qkv, width) unless ``head_first=False``, and ``RelPosBias``
    and ``RelPosBiasTf`` become :class:`RelPosTable`.

    Args:
        module: the layer.
        pattern: ``"full"``, ``Window(size)`` or ``Grid(size)``.

    Returns:
        The :class:`Attention2d`, with copies of the weights.

    Raises:
        ValueError: it is no such layer, does what the block does not, or has tables for another size than the pattern.
        ConversionError: the block does not compute what the layer does.

    Source: https://github.com/huggingface/pytorch-image-models/blob/main/timm/models/maxxvit.py

    >>> from timm.models.maxxvit import AttentionCl
    >>> from_timm_maxxvit_attention(AttentionCl(64), pattern=Grid(7))(torch.randn(2, 64, 14, 21)).shape
    torch.Size([2, 64, 14, 21])
    """
    layer = known(module, *MAXXVIT)
    check_pattern(pattern)
    has_table = module.rel_pos is None or type(module.rel_pos).__name__ in TABLES
    check_carried(module, "rel_pos", has_table, f"the block has a counterpart of {' and '.join(TABLES)}")
    return converted(module, layer, pattern=pattern)


def check_pattern(pattern: str | AnyPattern) -> None:
    """Refuse a pattern that is neither of the two partitions of MaxViT nor the whole map."""
    resolved = resolve_pattern(pattern)
    shifted = isinstance(resolved, Window) and resolved.shift not in (0, (0, 0))
    if shifted or not (isinstance(resolved, (Window, Grid)) or resolved == resolve_pattern("full")):
        raise ValueError(f"pattern must be 'full', a Window without shift or a Grid, as in MaxViT; got {pattern!r}")


def attend_maxvit(module: Any, attend: Callable[..., Tensor], x: Tensor) -> Any:
    if x.shape[2] != module.size**2:
        return OWN
    maps = x.flatten(0, 1).transpose(1, 2).unflatten(2, (module.size, module.size))
    return attend(maps).flatten(2).transpose(1, 2).unflatten(0, x.shape[:2])


def maxxvit_weights(module: Any) -> Weights:
    in_order = TABLES.get(type(module.rel_pos).__name__)
    table = {} if in_order is None else {TABLE: in_order(module.rel_pos.relative_position_bias_table)}
    return {**fused_rows(module), **table}


def maxxvit_options(module: Any) -> dict[str, Any]:
    has_table = type(module.rel_pos).__name__ in TABLES
    position = RelPosTable(feat_size=tuple(module.rel_pos.window_size)) if has_table else None
    return {"num_heads": module.num_heads, "position": position}


def maxxvit_bias(module: Any, x: Tensor, shared_rel_pos: Tensor | None = None) -> Any:
    if module.rel_pos is None or shared_rel_pos is not None:
        return None if shared_rel_pos is None else OWN
    if tuple(x.shape[2:]) != tuple(module.rel_pos.window_size):
        return OWN
    return None if type(module.rel_pos).__name__ in TABLES else module.rel_pos.get_bias()


LAYERS[TORCHVISION_MAXVIT] = Layer(
    lambda module: {
        "qkv": rows_of(module.to_qkv),
        "proj": rows_of(module.merge),
        TABLE: module.relative_position_bias_table,
    },
    lambda module: {
        "num_heads": module.n_heads,
        "scale": module.scale_factor,
        "position": RelPosTable(feat_size=(module.size, module.size)),
    },
    linear=("to_qkv", "merge"),
    settings=("n_heads", "size", "scale_factor"),
    call=attend_maxvit,
    arguments=lambda module: (random_map(2, 3, module.size**2, module.to_qkv.in_features),),
)
LAYERS[MAXXVIT[0]] = Layer(
    maxxvit_weights,
    maxxvit_options,
    linear=("qkv", "proj"),
    check=lambda module: check_carried(
        module,
        "rel_pos.prefix_tokens",
        not part_of(module, "rel_pos.prefix_tokens"),
        "a map has no token before its positions",
    ),
    settings=("num_heads", "dim_head", "head_first"),
    bias=maxxvit_bias,
    size=lambda module: tuple(getattr(module.rel_pos, "window_size", None) or (3, 4)),
    own="calls with shared relative positions",
)
LAYERS[MAXXVIT[1]] = replace(LAYERS[MAXXVIT[0]], last=True)

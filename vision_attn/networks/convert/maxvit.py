"""MaxViT's attention in windows and grids, timm's and torchvision's, which is also that of CoAtNet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from vision_attn.attention.blocks import Attention
from vision_attn.attention.patterns import AnyPattern, Grid, Window, resolve_pattern
from vision_attn.attention.position import RelPosTable
from vision_attn.networks.convert.layer import LAYERS, OWN, Layer, converted, known
from vision_attn.networks.convert.proof import random_map
from vision_attn.networks.convert.refusal import check_carried, part_of
from vision_attn.networks.convert.timm_tokens import fused_rows
from vision_attn.networks.convert.weights import TABLE, Weights, query_less_key, rows_of

__all__ = ["from_timm_maxxvit_attention", "from_torchvision_maxvit"]

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

    >>> import torch
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

    >>> import torch
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

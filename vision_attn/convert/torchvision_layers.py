"""torchvision's attention in windows: of Swin, which makes them itself, and of MaxViT, which is given them."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from vision_attn.blocks import Attention
from vision_attn.convert.filling import attention
from vision_attn.convert.proof import proven
from vision_attn.convert.refusals import check_carried, check_kind, check_parameters, check_projections
from vision_attn.convert.rows import rows_of
from vision_attn.convert.windows import check_pattern, proof_size, run_in_groups
from vision_attn.patterns import AnyPattern, Window
from vision_attn.position import RelPosTable

__all__ = ["from_torchvision_maxvit", "from_torchvision_swin"]

TABLE = "position.relative_position_bias_table"


def from_torchvision_swin(module: nn.Module) -> Attention:
    """The block that computes what ``ShiftedWindowAttention`` of ``torchvision.models.swin_transformer`` does.

    ``module(x)`` on ``(b, h, w, c)`` becomes ``block(x)`` on ``(b, c, h, w)``, with the pattern ``Window(window_size,
    shift)``. On maps that are no multiple of the window the two differ: torchvision pads with zeros and attends to
    them, this block attends to nothing but the map.

    Args:
        module: the layer, of the first version of Swin.

    Returns:
        The :class:`Attention2d`, with copies of the weights.

    Raises:
        ValueError: it is no such layer, or of the second version, whose attention is by cosine.
        ConversionError: the block does not compute what the layer does.

    Source: https://github.com/pytorch/vision/blob/main/torchvision/models/swin_transformer.py

    >>> import torch
    >>> from torchvision.models.swin_transformer import ShiftedWindowAttention
    >>> block = from_torchvision_swin(ShiftedWindowAttention(64, window_size=[7, 7], shift_size=[3, 3], num_heads=4))
    >>> block(torch.randn(2, 64, 14, 21)).shape
    torch.Size([2, 64, 14, 21])
    """
    check_kind(
        "module",
        module,
        "ShiftedWindowAttention of torchvision.models.swin_transformer",
        "torchvision.models.swin_transformer.ShiftedWindowAttention",
    )
    check_swin(module)
    return proven(module, swin, run_swin, shape=swin_shape(module))


def check_swin(module: Any) -> None:
    check_parameters(module)
    check_projections(module, "qkv", "proj")
    factor = getattr(module, "logit_scale", None)
    remedy = "the block has no cosine attention: only the first version of Swin can be converted"
    check_carried(module, "logit_scale", factor, factor is None, remedy)


def swin_shape(module: Any) -> tuple[int, ...]:
    """Of a map of two by three windows."""
    height, width = module.window_size
    return module.qkv.in_features, 2 * height, 3 * width


def swin(module: Any) -> Attention:
    return attention(
        2,
        {"qkv": rows_of(module.qkv), "proj": rows_of(module.proj)},
        {TABLE: module.relative_position_bias_table},
        training=module.training,
        num_heads=module.num_heads,
        pattern=Window(tuple(module.window_size), tuple(module.shift_size)),
        position=RelPosTable(),
        attn_drop=module.attention_dropout,
        proj_drop=module.dropout,
    )


def run_swin(module: Any, x: Tensor, context: Tensor | None = None) -> Tensor:
    return module(x.movedim(1, -1)).movedim(-1, 1)


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
    check_kind(
        "module",
        module,
        "RelativePositionalMultiHeadAttention of torchvision.models.maxvit",
        "torchvision.models.maxvit.RelativePositionalMultiHeadAttention",
    )
    check_pattern(pattern)
    check_maxvit(module)
    return proven(
        module,
        partial(maxvit, pattern=pattern),
        partial(run_maxvit, pattern=pattern),
        shape=maxvit_shape(module, pattern),
    )


def check_maxvit(module: Any) -> None:
    check_parameters(module)
    check_projections(module, "to_qkv", "merge")


def maxvit_shape(module: Any, pattern: str | AnyPattern) -> tuple[int, ...]:
    return module.to_qkv.in_features, *proof_size(pattern, (module.size, module.size))


def maxvit(module: Any, pattern: str | AnyPattern) -> Attention:
    return attention(
        2,
        {"qkv": rows_of(module.to_qkv), "proj": rows_of(module.merge)},
        {TABLE: module.relative_position_bias_table},
        training=module.training,
        num_heads=module.n_heads,
        pattern=pattern,
        position=RelPosTable(feat_size=(module.size, module.size)),
        scale=module.scale_factor,
    )


def run_maxvit(
    module: Any, x: Tensor, context: Tensor | None = None, /, *, pattern: str | AnyPattern = "full"
) -> Tensor:
    return run_in_groups(lambda tokens: module(tokens[:, None])[:, 0], pattern, x)

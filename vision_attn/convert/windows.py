"""Attention in windows and grids: Swin's of torchvision, which makes them itself, and MaxViT's, which is given them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.blocks import Attention, Attention2d
from vision_attn.blocks.attention import check_queries
from vision_attn.blocks.projection import in_format_of
from vision_attn.convert.proof import check_carried, check_kind, check_source, proven
from vision_attn.convert.timm_layers import fused, fused_rows
from vision_attn.convert.weights import Rows, attention, query_less_key, rows_of
from vision_attn.patterns import AnyPattern, Grid, Window, partition_of, resolve_pattern
from vision_attn.position import RelPosTable

__all__ = ["from_timm_maxxvit_attention", "from_torchvision_maxvit", "from_torchvision_swin"]

TABLE = "position.relative_position_bias_table"

#: timm's MaxViT, by the class of ``rel_pos``: how its table comes into the order of :class:`RelPosTable`.
TABLES: dict[str, Callable[[Tensor], Tensor]] = {"RelPosBias": lambda table: table, "RelPosBiasTf": query_less_key}


# --- Swin of torchvision ----------------------------------------------------------------------------------------------


def from_torchvision_swin(module: nn.Module) -> Attention:
    """The block that computes what ``ShiftedWindowAttention`` of ``torchvision.models.swin_transformer`` does.

    ``module(x)`` on ``(b, h, w, c)`` becomes ``block(x)`` on ``(b, c, h, w)``, with the pattern ``Window(window_size,
    shift)``. As torchvision's, and unlike any other :class:`Attention2d`, the block pads a map that is no multiple of
    the window with zeros, and attends to them.

    Args:
        module: the layer, of the first version of Swin.

    Returns:
        The :class:`Attention2d`, of a kind that pads so, with copies of the weights.

    Raises:
        ValueError: it is no such layer, or of the second version, whose attention is by cosine.
        ConversionError: the block does not compute what the layer does.

    Source: https://github.com/pytorch/vision/blob/main/torchvision/models/swin_transformer.py

    >>> from torchvision.models.swin_transformer import ShiftedWindowAttention
    >>> block = from_torchvision_swin(ShiftedWindowAttention(64, window_size=[7, 7], shift_size=[3, 3], num_heads=4))
    >>> block(torch.randn(2, 64, 14, 21)).shape
    torch.Size([2, 64, 14, 21])
    """
    check_kind("module", module, "torchvision.models.swin_transformer.ShiftedWindowAttention")
    check_swin(module)
    return proven(module, swin, run_swin)


def check_swin(module: nn.Module) -> None:
    check_source(module, "qkv", "proj")
    if hasattr(module, "logit_scale"):
        remedy = "the block has no cosine attention: only the first version of Swin can be converted"
        check_carried(module, ("logit_scale", False, remedy))


def swin(module: Any) -> Attention:
    return torchvisions(
        module,
        module.qkv,
        module.proj,
        kind=PaddedAttention2d,
        num_heads=module.num_heads,
        pattern=Window(tuple(module.window_size), tuple(module.shift_size)),
        position=RelPosTable(),
        attn_drop=module.attention_dropout,
        proj_drop=module.dropout,
    )


class PaddedAttention2d(Attention2d):
    """Attention in windows that pads its map with zeros, as far as the windows reach, and attends to them."""

    def forward(self, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        if isinstance(x, torch.fx.Proxy):
            return super().forward(x, mask, context)
        padded = self.padded(x, mask, context)
        y = super().forward(padded, mask, context)
        return y if padded is x else in_format_of(x, y[..., : x.shape[-2], : x.shape[-1]])

    def attention_weights(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        queries: Tensor | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        """Of the positions of the map: what goes to the zeros is missing in the sum."""
        padded = self.padded(x, mask, context)
        if padded is x:
            return super().attention_weights(x, mask, queries, context)
        (height, width), size = x.shape[-2:], padded.shape[-2:]
        check_queries(queries, height * width)
        if queries is None:
            queries = torch.arange(height * width, device=x.device)
        weights = super().attention_weights(padded, None, queries // width * size[1] + queries % width)
        return weights.unflatten(-1, size)[..., :height, :width].flatten(-2)

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


def torchvisions(module: Any, qkv: nn.Module, proj: nn.Module, **options: Any) -> Attention:
    """A block of what torchvision calls by several names, and its table."""
    return attention(2, *torchvision_weights(module, qkv, proj), training=module.training, **options)


def torchvision_weights(module: Any, qkv: nn.Module, proj: nn.Module) -> tuple[dict[str, Rows], dict[str, Tensor]]:
    return {"qkv": rows_of(qkv), "proj": rows_of(proj)}, {TABLE: module.relative_position_bias_table}


def run_swin(module: Any, x: Tensor) -> Tensor:
    return module(x.movedim(1, -1)).movedim(-1, 1)


# --- MaxViT -----------------------------------------------------------------------------------------------------------


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
    check_kind("module", module, "torchvision.models.maxvit.RelativePositionalMultiHeadAttention")
    check_pattern(pattern)
    check_source(module, "to_qkv", "merge")

    def run(module: Any, x: Tensor) -> Tensor:
        return run_in_groups(lambda tokens: module(tokens[:, None])[:, 0], pattern, x)

    return proven(module, lambda module: maxvit(module, pattern), run)


def maxvit(module: Any, pattern: str | AnyPattern) -> Attention:
    position = RelPosTable(feat_size=(module.size, module.size))
    options = {"pattern": pattern, "position": position, "scale": module.scale_factor}
    return torchvisions(module, module.to_qkv, module.merge, num_heads=module.n_heads, **options)


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
    check_kind("module", module, "timm.models.maxxvit.Attention2d", "timm.models.maxxvit.AttentionCl")
    check_pattern(pattern)
    check_maxxvit(module)
    known = module.rel_pos is None or type(module.rel_pos).__name__ in TABLES
    check_carried(module, ("rel_pos", known, f"the block has a counterpart of {' and '.join(TABLES)}"))

    def run(module: Any, x: Tensor) -> Tensor:
        if not isinstance(module.qkv, nn.Conv2d):
            return run_in_groups(module, pattern, x)
        return run_in_groups(lambda t: module(t.transpose(1, 2)[..., None]).flatten(2).transpose(1, 2), pattern, x)

    return proven(module, lambda module: maxxvit(module, pattern), run)


def check_maxxvit(module: Any) -> None:
    check_source(module, "qkv", "proj")
    if getattr(module.rel_pos, "prefix_tokens", 0):
        check_carried(module, ("rel_pos.prefix_tokens", False, "a map has no token before its positions"))


def maxxvit(module: Any, pattern: str | AnyPattern) -> Attention:
    projections, tables = maxxvit_weights(module)
    position = RelPosTable(feat_size=tuple(module.rel_pos.window_size)) if tables else None
    return fused(module, module.dim_head, projections, tables, pattern=pattern, position=position)


def maxxvit_weights(module: Any) -> tuple[dict[str, Rows], dict[str, Tensor]]:
    """With the table of biases, if it has one."""
    in_order = TABLES.get(type(module.rel_pos).__name__)
    tables = {} if in_order is None else {TABLE: in_order(module.rel_pos.relative_position_bias_table)}
    return fused_rows(module), tables


def check_pattern(pattern: str | AnyPattern) -> None:
    """Refuse a pattern that is neither of the two partitions of MaxViT nor the whole map."""
    resolved = resolve_pattern(pattern)
    shifted = isinstance(resolved, Window) and resolved.shift not in (0, (0, 0))
    if shifted or not (isinstance(resolved, (Window, Grid)) or resolved == resolve_pattern("full")):
        raise ValueError(f"pattern must be 'full', a Window without shift or a Grid, as in MaxViT; got {pattern!r}")


def run_in_groups(attend: Callable[[Tensor], Tensor], pattern: str | AnyPattern, x: Tensor) -> Tensor:
    """What a layer of ``(groups, tokens, c)`` gives for the groups that the pattern makes of a map, as a map again.

    The groups are those of the block: what is proven so is the layer, not ``pattern``.
    """
    index, _ = partition_of(resolve_pattern(pattern).partitioner(2), x).index()  # (groups, tokens)
    tokens = x.flatten(2).movedim(1, 2)  # (b, h·w, c)
    y = attend(tokens[:, index].flatten(0, 1))
    y = y.reshape(len(x), -1, y.shape[-1])
    return torch.empty_like(y).index_copy(1, index.flatten(), y).movedim(1, 2).unflatten(2, x.shape[2:])

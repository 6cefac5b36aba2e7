"""Attention in windows and grids: Swin's of torchvision, which makes them itself, and others, which are given them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.blocks import Attention, Attention2d
from vision_attn.blocks.projection import in_format_of
from vision_attn.blocks.weights import check_queries
from vision_attn.convert.proof import check_carried, check_kind, check_source, proven
from vision_attn.convert.timm_layers import check_vit, fused, fused_rows, vit_weights
from vision_attn.convert.weights import Rows, attention, query_less_key, rows_of
from vision_attn.patterns import AnyPattern, Grid, Window, partition_of, resolve_pattern
from vision_attn.position import RelPosTable

__all__ = ["from_timm_maxxvit_attention", "from_timm_swin", "from_torchvision_maxvit", "from_torchvision_swin"]

TABLE = "position.relative_position_bias_table"

#: timm's MaxViT, by the class of ``rel_pos``: how its table comes into the order of :class:`RelPosTable`.
TABLES: dict[str, Callable[[Tensor], Tensor]] = {"RelPosBias": lambda table: table, "RelPosBiasTf": query_less_key}


# --- Swin of torchvision ----------------------------------------------------------------------------------------------


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
    check_kind("module", module, "torchvision.models.swin_transformer.ShiftedWindowAttention")
    check_swin(module)
    return proven(module, swin, run_swin)


def check_swin(module: nn.Module) -> None:
    check_source(module, "qkv", "proj")


def swin(module: Any) -> Attention:
    return attention(
        2,
        *torchvision_weights(module, module.qkv, module.proj),
        training=module.training,
        num_heads=module.num_heads,
        attn_drop=module.attention_dropout,
        proj_drop=module.dropout,
        **in_windows(module, module.shift_size),
    )


def in_windows(module: Any, shift: Sequence[int]) -> dict[str, Any]:
    """The options of a block for a layer of Swin, of either version."""
    return {
        "kind": PaddedAttention2d,
        "pattern": Window(tuple(module.window_size), tuple(shift)),
        "position": RelPosTable(),
        "qk_norm": "cosine" if hasattr(module, "logit_scale") else False,
    }


def continuous_table(module: Any) -> Tensor:
    """The biases of Swin v2, which a small network gives for every offset, as the table of the first version."""
    biases: Tensor = module.cpb_mlp(module.relative_coords_table)
    return 16 * torch.sigmoid(biases.flatten(0, -2))


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


class WholeWindows2d(PaddedAttention2d):
    """For a source that rolls its map before it pads it."""

    def padded(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> Tensor:
        if super().padded(x, None, None) is not x:
            raise ValueError(
                f"x must be of whole windows of {self.partitioner.window_shape}, since the layer that this block was "
                f"made of pads other maps after they are rolled; got {x.shape[-2]}×{x.shape[-1]}: pad it yourself"
            )
        return x


def torchvision_weights(module: Any, qkv: nn.Module, proj: nn.Module) -> tuple[dict[str, Rows], dict[str, Tensor]]:
    rows = rows_of(qkv)
    if not hasattr(module, "logit_scale"):
        return {"qkv": rows, "proj": rows_of(proj)}, {TABLE: module.relative_position_bias_table}
    if rows.bias is not None:  # that of the keys is there and is not used
        q, k, v = rows.bias.chunk(3)
        rows = Rows(rows.weight, torch.cat([q, torch.zeros_like(k), v]))
    return {"qkv": rows, "proj": rows_of(proj)}, {
        TABLE: continuous_table(module),
        "q_norm.logit_scale": module.logit_scale,
    }


def run_swin(module: Any, x: Tensor) -> Tensor:
    return module(x.movedim(1, -1)).movedim(-1, 1)


# --- Swin of timm -----------------------------------------------------------------------------------------------------


def from_timm_swin(module: nn.Module, *, shift: int | tuple[int, int] = 0) -> Attention:
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
    check_kind("module", module, *TIMM_SWIN)
    check_vit(module)

    by = shift if isinstance(shift, tuple) else (shift, shift)

    def convert(layer: Any) -> Attention:
        whole = layer is module and any(by)  # what is proven is the layer, on windows that are not shifted
        projections, tables = vit_weights(layer)
        tables[TABLE] = continuous_table(layer) if tables else layer.relative_position_bias_table
        width = len(projections["qkv"].weight) // (3 * layer.num_heads)
        options = {**in_windows(layer, by if whole else (0, 0)), **({"kind": WholeWindows2d} if whole else {})}
        return fused(layer, width, projections, tables, **options)

    return proven(module, convert, lambda layer, x: run_in_groups(layer, Window(tuple(layer.window_size)), x))


#: By their path.
TIMM_SWIN = ("timm.models.swin_transformer.WindowAttention", "timm.models.swin_transformer_v2.WindowAttention")


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
    return attention(
        2,
        *torchvision_weights(module, module.to_qkv, module.merge),
        training=module.training,
        num_heads=module.n_heads,
        pattern=pattern,
        position=RelPosTable(feat_size=(module.size, module.size)),
        scale=module.scale_factor,
    )


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

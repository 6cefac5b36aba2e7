"""timm's attention of MaxViT and CoAtNet, whose rows have the heads first and whose tables come in two orders."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from vision_attn.blocks import Attention
from vision_attn.convert.proof import proven
from vision_attn.convert.refusals import check_carried, check_kind
from vision_attn.convert.rows import query_less_key
from vision_attn.convert.timm_layers import channels_of, check_plain, plain
from vision_attn.convert.windows import check_pattern, proof_size, run_in_groups
from vision_attn.patterns import AnyPattern
from vision_attn.position import RelPosTable

__all__ = ["from_timm_maxxvit_attention"]

#: By the class of ``rel_pos``: how its table comes into the order of :class:`RelPosTable`.
TABLES: dict[str, Callable[[Tensor], Tensor]] = {"RelPosBias": lambda table: table, "RelPosBiasTf": query_less_key}


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
    >>> from vision_attn.patterns import Grid
    >>> from_timm_maxxvit_attention(AttentionCl(64), pattern=Grid(7))(torch.randn(2, 64, 14, 21)).shape
    torch.Size([2, 64, 14, 21])
    """
    paths = ("timm.models.maxxvit.Attention2d", "timm.models.maxxvit.AttentionCl")
    check_kind("module", module, " or ".join(paths), *paths)
    check_pattern(pattern)
    check_maxxvit(module)
    size = proof_size(pattern, table_size(module))
    return proven(
        module,
        partial(maxxvit, pattern=pattern),
        partial(run_maxxvit, pattern=pattern),
        shape=(channels_of(module), *size),
    )


def check_maxxvit(module: Any) -> None:
    check_plain(module)
    kind = type(module.rel_pos).__name__
    known = module.rel_pos is None or kind in TABLES
    remedy = f"the block has a counterpart of {' and '.join(TABLES)}"
    check_carried(module, "rel_pos", module.rel_pos, known, remedy)
    tokens = getattr(module.rel_pos, "prefix_tokens", 0)
    check_carried(module, "rel_pos.prefix_tokens", tokens, not tokens, "a map has no token before its positions")


def maxxvit(module: Any, pattern: str | AnyPattern) -> Attention:
    tables, position = {}, None
    if module.rel_pos is not None:
        in_order = TABLES[type(module.rel_pos).__name__]
        tables["position.relative_position_bias_table"] = in_order(module.rel_pos.relative_position_bias_table)
        position = RelPosTable(feat_size=table_size(module))
    return plain(
        module, module.dim_head, tables=tables, head_first=module.head_first, pattern=pattern, position=position
    )


def table_size(module: Any) -> tuple[int, int] | None:
    """The size of map or window that the table of biases is for."""
    if module.rel_pos is None:
        return None
    height, width = module.rel_pos.window_size
    return height, width


def run_maxxvit(
    module: Any, x: Tensor, context: Tensor | None = None, /, *, pattern: str | AnyPattern = "full"
) -> Tensor:
    if not isinstance(module.qkv, nn.Conv2d):
        return run_in_groups(module, pattern, x)
    return run_in_groups(lambda y: module(y.transpose(1, 2)[..., None]).flatten(2).transpose(1, 2), pattern, x)

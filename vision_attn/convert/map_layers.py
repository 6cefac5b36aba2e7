"""Further attention on maps: timm's of HaloNet and its pool; lucidrains' BoTNet; natten's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.blocks import Attention
from vision_attn.convert.family import OWN, Family, random_map
from vision_attn.convert.proof import check_carried, check_kind, check_parts, check_source, drop_of, proven, shapes_for
from vision_attn.convert.timm_layers import check_unpooled, fused_rows
from vision_attn.convert.weights import (
    Rows,
    attention,
    check_joined,
    heads_first,
    identity_rows,
    parameters_of,
    rows_of,
    side_by_side,
)
from vision_attn.patterns import Halo, Neighborhood
from vision_attn.position import AbsPos, RelPosDecomposed

__all__ = ["MAPS", "from_lucidrains_attention", "from_natten", "from_timm_halo_attn"]


# --- timm: halos ------------------------------------------------------------------------------------------------------


def from_timm_halo_attn(module: nn.Module) -> Attention:
    """The block that computes what ``timm.layers.HaloAttn``, of HaloNet, does, with the pattern :class:`Halo`.

    It has no output projection: the block's is the identity and is not trained.

    Args:
        module: the layer, with a stride of 1.

    Returns:
        The :class:`Attention2d`, with copies of the weights.

    Raises:
        ValueError: it is no such layer, or has a stride of 2.
        ConversionError: the block does not compute what the layer does.

    Source: https://github.com/huggingface/pytorch-image-models/blob/main/timm/layers/halo_attn.py

    >>> from timm.layers.halo_attn import HaloAttn
    >>> from_timm_halo_attn(HaloAttn(64, block_size=7))(torch.randn(2, 64, 14, 21)).shape
    torch.Size([2, 64, 14, 21])
    """
    check_kind("module", module, "timm.layers.halo_attn.HaloAttn")
    check_unpooled(module)
    check_halo(module)
    return proven(module, halo)


def check_halo(module: Any) -> None:
    check_carried(module, ("block_stride", module.block_stride == 1, "the block has no stride: use avg_down=True"))
    check_source(module, "q", "kv")
    check_joined(q=rows_of(module.q), kv=rows_of(module.kv))


def halo_weights(module: Any) -> tuple[dict[str, Rows], dict[str, Tensor]]:
    kv = heads_first(rows_of(module.kv), module.num_heads, module.dim_head_qk, module.dim_head_v)
    factor = module.scale if module.scale_pos_embed else 1.0
    # Its offsets are counted from the corner of the halo: the first of its tables are never looked up.
    tables = {
        f"position.{name}": factor * getattr(module.pos_embed, name)[2 * module.halo_size :]
        for name in ("height_rel", "width_rel")
    }
    return {"qkv": side_by_side(rows_of(module.q), kv)}, tables


def halo(module: Any) -> Attention:
    projections, tables = halo_weights(module)
    return attention(
        2,
        {**projections, "proj": identity_rows(module.dim_out_v, module.q.weight)},
        tables,
        training=module.training,
        num_heads=module.num_heads,
        key_dim=module.dim_head_qk,
        value_dim=module.dim_head_v,
        pattern=Halo(module.block_size, module.halo_size),
        position=RelPosDecomposed(),
    )


def without_projection(block: Attention) -> Attention:
    """For modules that have none: the identity need not be multiplied with."""
    block.proj = nn.Identity()  # type: ignore[assignment]
    return block


def forward_halo(module: Any, attend: Callable[..., Tensor], x: Tensor) -> Any:
    whole = len(x) and not x.shape[2] % module.block_size and not x.shape[3] % module.block_size
    return module.pool(attend(x)) if whole else OWN


# --- timm: the pool ---------------------------------------------------------------------------------------------------


def forward_pool(module: Any, attend: Callable[..., Tensor], x: Tensor, pre_logits: bool = False) -> Any:
    """The token of a map, which alone has to attend to it, or the map."""
    if pre_logits or tuple(x.shape[2:]) != tuple(module.feat_size) or (module.training and module.drop.p):
        return OWN
    tokens = x.flatten(2)
    first = tokens.mean(2, keepdim=True) if module.cls_token is None else module.cls_token.mT.expand(len(x), -1, -1)
    tokens = torch.cat([first, tokens], dim=2) + module.pos_embed.T
    if module.pool_type == "token":
        return attend(tokens[..., :1], None, tokens)[..., 0]
    return attend(tokens)[..., 1:].unflatten(2, x.shape[2:])


# --- lucidrains and natten --------------------------------------------------------------------------------------------


def from_lucidrains_attention(module: nn.Module) -> Attention:
    """The block that computes what ``Attention`` of lucidrains' bottleneck transformer does.

    It is known by its parts, ``to_qkv`` and ``pos_emb``. Its positions, relative or absolute, become
    :class:`RelPosDecomposed` or :class:`AbsPos`. It has no output projection: the block's is the identity and is not
    trained.

    Args:
        module: the layer.

    Returns:
        The :class:`Attention2d`, with copies of the weights.

    Raises:
        ValueError: it is no such layer.
        ConversionError: the block does not compute what the layer does.

    Source: https://github.com/lucidrains/bottleneck-transformer-pytorch

    >>> from_lucidrains_attention(stack.net[0].net[3])(torch.randn(2, 64, 14, 14)).shape  # doctest: +SKIP
    torch.Size([2, 64, 14, 14])
    """
    check_parts(module, "the attention of lucidrains' bottleneck transformer", "to_qkv", "pos_emb")
    check_source(module, "to_qkv")
    return proven(module, lucidrains)


def lucidrains_weights(module: Any) -> tuple[dict[str, Rows], dict[str, Tensor]]:
    names = {"rel_height": "height_rel", "rel_width": "width_rel", "height": "height", "width": "width"}
    tables = {f"position.{names[name]}": table for name, table in module.pos_emb.named_parameters()}
    if hasattr(module.pos_emb, "rel_height"):  # a product with queries that are scaled
        tables = {name: module.scale * table for name, table in tables.items()}
    return {"qkv": rows_of(module.to_qkv)}, tables


def lucidrains(module: Any) -> Attention:
    projections, tables = lucidrains_weights(module)
    inner = len(projections["qkv"].weight) // 3
    relative = hasattr(module.pos_emb, "rel_height")
    rows = [len(table) for table in tables.values()]
    size = tuple((row + 1) // 2 if relative else row for row in rows)
    return attention(
        2,
        {**projections, "proj": identity_rows(inner, module.to_qkv.weight)},
        tables,
        training=module.training,
        num_heads=module.heads,
        key_dim=inner // module.heads,
        value_dim=inner // module.heads,
        scale=module.scale,
        position=(RelPosDecomposed if relative else AbsPos)(size),
    )


def from_natten(module: nn.Module) -> Attention:
    """The block that computes what natten's ``NeighborhoodAttention1D``, ``2D`` or ``3D`` does.

    ``module(x)`` on ``(b, h, w, c)`` becomes ``block(x)`` on ``(b, c, h, w)``, with the pattern :class:`Neighborhood`.
    On maps that are too small for its kernel, which natten refuses, the block attends to all there is.

    Args:
        module: the layer; it is known by its parts and by the name of its class.

    Returns:
        :class:`Attention1d`, :class:`Attention2d` or :class:`Attention3d`, with copies of the weights.

    Raises:
        ValueError: it is no such layer, or has biases by relative position, as older versions have.
        ConversionError: the block does not compute what the layer does.

    Source: https://github.com/SHI-Labs/NATTEN

    >>> from_natten(NeighborhoodAttention2D(64, 4, 7))(torch.randn(2, 64, 14, 14)).shape  # doctest: +SKIP
    torch.Size([2, 64, 14, 14])
    """
    check_parts(module, "a NeighborhoodAttention of natten", "qkv", "proj")
    if type(module).__name__[-2:] not in RANKS:
        raise ValueError(f"module must be a NeighborhoodAttention1D, 2D or 3D; got {type(module).__name__}")
    check_natten(module)
    return proven(module, natten, lambda module, x: module(x.movedim(1, -1)).movedim(-1, 1))


RANKS = {"1D": 1, "2D": 2, "3D": 3}


def check_natten(module: Any) -> None:
    check_source(module, "qkv", "proj")
    if getattr(module, "rpb", None) is not None:
        check_carried(module, ("rpb", False, "the block's tables are another: make the layer without rel_pos_bias"))


def natten(module: Any) -> Attention:
    rank = RANKS[type(module).__name__[-2:]]
    names = {"kernel_size": None, "dilation": 1, "stride": 1, "is_causal": False}
    values = [getattr(module, name, usual) or usual for name, usual in names.items()]
    shape: Any = [tuple(value) if isinstance(value, (list, tuple)) else (value,) * rank for value in values]
    return attention(
        rank,
        fused_rows(module),
        training=module.training,
        num_heads=module.num_heads,
        pattern=Neighborhood(*shape),
        scale=module.scale,
        attn_drop=drop_of(module, "attn_drop") if hasattr(module, "attn_drop") else 0.0,
        proj_drop=drop_of(module, "proj_drop"),
    )


def example_natten(module: Any) -> tuple[Any, ...]:
    block = natten(module)
    return (random_map(2, *shapes_for(block)[0]).movedim(1, -1),)


MAPS = {
    "timm.layers.halo_attn.HaloAttn": Family(
        check_halo,
        lambda module: without_projection(halo(module)),
        lambda module: parameters_of(*halo_weights(module)),
        forward_halo,
        lambda module: (random_map(2, module.q.in_channels, module.block_size, 2 * module.block_size),),
        ("num_heads", "block_size", "halo_size", "scale_pos_embed"),
        own="maps that are not of whole blocks",
    ),
    "timm.layers.attention_pool2d.AttentionPool2d": Family(
        lambda module: check_source(module, *(["qkv"] if module.qkv is not None else ["q", "k", "v"]), "proj"),
        lambda module: attention(1, fused_rows(module), training=module.training, num_heads=module.num_heads),
        lambda module: parameters_of(fused_rows(module), rank=1),
        forward_pool,
        lambda module: (random_map(2, module.pos_embed.shape[1], *module.feat_size),),
        ("num_heads",),
        own="maps of another size, and calls before the logits",
    ),
    "bottleneck_transformer_pytorch.bottleneck_transformer_pytorch.Attention": Family(
        lambda module: check_source(module, "to_qkv"),
        lambda module: without_projection(lucidrains(module)),
        lambda module: parameters_of(*lucidrains_weights(module)),
        lambda module, attend, x: attend(x),
        lambda module: (random_map(2, *shapes_for(lucidrains(module))[0]),),
        ("heads", "scale"),
    ),
    **dict.fromkeys(
        [f"natten.modules.NeighborhoodAttention{axes}" for axes in RANKS],
        Family(
            check_natten,
            natten,
            lambda module: parameters_of(fused_rows(module), rank=RANKS[type(module).__name__[-2:]]),
            lambda module, attend, x: attend(x.movedim(-1, 1)).movedim(1, -1),
            example_natten,
            ("num_heads", "kernel_size", "dilation", "stride", "is_causal", "scale"),
        ),
    ),
}

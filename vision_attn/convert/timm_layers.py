"""timm's attention: of ViT on tokens, of MobileNetV4 and BoTNet on maps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.blocks import Attention
from vision_attn.convert.proof import check_carried, check_kind, check_source, drop_of, is_a, proven, run_tokens
from vision_attn.convert.weights import (
    Rows,
    attention,
    check_joined,
    check_rank,
    heads_first,
    identity_rows,
    rows_of,
    side_by_side,
    with_bias,
)
from vision_attn.position import RelPosDecomposed

__all__ = [
    "from_timm_attention",
    "from_timm_attention2d",
    "from_timm_bottleneck_attn",
    "from_timm_multi_query_attention2d",
]


# --- of ViT -----------------------------------------------------------------------------------------------------------


#: On tokens ``(b, tokens, c)``, and on maps: all of them have ``qkv`` or ``q``, ``k``, ``v``, and ``proj``.
ON_TOKENS = (
    "timm.layers.attention.Attention",
    "timm.models.vision_transformer.Attention",
    "timm.models.beit.Attention",
    "timm.models.metaformer.Attention",
    "timm.models.nextvit.EfficientAttention",
    "timm.models.vision_transformer_relpos.RelPosAttention",
)
ON_MAPS = ("timm.models.fastvit.Attention", "timm.models.visformer.Attention")


def from_timm_attention(module: nn.Module, *, rank: int = 2) -> Attention:
    """The block that does with the positions of a map what ``timm.layers.Attention``, of ViT, does with tokens.

    The layers of BEiT, CAFormer, FastViT, NextViT, Visformer and of ViT with relative positions are taken too, where
    they add nothing to their logits and stride over nothing.

    ``qk_norm`` by layer norm is carried over with its ``eps``, which is the block's then, though not of its state dict;
    ``gated`` becomes the output gate, with a bias of zeros that is not trained where timm's has none. The keys of BEiT
    have a bias of zeros.

    Args:
        module: the layer.
        rank: axes of the maps that the block is for: 1, 2 or 3.

    Returns:
        :class:`Attention1d`, :class:`Attention2d` or :class:`Attention3d` by ``rank``, with copies of the weights.

    Raises:
        ValueError: it is no such layer, or does what the block does not, as with ``scale_norm`` or RMS norms.
        ConversionError: the block does not compute what the layer does.

    Source: https://github.com/huggingface/pytorch-image-models/blob/main/timm/layers/attention.py

    >>> import torch
    >>> from timm.layers import Attention as TimmAttention
    >>> from_timm_attention(TimmAttention(64, num_heads=4))(torch.randn(2, 64, 14, 10)).shape
    torch.Size([2, 64, 14, 10])
    """
    check_kind("module", module, *ON_TOKENS, *ON_MAPS)
    check_rank(rank)
    check_vit(module)
    for name in ("rel_pos", "relative_position_bias_table", "sr"):
        if getattr(module, name, None) is not None:
            remedy = "the block has none: let swap_ exchange it in its network, which keeps what is around the block"
            check_carried(module, (name, False, remedy))
    return proven(module, lambda module: vit(module, rank), run_flat if is_a(module, *ON_MAPS) else run_tokens)


def run_flat(module: nn.Module, x: Tensor) -> Tensor:
    """What a layer of maps with two axes makes of the positions of a map with any."""
    return module(x.flatten(2)[..., None]).flatten(2).unflatten(2, x.shape[2:])


def check_vit(module: Any) -> None:
    gate, norm = (getattr(module, name, None) for name in ("gate", "norm"))
    inputs = ["q", "k", "v"] if getattr(module, "qkv", None) is None else ["qkv"]
    check_source(module, *inputs, "proj", *["gate"] * (gate is not None))
    norms = [getattr(module, name, None) or nn.Identity() for name in ("q_norm", "k_norm")]
    for name, part in zip(("q_norm", "k_norm"), norms, strict=True):
        whole = isinstance(part, nn.LayerNorm) and part.weight is not None and part.bias is not None
        remedy = "the block normalises queries and keys by layer norm, with weight and bias, or not"
        if not whole and not isinstance(part, nn.Identity):
            check_carried(module, (name, False, remedy))
    if type(norms[0]) is not type(norms[1]):
        remedy = f"the block normalises queries and keys, or neither, and q_norm is {norms[0]}"
        check_carried(module, ("k_norm", False, remedy))
    if norm is not None and not isinstance(norm, nn.Identity) and getattr(module, "sr", None) is None:
        remedy = "the block has no norm before its output: make the layer without scale_norm"
        check_carried(module, ("norm", False, remedy))


def vit(module: Any, rank: int) -> Attention:
    projections, tables = vit_weights(module)
    norm: bool | str = "cosine" if "q_norm.logit_scale" in tables else bool(tables)
    width = len(projections["qkv"].weight) // (3 * module.num_heads)
    options = {"qk_norm": norm, "output_gate": "gate" in projections}
    block = fused(module, width, projections, tables, rank=rank, **options)
    for ours, theirs in ((block.q_norm, "q_norm"), (block.k_norm, "k_norm")):
        if isinstance(ours, nn.LayerNorm):
            ours.eps = getattr(module, theirs).eps
    return block


def vit_weights(module: Any) -> tuple[dict[str, Rows], dict[str, Tensor]]:
    gate, tables = getattr(module, "gate", None), {}
    if isinstance(getattr(module, "q_norm", None), nn.LayerNorm):
        parts = {"q_norm": module.q_norm, "k_norm": module.k_norm}
        tables = {f"{name}.{key}": getattr(part, key) for name, part in parts.items() for key in ("weight", "bias")}
    elif hasattr(module, "logit_scale"):
        tables = {"q_norm.logit_scale": module.logit_scale}
    return {**fused_rows(module), **({} if gate is None else {"gate": with_bias(rows_of(gate))})}, tables


def fused_rows(module: Any) -> dict[str, Rows]:
    """Of what timm mostly calls ``qkv`` and ``proj``."""
    if getattr(module, "qkv", None) is None:
        qkv = side_by_side(*(rows_of(getattr(module, name)) for name in "qkv"))
    else:
        qkv = rows_of(module.qkv)
    if getattr(module, "q_bias", None) is not None:
        qkv = Rows(qkv.weight, torch.cat([module.q_bias, torch.zeros_like(module.q_bias), module.v_bias]))
    if getattr(module, "head_first", False):
        qkv = heads_first(qkv, module.num_heads)
    return {"qkv": qkv, "proj": rows_of(module.proj)}


def fused(
    module: Any,
    width: int,
    projections: dict[str, Rows],
    tables: dict[str, Tensor] | None = None,
    *,
    rank: int = 2,
    **options: Any,
) -> Attention:
    """A block with heads of this width, and with what timm mostly calls its dropouts."""
    return attention(
        rank,
        projections,
        tables,
        training=module.training,
        num_heads=module.num_heads,
        key_dim=width,
        value_dim=width,
        attn_drop=drop_of(module, "attn_drop"),
        proj_drop=drop_of(module, "proj_drop"),
        **options,
    )


# --- of maps ----------------------------------------------------------------------------------------------------------


def from_timm_attention2d(module: nn.Module) -> Attention:
    """The block that computes what ``timm.layers.attention2d.Attention2d`` does, whichever order its rows are in.

    timm's mask is added to the logits: here that is a float mask, and a bool one says where to look.

    Args:
        module: the layer.

    Returns:
        The :class:`Attention2d`, with copies of the weights.

    Raises:
        ValueError: it is no such layer.
        ConversionError: the block does not compute what the layer does.

    Source: https://github.com/huggingface/pytorch-image-models/blob/main/timm/layers/attention2d.py

    >>> import torch
    >>> from timm.layers.attention2d import Attention2d as TimmAttention2d
    >>> from_timm_attention2d(TimmAttention2d(64, num_heads=4, head_first=True))(torch.randn(2, 64, 14, 10)).shape
    torch.Size([2, 64, 14, 10])
    """
    check_kind("module", module, "timm.layers.attention2d.Attention2d")
    check_source(module, "qkv", "proj")
    return proven(module, attention2d)


def attention2d(module: Any) -> Attention:
    return fused(module, module.dim_head, fused_rows(module))


def from_timm_multi_query_attention2d(module: nn.Module) -> Attention:
    """The block that computes what ``timm.layers.attention2d.MultiQueryAttention2d`` does, without its strides.

    Args:
        module: the layer, with strides of 1, or a ``MultiQueryAttentionV2``, which has none.

    Returns:
        The :class:`Attention2d` with one head of keys and values, with copies of the weights.

    Raises:
        ValueError: it is no such layer, or has strides, which are depthwise convolutions and norms of its own.
        ConversionError: the block does not compute what the layer does.

    Source: https://github.com/huggingface/pytorch-image-models/blob/main/timm/layers/attention2d.py

    >>> import torch
    >>> from timm.layers.attention2d import MultiQueryAttention2d
    >>> from_timm_multi_query_attention2d(MultiQueryAttention2d(64, num_heads=4))(torch.randn(2, 64, 14, 10)).shape
    torch.Size([2, 64, 14, 10])
    """
    names = ("MultiQueryAttention2d", "MultiQueryAttentionV2")
    check_kind("module", module, *(f"timm.layers.attention2d.{name}" for name in names))
    check_multi_query(module)
    return proven(module, multi_query)


def check_multi_query(module: Any) -> None:
    check_source(module)
    if hasattr(module, "query_proj"):
        return
    remedy = "the block pools keys and values only (kv_stride), by averages: convert a layer with strides of 1"
    check_carried(
        module,
        ("query_strides", tuple(module.query_strides) == (1, 1), remedy),
        ("kv_stride", module.kv_stride == 1, remedy),
    )
    check_source(module, "query.proj", "key.proj", "value.proj", "output.proj")
    check_joined(**{name: rows_of(getattr(module, name).proj) for name in ("query", "key", "value")})


def multi_query_rows(module: Any) -> dict[str, Rows]:
    if hasattr(module, "query_proj"):  # kernels, those of queries and of the output with heads as an axis
        kernels = (module.query_proj.flatten(0, 1), module.key_proj.T, module.value_proj.T)
        return {"qkv": Rows(torch.cat(kernels)), "proj": Rows(module.out_proj.flatten(1))}
    q, k, v, out = (rows_of(getattr(module, name).proj) for name in ("query", "key", "value", "output"))
    return {"qkv": side_by_side(q, k, v), "proj": out}


def multi_query(module: Any) -> Attention:
    return attention(
        2,
        multi_query_rows(module),
        training=module.training,
        num_heads=module.num_heads,
        num_kv_heads=1,
        key_dim=module.key_dim,
        value_dim=module.value_dim,
        attn_drop=drop_of(module, "attn_drop"),
        proj_drop=drop_of(module, "proj_drop" if hasattr(module, "proj_drop") else "output.drop"),
    )


def check_unpooled(module: Any) -> None:
    """Refuse a layer that averages what it gives, as those with a stride of 2 do."""
    remedy = "the block has no stride: set pool to nn.Identity(), convert, and put nn.AvgPool2d(2, 2) behind the block"
    check_carried(module, ("pool", isinstance(module.pool, nn.Identity), remedy))


def from_timm_bottleneck_attn(module: nn.Module) -> Attention:
    """The block that computes what ``timm.layers.bottleneck_attn.BottleneckAttn``, of BoTNet, does.

    Its tables become those of :class:`RelPosDecomposed`. It has no output projection: the block's is the identity and
    is not trained.

    Args:
        module: the layer, with a stride of 1.

    Returns:
        The :class:`Attention2d`, with copies of the weights.

    Raises:
        ValueError: it is no such layer, or has a stride of 2.
        ConversionError: the block does not compute what the layer does.

    Source: https://github.com/huggingface/pytorch-image-models/blob/main/timm/layers/bottleneck_attn.py

    >>> import torch
    >>> from timm.layers.bottleneck_attn import BottleneckAttn
    >>> from_timm_bottleneck_attn(BottleneckAttn(64, feat_size=(14, 10)))(torch.randn(2, 64, 14, 10)).shape
    torch.Size([2, 64, 14, 10])
    """
    check_kind("module", module, "timm.layers.bottleneck_attn.BottleneckAttn")
    check_source(module, "qkv")
    check_unpooled(module)
    return proven(module, bottleneck)


def bottleneck_weights(module: Any) -> tuple[dict[str, Rows], dict[str, Tensor]]:
    """But the output projection, which it does not have."""
    factor = module.scale if module.scale_pos_embed else 1.0
    tables = {f"position.{name}": factor * getattr(module.pos_embed, name) for name in ("height_rel", "width_rel")}
    return {"qkv": rows_of(module.qkv)}, tables


def bottleneck(module: Any) -> Attention:
    projections, tables = bottleneck_weights(module)
    return attention(
        2,
        {**projections, "proj": identity_rows(module.dim_out_v, module.qkv.weight)},
        tables,
        training=module.training,
        num_heads=module.num_heads,
        key_dim=module.dim_head_qk,
        value_dim=module.dim_head_v,
        position=RelPosDecomposed(feat_size=(module.pos_embed.height, module.pos_embed.width)),
    )

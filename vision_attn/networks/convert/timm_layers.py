"""Conversions of the attention layers of timm, whose inputs are tokens or feature maps."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention.patterns import Halo
from vision_attn.attention.position import RelPosDecomposed
from vision_attn.networks.convert.conversion import CONVERSIONS, FALLBACK, Attend, LayerConversion
from vision_attn.networks.convert.equivalence import get_dropout, random_map
from vision_attn.networks.convert.projection import Projection, named_weights
from vision_attn.networks.convert.rotary import IN_CALLS, SIN_COS, CallRotation

# --- tokens -----------------------------------------------------------------------------------------------------------


def vit_weights(layer: Any) -> dict[str, Any]:
    """Read the weights of a layer with ``qkv`` and ``proj``, as in most layers of timm."""
    weights = named_weights("qkv" if layer.qkv is not None else "q_proj k_proj v_proj", "proj")(layer)
    if getattr(layer, "q_bias", None) is not None:
        bias = torch.cat([layer.q_bias, torch.zeros_like(layer.q_bias), layer.v_bias])
        weights["qkv"] = Projection(layer.qkv.weight, bias)
    widths = (layer.key_dim, layer.key_dim, layer.val_dim) if hasattr(layer, "val_dim") else ()  # EfficientFormer
    if widths or getattr(layer, "head_first", False):
        weights["qkv"] = weights["qkv"].heads_first(layer.num_heads, *widths)
    if getattr(layer, "gate", None) is not None:
        weights["gate"] = Projection.read(layer.gate).with_bias()
    for name in ("q_norm", "k_norm"):
        norm = getattr(layer, name, None) or nn.Identity()
        weights |= {f"{name}.{key}": x for key, x in norm.named_parameters()}
    return weights


def efficientformer_bias(layer: Any, x: Tensor) -> Any:
    return layer.attention_biases[:, layer.attention_bias_idxs][None]


def beit_bias(layer: Any, x: Tensor, shared_rel_pos_bias: Any = None) -> Any:
    if layer.relative_position_bias_table is None:
        return shared_rel_pos_bias
    bias = layer.relative_position_bias_table[layer.relative_position_index].permute(2, 0, 1)[None]
    return bias + (0 if shared_rel_pos_bias is None else shared_rel_pos_bias)


def maxxvit_table(layer: Any) -> Tensor | None:
    """Return the table of position biases, indexed by query minus key.

    The TensorFlow variant is indexed by key minus query and has the heads first.
    """
    table: Tensor | None = getattr(layer.rel_pos, "relative_position_bias_table", None)
    return table.flip(1, 2).flatten(1).T if table is not None and table.dim() == 3 else table


def relative_bias(layer: Any, x: Tensor, shared_rel_pos: Tensor | None = None) -> Any:
    """Return the bias of the logits; None if the block has it as a table."""
    if layer.rel_pos is None:
        return shared_rel_pos
    return layer.rel_pos.get_bias() if x.dim() == 3 or maxxvit_table(layer) is None else None


def attend_normalized(layer: Any, attend: Attend, x: Tensor) -> Tensor:
    """Run TinyViT's attention, which includes the norm."""
    return attend(layer.norm(x).mT, efficientformer_bias(layer, x)).mT


def attend_reduced(layer: Any, attend: Attend, x: Tensor, size: Any) -> Tensor:
    """Run the attention of Twins and PVT v2, whose keys are from a smaller feature map."""
    maps = keys = x.mT.unflatten(2, tuple(size))
    if layer.sr is not None:
        smaller = layer.sr(maps if getattr(layer, "pool", None) is None else layer.pool(maps))
        tokens = layer.norm(smaller.flatten(2).mT)
        tokens = tokens if getattr(layer, "act", None) is None else layer.act(tokens)
        keys = tokens.mT.unflatten(2, smaller.shape[2:])
    return attend(maps, None, keys).flatten(2).mT


def example_reduced(layer: Any) -> tuple[Any, ...]:
    side = 1 if layer.sr is None else layer.sr.kernel_size[0]
    return random_map(2, 6 * side**2, layer.q.in_features), (3 * side, 2 * side)


def has_norm(layer: Any) -> bool:
    """Return True for a layer with a norm before its output projection, ``scale_norm`` in timm."""
    return not isinstance(getattr(layer, "norm", nn.Identity()), nn.Identity)


def normed_weights(layer: Any) -> dict[str, Any]:
    """Read the weights; the output projection of the block is an identity if the layer has a norm before its own."""
    weights = vit_weights(layer)
    if has_norm(layer):
        weights["proj"] = Projection(torch.eye(layer.proj.in_features).to(layer.proj.weight))
    return weights


def attend_vit(
    layer: Any, attend: Attend, x: Tensor, attn_mask: Any = None, is_causal: bool = False, **tensors: Tensor
) -> Any:
    if is_causal:
        return FALLBACK
    y = attend(x.mT, attn_mask, **tensors).mT
    return layer.proj_drop(layer.proj(layer.norm(y))) if has_norm(layer) else y


def attend_rotary(
    layer: Any, attend: Attend, x: Tensor, rope: Any = None, attn_mask: Any = None, is_causal: bool = False
) -> Any:
    """Run the attention of EVA, DINOv3 and other networks that pass a rotary embedding to every layer."""
    tensors = {} if rope is None else dict(zip(SIN_COS, rope.chunk(2, dim=-1), strict=True))
    return attend_vit(layer, attend, x, attn_mask, is_causal, **tensors)


def example_rotary(layer: Any) -> tuple[Any, ...]:
    tokens, channels = 5, layer.proj.out_features
    embedding = random_map(tokens, 2 * layer.head_dim)
    return random_map(2, layer.num_prefix_tokens + tokens, channels), embedding


VIT = LayerConversion(weights=vit_weights)
NORMED = replace(
    VIT,
    weights=normed_weights,
    options={"proj_drop": lambda layer: 0.0 if has_norm(layer) else get_dropout(layer, "proj_drop")},
    swap_only=("norm",),
    call=attend_vit,
)
ROTARY = replace(
    NORMED,
    options={**NORMED.options, "position": lambda layer: CallRotation(layer.rotate_half)},
    call=attend_rotary,
    example=example_rotary,
    swap_only=(),
    only_swap=IN_CALLS,
)
MAPS = replace(VIT, axes="b c h w")
CHANNELS_LAST = replace(VIT, axes="b h w c")
EFFICIENTFORMER = replace(VIT, bias=efficientformer_bias, swap_only=("attention_biases",))
TINY_VIT = replace(EFFICIENTFORMER, call=attend_normalized, swap_only=("norm", "attention_biases"))
REL_POS = replace(VIT, bias=relative_bias, swap_only=("rel_pos",))
REDUCED = replace(
    VIT, weights=named_weights("q|kv", "proj"), call=attend_reduced, example=example_reduced, swap_only=("sr",)
)

# --- feature maps -----------------------------------------------------------------------------------------------------


def tables(layer: Any, first: int = 0) -> dict[str, Any]:
    """Return the tables of relative positions, starting at an index, and an identity as output projection."""
    found = {name: getattr(layer.pos_embed, name)[first:] for name in ("height_rel", "width_rel")}
    factor = layer.scale if layer.scale_pos_embed else 1.0
    out = torch.eye(layer.num_heads * layer.dim_head_v).to(found["height_rel"])
    return {"proj": Projection(out)} | {f"position.{name}": factor * x for name, x in found.items()}


def halo_weights(layer: Any) -> dict[str, Any]:
    kv = Projection.read(layer.kv).heads_first(layer.num_heads, layer.dim_head_qk, layer.dim_head_v)
    # Offsets start at the corner of the halo, so the first entries of the tables are never used.
    return {"qkv": Projection.concat(Projection.read(layer.q), kv), **tables(layer, 2 * layer.halo_size)}


def map_size(layer: Any) -> tuple[int, int]:
    return layer.pos_embed.height, layer.pos_embed.width


BOTTLENECK = replace(
    MAPS,
    weights=lambda layer: {"qkv": Projection.read(layer.qkv), **tables(layer)},
    options={"position": lambda layer: RelPosDecomposed(feat_size=map_size(layer))},
    swap_only=("pool",),
    size=map_size,
    call=lambda layer, attend, x: layer.pool(attend(x)),
)
HIERA = {"q_pool": "blocks have one query per position"}
GCVIT = {"use_global": "its queries are from another feature map"}
POOLED = "blocks pool only keys and values (kv_stride), by averaging. Convert a layer with strides of 1"
CONVERSIONS |= {
    "timm.layers.attention.Attention": NORMED,
    "timm.layers.attention.AttentionRope": ROTARY,
    "timm.layers.attention2d.Attention2d": MAPS,
    "timm.layers.attention2d.MultiQueryAttention2d": replace(
        MAPS,
        weights=named_weights("query.proj key.proj value.proj", "output.proj"),
        options={"num_kv_heads": 1},
        dropouts=("attn_drop", "output.drop"),
        unsupported={"query_strides": POOLED, "kv_stride": POOLED},
    ),
    "timm.layers.bottleneck_attn.BottleneckAttn": BOTTLENECK,
    "timm.layers.halo_attn.HaloAttn": replace(
        BOTTLENECK,
        weights=halo_weights,
        options={"pattern": lambda layer: Halo(layer.block_size, layer.halo_size), "position": RelPosDecomposed()},
        unsupported={"block_stride": "blocks have no stride. Use avg_down=True"},
        size=lambda layer: (layer.block_size, 2 * layer.block_size),
    ),
    "timm.models.beit.Attention": replace(VIT, bias=beit_bias, swap_only=("relative_position_bias_table",)),
    "timm.models.convit.MHSA": VIT,
    "timm.models.davit.WindowAttention": VIT,
    "timm.models.efficientformer.Attention": EFFICIENTFORMER,
    "timm.models.eva.EvaAttention": ROTARY,
    "timm.models.fastvit.Attention": MAPS,
    "timm.models.gcvit.WindowAttentionGlobal": replace(REL_POS, unsupported=GCVIT),
    "timm.models.hieradet_sam2.MultiScaleAttention": replace(CHANNELS_LAST, unsupported=HIERA),
    "timm.models.metaformer.Attention": VIT,
    "timm.models.pvt_v2.Attention": REDUCED,
    "timm.models.tiny_vit.Attention": TINY_VIT,
    "timm.models.tnt.Attention": replace(VIT, weights=named_weights("qk v", "proj")),
    "timm.models.twins.GlobalSubSampleAttn": REDUCED,
    "timm.models.vision_transformer_relpos.RelPosAttention": REL_POS,
    "timm.models.visformer.Attention": MAPS,
    "timm.models.volo.Attention": CHANNELS_LAST,
}

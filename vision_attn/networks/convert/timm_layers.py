"""What is known of the attention layers of timm and torchvision: tokens, maps, windows and grids of maps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention.patterns import Halo, Window
from vision_attn.attention.position import RelPosDecomposed, RelPosTable
from vision_attn.networks.convert import row as ours
from vision_attn.networks.convert.proof import random_map
from vision_attn.networks.convert.row import OWN, Row, Rows, Weights, heads_first, named, rows_of, side_by_side

Attend = Callable[..., Tensor]


# --- timm, of tokens --------------------------------------------------------------------------------------------------


def vit_weights(layer: Any) -> Weights:
    """Of what timm mostly calls ``qkv`` and ``proj``."""
    weights = named("qkv" if getattr(layer, "qkv", None) is not None else "q k v", "proj")(layer)
    if getattr(layer, "q_bias", None) is not None:
        bias = torch.cat([layer.q_bias, torch.zeros_like(layer.q_bias), layer.v_bias])
        weights["qkv"] = Rows(layer.qkv.weight, bias)
    if getattr(layer, "head_first", False):
        weights["qkv"] = heads_first(weights["qkv"], layer.num_heads)
    if getattr(layer, "gate", None) is not None:
        weights["gate"] = ours.with_bias(rows_of(layer.gate))
    for name in ("q_norm", "k_norm"):
        if isinstance(norm := getattr(layer, name, None), nn.LayerNorm):
            weights |= {f"{name}.{key}": x for key, x in norm.named_parameters()}
    return weights


def efficientformer_weights(layer: Any) -> Weights:
    widths = (layer.key_dim, layer.key_dim, layer.val_dim)
    return {"qkv": heads_first(rows_of(layer.qkv), layer.num_heads, *widths), "proj": rows_of(layer.proj)}


def efficientformer_bias(layer: Any, x: Tensor) -> Any:
    return layer.attention_biases[:, layer.attention_bias_idxs][None]


def vit_bias(layer: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Any:
    return OWN if is_causal else attn_mask


def beit_bias(layer: Any, x: Tensor, shared_rel_pos_bias: Any = None) -> Any:
    if layer.relative_position_bias_table is None:
        return shared_rel_pos_bias
    return layer._get_rel_pos_bias() + (0 if shared_rel_pos_bias is None else shared_rel_pos_bias)


def maxxvit_table(layer: Any) -> Tensor | None:
    """Of biases by query less key; TensorFlow's, with the heads first, is by key less query."""
    table: Tensor | None = getattr(layer.rel_pos, "relative_position_bias_table", None)
    return table.flip(1, 2).flatten(1).T if table is not None and table.dim() == 3 else table


def relative_bias(layer: Any, x: Tensor, shared_rel_pos: Tensor | None = None) -> Any:
    """What is added to the logits; nothing if the block of a map has it as a table."""
    if layer.rel_pos is None:
        return shared_rel_pos
    return layer.rel_pos.get_bias() if x.dim() == 3 or maxxvit_table(layer) is None else None


def attend_strided(layer: Any, attend: Attend, x: Tensor) -> Any:
    """Of NextViT, whose keys are of tokens averaged some in a row."""
    x = x.transpose(1, 2)
    return attend(x, None, None if layer.sr is None else layer.norm(layer.sr(x))).transpose(1, 2)


def attend_reduced(layer: Any, attend: Attend, x: Tensor, size: Any) -> Tensor:
    """Of Twins and PVT v2, whose keys are of the map made smaller."""
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


def attend_class(layer: Any, attend: Attend, x: Tensor) -> Tensor:
    """The first token, which alone attends."""
    return attend(x[:, :1].mT, None, x.mT).mT


def attend_normed(layer: Any, attend: Attend, x: Tensor) -> Tensor:
    """Of TinyViT, which has the norm inside."""
    return attend(layer.norm(x).mT, efficientformer_bias(layer, x)).mT


def over_windows(bias: Tensor, mask: Tensor | None, x: Tensor) -> Tensor:
    """What is added to the logits of each window: a bias, and a mask for each window of an image that was shifted."""
    return bias if mask is None else bias + mask.repeat(len(x) // len(mask), 1, 1)[:, None]


def attend_pool(layer: Any, attend: Attend, x: Tensor, pre_logits: bool = False) -> Any:
    """The token of a map, which alone has to attend to it, or the map."""
    if pre_logits or tuple(x.shape[2:]) != tuple(layer.feat_size) or (layer.training and layer.drop.p):
        return OWN
    tokens = x.flatten(2)
    first = tokens.mean(2, keepdim=True) if layer.cls_token is None else layer.cls_token.mT.expand(len(x), -1, -1)
    tokens = torch.cat([first, tokens], dim=2) + layer.pos_embed.T
    if layer.pool_type == "token":
        return attend(tokens[..., :1], None, tokens)[..., 0]
    return attend(tokens)[..., 1:].unflatten(2, x.shape[2:])


VIT = Row(weights=vit_weights, axes="b t c")
MAPS = replace(VIT, axes="b c h w")
MASKED = replace(VIT, bias=vit_bias)
EFFICIENTFORMER = replace(VIT, weights=efficientformer_weights, bias=efficientformer_bias, around=("attention_biases",))
REDUCED = replace(VIT, weights=named("q|kv", "proj"), call=attend_reduced, example=example_reduced, around=("sr",))


def class_row(names: str) -> Row:
    """Of a layer where only the class token asks."""
    return replace(VIT, weights=named(names, "proj"), call=attend_class, around=(names.partition("|")[0],))


# --- timm, of maps ----------------------------------------------------------------------------------------------------


def tables(layer: Any, begin: int = 0) -> Weights:
    """Of relative positions; and the identity, as these layers do not project what they give."""
    found = {name: getattr(layer.pos_embed, name)[begin:] for name in ("height_rel", "width_rel")}
    factor = layer.scale if layer.scale_pos_embed else 1.0
    out = torch.eye(layer.num_heads * layer.dim_head_v).to(found["height_rel"])
    return {"proj": Rows(out)} | {f"position.{name}": factor * x for name, x in found.items()}


def halo_weights(layer: Any) -> Weights:
    kv = heads_first(rows_of(layer.kv), layer.num_heads, layer.dim_head_qk, layer.dim_head_v)
    # Its offsets are counted from the corner of the halo: the first of its tables are never looked up.
    return {"qkv": side_by_side(rows_of(layer.q), kv), **tables(layer, 2 * layer.halo_size)}


def map_size(layer: Any) -> tuple[int, int]:
    return layer.pos_embed.height, layer.pos_embed.width


POOLED_QUERIES = "the block has a query for each position"
POOLED = "the block pools keys and values only (kv_stride), by averages: convert a layer with strides of 1"

# --- windows and grids of maps: MaxViT, CoAtNet, Swin -----------------------------------------------------------------

#: The parameter of :class:`RelPosTable`.
BIASES = "position.relative_position_bias_table"


def maxxvit_weights(layer: Any) -> Weights:
    table = maxxvit_table(layer)
    return vit_weights(layer) | ({} if table is None else {BIASES: table})


def maxxvit_size(layer: Any) -> tuple[int, ...]:
    return tuple(getattr(layer.rel_pos, "window_size", (3, 4)))


def swin_weights(layer: Any) -> Weights:
    """The network that gives the biases of Swin v2 for every offset becomes the table that it gives."""
    weights = vit_weights(layer)
    if not hasattr(layer, "logit_scale"):
        return weights | {BIASES: layer.relative_position_bias_table}
    if layer.qkv.bias is not None:
        q, k, v = layer.qkv.bias.chunk(3)  # that of the keys is there and is not used
        weights["qkv"] = Rows(layer.qkv.weight, torch.cat([q, torch.zeros_like(k), v]))
    table = 16 * torch.sigmoid(layer.cpb_mlp(layer.relative_coords_table).flatten(0, -2))
    return weights | {BIASES: table, "q_norm.logit_scale": layer.logit_scale}


def window_of(layer: Any) -> tuple[int, int]:
    """Of a layer that is given tokens of windows: torchvision's MaxViT says the side of a square."""
    return tuple(layer.window_size) if hasattr(layer, "window_size") else (layer.size, layer.size)


def attend_windows(layer: Any, attend: Attend, x: Tensor, mask: Tensor | None = None) -> Tensor:
    maps = x.flatten(0, -3).mT.unflatten(2, window_of(layer))
    y = attend(maps, None if mask is None else mask.repeat(len(x) // len(mask), 1, 1)[:, None])
    return y.flatten(2).mT.reshape(x.shape)


def attend_windows_in_tokens(layer: Any, attend: Attend, x: Tensor, size: Any) -> Tensor:
    """Of Twins, which cuts and pads a map itself."""
    return attend(x.mT.unflatten(2, tuple(size))).flatten(2).mT


MAXXVIT = Row(
    weights=maxxvit_weights,
    options={"position": lambda layer: None if maxxvit_table(layer) is None else RelPosTable(maxxvit_size(layer))},
    around=("rel_pos.mlp",),
    bias=relative_bias,
    size=maxxvit_size,
    groups=lambda layer: {},
)
TORCHVISION_SWIN = Row(
    weights=swin_weights,
    options={
        "kind": lambda layer: ours.PaddedAttention2d,
        "pattern": lambda layer: Window(tuple(layer.window_size), tuple(layer.shift_size)),
        "position": RelPosTable(),
    },
    axes="b h w c",
    drops=("attention_dropout", "dropout"),
    size=lambda layer: (max(1, 2 * layer.window_size[0] - 1), 2 * layer.window_size[1] + 1),
)
TIMM_SWIN = Row(
    weights=swin_weights,
    options={"position": lambda layer: RelPosTable(feat_size=window_of(layer))},
    call=attend_windows,
    example=lambda layer: (random_map(4, math.prod(layer.window_size), layer.qkv.in_features),),
    groups=lambda layer: {"kind": ours.WholeWindows2d, "pattern": Window(tuple(layer.window_size))},
)
TWINS = replace(
    TORCHVISION_SWIN,
    weights=vit_weights,
    options={"kind": lambda layer: ours.PaddedAttention2d, "pattern": lambda layer: Window(layer.ws)},
    drops=("attn_drop", "proj_drop"),
    call=attend_windows_in_tokens,
    example=lambda layer: (random_map(2, 3 * (layer.ws + 1), layer.dim), (3, layer.ws + 1)),
)
TORCHVISION_MAXVIT = replace(
    TIMM_SWIN,
    weights=lambda layer: named("to_qkv", "merge")(layer) | {BIASES: layer.relative_position_bias_table},
    options={**TIMM_SWIN.options, "num_heads": "n_heads", "scale": "scale_factor"},
    example=lambda layer: (random_map(2, 3, layer.size**2, layer.to_qkv.in_features),),
    groups=lambda layer: {},
)

#: Rows by the path of the class.
ROWS: dict[str, Row] = {
    "timm.layers.attention.Attention": MASKED,
    "timm.models.vision_transformer.Attention": MASKED,  # in older versions
    "timm.models.metaformer.Attention": VIT,
    "timm.models.fastvit.Attention": MAPS,
    "timm.models.visformer.Attention": MAPS,
    "timm.models.beit.Attention": replace(VIT, bias=beit_bias, around=("relative_position_bias_table",)),
    "timm.models.nextvit.EfficientAttention": replace(VIT, call=attend_strided, around=("sr",)),
    "timm.models.vision_transformer_relpos.RelPosAttention": replace(VIT, bias=relative_bias, around=("rel_pos",)),
    "timm.models.efficientformer.Attention": EFFICIENTFORMER,
    "timm.models.tiny_vit.Attention": replace(EFFICIENTFORMER, call=attend_normed, around=("norm", "attention_biases")),
    "timm.models.convit.MHSA": VIT,
    "timm.models.davit.WindowAttention": VIT,
    "timm.models.tnt.Attention": replace(VIT, weights=named("qk v", "proj")),
    "timm.models.volo.Attention": replace(VIT, axes="b h w c"),
    "timm.models.volo.ClassAttention": class_row("q|kv"),
    "timm.models.crossvit.CrossAttention": class_row("wq|wk wv"),
    "timm.models.pvt_v2.Attention": REDUCED,
    "timm.models.twins.GlobalSubSampleAttn": REDUCED,
    "timm.models.twins.LocallyGroupedAttn": TWINS,
    "timm.models.gcvit.WindowAttentionGlobal": replace(
        VIT,
        bias=relative_bias,
        refuses={"use_global": "its queries are not made of its map"},
        around=("rel_pos",),
    ),
    "timm.models.hieradet_sam2.MultiScaleAttention": replace(VIT, axes="b h w c", refuses={"q_pool": POOLED_QUERIES}),
    "timm.layers.attention_pool2d.AttentionPool2d": replace(
        VIT,
        call=attend_pool,
        example=lambda layer: (random_map(2, layer.pos_embed.shape[1], *layer.feat_size),),
        around=("pos_embed",),
    ),
    "timm.layers.attention2d.Attention2d": MAPS,
    "timm.layers.non_local_attn.NonLocalAttn": Row(
        weights=named("t p g", "z"),
        options={"num_heads": lambda layer: 1, "scale": "scale"},
        around=("norm",),
        call=lambda layer, attend, x: layer.norm(attend(x)) + x,
    ),
    "timm.layers.attention2d.MultiQueryAttention2d": Row(
        weights=named("query.proj key.proj value.proj", "output.proj"),
        options={"num_kv_heads": 1},
        drops=("attn_drop", "output.drop"),
        refuses={"query_strides": POOLED, "kv_stride": POOLED},
    ),
    "timm.layers.bottleneck_attn.BottleneckAttn": Row(
        weights=lambda layer: {"qkv": rows_of(layer.qkv), **tables(layer)},
        options={"position": lambda layer: RelPosDecomposed(feat_size=map_size(layer))},
        around=("pool",),
        size=map_size,
        call=lambda layer, attend, x: layer.pool(attend(x)),
    ),
    "timm.layers.halo_attn.HaloAttn": Row(
        weights=halo_weights,
        options={"pattern": lambda layer: Halo(layer.block_size, layer.halo_size), "position": RelPosDecomposed()},
        refuses={"block_stride": "the block has no stride: use avg_down=True"},
        around=("pool",),
        size=lambda layer: (layer.block_size, 2 * layer.block_size),
        call=lambda layer, attend, x: layer.pool(attend(x)),
    ),
    "timm.models.maxxvit.Attention2d": MAXXVIT,
    "timm.models.maxxvit.AttentionCl": replace(MAXXVIT, axes="b h w c"),
    "timm.models.swin_transformer.WindowAttention": TIMM_SWIN,
    "timm.models.swin_transformer_v2.WindowAttention": TIMM_SWIN,
    "torchvision.models.swin_transformer.ShiftedWindowAttention": TORCHVISION_SWIN,
    "torchvision.models.swin_transformer.ShiftedWindowAttentionV2": TORCHVISION_SWIN,
    "torchvision.models.maxvit.RelativePositionalMultiHeadAttention": TORCHVISION_MAXVIT,
}

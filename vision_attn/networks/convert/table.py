"""The table: a row for each attention layer of another library, by the path of its class.

No library is imported to be asked. To add a layer, add its row: what its weights are in our order, and what else the
block has to know. ``from_layer``, ``swap_`` and the table in the docs read it, and each proves the row on every layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention.blocks import TransformerBlock2d
from vision_attn.attention.equations import attention_pattern
from vision_attn.attention.patterns import Halo, Neighborhood, Window
from vision_attn.attention.position import RelPosDecomposed, RelPosTable
from vision_attn.networks.convert import row as ours
from vision_attn.networks.convert.proof import check_without, drop_of, path_of, random_like, random_map, random_twin
from vision_attn.networks.convert.row import OWN, Row, Rows, Weights, heads_first, named, rows_of, side_by_side

__all__ = ["TABLE", "known_class", "row_of"]

Attend = Callable[..., Tensor]

ROTATED = "queries and keys are rotated by an argument of its call, or all but one token's, which a block does not do"
NORMED = "its projections end in batch norms, of which a block has none"
CHANNELS = "it attends between channels, not between positions"
#: Attention that no block stands for, and why.
NO_BLOCK = {
    "timm.layers.attention.AttentionRope": ROTATED,
    "timm.layers.attention_pool2d.RotAttentionPool2d": ROTATED,
    "timm.models.eva.EvaAttention": ROTATED,
    "timm.models.levit.Attention": NORMED,
    "timm.models.levit.AttentionDownsample": NORMED,
    "timm.models.efficientformer_v2.Attention2d": "it mixes the heads of its logits and of its weights (talking heads)",
    "timm.models.efficientformer_v2.Attention2dDownsample": "its projections are batch norms and convolutions as well",
    "timm.models.edgenext.CrossCovarianceAttn": CHANNELS,
    "timm.models.xcit.XCA": CHANNELS,
}
#: Rows by the path of the class.
TABLE: dict[str, Row] = {}


def known_class(module: object) -> type | None:
    """The class that a layer is known by; None if it is not known."""
    return next((kind for kind in type(module).__mro__ if path_of(kind) in TABLE | NO_BLOCK), None)


def row_of(module: object) -> tuple[str, Any, Row]:
    """The path of the class that a layer is known by, the class, and its row; refused with a reason."""
    path = path_of(kind := known_class(module) or type(module))
    if path not in TABLE:
        raise ValueError(NO_BLOCK.get(path, f"no row of the table is for {path}; if it wraps a layer, give the layer"))
    return path, kind, TABLE[path]


# --- torch ------------------------------------------------------------------------------------------------------------


def multihead_weights(layer: Any) -> Weights:
    """Of one weight, or of three where keys and values are of other channels; the biases are one even then."""
    out = {"proj": rows_of(layer.out_proj)}
    if layer.in_proj_weight is not None:
        return {"qkv": Rows(layer.in_proj_weight, layer.in_proj_bias), **out}
    biases = (None, None, None) if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    q, k, v = map(Rows, (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight), biases)
    if layer.vdim == layer.kdim:
        return {**ours.input_projections(q, k, v), **out}
    bias = None if k.bias is None or v.bias is None else torch.cat([k.bias, v.bias])
    # Channels of keys and of values beside each other, as of one map.
    return {"q": q, "kv": Rows(torch.block_diag(k.weight, v.weight), bias), **out}


def attend_multihead(
    layer: Any,
    attend: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    masked = is_causal or key_padding_mask is not None or attn_mask is not None
    apart = layer.vdim != layer.kdim
    if masked or need_weights or (key is not value and not apart) or query.dim() != 3 or query.is_nested:
        return OWN
    source = torch.cat([key, value], dim=2) if apart else key
    x, context = (y.transpose(1, 2) if layer.batch_first else y.permute(1, 2, 0) for y in (query, source))
    y = attend(x, None, None if source is query else context)
    return y.transpose(1, 2) if layer.batch_first else y.permute(2, 0, 1), None


def example_multihead(layer: Any) -> tuple[Any, ...]:
    tokens = zip((5, 4, 4), (layer.embed_dim, layer.kdim, layer.vdim), strict=True)
    query, key, value = (random_map(2, *size).transpose(0, 1 - layer.batch_first) for size in tokens)
    if layer.kdim == layer.vdim:
        key = value = query if layer.kdim == layer.embed_dim else key
    return query, key, value, None, False


def encoder_layer(row: Row, layer: Any, rank: int) -> TransformerBlock2d:
    inner, drop = layer.self_attn, drop_of(layer, "dropout")
    MULTIHEAD.refuse(inner)
    if drop_of(layer, "dropout2") != drop:
        raise ValueError(f"dropout2 must be {drop} as dropout: the block has one probability for its perceptron")
    block = TransformerBlock2d(
        inner.embed_dim,
        inner.num_heads,
        mlp_ratio=len(layer.linear1.weight) / inner.embed_dim,
        norm_first=layer.norm_first,
        activation="relu" if layer.activation(-torch.ones(())) == 0 else "gelu",
        mlp_drop=drop,
        bias=layer.linear1.bias is not None,
        qkv_bias=inner.in_proj_bias is not None,
        proj_bias=inner.out_proj.bias is not None,
        eps=layer.norm1.eps,
        attn_drop=inner.dropout,
        proj_drop=drop_of(layer, "dropout1"),
        device="meta",
    )
    projections = {f"attn.{name}": rows for name, rows in multihead_weights(inner).items()}
    projections |= {"fc1": rows_of(layer.linear1), "fc2": rows_of(layer.linear2)}
    norms = {key: x for key, x in layer.named_parameters() if key.startswith("norm")}
    return ours.filled(block, {**norms, **ours.parameters_of(projections, 2)}, training=layer.training)


@contextmanager
def batch_first_twin(layer: Any) -> Iterator[Any]:
    with random_twin(layer) as twin:
        twin.self_attn.batch_first = True  # type: ignore[union-attr]
        yield twin


def example_encoder(layer: Any) -> tuple[Any, ...]:
    """A gradient is asked for, else torch computes the layer at once from its weights, whatever its parts do."""
    return (random_map(2, 5, layer.self_attn.embed_dim).requires_grad_(),)


NO_KEYS = "the block has no keys but those of its map: make the layer without it and fine-tune it"
MULTIHEAD = Row(
    weights=multihead_weights,
    axes="b t c",
    drops=("dropout", ""),
    refuses=dict.fromkeys(("bias_k", "bias_v", "add_zero_attn"), NO_KEYS),
    call=attend_multihead,
    example=example_multihead,
    serves_itself="calls with a mask, with need_weights, or with values that are not the keys",
)
TABLE |= {
    "torch.nn.modules.activation.MultiheadAttention": MULTIHEAD,
    "torch.nn.modules.transformer.TransformerEncoderLayer": Row(
        weights=multihead_weights,
        axes="b t c",
        example=example_encoder,
        whole=encoder_layer,
        twin=batch_first_twin,
        swaps=False,
    ),
}

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


def beit_size(layer: Any) -> tuple[int, ...]:
    return (len(layer.relative_position_index) if layer.window_size else 5,)


def relative_bias(layer: Any, x: Tensor, shared_rel_pos: Tensor | None = None) -> Any:
    return shared_rel_pos if layer.rel_pos is None else layer.rel_pos.get_bias()


def relative_size(layer: Any) -> tuple[int, ...]:
    return (5 if layer.rel_pos is None else layer.rel_pos.get_bias().shape[2],)


def attend_strided(layer: Any, attend: Attend, x: Tensor) -> Any:
    """Of NextViT, whose keys are of tokens averaged some in a row."""
    x = x.transpose(1, 2)
    return attend(x, None, None if layer.sr is None else layer.norm(layer.sr(x))).transpose(1, 2)


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
RELATIVE_POSITIONS = replace(VIT, bias=relative_bias, size=relative_size, around=("rel_pos",))
MAPS = replace(VIT, axes="b c h w")
MASKED = replace(VIT, bias=vit_bias, serves_itself="causal calls")
TABLE |= {
    "timm.layers.attention.Attention": MASKED,
    "timm.models.vision_transformer.Attention": MASKED,  # in older versions
    "timm.models.metaformer.Attention": VIT,
    "timm.models.fastvit.Attention": MAPS,
    "timm.models.visformer.Attention": MAPS,
    "timm.models.beit.Attention": replace(
        VIT, bias=beit_bias, size=beit_size, around=("relative_position_bias_table",)
    ),
    "timm.models.nextvit.EfficientAttention": replace(
        VIT, call=attend_strided, size=lambda layer: (8,), around=("sr",)
    ),
    "timm.models.vision_transformer_relpos.RelPosAttention": RELATIVE_POSITIONS,
    "timm.models.efficientformer.Attention": replace(
        VIT,
        weights=efficientformer_weights,
        bias=efficientformer_bias,
        size=lambda layer: (layer.attention_biases.shape[1],),
        around=("attention_biases",),
    ),
    "timm.layers.attention_pool2d.AttentionPool2d": replace(
        VIT,
        call=attend_pool,
        example=lambda layer: (random_map(2, layer.pos_embed.shape[1], *layer.feat_size),),
        around=("pos_embed",),
        serves_itself="maps of another size, and calls before the logits",
    ),
}

# --- timm, of maps ----------------------------------------------------------------------------------------------------


def multi_query_kernels(layer: Any) -> Weights:
    """Of kernels, those of queries and of the output with heads as an axis."""
    kernels = (layer.query_proj.flatten(0, 1), layer.key_proj.T, layer.value_proj.T)
    return {"qkv": Rows(torch.cat(kernels)), "proj": Rows(layer.out_proj.flatten(1))}


def tables(layer: Any, begin: int = 0) -> Weights:
    factor = layer.scale if layer.scale_pos_embed else 1.0
    return {f"position.{name}": factor * getattr(layer.pos_embed, name)[begin:] for name in ("height_rel", "width_rel")}


def halo_weights(layer: Any) -> Weights:
    kv = heads_first(rows_of(layer.kv), layer.num_heads, layer.dim_head_qk, layer.dim_head_v)
    # Its offsets are counted from the corner of the halo: the first of its tables are never looked up.
    return {"qkv": side_by_side(q=rows_of(layer.q), kv=kv), **tables(layer, 2 * layer.halo_size)}


def map_size(layer: Any) -> tuple[int, int]:
    return layer.pos_embed.height, layer.pos_embed.width


def attend_map(layer: Any, attend: Attend, x: Tensor) -> Any:
    return layer.pool(attend(x)) if tuple(x.shape[2:]) == map_size(layer) else OWN


def attend_blocks(layer: Any, attend: Attend, x: Tensor) -> Any:
    whole = not x.shape[2] % layer.block_size and not x.shape[3] % layer.block_size
    return layer.pool(attend(x)) if whole else OWN


def non_local(row: Row, layer: Any, rank: int) -> nn.Module:
    """With the batch norm in the output projection."""
    check_without(layer, {"training": "its batch norm is not that of one map: call .eval()"})
    weights, norm = row.weights(layer), layer.norm
    factor, out = norm.weight * torch.rsqrt(norm.running_var + norm.eps), weights["proj"]
    proj = Rows(out.weight * factor[:, None], (out.bias - norm.running_mean) * factor + norm.bias)
    return ours.residual(replace(row, weights=lambda layer: weights | {"proj": proj}).block(layer))


POOLED = "the block pools keys and values only (kv_stride), by averages: convert a layer with strides of 1"
RELATIVE = {"num_heads": "num_heads", "value_dim": "dim_head_v"}
MULTI_QUERY = {"num_heads": "num_heads", "num_kv_heads": lambda layer: 1}
TABLE |= {
    "timm.layers.attention2d.Attention2d": replace(MAPS, serves_itself="calls with a mask"),
    "timm.layers.attention2d.MultiQueryAttention2d": Row(
        weights=named("query.proj key.proj value.proj", "output.proj"),
        options=MULTI_QUERY,
        drops=("attn_drop", "output.drop"),
        refuses={"query_strides": POOLED, "kv_stride": POOLED},
        serves_itself="calls with a mask",
    ),
    "timm.layers.attention2d.MultiQueryAttentionV2": Row(
        weights=multi_query_kernels, options=MULTI_QUERY, call=lambda layer, attend, x, m=None: attend(x, None, m)
    ),
    "timm.layers.bottleneck_attn.BottleneckAttn": Row(
        weights=lambda layer: {"qkv": rows_of(layer.qkv), **tables(layer)},
        options=RELATIVE | {"position": lambda layer: RelPosDecomposed(feat_size=map_size(layer))},
        around=("pool",),
        size=map_size,
        call=attend_map,
    ),
    "timm.layers.halo_attn.HaloAttn": Row(
        weights=halo_weights,
        options={
            **RELATIVE,
            "pattern": lambda layer: Halo(layer.block_size, layer.halo_size),
            "position": lambda layer: RelPosDecomposed(),
        },
        refuses={"block_stride": "the block has no stride: use avg_down=True"},
        around=("pool",),
        size=lambda layer: (layer.block_size, 2 * layer.block_size),
        call=attend_blocks,
        serves_itself="maps that are not of whole blocks",
    ),
    "timm.layers.non_local_attn.NonLocalAttn": Row(
        weights=named("t p g", "z"),
        options={"num_heads": lambda layer: 1, "scale": "scale"},
        call=lambda layer, attend, x: layer.norm(attend(x)) + x,
        whole=non_local,
    ),
}

# --- windows and grids of maps: MaxViT, CoAtNet, Swin -----------------------------------------------------------------

#: The parameter of :class:`RelPosTable`.
BIASES = "position.relative_position_bias_table"


def maxxvit_table(layer: Any) -> Tensor | None:
    """Of biases by query less key; TensorFlow's, with the heads first, is by key less query."""
    table: Tensor | None = getattr(layer.rel_pos, "relative_position_bias_table", None)
    return table.flip(1, 2).flatten(1).T if table is not None and table.dim() == 3 else table


def maxxvit_weights(layer: Any) -> Weights:
    table = maxxvit_table(layer)
    return vit_weights(layer) | ({} if table is None else {BIASES: table})


def maxxvit_position(layer: Any) -> RelPosTable | None:
    return None if maxxvit_table(layer) is None else RelPosTable(feat_size=tuple(layer.rel_pos.window_size))


def maxxvit_bias(layer: Any, x: Tensor, shared_rel_pos: Tensor | None = None) -> Any:
    if layer.rel_pos is None or shared_rel_pos is not None:
        return None if shared_rel_pos is None else OWN
    if tuple(x.shape[2:]) != tuple(layer.rel_pos.window_size):
        return OWN
    return None if maxxvit_table(layer) is not None else layer.rel_pos.get_bias()


def maxxvit_size(layer: Any) -> tuple[int, ...]:
    return tuple(getattr(layer.rel_pos, "window_size", None) or (3, 4))


def attend_maxvit(layer: Any, attend: Attend, x: Tensor) -> Any:
    if x.shape[2] != layer.size**2:
        return OWN
    maps = x.flatten(0, 1).transpose(1, 2).unflatten(2, (layer.size, layer.size))
    return attend(maps).flatten(2).transpose(1, 2).unflatten(0, x.shape[:2])


def maxvit_weights(layer: Any) -> Weights:
    return named("to_qkv", "merge")(layer) | {BIASES: layer.relative_position_bias_table}


def swin_weights(layer: Any) -> Weights:
    """The network that gives the biases of Swin v2 for every offset becomes the table that it gives."""
    if not hasattr(layer, "logit_scale"):
        return vit_weights(layer) | {BIASES: layer.relative_position_bias_table}
    table = 16 * torch.sigmoid(layer.cpb_mlp(layer.relative_coords_table).flatten(0, -2))
    return vit_weights(layer) | {BIASES: table, "q_norm.logit_scale": layer.logit_scale}


def torchvision_swin_weights(layer: Any) -> Weights:
    weights = swin_weights(layer)
    if hasattr(layer, "logit_scale") and layer.qkv.bias is not None:
        q, k, v = layer.qkv.bias.chunk(3)  # that of the keys is there and is not used
        weights["qkv"] = Rows(layer.qkv.weight, torch.cat([q, torch.zeros_like(k), v]))
    return weights


def attend_window(layer: Any, attend: Attend, x: Tensor, mask: Tensor | None = None) -> Tensor:
    bias = None if mask is None else mask.repeat(len(x) // len(mask), 1, 1)[:, None]
    return attend(x.transpose(1, 2).unflatten(2, tuple(layer.window_size)), bias).flatten(2).transpose(1, 2)


def windows_of_swin(layer: Any, pattern: Any) -> dict[str, Any]:
    pattern = pattern or Window(tuple(layer.window_size))
    shifted = getattr(pattern, "shift", 0) not in (0, (0, 0))
    return {"kind": ours.WholeWindows2d if shifted else ours.PaddedAttention2d, "pattern": pattern}


def groups_of_maxvit(layer: Any, pattern: Any) -> dict[str, Any]:
    return {"pattern": pattern or "full"}


MAXXVIT = Row(
    weights=maxxvit_weights,
    options={"num_heads": "num_heads", "position": maxxvit_position},
    around=("rel_pos.mlp",),
    bias=maxxvit_bias,
    size=maxxvit_size,
    serves_itself="calls with shared relative positions",
    groups=groups_of_maxvit,
)
TORCHVISION_SWIN = Row(
    weights=torchvision_swin_weights,
    options={
        "num_heads": "num_heads",
        "kind": lambda layer: ours.PaddedAttention2d,
        "pattern": lambda layer: Window(tuple(layer.window_size), tuple(layer.shift_size)),
        "position": lambda layer: RelPosTable(),
    },
    axes="b h w c",
    drops=("attention_dropout", "dropout"),
    size=lambda layer: (max(1, 2 * layer.window_size[0] - 1), 2 * layer.window_size[1] + 1),
)
TIMM_SWIN = Row(
    weights=swin_weights,
    options={"num_heads": "num_heads", "position": lambda layer: RelPosTable(feat_size=tuple(layer.window_size))},
    call=attend_window,
    example=lambda layer: (random_map(4, math.prod(layer.window_size), layer.qkv.in_features),),
    groups=windows_of_swin,
)
TORCHVISION_MAXVIT = Row(
    weights=maxvit_weights,
    options={
        "num_heads": "n_heads",
        "scale": "scale_factor",
        "position": lambda layer: RelPosTable(feat_size=(layer.size, layer.size)),
    },
    call=attend_maxvit,
    example=lambda layer: (random_map(2, 3, layer.size**2, layer.to_qkv.in_features),),
    groups=groups_of_maxvit,
)
TABLE |= {
    "timm.models.maxxvit.Attention2d": MAXXVIT,
    "timm.models.maxxvit.AttentionCl": replace(MAXXVIT, axes="b h w c"),
    "timm.models.swin_transformer.WindowAttention": TIMM_SWIN,
    "timm.models.swin_transformer_v2.WindowAttention": TIMM_SWIN,
    "torchvision.models.swin_transformer.ShiftedWindowAttention": TORCHVISION_SWIN,
    "torchvision.models.swin_transformer.ShiftedWindowAttentionV2": TORCHVISION_SWIN,
    "torchvision.models.maxvit.RelativePositionalMultiHeadAttention": TORCHVISION_MAXVIT,
}

# --- diffusers and natten ---------------------------------------------------------------------------------------------


def attend_diffusers(
    layer: Any, attend: Attend, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, **others: Any
) -> Any:
    others.pop("temb", None)  # for a norm that the layer does not have
    x, context, usual = hidden_states, encoder_hidden_states, type(layer.processor).__name__ in PROCESSORS
    if any(other is not None for other in others.values()) or not usual or x.dim() not in (3, 4):
        return OWN
    if layer.is_cross_attention and context is None:
        return OWN
    y = x.flatten(2) if x.dim() == 4 else x.transpose(1, 2)
    y = y if layer.group_norm is None else layer.group_norm(y)
    y = attend(y, None, None if context is None else context.transpose(1, 2))
    y = y.unflatten(2, x.shape[2:]) if x.dim() == 4 else y.transpose(1, 2)
    return ((y + x) if layer.residual_connection else y) / layer.rescale_output_factor


def example_diffusers(layer: Any) -> tuple[Any, ...]:
    x = random_map(2, layer.query_dim, 3, 4)
    x = x if layer.residual_connection else x.flatten(2).mT
    return (x, random_map(2, 4, layer.cross_attention_dim)) if layer.is_cross_attention else (x,)


def with_input(row: Row, layer: Any, rank: int) -> nn.Module | None:
    if layer.residual_connection:
        return ours.residual(row.block(layer, rank=rank), layer.group_norm)
    check_without(layer, {"group_norm": "the block has a norm only where it adds its input"})
    return None


def neighborhood_of(layer: Any) -> Neighborhood:
    return Neighborhood(*map(tuple, (layer.kernel_size, layer.dilation, layer.stride, layer.is_causal)))


def twice_its_kernel(layer: Any) -> tuple[int, ...]:
    return tuple(2 * side * step for side, step in zip(layer.kernel_size, layer.dilation, strict=True))


#: The processors that diffusers makes its attention with.
PROCESSORS = ("AttnProcessor", "AttnProcessor2_0")
ABSENT = ("norm_q", "norm_k", "norm_cross", "spatial_norm", "add_k_proj", "add_q_proj")
NATTEN = Row(
    weights=vit_weights,
    options={"num_heads": "num_heads", "pattern": neighborhood_of, "scale": "scale"},
    axes="b w c",
    refuses={"rpb": "the block's tables are another: make the layer without rel_pos_bias"},
    size=twice_its_kernel,
)
TABLE |= {
    "diffusers.models.attention_processor.Attention": Row(
        weights=named("to_q to_k to_v", "to_out.0"),
        options={"num_heads": "heads", "scale": "scale"},
        axes="b t c",
        drops=("", "to_out.1"),
        refuses=dict.fromkeys(ABSENT, "the block has no such part: only layers without it are converted"),
        around=("rescale_output_factor",),
        call=attend_diffusers,
        example=example_diffusers,
        whole=with_input,
        serves_itself="calls with a mask or further arguments, and all while it has another processor",
    ),
    "natten.modules.NeighborhoodAttention1D": NATTEN,
    "natten.modules.NeighborhoodAttention2D": replace(NATTEN, axes="b h w c"),
    "natten.modules.NeighborhoodAttention3D": replace(NATTEN, axes="b t h w c"),
}

# --- Keras, whose maps have their channels last and whose kernels keep heads as an axis -------------------------------


def axes_of(layer: Any) -> str:
    """The axes of its maps, as letters of the equation of its projection."""
    if not layer.built:
        raise ValueError(
            f"layer must be built, which its first call does: got a {type(layer).__name__} without weights"
        )
    axes: str = layer._query_dense.equation.split(",")[0][1:-1]
    return axes


def keras_weights(layer: Any) -> Weights:
    def kernel(name: str) -> tuple[Tensor, Tensor | None]:
        dense = getattr(layer, f"_{name}_dense")
        return dense.kernel.value, None if dense.bias is None else dense.bias.value

    q, k, v = (ours.kernel_rows(*kernel(name)) for name in ("query", "key", "value"))
    out, bias = kernel("output")
    weights = {**ours.input_projections(q, k, v), "proj": Rows(out.flatten(0, 1).T, bias)}
    if layer.get_config().get("use_gate"):
        weights["gate"] = ours.with_bias(ours.kernel_rows(*kernel("gate")))
    return weights


def keras_pattern(layer: Any) -> Any:
    return attention_pattern(layer.get_config().get("attention_axes"), len(axes_of(layer)) + 2)


@contextmanager
def random_numbers(layer: Any) -> Iterator[Any]:
    """The layer itself, which computes in float64 with random weights; its own are left alone."""
    from keras import StatelessScope

    numbers = random_like([weight.value for weight in layer.weights])
    policies = {part: part.dtype_policy for part in layer.modules() if hasattr(part, "dtype_policy")}
    try:
        for part in policies:
            part.dtype_policy = "float64"
        with StatelessScope() as scope:
            for weight, values in zip(layer.weights, numbers, strict=True):
                scope.add_update((weight, values.double()))
            yield layer
    finally:
        for part, policy in policies.items():
            part.dtype_policy = policy


def example_keras(layer: Any) -> tuple[Any, ...]:
    sizes, kernels = (
        (5, 3, 2)[: len(axes_of(layer))],
        (layer._query_dense.kernel.value, layer._value_dense.kernel.value),
    )
    query, value = (random_map(1, *sizes, len(kernel)).to(kernel.device) for kernel in kernels)
    return query, query if value.shape == query.shape else value


def attend_keras(layer: Any, attend: Attend, query: Tensor, value: Tensor) -> Tensor:
    context = None if value is query else value.movedim(-1, 1)
    return attend(query.movedim(-1, 1), None, context).movedim(1, -1)


BAND = "make the layer without it, and give the block's forward a mask of this band"
KERAS = Row(
    weights=keras_weights,
    options={
        "rank": lambda layer: len(axes_of(layer)),
        "num_heads": lambda layer: layer._query_dense.kernel.shape[1],
        "num_kv_heads": lambda layer: layer._value_dense.kernel.shape[1],
        "attn_drop": lambda layer: layer.get_config()["dropout"],
        "pattern": keras_pattern,
    },
    axes="b ... c",
    drops=("", ""),
    refuses={"_sliding_window": BAND, "sliding_window": BAND},
    call=attend_keras,
    example=example_keras,
    twin=random_numbers,
    told={"training": False, "return_attention_scores": True},  # as the fused kernel rounds to float32
    mode=lambda layer: False,
    swaps=False,
)
TABLE |= {
    "keras.src.layers.attention.multi_head_attention.MultiHeadAttention": KERAS,
    "keras.src.layers.attention.grouped_query_attention.GroupedQueryAttention": KERAS,
}

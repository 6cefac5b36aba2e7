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

from vision_attn.attention.blocks import Attention
from vision_attn.attention.equations import attention_pattern
from vision_attn.attention.patterns import Halo, Neighborhood, Window
from vision_attn.attention.position import RelPosDecomposed, RelPosTable
from vision_attn.networks.convert import row as ours
from vision_attn.networks.convert.proof import check_without, path_of, random_like, random_map
from vision_attn.networks.convert.row import OWN, Row, Rows, Weights, heads_first, named, rows_of, side_by_side

Attend = Callable[..., Tensor]


# --- torch ------------------------------------------------------------------------------------------------------------


def multihead_weights(layer: Any) -> Weights:
    """Of one weight, or of three where keys and values are of other channels; the biases are one even then."""
    out = {"proj": rows_of(layer.out_proj)}
    if layer.in_proj_weight is not None:
        return {"qkv": Rows(layer.in_proj_weight, layer.in_proj_bias), **out}
    biases = (None, None, None) if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    inputs = map(Rows, (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight), biases)
    return {**ours.input_projections(*inputs), **out}


def attend_multihead(
    layer: Any, attend: Attend, query: Tensor, key: Tensor, value: Tensor, *others: Any, **named: Any
) -> Any:
    order = ("key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")
    given = {"need_weights": True, **dict(zip(order, others, strict=False)), **named, "average_attn_weights": None}
    masked = any(x is not None and x is not False for x in given.values())
    if masked or key is not value or query.dim() != 3 or query.is_nested:
        return OWN
    x, context = (y.transpose(1, 2) if layer.batch_first else y.permute(1, 2, 0) for y in (query, key))
    y = attend(x, None, None if key is query else context)
    return y.transpose(1, 2) if layer.batch_first else y.permute(2, 0, 1), None


def example_multihead(layer: Any) -> tuple[Any, ...]:
    sizes = (5, layer.embed_dim), (4, layer.kdim)
    query, key = (random_map(2, *size).transpose(0, 1 - layer.batch_first) for size in sizes)
    key = query if layer.kdim == layer.embed_dim else key
    return query, key, key, None, False


NO_KEYS = "the block has no keys but those of its map: make the layer without it and fine-tune it"
MULTIHEAD = Row(
    weights=multihead_weights,
    axes="b t c",
    drops=("dropout", ""),
    refuses=dict.fromkeys(("bias_k", "bias_v", "add_zero_attn"), NO_KEYS),
    call=attend_multihead,
    example=example_multihead,
)

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

# --- timm, of maps ----------------------------------------------------------------------------------------------------


def multi_query_kernels(layer: Any) -> Weights:
    """Of kernels, those of queries and of the output with heads as an axis."""
    kernels = (layer.query_proj.flatten(0, 1), layer.key_proj.T, layer.value_proj.T)
    return {"qkv": Rows(torch.cat(kernels)), "proj": Rows(layer.out_proj.flatten(1))}


def tables(layer: Any, begin: int = 0) -> Weights:
    """Of relative positions; and the identity, as these layers do not project what they give."""
    found = {name: getattr(layer.pos_embed, name)[begin:] for name in ("height_rel", "width_rel")}
    factor = layer.scale if layer.scale_pos_embed else 1.0
    out = torch.eye(layer.num_heads * layer.dim_head_v).to(found["height_rel"])
    return {"proj": Rows(out)} | {f"position.{name}": factor * x for name, x in found.items()}


def halo_weights(layer: Any) -> Weights:
    kv = heads_first(rows_of(layer.kv), layer.num_heads, layer.dim_head_qk, layer.dim_head_v)
    # Its offsets are counted from the corner of the halo: the first of its tables are never looked up.
    return {"qkv": side_by_side(q=rows_of(layer.q), kv=kv), **tables(layer, 2 * layer.halo_size)}


def map_size(layer: Any) -> tuple[int, int]:
    return layer.pos_embed.height, layer.pos_embed.width


def attend_pooled(layer: Any, attend: Attend, x: Tensor) -> Any:
    return layer.pool(attend(x))


def non_local(layer: Any, block: Any) -> nn.Module:
    """With the batch norm in the output projection."""
    check_without(layer, {"training": "its batch norm is not that of one map: call .eval()"})
    norm, proj = layer.norm, block.proj
    factor = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    with torch.no_grad():
        proj.weight.mul_(factor[:, None, None, None])
        proj.bias.copy_((proj.bias - norm.running_mean) * factor + norm.bias)
    return ours.residual(block)


POOLED = "the block pools keys and values only (kv_stride), by averages: convert a layer with strides of 1"

# --- windows and grids of maps: MaxViT, CoAtNet, Swin -----------------------------------------------------------------

#: The parameter of :class:`RelPosTable`.
BIASES = "position.relative_position_bias_table"


def maxxvit_weights(layer: Any) -> Weights:
    table = maxxvit_table(layer)
    return vit_weights(layer) | ({} if table is None else {BIASES: table})


def maxxvit_position(layer: Any) -> RelPosTable | None:
    return None if maxxvit_table(layer) is None else RelPosTable(feat_size=tuple(layer.rel_pos.window_size))


def maxxvit_size(layer: Any) -> tuple[int, ...]:
    return tuple(getattr(layer.rel_pos, "window_size", None) or (3, 4))


def maxvit_weights(layer: Any) -> Weights:
    return named("to_qkv", "merge")(layer) | {BIASES: layer.relative_position_bias_table}


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


MAXXVIT = Row(
    weights=maxxvit_weights,
    options={"position": maxxvit_position},
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
TORCHVISION_MAXVIT = replace(
    TIMM_SWIN,
    weights=maxvit_weights,
    options={**TIMM_SWIN.options, "num_heads": "n_heads", "scale": "scale_factor"},
    example=lambda layer: (random_map(2, 3, layer.size**2, layer.to_qkv.in_features),),
    groups=lambda layer: {},
)

# --- diffusers and natten ---------------------------------------------------------------------------------------------


def attend_diffusers(
    layer: Any, attend: Attend, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, **others: Any
) -> Any:
    others.pop("temb", None)  # for a norm that the layer does not have
    x, context, usual = hidden_states, encoder_hidden_states, type(layer.processor).__name__ in PROCESSORS
    usual = usual and x.dim() in (3, 4) and (context is not None or not layer.is_cross_attention)
    if not usual or any(other is not None for other in others.values()):
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


def with_input(layer: Any, block: Attention) -> nn.Module:
    if layer.residual_connection:
        return ours.residual(block, layer.group_norm)
    check_without(layer, {"group_norm": "the block has a norm only where it adds its input"})
    return block


def neighborhood_of(layer: Any) -> Neighborhood:
    return Neighborhood(*map(tuple, (layer.kernel_size, layer.dilation, layer.stride, layer.is_causal)))


def twice_its_kernel(layer: Any) -> tuple[int, ...]:
    return tuple(2 * side * step for side, step in zip(layer.kernel_size, layer.dilation, strict=True))


#: The processors that diffusers makes its attention with.
PROCESSORS = ("AttnProcessor", "AttnProcessor2_0")
ABSENT = ("norm_q", "norm_k", "norm_cross", "spatial_norm", "add_k_proj", "add_q_proj")
NATTEN = Row(
    weights=vit_weights,
    options={"pattern": neighborhood_of, "scale": "scale"},
    axes="b w c",
    refuses={"rpb": "the block's tables are another: make the layer without rel_pos_bias"},
    size=twice_its_kernel,
)

# --- Keras, whose maps have their channels last and whose kernels keep heads as an axis -------------------------------


def axes_of(layer: Any) -> Any:
    """The axes of its maps, as letters of the equation of its projection."""
    if not layer.built:
        raise ValueError(f"layer must be built, which its first call does: got a {type(layer).__name__}")
    return layer._query_dense.equation.split(",")[0][1:-1]


def dense_rows(layer: Any, name: str) -> Rows:
    """Of a kernel ``(c, n, d)``; that of the output is ``(n, d, c)``."""
    dense = getattr(layer, f"_{name}_dense")
    kernel = dense.kernel.value.flatten(0, 1) if name == "output" else dense.kernel.value.flatten(1)
    return Rows(kernel.T, None if dense.bias is None else dense.bias.value.flatten())


def keras_weights(layer: Any) -> Weights:
    inputs = (dense_rows(layer, name) for name in ("query", "key", "value"))
    weights = {**ours.input_projections(*inputs), "proj": dense_rows(layer, "output")}
    if layer.get_config().get("use_gate"):
        weights["gate"] = ours.with_bias(dense_rows(layer, "gate"))
    return weights


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
    sizes = (5, 3, 2)[: len(axes_of(layer))]
    kernels = (layer._query_dense.kernel.value, layer._value_dense.kernel.value)
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
        "pattern": lambda layer: attention_pattern(layer.get_config().get("attention_axes"), len(axes_of(layer)) + 2),
    },
    axes="b ... c",
    drops=("", ""),
    refuses={"_sliding_window": BAND, "sliding_window": BAND},
    call=attend_keras,
    example=example_keras,
    twin=random_numbers,
    told={"training": False, "return_attention_scores": True},  # as the fused kernel rounds to float32
)

# --- the table --------------------------------------------------------------------------------------------------------

#: Rows by the path of the class.
TABLE: dict[str, Row] = {
    "torch.nn.modules.activation.MultiheadAttention": MULTIHEAD,
    "timm.layers.attention.Attention": MASKED,
    "timm.models.vision_transformer.Attention": MASKED,  # in older versions
    "timm.models.metaformer.Attention": VIT,
    "timm.models.fastvit.Attention": MAPS,
    "timm.models.visformer.Attention": MAPS,
    "timm.models.beit.Attention": replace(VIT, bias=beit_bias, around=("relative_position_bias_table",)),
    "timm.models.nextvit.EfficientAttention": replace(VIT, call=attend_strided, around=("sr",)),
    "timm.models.vision_transformer_relpos.RelPosAttention": replace(VIT, bias=relative_bias, around=("rel_pos",)),
    "timm.models.efficientformer.Attention": replace(
        VIT, weights=efficientformer_weights, bias=efficientformer_bias, around=("attention_biases",)
    ),
    "timm.layers.attention_pool2d.AttentionPool2d": replace(
        VIT,
        call=attend_pool,
        example=lambda layer: (random_map(2, layer.pos_embed.shape[1], *layer.feat_size),),
        around=("pos_embed",),
    ),
    "timm.layers.attention2d.Attention2d": MAPS,
    "timm.layers.attention2d.MultiQueryAttention2d": Row(
        weights=named("query.proj key.proj value.proj", "output.proj"),
        options={"num_kv_heads": 1},
        drops=("attn_drop", "output.drop"),
        refuses={"query_strides": POOLED, "kv_stride": POOLED},
    ),
    "timm.layers.attention2d.MultiQueryAttentionV2": Row(
        weights=multi_query_kernels,
        options={"num_kv_heads": 1},
        call=lambda layer, attend, x, m=None: attend(x, None, m),
    ),
    "timm.layers.bottleneck_attn.BottleneckAttn": Row(
        weights=lambda layer: {"qkv": rows_of(layer.qkv), **tables(layer)},
        options={"position": lambda layer: RelPosDecomposed(feat_size=map_size(layer))},
        around=("pool",),
        size=map_size,
        call=attend_pooled,
    ),
    "timm.layers.halo_attn.HaloAttn": Row(
        weights=halo_weights,
        options={"pattern": lambda layer: Halo(layer.block_size, layer.halo_size), "position": RelPosDecomposed()},
        refuses={"block_stride": "the block has no stride: use avg_down=True"},
        around=("pool",),
        size=lambda layer: (layer.block_size, 2 * layer.block_size),
        call=attend_pooled,
    ),
    "timm.layers.non_local_attn.NonLocalAttn": Row(
        weights=named("t p g", "z"),
        options={"num_heads": 1, "scale": "scale"},
        call=lambda layer, attend, x: layer.norm(attend(x)) + x,
        finish=non_local,
    ),
    "timm.models.maxxvit.Attention2d": MAXXVIT,
    "timm.models.maxxvit.AttentionCl": replace(MAXXVIT, axes="b h w c"),
    "timm.models.swin_transformer.WindowAttention": TIMM_SWIN,
    "timm.models.swin_transformer_v2.WindowAttention": TIMM_SWIN,
    "torchvision.models.swin_transformer.ShiftedWindowAttention": TORCHVISION_SWIN,
    "torchvision.models.swin_transformer.ShiftedWindowAttentionV2": TORCHVISION_SWIN,
    "torchvision.models.maxvit.RelativePositionalMultiHeadAttention": TORCHVISION_MAXVIT,
    "diffusers.models.attention_processor.Attention": Row(
        weights=named("to_q to_k to_v", "to_out.0"),
        options={"num_heads": "heads", "scale": "scale"},
        axes="b t c",
        drops=("", "to_out.1"),
        refuses=dict.fromkeys(ABSENT, "the block has no such part: only layers without it are converted"),
        around=("rescale_output_factor",),
        call=attend_diffusers,
        example=example_diffusers,
        finish=with_input,
    ),
    "natten.modules.NeighborhoodAttention1D": NATTEN,
    "natten.modules.NeighborhoodAttention2D": replace(NATTEN, axes="b h w c"),
    "natten.modules.NeighborhoodAttention3D": replace(NATTEN, axes="b t h w c"),
    "keras.src.layers.attention.multi_head_attention.MultiHeadAttention": KERAS,
    "keras.src.layers.attention.grouped_query_attention.GroupedQueryAttention": KERAS,
}


def known_class(module: object) -> type | None:
    """The class that a layer is known by; None if it is not known."""
    return next((kind for kind in type(module).__mro__ if path_of(kind) in TABLE), None)


def row_of(module: object) -> tuple[str, Any, Row]:
    """The path of the class that a layer is known by, the class, and its row; refused with a reason."""
    path = path_of(kind := known_class(module) or type(module))
    if path not in TABLE:
        raise ValueError(f"no row of the table is for {path}")
    return path, kind, TABLE[path]

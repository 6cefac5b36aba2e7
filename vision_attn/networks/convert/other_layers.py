"""What is known of the attention layers of torch, transformers, vit-pytorch, MONAI, YOLO, diffusers, natten, Keras."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention.blocks import Attention
from vision_attn.attention.patterns import Neighborhood
from vision_attn.networks.convert import row as ours
from vision_attn.networks.convert.equations import attention_pattern
from vision_attn.networks.convert.proof import check_without, random_like, random_map
from vision_attn.networks.convert.row import OWN, Row, Rows, Weights, folded, heads_first, named, rows_of
from vision_attn.networks.convert.timm_layers import VIT, over_windows

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

# --- transformers -----------------------------------------------------------------------------------------------------


def of_transformers(kinds: str) -> list[str]:
    """The paths of classes of transformers, which are named alike.

    >>> of_transformers("vit.ViT")
    ['transformers.models.vit.modeling_vit.ViTAttention']
    """
    parts = [kind.split(".") for kind in kinds.split()]
    return [f"transformers.models.{name}.modeling_{name}.{kind}Attention" for name, kind in parts]


def asks_more(layer: Any, *given: Any) -> bool:
    """Whether weights of attention are asked for, which torch's fused kernel alone does not give, or anything else."""
    fused = not hasattr(layer, "config") or layer.config._attn_implementation == "sdpa"
    return not fused or any(x is not None and x is not False for x in given)


def transformers_bias(layer: Any, x: Tensor, mask: Tensor | None = None) -> Tensor | None:
    """The mask, and the bias of the windows of Swin."""
    if hasattr(layer, "relative_position_bias"):
        return over_windows(layer.relative_position_bias(), mask, x)
    if not hasattr(layer, "self"):
        return mask
    bias = layer.self.relative_position_bias_table[layer.self.relative_position_index]
    return over_windows(bias.permute(2, 0, 1)[None], mask, x)


def attend_transformers(
    layer: Any, attend: Attend, hidden_states: Tensor, attention_mask: Any = None, *given: Any, **others: Any
) -> Any:
    if asks_more(layer, *given, *others.values()):
        return OWN
    y = attend(hidden_states.mT, transformers_bias(layer, hidden_states, attention_mask)).mT
    return (y, None) if hasattr(layer, "config") else (y,)


def attend_segformer(
    layer: Any, attend: Attend, hidden_states: Tensor, height: int, width: int, *given: Any, **others: Any
) -> Any:
    """Keys are of the map made smaller."""
    if asks_more(layer, *given, *others.values()):
        return OWN
    maps = keys = hidden_states.mT.unflatten(2, (height, width))
    if (ratio := layer.sequence_reduction_ratio) > 1:
        keys = layer.sequence_reduction(hidden_states, height, width).mT.unflatten(2, (height // ratio, -1))
    return attend(maps, None, keys).flatten(2).mT, None


def example_segformer(layer: Any) -> tuple[Any, ...]:
    side = layer.sequence_reduction_ratio
    return random_map(2, 6 * side**2, layer.q_proj.in_features), 3 * side, 2 * side


WEIGHTS = 'it gives its weights, which a block does not: make the model with attn_implementation="sdpa"'
TRANSFORMERS = Row(
    weights=named("q_proj k_proj v_proj", "o_proj"),
    options={"num_heads": lambda layer: layer.q_proj.out_features // layer.head_dim},
    axes="b t c",
    drops=("attention_dropout", ""),
    refuses={"config._attn_implementation": WEIGHTS},
    around=("relative_position_bias",),
    bias=transformers_bias,
    call=attend_transformers,
)
CLIP = replace(TRANSFORMERS, weights=named("q_proj k_proj v_proj", "out_proj"), drops=("dropout", ""))
SEGFORMER = replace(
    TRANSFORMERS,
    weights=named("q_proj|k_proj v_proj", "o_proj"),
    around=("sequence_reduction",),
    call=attend_segformer,
    example=example_segformer,
)
MASKFORMER_SWIN = replace(
    TRANSFORMERS,
    weights=named("self.query self.key self.value", "output.dense"),
    options={"num_heads": lambda layer: layer.self.num_attention_heads},
    drops=("self.dropout", "output.dropout"),
    around=("self.relative_position_bias_table",),
)

# --- vit-pytorch, MONAI and YOLO --------------------------------------------------------------------------------------


def attend_inner_windows(layer: Any, attend: Attend, x: Tensor) -> Tensor:
    """Of MaxViT, as vit-pytorch has it, on a grid of windows ``b y x h w c``."""
    bias = layer.rel_pos_bias(layer.rel_pos_indices).permute(2, 0, 1)[None]
    return attend(layer.norm(x).flatten(0, 2).flatten(1, 2).mT, bias).mT.reshape(x.shape)


def example_inner_windows(layer: Any) -> tuple[Any, ...]:
    side = math.isqrt(len(layer.rel_pos_indices))
    return (random_map(2, 2, 1, side, side, layer.to_qkv.in_features),)


def convolved(layer: Any) -> Rows:
    """Of a convolution of YOLO, and its batch norm as long as it has one."""
    return folded(layer.conv, layer.bn) if hasattr(layer, "bn") else rows_of(layer.conv)


def yolo_weights(layer: Any) -> Weights:
    widths = (layer.key_dim, layer.key_dim, layer.head_dim) if hasattr(layer, "key_dim") else ()
    return {"qkv": heads_first(convolved(layer.qkv), layer.num_heads, *widths), "proj": convolved(layer.proj)}


def attend_yolo(layer: Any, attend: Attend, x: Tensor) -> Any:
    """With a convolution of the values, on a map whose tokens are cut into areas."""
    if layer.training:  # its batch norms are not those of one image
        return OWN
    weights, areas = yolo_weights(layer), getattr(layer, "area", 1)
    values, out = weights["qkv"], weights["proj"].weight
    of_values = slice(-out.shape[1], None)
    rows = x if x.shape[2] % areas == 0 else x.flatten(2)  # an area is some rows of the map
    y = attend(rows.unflatten(2, (areas, -1)).transpose(1, 2).flatten(0, 1))
    y = y.unflatten(0, (-1, areas)).transpose(1, 2).reshape(x.shape)
    v = F.conv2d(x, values.weight[of_values, :, None, None], values.bias[of_values])
    return y + F.conv2d(layer.pe(v), out[..., None, None])


VIT_PYTORCH = Row(
    weights=named("to_qkv", "to_out.0"),
    options={"num_heads": "heads"},
    axes="b t c",
    drops=("dropout", "to_out.1"),
    around=("norm",),
    call=lambda layer, attend, x: attend(layer.norm(x).mT).mT,
)
VIT_PYTORCH_MAXVIT = replace(
    VIT_PYTORCH, drops=("attend.1", "to_out.1"), call=attend_inner_windows, example=example_inner_windows
)
MONAI = Row(
    weights=lambda layer: named("qkv" if layer.use_combined_linear else "to_q to_k to_v", "out_proj")(layer),
    axes="b t c",
    drops=("drop_weights", "drop_output"),
    refuses=dict.fromkeys(("causal", "rel_positional_embedding", "attention_dtype", "save_attn"), "make it without"),
)
YOLO = Row(
    weights=yolo_weights,
    axes="b t c",
    around=("pe",),
    call=attend_yolo,
    example=lambda layer: (random_map(2, layer.pe.conv.in_channels, 4, 6),),
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
    y = x if x.dim() == 4 else x.transpose(1, 2)
    y = y if layer.group_norm is None else layer.group_norm(y)
    y = attend(y, None, None if context is None else context.transpose(1, 2))
    y = y if x.dim() == 4 else y.transpose(1, 2)
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


#: The processors that diffusers makes its attention with.
PROCESSORS = ("AttnProcessor", "AttnProcessor2_0")
ABSENT = ("norm_q", "norm_k", "norm_cross", "spatial_norm", "add_k_proj", "add_q_proj")
NATTEN = Row(
    weights=VIT.weights,
    options={"pattern": neighborhood_of, "scale": "scale"},
    axes="b w c",
    refuses={"rpb": "the block's tables are another: make the layer without rel_pos_bias"},
    size=lambda layer: tuple(2 * side * step for side, step in zip(layer.kernel_size, layer.dilation, strict=True)),
    dtype=torch.float32,  # natten has no kernel for more
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
def random_numbers(layer: Any, dtype: torch.dtype) -> Iterator[Any]:
    """The layer itself, which computes in this type with random weights; its own are left alone."""
    from keras import StatelessScope

    numbers = random_like([weight.value for weight in layer.weights])
    policies = {part: part.dtype_policy for part in layer.modules() if hasattr(part, "dtype_policy")}
    try:
        for part in policies:
            part.dtype_policy = str(dtype).removeprefix("torch.")
        with StatelessScope() as scope:
            for weight, values in zip(layer.weights, numbers, strict=True):
                scope.add_update((weight, values.to(dtype)))
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

# --- the rows ---------------------------------------------------------------------------------------------------------

#: By the path of the class.
ROWS: dict[str, Row] = {
    "torch.nn.modules.activation.MultiheadAttention": MULTIHEAD,
    **dict.fromkeys(
        of_transformers("vit.ViT vit_mae.ViTMAE vit_msn.ViTMSN deit.DeiT beit.Beit swin.Swin"), TRANSFORMERS
    ),
    **dict.fromkeys(
        of_transformers("ijepa.IJepa dinov2.Dinov2 dinov2_with_registers.Dinov2WithRegisters"), TRANSFORMERS
    ),
    **dict.fromkeys(of_transformers("clip.CLIP clipseg.CLIPSeg siglip.Siglip siglip2.Siglip2"), CLIP),
    **dict.fromkeys(of_transformers("segformer.Segformer"), SEGFORMER),
    "transformers.models.maskformer.modeling_maskformer_swin.MaskFormerSwinAttention": MASKFORMER_SWIN,
    "vit_pytorch.vit.Attention": VIT_PYTORCH,
    "vit_pytorch.simple_vit.Attention": replace(VIT_PYTORCH, weights=named("to_qkv", "to_out"), drops=("", "")),
    "vit_pytorch.max_vit.Attention": VIT_PYTORCH_MAXVIT,
    "monai.networks.blocks.selfattention.SABlock": MONAI,
    "ultralytics.nn.modules.block.Attention": YOLO,
    "ultralytics.nn.modules.block.AAttn": YOLO,
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

"""Conversions of the attention layers of torch, transformers, vit-pytorch, MONAI, YOLO and diffusers."""

from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_attn.networks.convert.conversion import CONVERSIONS, FALLBACK, Attend, LayerConversion, repeat_masks
from vision_attn.networks.convert.equivalence import random_map
from vision_attn.networks.convert.projection import Projection, input_weights, named_weights
from vision_attn.networks.convert.rotary import IN_CALLS, SIN_COS, CallRotation


def is_set(value: Any) -> bool:
    """Return True if an optional argument of a call is neither None nor False."""
    return value is not None and value is not False


#: The implementation of a layer of transformers, which has no public name.
ATTENTION = "config._attn_implementation"

# --- torch ------------------------------------------------------------------------------------------------------------


def multihead_weights(layer: Any) -> dict[str, Any]:
    """Read the weights; separate weights are used if keys and values have other channels than queries."""
    out = {"proj": Projection.read(layer.out_proj)}
    if layer.kdim != layer.vdim:
        what = f"kdim must equal vdim, got {layer.kdim} and {layer.vdim}"
        raise ValueError(f"{type(layer).__name__}: {what}. Blocks compute keys and values from one feature map")
    if layer.in_proj_weight is not None:
        return {"qkv": Projection(layer.in_proj_weight, layer.in_proj_bias), **out}
    biases = (None, None, None) if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    inputs = map(Projection, (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight), biases)
    return {**input_weights(*inputs), **out}


def attend_multihead(
    layer: Any, attend: Attend, query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any
) -> Any:
    order = ("key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")
    arguments = {"need_weights": True, **dict(zip(order, others, strict=False)), **options}
    arguments["average_attn_weights"] = None  # has no effect without weights
    if any(map(is_set, arguments.values())) or key is not value or query.dim() != 3 or query.is_nested:
        return FALLBACK
    x, context = (y.transpose(1, 2) if layer.batch_first else y.permute(1, 2, 0) for y in (query, key))
    y = attend(x, None, None if key is query else context)
    return y.transpose(1, 2) if layer.batch_first else y.permute(2, 0, 1), None


def example_multihead(layer: Any) -> tuple[Any, ...]:
    sizes = (5, layer.embed_dim), (4, layer.kdim)
    query, key = (random_map(2, *size).transpose(0, 1 - layer.batch_first) for size in sizes)
    key = query if layer.kdim == layer.embed_dim else key
    return query, key, key, None, False


NO_KEYS = "blocks have no additional keys. Create the layer without this option, and fine-tune it"
CONVERSIONS["torch.nn.modules.activation.MultiheadAttention"] = LayerConversion(
    weights=multihead_weights,
    dropouts=("dropout", ""),
    unsupported=dict.fromkeys(("bias_k", "bias_v", "add_zero_attn"), NO_KEYS),
    call=attend_multihead,
    example=example_multihead,
)

# --- transformers -----------------------------------------------------------------------------------------------------


def needs_layer(layer: Any, *options: Any) -> bool:
    """Return True if a call requires attention weights or an option that torch's fused kernel does not support."""
    return attrgetter(ATTENTION)(layer) != "sdpa" or any(map(is_set, options))


def transformers_bias(layer: Any, x: Tensor, mask: Tensor | None = None) -> Tensor | None:
    """Return the mask; for Swin, with the bias of the windows."""
    if not hasattr(layer, "relative_position_bias"):
        return mask
    bias = layer.relative_position_bias()
    return bias if mask is None else bias + repeat_masks(mask, x)


def attend_transformers(
    layer: Any, attend: Attend, hidden_states: Tensor, attention_mask: Any = None, *args: Any, **others: Any
) -> Any:
    if needs_layer(layer, *args, *others.values()):
        return FALLBACK
    y = attend(hidden_states.mT, transformers_bias(layer, hidden_states, attention_mask)).mT
    return y, None


def attend_segformer(
    layer: Any, attend: Attend, hidden_states: Tensor, height: int, width: int, *args: Any, **others: Any
) -> Any:
    """Run SegFormer's attention, whose keys are from a smaller feature map."""
    if needs_layer(layer, *args, *others.values()):
        return FALLBACK
    maps = keys = hidden_states.mT.unflatten(2, (height, width))
    if (ratio := layer.sequence_reduction_ratio) > 1:
        keys = layer.sequence_reduction(hidden_states, height, width).mT.unflatten(2, (height // ratio, -1))
    return attend(maps, None, keys).flatten(2).mT, None


def example_segformer(layer: Any) -> tuple[Any, ...]:
    side = layer.sequence_reduction_ratio
    return random_map(2, 6 * side**2, layer.q_proj.in_features), 3 * side, 2 * side


def attend_dinov3(
    layer: Any,
    attend: Attend,
    hidden_states: Tensor,
    attention_mask: Any = None,
    position_embeddings: Any = None,
    **others: Any,
) -> Any:
    """Run DINOv3's attention; the tokens without a rotation come first."""
    rotation = dict(zip(SIN_COS, reversed(position_embeddings), strict=True))
    return attend_transformers(layer, partial(attend, **rotation), hidden_states, attention_mask, **others)


def example_dinov3(layer: Any) -> tuple[Any, ...]:
    angles = random_map(2, 5, layer.head_dim)
    return random_map(2, 7, layer.embed_dim), None, (angles[0], angles[1])


EAGER = 'it may return attention weights, which blocks do not. Create the model with attn_implementation="sdpa"'
TRANSFORMERS = LayerConversion(
    weights=named_weights("q_proj k_proj v_proj", "o_proj"),
    options={"num_heads": lambda layer: layer.q_proj.out_features // layer.head_dim},
    dropouts=("attention_dropout", ""),
    unsupported={ATTENTION: EAGER},
    swap_only=("relative_position_bias",),
    bias=transformers_bias,
    call=attend_transformers,
)
CLIP = replace(TRANSFORMERS, weights=named_weights("q_proj k_proj v_proj", "out_proj"), dropouts=("dropout", ""))
#: Modules and class prefixes of transformers; the paths of the classes follow one scheme.
TRANSFORMERS_LAYERS = {
    "vit.ViT vit_mae.ViTMAE vit_msn.ViTMSN deit.DeiT beit.Beit swin.Swin": TRANSFORMERS,
    "ijepa.IJepa dinov2.Dinov2 dinov2_with_registers.Dinov2WithRegisters": TRANSFORMERS,
    "clip.CLIP clipseg.CLIPSeg siglip.Siglip siglip2.Siglip2": CLIP,
    "segformer.Segformer": replace(
        TRANSFORMERS,
        weights=named_weights("q_proj|k_proj v_proj", "o_proj"),
        swap_only=("sequence_reduction",),
        call=attend_segformer,
        example=example_segformer,
    ),
    "dinov3_vit.DINOv3ViT": replace(
        TRANSFORMERS,
        dropouts=("dropout", ""),
        options={**TRANSFORMERS.options, "position": CallRotation(halves=True)},
        call=attend_dinov3,
        example=example_dinov3,
        only_swap=IN_CALLS,
    ),
}
for names, row in TRANSFORMERS_LAYERS.items():
    for name, kind in (path.split(".") for path in names.split()):
        CONVERSIONS[f"transformers.models.{name}.modeling_{name}.{kind}Attention"] = row

# --- vit-pytorch, MONAI and YOLO --------------------------------------------------------------------------------------


def fold_batch_norm(layer: Any) -> Projection:
    """Return the projection of a YOLO convolution, fused with its batch norm, if it has one, in evaluation mode."""
    projection, norm = Projection.read(layer.conv), getattr(layer, "bn", None)
    if norm is None:
        return projection
    weight, bias = projection.with_bias()
    factor = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    return Projection(weight * factor[:, None], (bias - norm.running_mean) * factor + norm.bias)


def yolo_weights(layer: Any) -> dict[str, Any]:
    widths = (layer.key_dim, layer.key_dim, layer.head_dim) if hasattr(layer, "key_dim") else ()
    qkv = fold_batch_norm(layer.qkv).heads_first(layer.num_heads, *widths)
    return {"qkv": qkv, "proj": fold_batch_norm(layer.proj)}


def attend_yolo(layer: Any, attend: Attend, x: Tensor) -> Any:
    """Run YOLO's attention, within areas of the feature map, and add a convolution of the values."""
    if layer.training:  # batch norms use the statistics of the batch
        return FALLBACK
    weights, areas = yolo_weights(layer), getattr(layer, "area", 1)
    out = weights["proj"].weight
    weight, bias = (x[-out.shape[1] :] for x in weights["qkv"].with_bias())  # the rows of the values
    rows = x if x.shape[2] % areas == 0 else x.flatten(2)  # an area consists of complete rows of the feature map
    y = attend(rows.unflatten(2, (areas, -1)).transpose(1, 2).flatten(0, 1))
    y = y.unflatten(0, (-1, areas)).transpose(1, 2).reshape(x.shape)
    v = F.conv2d(x, weight[..., None, None], bias)
    return y + F.conv2d(layer.pe(v), out[..., None, None])


VIT_PYTORCH = LayerConversion(
    weights=named_weights("to_qkv", "to_out.0"),
    options={"num_heads": "heads"},
    dropouts=("dropout", "to_out.1"),
    swap_only=("norm",),
    call=lambda layer, attend, x: attend(layer.norm(x).mT).mT,
)
YOLO = LayerConversion(
    weights=yolo_weights,
    swap_only=("pe",),
    call=attend_yolo,
    example=lambda layer: (random_map(2, layer.pe.conv.in_channels, 4, 6),),
)
MONAI_OPTIONS = ("causal", "rel_positional_embedding", "attention_dtype", "save_attn")
CONVERSIONS |= {
    "vit_pytorch.vit.Attention": VIT_PYTORCH,
    "vit_pytorch.simple_vit.Attention": replace(
        VIT_PYTORCH, weights=named_weights("to_qkv", "to_out"), dropouts=("", "")
    ),
    "monai.networks.blocks.selfattention.SABlock": LayerConversion(
        weights=lambda layer: named_weights("qkv" if layer.use_combined_linear else "to_q to_k to_v", "out_proj")(
            layer
        ),
        dropouts=("drop_weights", "drop_output"),
        unsupported=dict.fromkeys(MONAI_OPTIONS, "create the layer without this option"),
    ),
    "ultralytics.nn.modules.block.Attention": YOLO,
    "ultralytics.nn.modules.block.AAttn": YOLO,
}

# --- diffusers --------------------------------------------------------------------------------------------------------


def attend_diffusers(
    layer: Any, attend: Attend, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, **others: Any
) -> Any:
    others.pop("temb", None)  # used only by spatial_norm, which is not supported
    x, context, default = hidden_states, encoder_hidden_states, type(layer.processor).__name__ in PROCESSORS
    default = default and x.dim() in (3, 4) and (context is not None or not layer.is_cross_attention)
    if not default or any(other is not None for other in others.values()):
        return FALLBACK
    y = x if x.dim() == 4 else x.mT
    y = y if layer.group_norm is None else layer.group_norm(y)
    y = attend(y, None, None if context is None else context.mT)
    y = y if x.dim() == 4 else y.mT
    return ((y + x) if layer.residual_connection else y) / layer.rescale_output_factor


def example_diffusers(layer: Any) -> tuple[Any, ...]:
    x = random_map(2, layer.query_dim, 3, 4)
    x = x if layer.residual_connection else x.flatten(2).mT
    return (x, random_map(2, 4, layer.cross_attention_dim)) if layer.is_cross_attention else (x,)


#: The default processors of diffusers.
PROCESSORS = ("AttnProcessor", "AttnProcessor2_0")
ABSENT = ("norm_q", "norm_k", "norm_cross", "spatial_norm", "add_k_proj", "add_q_proj")
CONVERSIONS["diffusers.models.attention_processor.Attention"] = LayerConversion(
    weights=named_weights("to_q to_k to_v", "to_out.0"),
    options={"num_heads": "heads", "scale": "scale"},
    dropouts=("", "to_out.1"),
    unsupported=dict.fromkeys(ABSENT, "blocks do not support it. Use a layer without it"),
    swap_only=("group_norm", "residual_connection", "rescale_output_factor"),
    call=attend_diffusers,
    example=example_diffusers,
)

"""timm's attention on maps: of MobileNetV4, BoTNet, HaloNet, its non-local block, and the pool of CLIP's networks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention.blocks import Attention
from vision_attn.attention.blocks.residual import AttentionBlock
from vision_attn.attention.patterns import Halo
from vision_attn.attention.position import RelPosDecomposed
from vision_attn.networks.convert.layer import LAYERS, OWN, Layer, converted, known
from vision_attn.networks.convert.proof import random_map
from vision_attn.networks.convert.refusal import check_carried
from vision_attn.networks.convert.timm_tokens import VIT
from vision_attn.networks.convert.weights import Rows, Weights, heads_first, residual, rows_of, side_by_side

__all__ = [
    "from_timm_attention2d",
    "from_timm_bottleneck_attn",
    "from_timm_halo_attn",
    "from_timm_multi_query_attention2d",
    "from_timm_non_local_attn",
]

MASKS = "calls with a mask"

# --- plain attention, and with one head of keys and values ------------------------------------------------------------

ATTENTION2D = "timm.layers.attention2d.Attention2d"
MULTI_QUERY = ("timm.layers.attention2d.MultiQueryAttention2d", "timm.layers.attention2d.MultiQueryAttentionV2")


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
    return converted(module, known(module, ATTENTION2D))


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
    return converted(module, known(module, *MULTI_QUERY))


def multi_query_weights(module: Any) -> Weights:
    q, k, v, out = (rows_of(getattr(module, name).proj) for name in ("query", "key", "value", "output"))
    return {"qkv": side_by_side(query=q, key=k, value=v), "proj": out}


def kernel_weights(module: Any) -> Weights:
    """Of kernels, those of queries and of the output with heads as an axis."""
    kernels = (module.query_proj.flatten(0, 1), module.key_proj.T, module.value_proj.T)
    return {"qkv": Rows(torch.cat(kernels)), "proj": Rows(module.out_proj.flatten(1))}


POOLED = "the block pools keys and values only (kv_stride), by averages: convert a layer with strides of 1"
LAYERS[ATTENTION2D] = replace(VIT, rank=2, last=False, settings=("num_heads", "dim_head"), own=MASKS)
LAYERS[MULTI_QUERY[0]] = Layer(
    multi_query_weights,
    lambda module: {"num_heads": module.num_heads, "num_kv_heads": 1},
    linear=("query.proj", "key.proj", "value.proj", "output.proj"),
    drops=("attn_drop", "output.drop"),
    without={"query_strides": POOLED, "kv_stride": POOLED},
    own=MASKS,
)
LAYERS[MULTI_QUERY[1]] = Layer(
    kernel_weights,
    lambda module: {"num_heads": module.num_heads, "num_kv_heads": 1},
    call=lambda module, attend, x, m=None: attend(x, None, m),
)

# --- with positions, and without an output projection -----------------------------------------------------------------

BOTTLENECK, HALO = "timm.layers.bottleneck_attn.BottleneckAttn", "timm.layers.halo_attn.HaloAttn"


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
    return converted(module, known(module, BOTTLENECK))


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
    return converted(module, known(module, HALO))


def tables(module: Any, begin: int = 0) -> dict[str, Tensor]:
    factor = module.scale if module.scale_pos_embed else 1.0
    names = ("height_rel", "width_rel")
    return {f"position.{name}": factor * getattr(module.pos_embed, name)[begin:] for name in names}


def halo_weights(module: Any) -> Weights:
    kv = heads_first(rows_of(module.kv), module.num_heads, module.dim_head_qk, module.dim_head_v)
    # Its offsets are counted from the corner of the halo: the first of its tables are never looked up.
    return {"qkv": side_by_side(q=rows_of(module.q), kv=kv), **tables(module, 2 * module.halo_size)}


def map_size(module: Any) -> tuple[int, int]:
    return module.pos_embed.height, module.pos_embed.width


def attend_map(module: Any, attend: Callable[..., Tensor], x: Tensor) -> Any:
    return module.pool(attend(x)) if len(x) and tuple(x.shape[2:]) == map_size(module) else OWN


def attend_blocks(module: Any, attend: Callable[..., Tensor], x: Tensor) -> Any:
    whole = len(x) and not x.shape[2] % module.block_size and not x.shape[3] % module.block_size
    return module.pool(attend(x)) if whole else OWN


STRIDED = {
    "pool": "the block has no stride: set pool to nn.Identity(), convert, and put nn.AvgPool2d(2, 2) behind the block"
}
LAYERS[BOTTLENECK] = Layer(
    lambda module: {"qkv": rows_of(module.qkv), **tables(module)},
    lambda module: {
        "num_heads": module.num_heads,
        "value_dim": module.dim_head_v,
        "position": RelPosDecomposed(feat_size=map_size(module)),
    },
    linear=("qkv",),
    around=STRIDED,
    settings=("num_heads", "scale_pos_embed"),
    size=map_size,
    call=attend_map,
)
LAYERS[HALO] = Layer(
    halo_weights,
    lambda module: {
        "num_heads": module.num_heads,
        "value_dim": module.dim_head_v,
        "pattern": Halo(module.block_size, module.halo_size),
        "position": RelPosDecomposed(),
    },
    linear=("q", "kv"),
    without={"block_stride": "the block has no stride: use avg_down=True"},
    around=STRIDED,
    settings=("num_heads", "block_size", "halo_size", "scale_pos_embed"),
    size=lambda module: (module.block_size, 2 * module.block_size),
    call=attend_blocks,
    own="maps that are not of whole blocks",
)

# --- added to its map, and the pool -----------------------------------------------------------------------------------

NON_LOCAL = "timm.layers.non_local_attn.NonLocalAttn"


def from_timm_non_local_attn(module: nn.Module) -> AttentionBlock:
    """The block that computes what ``timm.layers.NonLocalAttn`` does in evaluation mode: ``x + norm(attention(x))``.

    The batch norm becomes part of the output projection, and is trained as that.

    Args:
        module: the layer, in evaluation mode.

    Returns:
        The :class:`AttentionBlock2d` with one head, without a norm of its input, with a gate that is not trained.

    Raises:
        ValueError: it is no such layer, or in training mode.
        ConversionError: the block does not compute what the layer does.

    Source: https://github.com/huggingface/pytorch-image-models/blob/main/timm/layers/non_local_attn.py

    >>> from timm.layers.non_local_attn import NonLocalAttn
    >>> from_timm_non_local_attn(NonLocalAttn(64).eval())(torch.randn(2, 64, 14, 10)).shape
    torch.Size([2, 64, 14, 10])
    """
    layer = replace(known(module, NON_LOCAL), weights=normed_weights)
    check_carried(module, "training", not module.training, "its batch norm is not that of one map: call .eval()")
    return converted(module, layer, lambda x, **options: residual(layer.block(x)))


def non_local_weights(module: Any) -> Weights:
    t, p, g = map(rows_of, (module.t, module.p, module.g))
    return {"qkv": side_by_side(t=t, p=p, g=g), "proj": rows_of(module.z)}


def normed_weights(module: Any) -> Weights:
    """With the batch norm in the output projection."""
    weights, norm = non_local_weights(module), module.norm
    factor, out = norm.weight * torch.rsqrt(norm.running_var + norm.eps), weights["proj"]
    return {**weights, "proj": Rows(out.weight * factor[:, None], (out.bias - norm.running_mean) * factor + norm.bias)}


def attend_pool(module: Any, attend: Callable[..., Tensor], x: Tensor, pre_logits: bool = False) -> Any:
    """The token of a map, which alone has to attend to it, or the map."""
    if pre_logits or tuple(x.shape[2:]) != tuple(module.feat_size) or (module.training and module.drop.p):
        return OWN
    tokens = x.flatten(2)
    first = tokens.mean(2, keepdim=True) if module.cls_token is None else module.cls_token.mT.expand(len(x), -1, -1)
    tokens = torch.cat([first, tokens], dim=2) + module.pos_embed.T
    if module.pool_type == "token":
        return attend(tokens[..., :1], None, tokens)[..., 0]
    return attend(tokens)[..., 1:].unflatten(2, x.shape[2:])


LAYERS[NON_LOCAL] = Layer(
    non_local_weights,
    lambda module: {"num_heads": 1, "scale": module.scale},
    linear=("t", "p", "g", "z"),
    settings=("scale",),
    call=lambda module, attend, x: module.norm(attend(x)) + x,
)
LAYERS["timm.layers.attention_pool2d.AttentionPool2d"] = replace(
    VIT,
    call=attend_pool,
    arguments=lambda module: (random_map(2, module.pos_embed.shape[1], *module.feat_size),),
    own="maps of another size, and calls before the logits",
)

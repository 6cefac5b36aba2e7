"""The other way: blocks of ours as layers of torch, timm and diffusers."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vision_attn.attention.blocks import Attention
from vision_attn.networks.convert.proof import difference, random_map
from vision_attn.networks.convert.weights import filled

__all__ = ["to_diffusers_attention", "to_timm_attention", "to_torch_mha"]

Layer = TypeVar("Layer", bound=nn.Module)


def to_torch_mha(block: Attention) -> nn.MultiheadAttention:
    """The ``nn.MultiheadAttention`` that does with tokens what a block does with the positions of a map.

    Args:
        block: a block that attends to its whole map, in heads of ``channels / num_heads``, without further parts.

    Returns:
        The layer, ``batch_first``, with copies of the weights.

    Raises:
        ValueError: the block does what the layer does not; the message says what.

    >>> from vision_attn.attention.blocks import Attention2d
    >>> layer = to_torch_mha(Attention2d(64, 4))
    >>> layer(*[torch.randn(2, 140, 64)] * 3)[0].shape
    torch.Size([2, 140, 64])
    """
    check_plain(block, "attn_drop")
    if (block.qkv.bias is None) != (block.proj.bias is None):
        raise ValueError("block must have both biases, of qkv and of proj, or none; give it one of zeros")

    def convert(block: Attention) -> nn.MultiheadAttention:
        options = {"dropout": block.attn_drop, "bias": block.qkv.bias is not None, "batch_first": True}
        layer = nn.MultiheadAttention(block.channels, block.num_heads, device="meta", **options)
        names = {"in_proj_": "qkv", "out_proj.": "proj"}
        return filled(layer, tensors_of(block, names), training=block.training)

    return shown(block, convert)


def to_timm_attention(block: Attention) -> nn.Module:
    """The ``timm.layers.Attention``, of ViT, that does with tokens what a block does with the positions of a map.

    Args:
        block: a block that attends to its whole map, without further parts but norms of queries and keys.

    Returns:
        The layer, with copies of the weights.

    Raises:
        ValueError: the block does what the layer does not; the message says what.

    >>> from vision_attn.attention.blocks import Attention2d
    >>> to_timm_attention(Attention2d(64, 4))(torch.randn(2, 140, 64)).shape
    torch.Size([2, 140, 64])
    """
    check_plain(block, "key_dim", "attn_drop", "proj_drop", "qk_norm")

    def convert(block: Attention) -> nn.Module:
        layer = import_module("timm.layers").Attention(
            block.channels,
            block.num_heads,
            attn_head_dim=block.key_dim,
            qkv_bias=block.qkv.bias is not None,
            qk_norm=block.q_norm is not None,
            norm_layer=nn.LayerNorm,
            proj_bias=block.proj.bias is not None,
            attn_drop=block.attn_drop,
            proj_drop=block.proj_drop.p,
            device="meta",
        )
        for name in ("q_norm", "k_norm"):
            if isinstance(ours := getattr(block, name), nn.LayerNorm):
                getattr(layer, name).eps = ours.eps
        names = {"qkv.": "qkv", "proj.": "proj", "q_norm.": "q_norm", "k_norm.": "k_norm"}
        return filled(layer, tensors_of(block, names), training=block.training)

    return shown(block, convert)


def to_diffusers_attention(block: Attention) -> nn.Module:
    """The ``Attention`` of diffusers that does with tokens what a block does with the positions of a map.

    Args:
        block: a block that attends to its whole map, without further parts.

    Returns:
        The layer, with copies of the weights.

    Raises:
        ValueError: the block does what the layer does not; the message says what.

    >>> from vision_attn.attention.blocks import Attention2d
    >>> to_diffusers_attention(Attention2d(64, 4))(torch.randn(2, 140, 64)).shape
    torch.Size([2, 140, 64])
    """
    check_plain(block, "key_dim", "proj_drop")

    def convert(block: Attention) -> nn.Module:
        with torch.device("meta"):
            layer = import_module("diffusers.models.attention_processor").Attention(
                block.channels,
                heads=block.num_heads,
                dim_head=block.key_dim,
                bias=block.qkv.bias is not None,
                out_bias=block.proj.bias is not None,
                dropout=block.proj_drop.p,
            )
        fused = tensors_of(block, {"to_out.0.": "proj", "": "qkv"})
        for key in ("weight", "bias"):
            if key in fused:
                parts = zip("qkv", fused.pop(key).chunk(3), strict=True)
                fused |= {f"to_{name}.{key}": rows for name, rows in parts}
        return filled(layer, fused, training=block.training)

    return shown(block, convert)


def check_plain(block: Attention, *carried: str) -> None:
    """Refuse a block that does more than ``softmax(q kᵀ) v`` of a whole map, but for the arguments that are carried."""
    if not isinstance(block, Attention):
        raise ValueError(f"block must be an Attention1d, Attention2d or Attention3d; got {type(block).__name__}")
    own = dict(block.unusual())
    if "key_dim" in carried and block.value_dim == block.key_dim:
        own.pop("value_dim", None)
    norm = "qk_norm" if isinstance(block.q_norm, nn.LayerNorm) else "qk_norm='cosine'"
    told: dict[str, Any] = {
        "pattern": not block.partitioner.is_global,
        "position": block.position,
        "output_gate": block.gate,
        "proj_drop": block.proj_drop.p,
        norm: block.q_norm,
    }
    names = [*own, *(name for name, value in told.items() if value not in (None, False, 0.0))]
    if other := [name for name in names if name not in carried]:
        raise ValueError(f"block must not have its own {', '.join(other)}, of which the layer has no counterpart")


def tensors_of(block: Attention, names: dict[str, str]) -> dict[str, Tensor]:
    """The parameters of a block by their names in a layer, convolutions as matrices."""
    parameters = dict(block.named_parameters())
    return {
        f"{theirs}{key}": x.flatten(1) if x.dim() > 1 else x
        for theirs, ours in names.items()
        for key in ("weight", "bias")
        if (x := parameters.get(f"{ours}.{key}")) is not None
    }


def shown(block: Attention, convert: Callable[[Attention], Layer]) -> Layer:
    """The layer, after it was seen to be right for a copy of the block with random weights."""

    def compute(twin: Attention, x: Tensor) -> Tensor:
        layer, tokens = convert(twin), x.flatten(2).mT
        y = layer(*[tokens] * 3)[0] if isinstance(layer, nn.MultiheadAttention) else layer(tokens)
        return y.mT.view(x.shape)

    difference(block, compute, lambda twin: (random_map(1, twin.channels, *(2, 3, 4)[: twin.rank]),))
    with torch.inference_mode(False), torch.enable_grad():
        return convert(block)

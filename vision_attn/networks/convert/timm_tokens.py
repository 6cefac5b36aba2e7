"""timm's attention on tokens: of ViT, and of networks whose attention has the same parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention.blocks import Attention
from vision_attn.networks.convert.layer import LAYERS, OWN, Layer, converted, known
from vision_attn.networks.convert.refusal import check_carried
from vision_attn.networks.convert.weights import Rows, Weights, heads_first, rows_of, side_by_side, with_bias

__all__ = ["VIT", "from_timm_attention", "fused_rows"]

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
    return converted(module, known(module, *ON_TOKENS, *ON_MAPS), rank=rank)


def check_norms(module: Any) -> None:
    norms = [getattr(module, name, None) or nn.Identity() for name in ("q_norm", "k_norm")]
    for name, part in zip(("q_norm", "k_norm"), norms, strict=True):
        whole = isinstance(part, nn.LayerNorm) and part.weight is not None and part.bias is not None
        remedy = "the block normalises queries and keys by layer norm, with weight and bias, or not"
        check_carried(module, name, whole or isinstance(part, nn.Identity), remedy)
    remedy = f"the block normalises queries and keys, or neither, and q_norm is {norms[0]}"
    check_carried(module, "k_norm", type(norms[0]) is type(norms[1]), remedy)


def fused_rows(module: Any) -> dict[str, Rows]:
    """Of what timm mostly calls ``qkv`` and ``proj``."""
    if getattr(module, "qkv", None) is None:
        qkv = side_by_side(**{name: rows_of(getattr(module, name)) for name in "qkv"})
    else:
        qkv = rows_of(module.qkv)
    if getattr(module, "q_bias", None) is not None:
        qkv = Rows(qkv.weight, torch.cat([module.q_bias, torch.zeros_like(module.q_bias), module.v_bias]))
    if getattr(module, "head_first", False):
        qkv = heads_first(qkv, module.num_heads)
    return {"qkv": qkv, "proj": rows_of(module.proj)}


def vit_weights(module: Any) -> Weights:
    weights: dict[str, Any] = dict(fused_rows(module))
    if getattr(module, "gate", None) is not None:
        weights["gate"] = with_bias(rows_of(module.gate))
    for name in ("q_norm", "k_norm"):
        if isinstance(norm := getattr(module, name, None), nn.LayerNorm):
            weights |= {f"{name}.weight": norm.weight, f"{name}.bias": norm.bias}
    return weights


def vit_bias(module: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Any:
    return OWN if is_causal else attn_mask


def beit_bias(module: Any, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Any:
    if module.relative_position_bias_table is None:
        return shared_rel_pos_bias
    own = module._get_rel_pos_bias()
    return own if shared_rel_pos_bias is None else own + shared_rel_pos_bias


def relative_bias(module: Any, x: Tensor, shared_rel_pos: Tensor | None = None) -> Any:
    return shared_rel_pos if module.rel_pos is None else module.rel_pos.get_bias()


def attend_strided(module: Any, attend: Callable[..., Tensor], x: Tensor) -> Any:
    """Of NextViT, whose keys are of tokens averaged some in a row."""
    x = x.transpose(1, 2)
    keys = None if module.sr is None else module.norm(module.sr(x))
    return attend(x, None, keys).transpose(1, 2)


def efficientformer_weights(module: Any) -> Weights:
    widths = (module.key_dim, module.key_dim, module.val_dim)
    return {"qkv": heads_first(rows_of(module.qkv), module.num_heads, *widths), "proj": rows_of(module.proj)}


LEFT_AROUND = "the block has none: let swap_ exchange it in its network, which keeps what is around the block"
UNSCALED = {"norm": "the block has no norm before its output: make the layer without scale_norm"}
VIT = Layer(
    vit_weights,
    rank=1,
    last=True,
    linear=("qkv", "q", "k", "v", "gate", "proj"),
    without=UNSCALED,
    around=dict.fromkeys(("rel_pos", "relative_position_bias_table", "sr"), LEFT_AROUND),
    check=check_norms,
)
LAYERS |= {
    **dict.fromkeys(ON_TOKENS, VIT),
    **dict.fromkeys(ON_MAPS, replace(VIT, rank=2, last=False)),
    **dict.fromkeys(ON_TOKENS[:2], replace(VIT, bias=vit_bias, own="causal calls")),  # the second in older versions
    "timm.models.beit.Attention": replace(
        VIT,
        bias=beit_bias,
        size=lambda module: (len(module.relative_position_index) if module.window_size else 5,),
    ),
    "timm.models.efficientformer.Attention": replace(
        VIT,
        weights=efficientformer_weights,
        bias=lambda module, x: module.attention_biases[:, module.attention_bias_idxs][None],
        size=lambda module: (module.attention_biases.shape[1],),
        settings=("num_heads", "key_dim", "val_dim"),
    ),
    "timm.models.nextvit.EfficientAttention": replace(
        VIT, call=attend_strided, without={}, size=lambda module: (8,), settings=("num_heads", "sr_ratio")
    ),
    "timm.models.vision_transformer_relpos.RelPosAttention": replace(
        VIT,
        bias=relative_bias,
        size=lambda module: (5 if module.rel_pos is None else module.rel_pos.get_bias().shape[2],),
    ),
}

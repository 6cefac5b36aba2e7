"""torch's multi-head attention and encoder layer, on tokens where blocks here take maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention.blocks import Attention, TransformerBlock2d
from vision_attn.networks.convert.layer import LAYERS, OWN, Layer, converted, known
from vision_attn.networks.convert.proof import difference, random_map
from vision_attn.networks.convert.refusal import (
    check_carried,
    check_kind,
    check_source,
    drop_of,
)
from vision_attn.networks.convert.weights import Rows, Weights, filled, input_projections, parameters_of, rows_of

__all__ = ["from_torch_encoder_layer", "from_torch_mha"]

MULTIHEAD = "torch.nn.modules.activation.MultiheadAttention"


# --- multi-head attention ---------------------------------------------------------------------------------------------


def from_torch_mha(module: nn.MultiheadAttention, *, rank: int = 2) -> Attention:
    """The block that does with the positions of a map what an ``nn.MultiheadAttention`` does with tokens.

    ``module(t, t, t)`` of the positions of ``x``, row-major, becomes ``block(x)``; with keys and values of other
    channels (``kdim`` and ``vdim``) it is ``block(x, context=y)``. If these two differ, ``y`` holds the channels of the
    keys followed by those of the values. The block's projection then has zeros from values to keys and back, which are
    trained like the rest. torch's bool mask says where not to look, ours where to look: give ``~mask``.

    Args:
        module: the layer.
        rank: axes of the maps that the block is for: 1, 2 or 3.

    Returns:
        :class:`Attention1d`, :class:`Attention2d` or :class:`Attention3d` by ``rank``, with copies of the weights.

    Raises:
        ValueError: it is no such layer, or does what the block does not, as with ``add_bias_kv``.
        ConversionError: the block does not compute what the layer does.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html

    >>> from_torch_mha(nn.MultiheadAttention(64, num_heads=4))(torch.randn(2, 64, 14, 10)).shape
    torch.Size([2, 64, 14, 10])
    """
    return converted(module, known(module, MULTIHEAD), rank=rank)


def multihead_weights(module: Any) -> Weights:
    """Of one weight, or of three where keys and values are of other channels; the biases are one even then."""
    out = rows_of(module.out_proj)
    if module.in_proj_weight is not None:
        return {"qkv": Rows(module.in_proj_weight, module.in_proj_bias), "proj": out}
    weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    q, k, v = map(Rows, weights, biases)
    if module.vdim != module.kdim:  # channels of keys and of values beside each other, as of one map
        bias = None if k.bias is None or v.bias is None else torch.cat([k.bias, v.bias])
        return {"q": q, "kv": Rows(torch.block_diag(k.weight, v.weight), bias), "proj": out}
    return {**input_projections(q, k, v), "proj": out}


def attend_multihead(
    module: Any,
    attend: Callable[..., Tensor],
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
    apart = module.vdim != module.kdim
    if masked or need_weights or (key is not value and not apart) or query.dim() != 3 or query.is_nested:
        return OWN
    source = torch.cat([key, value], dim=2) if apart else key
    x, context = (y.transpose(1, 2) if module.batch_first else y.permute(1, 2, 0) for y in (query, source))
    y = attend(x, None, None if source is query else context)
    return y.transpose(1, 2) if module.batch_first else y.permute(2, 0, 1), None


def example_multihead(module: Any) -> tuple[Any, ...]:
    query, key, value = random_map(2, 5, module.embed_dim), random_map(2, 4, module.kdim), random_map(2, 4, module.vdim)
    if not module.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    if module.kdim == module.vdim:
        key = value = query if module.kdim == module.embed_dim else key
    return query, key, value, None, False


NO_KEYS = "the block has no keys but those of its map: make the layer without it and fine-tune it"
LAYERS[MULTIHEAD] = Layer(
    multihead_weights,
    rank=1,
    linear=("out_proj",),
    drops=("dropout", ""),
    without=dict.fromkeys(("bias_k", "bias_v", "add_zero_attn"), NO_KEYS),
    settings=("num_heads", "dropout"),
    call=attend_multihead,
    arguments=example_multihead,
    own="calls with a mask, with need_weights, or with values that are not the keys",
)


# --- the encoder layer ------------------------------------------------------------------------------------------------


def from_torch_encoder_layer(module: nn.TransformerEncoderLayer) -> TransformerBlock2d:
    """The block that does with the positions of a map what an ``nn.TransformerEncoderLayer`` does with tokens.

    Args:
        module: the layer, with its norms first or last, with ``relu`` or ``gelu``.

    Returns:
        The block, with copies of the weights.

    Raises:
        ValueError: it is no such layer, or does what the block does not, as with another activation.
        ConversionError: the block does not compute what the layer does.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.TransformerEncoderLayer.html

    >>> from_torch_encoder_layer(nn.TransformerEncoderLayer(64, nhead=4))(torch.randn(2, 64, 7, 5)).shape
    torch.Size([2, 64, 7, 5])
    """
    check_kind("module", module, "torch.nn.modules.transformer.TransformerEncoderLayer")
    check_encoder_layer(module)

    def compute(twin: Any, x: Tensor) -> Tensor:
        tokens = x if twin.self_attn.batch_first else x.transpose(0, 1)
        y = encoder_layer(twin)(tokens.mT[..., None]).flatten(2).mT
        return y if twin.self_attn.batch_first else y.transpose(0, 1)

    # A gradient is asked for, else the layer is computed at once from its weights, whatever its parts do.
    difference(module, compute, lambda twin: (random_map(2, 5, twin.self_attn.embed_dim).requires_grad_(),))
    with torch.inference_mode(False), torch.enable_grad():
        return encoder_layer(module)


def check_encoder_layer(module: nn.TransformerEncoderLayer) -> None:
    check_source(module, "linear1", "linear2")
    inner, first = module.self_attn, module.linear1.bias
    check_kind("module.self_attn", inner, MULTIHEAD)
    LAYERS[MULTIHEAD].refuse(inner)
    for name in ("norm1", "norm2"):
        norm = getattr(module, name)
        weighted = isinstance(norm, nn.LayerNorm) and norm.weight is not None
        check_carried(module, name, weighted, "the block's norms are layer norms with a weight")
    for name in ("linear2", "norm1", "norm2"):
        alike = (getattr(module, name).bias is None) == (first is None)
        remedy = (
            f"linear layers and norms have a bias or none has, and linear1 has {'none' if first is None else 'one'}"
        )
        check_carried(module, f"{name}.bias", alike, remedy)
    own, eps, drop = inner.embed_dim, module.norm1.eps, drop_of(module, "dropout")
    for path, carried, remedy in (
        ("self_attn.kdim", inner.kdim == own, f"the block attends to its {own} channels"),
        ("norm2.eps", module.norm2.eps == eps, f"the block has one, and norm1's is {eps}"),
        ("activation", activation_of(module) is not None, "the block has 'relu' and 'gelu', by the error function"),
        ("dropout2", drop_of(module, "dropout2") == drop, f"the block has one probability, and dropout's is {drop}"),
    ):
        check_carried(module, path, carried, remedy)


def encoder_layer(module: nn.TransformerEncoderLayer) -> TransformerBlock2d:
    inner = module.self_attn
    block = TransformerBlock2d(
        inner.embed_dim,
        inner.num_heads,
        mlp_ratio=len(module.linear1.weight) / inner.embed_dim,
        norm_first=module.norm_first,
        activation=activation_of(module) or "",
        mlp_drop=drop_of(module, "dropout"),
        bias=module.linear1.bias is not None,
        qkv_bias=inner.in_proj_bias is not None,
        proj_bias=inner.out_proj.bias is not None,
        eps=module.norm1.eps,
        attn_drop=inner.dropout,
        proj_drop=drop_of(module, "dropout1"),
        device="meta",
    )
    projections = {f"attn.{name}": rows for name, rows in multihead_weights(inner).items()}
    projections |= {"fc1": rows_of(module.linear1), "fc2": rows_of(module.linear2)}
    norms = {key: x for key, x in module.named_parameters() if key.startswith("norm")}
    return filled(block, {**norms, **parameters_of(projections)}, training=module.training)


def activation_of(module: nn.TransformerEncoderLayer) -> str | None:
    """The name of its activation; None if the block has no such one."""
    act: Any = module.activation
    if act in (F.relu, torch.relu) or isinstance(act, nn.ReLU):
        return "relu"
    if act is F.gelu or (isinstance(act, nn.GELU) and act.approximate == "none"):
        return "gelu"
    return None

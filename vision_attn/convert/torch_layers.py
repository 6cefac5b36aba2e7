"""torch's multi-head attention and encoder layer, which take tokens where blocks here take maps."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.blocks import Attention, TransformerBlock2d
from vision_attn.convert.filling import attention, check_rank, convolution, filled
from vision_attn.convert.proof import SIZES, from_tokens, proven, to_tokens
from vision_attn.convert.refusals import check_carried, check_kind, check_parameters, check_projections, drop_of, shown
from vision_attn.convert.rows import Rows, input_projections, rows_of

__all__ = ["from_torch_encoder_layer", "from_torch_mha"]


def from_torch_mha(module: nn.MultiheadAttention, *, rank: int = 2) -> Attention:
    """The block that does with the positions of a map what an ``nn.MultiheadAttention`` does with tokens.

    ``module(t, t, t)`` of the positions of ``x``, row-major, becomes ``block(x)``; with keys and values of other
    channels (``kdim`` and ``vdim``) it is ``block(x, context=y)``. torch's bool mask says where not to look, ours where
    to look: give ``~mask``.

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
    check_kind("module", module, "torch.nn.MultiheadAttention", "torch.nn.modules.activation.MultiheadAttention")
    check_rank(rank)
    check_parameters(module)
    check_multihead(module)
    return proven(
        module,
        lambda source: multihead(source, rank),
        run_multihead,
        shape=(module.embed_dim, *SIZES[rank]),
    )


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
    check_kind(
        "module", module, "torch.nn.TransformerEncoderLayer", "torch.nn.modules.transformer.TransformerEncoderLayer"
    )
    check_encoder_layer(module)
    return proven(module, encoder_layer, run_encoder_layer, shape=(module.self_attn.embed_dim, *SIZES[2]))


# --- multi-head attention ---------------------------------------------------------------------------------------------


def check_multihead(module: nn.MultiheadAttention) -> None:
    check_projections(module, "out_proj")
    for name, bias in (("bias_k", module.bias_k), ("bias_v", module.bias_v)):
        remedy = "the block has no keys but those of its map: make the layer with add_bias_kv=False and fine-tune it"
        check_carried(module, name, bias, bias is None, remedy)
    remedy = "the block attends to its map only: set it to False and fine-tune the layer"
    check_carried(module, "add_zero_attn", module.add_zero_attn, not module.add_zero_attn, remedy)
    remedy = "the block takes keys and values from one map: both must have its channels"
    check_carried(module, "vdim", module.vdim, module.vdim == module.kdim, f"{remedy}, and kdim is {module.kdim}")


def multihead(module: nn.MultiheadAttention, rank: int) -> Attention:
    return attention(
        rank,
        {**multihead_projections(module), "proj": rows_of(module.out_proj)},
        training=module.training,
        num_heads=module.num_heads,
        attn_drop=module.dropout,
    )


def multihead_projections(module: nn.MultiheadAttention) -> dict[str, Rows]:
    """Of one weight, or of three where keys and values are of other channels; the biases are one even then."""
    weights: tuple[Tensor, ...] = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    biases = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    return input_projections(*map(Rows, weights, biases))


def run_multihead(module: nn.MultiheadAttention, x: Tensor, context: Tensor | None = None) -> Tensor:
    query, key = (to_tokens(y) for y in (x, x if context is None else context))
    if not module.batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    y, _ = module(query, key, key, need_weights=False)
    return from_tokens(y if module.batch_first else y.transpose(0, 1), x.shape[2:])


# --- the encoder layer ------------------------------------------------------------------------------------------------


def check_encoder_layer(module: nn.TransformerEncoderLayer) -> None:
    check_parameters(module)
    check_kind(
        "module.self_attn",
        module.self_attn,
        "torch.nn.MultiheadAttention",
        "torch.nn.modules.activation.MultiheadAttention",
    )
    inner = module.self_attn
    check_multihead(inner)
    remedy = f"the block attends to its own map, of {inner.embed_dim} channels"
    check_carried(module, "self_attn.kdim", inner.kdim, inner.kdim == inner.embed_dim, remedy)
    check_projections(module, "linear1", "linear2")
    for name in ("norm1", "norm2"):
        norm = getattr(module, name)
        weighted = isinstance(norm, nn.LayerNorm) and norm.weight is not None
        check_carried(module, name, norm, weighted, "the block's norms are layer norms with a weight")
    biased, first = module.linear1.bias is not None, shown(module.linear1.bias)
    for name in ("linear2", "norm1", "norm2"):
        bias = getattr(module, name).bias
        remedy = f"linear layers and norms of the block have a bias or none has, and linear1's is {first}"
        check_carried(module, f"{name}.bias", bias, (bias is not None) == biased, remedy)
    eps = module.norm2.eps
    remedy = f"the block has one eps for both norms, and norm1's is {module.norm1.eps}"
    check_carried(module, "norm2.eps", eps, eps == module.norm1.eps, remedy)
    known = activation_of(module) is not None
    remedy = "the block has 'relu' and 'gelu', by the error function"
    check_carried(module, "activation", module.activation, known, remedy)
    hidden, last = drop_of(module, "dropout"), drop_of(module, "dropout2")
    remedy = f"the block has one probability for hidden elements and output, and dropout.p is {hidden}"
    check_carried(module, "dropout2.p", last, last == hidden, remedy)


def encoder_layer(module: nn.TransformerEncoderLayer) -> TransformerBlock2d:
    inner = module.self_attn
    norms = {f"{name}.{key}": p for name in ("norm1", "norm2") for key, p in getattr(module, name).named_parameters()}
    projections = {
        **{f"attn.{name}": rows for name, rows in multihead_projections(inner).items()},
        "attn.proj": rows_of(inner.out_proj),
        "fc1": rows_of(module.linear1),
        "fc2": rows_of(module.linear2),
    }
    block = TransformerBlock2d(
        inner.embed_dim,
        inner.num_heads,
        mlp_ratio=len(projections["fc1"].weight) / inner.embed_dim,
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
    tensors = {key: x for name, rows in projections.items() for key, x in convolution(name, rows).items()}
    return filled(block, {**norms, **tensors}, training=module.training)


def activation_of(module: nn.TransformerEncoderLayer) -> str | None:
    """The name of its activation; None if the block has no such one."""
    act: Any = module.activation
    if act in (F.relu, torch.relu) or isinstance(act, nn.ReLU):
        return "relu"
    if act is F.gelu or (isinstance(act, nn.GELU) and act.approximate == "none"):
        return "gelu"
    return None


def run_encoder_layer(module: nn.TransformerEncoderLayer, x: Tensor, context: Tensor | None = None) -> Tensor:
    tokens = to_tokens(x).requires_grad_()  # else it is computed at once from its weights, whatever its parts do
    batch_first = module.self_attn.batch_first
    with torch.enable_grad():
        y = module(tokens if batch_first else tokens.transpose(0, 1)).detach()
    return from_tokens(y if batch_first else y.transpose(0, 1), x.shape[2:])

"""torch's multi-head attention and encoder layer, and separate linear layers, on tokens where blocks here take maps."""

from __future__ import annotations

import re
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.blocks import Attention, TransformerBlock2d
from vision_attn.checks import check_count, check_divides
from vision_attn.convert.proof import (
    check_carried,
    check_kind,
    check_pointwise,
    check_source,
    drop_of,
    from_tokens,
    proven,
    to_tokens,
)
from vision_attn.convert.weights import Rows, attention, check_rank, convolution, filled, input_projections, rows_of

__all__ = ["from_linear_projections", "from_torch_encoder_layer", "from_torch_mha"]

MULTIHEAD = "torch.nn.modules.activation.MultiheadAttention"


# --- multi-head attention ---------------------------------------------------------------------------------------------


def from_torch_mha(module: nn.MultiheadAttention, *, rank: int = 2) -> Attention:
    """The block that does with the positions of a map what an ``nn.MultiheadAttention`` does with tokens.

    ``module(t, t, t)`` of the positions of ``x``, row-major, becomes ``block(x)``; with keys and values of other
    channels (``kdim`` and ``vdim``) it is ``block(x, context=y)``; where those two differ, ``y`` holds the channels of
    keys and then those of values, and what keys have to do with the latter is zeros, which are trained like the rest.
    torch's bool mask says where not to look, ours where to look: give ``~mask``.

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
    check_kind("module", module, MULTIHEAD)
    check_rank(rank)
    check_multihead(module)

    return proven(module, lambda module: multihead(module, rank), run_multihead)


def multihead(module: nn.MultiheadAttention, rank: int) -> Attention:
    options = {"num_heads": module.num_heads, "attn_drop": module.dropout}
    return attention(rank, multihead_rows(module), training=module.training, **options)


def multihead_rows(module: nn.MultiheadAttention) -> dict[str, Rows]:
    return {**multihead_projections(module), "proj": rows_of(module.out_proj)}


def check_multihead(module: nn.MultiheadAttention) -> None:
    check_source(module, "out_proj")
    no_keys = "the block has no keys but those of its map: make the layer with add_bias_kv=False and fine-tune it"
    check_carried(
        module,
        ("bias_k", module.bias_k is None, no_keys),
        ("bias_v", module.bias_v is None, no_keys),
        ("add_zero_attn", not module.add_zero_attn, "the block has no keys but those of its map: set it to False"),
    )


def multihead_projections(module: nn.MultiheadAttention) -> dict[str, Rows]:
    """Of one weight, or of three where keys and values are of other channels; the biases are one even then."""
    if module.in_proj_weight is not None:
        return {"qkv": Rows(module.in_proj_weight, module.in_proj_bias)}
    weights: tuple[Tensor, ...] = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    q, k, v = map(Rows, weights, biases)
    if module.vdim != module.kdim:  # channels of keys and of values beside each other, as of one map
        bias = None if k.bias is None or v.bias is None else torch.cat([k.bias, v.bias])
        return {"q": q, "kv": Rows(torch.block_diag(k.weight, v.weight), bias)}
    return input_projections(q, k, v)


def run_multihead(module: nn.MultiheadAttention, x: Tensor, context: Tensor | None = None) -> Tensor:
    query, key = (to_tokens(y) for y in (x, x if context is None else context))
    if not module.batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    apart = module.vdim != module.kdim
    key, value = key.split([module.kdim, module.vdim], dim=2) if apart else (key, key)
    y, _ = module(query, key, value, need_weights=False)
    return from_tokens(y if module.batch_first else y.transpose(0, 1), x.shape[2:])


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
    return proven(module, encoder_layer, run_encoder_layer)


def check_encoder_layer(module: nn.TransformerEncoderLayer) -> None:
    check_source(module, "linear1", "linear2")
    inner, first = module.self_attn, module.linear1.bias
    check_kind("module.self_attn", inner, MULTIHEAD)
    check_multihead(inner)
    for name in ("norm1", "norm2"):
        norm = getattr(module, name)
        weighted = isinstance(norm, nn.LayerNorm) and norm.weight is not None
        check_carried(module, (name, weighted, "the block's norms are layer norms with a weight"))
    biases = f"linear layers and norms have a bias or none has, and linear1 has {'none' if first is None else 'one'}"
    hidden = drop_of(module, "dropout")
    check_carried(
        module,
        ("self_attn.kdim", inner.kdim == inner.embed_dim, f"the block attends to its {inner.embed_dim} channels"),
        ("linear2.bias", (module.linear2.bias is None) == (first is None), biases),
        ("norm1.bias", (module.norm1.bias is None) == (first is None), biases),
        ("norm2.bias", (module.norm2.bias is None) == (first is None), biases),
        ("norm2.eps", module.norm2.eps == module.norm1.eps, f"the block has one, and norm1's is {module.norm1.eps}"),
        ("activation", activation_of(module) is not None, "the block has 'relu' and 'gelu', by the error function"),
        (
            "dropout2",
            drop_of(module, "dropout2") == hidden,
            f"the block has one probability, and dropout's is {hidden}",
        ),
    )


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
    projections = {
        **{f"attn.{name}": rows for name, rows in multihead_projections(inner).items()},
        "attn.proj": rows_of(inner.out_proj),
        "fc1": rows_of(module.linear1),
        "fc2": rows_of(module.linear2),
    }
    tensors = {key: x for name, rows in projections.items() for key, x in convolution(name, rows).items()}
    norms = {key: x for key, x in module.named_parameters() if key.startswith("norm")}
    return filled(block, {**norms, **tensors}, training=module.training)


def activation_of(module: nn.TransformerEncoderLayer) -> str | None:
    """The name of its activation; None if the block has no such one."""
    act: Any = module.activation
    if act in (F.relu, torch.relu) or isinstance(act, nn.ReLU):
        return "relu"
    if act is F.gelu or (isinstance(act, nn.GELU) and act.approximate == "none"):
        return "gelu"
    return None


def run_encoder_layer(module: nn.TransformerEncoderLayer, x: Tensor) -> Tensor:
    tokens = to_tokens(x).requires_grad_()  # else it is computed at once from its weights, whatever its parts do
    batch_first = module.self_attn.batch_first
    with torch.enable_grad():
        y = module(tokens if batch_first else tokens.transpose(0, 1)).detach()
    return from_tokens(y if batch_first else y.transpose(0, 1), x.shape[2:])


# --- separate projections ---------------------------------------------------------------------------------------------


def from_linear_projections(
    q: nn.Module,
    k: nn.Module,
    v: nn.Module,
    out: nn.Module,
    num_heads: int,
    num_kv_heads: int | None = None,
    *,
    scale: float | None = None,
    rank: int = 2,
    parent: nn.Module | None = None,
) -> Attention:
    """The block of four projections: ``out(attention(q(x), k(x), v(x)))``, heads beside each other in their rows.

    Of llama they are ``q_proj, k_proj, v_proj, o_proj``, of diffusers ``to_q, to_k, to_v, to_out[0]``, of latent
    diffusion the 1×1 convolutions ``q, k, v, proj_out`` with one head. What is around them in those models (a norm, a
    residual, a rotation of queries and keys) is not part of the block: name their ``parent``, and it is refused.

    Args:
        q: projection of queries, an ``nn.Linear`` or a 1×1 convolution, to ``num_heads · key_dim`` rows.
        k: of keys, to ``num_kv_heads · key_dim`` rows.
        v: of values, to ``num_kv_heads · value_dim`` rows.
        out: of the output, from ``num_heads · value_dim``.
        num_heads: heads of queries.
        num_kv_heads: heads of keys and values, each shared by as many heads of queries in a row; ``num_heads`` if None.
        scale: factor on the logits; ``key_dim ** -0.5`` when None.
        rank: axes of the maps that the block is for: 1, 2 or 3.
        parent: the module that they are of, refused where it does more with them than attention.

    Returns:
        :class:`Attention1d`, :class:`Attention2d` or :class:`Attention3d` by ``rank``, with copies of the weights and
        without dropout; it takes a ``context`` where keys and values are of other channels than queries.

    Raises:
        ValueError: the projections are of other kinds or do not fit each other; the message says which.
        ConversionError: the block does not compute what the projections and attention between them do.

    >>> q, out = (nn.Linear(64, 64, bias=False) for _ in range(2))
    >>> k, v = (nn.Linear(64, 16, bias=False) for _ in range(2))
    >>> from_linear_projections(q, k, v, out, num_heads=8, num_kv_heads=2)(torch.randn(2, 64, 14, 10)).shape
    torch.Size([2, 64, 14, 10])
    """
    check_rank(rank)
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    key_dim, value_dim = check_projections({"q": q, "k": k, "v": v, "out": out}, num_heads, kv_heads)
    if parent is not None:
        check_parent(parent, q, k, v, out)

    def convert(layers: nn.ModuleDict) -> Attention:
        q, k, v, out = map(rows_of, layers.values())
        return attention(
            rank,
            {**input_projections(q, k, v), "proj": out},
            training=layers["q"].training,
            num_heads=num_heads,
            num_kv_heads=kv_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            scale=scale,
        )

    def run(layers: nn.ModuleDict, x: Tensor, context: Tensor | None = None) -> Tensor:
        """What the projections are for: each head apart, keys and values shared by consecutive heads."""
        tokens = to_tokens(x)
        source = tokens if context is None else to_tokens(context)
        given = (("q", tokens, num_heads), ("k", source, kv_heads), ("v", source, kv_heads))
        q, k, v = (on_tokens(layers[name], t).unflatten(2, (heads, -1)).transpose(1, 2) for name, t, heads in given)
        y = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True).transpose(1, 2).flatten(2)
        return from_tokens(on_tokens(layers["out"], y), x.shape[2:])

    return proven(nn.ModuleDict({"q": q, "k": k, "v": v, "out": out}), convert, run)


def check_projections(layers: dict[str, nn.Module], num_heads: int, num_kv_heads: int) -> tuple[int, int]:
    """The widths of keys and of values, of projections that fit each other."""
    check_count("num_heads", num_heads)
    check_count("num_kv_heads", num_kv_heads)
    check_divides("num_kv_heads", num_kv_heads, "num_heads", num_heads)
    for name, layer in layers.items():
        check_pointwise(name, layer)
        check_source(layer)
    rows, channels = ({name: rows_of(layer).weight.shape[axis] for name, layer in layers.items()} for axis in (0, 1))
    check_divides("num_heads", num_heads, "the rows of q", rows["q"])
    check_divides("num_kv_heads", num_kv_heads, "the rows of v", rows["v"])
    key_dim, value_dim = rows["q"] // num_heads, rows["v"] // num_kv_heads
    for what, got, expected, why in (
        ("rows of k", rows["k"], num_kv_heads * key_dim, f"{num_kv_heads} heads of {key_dim} as of q"),
        ("channels of out", channels["out"], num_heads * value_dim, f"{num_heads} heads of {value_dim} as of v"),
        ("channels of v", channels["v"], channels["k"], "those of k"),
    ):
        if got != expected:
            raise ValueError(f"the {what} must be {expected}, {why}; got {got}")
    return key_dim, value_dim


def check_parent(parent: Any, *layers: nn.Module) -> None:
    """Refuse a module that has other parts than these projections, or is given or told how to attend."""
    known = [part for layer in layers for part in layer.modules()]
    around = (nn.Dropout, nn.Identity, nn.ModuleList, nn.ModuleDict, nn.Sequential)
    others = [
        name
        for name, part in (*parent.named_modules(), *parent.named_parameters(recurse=False))
        if part is not parent and not any(part is one for one in known) and not isinstance(part, around)
    ]
    others += [
        name for name in signature(parent.forward).parameters if re.search("rope|rotary|position_emb|freqs", name)
    ]
    processor = type(getattr(parent, "processor", None)).__name__
    if processor not in ("NoneType", "AttnProcessor", "AttnProcessor2_0"):
        others.append("processor")
    if others:
        raise ValueError(
            f"{type(parent).__name__} does more than its projections say: a block has nothing for its "
            f"{', '.join(others)}; give no parent, and do around the block what they do"
        )


def on_tokens(layer: Any, tokens: Tensor) -> Tensor:
    """A linear layer or a 1×1 convolution on ``(b, tokens, c)``."""
    if isinstance(layer, nn.Linear):
        return layer(tokens)
    maps = tokens.transpose(1, 2)[(..., *(None,) * (layer.weight.dim() - 3))]  # axes of length one behind the tokens
    return layer(maps).flatten(2).transpose(1, 2)

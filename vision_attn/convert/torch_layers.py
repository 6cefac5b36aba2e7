"""torch's multi-head attention and encoder layer, and separate projections, on tokens where blocks here take maps."""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.blocks import Attention, TransformerBlock2d
from vision_attn.checks import check_count, check_divides
from vision_attn.convert.layer import LAYERS, OWN, Layer, converted, known
from vision_attn.convert.proof import difference, random_map
from vision_attn.convert.refusal import (
    check_carried,
    check_kind,
    check_pointwise,
    check_source,
    drop_of,
)
from vision_attn.convert.weights import Rows, Weights, filled, input_projections, parameters_of, rows_of

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
    return converted(module, known(module, MULTIHEAD), rank=rank)


def multihead_weights(module: nn.MultiheadAttention) -> Weights:
    return {**multihead_projections(module), "proj": rows_of(module.out_proj)}


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
    joined=("q_proj_weight", "k_proj_weight", "v_proj_weight"),
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
    projections = {
        **{f"attn.{name}": rows for name, rows in multihead_projections(inner).items()},
        "attn.proj": rows_of(inner.out_proj),
        "fc1": rows_of(module.linear1),
        "fc2": rows_of(module.linear2),
    }
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
    heads = (num_heads, num_heads if num_kv_heads is None else num_kv_heads)
    check_projections({"q": q, "k": k, "v": v, "out": out}, *heads)
    if parent is not None:
        check_parent(parent, q, k, v, out)
    layers = Projections(q, k, v, out, *heads, scale)
    return converted(layers.train(q.training), PROJECTIONS, rank=rank)


class Projections(nn.Module):
    """Four projections, and attention between them."""

    def __init__(
        self, q: Any, k: Any, v: Any, out: Any, num_heads: int, num_kv_heads: int, scale: float | None
    ) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = q, k, v, out
        self.num_heads, self.num_kv_heads, self.scale = num_heads, num_kv_heads, scale

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Each head apart, keys and values shared by consecutive heads."""
        source = x if context is None else context
        given = ((self.q, x, self.num_heads), (self.k, source, self.num_kv_heads), (self.v, source, self.num_kv_heads))
        q, k, v = (on_tokens(layer, t).unflatten(2, (heads, -1)).transpose(1, 2) for layer, t, heads in given)
        y = F.scaled_dot_product_attention(q, k, v, scale=self.scale, enable_gqa=True).transpose(1, 2).flatten(2)
        return on_tokens(self.out, y)


def on_tokens(layer: Any, tokens: Tensor) -> Tensor:
    """A linear layer or a 1×1 convolution on ``(b, tokens, c)``."""
    if isinstance(layer, nn.Linear):
        y: Tensor = layer(tokens)
        return y
    maps = tokens.transpose(1, 2)[(..., *(None,) * (layer.weight.dim() - 3))]  # axes of length one behind the tokens
    return layer(maps).flatten(2).transpose(1, 2)


def attend_projected(module: Any, attend: Callable[..., Tensor], x: Tensor, context: Tensor | None = None) -> Tensor:
    return attend(x.mT, None, None if context is None else context.mT).mT


def example_projections(module: Any) -> tuple[Any, ...]:
    queries, keys = (rows_of(layer).weight.shape[1] for layer in (module.q, module.k))
    return (random_map(2, 5, queries), *([] if queries == keys else [random_map(2, 4, keys)]))


PROJECTIONS = Layer(
    lambda module: {
        **input_projections(*map(rows_of, (module.q, module.k, module.v))),
        "proj": rows_of(module.out),
    },
    lambda module: {name: getattr(module, name) for name in ("num_heads", "num_kv_heads", "scale")},
    rank=1,
    joined=("q", "k", "v"),
    call=attend_projected,
    arguments=example_projections,
)


def check_projections(layers: dict[str, nn.Module], num_heads: int, num_kv_heads: int) -> None:
    """Refuse projections that do not fit each other."""
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

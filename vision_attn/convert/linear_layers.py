"""Attention kept as separate projections of queries, keys, values and output, whichever model's code is around them."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.blocks import Attention
from vision_attn.checks import check_count, check_divides
from vision_attn.convert.filling import attention, check_rank
from vision_attn.convert.proof import SIZES, from_tokens, proven, to_tokens
from vision_attn.convert.refusals import check_mode, check_parameters, check_pointwise
from vision_attn.convert.rows import input_projections, rows_of

__all__ = ["from_linear_projections"]


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
) -> Attention:
    """The block of four projections: ``out(attention(q(x), k(x), v(x)))``, heads beside each other in their rows.

    Of llama they are ``q_proj, k_proj, v_proj, o_proj``, of diffusers ``to_q, to_k, to_v, to_out[0]``, of latent
    diffusion the 1×1 convolutions ``q, k, v, proj_out`` with one head. What is around them in those models (a norm, a
    residual, a rotation of queries and keys) is not part of the block.

    Args:
        q: projection of queries, an ``nn.Linear`` or a 1×1 convolution, to ``num_heads · key_dim`` rows.
        k: of keys, to ``num_kv_heads · key_dim`` rows.
        v: of values, to ``num_kv_heads · value_dim`` rows.
        out: of the output, from ``num_heads · value_dim``.
        num_heads: heads of queries.
        num_kv_heads: heads of keys and values, each shared by as many heads of queries in a row; ``num_heads`` if None.
        scale: factor on the logits; ``key_dim ** -0.5`` when None.
        rank: axes of the maps that the block is for: 1, 2 or 3.

    Returns:
        :class:`Attention1d`, :class:`Attention2d` or :class:`Attention3d` by ``rank``, with copies of the weights and
        without dropout; it takes a ``context`` where keys and values are of other channels than queries.

    Raises:
        ValueError: the projections are of other kinds or do not fit each other; the message says which.
        ConversionError: the block does not compute what the projections and attention between them do.

    >>> import torch
    >>> q, out = (nn.Linear(64, 64, bias=False) for _ in range(2))
    >>> k, v = (nn.Linear(64, 16, bias=False) for _ in range(2))
    >>> from_linear_projections(q, k, v, out, num_heads=8, num_kv_heads=2)(torch.randn(2, 64, 14, 10)).shape
    torch.Size([2, 64, 14, 10])
    """
    check_rank(rank)
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    check_layers({"q": q, "k": k, "v": v, "out": out}, num_heads, num_kv_heads)
    layers = nn.ModuleDict({"q": q, "k": k, "v": v, "out": out})
    options: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "scale": scale}
    return proven(
        layers,
        lambda source: projected(source, rank, **options),
        lambda source, x, y=None: run(source, x, y, **options),
        shape=(rows_of(q).weight.shape[1], *SIZES[rank]),
    )


def check_layers(layers: dict[str, nn.Module], num_heads: int, num_kv_heads: int) -> None:
    check_count("num_heads", num_heads)
    check_count("num_kv_heads", num_kv_heads)
    check_divides("num_kv_heads", num_kv_heads, "num_heads", num_heads)
    for name, layer in layers.items():
        check_pointwise(name, layer)
        check_parameters(layer)
    check_mode(layers.items())
    rows, channels = ({name: rows_of(layer).weight.shape[axis] for name, layer in layers.items()} for axis in (0, 1))
    check_divides("num_heads", num_heads, "the rows of q", rows["q"])
    check_divides("num_kv_heads", num_kv_heads, "the rows of v", rows["v"])
    key_dim, value_dim = rows["q"] // num_heads, rows["v"] // num_kv_heads
    for what, got, expected, why in (
        ("k must have", rows["k"], num_kv_heads * key_dim, f"rows, {num_kv_heads} heads of {key_dim} as of q"),
        (
            "out must take",
            channels["out"],
            num_heads * value_dim,
            f"channels, {num_heads} heads of {value_dim} as of v",
        ),
        ("v must take", channels["v"], channels["k"], "channels, as k does"),
    ):
        if got != expected:
            raise ValueError(f"{what} {expected} {why}; got {got}")


def projected(layers: nn.ModuleDict, rank: int, *, num_heads: int, num_kv_heads: int, scale: float | None) -> Attention:
    q, k, v, out = (rows_of(layers[name]) for name in ("q", "k", "v", "out"))
    return attention(
        rank,
        {**input_projections(q, k, v), "proj": out},
        training=layers["q"].training,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_dim=len(q.weight) // num_heads,
        value_dim=len(v.weight) // num_kv_heads,
        scale=scale,
    )


def run(
    layers: nn.ModuleDict,
    x: Tensor,
    context: Tensor | None,
    *,
    num_heads: int,
    num_kv_heads: int,
    scale: float | None,
) -> Tensor:
    """What the projections are for: each head apart, keys and values shared by consecutive heads."""
    tokens = to_tokens(x)
    source = tokens if context is None else to_tokens(context)
    q = on_tokens(layers["q"], tokens).unflatten(2, (num_heads, -1)).transpose(1, 2)
    k, v = (on_tokens(layers[name], source).unflatten(2, (num_kv_heads, -1)).transpose(1, 2) for name in ("k", "v"))
    k, v = (y.repeat_interleave(num_heads // num_kv_heads, dim=1) for y in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2)
    return from_tokens(on_tokens(layers["out"], y), x.shape[2:])


def on_tokens(layer: nn.Module, tokens: Tensor) -> Tensor:
    """A linear layer or a 1×1 convolution on ``(b, tokens, c)``."""
    if isinstance(layer, nn.Linear):
        return layer(tokens)
    others = 1 if isinstance(layer, nn.Conv2d) else 2 if isinstance(layer, nn.Conv3d) else 0  # axes of length one
    return layer(tokens.transpose(1, 2)[(..., *(None,) * others)]).flatten(2).transpose(1, 2)

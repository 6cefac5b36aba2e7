"""Attention of four projections that stand in a module of any library: there is no layer to compare a block with."""

from __future__ import annotations

import re
from inspect import signature
from typing import Any

import torch
from torch import nn

from vision_attn.attention.blocks import Attention
from vision_attn.checks import check_count, check_divides
from vision_attn.networks.convert.refusal import check_pointwise, check_source, path_of
from vision_attn.networks.convert.weights import attention, check_rank, input_projections, rows_of

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

    >>> q, out = (nn.Linear(64, 64, bias=False) for _ in range(2))
    >>> k, v = (nn.Linear(64, 16, bias=False) for _ in range(2))
    >>> from_linear_projections(q, k, v, out, num_heads=8, num_kv_heads=2)(torch.randn(2, 64, 14, 10)).shape
    torch.Size([2, 64, 14, 10])
    """
    check_rank(rank)
    heads = {"num_heads": num_heads, "num_kv_heads": num_heads if num_kv_heads is None else num_kv_heads}
    check_projections({"q": q, "k": k, "v": v, "out": out}, **heads)
    if parent is not None:
        check_parent(parent, q, k, v, out)
    with torch.inference_mode(False), torch.enable_grad():  # which the weights say whether they are trained by
        inputs = {"q": rows_of(q), "k": rows_of(k), "v": rows_of(v)}
        weights = {**input_projections(**inputs), "proj": rows_of(out)}
        return attention(rank, weights, training=q.training, scale=scale, **heads)


#: What a projection computes by, if it is none that does more.
PLAIN = (nn.Linear.forward, nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)


def check_projections(layers: dict[str, Any], num_heads: int, num_kv_heads: int) -> None:
    """Refuse projections that do not fit each other."""
    check_count("num_heads", num_heads)
    check_count("num_kv_heads", num_kv_heads)
    check_divides("num_kv_heads", num_kv_heads, "num_heads", num_heads)
    for name, layer in layers.items():
        check_pointwise(name, layer)
        check_source(layer)
        if type(layer).forward not in PLAIN:
            raise ValueError(
                f"{name} must be a plain nn.Linear or 1×1 convolution; {path_of(type(layer))} computes more"
            )
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

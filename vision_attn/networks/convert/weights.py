"""From the weights of other libraries' layers to those of our blocks.

Our ``qkv`` has rows ordered (qkv, heads, width), or ``[heads·d, kv_heads·d, kv_heads·e]`` with other widths. No shape
tells one order from another; every function that brings rows into ours has its line here:

==========================================  ===================================================  ======================
weight                                      found in                                             brought into order by
==========================================  ===================================================  ======================
``((qkv n d), c)``                          torch, timm, torchvision                             :func:`rows_of`
``((n qkv d), c)``                          timm's MaxxViT and CoAtNet, unless they say          :func:`heads_first`
``((n d), c)``, ``((m d), c)``, …           llama, diffusers, latent diffusion, multi-query      :func:`side_by_side`
``(c, n, d)``                               Keras: queries, keys, values, gate                   :func:`kernel_rows`
``(n, e, c)``                               Keras: output                                        :func:`output_rows`
``(n, 2h-1, 2w-1)``, key less query         timm's MaxViT from TensorFlow: a table of biases     :func:`query_less_key`
==========================================  ===================================================  ======================

Nothing is detached before :func:`filled` copies it: whether a parameter is trained is seen by whether what it is made
of asks for a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from vision_attn.attention.blocks import Attention, Attention1d, Attention2d, Attention3d
from vision_attn.attention.blocks.residual import AttentionBlock, AttentionBlock1d, AttentionBlock2d, AttentionBlock3d

__all__ = [
    "TABLE",
    "Rows",
    "Weights",
    "attention",
    "check_rank",
    "empty_attention",
    "filled",
    "heads_first",
    "input_projections",
    "kernel_rows",
    "output_rows",
    "parameters_of",
    "query_less_key",
    "residual",
    "rows_of",
    "side_by_side",
    "with_bias",
]

Module = TypeVar("Module", bound=nn.Module)

#: The parameter of :class:`RelPosTable`.
TABLE = "position.relative_position_bias_table"

#: By the number of axes of a map.
BLOCKS: dict[int, type[Attention]] = {1: Attention1d, 2: Attention2d, 3: Attention3d}
RESIDUAL = {1: AttentionBlock1d, 2: AttentionBlock2d, 3: AttentionBlock3d}


# --- the rows of a source, in our order -------------------------------------------------------------------------------


class Rows(NamedTuple):
    """A linear map of channels."""

    #: ``(rows, channels)``
    weight: Tensor
    #: ``(rows,)``, or None
    bias: Tensor | None = None


#: Projections of a block, and other parameters, by name.
Weights: TypeAlias = Mapping[str, Any]


def rows_of(layer: Any) -> Rows:
    """The rows of a linear layer or a 1×1 convolution, as they are.

    >>> rows_of(torch.nn.Conv2d(8, 24, 1)).weight.shape
    torch.Size([24, 8])
    """
    return Rows(layer.weight.flatten(1), layer.bias)


def heads_first(rows: Rows, num_heads: int, *widths: int) -> Rows:
    """The rows, ordered (heads, qkv, width), in the order (qkv, heads, width); of three equal widths, or of these.

    >>> heads_first(Rows(torch.arange(12)[:, None]), num_heads=2).weight.flatten().tolist()
    [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    """

    def reordered(x: Tensor) -> Tensor:
        parts = x.unflatten(0, (num_heads, -1)).split(widths or len(x) // (3 * num_heads), dim=1)
        return torch.cat([part.flatten(0, 1) for part in parts])

    return Rows(reordered(rows.weight), None if rows.bias is None else reordered(rows.bias))


def side_by_side(**parts: Rows) -> Rows:
    """One projection of several, their rows after each other; of all or none of them with a bias.

    >>> side_by_side(q=Rows(torch.ones(8, 4)), kv=Rows(torch.ones(2, 4))).weight.shape
    torch.Size([10, 4])
    """
    check_biases(**parts)
    biases = [part.bias for part in parts.values() if part.bias is not None]
    return Rows(torch.cat([part.weight for part in parts.values()]), torch.cat(biases) if biases else None)


def check_biases(**parts: Rows) -> None:
    """Refuse projections of which some have a bias and others none: the block has one option for all."""
    lacking = [name for name, part in parts.items() if part.bias is None]
    if 0 < len(lacking) < len(parts):
        raise ValueError(
            f"{', '.join(parts)} must all have a bias, or none of them; got none for {', '.join(lacking)}: give it one "
            "of zeros, or take the others off"
        )


def input_projections(q: Rows, k: Rows, v: Rows) -> dict[str, Rows]:
    """The projections of a block: ``qkv``, or ``q`` and ``kv`` where these are of other channels than queries.

    >>> q, other = Rows(torch.ones(4, 6)), Rows(torch.ones(4, 5))
    >>> list(input_projections(q, q, q)), list(input_projections(q, other, other))
    (['qkv'], ['q', 'kv'])
    """
    check_biases(q=q, k=k, v=v)
    if k.weight.shape[1] == q.weight.shape[1]:
        return {"qkv": side_by_side(q=q, k=k, v=v)}
    return {"q": q, "kv": side_by_side(k=k, v=v)}


def kernel_rows(kernel: Tensor, bias: Tensor | None) -> Rows:
    """The rows of a kernel that keeps heads as its second axis.

    >>> kernel_rows(torch.ones(8, 2, 5), None).weight.shape
    torch.Size([10, 8])
    """
    return Rows(kernel.flatten(1).T, None if bias is None else bias.flatten())


def output_rows(kernel: Tensor, bias: Tensor | None) -> Rows:
    """The rows of a kernel that keeps heads as its first axis, and takes them.

    >>> output_rows(torch.ones(2, 5, 8), None).weight.shape
    torch.Size([8, 10])
    """
    return Rows(kernel.flatten(0, 1).T, bias)


def with_bias(rows: Rows) -> Rows:
    """The rows with a bias: of zeros, which are not trained, if they have none."""
    return Rows(rows.weight, rows.weight.new_zeros(len(rows.weight)) if rows.bias is None else rows.bias)


def query_less_key(table: Tensor) -> Tensor:
    """The table of biases by query less key of one by key less query.

    >>> query_less_key(torch.ones(4, 5, 3)).shape
    torch.Size([15, 4])
    """
    return table.flip(1, 2).flatten(1).T


# --- the block that they fill -----------------------------------------------------------------------------------------


def check_rank(rank: int) -> None:
    """Refuse a number of axes that no map has."""
    if isinstance(rank, bool) or not isinstance(rank, Integral) or rank not in BLOCKS:
        raise ValueError(f"rank must be the axes of a map, 1, 2 or 3, for Attention1d, 2d or 3d; got {rank!r}")


def empty_attention(
    rank: int,
    weights: Weights,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    value_dim: int | None = None,
    kind: type[Attention] | None = None,
    **options: Any,
) -> Attention:
    """The block for these weights, on the meta device. What their shapes and names tell need not be said."""
    first, out = weights.get("qkv") or weights["q"], weights.get("proj")
    rows, kv_heads = len(first.weight), num_kv_heads or num_heads
    e = out.weight.shape[1] // num_heads if out else value_dim or rows // (num_heads + 2 * kv_heads)
    return (kind or BLOCKS[rank])(
        first.weight.shape[1],
        num_heads,
        num_kv_heads=num_kv_heads,
        key_dim=rows // num_heads if "q" in weights else (rows - kv_heads * e) // (num_heads + kv_heads),
        value_dim=e,
        out_channels=len(out.weight) if out else num_heads * e,
        context_channels=weights["kv"].weight.shape[1] if "kv" in weights else None,
        qkv_bias=first.bias is not None,
        proj_bias=out is not None and out.bias is not None,
        qk_norm="cosine" if "q_norm.logit_scale" in weights else "q_norm.weight" in weights,
        output_gate="gate" in weights,
        device="meta",
        **options,
    )


def attention(rank: int, weights: Weights, *, training: bool, **options: Any) -> Attention:
    """The block for maps with this number of axes, with copies of these weights."""
    block = empty_attention(rank, weights, **options)
    if "proj" not in weights:  # the identity, which is not trained
        like = (weights.get("qkv") or weights["q"]).weight
        weights = {**weights, "proj": Rows(torch.eye(block.out_channels, dtype=like.dtype, device=like.device))}
    return filled(block, parameters_of(weights, rank), training=training)


def parameters_of(weights: Weights, rank: int = 2) -> dict[str, Tensor]:
    """The parameters of a block by name: a 1×1 convolution for each projection."""
    tensors = {}
    for name, x in weights.items():
        if isinstance(x, Tensor):
            tensors[name] = x
            continue
        tensors[f"{name}.weight"] = x.weight[(..., *(None,) * rank)]
        if x.bias is not None:
            tensors[f"{name}.bias"] = x.bias
    return tensors


def filled(block: Module, tensors: Mapping[str, Tensor], *, training: bool) -> Module:
    """A block made on the meta device, with copies of these tensors for parameters, trained or not as they are."""
    copies = {
        name: nn.Parameter(x.detach().clone(memory_format=torch.contiguous_format)) for name, x in tensors.items()
    }
    block.load_state_dict(copies, assign=True)
    for name, parameter in block.named_parameters():
        parameter.requires_grad_(tensors[name].requires_grad)
    return block.train(training)


def residual(attn: Attention, norm: Any = None, gate: Tensor | None = None) -> AttentionBlock:
    """``x + gate · attn(norm(x))`` with a norm as the source's, or none; a gate that it has not is not trained."""
    block = RESIDUAL[attn.rank](attn.channels, 1, device="meta")
    block.attn, block.norm, block.begins_open = attn, nn.Identity(), False  # type: ignore[assignment]
    if norm is not None:
        copied = nn.GroupNorm(norm.num_groups, norm.num_channels, norm.eps, device="meta")
        block.norm = filled(copied, {"weight": norm.weight, "bias": norm.bias}, training=attn.training)  # type: ignore[assignment]
    scale = attn.proj.weight.new_ones(()) if gate is None else gate
    ones = torch.ones(attn.channels, dtype=scale.dtype, device=scale.device)
    block.gate = nn.Parameter((ones * scale).detach(), requires_grad=gate is not None and gate.requires_grad)
    return block.train(attn.training)

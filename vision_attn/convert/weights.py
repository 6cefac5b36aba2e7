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
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from vision_attn.blocks import Attention, Attention1d, Attention2d, Attention3d

__all__ = [
    "Rows",
    "attention",
    "check_joined",
    "check_rank",
    "convolution",
    "filled",
    "heads_first",
    "identity_rows",
    "input_projections",
    "kernel_rows",
    "output_rows",
    "parameters_of",
    "query_less_key",
    "rows_of",
    "side_by_side",
    "with_bias",
]

Module = TypeVar("Module", bound=nn.Module)

#: By the number of axes of a map.
BLOCKS: dict[int, type[Attention]] = {1: Attention1d, 2: Attention2d, 3: Attention3d}


# --- the rows of a source, in our order -------------------------------------------------------------------------------


class Rows(NamedTuple):
    """A linear map of channels."""

    #: ``(rows, channels)``
    weight: Tensor
    #: ``(rows,)``, or None
    bias: Tensor | None = None


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


def side_by_side(*parts: Rows) -> Rows:
    """One projection of several, their rows after each other.

    >>> side_by_side(Rows(torch.ones(8, 4)), Rows(torch.ones(2, 4))).weight.shape
    torch.Size([10, 4])
    """
    biases = [part.bias for part in parts if part.bias is not None]
    return Rows(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None)


def check_joined(**parts: Rows) -> None:
    """Refuse projections that cannot become one parameter."""
    check_biases(**parts)
    weights = [part.weight for part in parts.values()]
    biases = [part.bias for part in parts.values() if part.bias is not None]
    for name, tensors in (("weights", weights), ("biases", biases)):
        for trait in ("dtype", "requires_grad"):
            found = [getattr(tensor, trait) for tensor in tensors]
            if len(set(found)) > 1:
                raise ValueError(
                    f"the {name} of {', '.join(parts)} become one parameter, so they must agree in {trait}; got "
                    f"{', '.join(map(str, found))}"
                )


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
    if k.weight.shape[1] == q.weight.shape[1]:
        check_joined(q=q, k=k, v=v)
        return {"qkv": side_by_side(q, k, v)}
    check_biases(q=q, k=k, v=v)
    check_joined(k=k, v=v)
    return {"q": q, "kv": side_by_side(k, v)}


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


def identity_rows(width: int, like: Tensor) -> Rows:
    """The projection for a source that has none: the identity, which is not trained."""
    return Rows(torch.eye(width, dtype=like.dtype, device=like.device))


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


def attention(
    rank: int,
    projections: Mapping[str, Rows],
    tables: Mapping[str, Tensor] | None = None,
    *,
    training: bool,
    kind: type[Attention] | None = None,
    **options: Any,
) -> Attention:
    """The block for maps with this number of axes, with copies of these projections and tables."""
    first, out = projections["q" if "q" in projections else "qkv"], projections["proj"]
    block = (kind or BLOCKS[rank])(
        first.weight.shape[1],
        out_channels=len(out.weight),
        context_channels=projections["kv"].weight.shape[1] if "kv" in projections else None,
        qkv_bias=first.bias is not None,
        proj_bias=out.bias is not None,
        device="meta",
        **options,
    )
    return filled(block, parameters_of(projections, tables, rank), training=training)


def parameters_of(
    projections: Mapping[str, Rows], tables: Mapping[str, Tensor] | None = None, rank: int = 2
) -> dict[str, Tensor]:
    """The parameters of a block by name."""
    tensors = dict(tables or {})
    for name, rows in projections.items():
        tensors.update(convolution(name, rows, rank))
    return tensors


def convolution(name: str, rows: Rows, rank: int = 2) -> dict[str, Tensor]:
    """The parameters of a 1×1 convolution by name, ``(rows, c, 1, 1)`` and ``(rows,)``."""
    tensors = {f"{name}.weight": rows.weight[(..., *(None,) * rank)]}
    return tensors if rows.bias is None else {**tensors, f"{name}.bias": rows.bias}


def filled(block: Module, tensors: Mapping[str, Tensor], *, training: bool) -> Module:
    """A block made on the meta device, with copies of these tensors for parameters, trained or not as they are."""
    copies = {
        name: nn.Parameter(x.detach().clone(memory_format=torch.contiguous_format)) for name, x in tensors.items()
    }
    block.load_state_dict(copies, assign=True)
    for name, parameter in block.named_parameters():
        parameter.requires_grad_(tensors[name].requires_grad)
    return block.train(training)

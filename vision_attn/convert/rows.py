"""Rows: where other libraries keep heads, and queries, keys and values, and how they come into the order of ours.

Our ``qkv`` has rows ordered (qkv, heads, width), or ``[heads·d, kv_heads·d, kv_heads·e]`` with other widths. No shape
tells one order from another; every function below has its line here:

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

Nothing here is detached: whether a row is trained is seen by whether what it was made of asks for a gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Rows",
    "check_biases",
    "heads_first",
    "identity_rows",
    "input_projections",
    "kernel_rows",
    "output_rows",
    "query_less_key",
    "rows_of",
    "side_by_side",
    "with_bias",
]


class Rows(NamedTuple):
    """A linear map of channels."""

    #: ``(rows, channels)``
    weight: Tensor
    #: ``(rows,)``, or None
    bias: Tensor | None


def rows_of(layer: Any) -> Rows:
    """The rows of a linear layer or a 1×1 convolution, as they are.

    >>> rows_of(torch.nn.Conv2d(8, 24, 1)).weight.shape
    torch.Size([24, 8])
    """
    return Rows(layer.weight.flatten(1), layer.bias)


def input_projections(q: Rows, k: Rows, v: Rows) -> dict[str, Rows]:
    """The projections of a block: ``qkv``, or ``q`` and ``kv`` where these are of other channels than queries.

    >>> q, other = Rows(torch.ones(4, 6), None), Rows(torch.ones(4, 5), None)
    >>> list(input_projections(q, q, q)), list(input_projections(q, other, other))
    (['qkv'], ['q', 'kv'])
    """
    if k.weight.shape[1] == q.weight.shape[1]:
        return {"qkv": side_by_side(q=q, k=k, v=v)}
    check_biases(q=q, k=k, v=v)
    return {"q": q, "kv": side_by_side(k=k, v=v)}


def with_bias(rows: Rows) -> Rows:
    """The rows with a bias: of zeros, which are not trained, if they have none.

    >>> with_bias(Rows(torch.ones(2, 4), None)).bias
    tensor([0., 0.])
    """
    return Rows(rows.weight, rows.weight.new_zeros(len(rows.weight)) if rows.bias is None else rows.bias)


def heads_first(rows: Rows, num_heads: int) -> Rows:
    """The rows, ordered (heads, qkv, width), in the order (qkv, heads, width).

    >>> heads_first(Rows(torch.arange(12)[:, None], None), num_heads=2).weight.flatten().tolist()
    [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    """

    def reordered(x: Tensor) -> Tensor:
        return x.unflatten(0, (num_heads, 3, -1)).transpose(0, 1).flatten(0, 2)

    return Rows(reordered(rows.weight), None if rows.bias is None else reordered(rows.bias))


def side_by_side(**parts: Rows) -> Rows:
    """One projection of several, their rows after each other.

    >>> side_by_side(q=Rows(torch.ones(8, 4), None), k=Rows(torch.ones(2, 4), None)).weight.shape
    torch.Size([10, 4])
    """
    check_biases(**parts)
    names = ", ".join(parts)
    weights, biases = [part.weight for part in parts.values()], [part.bias for part in parts.values()]
    kept = [bias for bias in biases if bias is not None]
    return Rows(joined(f"the weights of {names}", weights), joined(f"the biases of {names}", kept) if kept else None)


def check_biases(**parts: Rows) -> None:
    """Refuse projections of which some have a bias and others none: the block has one option for all."""
    lacking = [name for name, part in parts.items() if part.bias is None]
    if lacking and len(lacking) < len(parts):
        raise ValueError(
            f"{', '.join(parts)} must all have a bias, or none of them; got none for {', '.join(lacking)}: give it one "
            "of zeros, or take the others off"
        )


def joined(what: str, tensors: list[Tensor]) -> Tensor:
    for trait in ("dtype", "device", "requires_grad"):
        values = [getattr(tensor, trait) for tensor in tensors]
        if len(set(values)) > 1:
            raise ValueError(
                f"{what} become one parameter, so they must agree in {trait}; got {', '.join(map(str, values))}"
            )
    return torch.cat(tensors)


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


def identity_rows(width: int, like: Tensor) -> Rows:
    """The projection for a source that has none: the identity, which is not trained.

    >>> identity_rows(3, torch.ones(1)).weight.shape
    torch.Size([3, 3])
    """
    return Rows(torch.eye(width, dtype=like.dtype, device=like.device), None)


def query_less_key(table: Tensor) -> Tensor:
    """The table of biases by query less key of one by key less query.

    >>> query_less_key(torch.ones(4, 5, 3)).shape
    torch.Size([15, 4])
    """
    return table.flip(1, 2).flatten(1).T

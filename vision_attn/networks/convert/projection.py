"""Input and output projections of attention layers, with rows in the order of the blocks.

The rows of ``qkv`` in a block are ordered (qkv, heads, width), or ``[heads·d, kv_heads·d, kv_heads·e]`` if the
widths differ. Weight shapes do not distinguish one order from another. These functions convert weights to this order:

==================================  ========================================  =================================
weight                              used by                                   function
==================================  ========================================  =================================
``((qkv n d), c)``                  torch, timm, torchvision                  :meth:`Projection.read`
``((n qkv d), c)``                  timm's MaxxViT and CoAtNet, by default    :meth:`Projection.heads_first`
``((n d), c)``, ``((m d), c)``, …   transformers, diffusers                   :meth:`Projection.concat`
``(c, n, d)``                       Keras: queries, keys, values, gate        :func:`.keras_layers.read_dense`
==================================  ========================================  =================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Projection(NamedTuple):
    """Weight and bias of a linear projection of channels.

    >>> Projection.read(torch.nn.Conv2d(8, 24, 1)).weight.shape
    torch.Size([24, 8])
    >>> Projection.concat(Projection(torch.ones(8, 4)), Projection(torch.ones(2, 4))).weight.shape
    torch.Size([10, 4])
    """

    #: ``(rows, channels)``
    weight: Tensor
    #: ``(rows,)``; None without a bias
    bias: Tensor | None = None

    @staticmethod
    def read(layer: Any) -> Projection:
        """Return the projection of a linear layer or a 1×1 convolution."""
        return Projection(layer.weight.flatten(1), layer.bias)

    @staticmethod
    def concat(*parts: Projection) -> Projection:
        """Concatenate the rows of several projections; the result has a bias if one of the projections has a bias."""
        if any(part.bias is not None for part in parts):
            parts = tuple(part.with_bias() for part in parts)
        weights, biases = zip(*parts, strict=True)
        return Projection(torch.cat(weights), None if biases[0] is None else torch.cat(biases))

    def with_bias(self) -> Projection:
        """Return the projection with a bias; a missing bias is replaced by zeros, which are not trained."""
        return Projection(self.weight, self.weight.new_zeros(len(self.weight)) if self.bias is None else self.bias)

    def heads_first(self, num_heads: int, *widths: int) -> Projection:
        """Reorder rows from (heads, qkv, width) to (qkv, heads, width); by default the three widths are equal.

        >>> Projection(torch.arange(12)[:, None]).heads_first(num_heads=2).weight.flatten().tolist()
        [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
        """

        def reorder(x: Tensor) -> Tensor:
            parts = x.unflatten(0, (num_heads, -1)).split(widths or len(x) // (3 * num_heads), dim=1)
            return torch.cat([part.flatten(0, 1) for part in parts])

        return Projection(reorder(self.weight), None if self.bias is None else reorder(self.bias))


def input_weights(q: Projection, *kv: Projection) -> dict[str, Any]:
    """Return the input projections of a block: ``qkv``, or ``q`` and ``kv`` if their input channels differ."""
    if not kv:
        return {"qkv": q}
    if kv[0].weight.shape[1] == q.weight.shape[1]:
        return {"qkv": Projection.concat(q, *kv)}
    return {"q": q, "kv": Projection.concat(*kv)}


def named_weights(qkv: str, proj: str) -> Callable[[Any], dict[str, Any]]:
    """Return a function that reads the projections with these names.

    Queries, keys and values are in one, two or three projections. The projections of a context follow after a bar.

    >>> from torch import nn
    >>> read = named_weights("q k v", "out")
    >>> list(read(nn.ModuleDict({name: nn.Linear(4, 4) for name in ("q", "k", "v", "out")})))
    ['qkv', 'proj']
    """
    inputs_and_context = [names.split() for names in qkv.split("|")]

    def read(layer: Any) -> dict[str, Any]:
        inputs, *context = ([Projection.read(layer.get_submodule(x)) for x in names] for names in inputs_and_context)
        weights = {"q": inputs[0], "kv": Projection.concat(*context[0])} if context else input_weights(*inputs)
        return {**weights, "proj": Projection.read(layer.get_submodule(proj))}

    return read


def to_parameters(weights: dict[str, Any], rank: int) -> dict[str, Tensor]:
    """Return the parameters of a block by name, with a 1×1 convolution for each projection."""
    tensors: dict[str, Tensor | None] = {}
    for name, x in weights.items():
        if isinstance(x, Projection):
            tensors |= {f"{name}.weight": x.weight[(..., *(None,) * rank)], f"{name}.bias": x.bias}
        else:
            tensors[name] = x
    return {name: x for name, x in tensors.items() if x is not None}

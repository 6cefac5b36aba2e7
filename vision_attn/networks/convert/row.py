"""The table of attention layers of other libraries: one :class:`Row` for each, by the path of its class.

To add a layer, add its row in :mod:`.timm_layers` or :mod:`.other_layers`: its weights in our order, and the arguments
of the block. ``from_layer``, ``swap_`` and the table in the docs read the rows. Each converted layer is compared with
its block. No library is imported for it.

The rows of our ``qkv`` are ordered (qkv, heads, width), or ``[heads·d, kv_heads·d, kv_heads·e]`` with other widths.
Shapes cannot distinguish one order from another. These functions bring weights into our order:

==================================  ========================================  =================================
weight                              found in                                  function
==================================  ========================================  =================================
``((qkv n d), c)``                  torch, timm, torchvision                  :meth:`Projection.read`
``((n qkv d), c)``                  timm's MaxxViT and CoAtNet, by default    :meth:`Projection.heads_first`
``((n d), c)``, ``((m d), c)``, …   transformers, diffusers                   :meth:`Projection.concat`
``(c, n, d)``                       Keras: queries, keys, values, gate        :func:`.keras_layers.read_dense`
==================================  ========================================  =================================

Nothing is detached before :func:`load_weights` copies it: a parameter of the block is trained if its tensor requires a
gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from vision_attn.attention.blocks import Attention
from vision_attn.attention.blocks.gated_residual import ATTENTION
from vision_attn.networks.convert.equivalence import class_path, get_dropout, random_map, randomized_copy

Attend: TypeAlias = Callable[..., Tensor]

#: Returned for a call that the block does not support: the layer runs it.
FALLBACK: Any = object()

# --- weights in our order ---------------------------------------------------------------------------------------------


class Projection(NamedTuple):
    """A linear map of channels.

    >>> Projection.read(torch.nn.Conv2d(8, 24, 1)).weight.shape
    torch.Size([24, 8])
    >>> Projection.concat(Projection(torch.ones(8, 4)), Projection(torch.ones(2, 4))).weight.shape
    torch.Size([10, 4])
    """

    #: ``(rows, channels)``
    weight: Tensor
    #: ``(rows,)``, or None
    bias: Tensor | None = None

    @staticmethod
    def read(layer: Any) -> Projection:
        """Return the projection of a linear layer or a 1×1 convolution."""
        return Projection(layer.weight.flatten(1), layer.bias)

    @staticmethod
    def concat(*parts: Projection) -> Projection:
        """Concatenate the rows of several projections; the result has a bias if one of them has."""
        if any(part.bias is not None for part in parts):
            parts = tuple(part.with_bias() for part in parts)
        weights, biases = zip(*parts, strict=True)
        return Projection(torch.cat(weights), None if biases[0] is None else torch.cat(biases))

    def with_bias(self) -> Projection:
        """Return the projection with a bias: of zeros, which are not trained, if it has none."""
        return Projection(self.weight, self.weight.new_zeros(len(self.weight)) if self.bias is None else self.bias)

    def heads_first(self, num_heads: int, *widths: int) -> Projection:
        """Reorder rows from (heads, qkv, width) to (qkv, heads, width); the three widths are equal if not given.

        >>> Projection(torch.arange(12)[:, None]).heads_first(num_heads=2).weight.flatten().tolist()
        [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
        """

        def reorder(x: Tensor) -> Tensor:
            parts = x.unflatten(0, (num_heads, -1)).split(widths or len(x) // (3 * num_heads), dim=1)
            return torch.cat([part.flatten(0, 1) for part in parts])

        return Projection(reorder(self.weight), None if self.bias is None else reorder(self.bias))


def input_weights(q: Projection, *kv: Projection) -> dict[str, Any]:
    """Return the input projections of a block: ``qkv``, or ``q`` and ``kv`` if their channels differ."""
    if not kv:
        return {"qkv": q}
    if kv[0].weight.shape[1] == q.weight.shape[1]:
        return {"qkv": Projection.concat(q, *kv)}
    return {"q": q, "kv": Projection.concat(*kv)}


def named_weights(qkv: str, proj: str) -> Callable[[Any], dict[str, Any]]:
    """Return a function that reads the projections with these names: queries, keys and values in one, two or three.

    Projections of a context come after a bar.

    >>> read = named_weights("q k v", "out")
    >>> list(read(nn.ModuleDict({name: nn.Linear(4, 4) for name in ("q", "k", "v", "out")})))
    ['qkv', 'proj']
    """

    def read(layer: Any) -> dict[str, Any]:
        inputs, *context = (
            [Projection.read(layer.get_submodule(name)) for name in names.split()] for names in qkv.split("|")
        )
        weights = {"q": inputs[0], "kv": Projection.concat(*context[0])} if context else input_weights(*inputs)
        return {**weights, "proj": Projection.read(layer.get_submodule(proj))}

    return read


def to_parameters(weights: dict[str, Any], rank: int) -> dict[str, Tensor]:
    """Return the parameters of a block by name: a 1×1 convolution for each projection."""
    tensors: dict[str, Tensor | None] = {}
    for name, x in weights.items():
        if isinstance(x, Projection):
            tensors |= {f"{name}.weight": x.weight[(..., *(None,) * rank)], f"{name}.bias": x.bias}
        else:
            tensors[name] = x
    return {name: x for name, x in tensors.items() if x is not None}


def load_weights(block: Any, tensors: Mapping[str, Tensor], *, training: bool) -> Any:
    """Load copies of tensors into a block on the meta device; those that require a gradient are trained."""
    copies = {name: x.detach().clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}
    block.load_state_dict(copies, assign=True)
    for name, parameter in block.named_parameters():
        parameter.requires_grad_(tensors[name].requires_grad)
    return block.train(training)


def run_on_tokens(block: Any, rank: int, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Any:
    """Call a block with ``rank`` axes on maps; a block with one axis gets the positions as a sequence of tokens."""
    if rank > 1:
        return block(x, mask, context)
    return block(x.flatten(2), mask, None if context is None else context.flatten(2)).unflatten(2, x.shape[2:])


# --- the row ----------------------------------------------------------------------------------------------------------


def no_bias(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Add nothing to the logits; the layer runs calls with more than a map."""
    return FALLBACK if any(given is not None for given in (*args, *kwargs.values())) else None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One attention layer of another library; the first argument of all functions is the layer.

    ``attend`` stands for the block: ``attend(x, mask=None, context=None)`` on ``(b, channels, *axes)``. A layer of
    tokens that knows the size of their map passes the map, ``(b, channels, h, w)``, so that it can be captured.
    """

    #: projections of the block, and its other parameters, by name
    weights: Callable[[Any], dict[str, Any]]
    #: further arguments of the block, each the name of an attribute of the layer, a function of the layer, or a value;
    #: ``num_heads`` is read from the layer by default
    options: Mapping[str, Any] = field(default_factory=dict)
    #: layout of the input: tokens, or maps with channels first ``b c h w`` or last
    axes: str = "b t c"
    #: paths of the dropouts of the weights and of the output
    dropouts: tuple[str, str] = ("attn_drop", "proj_drop")
    #: parts and settings that no block has, with a remedy
    unsupported: Mapping[str, str] = field(default_factory=dict)
    #: parts that the layer runs around the block when it is swapped, and that ``from_layer`` refuses
    swap_only: tuple[str, ...] = ()
    #: ``(layer, x, *args)`` to the bias of the logits, or :data:`FALLBACK`; ``x`` has its channels first
    bias: Callable[..., Any] = no_bias
    #: ``(layer, attend, *args)`` to the output, or :data:`FALLBACK`; ``attend(x, bias)`` by default
    call: Callable[..., Any] | None = None
    #: the size of a map for the equivalence check
    size: Callable[[Any], tuple[int, ...]] | None = None
    #: arguments for the equivalence check, if these are not one map
    example: Callable[[Any], tuple[Any, ...]] | None = None
    #: options of the block, for a layer whose input is the groups of a map
    groups: Callable[[Any], dict[str, Any]] | None = None
    #: ``(layer, block)`` to a module with more than attention, for ``from_layer`` alone
    finish: Callable[[Any, Any], nn.Module] = lambda layer, block: block
    #: makes a copy of the layer with random weights
    make_copy: Callable[[Any, torch.dtype], AbstractContextManager[Any]] = randomized_copy
    #: type of the equivalence check
    dtype: torch.dtype = torch.float64
    #: keyword arguments of the layer's call in the equivalence check
    call_options: Mapping[str, bool] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Axes of the block's maps when it is swapped."""
        return len(self.axes.split()) - 2

    def empty_block(self, layer: Any, weights: dict[str, Any], **given: Any) -> Attention:
        """Make the block on the meta device; widths and parts are read from the weights."""
        attn_drop, proj_drop = (get_dropout(layer, name) for name in self.dropouts)
        options: dict[str, Any] = {"num_heads": "num_heads", "rank": self.rank, **self.options}
        for name, x in options.items():
            options[name] = getattr(layer, x) if isinstance(x, str) else x(layer) if callable(x) else x
        options |= given
        if (rank := options.pop("rank")) not in ATTENTION:
            raise ValueError(f"rank must be the axes of a map, 1, 2 or 3, for Attention1d, 2d or 3d; got {rank!r}")
        first, out, heads = weights.get("qkv") or weights["q"], weights["proj"], options["num_heads"]
        rows, kv_heads, e = len(first.weight), options.get("num_kv_heads", heads), out.weight.shape[1] // heads
        block: Attention = options.pop("kind", ATTENTION[rank])(
            first.weight.shape[1],
            key_dim=rows // heads if "q" in weights else (rows - kv_heads * e) // (heads + kv_heads),
            value_dim=e,
            out_channels=len(out.weight),
            context_channels=weights["kv"].weight.shape[1] if "kv" in weights else None,
            qkv_bias=first.bias is not None,
            proj_bias=out.bias is not None,
            qk_norm="cosine" if "q_norm.logit_scale" in weights else "q_norm.weight" in weights,
            output_gate="gate" in weights,
            device="meta",
            **{"attn_drop": attn_drop, "proj_drop": proj_drop, **options},
        )
        for name in ("q_norm", "k_norm"):  # their eps is in no state dict
            if isinstance(norm := getattr(block, name), nn.LayerNorm):
                norm.eps = getattr(layer, name).eps
        return block.train(self.call_options.get("training", layer.training))

    def make_block(self, layer: Any, **options: Any) -> nn.Module:
        """Make the block, or a module that contains it, with copies of the weights."""
        weights = self.weights(layer)
        block = self.empty_block(layer, weights, **options)
        return self.finish(layer, load_weights(block, to_parameters(weights, block.rank), training=block.training))

    def forward(self, layer: Any, attend: Attend, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's output for a call, computed by a block, or :data:`FALLBACK`."""
        return (self.call or self.attend_map)(layer, attend, *args, **kwargs)

    def attend_map(self, layer: Any, attend: Attend, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        last = self.axes.endswith("c")
        if x.dim() != self.rank + 2:
            return FALLBACK
        x = x.movedim(-1, 1) if last else x
        bias = self.bias(layer, x, *args, **kwargs)
        if bias is FALLBACK:
            return FALLBACK
        y = attend(x, bias)
        return y.movedim(1, -1) if last else y

    def arguments(self, layer: Any) -> tuple[Any, ...]:
        """Return arguments for the equivalence check."""
        if self.example is not None:
            return self.example(layer)
        weights, size = self.weights(layer), (8, 4, 5)[: self.rank] if self.size is None else self.size(layer)
        if self.rank == 1 and isinstance(bias := self.bias(layer, torch.empty(0, 0, 0)), Tensor):
            size = bias.shape[-1:]  # the tokens that it is for
        x = random_map(2, (weights.get("qkv") or weights["q"]).weight.shape[1], *size)
        return (x.movedim(1, -1) if self.axes.endswith("c") else x,)


# --- the table --------------------------------------------------------------------------------------------------------

#: Rows by the path of the class, from :mod:`.timm_layers`, :mod:`.other_layers` and :mod:`.keras_layers`.
TABLE: dict[str, Row] = {}

#: Why attention layers have no row, by the names of their classes.
NO_ROW = {
    "XCA ChannelAttention ChannelAttentionV2 CrossCovarianceAttn": "it attends between channels, not positions",
    "LiteMLA FactorAttnConvRelPosEnc LinearSelfAttention EfficientAdditiveAttention": "it has no softmax",
    "ClassAttn ClassAttention": "only its class token attends",
    "AttentionPool2d RotAttentionPool2d": "it pools its map into one token",
    "GPSA": "it adds two softmaxes, of contents and of positions",
    "TalkingHeadAttn": "it mixes its heads before and after the softmax",
    "CascadedGroupAttention": "each head is given the output of the head before it",
    "OutlookAttention": "it computes its weights without keys",
    "EvaAttention AttentionRope": "its network passes it the rotation of queries and keys",
    "MaskFormerDetrSelfAttention MaskFormerDetrCrossAttention": "its keys have positions that its values have not",
    "MultiScaleAttention": "its queries are pooled after their projection",
    "MaskUnitAttention": "its tokens are in the order of its units",
}


def known_class(module: object) -> type | None:
    """Return the class in the table that a layer has or inherits; None if there is none."""
    return next((kind for kind in type(module).__mro__ if class_path(kind) in TABLE), None)


def find_row(module: object) -> tuple[str, Any, Row]:
    """Return the path of a layer's known class, the class, and its row; refuse a layer without a row with a reason."""
    path = class_path(kind := known_class(module) or type(module))
    if path not in TABLE:
        why = next((f": {reason}" for names, reason in NO_ROW.items() if kind.__name__ in names.split()), "")
        raise ValueError(f"no row of the table is for {path}{why}")
    return path, kind, TABLE[path]

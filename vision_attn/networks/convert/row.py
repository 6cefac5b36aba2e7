"""One row of the table: what is known of another library's attention layer, and the block that is made of it.

Our ``qkv`` has rows ordered (qkv, heads, width), or ``[heads·d, kv_heads·d, kv_heads·e]`` with other widths. Shapes
cannot tell one order from another, so every function that brings rows into ours has its line here:

==========================================  ===================================================  ======================
weight                                      found in                                             brought into order by
==========================================  ===================================================  ======================
``((qkv n d), c)``                          torch, timm, torchvision                             :func:`rows_of`
``((n qkv d), c)``                          timm's MaxxViT and CoAtNet, unless they say          :func:`heads_first`
``((n d), c)``, ``((m d), c)``, …           transformers, diffusers                              :func:`side_by_side`
``(c, n, d)``                               Keras: queries, keys, values, gate                   :func:`dense_rows`
==========================================  ===================================================  ======================

Nothing is detached before :func:`filled` copies it: whether a parameter is trained is seen by whether what it is made
of asks for a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention.blocks import Attention, Attention1d, Attention2d, Attention3d
from vision_attn.attention.blocks.projection import to_memory_format_of
from vision_attn.networks.convert.proof import check_source, check_without, drop_of, random_map, random_twin
from vision_attn.networks.insertion.makers import ATTENTION_BLOCKS

Module = TypeVar("Module", bound=nn.Module)

#: By the number of axes of a map.
BLOCKS: dict[int, type[Attention]] = {1: Attention1d, 2: Attention2d, 3: Attention3d}

#: What a row's ``call`` returns for a call that the layer has to serve itself.
OWN: Any = object()

# --- the rows of a weight, in our order -------------------------------------------------------------------------------


class Rows(NamedTuple):
    """A linear map of channels."""

    #: ``(rows, channels)``
    weight: Tensor
    #: ``(rows,)``, or None
    bias: Tensor | None = None


#: Projections of a block, and its other parameters, by name.
Weights: TypeAlias = dict[str, Any]


def rows_of(layer: Any) -> Rows:
    """The rows of a linear layer or a 1×1 convolution, as they are.

    >>> rows_of(torch.nn.Conv2d(8, 24, 1)).weight.shape
    torch.Size([24, 8])
    """
    return Rows(layer.weight.flatten(1), layer.bias)


def named(qkv: str, proj: str = "") -> Callable[[Any], Weights]:
    """The weights of a layer whose projections have these names: of queries, keys and values in one, two or three.

    After a bar come those of a context, so that nothing is projected that is not used.

    >>> list(named("q k v", "out")(nn.ModuleDict({name: nn.Linear(4, 4) for name in ("q", "k", "v", "out")})))
    ['qkv', 'proj']
    """

    def weights(layer: Any) -> Weights:
        parts = [[rows_of(layer.get_submodule(name)) for name in names.split()] for names in qkv.split("|")]
        inputs = input_projections(*parts[0]) if len(parts) == 1 else {"q": parts[0][0], "kv": side_by_side(*parts[1])}
        return {**inputs, "proj": rows_of(layer.get_submodule(proj))} if proj else inputs

    return weights


def folded(layer: Any, norm: Any) -> Rows:
    """The rows of a convolution and the batch norm after it, in evaluation mode."""
    rows = with_bias(rows_of(layer))
    factor = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    return Rows(rows.weight * factor[:, None], (rows.bias - norm.running_mean) * factor + norm.bias)


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
    """One projection of several, their rows after each other; with a bias if one of them has.

    >>> side_by_side(Rows(torch.ones(8, 4)), Rows(torch.ones(2, 4))).weight.shape
    torch.Size([10, 4])
    """
    if any(part.bias is not None for part in parts):
        parts = tuple(with_bias(part) for part in parts)
    weights, biases = zip(*parts, strict=True)
    return Rows(torch.cat(weights), None if biases[0] is None else torch.cat(biases))


def input_projections(q: Rows, *kv: Rows) -> dict[str, Rows]:
    """The projections of a block: ``qkv``, or ``q`` and ``kv`` where these are of other channels than queries."""
    if not kv:
        return {"qkv": q}
    if kv[0].weight.shape[1] == q.weight.shape[1]:
        return {"qkv": side_by_side(q, *kv)}
    return {"q": q, "kv": side_by_side(*kv)}


def with_bias(rows: Rows) -> Rows:
    """The rows with a bias: of zeros, which are not trained, if they have none."""
    return Rows(rows.weight, rows.weight.new_zeros(len(rows.weight)) if rows.bias is None else rows.bias)


# --- the block that they fill -----------------------------------------------------------------------------------------


def block_of(weights: Weights, rank: int, num_heads: int, kind: Any = None, **own: Any) -> Attention:
    """The block for these weights, on the meta device. What their shapes and names tell need not be said."""
    if rank not in BLOCKS:
        raise ValueError(f"rank must be the axes of a map, 1, 2 or 3, for Attention1d, 2d or 3d; got {rank!r}")
    first, out = weights.get("qkv") or weights["q"], weights["proj"]
    rows, kv_heads, e = len(first.weight), own.get("num_kv_heads", num_heads), out.weight.shape[1] // num_heads
    return (kind or BLOCKS[rank])(
        first.weight.shape[1],
        num_heads,
        key_dim=rows // num_heads if "q" in weights else (rows - kv_heads * e) // (num_heads + kv_heads),
        value_dim=e,
        out_channels=len(out.weight),
        context_channels=weights["kv"].weight.shape[1] if "kv" in weights else None,
        qkv_bias=first.bias is not None,
        proj_bias=out.bias is not None,
        qk_norm="cosine" if "q_norm.logit_scale" in weights else "q_norm.weight" in weights,
        output_gate="gate" in weights,
        device="meta",
        **own,
    )


def parameters_of(weights: Weights, rank: int) -> dict[str, Tensor]:
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
    copies = {name: x.detach().clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}
    block.load_state_dict(copies, assign=True)
    for name, parameter in block.named_parameters():
        parameter.requires_grad_(tensors[name].requires_grad)
    return block.train(training)


def residual(attn: Attention, norm: Any = None) -> nn.Module:
    """``x + attn(norm(x))`` with a group norm as the layer's, or none; the gate of ones is not trained."""
    block: Any = ATTENTION_BLOCKS[attn.rank](attn.channels, 1, device="meta")
    block.attn, block.zero_init = attn, False
    block.norm = nn.Identity() if norm is None else deepcopy(norm)
    block.gate = nn.Parameter(attn.proj.weight.new_ones(attn.channels).detach(), requires_grad=False)
    return block.train(attn.training)


class PaddedAttention2d(Attention2d):
    """Attention in windows that pads its map with zeros, as far as the windows reach, and attends to them."""

    #: whether what it was made of pads after it has shifted, which this does not
    rolls_first = False

    def forward(self, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        if isinstance(x, torch.fx.Proxy):
            return super().forward(x, mask, context)
        padded = self.padded(x, mask, context)
        y = super().forward(padded, mask, context)
        return y if padded is x else to_memory_format_of(x, y[..., : x.shape[-2], : x.shape[-1]])

    def attention_weights(self, x: Tensor, mask: Any = None, queries: Any = None, context: Any = None) -> Tensor:
        """Of the positions of the map as it is padded."""
        return super().attention_weights(self.padded(x, mask, context), mask, queries, context)

    def padded(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> Tensor:
        size: Any = self.pattern.size  # type: ignore[union-attr]
        rows, columns = (size, size) if isinstance(size, int) else size
        below, right = -x.shape[-2] % rows, -x.shape[-1] % columns
        if not below and not right:
            return x
        rolled = self.rolls_first and getattr(self.pattern, "shift", 0) not in (0, (0, 0))
        if mask is not None or context is not None or rolled:
            what = f"{x.shape[-2]}×{x.shape[-1]} with a shift, a mask or a context"
            raise ValueError(f"x must be of whole windows of {rows}×{columns}; got {what}: pad it yourself")
        return F.pad(x, (0, right, 0, below))


class WholeWindows2d(PaddedAttention2d):
    """For a layer whose network rolls its map before it pads it."""

    rolls_first = True


# --- the row ----------------------------------------------------------------------------------------------------------


def run_on_tokens(block: Any, rank: int, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Any:
    """Call a block with ``rank`` axes on maps; the positions are tokens in a row for a block with one axis."""
    if rank > 1:
        return block(x, mask, context)
    return block(x.flatten(2), mask, None if context is None else context.flatten(2)).unflatten(2, x.shape[2:])


def unbiased(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """For a layer that adds nothing to its logits: a call with more than a map is its own."""
    return OWN if any(given is not None for given in (*args, *kwargs.values())) else None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One attention layer of another library; all functions are given the layer first.

    ``attend`` stands for the block: ``attend(x, mask=None, context=None)`` on ``(b, channels, *axes)``. A layer of
    tokens that knows the size of their map gives the map, ``(b, channels, h, w)``, so that it can be captured.
    """

    #: the block's parameters by name, made of the layer's
    weights: Callable[[Any], Weights]
    #: arguments of the block that its weights do not tell, each an attribute of the layer by name, a function of it or
    #: a value; ``num_heads`` is the layer's own unless it is among them
    options: Mapping[str, Any] = field(default_factory=dict)
    #: how what it is given lies: tokens ``b t c``, or maps with their channels first or last
    axes: str = "b c h w"
    #: its dropouts, of the weights and of the output
    drops: tuple[str, str] = ("attn_drop", "proj_drop")
    #: parts and settings that no block has, with a remedy
    refuses: Mapping[str, str] = field(default_factory=dict)
    #: those that the layer does around the block when it is swapped, and a block alone does not
    around: tuple[str, ...] = ()
    #: ``(layer, x, *args)`` to what a call adds to the logits, or :data:`OWN`; ``x`` has its channels first
    bias: Callable[..., Any] = unbiased
    #: ``(layer, attend, *args)`` to what the layer gives, or :data:`OWN`, if that is more than ``attend(x, bias)``
    call: Callable[..., Any] | None = None
    #: the size of a map to try it with
    size: Callable[[Any], tuple[int, ...]] | None = None
    #: arguments to try it with, if these are not one map
    example: Callable[[Any], tuple[Any, ...]] | None = None
    #: options of the block, for a layer that is given the groups of a map
    groups: Callable[[Any], dict[str, Any]] | None = None
    #: ``(layer, block)`` to a module with more than attention, for ``from_layer`` alone
    finish: Callable[[Any, Any], nn.Module] = lambda layer, block: block
    #: gives a copy of the layer, with other weights, to be run
    twin: Callable[[Any, torch.dtype], AbstractContextManager[Any]] = random_twin
    #: in which it is run to prove it
    dtype: torch.dtype = torch.float64
    #: what a call of it is told beside these arguments
    told: Mapping[str, bool] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Axes of the block's maps when it is swapped."""
        return len(self.axes.split()) - 2

    def refuse(self, layer: Any) -> None:
        """Refuse what no proof can see, or what can be said better by name."""
        check_source(layer)
        check_without(layer, self.refuses)

    def empty_block(self, layer: Any, weights: Weights, **given: Any) -> Attention:
        """The block on the meta device, without weights."""
        attn_drop, proj_drop = (drop_of(layer, name) for name in self.drops)
        options: dict[str, Any] = {"num_heads": "num_heads", "rank": self.rank, **self.options}
        options = {name: getattr(layer, x) if isinstance(x, str) else x for name, x in options.items()}
        own = {name: x(layer) if callable(x) else x for name, x in options.items()}
        block = block_of(weights, **{"attn_drop": attn_drop, "proj_drop": proj_drop, **own, **given})
        for name in ("q_norm", "k_norm"):  # of whose eps no state dict knows
            if isinstance(norm := getattr(block, name), nn.LayerNorm):
                norm.eps = getattr(layer, name).eps
        return block.train(self.told.get("training", layer.training))

    def block(self, layer: Any, **options: Any) -> nn.Module:
        """The block, or what has it and does more, with copies of the weights."""
        weights = self.weights(layer)
        block = self.empty_block(layer, weights, **options)
        return self.finish(layer, filled(block, parameters_of(weights, block.rank), training=block.training))

    def forward(self, layer: Any, attend: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
        """What the layer gives for a call, by a block, or :data:`OWN`."""
        return (self.call or self.attended)(layer, attend, *args, **kwargs)

    def attended(self, layer: Any, attend: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dim() != self.rank + 2:
            return OWN
        last = self.axes.endswith("c")
        x = x.movedim(-1, 1) if last else x
        bias = self.bias(layer, x, *args, **kwargs)
        if bias is OWN:
            return OWN
        y = attend(x, bias)
        return y.movedim(1, -1) if last else y

    def arguments(self, layer: Any) -> tuple[Any, ...]:
        """Arguments to try the layer with."""
        if self.example is not None:
            return self.example(layer)
        weights, size = self.weights(layer), (8, 4, 5)[: self.rank]
        channels = (weights.get("qkv") or weights["q"]).weight.shape[1]
        if self.size is not None:
            size = self.size(layer)
        elif self.rank == 1 and isinstance(bias := self.bias(layer, torch.empty(0, 0, 0)), Tensor):
            size = bias.shape[-1:]  # the tokens that it is for
        x = random_map(2, channels, *size)
        return (x.movedim(1, -1) if self.axes.endswith("c") else x,)

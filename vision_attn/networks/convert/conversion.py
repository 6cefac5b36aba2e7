"""Supported attention layers of other libraries: a :class:`LayerConversion` for each layer, by the path of its class.

To support another layer, add its conversion to :mod:`.timm_layers` or :mod:`.other_layers`, with the weights in the
order of the blocks of this library, and the arguments of the block. ``from_layer``, ``swap_`` and the table in the
documentation use the conversions. Libraries are not imported to list them. Each block is compared with its layer when
the layer is converted.

Weights are not detached before :meth:`LayerConversion.make_block` copies them, because a parameter of the block
requires a gradient if the tensor that it is copied from does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from vision_attn.attention.blocks import Attention
from vision_attn.attention.blocks.gated_residual import ATTENTION
from vision_attn.networks.convert.equivalence import class_path, get_dropout, random_map, randomized_copy
from vision_attn.networks.convert.projection import to_parameters
from vision_attn.networks.inspection.selection import own_children

Attend: TypeAlias = Callable[..., Tensor]

#: Returned for a call that the block does not support. The original layer then runs the call.
FALLBACK: Any = object()


def run_converted(block: Any, rank: int, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Any:
    """Call a block on feature maps; a block of rank 1 receives the positions as a sequence of tokens."""
    if rank > 1:
        return block(x, mask, context)
    return block(x.flatten(2), mask, None if context is None else context.flatten(2)).unflatten(2, x.shape[2:])


def repeat_masks(mask: Tensor, x: Tensor) -> Tensor:
    """Return the masks of shifted windows, given one for each window of an image, for the windows of a batch."""
    return mask.repeat(len(x) // len(mask), 1, 1)[:, None]


def no_bias(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return None, or :data:`FALLBACK` for a call with arguments other than the feature map."""
    return FALLBACK if any(value is not None for value in (*args, *kwargs.values())) else None


@dataclass(frozen=True, kw_only=True)
class LayerConversion:
    """Conversion of one attention layer of another library; the first argument of all functions is the layer.

    ``attend(x, mask=None, context=None, **tensors)`` runs the block on ``(b, channels, *axes)``; ``tensors`` are the
    parameters and buffers of the block that change with each call. A layer of tokens that receives the size of their
    feature map passes the feature map ``(b, channels, h, w)``, so that its attention can be captured.
    """

    #: the projections and other parameters of the block, by name
    weights: Callable[[Any], dict[str, Any]]
    #: further arguments of the block: the name of an attribute of the layer, a function of the layer, or a value;
    #: by default, ``num_heads`` is read from the layer
    options: Mapping[str, Any] = field(default_factory=dict)
    #: layout of the input: tokens, or feature maps with channels first (``b c h w``) or last
    axes: str = "b t c"
    #: paths of the dropouts of the weights and of the output
    dropouts: tuple[str, str] = ("attn_drop", "proj_drop")
    #: submodules and settings that blocks do not support, with a remedy
    unsupported: Mapping[str, str] = field(default_factory=dict)
    #: submodules that a swapped layer runs before or after the block, and that ``from_layer`` does not support
    swap_only: tuple[str, ...] = ()
    #: reason why ``from_layer`` does not support the layer at all
    only_swap: str = ""
    #: function ``(layer, x, *args)`` that returns the bias of the logits, or :data:`FALLBACK`; ``x`` is channels-first
    bias: Callable[..., Any] = no_bias
    #: function ``(layer, attend, *args)`` that returns the output, or :data:`FALLBACK`; by default ``attend(x, bias)``
    call: Callable[..., Any] | None = None
    #: function that returns the size of the feature map for the comparison
    size: Callable[[Any], tuple[int, ...]] | None = None
    #: function that returns the arguments for the comparison, by default one feature map
    example: Callable[[Any], tuple[Any, ...]] | None = None
    #: function that returns options of the block, for a layer whose input is the groups of a feature map
    groups: Callable[[Any], dict[str, Any]] | None = None
    #: context manager that yields a copy of the layer in float64 with random weights
    make_copy: Callable[[Any], AbstractContextManager[Any]] = randomized_copy
    #: keyword arguments of the layer's call in the comparison
    call_options: Mapping[str, bool] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Number of axes of positions when the layer is swapped."""
        return len(self.axes.split()) - 2

    def empty_block(self, layer: Any, weights: dict[str, Any], **others: Any) -> Attention:
        """Create the block on the meta device; its widths and options are inferred from the weights."""
        attn_drop, proj_drop = (get_dropout(layer, name) for name in self.dropouts)
        options: dict[str, Any] = {"num_heads": "num_heads", "rank": self.rank, **self.options}
        for name, source in options.items():
            value = getattr(layer, source) if isinstance(source, str) else source
            options[name] = source(layer) if callable(source) else value
        options |= others
        if (rank := options.pop("rank")) not in ATTENTION:
            raise ValueError(f"rank must be 1, 2 or 3, for Attention1d, Attention2d or Attention3d, got {rank!r}")
        first, out, heads = weights.get("qkv") or weights["q"], weights["proj"], options["num_heads"]
        rows, kv_heads, e = len(first.weight), options.get("num_kv_heads", heads), out.weight.shape[1] // heads
        block: Attention = (options.pop("kind", None) or ATTENTION[rank])(
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
        for name in ("q_norm", "k_norm"):  # a copy, because state dicts contain neither eps nor the kind of a norm
            if (theirs := getattr(layer, name, None)) is not None and isinstance(getattr(block, name), nn.LayerNorm):
                setattr(block, name, deepcopy(theirs).to("meta"))
        return block.train(self.call_options.get("training", layer.training))

    def make_block(self, layer: Any, **options: Any) -> Any:
        """Create the block with copies of the weights; ``requires_grad`` is kept."""
        weights = self.weights(layer)
        block = self.empty_block(layer, weights, **options)
        tensors = to_parameters(weights, block.rank)
        if len({p.requires_grad for p in layer.parameters() if p.is_floating_point()}) > 1:
            what = "the layer has frozen and trainable parameters, which can be parts of one parameter of the block"
            raise ValueError(f"{what}. Freeze all of them or none, and then parameters of the block")
        copies = {name: x.detach().clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}
        block.load_state_dict(copies, assign=True)
        for name, parameter in block.named_parameters():
            parameter.requires_grad_(tensors[name].requires_grad)
        return block

    def forward(self, layer: Any, attend: Attend, *args: Any, **kwargs: Any) -> Any:
        """Run a call of the layer through a block, and return the output or :data:`FALLBACK`."""
        return (self.call or self.attend_map)(layer, attend, *args, **kwargs)

    def attend_map(self, layer: Any, attend: Attend, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        last = self.axes.endswith("c")
        if x.dim() != self.rank + 2:
            return FALLBACK
        x = x.movedim(-1, 1) if last else x
        if (bias := self.bias(layer, x, *args, **kwargs)) is FALLBACK:
            return FALLBACK
        y = attend(x, bias)
        return y.movedim(1, -1) if last else y

    def arguments(self, layer: Any) -> tuple[Any, ...]:
        """Return the arguments for the comparison."""
        if self.example is not None:
            return self.example(layer)
        weights, size = self.weights(layer), (8, 4, 5)[: self.rank] if self.size is None else self.size(layer)
        if self.rank == 1 and isinstance(bias := self.bias(layer, torch.empty(0, 0, 0)), Tensor):
            size = bias.shape[-1:]  # the number of tokens that the bias is for
        x = random_map(2, (weights.get("qkv") or weights["q"]).weight.shape[1], *size)
        return (x.movedim(1, -1) if self.axes.endswith("c") else x,)


# --- the table --------------------------------------------------------------------------------------------------------

#: Rows by class path, which the modules ``*_layers`` add.
CONVERSIONS: dict[str, LayerConversion] = {}

#: Reasons why attention layers are not supported, by class names.
UNSUPPORTED = {
    "XCA ChannelAttention ChannelAttentionV2 CrossCovarianceAttn": "it attends to channels, not to positions",
    "LiteMLA FactorAttnConvRelPosEnc LinearSelfAttention EfficientAdditiveAttention": "it has no softmax",
    "ClassAttn ClassAttention": "only the class token attends",
    "AttentionPool2d RotAttentionPool2d": "it pools the feature map into one token",
    "GPSA": "it adds two softmaxes, one for content and one for positions",
    "TalkingHeadAttn": "it mixes the heads before and after the softmax",
    "CascadedGroupAttention": "each head receives the output of the previous head",
    "OutlookAttention": "its attention weights are computed without keys",
    "MultiScaleAttention": "queries are pooled after the projection",
    "MaskUnitAttention": "tokens are ordered by mask unit",
}


def known_class(module: object) -> type | None:
    """Return the class of a layer, or the first of its base classes, that is in the table; None if there is none."""
    return next((kind for kind in type(module).__mro__ if class_path(kind) in CONVERSIONS), None)


def find_conversion(module: nn.Module) -> tuple[str, Any, LayerConversion]:
    """Return the class path, the class and the conversion of a layer, or raise an error with the reason."""
    path = class_path(kind := known_class(module) or type(module))
    if path in CONVERSIONS:
        return path, kind, get_conversion(path)
    why = next((f": {reason}" for names, reason in UNSUPPORTED.items() if kind.__name__ in names.split()), "")
    linear = all(isinstance(getattr(module, name, None), nn.Linear) for name in ("qkv", "proj"))
    if why or not linear or not isinstance(getattr(module, "num_heads", None), int):
        raise ValueError(f"{path} is not supported{why or '. Pass an attention layer; docs/convert.md lists them'}")
    for name in (name for name in (*vars(module), *own_children(module)) if "drop" in name):
        if name not in ("attn_drop", "proj_drop") and get_dropout(module, name):
            raise ValueError(f"{path} is not supported: it has another dropout, {name!r}")
    return path, kind, get_conversion(path)


def get_conversion(path: str) -> LayerConversion:
    """Return the conversion of a class that :func:`find_conversion` has accepted, by path.

    Classes that repositories copied from timm are not in the table. Their calls with other arguments fall back.
    """
    return CONVERSIONS.get(path) or CONVERSIONS["timm.models.metaformer.Attention"]

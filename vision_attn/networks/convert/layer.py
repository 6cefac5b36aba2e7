"""What is known of an attention layer of another library: one record, for its converter and for :func:`swap_`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vision_attn.attention.blocks import Attention
from vision_attn.networks.convert.proof import difference, random_map
from vision_attn.networks.convert.refusal import REFUSED, check_kind, check_source, check_without, drop_of, path_of
from vision_attn.networks.convert.weights import (
    Weights,
    attention,
    check_rank,
    empty_attention,
    parameters_of,
)

__all__ = ["LAYERS", "OWN", "Layer", "converted", "known", "layer_of"]

Block = TypeVar("Block", bound=nn.Module)

#: What a layer's forward gives for a call that is the layer's own to serve.
OWN: Any = object()


def unbiased(module: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """For a layer that adds nothing to its logits: a call with more than a map is its own."""
    return OWN if any(given is not None for given in (*args, *kwargs.values())) else None


@dataclass(frozen=True)
class Layer:
    """The attention layers of one class.

    ``attend`` stands for the block: ``attend(x, mask=None, context=None)`` on ``(b, channels, *axes)``.
    """

    #: the block's, by name, made of the layer's; without ``proj`` where it does not project what it gives
    weights: Callable[[Any], Weights]
    #: arguments of the block that its weights do not tell
    options: Callable[[Any], dict[str, Any]] = lambda module: {"num_heads": module.num_heads}
    #: axes of what it attends to, 1 for tokens
    rank: int = 2
    #: whether its channels come last, as those of tokens do
    last: bool = False
    #: its projections, those that it has of them
    linear: tuple[str, ...] = ()
    #: its dropouts, of the weights and of the output
    drops: tuple[str, str] = ("attn_drop", "proj_drop")
    #: what no block has, with a remedy
    without: Mapping[str, str] = field(default_factory=dict)
    #: what ``forward`` does around the block, and a block alone does not
    around: Mapping[str, str] = field(default_factory=dict)
    #: refuses what else a block does not do
    check: Callable[[Any], None] = lambda module: None
    #: attributes that the block was made by: with others, the module serves itself
    settings: tuple[str, ...] = ("num_heads",)
    #: ``(module, x, *args)`` to what a call adds to the logits, or :data:`OWN`; ``x`` has its channels first
    bias: Callable[..., Any] = unbiased
    #: the size of a map to try it with
    size: Callable[[Any], tuple[int, ...]] | None = None
    #: ``(module, attend, *args)`` to what the layer gives, or :data:`OWN`, if that is more than ``attend(x, bias)``
    call: Callable[..., Any] | None = None
    #: arguments to try it with, if these are not one map
    arguments: Callable[[Any], tuple[Any, ...]] | None = None
    #: calls that are the layer's own to serve
    own: str = ""

    def refuse(self, module: Any) -> None:
        """Refuse what a block does not do in the layer's place."""
        check_source(module, *self.linear)
        check_without(module, self.without)
        self.check(module)

    def arguments_of_block(self, module: Any) -> dict[str, Any]:
        attn_drop, proj_drop = (drop_of(module, name) for name in self.drops)
        return {"attn_drop": attn_drop, "proj_drop": proj_drop, **self.options(module)}

    def block(self, module: Any, rank: int | None = None, **options: Any) -> Attention:
        """The block, with copies of the weights."""
        options = {**self.arguments_of_block(module), **options}
        block = attention(rank or self.rank, self.weights(module), training=module.training, **options)
        return with_eps(block, module)

    def empty_block(self, module: Any) -> Attention:
        """The block, to which weights are lent."""
        weights = self.weights(module)
        block = with_eps(empty_attention(self.rank, weights, **self.arguments_of_block(module)), module)
        if "proj" not in weights:
            block.proj = nn.Identity()  # type: ignore[assignment]
        return block.train(module.training)

    def parameters(self, module: Any) -> dict[str, Tensor]:
        """What is lent to it."""
        return parameters_of(self.weights(module), self.rank)

    def forward(self, module: Any, attend: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
        """What the layer gives for a call, by a block, or :data:`OWN`."""
        if self.call is not None:
            return self.call(module, attend, *args, **kwargs)
        return self.attended(module, attend, *args, **kwargs)

    def attended(self, module: Any, attend: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dim() != self.rank + 2:
            return OWN
        x = x.movedim(-1, 1) if self.last else x
        bias = self.bias(module, x, *args, **kwargs)
        if bias is OWN:
            return OWN
        y = attend(x, bias)
        return y.movedim(1, -1) if self.last else y

    def example(self, module: Any) -> tuple[Any, ...]:
        """Arguments to try the layer with."""
        if self.arguments is not None:
            return self.arguments(module)
        weights = self.weights(module)
        size = (3, 4, 5)[: self.rank] if self.size is None else self.size(module)
        x = random_map(2, (weights.get("qkv") or weights["q"]).weight.shape[1], *size)
        return (x.movedim(1, -1) if self.last else x,)


def with_eps(block: Attention, module: Any) -> Attention:
    """The block with the ``eps`` of the layer's norms of queries and keys, of which no state dict knows."""
    for name in ("q_norm", "k_norm"):
        if isinstance(norm := getattr(block, name), nn.LayerNorm):
            norm.eps = getattr(module, name).eps
    return block


#: By the path of the class, so that no library is imported to be asked.
LAYERS: dict[str, Layer] = {}


def layer_of(module: nn.Module) -> tuple[str, type[nn.Module]] | None:
    """The path of the class that a module is known by, and the class."""
    return next(((path_of(kind), kind) for kind in type(module).__mro__ if path_of(kind) in LAYERS), None)


def known(module: nn.Module, *paths: str) -> Layer:
    """What is known of a module, which has to be of one of these classes."""
    check_kind("module", module, *paths)
    return next(LAYERS[path] for kind in type(module).__mro__ if (path := path_of(kind)) in paths)


def converted(
    module: Any, layer: Layer, whole: Callable[..., Any] | None = None, *, rank: int | None = None, **options: Any
) -> Any:
    """The block for a layer, or what ``whole`` makes of it, after it was seen to be right on a copy.

    A rank or a pattern that is given is that of the block alone: proven are the weights, on what the layer is given.
    """
    check_rank(layer.rank if rank is None else rank)
    layer.refuse(module)
    check_without(module, layer.around)

    def compute(twin: Any, *args: Any) -> Any:
        if whole is not None:
            x, *contexts = args
            return whole(twin, rank=x.dim() - 2)(x, None, *(tokens.mT[..., None] for tokens in contexts))
        block = layer.block(twin)
        return layer.forward(twin, lambda x, mask=None, context=None: block(x, None, context), *args)

    difference(module, compute, layer.example)
    with torch.inference_mode(False), torch.enable_grad():
        return (whole or layer.block)(module, rank=rank or layer.rank, **options)


def refused(reason: str) -> Layer:
    def refuse(module: Any) -> Any:
        raise ValueError(reason)

    return Layer(refuse, check=refuse)


LAYERS |= {path: refused(reason) for path, reason in REFUSED.items()}

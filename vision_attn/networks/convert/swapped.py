"""A swapped module: the object that it was, of a class whose forward hands the map to a block.

Its parameters, children and hooks stay, so that checkpoints, optimizers and wrappers are not affected. The block has no
weights: each call runs a shallow copy of it with the weights that the module has at that time, so that threads do not
disturb each other. A call that the block does not support is served by the module as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from vision_attn.attention.blocks import Attention
from vision_attn.attention.patterns import Grid, Window
from vision_attn.attention.scopes import ORIGINAL
from vision_attn.networks.convert.proof import HOOKS
from vision_attn.networks.convert.row import OWN, Row, parameters_of, run_on_tokens
from vision_attn.networks.convert.table import TABLE

#: The attribute of a swapped module that holds its :class:`Swap`.
SWAPPED = "swapped"

#: The attribute of a block that runs for a module with the sizes of its maps, or of its tokens, and of the context's.
MAP_SIZES = "map_sizes"


@dataclass
class Swap:
    """What a swapped module keeps, beside what it had."""

    #: the path of the class that it is known by
    family: str
    #: without weights
    block: Attention
    #: what the block was made by, of the module as it was
    traits: tuple[Any, ...]
    #: how the network cuts its map before the module sees it; None where it does not
    cut: Window | Grid | None = None
    #: number of class and register tokens before those of the map, where it takes tokens; None where it is not known
    prefix: int | None = None
    #: sizes of the grid of patches, by the size of the image, where the network declares them
    grids: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    #: the greatest difference of the two in the proof
    difference: float = 0.0

    @property
    def row(self) -> Row:
        return TABLE[self.family]

    def __str__(self) -> str:
        how = f"pattern={self.block.pattern!r}" if self.cut is None else f"on a map cut by {self.cut!r}"
        proof = "" if self.row.dtype == torch.float64 else f", proven in {self.row.dtype}"
        return f"{type(self.block).__name__}, {how}{proof}"

    def attend(self, module: nn.Module, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        """Run the block with the weights that the module has now, in any number of threads at a time."""
        weights = parameters_of(self.row.weights(module), self.block.rank)
        sizes = tuple(x.shape[2:]), None if context is None else tuple(context.shape[2:])
        block: Any = with_weights(self.block, weights, {ORIGINAL: self.block, MAP_SIZES: sizes})
        return run_on_tokens(block, self.block.rank, x, mask, context)


def with_weights(block: nn.Module, weights: Mapping[str, Tensor], notes: Mapping[str, Any], prefix: str = "") -> Any:
    """Return a shallow copy of a block for one call, with these weights and attributes; the block is left alone."""
    if torch.compiler.is_dynamo_compiling():  # which cannot trace the copy of a module
        return lambda *args: torch.func.functional_call(block, {**weights}, args, tie_weights=False)
    copied = object.__new__(type(block))
    children = {name: with_weights(x, weights, {}, f"{prefix}{name}.") for name, x in block.named_children()}
    parameters = {name: weights.get(prefix + name, value) for name, value in block._parameters.items()}
    vars(copied).update(vars(block), **notes, _parameters=parameters, _modules={**block._modules, **children})
    return copied


class Swapped(nn.Module):
    """What the class of a swapped module has before its own."""

    @property
    def running_block(self) -> Attention:
        """The block that runs for the module; it is not a child of it."""
        swap: Swap = vars(self)[SWAPPED]
        return swap.block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        proxy: Any = next((x for x in (*args, *kwargs.values()) if isinstance(x, Proxy)), None)
        if proxy is not None:  # one node of the graph, as of a block
            return proxy.tracer.create_proxy("call_module", proxy.tracer.path_of_module(self), args, kwargs)
        swap: Swap = vars(self)[SWAPPED]
        if traits_of(self, swap.traits[-1]) == swap.traits and not torch.jit.is_tracing():  # type: ignore[attr-defined]
            y = swap.row.forward(self, partial(swap.attend, self), *args, **kwargs)
            if y is not OWN:
                return y
        return super().forward(*args, **kwargs)

    def train(self, mode: bool = True) -> Any:
        vars(self)[SWAPPED].block.train(mode)
        return super().train(mode)

    def __reduce_ex__(self, protocol: Any) -> Any:  # its class is made here, and is in no module
        _, _, *rest = tuple(super().__reduce_ex__(2))
        return (empty, (original_class(self),), *rest)


@cache
def swapped_class(kind: Any) -> Any:
    return type(f"Swapped{kind.__name__}", (Swapped, kind), {"__module__": __name__})


def original_class(module: nn.Module) -> type[nn.Module]:
    return type(module).__bases__[1] if isinstance(module, Swapped) else type(module)


def empty(kind: Any) -> Any:
    """For copies and pickles: a swapped module of this class, before it has anything."""
    made = swapped_class(kind)
    return made.__new__(made)


def traits_of(module: nn.Module, names: Iterable[str] = ()) -> tuple[Any, ...]:
    """What a block was made by: parts and their hooks, dropouts and their modes, and settings, of these names or all.

    A compiler of an older torch can ask for an attribute, and not look through all of them.
    """
    parts = [*module.modules()][1:]
    hooked = any(getattr(part, hooks) for part in parts for hooks in HOOKS)
    drops = [(part.p, part.training == module.training) for part in parts if isinstance(part, nn.Dropout)]
    if not names:
        public = (item for item in vars(module).items() if not item[0].startswith("_") and item[0] != "training")
        names = [name for name, x in public if isinstance(x, (int, float, list, tuple))]
    return parts, hooked, drops, {name: getattr(module, name, None) for name in names}

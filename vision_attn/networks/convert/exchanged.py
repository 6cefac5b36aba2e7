"""A module that is exchanged: what it keeps, how it lends its weights to a block, and where its groups lie on the map.

It stays the object that it is, with its parameters, children and hooks, so that checkpoints, optimizers and wrappers
know nothing of it. Only its class changes, to one whose forward hands the map to a block of ours. The block has no
weights: each forward lends it those that the module has then, in its own order. What a block does not do, the module
does itself, as before.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from copy import copy as shallow_copy
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from vision_attn.attention.blocks import EXCHANGED, Attention
from vision_attn.attention.patterns import AnyPattern, Grid, Partition, Window, partition_of, resolve_pattern
from vision_attn.networks.convert.layer import LAYERS, OWN, Layer
from vision_attn.networks.convert.refusal import HOOKS, path_of
from vision_attn.networks.insertion.attach import exchange_ as exchange
from vision_attn.networks.insertion.record import token_grid

__all__ = [
    "Exchange",
    "Swapped",
    "bare_copy",
    "lies_in",
    "original_class",
    "parts_of",
    "put_in",
    "settings_of",
]


@dataclass
class Exchange:
    """What a module that is exchanged keeps, beside what it had."""

    #: the path of the class that it is known by
    family: str
    #: without weights
    block: Attention
    #: the modules inside it, as they were
    inside: tuple[nn.Module, ...]
    #: what the block was made by
    settings: tuple[Any, ...]
    #: how the network cuts its map before the module sees it; None where it does not
    cut: Window | Grid | None = None
    #: class and register tokens before those of the map, if it takes tokens; None where that is not known
    prefix: int | None = None
    #: the module whose place it has, if it is a copy
    original: nn.Module | None = None
    #: weights of the block that are views of these parameters, by what they were then, for where nothing is trained
    views: tuple[list[tuple[int, int]], dict[str, Tensor]] | None = None
    #: for the block, which two threads would lend other weights at once
    lock: Any = field(default_factory=threading.RLock)

    @property
    def layer(self) -> Layer:
        return LAYERS[self.family]

    def fits(self, module: nn.Module) -> bool:
        """Whether the block still computes what the module does: no part has been exchanged, hooked or set anew."""
        return (
            tuple(parts_of(module)) == self.inside
            and not any(hooked(part) for part in self.inside)
            and settings_of(module, self.layer, self.inside) == self.settings
            and not torch.jit.is_tracing()  # type: ignore[attr-defined]  # which knows nothing of weights that are lent
        )

    def attend(self, module: nn.Module, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        if torch.compiler.is_compiling():
            weights = self.layer.parameters(module)
            y: Tensor = torch.func.functional_call(self.block, weights, (x, mask, context), tie_weights=False)
            return y
        weights = self.weights(module)
        with self.lock:
            if self.block.training != module.training:
                self.block.train(module.training)
            lent = [(*self.slots[key], weight) for key, weight in weights.items()]
            try:  # an attribute hides the parameter of its name; functional_call takes longer than a small block
                for attributes, name, weight in lent:
                    attributes[name] = weight
                y = self.block(x, mask, context)
            finally:
                for attributes, name, _ in lent:
                    attributes.pop(name, None)
        return y

    @cached_property
    def slots(self) -> dict[str, tuple[dict[str, Any], str]]:
        """Where each weight goes: the attributes of a part of the block, and its name there."""
        return {
            key: (vars(self.block.get_submodule(path)), name)
            for key, _ in (*self.block.named_parameters(), *self.block.named_buffers())
            for path, _, name in [key.rpartition(".")]
        }

    def weights(self, module: nn.Module) -> dict[str, Tensor]:
        """Those of the block; kept where they are the parameters' own memory, and so follow what is written to it."""
        parameters = [x for part in (module, *self.inside) for x in part._parameters.values() if x is not None]
        if torch.is_grad_enabled() or any(type(x) is not nn.Parameter or x.is_meta for x in parameters):
            return self.layer.parameters(module)
        now = [(id(x), x.data_ptr()) for x in parameters]
        if self.views is None or self.views[0] != now:
            weights, memory = self.layer.parameters(module), {storage_of(x) for x in parameters}
            self.views = (now, weights) if memory.issuperset(map(storage_of, weights.values())) else None
            return weights
        return self.views[1]

    @property
    def sees(self) -> str:
        """What the block is given: ``"maps"``, ``"groups"`` of maps that are cut, ``"tokens"``, or ``"unknown"``."""
        if self.cut is not None:
            return "groups"
        return "maps" if self.block.rank == 2 else "unknown" if self.prefix is None else "tokens"

    def placed(self, x: Tensor, images: int, image_size: tuple[int, int]) -> tuple[Partition, int] | None:
        """How the groups or tokens that the block is given lie on the maps of so many images of a size.

        With it comes how many tokens there are before those of the map. None: they lie on no map of that aspect.
        """
        window, prefix = tuple(x.shape[2:]), self.prefix or 0
        if self.cut is None:
            size = token_grid(window[0] - prefix, *image_size)
            pattern: AnyPattern = resolve_pattern("full")
        else:
            window = window if len(window) == 2 else pair(self.cut.size)  # which may be another than at the exchange
            pattern = replace(self.cut, size=window)
            groups, (rows, columns) = len(x) // images, image_size
            tiles = (1, 1) if groups == 1 else token_grid(groups, rows * window[1], columns * window[0])
            size = None if tiles is None else (tiles[0] * window[0], tiles[1] * window[1])
        if size is None:
            return None
        return partition_of(pattern.partitioner(2), x.new_empty(1, 1, *size)), prefix

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("lock", "slots", "views")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=threading.RLock(), views=None)


class Swapped(nn.Module):
    """What the class of an exchanged module has before its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        proxy: Any = next((x for x in (*args, *kwargs.values()) if isinstance(x, Proxy)), None)
        if proxy is not None:  # one node of the graph, as of a block
            return proxy.tracer.create_proxy("call_module", proxy.tracer.path_of_module(self), args, kwargs)
        exchanged: Exchange = vars(self)[EXCHANGED]
        if exchanged.fits(self):
            y = exchanged.layer.forward(self, partial(exchanged.attend, self), *args, **kwargs)
            if y is not OWN:
                return y
        return super().forward(*args, **kwargs)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        vars(self)[EXCHANGED].block.train(mode)
        return self

    def extra_repr(self) -> str:
        block = vars(self)[EXCHANGED].block
        return ", ".join(filter(None, (super().extra_repr(), f"by {type(block).__name__}({block.extra_repr()})")))

    def __reduce_ex__(self, protocol: Any) -> Any:  # its class is made here, and is in no module
        _, _, *rest = tuple(super().__reduce_ex__(2))
        return (empty, (original_class(self),), *rest)


#: By the class of the module.
CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def swapped_class(kind: type[nn.Module]) -> type[nn.Module]:
    if kind not in CLASSES:
        CLASSES[kind] = type(f"Swapped{kind.__name__}", (Swapped, kind), {"__module__": __name__})
    return CLASSES[kind]


def original_class(module: nn.Module) -> type[nn.Module]:
    kind: type[nn.Module] = type(module).__bases__[1]
    return kind


def empty(kind: type[nn.Module]) -> nn.Module:
    """For copies and pickles: an exchanged module of this class, before it has anything."""
    made = swapped_class(kind)
    return made.__new__(made)


def hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def parts_of(module: nn.Module) -> Iterator[nn.Module]:
    """The modules inside a module, as ``modules()`` tells them in three times the time."""
    for part in module._modules.values():
        if part is not None:
            yield part
            yield from parts_of(part)


def storage_of(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def settings_of(module: Any, layer: Layer, inside: Iterable[nn.Module]) -> tuple[Any, ...]:
    drops = [part for part in inside if isinstance(part, nn.Dropout)]
    settings = [getattr(module, name) for name in layer.settings]
    return (
        *(tuple(value) if isinstance(value, list) else value for value in settings),
        *((part.p, part.training == module.training) for part in drops),
    )


def bare_copy(module: Any) -> Any:
    """The module without hooks, with the same parts."""
    bare = shallow_copy(module)
    for hooks in HOOKS:
        vars(bare)[hooks] = OrderedDict()
    return bare


def put_in(model: nn.Module, module: nn.Module, kept: Exchange, copied: bool = False) -> None:
    """Let a module, or a copy of it in its place, attend by a block."""
    if copied:
        new = deepcopy(module)
        exchange(model, module, new)
        kept.original, kept.inside, module = module, tuple(parts_of(new)), new
    vars(module)[EXCHANGED] = kept
    module.__class__ = swapped_class(type(module))


# --- where a module's groups or tokens lie on the map -----------------------------------------------------------------


def lies_in(kept: Exchange, module: nn.Module, around: list[nn.Module]) -> None:
    """Note how what the module is given lies on the map, as the modules around it say, the innermost last."""
    cuts = [CUTS[path_of(type(outer))](outer, module) for outer in around if path_of(type(outer)) in CUTS]
    kept.cut = cuts[-1] if cuts else None
    kept.prefix = next(filter(lambda count: count is not None, map(prefix_in, reversed(around))), None)


def cut_of_timm(outer: Any, module: nn.Module) -> Window | Grid:
    return (Window if outer.partition_block else Grid)(pair(outer.partition_size))


def cut_of_swin(outer: Any, module: nn.Module) -> Window:
    return Window(pair(outer.window_size), pair(outer.shift_size))


#: By the path of the class around a module: how it cuts the map that it is given.
CUTS: dict[str, Callable[[Any, Any], Window | Grid]] = {
    "timm.models.maxxvit.PartitionAttentionCl": cut_of_timm,
    "timm.models.maxxvit.PartitionAttention2d": cut_of_timm,
    "timm.models.maxxvit.ParallelPartitionAttention": lambda outer, module: (
        Window if module is outer.attn_block else Grid
    )(pair(outer.partition_size)),
    "timm.models.swin_transformer.SwinTransformerBlock": cut_of_swin,
    "timm.models.swin_transformer_v2.SwinTransformerV2Block": cut_of_swin,
    "torchvision.models.maxvit.PartitionAttentionLayer": lambda outer, module: (
        Window if outer.partition_type == "window" else Grid
    )(pair(module.size)),
}


def prefix_in(outer: nn.Module) -> int | None:
    """How many tokens a network puts before those of its map: as timm's say, and one in torchvision's."""
    count = getattr(outer, "num_prefix_tokens", None)
    if isinstance(count, int):
        return count
    return 1 if isinstance(getattr(outer, "class_token", None), nn.Parameter) else None


def pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])

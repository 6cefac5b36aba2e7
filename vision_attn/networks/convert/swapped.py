"""A swapped module: the same object with another class, whose forward calls a block.

Its parameters, children and hooks stay, so checkpoints, optimizers and wrappers are not affected. The block has no
weights: each call runs a shallow copy of the block with the current weights of the module, so that several threads can
run the module at the same time. Calls that the block does not support run the original forward.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from vision_attn.attention.blocks import Attention
from vision_attn.attention.scopes import ORIGINAL, scoped_values
from vision_attn.networks.convert.conversion import (
    FALLBACK,
    LayerConversion,
    find_conversion,
    get_conversion,
    run_converted,
)
from vision_attn.networks.convert.equivalence import check_equivalence, check_source, class_path, is_hooked
from vision_attn.networks.convert.projection import to_parameters
from vision_attn.networks.insertion.record import CHILD
from vision_attn.networks.inspection.network import hook_dicts

#: Reason why a call of a swapped module runs its original code.
UNSUPPORTED_CALL = (
    "a block does not support this call, such as need_weights=True, output_attentions=True, eager attention, positions "
    "that are added to queries and keys only, or a feature map that is smaller than a window"
)
#: Reason why all calls run the original code.
CHANGED = "a submodule was replaced, or has hooks or another mode, or a setting was changed, after va.swap_"
#: Attribute of a running block: the sizes of the feature maps (or tokens) of input and context.
MAP_SIZES = "map_sizes"


@dataclass
class Swap:
    """The block of a swapped module."""

    #: class path of the module, in the table unless it is converted by its structure
    family: str
    #: a block without weights
    block: Attention
    #: submodules and settings of the module for which the block was created
    traits: tuple[Any, ...]
    #: largest difference between module and block in the comparison
    difference: float = 0.0

    @property
    def conversion(self) -> LayerConversion:
        return get_conversion(self.family)

    def __str__(self) -> str:
        return f"{type(self.block).__name__}, pattern={self.block.pattern!r}"

    def attend(
        self, module: nn.Module, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None, **tensors: Tensor
    ) -> Tensor:
        """Run the block with the current weights of the module; several threads can call this at the same time."""
        weights = to_parameters(self.conversion.weights(module), self.block.rank) | tensors
        sizes = tuple(x.shape[2:]), None if context is None else tuple(context.shape[2:])
        extra = {ORIGINAL: self.block, MAP_SIZES: sizes}
        block: Any = copy_with_weights(self.block, weights, extra, module.training)
        return run_converted(block, self.block.rank, x, mask, context)


def copy_with_weights(
    block: nn.Module, weights: Mapping[str, Tensor], extra: Mapping[str, Any], training: bool, prefix: str = ""
) -> Any:
    """Return a shallow copy of a block for one call, with weights, extra attributes and mode.

    The block does not change, except that its mode follows ``training`` in a compiled graph.
    """
    if torch.compiler.is_dynamo_compiling():  # Dynamo cannot trace the copy of a module
        if block.training != training:
            block.train(training)
        return lambda *args: torch.func.functional_call(block, {**weights}, args, tie_weights=False)
    copied = object.__new__(type(block))
    parts = dict(block.named_children())
    children = {name: copy_with_weights(x, weights, {}, training, f"{prefix}{name}.") for name, x in parts.items()}
    start = len(prefix)
    own = {key[start:]: x for key, x in weights.items() if key.startswith(prefix) and "." not in key[start:]}
    # Attributes take precedence over parameters.
    vars(copied).update(vars(block), **extra, **own, **children, training=training)
    return copied


class Swapped(nn.Module):
    """Base class of all swapped modules, before the original class."""

    swapped: Swap

    @property
    def running_block(self) -> Attention:
        """Return the block of the module; it is not a child of the module."""
        return self.swapped.block

    @property
    def bypass_reason(self) -> str:
        """Return why every call runs the original code; empty if only calls that the block does not support do."""
        traits = self.swapped.traits
        return "" if read_traits(self, traits[-1]) == traits else CHANGED

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        proxy: Any = next((x for x in (*args, *kwargs.values()) if isinstance(x, Proxy)), None)
        if proxy is not None:  # a leaf module in torch.fx, like a block
            return proxy.tracer.create_proxy("call_module", proxy.tracer.path_of_module(self), args, kwargs)
        reason = self.bypass_reason or "it was traced" * torch.jit.is_tracing()  # type: ignore[attr-defined]
        if not reason:
            y = self.swapped.conversion.forward(self, partial(self.swapped.attend, self), *args, **kwargs)
            if y is not FALLBACK:
                return y
        for explain in scoped_values(self, "attention")[0]:
            explain(reason or UNSUPPORTED_CALL)
        return super().forward(*args, **kwargs)

    def train(self, mode: bool = True) -> Any:
        self.running_block.train(mode)
        return super().train(mode)

    def __reduce_ex__(self, protocol: Any) -> Any:  # pickle cannot import a class that is created at run time
        _, _, *rest = tuple(super().__reduce_ex__(2))
        return (make_empty, (original_class(self),), *rest)


@cache
def swapped_class(kind: Any) -> Any:
    """Return the class of a swapped module, given the original class."""
    return type(f"Swapped{kind.__name__}", (Swapped, kind), {"__module__": __name__})


def original_class(module: nn.Module) -> type[nn.Module]:
    return type(module).__bases__[1] if isinstance(module, Swapped) else type(module)


def make_empty(kind: Any) -> Any:
    """Create a swapped module without attributes, for copies and pickles."""
    swapped = swapped_class(kind)
    return swapped.__new__(swapped)


def read_traits(module: nn.Module, names: Iterable[str] = ()) -> tuple[Any, ...]:
    """Return the submodules, dropouts and settings of a module, and True if a submodule has hooks.

    Blocks that are inserted at its output are not included. By default, all settings are returned. With ``names``, only
    these settings are read, because torch.compile in torch 2.11 cannot trace the listing of attributes.
    """
    children = (x for name, x in module.named_children() if not name.startswith(CHILD))
    parts = [part for child in children for part in child.modules()]
    hooked = any(map(is_hooked, parts))
    drops = [(part.p, part.training == module.training) for part in parts if isinstance(part, nn.Dropout)]
    if not names:
        public = (item for item in vars(module).items() if not item[0].startswith("_") and item[0] != "training")
        names = [name for name, x in public if isinstance(x, (int, float, list, tuple))]
    return parts, hooked, drops, {name: getattr(module, name, None) for name in names}


def make_swap(module: nn.Module) -> Swap:
    """Create the block for a module and compare both; raise an error for an unsupported module."""
    if isinstance(module, (Swapped, Attention)):
        raise ValueError("already swapped" if isinstance(module, Swapped) else "already a vision_attn block")
    path, kind, conversion = find_conversion(module)
    if "..." in conversion.axes:
        raise ValueError(f"{path} is supported only by va.convert.from_layer")
    bare: Any = copy(module)
    own = {id(hooks) for hooks in hook_dicts(module)}  # hooks of the module itself also run after the swap
    vars(bare).update({name: OrderedDict() for name, value in vars(module).items() if id(value) in own})
    check_source(bare, conversion.unsupported)
    if type(module).forward is not kind.forward:
        raise ValueError(f"{class_path(type(module))} is a subclass of {kind.__name__} with a custom forward")
    with torch.inference_mode(False):
        block = conversion.empty_block(module, conversion.weights(module)).eval()
    swap = Swap(path, block, read_traits(module))

    def compute(copied: Any, *args: Any) -> Any:
        return conversion.forward(copied, partial(swap.attend, copied), *args)

    swap.difference = check_equivalence(bare, compute, conversion)
    block.train(module.training)
    return swap

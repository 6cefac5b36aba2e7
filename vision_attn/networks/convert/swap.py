"""``swap_``: blocks compute the attention inside a network, in place; :func:`swap_back_` undoes it.

A swapped module is the same object, of a class whose forward passes the map to a block. Its parameters, children and
hooks stay, so checkpoints, optimizers and wrappers are not affected. The block has no weights: each call runs a shallow
copy with the current weights of the module, so threads do not disturb each other. The module itself runs a call that
the block does not support.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from vision_attn.attention.blocks import Attention
from vision_attn.attention.scopes import ORIGINAL
from vision_attn.errors import SiteError
from vision_attn.networks.convert.equivalence import HOOKS, check_equivalence, check_source, class_path
from vision_attn.networks.convert.row import FALLBACK, TABLE, Row, find_row, known_class, run_on_tokens, to_parameters
from vision_attn.networks.insertion.backbone import changeable, modules_around
from vision_attn.networks.insertion.sites import Names, match_names
from vision_attn.text import Report, Table, shorten

# --- the report -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SwappedModule:
    """One attention module of a model.

    >>> report = swap_(nn.TransformerEncoderLayer(8, 2), dry_run=True)
    >>> report.modules[0].path, report.modules[0].block
    ('self_attn', "Attention1d, pattern='full'")
    """

    #: path in the model
    path: str
    #: its class
    kind: str
    #: the block that computes its attention; empty if it is not swapped
    block: str = ""
    #: the largest difference of the two on random weights, relative to the largest value
    difference: float = 0.0
    #: why it is not swapped
    reason: str = ""


@dataclass(frozen=True, repr=False)
class SwapReport(Report):
    """The modules that were swapped and those that were not; prints as a table.

    >>> print(swap_(nn.TransformerEncoderLayer(8, 2), dry_run=True))  # doctest: +ELLIPSIS
    1 module would be swapped
    where      module              attended to by               difference
    self_attn  MultiheadAttention  Attention1d, pattern='full'  ...
    """

    #: in the order of the model
    modules: tuple[SwappedModule, ...]
    #: what was done
    verb: str = "swapped"

    @property
    def swapped(self) -> tuple[SwappedModule, ...]:
        """The modules that were swapped."""
        return tuple(one for one in self.modules if not one.reason)

    @property
    def left(self) -> tuple[SwappedModule, ...]:
        """The modules that were not swapped."""
        return tuple(one for one in self.modules if one.reason)

    def __len__(self) -> int:
        return len(self.swapped)

    def parts(self) -> list[str | Table]:
        found: list[str | Table] = [f"{len(self)} module{'' if len(self) == 1 else 's'} {self.verb}"]
        if self.swapped:
            rows = [(x.path, x.kind, x.block, f"{x.difference:.1e}") for x in self.swapped]
            found.append(Table([("where", "module", "attended to by", "difference"), *rows], left=(0, 1, 2)))
        for reason in dict.fromkeys(x.reason for x in self.left):
            found.append(f"left as before: {shorten(x.path for x in self.left if x.reason == reason)}: {reason}")
        return found


# --- swapping ---------------------------------------------------------------------------------------------------------


def swap_(
    model: nn.Module,
    *,
    names: Names | Iterable[Names] | None = None,
    where: Callable[[str, nn.Module], bool] | None = None,
    dry_run: bool = False,
) -> SwapReport:
    """Let blocks compute the attention of a model, in place, with the model's weights.

    The table in :mod:`vision_attn.networks.convert.row` has the layers; the report names other attention, and why it
    was not swapped. The model computes the same. Its modules, parameters and keys stay: checkpoints load as before, and
    an existing optimizer trains it. :func:`vision_attn.set_impl_` chooses the implementation.
    :func:`vision_attn.capture` returns attention maps, also of the windows of a network and of the tokens of a ViT.

    Each module is compared with its block on random weights before it is swapped. A module with an option that a block
    does not support is not swapped, and the report names the reason. The module itself runs calls that a block does not
    support, and all calls while a part of the module has hooks, was replaced, as by LoRA, or is in another mode. Any
    number of threads may run the model at the same time.

    Args:
        model: any network, or one attention module.
        names: globs on module paths, as in :func:`vision_attn.insert_`: swap only in these modules.
        where: a function of path and module that chooses modules; with ``names``, both have to choose a module.
        dry_run: only report.

    Returns:
        A report that prints as a table.

    Raises:
        SiteError: ``names`` or ``where`` chooses no attention, or the model is wrapped or a TorchScript program.

    >>> import timm
    >>> model = timm.create_model("test_vit").eval()
    >>> image = torch.randn(1, 3, 160, 160)
    >>> before = model(image)
    >>> len(swap_(model))
    6
    >>> model(image).shape, (model(image) - before).abs().max().item() < 1e-5
    (torch.Size([1, 1000]), True)
    """
    model = changeable(model)
    modules: dict[str, Any] = dict(model.named_modules())
    lines, swaps = [], {}
    for name, module in chosen_attention(modules, names, where).items():
        try:
            swap = swaps[name] = make_swap(module)
            lines.append(SwappedModule(name, original_class(module).__name__, str(swap), swap.difference))
        except (ValueError, RuntimeError, AttributeError) as error:  # the last for a subclass without some part
            lines.append(SwappedModule(name, original_class(module).__name__, reason=str(error)))
    if not dry_run:
        for name, swap in swaps.items():
            modules[name].swapped = swap
            modules[name].__class__ = swapped_class(modules[name].__class__)
    return SwapReport(tuple(lines), "would be swapped" if dry_run else "swapped")


def swap_back_(model: nn.Module) -> SwapReport:
    """Undo :func:`swap_`: every module is the object that it was before, in its current mode, type and device.

    Weights that were trained since stay.

    Args:
        model: the network.

    Returns:
        A report that prints as a table, empty if no module was swapped.

    >>> model = nn.TransformerEncoderLayer(8, 2)
    >>> attention = model.self_attn
    >>> report = swap_(model)
    >>> print(swap_back_(model))  # doctest: +ELLIPSIS
    1 module swapped back
    where      module              attended to by               difference
    self_attn  MultiheadAttention  Attention1d, pattern='full'  ...
    >>> model.self_attn is attention, type(attention).__name__
    (True, 'MultiheadAttention')
    """
    lines = []
    for name, module in changeable(model).named_modules():
        if isinstance(module, Swapped):
            swap: Swap = vars(module).pop("swapped")
            module.__class__ = original_class(module)  # type: ignore[assignment]
            lines.append(SwappedModule(name, type(module).__name__, str(swap), swap.difference))
    return SwapReport(tuple(lines), "swapped back")


def chosen_attention(modules: dict[str, nn.Module], names: Any, where: Any) -> dict[str, nn.Module]:
    """Return modules of known classes and modules that look like attention, unless they only contain such modules."""
    known = {name for name, module in modules.items() if known_class(module) is not None}
    similar = {name for name, module in modules.items() if is_attention(module)}
    similar -= {outer for name in known | similar for outer in outer_paths(name)}
    similar -= {name for name in similar if known.intersection(outer_paths(name))}
    attention = {name: module for name, module in modules.items() if name in known | similar}
    if names is None and where is None:
        return attention
    chosen = list(modules) if names is None else match_names(modules, names)
    if where is not None:
        chosen = [name for name in chosen if where(name, modules[name])]
    inside = {name: x for name, x in attention.items() if any(f"{name}.".startswith(f"{one}.") for one in chosen)}
    if not inside:
        raise SiteError(f"no attention is chosen; the model has {shorten(attention) or 'none'}")
    return inside


def outer_paths(name: str) -> list[str]:
    """Return the paths of the modules that contain a module, the model first."""
    return ["", *modules_around(name)] if name else []


def is_attention(module: nn.Module) -> bool:
    """Return True for a module of another library with parameters and a name or parts that are typical of attention."""
    kind = type(module)
    projections = ("qkv", "qkvs", "qk", "to_qkv", "q_proj", "query", "query_conv", "theta")
    similar = any(word in kind.__name__.lower().replace("_", "") for word in ("attention", "attn", "nonlocal"))
    similar = similar or any(hasattr(module, name) for name in projections)
    return similar and not kind.__module__.startswith("vision_attn.") and any(True for _ in module.parameters())


def make_swap(module: nn.Module) -> Swap:
    """Make the block for a module and compare both; refuse a module that no block supports."""
    if isinstance(module, Swapped):
        raise ValueError("it is swapped already")
    path, kind, row = find_row(module)
    if "..." in row.axes:
        raise ValueError(f"swap_ is not for {path}, whose maps may have any axes: use convert.from_layer")
    bare: Any = copy(module)
    vars(bare).update({hooks: OrderedDict() for hooks in HOOKS})  # those of the module itself go on running
    check_source(bare, row.unsupported)
    if type(module).forward is not kind.forward:
        raise ValueError(f"{class_path(type(module))} is a subclass of {kind.__name__} with a custom forward")
    with torch.inference_mode(False):
        block = row.empty_block(module, row.weights(module)).eval()
    swap = Swap(path, block, read_traits(module))

    def compute(copied: Any, *args: Any) -> Any:
        return row.forward(copied, partial(swap.attend, copied), *args)

    swap.difference = check_equivalence(bare, compute, row.arguments, row.make_copy, row.dtype)
    block.train(module.training)
    return swap


# --- a swapped module -------------------------------------------------------------------------------------------------

#: The attribute of a block that runs for a module with the sizes of its maps, or of its tokens, and of the context's.
MAP_SIZES = "map_sizes"


@dataclass
class Swap:
    """The block of a swapped module."""

    #: path of the known class
    family: str
    #: without weights
    block: Attention
    #: parts and settings of the module that the block was made by
    traits: tuple[Any, ...]
    #: the largest difference of the two in the comparison
    difference: float = 0.0

    @property
    def row(self) -> Row:
        return TABLE[self.family]

    def __str__(self) -> str:
        dtype = "" if self.row.dtype == torch.float64 else f", compared in {self.row.dtype}"
        return f"{type(self.block).__name__}, pattern={self.block.pattern!r}{dtype}"

    def attend(self, module: nn.Module, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        """Run the block with the current weights of the module, in any number of threads at a time."""
        weights = to_parameters(self.row.weights(module), self.block.rank)
        sizes = tuple(x.shape[2:]), None if context is None else tuple(context.shape[2:])
        block: Any = with_weights(self.block, weights, {ORIGINAL: self.block, MAP_SIZES: sizes})
        return run_on_tokens(block, self.block.rank, x, mask, context)


def with_weights(block: nn.Module, weights: Mapping[str, Tensor], notes: Mapping[str, Any], prefix: str = "") -> Any:
    """Return a shallow copy of a block for one call, with these weights and attributes; the block does not change."""
    if torch.compiler.is_dynamo_compiling():  # which cannot trace the copy of a module
        return lambda *args: torch.func.functional_call(block, {**weights}, args, tie_weights=False)
    copied = object.__new__(type(block))
    children = {name: with_weights(x, weights, {}, f"{prefix}{name}.") for name, x in block.named_children()}
    parameters = {name: weights.get(prefix + name, value) for name, value in block._parameters.items()}
    vars(copied).update(vars(block), **notes, _parameters=parameters, _modules={**block._modules, **children})
    return copied


class Swapped(nn.Module):
    """First base of the class of a swapped module, before the class of the module."""

    swapped: Swap

    @property
    def running_block(self) -> Attention:
        """The block that runs for the module; it is not a child of it."""
        return self.swapped.block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        proxy: Any = next((x for x in (*args, *kwargs.values()) if isinstance(x, Proxy)), None)
        if proxy is not None:  # one node of the graph, as of a block
            return proxy.tracer.create_proxy("call_module", proxy.tracer.path_of_module(self), args, kwargs)
        swap = self.swapped
        if read_traits(self, swap.traits[-1]) == swap.traits and not torch.jit.is_tracing():  # type: ignore[attr-defined]
            y = swap.row.forward(self, partial(swap.attend, self), *args, **kwargs)
            if y is not FALLBACK:
                return y
        return super().forward(*args, **kwargs)

    def train(self, mode: bool = True) -> Any:
        self.running_block.train(mode)
        return super().train(mode)

    def __reduce_ex__(self, protocol: Any) -> Any:  # its class is made here, and is in no module
        _, _, *rest = tuple(super().__reduce_ex__(2))
        return (make_empty, (original_class(self),), *rest)


@cache
def swapped_class(kind: Any) -> Any:
    return type(f"Swapped{kind.__name__}", (Swapped, kind), {"__module__": __name__})


def original_class(module: nn.Module) -> type[nn.Module]:
    return type(module).__bases__[1] if isinstance(module, Swapped) else type(module)


def make_empty(kind: Any) -> Any:
    """Make a swapped module of a class without attributes, for copies and pickles."""
    swapped = swapped_class(kind)
    return swapped.__new__(swapped)


def read_traits(module: nn.Module, names: Iterable[str] = ()) -> tuple[Any, ...]:
    """Return parts and their hooks, dropouts and their modes, and settings, of these names or all.

    With names, attributes are not listed, which the compiler of torch 2.11 cannot trace.
    """
    parts = [*module.modules()][1:]
    hooked = any(getattr(part, hooks) for part in parts for hooks in HOOKS)
    drops = [(part.p, part.training == module.training) for part in parts if isinstance(part, nn.Dropout)]
    if not names:
        public = (item for item in vars(module).items() if not item[0].startswith("_") and item[0] != "training")
        names = [name for name, x in public if isinstance(x, (int, float, list, tuple))]
    return parts, hooked, drops, {name: getattr(module, name, None) for name in names}

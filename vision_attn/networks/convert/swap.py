"""Blocks of ours compute the attention that is in a network, in place: :func:`swap_`, undone by :func:`swap_back_`.

A swapped module stays the object that it is, with its parameters, children and hooks, so that checkpoints, optimizers
and wrappers know nothing of it. Only its class changes, to one whose forward hands the map to a block. The block has no
weights: each forward lends it those that the module has then. What a block does not do, the module does as before.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from copy import copy as shallow_copy
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from vision_attn.attention.blocks import EXCHANGED, Attention
from vision_attn.attention.patterns import AnyPattern, Grid, Partition, Window, resolve_pattern
from vision_attn.checks import check_flags, check_type
from vision_attn.errors import ConversionError, SiteError
from vision_attn.networks.convert.proof import HOOKS, difference, path_of
from vision_attn.networks.convert.row import OWN, Row
from vision_attn.networks.convert.table import TABLE, known_class, row_of
from vision_attn.networks.insertion.backbone import changeable
from vision_attn.networks.insertion.maps import token_grid
from vision_attn.networks.insertion.sites import Names, match_names, several
from vision_attn.text import Report, Table, shorten

__all__ = ["SwapReport", "SwappedModule", "swap_", "swap_back_"]


@dataclass(frozen=True)
class SwappedModule:
    """One attention module of a model.

    >>> report = swap_(nn.TransformerEncoderLayer(8, 2), dry_run=True)
    >>> report.modules[0].path, report.modules[0].block
    ('self_attn', "Attention1d, pattern='full'")
    """

    #: where in the model
    path: str
    #: its class
    kind: str
    #: what attends in its place; empty if it is left as it is
    block: str = ""
    #: the greatest difference of the two on random weights, in parts of the largest value
    difference: float = 0.0
    #: why it is left as it is
    reason: str = ""


@dataclass(frozen=True, repr=False)
class SwapReport(Report):
    """What was swapped and what was left; prints as a table.

    >>> print(swap_(nn.TransformerEncoderLayer(8, 2), dry_run=True))  # doctest: +ELLIPSIS
    1 module would be swapped
    where      module              attended to by               difference
    self_attn  MultiheadAttention  Attention1d, pattern='full'  ...
    MultiheadAttention does by itself, as before: calls with a mask, with need_weights, or with values that are ...
    """

    #: in the order of the model
    modules: tuple[SwappedModule, ...]
    #: what was done
    verb: str = "swapped"
    #: what is to be known
    notes: tuple[str, ...] = ()

    @property
    def swapped(self) -> tuple[SwappedModule, ...]:
        """The modules that were swapped."""
        return tuple(one for one in self.modules if not one.reason)

    @property
    def left(self) -> tuple[SwappedModule, ...]:
        """The modules that were left as they are."""
        return tuple(one for one in self.modules if one.reason)

    def __len__(self) -> int:
        return len(self.swapped)

    def parts(self) -> list[str | Table]:
        found: list[str | Table] = [f"{len(self)} module{'' if len(self) == 1 else 's'} {self.verb}"]
        if self.swapped:
            rows = [(x.path, x.kind, x.block, f"{x.difference:.1e}") for x in self.swapped]
            found.append(Table([("where", "module", "attended to by", "difference"), *rows], left=(0, 1, 2)))
        if self.left:
            found.append(f"{len(self.left)} left as {'it is' if len(self.left) == 1 else 'they are'}")
            for reason in dict.fromkeys(x.reason for x in self.left):
                found.append(f"{shorten(x.path for x in self.left if x.reason == reason)}: {reason}")
        return [*found, *self.notes]


def swap_(
    model: nn.Module,
    *,
    names: Names | Iterable[Names] | None = None,
    where: Callable[[str, nn.Module], bool] | None = None,
    copy: bool = False,
    dry_run: bool = False,
) -> SwapReport:
    """Let blocks of ours compute the attention that is in a model, in place, with the weights that it has.

    Known are the layers of the table in :mod:`vision_attn.networks.convert`; the report names the rest, and why. The
    model computes what it did. Its modules, parameters and keys stay: checkpoints load as before, and an optimizer that
    was made before trains it. :func:`vision_attn.set_impl_` chooses the implementation. :func:`vision_attn.capture`
    gives the attention maps, of windows that the network cuts and of the tokens of a ViT, too.

    A module is proven before it is swapped, on random weights. One that a block cannot stand for is left as it is, and
    the report says why. A call that a block cannot serve is served by the module itself; so are all calls while a part
    of the module has hooks, was replaced, as by LoRA, or is in another mode. One module is not for several threads at
    once.

    Args:
        model: any network; it may be one such module.
        names: globs on module paths, as in :func:`vision_attn.insert_`: only these modules, and what is in them.
        where: a function of path and module, likewise; all attention when both are None.
        copy: give each module a copy of its weights, to be trained apart: :func:`swap_back_` then brings back the
            weights of before.
        dry_run: change nothing.

    Returns:
        A report that prints as a table.

    Raises:
        SiteError: ``names`` or ``where`` chooses no attention, or the model is wrapped or a TorchScript program.
        ValueError: both of ``names`` and ``where``, or ``copy`` of a model that is itself such a module.

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
    check_flags(copy=copy, dry_run=dry_run)
    modules = dict(model.named_modules())
    inside = chosen_attention(modules, names, where)
    if copy and "" in inside:
        raise ValueError("copy must be False for a model that is itself the module to swap: copy it yourself")
    lines, swaps = [], {}
    for name, module in inside.items():
        try:
            swap = swaps[name] = swap_for(module, [modules[outer] for outer in around(name)])
            lines.append(SwappedModule(name, original_class(module).__name__, str(swap), swap.difference))
        except (ValueError, ConversionError, AttributeError) as error:  # the last of a subclass without some part
            lines.append(SwappedModule(name, original_class(module).__name__, reason=str(error)))
    own = {line.kind: swaps[line.path].row.serves_itself for line in lines if line.path in swaps}
    notes = [f"{kind} does by itself, as before: {calls}" for kind, calls in own.items() if calls]
    if copy and swaps:
        notes.append("The modules are copies: make optimizers now, one that was made before does not train them.")
    if not dry_run:
        for name, swap in swaps.items():
            module = modules[name]
            if copy:
                swap.original, module = module, deepcopy(module)
                swap.traits = traits_of(module)
                place(model, swap.original, module)
            vars(module)[EXCHANGED] = swap
            module.__class__ = swapped_class(type(module))
    return SwapReport(tuple(lines), "would be swapped" if dry_run else "swapped", tuple(notes))


def swap_back_(model: nn.Module) -> SwapReport:
    """Undo :func:`swap_`: every module is the object that it was before, in the mode, type and place that it has now.

    Weights that were trained since stay, unless the modules were copies (``copy=True``): then those of before are back.

    Args:
        model: the network.

    Returns:
        A report that prints as a table; of no module if none was swapped.

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
    model = changeable(model)
    lines = []
    for name, module in list(model.named_modules()):
        if not isinstance(module, Swapped):
            continue
        swap: Swap = vars(module).pop(EXCHANGED)
        lines.append(SwappedModule(name, original_class(module).__name__, str(swap), swap.difference))
        module.__class__ = original_class(module)  # type: ignore[assignment]
        if swap.original is not None:
            now = next(module.parameters())
            place(model, module, swap.original.to(device=now.device, dtype=now.dtype).train(module.training))
    return SwapReport(tuple(lines), "swapped back")


def chosen_attention(modules: dict[str, nn.Module], names: Any, where: Any) -> dict[str, nn.Module]:
    """What is known to be attention, and what by its name is, unless it only holds such modules."""
    kinds = {name: path_of(kind) for name, module in modules.items() if (kind := known_class(module)) is not None}
    known = {name for name, path in kinds.items() if path not in TABLE or TABLE[path].swaps}
    named = {name for name, module in modules.items() if is_attention(module)}
    holds = {outer for name in known | named for outer in around(name)}
    attention = {name: module for name, module in modules.items() if name in known or name in named - holds}
    if names is None and where is None:
        return attention
    if names is not None and where is not None:
        raise ValueError("choose modules by names or by where, not both")
    if names is not None:
        chosen = match_names(modules, several("names", names, (str, re.Pattern)))
    else:
        check_type("where", where, Callable, "a function of path and module")
        chosen = [name for name, module in modules.items() if where(name, module)]
    inside = {name: x for name, x in attention.items() if any(f"{name}.".startswith(f"{one}.") for one in chosen)}
    if not inside:
        raise SiteError(f"no attention is chosen; the model has {shorten(attention) or 'none'}")
    return inside


def around(name: str) -> list[str]:
    """The paths of the modules that a module is inside of, the model first."""
    parts = name.split(".") if name else []
    return [".".join(parts[:count]) for count in range(len(parts))]


def is_attention(module: nn.Module) -> bool:
    """Whether its name says so, where it is none of ours and has parameters."""
    kind = type(module)
    said = any(word in kind.__name__.lower() for word in ("attention", "attn"))
    return said and not kind.__module__.startswith("vision_attn.") and next(module.parameters(), None) is not None


# --- one module -------------------------------------------------------------------------------------------------------


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
    #: class and register tokens before those of the map, if it takes tokens; None where that is not known
    prefix: int | None = None
    #: the greatest difference of the two in the proof
    difference: float = 0.0
    #: the module whose place it has, if it is a copy
    original: nn.Module | None = None

    @property
    def row(self) -> Row:
        return TABLE[self.family]

    def __str__(self) -> str:
        how = f"pattern={self.block.pattern!r}" if self.cut is None else f"on a map cut by {self.cut!r}"
        return f"{type(self.block).__name__}, {how}"

    def attend(self, module: nn.Module, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        weights = self.row.parameters(self.row.weights(module), self.block)
        y: Tensor = torch.func.functional_call(self.block, weights, (x, mask, context), tie_weights=False)
        return y

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
            # The windows may be others than when it was swapped.
            window = window if len(window) == 2 else pair(self.cut.size)
            pattern = replace(self.cut, size=window)
            groups, (rows, columns) = len(x) // images, image_size
            tiles = (1, 1) if groups == 1 else token_grid(groups, rows * window[1], columns * window[0])
            size = None if tiles is None else (tiles[0] * window[0], tiles[1] * window[1])
        if size is None:
            return None
        return Partition(pattern.partitioner(2), size, size, x.device), prefix


class Swapped(nn.Module):
    """What the class of a swapped module has before its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        proxy: Any = next((x for x in (*args, *kwargs.values()) if isinstance(x, Proxy)), None)
        if proxy is not None:  # one node of the graph, as of a block
            return proxy.tracer.create_proxy("call_module", proxy.tracer.path_of_module(self), args, kwargs)
        swap: Swap = vars(self)[EXCHANGED]
        if traits_of(self) == swap.traits and not torch.jit.is_tracing():  # type: ignore[attr-defined]
            y = swap.row.forward(self, partial(swap.attend, self), *args, **kwargs)
            if y is not OWN:
                return y
        return super().forward(*args, **kwargs)

    def train(self, mode: bool = True) -> Any:
        vars(self)[EXCHANGED].block.train(mode)
        return super().train(mode)

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), f"by {vars(self)[EXCHANGED]}")))

    def __reduce_ex__(self, protocol: Any) -> Any:  # its class is made here, and is in no module
        _, _, *rest = tuple(super().__reduce_ex__(2))
        return (empty, (original_class(self),), *rest)


@cache
def swapped_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Swapped{kind.__name__}", (Swapped, kind), {"__module__": __name__})


def original_class(module: nn.Module) -> type[nn.Module]:
    return type(module).__bases__[1] if isinstance(module, Swapped) else type(module)


def empty(kind: type[nn.Module]) -> nn.Module:
    """For copies and pickles: a swapped module of this class, before it has anything."""
    made = swapped_class(kind)
    return made.__new__(made)


def traits_of(module: nn.Module) -> tuple[Any, ...]:
    """What a block was made by: parts and their hooks, dropouts and their modes, and settings."""
    parts = [*module.modules()][1:]
    hooked = any(getattr(part, hooks) for part in parts for hooks in HOOKS)
    drops = [(part.p, part.training == module.training) for part in parts if isinstance(part, nn.Dropout)]
    settings = [
        x for name, x in vars(module).items() if isinstance(x, (int, float, list, tuple)) and name != "training"
    ]
    return parts, hooked, drops, settings


def swap_for(module: nn.Module, outers: list[nn.Module]) -> Swap:
    """What stands for a module, proven on random weights; refused where nothing does."""
    if isinstance(module, Swapped):
        raise ValueError("it is swapped already")
    path, kind, row = row_of(module)
    if not row.swaps:
        raise ValueError(f"swap_ is not for {path}: use convert.from_layer")
    bare: Any = shallow_copy(module)
    vars(bare).update({hooks: OrderedDict() for hooks in HOOKS})  # those of the module itself go on running
    row.refuse(bare)
    if type(module).forward is not kind.forward:
        raise ValueError(f"{path_of(type(module))} is a subclass of {kind.__name__} with a forward of its own")
    with torch.inference_mode(False):
        swap = Swap(path, row.empty_block(module, row.weights(module)).eval(), traits_of(module))

    def compute(twin: Any, *args: Any) -> Any:
        return row.forward(twin, partial(swap.attend, twin), *args)

    swap.difference = difference(bare, compute, row.arguments)
    swap.block.train(module.training)
    note_place(swap, module, outers)
    return swap


def place(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module wherever in the model another one is."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module is old:
            model.set_submodule(name, new)


# --- where a module's groups or tokens lie on the map -----------------------------------------------------------------


def note_place(swap: Swap, module: nn.Module, outers: list[nn.Module]) -> None:
    """Note how what the module is given lies on the map, as the modules around it say, the innermost last."""
    for outer in outers:
        if (path := path_of(type(outer))) in CUTS:
            windows, size, shift = CUTS[path](outer, module)
            swap.cut = Window(pair(size), pair(shift)) if windows else Grid(pair(size))
        count = getattr(outer, "num_prefix_tokens", None)  # of timm's; torchvision's have one
        if isinstance(count, int):
            swap.prefix = count
        elif isinstance(getattr(outer, "class_token", None), nn.Parameter):
            swap.prefix = 1


def pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def cut_of_timm(outer: Any, module: nn.Module) -> tuple[bool, Any, Any]:
    by_windows = module is outer.attn_block if hasattr(outer, "attn_block") else outer.partition_block
    return by_windows, outer.partition_size, 0


def cut_of_swin(outer: Any, module: nn.Module) -> tuple[bool, Any, Any]:
    return True, outer.window_size, outer.shift_size


#: How a module around cuts the map, by the path of its class: in windows rather than a grid, their size, their shift.
CUTS: dict[str, Callable[[Any, Any], tuple[bool, Any, Any]]] = {
    "timm.models.maxxvit.PartitionAttentionCl": cut_of_timm,
    "timm.models.maxxvit.PartitionAttention2d": cut_of_timm,
    "timm.models.maxxvit.ParallelPartitionAttention": cut_of_timm,
    "timm.models.swin_transformer.SwinTransformerBlock": cut_of_swin,
    "timm.models.swin_transformer_v2.SwinTransformerV2Block": cut_of_swin,
    "torchvision.models.maxvit.PartitionAttentionLayer": lambda x, module: (
        x.partition_type == "window",
        module.size,
        0,
    ),
}

"""Attention that is in a model already becomes ours, in place, by :func:`swap_`, and back by :func:`swap_back_`.

A module that is exchanged stays the object that it is, with its parameters, children and hooks, so that checkpoints,
optimizers and wrappers know nothing of it. Only its class changes, to one whose forward hands the map to a block of
ours. The block has no weights: each forward lends it those that the module has then, in its own order. What a block
does not do, the module does itself, as before.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from copy import copy as shallow_copy
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.blocks import EXCHANGED, Attention
from vision_attn.convert.families import FAMILIES, OWN, Family, family_of
from vision_attn.convert.proof import HOOKS, TOLERANCE, check_outputs, explained, path_of, random_twin
from vision_attn.errors import ConversionError, SiteError
from vision_attn.insertion.attach import exchange
from vision_attn.insertion.backbone import changeable, modules_around
from vision_attn.insertion.maps import token_grid
from vision_attn.insertion.sites import Names, match_names, several
from vision_attn.patterns import AnyPattern, Grid, Partition, Window, partition_of, resolve_pattern
from vision_attn.text import Report, Table, shorten

__all__ = ["SwapReport", "SwappedModule", "swap_", "swap_back_"]

# --- a module that is exchanged ---------------------------------------------------------------------------------------


@dataclass
class Exchange:
    """What a module that is exchanged keeps, beside what it had."""

    #: the path of its class
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
    #: for the block, which two threads would lend other weights at once
    lock: Any = field(default_factory=threading.RLock)

    def fits(self, module: nn.Module) -> bool:
        """Whether the block still computes what the module does: no part has been exchanged, hooked or set anew."""
        inside = tuple(module.modules())[1:]
        return (
            len(inside) == len(self.inside)
            and all(now is before for now, before in zip(inside, self.inside, strict=True))
            and not any(hooked(part) for part in inside)
            and settings_of(module, FAMILIES[self.family]) == self.settings
            and not torch.jit.is_tracing()  # type: ignore[attr-defined]  # which knows nothing of weights that are lent
        )

    def attend(self, module: nn.Module, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        weights = FAMILIES[self.family].weights(module)
        with nullcontext() if torch.compiler.is_compiling() else self.lock:
            if self.block.training != module.training:
                self.block.train(module.training)
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
            window = window if len(window) == 2 else pair(self.cut.size)  # which may be another than at the exchange
            pattern = replace(self.cut, size=window)
            groups, (rows, columns) = len(x) // images, image_size
            tiles = (1, 1) if groups == 1 else token_grid(groups, rows * window[1], columns * window[0])
            size = None if tiles is None else (tiles[0] * window[0], tiles[1] * window[1])
        if size is None:
            return None
        return partition_of(pattern.partitioner(2), x.new_empty(1, 1, *size)), prefix

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=threading.RLock())


class Swapped(nn.Module):
    """What the class of an exchanged module has before its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        proxy: Any = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.fx.Proxy)), None)
        if proxy is not None:  # one node of the graph, as of a block
            return proxy.tracer.create_proxy("call_module", proxy.tracer.path_of_module(self), args, kwargs)
        exchanged: Exchange = vars(self)[EXCHANGED]
        if exchanged.fits(self):

            def attend(x: Tensor, *others: Tensor | None) -> Tensor:
                return exchanged.attend(self, x, *others)

            y = FAMILIES[exchanged.family].forward(self, attend, *args, **kwargs)
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


def settings_of(module: Any, family: Family) -> tuple[Any, ...]:
    drops = [part for part in module.modules() if isinstance(part, nn.Dropout)]
    settings = [getattr(module, name) for name in family.settings]
    return (
        *(tuple(value) if isinstance(value, list) else value for value in settings),
        *((part.p, part.training == module.training) for part in drops),
    )


# --- the exchange -----------------------------------------------------------------------------------------------------


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
    #: the greatest difference of the two on random weights, relative to the largest number
    difference: float | None = None
    #: why it is left as it is
    reason: str = ""


@dataclass(frozen=True, repr=False)
class SwapReport(Report):
    """What was exchanged and what was left; prints as a table.

    >>> print(swap_(nn.TransformerEncoderLayer(8, 2), dry_run=True))  # doctest: +ELLIPSIS
    1 module would be exchanged
    where      module              attended to by               difference
    self_attn  MultiheadAttention  Attention1d, pattern='full'  ...
    MultiheadAttention does by itself, as before: calls with a mask, with need_weights, or with values that are ...
    """

    #: in the order of the model
    modules: tuple[SwappedModule, ...]
    #: what was done
    verb: str = "exchanged"
    #: what is to be known
    notes: tuple[str, ...] = ()

    @property
    def swapped(self) -> tuple[SwappedModule, ...]:
        """The modules that were exchanged."""
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
            rows = [
                (x.path, x.kind, x.block, "" if x.difference is None else f"{x.difference:.1e}") for x in self.swapped
            ]
            measured = "difference" if any(row[3] for row in rows) else ""
            found.append(Table([("where", "module", "attended to by", measured), *rows], left=(0, 1, 2)))
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
    """Let blocks of ours do the attention that is in a model, in place, with the weights that it has.

    Known are ``nn.MultiheadAttention``, timm's ``Attention`` (ViT, DeiT), ``Attention2d`` and
    ``MultiQueryAttention2d`` (MobileNetV4), ``BottleneckAttn``, and the attention of its CoAtNet and MaxViT, and
    torchvision's of Swin, first version, and MaxViT. The model computes what it did. Its modules, parameters and keys
    stay: checkpoints load as before, and an optimizer that was made before trains it. :func:`vision_attn.set_impl`
    chooses the implementation, and :func:`vision_attn.capture` gives the attention maps of what attends on whole maps.

    A module is proven before it is exchanged, on random weights. One that a block cannot stand for is left as it is,
    and the report says why. A call that a block cannot serve is served by the module itself; so are all calls while a
    part of the module has hooks, was exchanged, as by LoRA, or is in another mode.

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
    if names is not None and where is not None:
        raise ValueError("choose modules by names or by where, not both")
    modules = dict(model.named_modules())
    inside = attention = attention_in(modules)
    if names is not None or where is not None:
        if names is not None:
            chosen = match_names(modules, several("names", names, (str, re.Pattern)))
        else:
            chosen = [name for name, module in modules.items() if where is not None and where(name, module)]
        inside = {name: x for name, x in attention.items() if any(f"{name}.".startswith(f"{one}.") for one in chosen)}
        if not inside:
            raise SiteError(f"no attention is chosen; the model has {shorten(attention) or 'none'}")
    if copy and "" in inside:
        raise ValueError("copy must be False for a model that is itself the module to exchange: copy it yourself")
    lines, exchanges = [], {}
    for name, module in inside.items():
        try:
            exchanges[name], difference = exchange_for(module)
        except (ValueError, ConversionError, AttributeError) as error:  # the last of a subclass without some part
            lines.append(SwappedModule(name, class_name(module), reason=str(error)))
            continue
        around = [modules[outer] for outer in ("", *modules_around(name))]
        cuts = [CUTS[path_of(type(outer))](outer, module) for outer in around if path_of(type(outer)) in CUTS]
        exchanges[name].cut = cuts[-1] if cuts else None
        exchanges[name].prefix = next(filter(lambda count: count is not None, map(prefix_in, reversed(around))), None)
        lines.append(SwappedModule(name, class_name(module), described(exchanges[name]), difference))
    own = {line.kind: FAMILIES[exchanges[line.path].family].own for line in lines if line.path in exchanges}
    notes = [f"{kind} does by itself, as before: {calls}" for kind, calls in own.items() if calls]
    if copy and exchanges:
        notes.append("The modules are copies: make optimizers now, one that was made before does not train them.")
    if not dry_run:
        for name, kept in exchanges.items():
            put_in(model, modules[name], kept, copied=copy)
    return SwapReport(tuple(lines), "would be exchanged" if dry_run else "exchanged", tuple(notes))


def swap_back_(model: nn.Module) -> SwapReport:
    """Undo :func:`swap_`: every module is the object that it was before, in the mode, type and place that it has now.

    Weights that were trained since stay, unless the modules were copies (``copy=True``): then those of before are back.

    Args:
        model: the network.

    Returns:
        A report that prints as a table; of no module if none was exchanged.

    >>> model = nn.TransformerEncoderLayer(8, 2)
    >>> attention = model.self_attn
    >>> report = swap_(model)
    >>> print(swap_back_(model))
    1 module exchanged back
    where      module              attended to by
    self_attn  MultiheadAttention  Attention1d, pattern='full'
    >>> model.self_attn is attention, type(attention).__name__
    (True, 'MultiheadAttention')
    """
    model = changeable(model)
    lines = []
    for name, module in list(model.named_modules()):
        if not isinstance(module, Swapped):
            continue
        kept: Exchange = vars(module).pop(EXCHANGED)
        lines.append(SwappedModule(name, original_class(module).__name__, described(kept)))
        module.__class__ = original_class(module)  # type: ignore[assignment]
        if kept.original is not None:
            now = next(module.parameters())
            exchange(model, module, kept.original.to(device=now.device, dtype=now.dtype).train(module.training))
    return SwapReport(tuple(lines), "exchanged back")


def attention_in(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """What is known to be attention, and what by its name is, unless it only holds such modules."""
    ours = __name__.partition(".")[0]
    found = {
        name: module
        for name, module in modules.items()
        if family_of(module) is not None
        or (
            any(word in type(module).__name__.lower() for word in ("attention", "attn"))
            and not type(module).__module__.startswith(f"{ours}.")
            and next(module.parameters(), None) is not None
        )
    }
    return {
        name: module
        for name, module in found.items()
        if family_of(module) is not None
        or isinstance(module, Swapped)
        or not any(other.startswith(f"{name}.") if name else other for other in found if other != name)
    }


def exchange_for(module: nn.Module) -> tuple[Exchange, float]:
    """What stands for a module, and the difference of the two on random weights; refused where nothing does."""
    if isinstance(module, Swapped):
        raise ValueError("it is exchanged already")
    found = family_of(module)
    if found is None:
        raise ValueError(f"no converter knows {path_of(type(module))}")
    path, kind = found
    family = FAMILIES[path]
    bare = shallow_copy(module)  # hooks of the module itself go on running
    for hooks in HOOKS:
        vars(bare)[hooks] = OrderedDict()
    family.check(bare)
    if type(module).forward is not kind.forward:
        raise ValueError(f"{path_of(type(module))} is a subclass of {kind.__name__} with a forward of its own")
    with torch.inference_mode(False), torch.no_grad():
        twin = random_twin(bare)
        block = family.block(twin)
        arguments = family.example(twin)
        with explained(bare, "run as a layer of its class is"):
            expected = first_of(twin(*arguments))
        block.eval().to("meta")  # from here on it has no weights but those that it is lent
        kept = Exchange(path, block, tuple(module.modules())[1:], settings_of(module, family))
        got = first_of(family.forward(twin, lambda *maps: kept.attend(twin, *maps), *arguments))
        difference = check_outputs(module, block, expected, got, TOLERANCE)
    block.train(module.training)
    return kept, difference


def put_in(model: nn.Module, module: nn.Module, kept: Exchange, copied: bool = False) -> None:
    """Let a module, or a copy of it in its place, attend by a block."""
    if copied:
        new = deepcopy(module)
        exchange(model, module, new)
        kept.original, kept.inside, module = module, tuple(new.modules())[1:], new
    vars(module)[EXCHANGED] = kept
    module.__class__ = swapped_class(type(module))


def first_of(output: Any) -> Tensor:
    y: Tensor = output[0] if isinstance(output, tuple) else output
    return y


def class_name(module: nn.Module) -> str:
    return (original_class(module) if isinstance(module, Swapped) else type(module)).__name__


def described(kept: Exchange) -> str:
    block = type(kept.block).__name__
    return f"{block}, pattern={kept.block.pattern!r}" if kept.cut is None else f"{block}, on a map cut by {kept.cut!r}"


# --- where a module's groups or tokens lie on the map -----------------------------------------------------------------


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

"""Attention that is in a model already becomes ours, in place, by :func:`swap_`, and back by :func:`swap_back_`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from vision_attn.attention.blocks import EXCHANGED
from vision_attn.checks import check_flags, check_type
from vision_attn.errors import ConversionError, SiteError
from vision_attn.networks.convert.exchanged import (
    Exchange,
    Swapped,
    bare_copy,
    lies_in,
    original_class,
    parts_of,
    put_in,
    settings_of,
)
from vision_attn.networks.convert.layer import LAYERS, layer_of
from vision_attn.networks.convert.proof import difference
from vision_attn.networks.convert.refusal import path_of
from vision_attn.networks.convert.timing import SLOWEST, times_of
from vision_attn.networks.insertion.attach import exchange_ as exchange
from vision_attn.networks.insertion.backbone import changeable, modules_around
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
    #: the greatest difference of the two on random weights, relative to the largest number
    difference: float | None = None
    #: the time of the block in parts of the module's, where it was measured
    time: float | None = None
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
    Time was not measured: with example_input what would be slower is left.
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
                (x.path, x.kind, x.block, *("" if y is None else f"{y:{form}}" for y, form in measured(x)))
                for x in self.swapped
            ]
            head = ("where", "module", "attended to by", "difference", "time")
            shown = [column for column in zip(head, *rows, strict=True) if any(column[1:])]
            found.append(Table([*zip(*shown, strict=True)], left=(0, 1, 2)))
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
    example_input: Any = None,
    slower: bool = False,
    copy: bool = False,
    dry_run: bool = False,
) -> SwapReport:
    """Let blocks of ours do the attention that is in a model, in place, with the weights that it has.

    Known is the attention of networks of timm, torchvision, diffusers and others that :mod:`vision_attn.networks.convert` is
    for; the report names the rest, and why. The model computes what it did. Its modules, parameters and keys stay:
    checkpoints load as before, and an optimizer that was made before trains it. :func:`vision_attn.set_impl_` chooses
    the implementation. :func:`vision_attn.networks.capture` gives the attention maps, of windows that the network cuts and of
    the tokens of a ViT, too.

    A module is proven before it is exchanged, on random weights. One that a block cannot stand for is left as it is,
    and the report says why. A call that a block cannot serve is served by the module itself; so are all calls while a
    part of the module has hooks, was exchanged, as by LoRA, or is in another mode.

    Args:
        model: any network; it may be one such module.
        names: globs on module paths, as in :func:`vision_attn.insert_`: only these modules, and what is in them.
        where: a function of path and module, likewise; all attention when both are None.
        example_input: what the model's forward takes, or the shape of the images, as in :func:`vision_attn.insert_`.
            Then each module is timed on what it is given there, beside its block, with gradients if it is in training
            mode, and left if the block takes over 5 % more. None to measure no time.
        slower: exchange these too.
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
    check_flags(slower=slower, copy=copy, dry_run=dry_run)
    if names is not None and where is not None:
        raise ValueError("choose modules by names or by where, not both")
    check_type("where", len if where is None else where, Callable, "a function of path and module")
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
            exchanges[name], off = exchange_for(module)
        except (ValueError, ConversionError, AttributeError) as error:  # the last of a subclass without some part
            lines.append(SwappedModule(name, class_name(module), reason=str(error)))
            continue
        lies_in(exchanges[name], module, [modules[outer] for outer in ("", *modules_around(name))])
        lines.append(SwappedModule(name, class_name(module), described(exchanges[name]), off))
    if example_input is not None:
        times = times_of(model, {name: modules[name] for name in exchanges}, exchanges, example_input)
        lines = [replace(line, time=times.get(line.path)) for line in lines]
        for number, line in enumerate(lines):
            if line.time is not None and line.time > SLOWEST and not slower:
                del exchanges[line.path]
                reason = f"a block would take {line.time:.2f} of its time: slower=True exchanges it all the same"
                lines[number] = replace(line, block="", reason=reason)
    own = {line.kind: exchanges[line.path].layer.own for line in lines if line.path in exchanges}
    notes = [f"{kind} does by itself, as before: {calls}" for kind, calls in own.items() if calls]
    if exchanges and example_input is None:
        notes.append("Time was not measured: with example_input what would be slower is left.")
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
    known = {name for name, module in modules.items() if layer_of(module) is not None}
    named = {
        name
        for name, module in modules.items()
        if any(word in type(module).__name__.lower() for word in ("attention", "attn"))
        and not type(module).__module__.startswith(f"{ours}.")
        and next(module.parameters(), None) is not None
    }
    holds = {outer for name in known | named for outer in ("", *modules_around(name)) if outer != name}
    return {name: module for name, module in modules.items() if name in known or name in named - holds}


def exchange_for(module: nn.Module) -> tuple[Exchange, float]:
    """What stands for a module, and the difference of the two on random weights; refused where nothing does."""
    if isinstance(module, Swapped):
        raise ValueError("it is exchanged already")
    found = layer_of(module)
    if found is None:
        raise ValueError(f"no converter knows {path_of(type(module))}")
    path, kind = found
    layer = LAYERS[path]
    bare = bare_copy(module)  # hooks of the module itself go on running
    layer.refuse(bare)
    if type(module).forward is not kind.forward:
        raise ValueError(f"{path_of(type(module))} is a subclass of {kind.__name__} with a forward of its own")
    inside = tuple(parts_of(module))
    with torch.inference_mode(False):
        kept = Exchange(path, layer.empty_block(module).eval(), inside, settings_of(module, layer, inside))
    off = difference(bare, lambda twin, *args: layer.forward(twin, partial(kept.attend, twin), *args), layer.example)
    kept.block.train(module.training)
    return kept, off


def measured(line: SwappedModule) -> tuple[tuple[float | None, str], ...]:
    return (line.difference, ".1e"), (line.time, ".2f")


def class_name(module: nn.Module) -> str:
    return (original_class(module) if isinstance(module, Swapped) else type(module)).__name__


def described(kept: Exchange) -> str:
    block = type(kept.block).__name__
    return f"{block}, pattern={kept.block.pattern!r}" if kept.cut is None else f"{block}, on a map cut by {kept.cut!r}"

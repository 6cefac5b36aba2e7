"""Blocks of ours compute the attention that is in a network, in place: :func:`swap_`, undone by :func:`swap_back_`."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from vision_attn.errors import SiteError
from vision_attn.networks.convert.placement import note_place
from vision_attn.networks.convert.proof import HOOKS, difference, path_of
from vision_attn.networks.convert.swapped import (
    SWAPPED,
    Swap,
    Swapped,
    original_class,
    swapped_class,
    traits_of,
)
from vision_attn.networks.convert.table import known_class, row_of
from vision_attn.networks.insertion.backbone import changeable, modules_around
from vision_attn.networks.insertion.sites import Names, match_names, several
from vision_attn.text import Report, Table, shorten


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
        """The modules that were left as they are."""
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


def swap_(
    model: nn.Module,
    *,
    names: Names | Iterable[Names] | None = None,
    where: Callable[[str, nn.Module], bool] | None = None,
    dry_run: bool = False,
) -> SwapReport:
    """Let blocks of ours compute the attention that is in a model, in place, with the weights that it has.

    Known are the layers of the table in :mod:`vision_attn.networks.convert`; the report names the rest, and why. The
    model computes what it did. Its modules, parameters and keys stay: checkpoints load as before, and an optimizer that
    was made before trains it. :func:`vision_attn.set_impl_` chooses the implementation. :func:`vision_attn.capture`
    gives the attention maps, of windows that the network cuts and of the tokens of a ViT, too.

    A module is proven before it is swapped, on random weights. One that a block cannot stand for is left as it is, and
    the report says why. A call that a block cannot serve is served by the module itself; so are all calls while a part
    of the module has hooks, was replaced, as by LoRA, or is in another mode. Any number of threads may run the model at
    the same time.

    Args:
        model: any network; it may be one such module.
        names: globs on module paths, as in :func:`vision_attn.insert_`: only these modules, and what is in them.
        where: a function of path and module, likewise; with ``names``, both have to choose a module.
        dry_run: change nothing.

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
    inside = chosen_attention(modules, names, where)
    lines, swaps = [], {}
    for name, module in inside.items():
        try:
            swap = swaps[name] = swap_for(module, [modules[outer] for outer in around(name)])
            lines.append(SwappedModule(name, original_class(module).__name__, str(swap), swap.difference))
        except (ValueError, RuntimeError, AttributeError) as error:  # the last of a subclass without some part
            lines.append(SwappedModule(name, original_class(module).__name__, reason=str(error)))
    if not dry_run:
        for name, swap in swaps.items():
            vars(modules[name]).update({SWAPPED: swap})
            modules[name].__class__ = swapped_class(modules[name].__class__)
    return SwapReport(tuple(lines), "would be swapped" if dry_run else "swapped")


def swap_back_(model: nn.Module) -> SwapReport:
    """Undo :func:`swap_`: every module is the object that it was before, in the mode, type and place that it has now.

    Weights that were trained since stay.

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
        swap: Swap = vars(module).pop(SWAPPED)
        lines.append(SwappedModule(name, original_class(module).__name__, str(swap), swap.difference))
        module.__class__ = original_class(module)  # type: ignore[assignment]
    return SwapReport(tuple(lines), "swapped back")


def chosen_attention(modules: dict[str, nn.Module], names: Any, where: Any) -> dict[str, nn.Module]:
    """What is known to be attention, and what by its name is, unless it only holds such modules."""
    known = {name for name, module in modules.items() if known_class(module) is not None}
    named = {name for name, module in modules.items() if is_attention(module)}
    named -= {outer for name in known | named for outer in around(name)}  # which only hold it
    named -= {name for name in named if known.intersection(around(name))}
    attention = {name: module for name, module in modules.items() if name in known | named}
    if names is None and where is None:
        return attention
    chosen = list(modules) if names is None else match_names(modules, several("names", names, (str, re.Pattern)))
    if where is not None:
        chosen = [name for name in chosen if where(name, modules[name])]
    inside = {name: x for name, x in attention.items() if any(f"{name}.".startswith(f"{one}.") for one in chosen)}
    if not inside:
        raise SiteError(f"no attention is chosen; the model has {shorten(attention) or 'none'}")
    return inside


def around(name: str) -> list[str]:
    """The paths of the modules that a module is inside of, the model first."""
    return ["", *modules_around(name)] if name else []


def is_attention(module: nn.Module) -> bool:
    """Whether its name or those of its parts say so, where it is none of ours and has parameters."""
    kind = type(module)
    said = any(word in kind.__name__.lower().replace("_", "") for word in ("attention", "attn", "nonlocal"))
    projections = ("qkv", "qkvs", "qk", "to_qkv", "q_proj", "query", "query_conv", "theta")
    said = said or any(hasattr(module, name) for name in projections)
    return said and not kind.__module__.startswith("vision_attn.") and next(module.parameters(), None) is not None


def swap_for(module: nn.Module, outers: list[nn.Module]) -> Swap:
    """What stands for a module, proven on random weights; refused where nothing does."""
    if isinstance(module, Swapped):
        raise ValueError("it is swapped already")
    path, kind, row = row_of(module)
    if "..." in row.axes:
        raise ValueError(f"swap_ is not for {path}, whose maps may have any axes: use convert.from_layer")
    bare: Any = copy(module)
    vars(bare).update({hooks: OrderedDict() for hooks in HOOKS})  # those of the module itself go on running
    row.refuse(bare)
    if type(module).forward is not kind.forward:
        raise ValueError(f"{path_of(type(module))} is a subclass of {kind.__name__} with a forward of its own")
    with torch.inference_mode(False):
        swap = Swap(path, row.empty_block(module, row.weights(module)).eval(), traits_of(module))

    def compute(twin: Any, *args: Any) -> Any:
        return row.forward(twin, partial(swap.attend, twin), *args)

    swap.difference = difference(bare, compute, row.arguments, row.twin, row.dtype)
    swap.block.train(module.training)
    note_place(swap, module, outers)
    return swap

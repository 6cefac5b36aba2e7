"""Sites: the modules of a backbone that a user chooses, by stage, by name or by a function, and their targets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_map_only

from vision_attn.checks import as_list, product
from vision_attn.errors import SiteError
from vision_attn.networks.insertion.attach import CONTAINERS, inserted_blocks
from vision_attn.networks.insertion.backbone import (
    end_of_sequential,
    example_of,
    modules_around,
    plain_network,
    run_quietly,
    shown,
)
from vision_attn.networks.insertion.declared import DryRun, Map, leaves
from vision_attn.text import shorten

#: A glob or a regular expression on module paths.
Names = str | re.Pattern[str]

#: What a branch may pass through before the addition: a constant or learned scale, dropout, another dtype.
SCALING = ("MulBackward0", "DivBackward0", "NativeDropoutBackward0", "ToCopyBackward0", "CloneBackward0")

#: Where a block can go, relative to a site.
PLACES = ("after", "before", "branch")


def parse_sites(words: Iterable[str]) -> dict[str, Any]:
    """The sites as they are named on a command line: whole numbers are stages, anything else globs on module paths.

    >>> parse_sites(["-2", "-1"]), parse_sites(["layer3.*"])
    ({'stages': [-2, -1]}, {'names': ['layer3.*']})
    """
    words = list(words)
    numbers = [word for word in words if re.fullmatch(r"-?\d+", word)]
    if numbers and len(numbers) < len(words):
        raise ValueError(f"insert takes stages by index or modules by name, not both; got {' '.join(words)}")
    return {"stages": [int(word) for word in numbers]} if numbers else {"names": words} if words else {}


def select_sites(
    run: DryRun,
    *,
    stages: int | str | Iterable[int | str] | None,
    names: Names | Iterable[Names] | None,
    where: Callable[[str, nn.Module], bool] | None,
    exclude: Names | Iterable[Names] | None = None,
) -> list[str]:
    """The paths of the modules that are chosen by stage, by name or by a function, and not excluded."""
    if sum(choice is not None for choice in (stages, names, where)) != 1:
        raise ValueError("choose sites by exactly one of stages, names and where")
    # A block that replaced a module is a site, which is then refused; what is inside of blocks is none.
    blocks = inserted_blocks(run.model)
    inside = {id(module) for block in blocks.values() for module in block.modules()}
    inside -= {id(run.model.get_submodule(site)) for site in blocks}
    named = run.model.named_modules(remove_duplicate=False)
    modules = {name: module for name, module in named if name and id(module) not in inside}
    if stages is not None:
        chosen = match_stages(run, several("stages", stages, (int, str)))
    elif names is not None:
        chosen = match_names(modules, several("names", names, (str, re.Pattern)))
    else:
        chosen = [name for name, module in modules.items() if where is not None and where(name, module)]
    if exclude is not None:
        excluded = set(match_names(modules, several("exclude", exclude, (str, re.Pattern)), "exclude"))
        chosen = [name for name in chosen if name not in excluded]
    if not chosen:
        raise SiteError("no module is chosen: where is true for none, or all are excluded; see model.named_modules()")
    if unknown := [name for name in chosen if name not in modules]:
        raise SiteError(f"stages: the model declares {unknown[0]!r} as a stage and has no such module: use names=")
    return first_names(run.model, chosen)


def first_names(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Paths of modules, each once: a module that has several names goes by its first."""
    first = {id(module): name for name, module in model.named_modules()}
    return list(dict.fromkeys(first[id(model.get_submodule(name))] for name in names))


def several(argument: str, given: Any, kinds: tuple[type, ...]) -> list[Any]:
    """One or several of some kinds, as a list."""
    what = "an index or a name, or several" if int in kinds else "a glob or a compiled regular expression, or several"
    items = as_list(argument, given, what, single=kinds)
    if not items or not all(isinstance(item, kinds) for item in items):
        raise ValueError(f"{argument} must be {what}; got {shown(given)}")
    return items


def match_stages(run: DryRun, wanted: Iterable[int | str]) -> list[str]:
    """The paths of the stages that are wanted."""
    available = stages_of(run)
    by_word: dict[int | str, str] = {}
    for index, name in enumerate(available):
        by_word |= {name: name, index: name, index - len(available): name}
    for stage in wanted:
        if stage not in by_word:
            listed = ", ".join(f"{index} {name!r}" for index, name in enumerate(available)) or "none: use names="
            raise SiteError(f"stages: there is no stage {stage!r}; the stages are {listed}")
    return [by_word[stage] for stage in wanted]


def match_names(modules: dict[str, nn.Module], patterns: Iterable[Names], argument: str = "names") -> list[str]:
    """The paths of the modules that patterns match, in the order of the patterns."""
    chosen = []
    for pattern in dict.fromkeys(patterns):
        if isinstance(pattern, re.Pattern):
            shown, found = pattern.pattern, [name for name in modules if pattern.fullmatch(name)]
        else:
            parts = pattern.split(".")
            shown, found = pattern, [name for name in modules if glob_matches(parts, name.split("."))]
        if not found:
            top = shorten([name for name in modules if "." not in name], limit=12)
            raise SiteError(f"{argument}: {shown!r} matches no module; at the top the model has {top}")
        chosen += found
    return chosen


def glob_matches(pattern: list[str], path: list[str]) -> bool:
    """Part by part: ``*`` stays within a part, ``**`` stands for any number of parts."""
    ends = {0}  # of what the pattern's beginning matches: a step for each of its parts, however many are **
    for part in pattern:
        if part == "**":
            ends = set(range(min(ends, default=len(path) + 1), len(path) + 1))
        else:
            ends = {end + 1 for end in ends if end < len(path) and fnmatchcase(path[end], part)}
    return len(path) in ends


def targets_of(run: DryRun, sites: Iterable[str], at: str) -> list[str]:
    """The modules at which the blocks of these sites run."""
    if at not in PLACES:
        raise ValueError(f"at must be one of {', '.join(map(repr, PLACES))}; got {at!r}")
    targets = [end_of_sequential(run.model, site, 0 if at == "before" else -1) for site in sites]
    if at == "branch":
        targets = [end_of_sequential(run.model, end) for end in branch_ends(run, targets)]
    return first_names(run.model, targets)


# --- stages -----------------------------------------------------------------------------------------------------------


def stage_names(model: nn.Module, example_input: Any = None) -> list[str]:
    """The paths of a model's stages, from the image to the head.

    They are those that the model declares, as timm's networks in ``feature_info``. Those of torchvision, and any other
    in which maps only become smaller, have as stages the last module of each size of map.

    Args:
        model: the network.
        example_input: for a dry run, as in :func:`vision_attn.insert_`.

    Raises:
        SiteError: the model does not run on the example, or it declares no stages and its maps become larger again, as
            in a U-Net; the message names modules to choose from.

    >>> from torchvision.models import resnet18
    >>> stage_names(resnet18(), (1, 3, 64, 64))
    ['relu', 'layer1', 'layer2', 'layer3', 'layer4']
    """
    model = plain_network(model)
    return stages_of(DryRun(model, example_of(model, example_input)))


def stages_of(run: DryRun) -> list[str]:
    """The paths of the stages of a network that was run, from the image to the head."""
    said = run.said
    if said.parts:
        raise SiteError(f"stages: several parts declare them, {shorten(said.parts)}: choose sites by names=")
    if said.stages:
        return [path for path, _ in said.stages]
    every = units_in(run, said.trunk or "")
    tokens = sum("(" in one.layout for one in every)  # which have the shape of many things
    # What a whole network pools to one cell is no stage.
    units = [one for one in every if "(" not in one.layout and (said.trunk or product(one.size) > 1)]
    rows = last_of_each_size(units)
    cells = [product(one.size) for one in rows]
    if not units or len(units) < tokens:
        why, rows = "most of its modules give tokens or no map", last_of_each_size(every)
    elif cells != sorted(cells, reverse=True):
        why = "its maps become larger again"
        rows = last_of_each_size(one for one in units_in(run, "", 1) if "(" not in one.layout)
    elif not said.trunk and product(every[-1].size) == 1 and max(rows[-1].size) <= 2:
        why = "on an image so small nothing tells a stage of one cell from pooling: give a larger example_input="
    else:
        return [stage_path(run, one, units) for one in rows]
    choice = shorten([f"{one.target!r} ({'×'.join(map(str, one.size))})" for one in rows], limit=12)
    what = f"{type(run.model).__name__} declares none, and {why}"
    raise SiteError(f"stages: {what}: choose sites by names=, as among {choice or 'those of model.named_modules()'}")


def last_of_each_size(units: Iterable[Map]) -> list[Map]:
    """Of modules in a row whose maps have one size, the last."""
    return [list(row)[-1] for _, row in groupby(units, key=lambda one: one.size)]


def stage_path(run: DryRun, one: Map, units: Iterable[Map]) -> str:
    """The outermost row that ends with a module and has maps of its size only."""
    others = [other.target for other in units if other.size != one.size]
    around = [name for name in modules_around(one.target) if not any(x.startswith(f"{name}.") for x in others)]
    return next(name for name in (*around, one.target) if end_of_sequential(run.model, name) == one.target)


def units_in(run: DryRun, path: str, sizes: int = 2) -> list[Map]:
    """The maps of the modules in a part of a network that are no row of others, in the order of their calls.

    A module with maps of more sizes in it is a row of others.
    """
    found = []
    for name, module in run.model.get_submodule(path).named_children():
        child = f"{path}.{name}" if path else name
        inner = (one for other in run.calls if other.startswith(f"{child}.") for one in run.maps(other))
        is_row = isinstance(module, CONTAINERS) or child not in run.calls
        if is_row or len({one.size for one in inner if product(one.size) > 1}) > sizes:
            found += units_in(run, child, sizes)
        elif len(maps := run.maps(child)) == 1:
            found += maps
    order = list(run.calls)
    return sorted(found, key=lambda one: order.index(one.target))


# --- the end of a residual branch: the module whose output is added to the shortcut ----------------------------------


def branch_ends(run: DryRun, sites: Iterable[str]) -> list[str]:
    """Return the modules in residual blocks whose outputs are the branches that are added to the shortcuts."""
    ends: dict[str, str] = {}

    def note(site: str, *call: Any) -> None:
        ends[site] = branch_end(site, *call)

    for site in sites:
        run.check_called(site)
    run_quietly(run.model, run.example, [(site, partial(note, site)) for site in sites])
    return list(ends.values())


def branch_end(site: str, block: nn.Module, args: Any, kwargs: Any, output: object) -> str:
    """Return the module that ends the branch: of the last two tensors added, the one that more operations led to."""
    names: dict[Node | None, str] = {}

    def note(module: nn.Module, args: object, output: object) -> object:
        if not isinstance(output, Tensor) or not output.requires_grad:
            return output
        output = output.clone()  # the output may be a view, and an addition in place rewrites the history of a view
        names[output.grad_fn] = paths[module]
        return output

    paths = {module: name for name, module in block.named_modules(prefix=site) if module is not block}
    with torch.enable_grad(), ExitStack() as stack:
        for module in paths:
            stack.callback(module.register_forward_hook(note).remove)
        args, kwargs = tree_map_only(Tensor, differentiable, (args, kwargs))
        found = leaves(block.forward(*args, **kwargs))[0].grad_fn
    while found is not None and found.name() != "AddBackward0":
        found = max((node for node, _ in found.next_functions), key=depth, default=None)
    one, other = sorted((node for node, _ in found.next_functions), key=depth) if found else (None, None)
    shortcut, branch = depth(one), depth(other)
    while other is not None and other not in names and other.name() in SCALING:
        inner = [node for node, _ in other.next_functions if node is not None and node.next_functions]
        other = inner[0] if len(inner) == 1 else None
    if shortcut == branch or other not in names:
        raise SiteError(f"{site!r} has no branch: no module's output is added to a shortcut in it. Use at='after'")
    return names[other]


def differentiable(x: Tensor) -> Tensor:
    """The same values, from which gradients are followed; not a leaf, as a block may change it in place."""
    return x.detach().requires_grad_() * 1 if x.is_floating_point() else x


def depth(node: Node | None, known: dict[Node, int] | None = None) -> int:
    """The longest row of operations that led to a tensor."""
    known = {} if known is None else known
    if node is not None and node not in known:
        known[node] = 1 + max((depth(before, known) for before, _ in node.next_functions), default=0)
    return 0 if node is None else known[node]

"""Sites of a backbone: which of its modules a block can follow, chosen by stage, by name or by a function."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from torch import nn

__all__ = ["CHILD", "SiteError", "select_sites", "stage_names"]

#: The name under which a block becomes a child of the module at its site, and so the part of its keys that tells it.
CHILD = "inserted"


class SiteError(ValueError):
    """A site does not exist or cannot take a block; the model is as it was."""


def stage_names(model: nn.Module) -> list[str]:
    """Paths of a model's stages: timm's ``feature_info``, or the names that ResNets give theirs.

    torchvision's ResNets have no ``feature_info``; theirs is the one that timm gives the same network, in which the
    first entry is the activation of the stem.
    """
    info = getattr(model, "feature_info", None)
    if info is not None:
        return [entry["module"] for entry in getattr(info, "info", info)]
    layers = sorted(name for name, _ in model.named_children() if re.fullmatch(r"layer\d+", name))
    return [name for name, _ in model.named_children() if name in ("relu", "act1")] + layers if layers else []


def select_sites(
    model: nn.Module,
    *,
    stages: int | str | Iterable[int | str] | None,
    names: str | Iterable[str] | None,
    where: Callable[[str, nn.Module], bool] | None,
) -> list[str]:
    if sum(choice is not None for choice in (stages, names, where)) != 1:
        raise ValueError("choose sites by exactly one of stages, names and where")
    modules = {name: module for name, module in model.named_modules() if name and CHILD not in name.split(".")}
    if stages is not None:
        chosen = match_stages(model, [stages] if isinstance(stages, (int, str)) else list(stages))
    elif names is not None:
        chosen = match_names(modules, [names] if isinstance(names, str) else list(names))
    else:
        assert where is not None
        chosen = [name for name, module in modules.items() if where(name, module)]
        if not chosen:
            raise SiteError("where is true for no module of the model: see model.named_modules()")
    sites = list(dict.fromkeys(last_of_sequential(model, name) for name in chosen))
    for site in sites:
        if hasattr(model.get_submodule(site), CHILD):
            raise SiteError(f"{site!r} has an inserted block already: take it out with remove_, or choose another site")
    return sites


def match_stages(model: nn.Module, wanted: list[int | str]) -> list[str]:
    available = stage_names(model)
    if not available:
        raise SiteError(
            f"stages: {type(model).__name__} does not say what its stages are (no feature_info, no layer1, layer2, …): "
            "choose sites with names=, globs on module paths"
        )
    listed = ", ".join(f"{index} {name!r}" for index, name in enumerate(available))
    chosen = []
    for stage in wanted:
        if isinstance(stage, int) and -len(available) <= stage < len(available):
            chosen.append(available[stage])
        elif stage in available:
            chosen.append(str(stage))
        else:
            raise SiteError(f"stages: there is no stage {stage!r}; the stages are {listed}")
    return chosen


def match_names(modules: dict[str, nn.Module], patterns: list[str]) -> list[str]:
    chosen = []
    for pattern in patterns:
        found = [name for name in modules if glob_matches(pattern.split("."), name.split("."))]
        if not found:
            raise SiteError(f"names: {pattern!r} matches no module; {suggest(modules)}")
        chosen += found
    return chosen


def glob_matches(pattern: list[str], path: list[str]) -> bool:
    """Part by part: ``*`` stays within a part, ``**`` stands for any number of parts."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(glob_matches(pattern[1:], path[start:]) for start in range(len(path) + 1))
    return bool(path) and fnmatchcase(path[0], pattern[0]) and glob_matches(pattern[1:], path[1:])


def suggest(modules: dict[str, nn.Module]) -> str:
    top = [name for name in modules if "." not in name]
    shown = ", ".join(map(repr, top[:12])) + (", …" if len(top) > 12 else "")
    return f"at the top the model has {shown}; {len(modules)} modules in all: model.named_modules()"


def last_of_sequential(model: nn.Module, name: str) -> str:
    """The module that gives a plain Sequential its output.

    A Sequential calls every child it has, so a block cannot be one of them without being run in their row.
    """
    module = model.get_submodule(name)
    while type(module).forward is nn.Sequential.forward and len(module._modules):
        last = next(reversed(module._modules))
        name, module = f"{name}.{last}", module.get_submodule(last)
    return name

"""Sites of a backbone: which of its modules are meant, by name or by a function."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from vision_attn.errors import SiteError

__all__ = [
    "CHILD",
    "Names",
    "declared_stages",
    "first_of_sequential",
    "last_of_sequential",
    "match_names",
    "match_stages",
    "match_where",
    "parse_sites",
]

#: The name under which a block becomes a child of the module at its site, and so the part of its keys that tells it.
CHILD = "inserted"

#: A glob or a regular expression on module paths.
Names = str | re.Pattern[str]


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


def declared_stages(model: nn.Module) -> list[tuple[str, int]]:
    """The path and channels of the stages in timm's ``feature_info``; empty where a model has none."""
    info = getattr(model, "feature_info", None)
    entries = getattr(info, "info", info) or []
    return [(entry.get("module") or "", entry["num_chs"]) for entry in entries]


def match_stages(model: nn.Module, wanted: Iterable[int | str], available: list[str]) -> list[str]:
    """The paths of the stages that are wanted."""
    if not available:
        raise SiteError(
            f"stages: {type(model).__name__} has no stages, modules that give maps of the image: "
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


def match_names(modules: dict[str, nn.Module], patterns: Iterable[Names]) -> list[str]:
    """The paths of the modules that patterns match, in the order of the patterns."""
    chosen = []
    for pattern in patterns:
        if isinstance(pattern, re.Pattern):
            found = [name for name in modules if pattern.fullmatch(name)]
        else:
            found = [name for name in modules if glob_matches(pattern.split("."), name.split("."))]
        if not found:
            shown = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
            raise SiteError(f"names: {shown!r} matches no module; {suggest(modules)}")
        chosen += found
    return chosen


def match_where(modules: dict[str, nn.Module], where: Callable[[str, nn.Module], bool]) -> list[str]:
    """The paths of the modules that a function is true of."""
    chosen = [name for name, module in modules.items() if where(name, module)]
    if not chosen:
        raise SiteError("where is true for no module of the model: see model.named_modules()")
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
    return end_of_sequential(model, name, -1)


def first_of_sequential(model: nn.Module, name: str) -> str:
    """The module that takes what a plain Sequential takes."""
    return end_of_sequential(model, name, 0)


def end_of_sequential(model: nn.Module, name: str, index: int) -> str:
    name, module = uncompiled(name, model.get_submodule(name))
    while type(module).forward is nn.Sequential.forward and len(module._modules):
        end = list(module._modules)[index]
        name, module = uncompiled(f"{name}.{end}", module.get_submodule(end))
    return name


def uncompiled(name: str, module: nn.Module) -> tuple[str, nn.Module]:
    """The module inside torch.compile's wrapper, which has no hooks of its own."""
    while isinstance(inner := module._modules.get("_orig_mod"), nn.Module):
        name, module = f"{name}._orig_mod", inner
    return name, module

"""Select modules and state-dict keys by globs, and the ends and parents of modules by path."""

import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate
from typing import Any

from torch import nn

from vision_attn.checks import as_list
from vision_attn.errors import SiteError
from vision_attn.networks.inspection.example import format_value
from vision_attn.networks.inspection.wrappers import is_layer_wrapper
from vision_attn.text import shorten

#: A glob or regular expression for module paths.
Names = str | re.Pattern[str]
#: Types of the arguments ``names`` and ``where`` of :func:`vision_attn.insert_`.
Globs = Names | Iterable[Names] | None
Where = Callable[[str, nn.Module], bool] | None


def check_list(argument: str, value: Any, kinds: tuple[type, ...]) -> list[Any]:
    """Return one or several values of the given types as a list; raise for other types."""
    what = "an index, a name, or a list of both" if int in kinds else "a glob, a compiled regular expression, or a list"
    items = as_list(argument, value, what, single=kinds)
    if not items or not all(isinstance(item, kinds) for item in items):
        raise ValueError(f"{argument} must be {what}, got {format_value(value)}")
    return items


def match_names(modules: Mapping[str, nn.Module], patterns: Globs, argument: str = "names") -> list[str]:
    """Return the paths of the modules that match the patterns, in the order of the patterns."""
    chosen = []
    for pattern in dict.fromkeys(check_list(argument, patterns, (str, re.Pattern))):
        matches = pattern.fullmatch if isinstance(pattern, re.Pattern) else partial(glob_matches, pattern)
        if not (found := [name for name in modules if matches(name)]):
            top = [name for name in modules if name and "." not in name]
            listed = f"{'Top-level modules' if top else 'Available'}: {shorten(top or modules, limit=12)}"
            raise SiteError(f"{argument}: no module matches {getattr(pattern, 'pattern', pattern)!r}. {listed}")
        chosen += found
    return chosen


def match_modules(modules: Mapping[str, nn.Module], names: Globs, where: Where) -> list[str]:
    """Return the paths of the modules that both ``names`` and ``where`` select; None selects all modules."""
    chosen = list(modules) if names is None else match_names(modules, names)
    return [name for name in chosen if where is None or where(name, modules[name])]


def select_inside(modules: Mapping[str, nn.Module], paths: Iterable[str], names: Globs, where: Where) -> list[str]:
    """Return the paths at or in the modules that ``names`` and ``where`` select; all paths without either."""
    if names is None and where is None:
        return list(paths)
    chosen = match_modules(modules, names, where)
    return [path for path in paths if any(not outer or f"{path}.".startswith(f"{outer}.") for outer in chosen)]


def glob_matches(pattern: str, name: str) -> bool:
    """Match a glob on module paths: ``*`` matches within a part, ``**`` matches any number of parts."""
    path = name.split(".")
    ends = {0}  # The set of possible ends of the matched parts needs a linear number of steps, unlike backtracking.
    for part in pattern.split("."):
        if part == "**":
            ends = set(range(min(ends, default=len(path) + 1), len(path) + 1))
        else:
            ends = {end + 1 for end in ends if end < len(path) and fnmatchcase(path[end], part)}
    return len(path) in ends


def select_keys(argument: str, globs: str | Iterable[str], model: nn.Module, keys: Iterable[str]) -> set[str]:
    """Return the keys that match any of the globs, in which ``"head"`` is the classifier.

    The classifier is read from timm's metadata, or found by the names that torchvision's models use.
    """
    keys = list(keys)
    declared = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or ()
    names = [declared] if isinstance(declared, str) else [*declared] or ["fc", "classifier", "heads", "head"]
    heads = [name for name in names if any(key.startswith(f"{name}.") for key in keys)]
    listed = f" The classifier of this model is {shorten(map(repr, heads))}; "
    known = f'{listed}pass {argument}="head" or "{heads[0]}.*"' if heads else ""
    named = {"head": [f"{head}.*" for head in heads]} if heads else {}
    patterns = as_list(argument, globs, 'globs on state-dict keys, or "head"', single=str)
    return match_keys(argument, [glob for pattern in patterns for glob in named.get(pattern, [pattern])], keys, known)


def match_keys(argument: str, globs: str | Iterable[str], keys: Iterable[str], hint: str = "") -> set[str]:
    """Return the keys that match any of the globs; raise if a glob matches no key."""
    keys, matching = list(keys), set[str]()
    for glob in as_list(argument, globs, "globs on state-dict keys", single=str):
        if not (matches := {key for key in keys if fnmatchcase(key, glob)}):
            raise ValueError(f"{argument}={glob!r} matches no parameter.{hint or f' Available keys: {shorten(keys)}'}")
        matching |= matches
    return matching


def end_of_sequential(model: nn.Module, name: str, index: int = -1) -> str:
    """Return the path of the last module of a plain Sequential (of the first module for index 0), or the path itself.

    A block cannot be a child of a Sequential, which would call it as one of its layers. A ModuleList and the modules of
    a traced graph are never called, so their last module is used as well.
    """
    module = model.get_submodule(name)
    while True:
        kind = type(module)
        is_sequence = kind.forward is nn.Sequential.forward or isinstance(module, nn.ModuleList) or kind is nn.Module
        # A block belongs inside a wrapper: that of torch.compile runs no hooks, and other code removes wrappers.
        children = list(own_children(module).items())
        if not children or not (is_sequence or is_layer_wrapper(module)):
            return name
        name, module = f"{name}.{children[index][0]}", children[index][1]


def find_module(model: nn.Module, path: str) -> nn.Module | None:
    """Return a module of a model, or None if there is none, in half the time of ``get_submodule``."""
    found: Any = model
    for name in path.split(".") if path else ():
        found = getattr(found, name, None)
    return found if isinstance(found, nn.Module) else None


def require_module(model: nn.Module, path: str) -> nn.Module:
    """Return a module of a model; raise if there is none, for example for a record of another network."""
    if (module := find_module(model, path)) is None:
        raise SiteError(f"the model has no module {path!r} for a block")
    return module


def own_children(module: nn.Module) -> dict[str, nn.Module]:
    """Return the children of a module by name, also those with several names."""
    return {name: child for name, child in module.named_modules(remove_duplicate=False) if name and "." not in name}


def ancestor_paths(name: str) -> list[str]:
    """Return the paths of the modules that contain a module, except the model."""
    return list(accumulate(name.split(".")[:-1], lambda path, part: f"{path}.{part}"))

"""Sites: the modules of a backbone that a user chooses, by stage, by name or by a function, and their targets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from vision_attn.errors import SiteError
from vision_attn.insertion.attach import REPLACED, inserted, is_target
from vision_attn.insertion.backbone import (
    declared_stages,
    end_of_sequential,
    example_images,
    modules_around,
    plain_network,
)
from vision_attn.insertion.dry_run import DryRun, branch_end

__all__ = ["Names", "parse_sites", "select_sites", "stage_names", "stages_of", "targets_of"]

#: A glob or a regular expression on module paths.
Names = str | re.Pattern[str]

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
) -> list[str]:
    """The paths of the modules that are chosen by stage, by name or by a function."""
    if sum(choice is not None for choice in (stages, names, where)) != 1:
        raise ValueError("choose sites by exactly one of stages, names and where")
    # A block that replaced a module is a site, which is then refused; what is inside of blocks is none.
    own = {
        id(module)
        for site, block in inserted(run.model).items()
        for module in block.modules()
        if module is not run.model.get_submodule(site)
    }
    modules = {
        name: module
        for name, module in run.model.named_modules(remove_duplicate=False)
        if name and id(module) not in own
    }
    if stages is not None:
        chosen = match_stages(run, several("stages", stages, (int, str)))
    elif names is not None:
        chosen = match_names(modules, several("names", names, (str, re.Pattern)))
    else:
        chosen = [name for name, module in modules.items() if where is not None and where(name, module)]
        if not chosen:
            raise SiteError("where is true for no module of the model: see model.named_modules()")
    # A module that has several names goes by its first.
    first = {id(module): name for name, module in run.model.named_modules()}
    return list(dict.fromkeys(first[id(modules[name])] for name in chosen))


def several(argument: str, given: Any, kinds: tuple[type, ...]) -> list[Any]:
    """One or several of some kinds, as a list."""
    items = [given] if isinstance(given, kinds) or not isinstance(given, Iterable) else list(given)
    if not items or any(isinstance(item, bool) or not isinstance(item, kinds) for item in items):
        what = "an index or a name" if int in kinds else "a glob or a compiled regular expression"
        raise ValueError(f"{argument} must be {what}, or several; got {given!r}")
    return items


def match_stages(run: DryRun, wanted: Iterable[int | str]) -> list[str]:
    """The paths of the stages that are wanted."""
    available = stages_of(run)
    if not available:
        raise SiteError(
            f"stages: {type(run.model).__name__} has no stages, modules that give maps of the image: "
            "choose sites with names=, globs on module paths"
        )
    by_word: dict[int | str, str] = {name: name for name in available}
    by_word.update(zip(range(len(available)), available, strict=True))
    by_word.update(zip(range(-len(available), 0), available, strict=True))
    for stage in wanted:
        if stage not in by_word:
            listed = ", ".join(f"{index} {name!r}" for index, name in enumerate(available))
            raise SiteError(f"stages: there is no stage {stage!r}; the stages are {listed}")
    return [by_word[stage] for stage in wanted]


def match_names(modules: dict[str, nn.Module], patterns: Iterable[Names]) -> list[str]:
    """The paths of the modules that patterns match, in the order of the patterns."""
    chosen = []
    for pattern in patterns:
        if isinstance(pattern, re.Pattern):
            shown, found = pattern.pattern, [name for name in modules if pattern.fullmatch(name)]
        else:
            parts = pattern.split(".")
            shown, found = pattern, [name for name in modules if glob_matches(parts, name.split("."))]
        if not found:
            top = [name for name in modules if "." not in name]
            raise SiteError(
                f"names: {shown!r} matches no module; at the top the model has {', '.join(map(repr, top[:12]))}"
                f"{', …' if len(top) > 12 else ''}; {len(modules)} modules in all: model.named_modules()"
            )
        chosen += found
    return chosen


def glob_matches(pattern: list[str], path: list[str]) -> bool:
    """Part by part: ``*`` stays within a part, ``**`` stands for any number of parts."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(glob_matches(pattern[1:], path[start:]) for start in range(len(path) + 1))
    return bool(path) and fnmatchcase(path[0], pattern[0]) and glob_matches(pattern[1:], path[1:])


def targets_of(run: DryRun, sites: Iterable[str], at: str) -> list[str]:
    """The modules at which the blocks of these sites run."""
    if at not in PLACES:
        raise ValueError(f"at must be one of {', '.join(map(repr, PLACES))}; got {at!r}")
    targets = [end_of_sequential(run.model, site, 0 if at == "before" else -1) for site in sites]
    if at == "branch":
        for target in targets:
            run.check_called_once(target)
        targets = [end_of_sequential(run.model, branch_end(run.model, target, run.example)) for target in targets]
    for target in targets:
        module = run.model.get_submodule(target)
        if REPLACED in vars(module):
            raise SiteError(f"{target!r} has replaced a module: insert at the module around it, or give it its options")
        if is_target(module):
            raise SiteError(
                f"{target!r} has an inserted block already: take it out with remove_, or choose another site"
            )
    return list(dict.fromkeys(targets))


def stage_names(model: nn.Module, example_input: Tensor | tuple[int, ...] | None = None) -> list[str]:
    """The paths of a model's stages, from the image to the head.

    They are those of timm's ``feature_info`` where these modules give maps of the channels that it names. Otherwise
    they are the last module to give a map of each size, outside of blocks that halve it.

    Args:
        model: the network.
        example_input: an image batch or its shape, for a dry run; see :func:`vision_attn.insert_`.

    Raises:
        SiteError: the model does not run on the example.

    >>> from torchvision.models import resnet18
    >>> stage_names(resnet18(), (1, 3, 64, 64))
    ['relu', 'layer1', 'layer2', 'layer3', 'layer4']
    """
    model = plain_network(model)
    return stages_of(DryRun(model, example_images(model, example_input)))


def stages_of(run: DryRun) -> list[str]:
    """The paths of the stages of a network that was run, from the image to the head."""
    declared = declared_stages(run.model)
    if declared and all(gives_channels(run, name, channels) for name, channels in declared):
        return [name for name, _ in declared]
    return stages_seen(run)


def gives_channels(run: DryRun, name: str, channels: int) -> bool:
    if not name or name not in dict(run.model.named_modules(remove_duplicate=False)):
        return False
    return any(one.shape[1] == channels for one in run.maps(end_of_sequential(run.model, name)))


def stages_seen(run: DryRun) -> list[str]:
    """The last module to give a map of each size, once what only has the shape of a map is left out."""
    others: set[tuple[int, ...]] = set()
    while True:
        stages = last_of_each_size(run, others)
        found = [run.the_map(end_of_sequential(run.model, stage)) for stage in stages]
        misplaced = run.misplaced(found)
        if not misplaced:
            return stages
        others |= {one.form.shape for one in found if one.target in misplaced}


def last_of_each_size(run: DryRun, others: set[tuple[int, ...]]) -> list[str]:
    """For each size of map the last module to give it outside of the next reduction, while maps become smaller."""
    last: dict[tuple[int, int], tuple[int, str]] = {}
    for name, calls in run.calls.items():
        maps = run.maps(name)
        if len(maps) != 1:
            continue
        height, width = maps[0].shape[2:]
        if height * width == 1 or maps[0].form.shape in others:
            continue  # one cell is a pooled vector, of the head or of squeeze and excitation
        if not any(halves(run, around, height) for around in modules_around(name)):
            last[height, width] = max(last.get((height, width), (-1, "")), (calls[0].order, name))
    stages: list[tuple[int, str]] = []
    for (height, width), (_, name) in sorted(last.items(), key=lambda item: item[1]):
        # What a larger map follows belongs to the inside of its stage: a map pooled for keys, a pyramid's lower level.
        stages = [stage for stage in stages if stage[0] > height * width]
        stages.append((height * width, name))
    return [name for _, name in stages]


def halves(run: DryRun, name: str, height: int) -> bool:
    """Whether a module, which is more than a row of others, makes one map of half the size of maps of that height."""
    if type(run.model.get_submodule(name)).forward is nn.Sequential.forward:
        return False
    given, taken = run.maps(name), run.maps(name, "before")
    return len(given) == len(taken) == 1 and taken[0].shape[2] == height and 1 < height / given[0].shape[2] < 3

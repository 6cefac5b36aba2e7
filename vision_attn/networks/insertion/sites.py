"""Sites: modules of a network that the user selects by stage, name or function; their targets; and stages."""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from torch import nn

from vision_attn.checks import check_choice, product
from vision_attn.errors import SiteError
from vision_attn.networks.insertion.build import CONTAINERS
from vision_attn.networks.insertion.registry import inserted_blocks
from vision_attn.networks.inspection import selection
from vision_attn.networks.inspection.dry_run import DryRun
from vision_attn.networks.inspection.feature_maps import FeatureMap
from vision_attn.networks.inspection.selection import Globs, Where, ancestor_paths, end_of_sequential
from vision_attn.networks.inspection.wrappers import unwrap_model
from vision_attn.text import did_you_mean, shorten

#: Type of the argument ``stages`` of :func:`vision_attn.insert_`.
Stages = int | str | Iterable[int | str] | None


def select_sites(
    dry_run: DryRun, stages: Stages, names: Globs, where: Where, exclude: Globs, options: Iterable[str], at: str
) -> list[str]:
    """Return the paths of the modules that are selected by stage, name or function, and not excluded.

    ``exclude`` matches a selected module, or the module at its end, at which the block would run.
    """
    selections = [name for name, x in (("stages", stages), ("names", names), ("where", where)) if x is not None]
    if len(selections) != 1:
        guesses = {name: did_you_mean(name, ("stages", "names", "where")) for name in options}
        if similar := next(filter(guesses.get, guesses), None):
            raise ValueError(f"got an unexpected argument {similar!r}.{guesses[similar]}")
        unused = f" {shorten(map(repr, options))} would be passed to the block" if options else ""
        got = " and ".join(selections) or "none"
        raise ValueError(f"pass exactly one of stages, names and where, got {got}.{unused}")
    # A block that replaced a module is a site, for which an error is raised later. Modules inside blocks are not sites.
    blocks = inserted_blocks(dry_run.model)
    inside = {id(module) for block in blocks.values() for module in block.modules()}
    inside -= {id(dry_run.model.get_submodule(site)) for site in blocks}
    named = dry_run.model.named_modules(remove_duplicate=False)
    modules = {name: module for name, module in named if name and id(module) not in inside}
    chosen = selection.match_modules(modules, names, where) if stages is None else match_stages(dry_run, stages)
    if exclude is not None:
        excluded = set(selection.match_names(modules, exclude, "exclude"))
        chosen = [name for name in chosen if excluded.isdisjoint({name, end_at(dry_run.model, name, at)})]
    if not chosen:
        why = "where returns True for no module" if where is not None else "exclude matches all selected modules"
        raise SiteError(f"no module is selected: {why}. See model.named_modules() for the modules")
    return first_names(dry_run.model, chosen)


def match_stages(dry_run: DryRun, stages: int | str | Iterable[int | str]) -> list[str]:
    """Return the paths of stages by index or name.

    Negative indices do not count stages at the end without an effect on the output, as the last block of many ViTs.
    """
    wanted, available = selection.check_list("stages", stages, (int, str)), find_stages(dry_run)
    effective = list(available)
    if (first := min((stage for stage in wanted if isinstance(stage, int)), default=0)) < 0:
        ends = [end_of_sequential(dry_run.model, stage) for stage in available]
        dry_run.test_use([x for end in ends[first - 1 :] for x in dry_run.maps(end)], "after")
        while len(effective) > 1 and not any(x.used for x in dry_run.select_maps([ends[len(effective) - 1]], "after")):
            effective.pop()
    from_end = enumerate(effective, -len(effective))
    by_word: dict[int | str, str] = {**dict(enumerate(available)), **dict(from_end), **{x: x for x in available}}
    for stage in wanted:
        if stage not in by_word:
            listed = ", ".join(f"{index} {name!r}" for index, name in enumerate(available))
            remedy = f"The stages are {listed}" if listed else "The model has no stages; use names="
            raise SiteError(f"stages: there is no stage {stage!r}. {remedy}")
    return [by_word[stage] for stage in wanted]


def find_targets(dry_run: DryRun, sites: Iterable[str], at: str) -> list[str]:
    """Return the paths of the modules at which the blocks for the sites run."""
    check_choice("at", at, ("after", "before"))
    ends = {site: first_names(dry_run.model, [end_at(dry_run.model, site, at)])[0] for site in sites}
    calls = {path: len(dry_run.calls.get(path, ())) for path in (*ends, *ends.values())}
    # The last module of a Sequential may also run elsewhere. A Sequential that other code iterates over is not called.
    targets = [site if 0 < calls[site] < calls[end] else end for site, end in ends.items()]
    return list(dict.fromkeys(targets))


def end_at(model: nn.Module, site: str, at: str) -> str:
    """Return the path of the module at which the block for a site runs: its first or last part, or the site itself."""
    return site if at == "replace" else end_of_sequential(model, site, 0 if at == "before" else -1)


def first_names(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return the first path of each module, without duplicates."""
    first = {id(module): name for name, module in model.named_modules()}
    return list(dict.fromkeys(first[id(model.get_submodule(name))] for name in names))


# --- stages -----------------------------------------------------------------------------------------------------------


def stage_names(model: nn.Module, example_input: Any = None) -> list[str]:
    """Return the paths of the stages of a model, from the image to the head.

    Stages are read from the model's metadata, such as timm's ``feature_info``, or from a built-in table. In any other
    network whose feature maps only get smaller, the last module of each feature map size is a stage.

    Args:
        model: the network.
        example_input: input for a dry run, as in :func:`vision_attn.insert_`.

    Raises:
        SiteError: the model does not run on the example, or it has no metadata and its feature maps get larger again,
            as in a U-Net. The message suggests a module.

    >>> from torchvision.models import resnet18
    >>> stage_names(resnet18(), (1, 3, 64, 64))
    ['relu', 'layer1', 'layer2', 'layer3', 'layer4']
    >>> import timm
    >>> stage_names(timm.create_model("resnet18", features_only=True, out_indices=(0, 1)))
    ['act1', 'layer1']
    """
    return find_stages(DryRun(unwrap_model(model), example_input))


def find_stages(dry_run: DryRun) -> list[str]:
    """Return the paths of the stages of a network, from the image to the head."""
    declared = dry_run.declared
    if declared.parts:
        raise SiteError(f"stages: several parts of the model have stages: {shorten(declared.parts)}. Use names=")
    if declared.stages:
        return [path for path, _ in declared.stages]
    every = find_units(dry_run, declared.trunk or "")
    tokens = sum("(" in x.layout for x in every)  # The shape of tokens is ambiguous.
    # The output of global pooling is not a stage.
    units = [x for x in every if "(" not in x.layout and (declared.trunk or product(x.size) > 1)]
    ends = last_of_each_size(units)
    areas, remedy = [product(x.size) for x in ends], "Use names="
    if not units or len(units) < tokens:
        why, ends = "most of its modules return tokens or no feature map", last_of_each_size(every)
    elif areas != sorted(areas, reverse=True):
        why = "its feature maps get larger again"
        ends = last_of_each_size(x for x in find_units(dry_run, "", 1) if "(" not in x.layout)
    elif not declared.trunk and product(every[-1].size) == 1 and max(ends[-1].size) <= 2:
        why = "on such a small image, a 1×1 stage cannot be distinguished from pooling"
        remedy = "Pass a larger example_input= or use names="
    else:
        return [stage_path(dry_run, x, units) for x in ends]
    choice = shorten([f"{x.target!r} ({'×'.join(map(str, x.size))})" for x in ends], limit=12)
    what = f"{type(dry_run.model).__name__} declares no stages, and {why}"
    raise SiteError(f"stages: {what}. {remedy}, for example {choice or 'a name from model.named_modules()'}")


def last_of_each_size(units: Iterable[FeatureMap]) -> list[FeatureMap]:
    """Return the last feature map of each sequence of feature maps of the same size."""
    return [list(group)[-1] for _, group in groupby(units, key=lambda x: x.size)]


def stage_path(dry_run: DryRun, end: FeatureMap, units: Iterable[FeatureMap]) -> str:
    """Return the path of the stage that ends with a feature map.

    The stage is the outermost module whose last submodule returns the feature map, and in which all units have feature
    maps of this size.
    """
    others = [other.target for other in units if other.size != end.size]
    around = [name for name in ancestor_paths(end.target) if not any(x.startswith(f"{name}.") for x in others)]
    return next(name for name in (*around, end.target) if end_of_sequential(dry_run.model, name) == end.target)


def find_units(dry_run: DryRun, path: str, sizes: int = 2) -> list[FeatureMap]:
    """Return the feature maps of the units of a network, in the order of their calls.

    A unit is the outermost module that runs as a whole, such as a residual block, and whose feature maps have at most
    ``sizes`` sizes: two for a block that reduces its input. A module with more sizes contains several units.
    """
    units = []
    for name, module in dry_run.model.get_submodule(path).named_children():
        child = f"{path}.{name}" if path else name
        inner = (x for other in dry_run.calls if other.startswith(f"{child}.") for x in dry_run.maps(other))
        is_container = isinstance(module, CONTAINERS) or child not in dry_run.calls
        if is_container or len({x.size for x in inner if product(x.size) > 1}) > sizes:
            units += find_units(dry_run, child, sizes)
        elif len(maps := dry_run.maps(child)) == 1:
            units += maps
    order = list(dry_run.calls)
    return sorted(units, key=lambda x: order.index(x.target))

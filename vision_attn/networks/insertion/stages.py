"""Stages: the last modules that give maps of one size, from the image to the head, and down and up again."""

from __future__ import annotations

import math
from itertools import groupby, pairwise
from typing import Any

from torch import nn

from vision_attn.checks import product
from vision_attn.networks.insertion.backbone import (
    declared_stages,
    end_of_sequential,
    example_of,
    modules_around,
    plain_network,
)
from vision_attn.networks.insertion.dry_run import DryRun
from vision_attn.networks.insertion.maps import Map

#: Activations that follow hidden layers, and no output.
HIDDEN = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish)


def stage_names(model: nn.Module, example_input: Any = None) -> list[str]:
    """The paths of a model's stages, from the image to the head.

    They are those of timm's ``feature_info`` where these modules give maps of the channels that it names. Otherwise
    they are the last module to give a map of each size, outside of blocks that change it, on the way down and, in a
    decoder or a generator, on the way up again; and where dilated convolutions take the place of a stride, the last
    before them. Heads are none: what ends in the convolution that the output is made by.

    Args:
        model: the network.
        example_input: for a dry run, as in :func:`vision_attn.insert_`.

    Raises:
        SiteError: the model does not run on the example.

    >>> from torchvision.models import resnet18
    >>> stage_names(resnet18(), (1, 3, 64, 64))
    ['relu', 'layer1', 'layer2', 'layer3', 'layer4']
    """
    model = plain_network(model)
    return stages_of(DryRun(model, example_of(model, example_input)))


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
    """The stages among what modules give, once what only has the shape of a map is left out."""
    others: set[tuple[int, ...]] = set()
    while True:
        given = [one for one in maps_given(run) if one.form.shape not in others]
        stages = [end for part in parts(run, given) for row in rows(run, part) for end in ends(run, row, given)]
        found = [run.the_map(end_of_sequential(run.model, stage)) for stage in stages]
        misplaced = run.misplaced(found)
        if not misplaced:
            return stages
        others |= {one.form.shape for one in found if one.target in misplaced}


def maps_given(run: DryRun) -> list[Map]:
    """The maps of modules that give one, in order, without those inside of a block of another size, and of heads.

    One cell is a pooled vector, of the head or of squeeze and excitation.
    """
    end = first_of_heads(run)
    ordered = sorted((calls[0].order, name) for name, calls in run.calls.items() if calls[0].order < end)
    given = [maps[0] for _, name in ordered if len(maps := run.maps(name)) == 1]
    return [
        one
        for one in given
        if cells(one) > 1 and not any(hides(run, around, one) for around in modules_around(one.target))
    ]


def cells(one: Map) -> int:
    return product(one.shape[2:])


def hides(run: DryRun, name: str, one: Map) -> bool:
    """Whether a module, which is more than a row of others, is a block that a map in it is inside of.

    That is one that makes a map of about half or twice the size of maps of that size, or that goes to another size
    and back, as an attention whose keys are pooled. A whole network, which takes images, is none.
    """
    given, taken = run.maps(name), run.maps(name, "before")
    if len(given) != 1 or len(taken) != 1 or type(run.model.get_submodule(name)).forward is nn.Sequential.forward:
        return False
    here, before, after = one.shape[-1], taken[0].shape[-1], given[0].shape[-1]
    if here == before and 1 < before / after < 3:
        return True
    inside = here != before if before == after else here == before and 1 < after / before < 3
    return inside and not takes_images(run, name)


def takes_images(run: DryRun, name: str) -> bool:
    """Whether a module takes as many channels as the images have, perhaps scaled."""
    dims, channels = len(run.example.shape), run.example.shape[1]
    return any(len(form.shape) == dims and form.shape[1] == channels for form in run.calls[name][0].taken.values())


def is_trunk(run: DryRun, name: str) -> bool:
    """Whether a module has three sizes of map at least, and takes images, as an encoder, or goes up, as a decoder."""
    inside = [one for path in run.calls if path.startswith(f"{name}.") for one in run.maps(path)[:1]]
    sides = [one.shape[-1] for one in inside if cells(one) > 1]
    return len(set(sides)) > 2 and (takes_images(run, name) or sides[0] < max(sides))


def first_of_heads(run: DryRun) -> float:
    """How many calls had ended before the first of a head: what ends in the convolution that the output is made by."""
    first = math.inf
    is_map = any(len(shape) > 2 for shape in run.given)
    for order, name in sorted(((calls[-1].order, name) for name, calls in run.calls.items()), reverse=True):
        module = run.model.get_submodule(name)
        if order >= first or any(True for _ in module.children()):
            continue
        if any(True for _ in module.parameters()):
            start = start_of_head(run, name, module)
            if start is None:
                break
            first = start
        elif is_map and isinstance(module, HIDDEN):
            break
    return first


def start_of_head(run: DryRun, name: str, module: nn.Module) -> int | None:
    """How many calls had ended before the largest head that ends in a module; None if it ends none.

    It ends none if it gives as many channels as it takes, or a block around it does, or if there is no map before it.
    """
    if not isinstance(module, nn.modules.conv._ConvNd) and not (isinstance(module, nn.Linear) and run.maps(name)):
        return None
    if module.weight.shape[0] == module.weight.shape[1]:
        return None
    around = [path for path in [*modules_around(name), name] if len(run.calls.get(path, [])) == 1]
    for path in around:
        taken, given = run.tensors(path, "before").get(0), run.tensors(path, "after").get(None)
        if taken is not None and given is not None and taken.shape == given.shape and not takes_images(run, path):
            return None
    for path in around:
        if path == name or not is_trunk(run, path):
            start = min(calls[0].order for other, calls in run.calls.items() if f"{other}.".startswith(f"{path}."))
            if any(calls[-1].order < start and run.maps(other) for other, calls in run.calls.items()):
                return start
    return None


def parts(run: DryRun, given: list[Map]) -> list[list[Map]]:
    """The maps of a network part by part: of an encoder, and of a pyramid or a decoder of its own that follows it.

    What is in none belongs to the part before it.
    """
    trunks = [name for name, calls in run.calls.items() if len(calls) == 1 and is_trunk(run, name)]
    trunks = [name for name in trunks if not any(other.startswith(f"{name}.") for other in trunks)]
    found: dict[str, list[Map]] = {}
    last = trunks[0] if trunks else ""
    for one in given:
        last = next((name for name in trunks if f"{one.target}.".startswith(f"{name}.")), last)
        found.setdefault(last, []).append(one)
    return list(found.values())


def rows(run: DryRun, part: list[Map]) -> list[list[Map]]:
    """The maps of each size, from one stage each, on the way down and up again.

    Where a network goes up and down several times, what a larger map follows belongs to the inside of its stage; and so
    does everywhere what was only pooled.
    """

    def by_size(part: list[Map]) -> list[list[Map]]:
        return [list(row) for _, row in groupby(part, key=lambda one: one.shape[2:])]

    for row, after in pairwise(by_size(part)):
        learned = any(True for one in row for _ in run.model.get_submodule(one.target).parameters())
        if cells(row[0]) < cells(after[0]) and not learned:
            part = [one for one in part if one not in row]
    found = by_size(part)
    sizes = [cells(row[0]) for row in found]
    lowest = sizes.index(min(sizes)) if sizes else 0
    if sizes == sorted(sizes[:lowest], reverse=True) + sorted(sizes[lowest:]):
        return found
    last = {one.shape[2:]: index for index, one in enumerate(part)}
    kept: list[list[Map]] = []
    for row in by_size(sorted(part, key=lambda one: last[one.shape[2:]])):
        kept = [other for other in kept if cells(other[0]) > cells(row[0])] + [row]
    return kept


def ends(run: DryRun, row: list[Map], given: list[Map]) -> list[str]:
    """The last module of a row, and before it those after which wider dilated convolutions stand for a stride."""
    own = {one.target for one in row}
    containers = {name for one in given if one.target not in own for name in modules_around(one.target)}
    outer = [
        one for one in row if not (own - containers) & set(modules_around(one.target)) and one.target not in containers
    ]
    found = [
        one.target
        for one, after in pairwise(outer)
        if dilation(run, one) < dilation(run, after) and one.shape[1] != after.shape[1]
    ]
    plain = [one for one in row if not isinstance(one.element, str)]  # not a whole network's dictionary of features
    return [*found, (plain or row)[-1].target]


def dilation(run: DryRun, one: Map) -> int:
    """The widest of the convolutions in a module."""
    modules = run.model.get_submodule(one.target).modules()
    return max((max(module.dilation) for module in modules if isinstance(module, nn.modules.conv._ConvNd)), default=1)

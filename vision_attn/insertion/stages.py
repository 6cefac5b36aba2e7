"""The stages of a backbone: as it declares them, or as a dry run shows them."""

from __future__ import annotations

from torch import Tensor, nn

from vision_attn.insertion.dry_run import DryRun, modules_around
from vision_attn.insertion.running import example_images, plain_network
from vision_attn.insertion.sites import declared_stages, last_of_sequential

__all__ = ["stage_names", "stages_of"]


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
    if name not in dict(run.model.named_modules(remove_duplicate=False)) or not name:
        return False
    maps = run.maps(last_of_sequential(run.model, name))
    return any(layout.map_shape(tensor.shape)[1] == channels for tensor, layout in maps.values())


def stages_seen(run: DryRun) -> list[str]:
    """The last module to give a map of each size, once what only has the shape of a map is left out."""
    others: set[tuple[int, ...]] = set()
    while True:
        stages = last_of_each_size(run, others)
        found = {host: run.the_map(host) for host in (last_of_sequential(run.model, stage) for stage in stages)}
        wrong = {found[host][1].shape for host in run.misplaced(found)}
        if not wrong:
            return stages
        others |= wrong


def last_of_each_size(run: DryRun, others: set[tuple[int, ...]]) -> list[str]:
    """For each size of map the last module to give it outside of the next reduction, while maps become smaller."""
    last: dict[tuple[int, int], tuple[int, str]] = {}
    for name, calls in run.calls.items():
        maps = run.maps(name)
        if len(maps) != 1:
            continue
        ((tensor, layout),) = maps.values()
        height, width = layout.map_shape(tensor.shape)[2:]
        if height * width == 1 or tensor.shape in others:
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
    given = [layout.map_shape(tensor.shape)[2] for tensor, layout in run.maps(name).values()]
    taken = [layout.map_shape(tensor.shape)[2] for tensor, layout in run.maps(name, "before").values()]
    return len(given) == len(taken) == 1 and taken[0] == height and 1 < taken[0] / given[0] < 3

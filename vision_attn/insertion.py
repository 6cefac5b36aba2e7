"""Into a backbone and out again: blocks at sites of a model that is there already, behind a gate that begins at zero.

A block becomes a child of the module at its site, under the name :data:`CHILD`, and a forward hook applies it to what
that module returns. No module of the model is renamed or wrapped, so its checkpoints fit before and after.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vision_attn.blocks import AttentionBlock2d, use_impl

__all__ = ["CHILD", "InsertedBlock", "InsertionReport", "SiteError", "insert_", "inserted", "inserted_keys", "remove_"]

#: The name under which a block becomes a child of the module at its site, and so the part of its keys that tells it.
CHILD = "inserted"


class SiteError(ValueError):
    """A site does not exist or cannot take a block; the model is as it was."""


@dataclass(frozen=True)
class InsertedBlock:
    """One block in a backbone: where it is and what it costs for one image."""

    #: path of the module whose output the block works on
    site: str
    #: what the block is
    block: str
    channels: int
    #: rows and columns of the map
    height: int
    width: int
    parameters: int
    #: multiply-adds of one forward of one image
    multiply_adds: int

    @property
    def tokens(self) -> int:
        """Positions of the map, each a token."""
        return self.height * self.width


@dataclass(frozen=True)
class InsertionReport:
    """What was inserted or removed; prints as a table."""

    blocks: tuple[InsertedBlock, ...]
    input_shape: tuple[int, ...]
    verb: str = "inserted"

    def __len__(self) -> int:
        return len(self.blocks)

    def __str__(self) -> str:
        header = ("where", "block", "channels", "map", "tokens", "parameters", "multiply-adds")
        rows = [
            (
                block.site,
                block.block,
                f"{block.channels}",
                f"{block.height}×{block.width}",
                f"{block.tokens}",
                f"{block.parameters:,}",
                f"{block.multiply_adds:,}",
            )
            for block in self.blocks
        ]
        total = ("together", "", "", "", "", f"{self.parameters:,}", f"{self.multiply_adds:,}")
        table = [header, *rows, *([total] if len(rows) > 1 else [])]
        widths = [max(len(row[column]) for row in table) for column in range(len(header))]
        lines = [
            "  ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in table
        ]
        size = "×".join(map(str, self.input_shape[1:]))
        noun = "block" if len(self) == 1 else "blocks"
        return "\n".join([f"{len(self)} {noun} {self.verb}, for an input of {size}", *lines, *self.warnings])

    @property
    def parameters(self) -> int:
        """Parameters of all blocks together."""
        return sum(block.parameters for block in self.blocks)

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of all blocks together, in one forward of one image."""
        return sum(block.multiply_adds for block in self.blocks)

    @property
    def warnings(self) -> tuple[str, ...]:
        """A line for each map that is too small to attend on."""
        return tuple(
            f"warning: the map at {block.site!r} is {block.height}×{block.width}: attention has next to nothing to mix "
            "there; choose an earlier site or a larger input"
            for block in self.blocks
            if block.height <= 2 and block.width <= 2
        )


def insert_(
    model: nn.Module,
    block: Callable[..., nn.Module] | None = None,
    *,
    stages: int | str | Iterable[int | str] | None = None,
    names: str | Iterable[str] | None = None,
    where: Callable[[str, nn.Module], bool] | None = None,
    example_input: Tensor | tuple[int, ...] | None = None,
    **block_options: object,
) -> InsertionReport:
    """Insert a block after chosen modules of a model, in place.

    The output of the module at a site becomes ``block(output)``. With the default block and its gate at zero the
    network computes what it did before, bit for bit; its own keys and checkpoints stay valid; :func:`remove_` takes
    the blocks out. A site that is a ``Sequential`` means the end of it.

    Args:
        model: any network whose maps are ``(b, c, h, w)``.
        block: class or function called as ``block(channels, device=…, dtype=…, **block_options)``;
            :class:`vision_attn.AttentionBlock2d` when None.
        stages: stages by index or name, as in timm's ``feature_info``; negative indices count from the end.
        names: globs on module paths, case-sensitive: ``"layer3.*"`` is every child of ``layer3``, ``"**.conv2"`` every
            ``conv2`` at any depth.
        where: a function of path and module that is true at a site.
        example_input: an image batch or its shape, for the dry run that finds the maps; by default one image of the
            size that timm's ``pretrained_cfg`` names, else (1, 3, 224, 224).
        **block_options: handed to ``block``.

    Returns:
        A report that prints as a table.

    Raises:
        SiteError: nothing matches, or a module that matches cannot take a block; the message says which and why, and
            the model is as it was.
        ValueError: not exactly one of ``stages``, ``names`` and ``where``, or options that the block refuses.

    >>> from torchvision.models import resnet18
    >>> report = insert_(resnet18(), stages=-1, num_heads=4)
    >>> report.blocks[0].site, report.blocks[0].tokens
    ('layer4.1', 49)
    """
    sites = select_sites(model, stages=stages, names=names, where=where)
    example = example_images(model, example_input)
    maps = trace_maps(model, sites, example)

    reference = next((p for p in model.parameters() if p.is_floating_point()), None)
    make = AttentionBlock2d if block is None else block
    attached: dict[str, nn.Module] = {}
    try:
        for site in sites:
            shape = maps[site]
            host = model.get_submodule(site)
            new = make(
                shape[1],
                device=None if reference is None else reference.device,
                dtype=None if reference is None else reference.dtype,
                **block_options,
            )
            new.train(host.training)
            host.add_module(CHILD, new)
            host.register_forward_hook(run_inserted)
            attached[site] = new
        verify_reached(model, attached, example)
    except BaseException:
        for site in attached:
            detach(model.get_submodule(site))
        raise

    report = InsertionReport(
        blocks=tuple(describe(site, new, maps[site]) for site, new in attached.items()),
        input_shape=tuple(example.shape),
    )
    for line in report.warnings:
        warnings.warn(line.removeprefix("warning: "), stacklevel=2)
    return report


def remove_(model: nn.Module, *, example_input: Tensor | tuple[int, ...] | None = None) -> InsertionReport:
    """Take every inserted block out again; what is left is the model as it was, object for object.

    Args:
        model: a model that :func:`insert_` worked on.
        example_input: as in :func:`insert_`, for the figures in the report.

    Returns:
        A report of what was removed.

    Raises:
        ValueError: nothing is inserted in the model.

    >>> from torchvision.models import resnet18
    >>> model = resnet18()
    >>> keys = list(model.state_dict())
    >>> report = insert_(model, stages=[-2, -1])
    >>> len(remove_(model)), list(model.state_dict()) == keys
    (2, True)
    """
    blocks = inserted(model)
    if not blocks:
        raise ValueError("model has no inserted block to remove")
    example = example_images(model, example_input)
    maps = trace_maps(model, list(blocks), example)
    report = InsertionReport(
        blocks=tuple(describe(site, block, maps[site]) for site, block in blocks.items()),
        input_shape=tuple(example.shape),
        verb="removed",
    )
    for site in blocks:
        detach(model.get_submodule(site))
    return report


def inserted(model: nn.Module) -> dict[str, nn.Module]:
    """The inserted blocks of a model by site.

    >>> inserted(nn.Sequential(nn.ReLU()))
    {}
    """
    return {
        name: getattr(module, CHILD)
        for name, module in model.named_modules()
        if run_inserted in module._forward_hooks.values()
    }


def inserted_keys(model: nn.Module) -> set[str]:
    """The keys of a model's state dict that belong to inserted blocks: new by design for any other checkpoint."""
    return {
        ".".join(filter(None, (site, CHILD, key)))
        for site, block in inserted(model).items()
        for key in block.state_dict()
    }


def run_inserted(module: nn.Module, args: tuple[object, ...], output: Tensor) -> Tensor:
    """The forward hook. It looks its block up by name, so that copies and pickles of a model run their own."""
    return getattr(module, CHILD)(output)  # type: ignore[no-any-return]


def detach(host: nn.Module) -> None:
    for key, hook in list(host._forward_hooks.items()):
        if hook is run_inserted:
            del host._forward_hooks[key]
    delattr(host, CHILD)


# --- sites ------------------------------------------------------------------------------------------------------------


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


# --- the dry run ------------------------------------------------------------------------------------------------------


def example_images(model: nn.Module, example_input: Tensor | tuple[int, ...] | None) -> Tensor:
    if isinstance(example_input, Tensor):
        return example_input
    if example_input is None:
        config = getattr(model, "pretrained_cfg", None) or {}
        example_input = (1, *config.get("input_size", (3, 224, 224)))
    if len(example_input) != 4:
        raise ValueError(
            f"example_input must be an image batch or its shape (batch, channels, height, width); got {example_input}"
        )
    reference = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    return torch.zeros(example_input, device=reference.device, dtype=reference.dtype)


def trace_maps(model: nn.Module, sites: list[str], example: Tensor) -> dict[str, tuple[int, ...]]:
    """The shape of the map at each site, by one forward of the model."""
    outputs: dict[str, list[object]] = {site: [] for site in sites}
    handles = [
        model.get_submodule(site).register_forward_hook(
            lambda module, args, output, site=site: outputs[site].append(output)  # type: ignore[misc]
        )
        for site in sites
    ]
    try:
        with quiet_eval(model):
            model(example)
    finally:
        for handle in handles:
            handle.remove()
    return {site: check_map(site, found, example) for site, found in outputs.items()}


def check_map(site: str, outputs: list[object], example: Tensor) -> tuple[int, ...]:
    if not outputs:
        raise SiteError(f"{site!r} is not called in the forward pass of the model: choose a module that is")
    if len(outputs) > 1:
        raise SiteError(
            f"{site!r} is called {len(outputs)} times in one forward pass, so one block cannot follow it: "
            "choose the module around it"
        )
    output = outputs[0]
    if not isinstance(output, Tensor):
        raise SiteError(f"{site!r} returns a {type(output).__name__}, not one map: choose a module inside it")
    if output.dim() != 4:
        raise SiteError(
            f"{site!r} returns a tensor of shape {tuple(output.shape)}, not maps (batch, channels, height, width): "
            "choose an earlier module"
        )
    # A map keeps the aspect of the image, give or take a cell of rounding on either side. What does not has its channels
    # elsewhere, as in networks that work on (batch, height, width, channels).
    height, width = output.shape[2:]
    rows, columns = example.shape[2:]
    if abs(height * columns - width * rows) > rows + columns:
        raise SiteError(
            f"{site!r} returns {tuple(output.shape)} for an image of {rows}×{columns}: that is not "
            "(batch, channels, height, width), the only layout that blocks are inserted in"
        )
    return tuple(output.shape)


def verify_reached(model: nn.Module, blocks: dict[str, nn.Module], example: Tensor) -> None:
    """Run the model once more: a block that is not run exactly once is at a site that cannot take it."""
    calls = dict.fromkeys(blocks, 0)

    def count(site: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[object, ...]) -> None:
            calls[site] += 1

        return hook

    handles = [block.register_forward_pre_hook(count(site)) for site, block in blocks.items()]
    try:
        with quiet_eval(model):
            model(example)
    except Exception as error:
        raise SiteError(
            f"the model no longer runs with blocks at {', '.join(map(repr, blocks))} ({type(error).__name__}: {error}): "
            "a module there does not take a child; choose the modules inside or around it"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    for site, times in calls.items():
        if times != 1:
            raise SiteError(f"the block at {site!r} would run {times} times in a forward pass: choose another module")


@contextmanager
def quiet_eval(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every module is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def describe(site: str, block: nn.Module, shape: tuple[int, ...]) -> InsertedBlock:
    _, channels, height, width = shape
    # Counted on the form whose every product is a matrix product that the counter knows.
    meta = copy.deepcopy(block).to("meta").eval()
    with FlopCounterMode(display=False) as counter, use_impl(meta, "bmm"), torch.no_grad():
        parameter = next(meta.parameters(), torch.empty(0))
        meta(torch.empty(1, channels, height, width, device="meta", dtype=parameter.dtype))
    return InsertedBlock(
        site=site,
        block=type(block).__name__,
        channels=channels,
        height=height,
        width=width,
        parameters=sum(p.numel() for p in block.parameters()),
        multiply_adds=counter.get_total_flops() // 2,
    )

"""Blocks into a backbone that is there already, by :func:`insert_` and :func:`replace_`, and out again.

A block that is inserted begins as the identity and renames no module of the model, so that checkpoints of the model fit
before and after; one that replaces a module changes what the network computes. Nothing is changed before all that can
fail has gone well.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from vision_attn.attention.blocks import AttentionBlock1d, AttentionBlock2d, AttentionBlock3d, StridedAttention2d
from vision_attn.errors import SiteError
from vision_attn.networks.insertion.attach import (
    RECORD,
    attach,
    detach,
    forget_compiled_graphs,
    inserted,
    records,
    replacement_options,
    with_holders,
)
from vision_attn.networks.insertion.backbone import all_or_nothing, changeable, example_of, run_quietly, shown
from vision_attn.networks.insertion.dry_run import DryRun
from vision_attn.networks.insertion.maps import Map
from vision_attn.networks.insertion.report import InsertionReport, describe
from vision_attn.networks.insertion.sites import Names, select_sites, targets_of

#: The default block, by how many axes a map has.
ATTENTION_BLOCKS: dict[int, Callable[..., nn.Module]] = {1: AttentionBlock1d, 2: AttentionBlock2d, 3: AttentionBlock3d}


@all_or_nothing
def insert_(
    model: nn.Module,
    block: Callable[..., nn.Module] | None = None,
    *,
    stages: int | str | Iterable[int | str] | None = None,
    names: Names | Iterable[Names] | None = None,
    where: Callable[[str, nn.Module], bool] | None = None,
    at: str = "after",
    example_input: Any = None,
    **block_options: Any,
) -> InsertionReport:
    """Insert a block at chosen modules of a model, in place.

    The output of the module at a site becomes ``block(output)``. The default block begins as the identity: the
    network computes what it did before, bit for bit; its own keys and checkpoints stay valid; :func:`remove_` takes
    the blocks out. A site that is a ``Sequential`` means the end of it.

    Args:
        model: any network on images, sound or video. Its maps may be ``(b, c, h, w)``, ``(b, h, w, c)``, or the tokens
            ``(b, t, c)`` of a grid, with class and register tokens before them, which are left alone; alone or in a
            tuple, list or dictionary. With one or three axes they are ``(b, c, w)`` or ``(b, c, t, h, w)``, or the
            same with channels last.
        block: class or function called as ``block(channels, device=…, dtype=…, **block_options)``. When None,
            :class:`vision_attn.AttentionBlock2d`, or for maps with one and three axes :class:`AttentionBlock1d` and
            :class:`AttentionBlock3d`. It takes and returns ``(b, c, h, w)`` whatever the layout.
        stages: stages by index or name, as :func:`vision_attn.stage_names` lists them; negative indices count from the
            end.
        names: globs on module paths, case-sensitive: ``"layer3.*"`` is every child of ``layer3``, ``"**.conv2"`` every
            ``conv2`` at any depth; or compiled regular expressions that match whole paths.
        where: a function of path and module that is true at a site.
        at: ``"after"`` a site, ``"before"`` it, or in the ``"branch"`` of a residual block, before its addition.
        example_input: what the model's forward takes, for the dry run that finds the maps: a batch of images or its
            shape, a list of images ``(c, h, w)``, a tuple of arguments, or a dictionary of keyword arguments, in which
            the tensors with the most axes are the images. By default one image of the size that timm's
            ``pretrained_cfg`` names, else (1, 3, 224, 224); for a network that begins with Conv3d (1, 3, 16, 112, 112).
        **block_options: handed to ``block``. Without ``num_heads`` a block has 8 heads or, where 8 do not divide the
            channels, the largest number below that does; the report says which.

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
    check_maker(block)
    model = changeable(model)
    run = DryRun(model, example_of(model, example_input))
    targets = targets_of(run, select_sites(run, stages=stages, names=names, where=where), at)
    side = "before" if at == "before" else "after"
    maps = with_holders(model, run.the_maps(targets, side), run.example)
    return put_in(model, [new_block(run, block, one, side, block_options) for one in maps], "inserted")


@all_or_nothing
def replace_(
    model: nn.Module,
    block: Callable[..., nn.Module] | None = None,
    *,
    stages: int | str | Iterable[int | str] | None = None,
    names: Names | Iterable[Names] | None = None,
    where: Callable[[str, nn.Module], bool] | None = None,
    example_input: Any = None,
    **block_options: Any,
) -> InsertionReport:
    """Put attention in the place of chosen modules of a model, in place.

    A ``Conv2d`` becomes a :class:`vision_attn.StridedAttention2d` from its input channels to its output channels, with
    its groups in the projections (``groups=1`` for dense ones) and an average pool for its stride, as in BoTNet; its
    kernel and dilation have no counterpart, since every position sees every other. Any other module that returns a map
    of the shape it takes, such as squeeze and excitation, becomes a :class:`vision_attn.AttentionBlock2d`. What is new
    is untrained, and unlike :func:`insert_` this changes what the network computes. :func:`remove_` puts the old
    modules back.

    Args:
        model: any network on images whose maps are ``(b, c, h, w)``.
        block: class or function in the place of these two, called as ``block(channels, device=…, dtype=…,
            **block_options)``, and with ``stride=…, out_channels=…`` in the place of a convolution.
        stages: as in :func:`insert_`.
        names: as in :func:`insert_`: ``"layer4.*.conv2"`` are the 3×3 convolutions of a ResNet-50's last stage.
        where: as in :func:`insert_`.
        example_input: as in :func:`insert_`.
        **block_options: handed to the block.

    Returns:
        A report that prints as a table; parameters and multiply-adds are those of what is new.

    Raises:
        SiteError: nothing matches, or a module that matches cannot be replaced; the message says which and why, and the
            model is as it was.
        ValueError: not exactly one of ``stages``, ``names`` and ``where``, or options that the block refuses.

    Source: Srinivas et al., *Bottleneck Transformers for Visual Recognition*, 2021, https://arxiv.org/abs/2101.11605

    >>> from torchvision.models import resnet50
    >>> report = replace_(resnet50(), names="layer4.*.conv2", num_heads=4)
    >>> [(block.site, block.height) for block in report.blocks]
    [('layer4.0.conv2', 14), ('layer4.1.conv2', 7), ('layer4.2.conv2', 7)]
    """
    check_maker(block)
    model = changeable(model)
    run = DryRun(model, example_of(model, example_input))
    sites = select_sites(run, stages=stages, names=names, where=where)
    blocks: list[nn.Module] = []
    for site in sites:
        old = model.get_submodule(site)
        check_replaceable(site, old, sites)
        taken, given = maps_around(run, site)
        make, own, options = block, {}, block_options
        if isinstance(old, nn.Conv2d):
            own = replacement_options(old)
            if block is None:
                make = StridedAttention2d
                options = {"groups": old.groups, **options} if old.groups > 1 else options
        elif taken.shape != given.shape:
            raise SiteError(
                f"{site!r} is a {type(old).__name__} that makes {given.shape} of {taken.shape}: replace_ takes Conv2d, "
                "and modules that return a map of the shape they take"
            )
        blocks.append(new_block(run, make, taken, "instead", options, given, own))
    report = put_in(model, blocks, "put in place")
    called: set[str] = set()
    run_quietly(model, run.example, {site: lambda *_, site=site: called.add(site) for site in sites})
    if idle := [site for site in sites if site not in called]:
        raise SiteError(
            f"{', '.join(map(repr, idle))} would be replaced and never called: the network keeps its modules in a "
            "list of its own beside its children. Choose others, or put them into an nn.ModuleList"
        )
    return report


@all_or_nothing
def remove_(model: nn.Module) -> InsertionReport:
    """Take out every block that was inserted, and put back what was replaced: the model as it was, object for object.

    Args:
        model: a model that :func:`insert_` or :func:`replace_` worked on.

    Returns:
        A report of what was removed.

    Raises:
        ValueError: nothing is inserted in the model.

    >>> from torchvision.models import resnet18
    >>> from vision_attn.networks.insertion import insert_
    >>> model = resnet18()
    >>> keys = list(model.state_dict())
    >>> report = insert_(model, stages=[-2, -1])
    >>> len(remove_(model)), list(model.state_dict()) == keys
    (2, True)
    """
    model = changeable(model)
    blocks = inserted(model)
    if not blocks:
        raise ValueError("model has no inserted block to remove")
    report = InsertionReport(records(model), verb="removed")
    for site, block in blocks.items():
        detach(model, site, block)
        del vars(block)[RECORD]
    forget_compiled_graphs()
    return report


def check_maker(block: object) -> None:
    """Refuse what makes no blocks."""
    other = isinstance(block, type) and not issubclass(block, nn.Module)
    if block is not None and (isinstance(block, nn.Module) or not callable(block) or other):
        raise ValueError(f"block must be a class or a function that makes a block, or None; got {shown(block)}")


def new_block(
    run: DryRun,
    block: Callable[..., nn.Module] | None,
    one: Map,
    at: str,
    asked: Mapping[str, Any],
    given: Map | None = None,
    own: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A block for a map with its record; refused where it is no new one, or does not fit."""
    make = ATTENTION_BLOCKS[len(one.shape) - 2] if block is None else block
    fitted = {} if "num_heads" in asked or {"key_dim", "value_dim"} <= asked.keys() else heads(make, one)
    options = {**fitted, **asked}
    new: object = make(one.shape[1], device=one.form.device, dtype=one.form.dtype, **{**(own or {}), **options})
    if not isinstance(new, nn.Module):
        raise ValueError(f"block must make a module for each site; it made a {type(new).__name__}")
    if RECORD in vars(new):
        raise ValueError(f"block must make a new module for each site; it made the same {type(new).__name__} again")
    new.train(run.model.get_submodule(one.target).training)
    record = describe(new, one, at, options, run.example.shape, given)
    vars(new)[RECORD] = replace(record, fitted_heads=bool(fitted))
    return new


def heads(make: Callable[..., nn.Module], one: Map) -> dict[str, int]:
    """The heads of a block that is asked for none, where as many as it has by itself do not divide the channels."""
    usual = getattr(inspect.signature(make).parameters.get("num_heads"), "default", None)
    if not isinstance(usual, int) or one.shape[1] % usual == 0:
        return {}
    return {"num_heads": fitting_heads(one.shape[1], usual)}


def fitting_heads(channels: int, most: int = 8) -> int:
    """The largest number of heads up to some that divides the channels.

    >>> fitting_heads(64), fitting_heads(20), fitting_heads(185), fitting_heads(64, 5)
    (8, 5, 5, 4)
    """
    return next(count for count in range(min(most, channels), 0, -1) if channels % count == 0)


def check_replaceable(site: str, old: nn.Module, sites: Iterable[str]) -> None:
    """Refuse what holds a block, has other sites inside of it, or is a convolution that strides unevenly."""
    if any(RECORD in vars(module) for module in old.modules()):
        raise SiteError(f"{site!r} holds an inserted block or is one: take it out with remove_ first")
    inner = next((other for other in sites if other.startswith(f"{site}.")), None)
    if inner is not None:
        raise SiteError(f"{inner!r} lies inside of {site!r}: replace one of the two")
    if isinstance(old, nn.Conv2d) and len(set(old.stride)) > 1:
        raise SiteError(f"{site!r} has the stride {old.stride}: replace_ takes convolutions with one for both axes")


def maps_around(run: DryRun, site: str) -> tuple[Map, Map]:
    """The one map that a module takes, and the one that it makes of it."""
    taken, given = run.the_map(site, "before"), run.the_map(site, "after")
    if taken.element != 0 or given.element is not None or not taken.layout.is_first or not given.layout.is_first:
        raise SiteError(
            f"{site!r} does not make one map (batch, channels, height, width) of another, its only argument: "
            "choose a module that does"
        )
    return taken, given


def put_in(model: nn.Module, blocks: Sequence[nn.Module], verb: str) -> InsertionReport:
    """Put new blocks in; the report's warnings come before anything is changed, as they may have been made errors."""
    report = InsertionReport(tuple(vars(block)[RECORD] for block in blocks), verb)
    for line in report.warnings:
        warnings.warn(line.removeprefix("warning: "), stacklevel=4)
    for block in blocks:
        attach(model, block)
    forget_compiled_graphs()
    return report

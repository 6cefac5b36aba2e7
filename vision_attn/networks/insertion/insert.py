"""Insert blocks into an existing network, replace its modules by attention, and restore it.

The sites are found from the metadata of the network and one dry run. The blocks are then attached and the network runs
once more. If its output is not bitwise identical, the blocks are detached again.
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from vision_attn.attention.blocks import StridedAttention2d
from vision_attn.attention.blocks.gated_residual import is_residual
from vision_attn.errors import SiteError
from vision_attn.networks.block_factories import BlockFactory, describe_error
from vision_attn.networks.insertion import registry
from vision_attn.networks.insertion.attributes import RANDOM, get_record, is_inserted
from vision_attn.networks.insertion.build import new_block
from vision_attn.networks.insertion.exact import GATE, UNCHANGED, WRAPPED, ZEROS
from vision_attn.networks.insertion.record import InsertionReport
from vision_attn.networks.insertion.sites import find_stages, find_targets, select_sites
from vision_attn.networks.insertion.verify import ChangedOutputError, ChildError, attach_verified
from vision_attn.networks.inspection.costs import Cost
from vision_attn.networks.inspection.dry_run import DryRun
from vision_attn.networks.inspection.feature_maps import FeatureMap
from vision_attn.networks.inspection.selection import Globs, Where, end_of_sequential, match_names
from vision_attn.networks.inspection.wrappers import layer_wrappers, require_modifiable
from vision_attn.text import shorten


@torch.inference_mode(False)  # Tensors created in inference mode cannot be trained.
def insert_(
    model: nn.Module,
    block: BlockFactory | str | None = None,
    *,
    stages: int | str | Iterable[int | str] | None = None,
    names: Globs = None,
    where: Where = None,
    exclude: Globs = None,
    at: str = "after",
    layout: str | None = None,
    example_input: Any = None,
    context: str | None = None,
    exact: bool = True,
    dry_run: bool = False,
    **block_options: Any,
) -> InsertionReport:
    """Insert a block at selected modules of a model, in place.

    The output of the module at a site becomes ``block(output)``. The block is an identity at initialization: the output
    of the network stays bitwise identical, its state-dict keys and checkpoints stay valid, and :func:`remove_` removes
    the blocks again. At a ``Sequential``, the block runs after its last module.

    Each block is first run on random feature maps. If its last layers can be zero, such as layers in front of a sigmoid
    or at the end of a residual branch, they are set to zero, and each factor of sigmoid(0) = 0.5 is compensated by a
    factor of 2. Any other block, and any block that still changes the output of the network, becomes
    ``x + gate · (block(x) − x)`` with a gate that is initialized to zero. The report lists these blocks. An explicit
    ``gate_init`` takes precedence.

    Args:
        model: network for images, audio or video. Its feature maps are ``(b, c, h, w)``, ``(b, h, w, c)``, or tokens
            ``(b, t, c)`` on a grid, optionally after class and register tokens, which the block does not change.
            Feature maps with one or three axes are ``(b, c, w)`` or ``(b, c, t, h, w)``, also with channels last. The
            module may return a feature map inside a tuple, list or dictionary.
        block: class or function that is called as ``block(channels, **block_options)``, with ``device`` and ``dtype``
            if it has these arguments; the name of a block of this library, or of timm's ``create_attn``, such as
            ``"cbam"``. The default is :class:`vision_attn.AttentionBlock2d`, or :class:`AttentionBlock1d` and
            :class:`AttentionBlock3d` for feature maps with one and three axes. For every layout, the block receives and
            returns ``(b, c, h, w)``.
        stages: stages by index or name, as listed by :func:`vision_attn.stage_names`; negative indices count from the
            last stage that has an effect on the output.
        names: globs on module paths, case-sensitive: ``"layer3.*"`` matches every child of ``layer3``, and
            ``"**.conv2"`` every ``conv2`` at any depth. Compiled regular expressions must match complete paths.
        where: function of path and module that returns True at a site.
        exclude: sites to leave out, in the same form as ``names``.
        at: position of the block: ``"after"`` or ``"before"`` the site. To insert into a residual branch, select its
            last module: ``names="layer4.*.bn2"``.
        layout: layout of the feature maps, if it cannot be inferred from shapes: ``"b c h w"``, ``"b h w c"``,
            ``"b (h w) c"``, or ``"b (1 + h w) c"`` after one class token.
        example_input: input of the model's forward for the dry run: a batch of images or its shape, a list of images
            ``(c, h, w)``, a tuple of arguments, or a dictionary of keyword arguments. The tensors with the most axes
            are the images. The default is one image of the model's default size, or else (1, 3, 224, 224); for a
            network whose first convolution is a Conv3d, it is (1, 3, 16, 112, 112).
        context: path of a module that runs before the blocks, or a glob that matches one. Its output is the second
            feature map of each block, from which keys and values are computed. For a feature map from outside the
            network, pass the option ``context_channels`` instead, and run the model in :func:`vision_attn.context`.
        exact: if False, insert the block unchanged; the report then contains the change of the output.
        dry_run: do not change the model, and return a report with the memory of each block for training. If no sites
            are given, the report is about every stage.
        **block_options: options of ``block``; explicit options are never overridden. The default number of heads is 8
            or, if 8 does not divide the number of channels, the largest smaller number that does. The default block
            attends in at most 512 channels: on wider feature maps, ``key_dim`` and ``value_dim`` are 512 divided by the
            number of heads, rounded down to a multiple of 8. ``key_dim=None, value_dim=None`` uses all channels. The
            record of the block contains the values.

    Returns:
        A report that prints as a table.

    Raises:
        SiteError: no module matches, a matching module cannot take a block, or the block returns NaN or infinity. The
            message names the module and the reason, and the model is unchanged.
        ValueError: not exactly one of ``stages``, ``names`` and ``where`` is given, except for a report about every
            stage, or an option of the block is invalid.
        TypeError: ``block`` is not a class, function or name, or an option of the block is unknown.

    >>> from torchvision.models import resnet18
    >>> report = insert_(resnet18(), stages=-1, num_heads=4)
    >>> report.blocks[0].site, report.blocks[0].tokens
    ('layer4.1', 49)
    """
    model = require_modifiable(model, "va.insert_")
    run = DryRun(model, example_input, layout)
    overview = dry_run and stages is None and names is None and where is None
    sites = find_stages(run) if overview else select_sites(run, stages, names, where, exclude, block_options, at)
    maps = run.select_maps(find_targets(run, sites, at), at)
    second_map = None if context is None else select_context(run, context, maps)
    create = partial(new_block, run, block, at=at, options=block_options, context=second_map, dry_run=dry_run)
    method, inside = ZEROS if exact else UNCHANGED, False
    blocks = [create(x, method=method) for x in maps]
    if dry_run:
        return InsertionReport(tuple(map(get_record, blocks)), "dry run", run.cost)
    warn_about(blocks, run.declared.pads_images)
    while True:
        may_change = method in (GATE, UNCHANGED) or all(map(is_residual, blocks))
        try:
            changed, verified = attach_verified(run, blocks, may_change)
        except ChildError:
            if inside:
                raise
            method, inside = ZEROS if exact else UNCHANGED, True
        except ChangedOutputError:
            # Zero layers may give an identity on random feature maps only; a zero gate always does.
            method = WRAPPED if method == ZEROS else GATE
        else:
            records = tuple(map(get_record, blocks))
            return InsertionReport(records, model_cost=run.cost, output_change=changed, verified=verified)
        blocks = [create(x, method=method, inside=inside) for x in maps]


@torch.inference_mode(False)
def replace_(
    model: nn.Module,
    block: BlockFactory | str | None = None,
    *,
    stages: int | str | Iterable[int | str] | None = None,
    names: Globs = None,
    where: Where = None,
    exclude: Globs = None,
    example_input: Any = None,
    dry_run: bool = False,
    **block_options: Any,
) -> InsertionReport:
    """Replace selected modules of a model by attention, in place.

    A ``Conv2d`` is replaced by a :class:`StridedAttention2d` with the same input and output channels. As in
    BoTNet, average pooling replaces the stride. The projections have the groups of the convolution; pass ``groups=1``
    for dense projections. Kernel size and dilation have no counterpart, because every position attends to every other
    position. The attention uses all channels.

    Any other module whose output has the shape of its input, such as squeeze and excitation, is replaced by a
    :class:`vision_attn.AttentionBlock2d`, the default block of :func:`insert_`. The new modules are untrained, so the
    output of the network changes. :func:`remove_` restores the original modules.

    Args:
        model: network for images whose feature maps are ``(b, c, h, w)``.
        block: class or function to use instead of these blocks, called as ``block(channels, device=…, dtype=…,
            **block_options)``, and with ``stride=…, out_channels=…`` in place of a convolution.
        stages: as in :func:`insert_`.
        names: as in :func:`insert_`; ``"layer4.*.conv2"`` selects the 3×3 convolutions in the last stage of a
            ResNet-50.
        where: as in :func:`insert_`.
        exclude: as in :func:`insert_`.
        example_input: as in :func:`insert_`.
        dry_run: do not change the model, and return a report with the memory of each block for training.
        **block_options: options of the block.

    Returns:
        A report that prints as a table, with the parameters and MACs of the new modules.

    Raises:
        SiteError: no module matches, or a matching module cannot be replaced. The message names the module and the
            reason, and the model is unchanged.
        ValueError: not exactly one of ``stages``, ``names`` and ``where`` is given, or an option of the block is
            invalid.

    Source: Srinivas et al., *Bottleneck Transformers for Visual Recognition*, 2021, https://arxiv.org/abs/2101.11605

    >>> from torchvision.models import resnet50
    >>> report = replace_(resnet50(), names="layer4.*.conv2", num_heads=4)
    >>> [(block.site, block.size) for block in report.blocks]
    [('layer4.0.conv2', '14×14'), ('layer4.1.conv2', '7×7'), ('layer4.2.conv2', '7×7')]
    """
    model = require_modifiable(model, "va.replace_")
    run = DryRun(model, example_input)
    sites = select_sites(run, stages, names, where, exclude, block_options, "replace")
    inputs, outputs = run.select_maps(sites, "before"), run.select_maps(sites, "after")
    blocks: list[nn.Module] = []
    wrapped = {module for pair in layer_wrappers(model).items() for module in pair}
    for site, x, y in zip(sites, inputs, outputs, strict=True):
        old = model.get_submodule(site)
        if old in wrapped:
            what = f"{site!r} cannot be replaced: torch.compile or activation checkpointing wraps this layer"
            raise SiteError(f"{what}. Call va.replace_ before wrapping it")
        plain = x.element == 0 and y.element is None and x.layout.startswith("b c") and y.layout.startswith("b c")
        if not plain or not (isinstance(old, nn.Conv2d) or x.shape == y.shape):
            got = f"{type(old).__name__} returns {y.layout!r} of shape {y.shape} for {x.layout!r} of shape {x.shape}"
            remedy = "Choose a Conv2d, or a module with one input and output 'b c h w' of the same shape"
            raise SiteError(f"{site!r} cannot be replaced: {got}. {remedy}")
        if block is None and (count := len(run.calls[site][0]["before"])) > 1:
            what = f"{site!r} cannot be replaced: it receives {count} tensors, and the block only a feature map"
            raise SiteError(f"{what}. Pass a block that accepts them, or choose another module")
        if any(other.startswith(f"{site}.") for other in sites) or any(map(is_inserted, old.modules())):
            what = f"{site!r} cannot be replaced: it is or contains an inserted block or another selected module"
            raise SiteError(f"{what}. Choose one of the modules, or call va.remove_(model) first")
        make, options = block, block_options
        if isinstance(old, nn.Conv2d) and block is None:
            make = StridedAttention2d
            options = {"groups": old.groups, **options} if old.groups > 1 else options
        blocks.append(new_block(run, make, x, "replace", options, y, dry_run=dry_run))
    if dry_run:
        return InsertionReport(tuple(map(get_record, blocks)), "dry run", run.cost)
    warn_about(blocks, run.declared.pads_images)
    called = list[nn.Module]()
    hooks = [(site, lambda module, *_: called.append(module)) for site in sites]
    with registry.attach_blocks_(model, blocks):
        try:
            _, cost = run.measure(hooks)
        except SiteError as error:
            what = f"{shorten(map(repr, sites))} cannot be replaced: the network does not run with the new modules"
            remedy = "Pass a block with the arguments of the old ones, or choose other modules"
            raise SiteError(f"{what} ({describe_error(error.__cause__ or error)}). {remedy}") from error
        for site, new in zip(sites, blocks, strict=True):
            if called.count(new) != len(run.calls[site]):
                what = f"{site!r} cannot be replaced: the network calls this module through another reference to it"
                raise SiteError(f"{what}, such as a list, and would still run the old module. Choose another module")
    report = InsertionReport(tuple(map(get_record, blocks)), "inserted by replacement", run.cost)
    removed = (new + before - after for new, before, after in zip(report.added, run.cost, cost, strict=True))
    return replace(report, replaced_cost=Cost(*removed))


def remove_(model: nn.Module) -> InsertionReport:
    """Remove every inserted block and restore every replaced module.

    The model then consists of the same module objects as before.

    Args:
        model: a model with blocks from :func:`insert_` or :func:`replace_`.

    Returns:
        A report of the removed blocks.

    Raises:
        ValueError: the model has no inserted block.
        SiteError: the model is wrapped, for example by ``DistributedDataParallel``, or a TorchScript program.

    >>> from torchvision.models import resnet18
    >>> from vision_attn.networks.insertion import insert_
    >>> model = resnet18()
    >>> keys = list(model.state_dict())
    >>> report = insert_(model, stages=[-2, -1])
    >>> len(remove_(model).blocks), list(model.state_dict()) == keys
    (2, True)
    """
    model = require_modifiable(model, "va.remove_")
    blocks, records = registry.all_blocks(model), tuple(registry.iter_records(model))
    if not blocks:
        raise ValueError("model has no inserted block to remove")
    if random := {site: old for site, old in registry.replaced_modules(model).items() if hasattr(old, RANDOM)}:
        what = f"va.save_model did not save {shorten(map(repr, random))}, so va.remove_ restores random weights"
        warnings.warn(f"{what}. Load the original checkpoint with va.load_checkpoint_", stacklevel=2)
    for old in random.values():
        delattr(old, RANDOM)
    registry.detach_(model, blocks)
    return InsertionReport(records, verb="removed")


def select_context(run: DryRun, context: str, maps: Iterable[FeatureMap]) -> FeatureMap:
    """Return the feature map of the module that gives the second feature map of blocks; it must run before them."""
    matches = match_names(dict(run.model.named_modules()), context, "context")
    if len(matches) > 1:
        what = f"context: {context!r} matches {len(matches)} modules: {shorten(matches)}"
        raise SiteError(f"{what}. Pass the path of one")
    (second_map,) = run.select_maps([end_of_sequential(run.model, matches[0])], "after")
    order = list(run.calls)
    for x in maps:
        equal = len(run.calls[x.target]) == len(run.calls[second_map.target])
        if not equal or order.index(second_map.target) >= order.index(x.target):
            what = f"context: {second_map.target!r} does not run before {x.target!r} and equally often"
            raise SiteError(f"{what}. Choose another module")
    return second_map


def warn_about(blocks: Sequence[nn.Module], pads_images: bool) -> None:
    """Issue the warnings about new blocks before the model changes: a filter may turn warnings into errors."""
    padding = "the model pads images of different sizes, and blocks attend to the padding"
    padding = f"{padding}. Mask it with va.padded(model, …)" * pads_images
    for line in filter(None, (*InsertionReport(tuple(map(get_record, blocks))).warnings, padding)):
        warnings.warn(line, stacklevel=4)  # The decorator of insert_ adds a frame.

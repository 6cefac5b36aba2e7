"""Insert blocks into an existing network, replace its modules by attention, and restore it.

The order: metadata of the network, one dry run, sites, blocks. The blocks are attached, the network runs once more, and
they are detached again if its output is not bitwise identical.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vision_attn.attention.blocks import StridedAttention2d
from vision_attn.attention.blocks.gated_residual import GatedResidual
from vision_attn.errors import SiteError
from vision_attn.networks.insertion import attach, makers
from vision_attn.networks.insertion.backbone import changeable
from vision_attn.networks.insertion.costs import Cost, measure_cost, pairs_compared
from vision_attn.networks.insertion.dry_run import DryRun
from vision_attn.networks.insertion.exact import init_identity_
from vision_attn.networks.insertion.hooks import RECORD
from vision_attn.networks.insertion.layout import FeatureMap
from vision_attn.networks.insertion.makers import Maker
from vision_attn.networks.insertion.record import CHILD, InsertedBlock, InsertionReport
from vision_attn.networks.insertion.sites import Names, find_targets, select_sites
from vision_attn.networks.insertion.verify import attach_verified


@torch.inference_mode(False)  # whose tensors could not be trained
def insert_(
    model: nn.Module,
    block: Maker | str | None = None,
    *,
    stages: int | str | Iterable[int | str] | None = None,
    names: Names | Iterable[Names] | None = None,
    where: Callable[[str, nn.Module], bool] | None = None,
    exclude: Names | Iterable[Names] | None = None,
    at: str = "after",
    layout: str | None = None,
    example_input: Any = None,
    exact: bool = True,
    **block_options: Any,
) -> InsertionReport:
    """Insert a block at chosen modules of a model, in place.

    The output of the module at a site becomes ``block(output)``. A block is an identity at initialization, or is made
    one: the output of the network stays bitwise identical, its own keys and checkpoints stay valid, and :func:`remove_`
    takes the blocks out. At a ``Sequential``, the block runs after its last module.

    Each block is tried on random feature maps. If its last layers can be zeros, as in front of a sigmoid or at the end
    of a residual branch, they are set to zero, and the factor of one half from each sigmoid is undone. Any other block,
    and one that changes the output of the network nevertheless, becomes ``x + gate · (block(x) − x)`` with a gate of
    zeros. The report lists which. An explicit ``gate_init`` takes precedence.

    Args:
        model: any network on images, sound or video. Its feature maps may be ``(b, c, h, w)``, ``(b, h, w, c)``, or
            the tokens ``(b, t, c)`` of a grid, after class and register tokens, which are left alone; alone or in a
            tuple, list or dictionary. With one or three axes they are ``(b, c, w)`` or ``(b, c, t, h, w)``, or the
            same with channels last.
        block: class or function called as ``block(channels, **block_options)``, with ``device`` and ``dtype`` where it
            has such arguments; or a name of timm's ``create_attn``, such as ``"cbam"``. When None,
            :class:`vision_attn.AttentionBlock2d`, or for feature maps with one and three axes
            :class:`AttentionBlock1d` and :class:`AttentionBlock3d`. It takes and returns ``(b, c, h, w)`` whatever the
            layout.
        stages: stages by index or name, as :func:`vision_attn.stage_names` lists them; negative indices count from the
            end.
        names: globs on module paths, case-sensitive: ``"layer3.*"`` is every child of ``layer3``, ``"**.conv2"`` every
            ``conv2`` at any depth; or compiled regular expressions that match complete paths.
        where: a function of path and module that returns True at a site.
        exclude: globs or expressions like ``names``, for sites that are left out.
        at: ``"after"`` a site, ``"before"`` it, or in the ``"branch"`` of a residual block, before its addition.
        layout: layout of the feature maps in their tensors, where shapes are ambiguous: ``"b c h w"``, ``"b h w c"``,
            ``"b (h w) c"``, or ``"b (1 + h w) c"`` after one class token.
        example_input: input of the model's forward for the dry run that finds the feature maps: a batch of images or
            its shape, a list of images ``(c, h, w)``, a tuple of arguments, or a dictionary of keyword arguments, in
            which the tensors with the most axes are the images. By default one image of the model's own size, else
            (1, 3, 224, 224); for a network whose first convolution is a Conv3d (1, 3, 16, 112, 112).
        exact: False to leave a block as it is; the report then has the change of the output.
        **block_options: passed to ``block``; explicit options are never changed. Without ``num_heads`` a block has 8
            heads or, where 8 do not divide the channels, the largest number below that does. The default block attends
            in 512 channels at most: where there are more, ``key_dim`` and ``value_dim`` are 512 channels divided by the
            heads. ``key_dim=None, value_dim=None`` uses all channels. The record of the block has the numbers.

    Returns:
        A report that prints as a table.

    Raises:
        SiteError: nothing matches, a module that matches cannot take a block, or the block returns NaN there; the
            message names the module and the reason, and the model is as it was.
        ValueError: not exactly one of ``stages``, ``names`` and ``where``, or options that the block refuses.

    >>> from torchvision.models import resnet18
    >>> report = insert_(resnet18(), stages=-1, num_heads=4)
    >>> report.blocks[0].site, report.blocks[0].tokens
    ('layer4.1', 49)
    """
    if stages is None and names is None and where is None:
        makers.refuse_misspelled(block_options)
    model = changeable(model)
    dry_run = DryRun(model, example_input, layout)
    sites = select_sites(dry_run, stages, names, where, exclude)
    side = "before" if at == "before" else "after"
    maps = dry_run.select_maps(find_targets(dry_run, sites, at), side)
    # Zeros that are the identity on a random map may not be on the maps of the network: gates always are.
    for zeros in (True, False):
        blocks = [new_block(dry_run, block, x, side, block_options, exact=exact, zeros=zeros) for x in maps]
        report = make_report(blocks, "inserted", dry_run)
        try:
            changed = attach_verified(dry_run, blocks)
        except SiteError:  # a module may depend on how many children it has
            for x, new in zip(maps, blocks, strict=True):
                held = attach.choose_block_path(model, x.target, inside=True)
                vars(new)[RECORD] = replace(vars(new)[RECORD], held=held)
            changed = attach_verified(dry_run, blocks)
        if not zeros or not changed or not exact or all(isinstance(x, GatedResidual) for x in blocks):
            break
        attach.detach_(model, blocks)
    return replace(report, changed=changed)


@torch.inference_mode(False)
def replace_(
    model: nn.Module,
    block: Maker | str | None = None,
    *,
    stages: int | str | Iterable[int | str] | None = None,
    names: Names | Iterable[Names] | None = None,
    where: Callable[[str, nn.Module], bool] | None = None,
    exclude: Names | Iterable[Names] | None = None,
    example_input: Any = None,
    **block_options: Any,
) -> InsertionReport:
    """Replace chosen modules of a model by attention, in place.

    A ``Conv2d`` becomes a :class:`vision_attn.StridedAttention2d` from its input channels to its output channels, with
    its groups in the projections (``groups=1`` for dense ones) and an average pool for its stride, as in BoTNet; its
    kernel and dilation have no counterpart, since every position attends to every other, and it attends in all
    channels. Any other module that returns a feature map of the shape it takes, such as squeeze and excitation, becomes
    the :class:`vision_attn.AttentionBlock2d` that :func:`insert_` inserts. The new modules are untrained, and unlike
    :func:`insert_` this changes the output of the network. :func:`remove_` restores the old modules.

    Args:
        model: any network on images whose feature maps are ``(b, c, h, w)``.
        block: class or function to use instead of these two, called as ``block(channels, device=…, dtype=…,
            **block_options)``, and with ``stride=…, out_channels=…`` in the place of a convolution.
        stages: as in :func:`insert_`.
        names: as in :func:`insert_`: ``"layer4.*.conv2"`` are the 3×3 convolutions of a ResNet-50's last stage.
        where: as in :func:`insert_`.
        exclude: as in :func:`insert_`.
        example_input: as in :func:`insert_`.
        **block_options: passed to the block.

    Returns:
        A report that prints as a table; parameters and multiply-adds are those of the new modules.

    Raises:
        SiteError: nothing matches, or a module that matches cannot be replaced; the message names the module and the
            reason, and the model is as it was.
        ValueError: not exactly one of ``stages``, ``names`` and ``where``, or options that the block refuses.

    Source: Srinivas et al., *Bottleneck Transformers for Visual Recognition*, 2021, https://arxiv.org/abs/2101.11605

    >>> from torchvision.models import resnet50
    >>> report = replace_(resnet50(), names="layer4.*.conv2", num_heads=4)
    >>> [(block.site, block.size) for block in report.blocks]
    [('layer4.0.conv2', '14×14'), ('layer4.1.conv2', '7×7'), ('layer4.2.conv2', '7×7')]
    """
    model = changeable(model)
    dry_run = DryRun(model, example_input)
    sites = select_sites(dry_run, stages, names, where, exclude)
    inputs, outputs = dry_run.select_maps(sites, "before"), dry_run.select_maps(sites, "after")
    blocks: list[nn.Module] = []
    for site, x, y in zip(sites, inputs, outputs, strict=True):
        old = model.get_submodule(site)
        plain = x.element == 0 and y.element is None and x.layout.startswith("b c") and y.layout.startswith("b c")
        if not plain or not (isinstance(old, nn.Conv2d) or x.shape == y.shape):
            what = f"a {type(old).__name__} that returns {y.shape} for {x.shape}"
            raise SiteError(f"{site!r} is {what}: choose a Conv2d, or a module that keeps the shape of its map")
        inner = any(other.startswith(f"{site}.") for other in sites)
        if inner or any(RECORD in vars(module) for module in old.modules()):
            raise SiteError(f"{site!r} is or holds an inserted block or another site: choose one, or remove_ it first")
        make, options = block, block_options
        if isinstance(old, nn.Conv2d) and block is None:
            make = StridedAttention2d
            options = {"groups": old.groups, **options} if old.groups > 1 else options
        blocks.append(new_block(dry_run, make, x, "instead", options, y))
    report = make_report(blocks, "put in place", dry_run)
    with attach.attach_blocks_(model, blocks):
        _, cost = dry_run.measure()
    removed = (new + before - after for new, before, after in zip(report.added, dry_run.cost, cost, strict=True))
    return replace(report, gone=Cost(*removed))


def remove_(model: nn.Module) -> InsertionReport:
    """Remove every inserted block and restore every replaced module: the same model, object for object.

    Args:
        model: a model that :func:`insert_` or :func:`replace_` changed.

    Returns:
        A report of the removed blocks.

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
    blocks = [module for module in model.modules() if RECORD in vars(module)]
    if not blocks:
        raise ValueError("model has no inserted block to remove")
    running = [(site, block) for site, block in attach.blocks_by_site(model).items() if block in blocks]
    report = InsertionReport(tuple(replace(vars(block)[RECORD], site=site) for site, block in running), verb="removed")
    attach.detach_(model, blocks)
    for block in blocks:
        del vars(block)[RECORD]
    return report


def new_block(
    dry_run: DryRun,
    block: Maker | str | None,
    x: FeatureMap,
    at: str,
    options: Mapping[str, Any],
    y: FeatureMap | None = None,
    exact: bool = False,
    zeros: bool = True,
) -> nn.Module:
    """Build a block for a feature map, with its record; one that replaces a module returns another feature map."""
    make, channels = makers.get_maker(block, len(x.size)), x.shape[1]
    options = {**makers.default_widths(make, channels, options), **options}
    is_timm = isinstance(block, str) and block in makers.TIMM_BLOCKS
    if is_timm and "feat_size" in makers.get_arguments(make):
        options = {"feat_size": x.size, **options}
    held, element = (attach.choose_block_path(dry_run.model, x.target), x.element) if y is None else (CHILD, None)
    place = x.target, at, "", options, channels, x.size, 0, 0, dry_run.example.shape
    record = InsertedBlock(*place, layout=x.layout, element=element, held=held, read=x.read)
    new = attach.build_block(dry_run.model, record, make, x.form)
    record = replace(record, block=str(block) if is_timm else type(new).__name__)
    if y is None and not isinstance(new, GatedResidual):
        form = x.form
        if form.device.type == "meta":  # where a block cannot be tried
            form = form._replace(device=torch.device("cpu"))
            new = attach.build_block(dry_run.model, record, make, form)
        record = replace(record, **init_identity_(new, x.target, x.shape, form, exact, zeros))
    new = attach.add_record(new, record, x.form)
    cost, compared = measure_cost(new, x, y or x), pairs_compared(new, x.size)
    vars(new)[RECORD] = replace(record, compared=compared, **cost._asdict())
    return new


def make_report(blocks: Sequence[nn.Module], verb: str, dry_run: DryRun) -> InsertionReport:
    """Report on new blocks, with warnings before anything is changed, as they may be turned into errors."""
    report = InsertionReport(tuple(vars(block)[RECORD] for block in blocks), verb, dry_run.cost)
    for line in report.warnings:
        warnings.warn(line, stacklevel=4)  # insert_ is decorated
    return report

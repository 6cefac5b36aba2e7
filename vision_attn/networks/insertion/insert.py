"""Blocks into a network that is there already, by :func:`insert_` and :func:`replace_`, and out again.

What the network declares, one dry run, sites, blocks; then the blocks are attached, the network runs once more, and if
its output is not the same bits they are detached again. For timm's hooks, :func:`timm_layer` makes blocks.
"""

from __future__ import annotations

import difflib
import inspect
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention.blocks import AttentionBlock2d, StridedAttention2d
from vision_attn.attention.blocks.gated_residual import GatedResidual
from vision_attn.errors import SiteError
from vision_attn.networks.insertion.attach import (
    attached,
    block_of,
    blocks_by_site,
    detach_,
    forget_compiled_graphs,
    hold_inside,
    holder,
    with_record,
)
from vision_attn.networks.insertion.backbone import changeable, example_of, run_quietly
from vision_attn.networks.insertion.costs import Share, cost, count_multiply_adds, pairs_compared
from vision_attn.networks.insertion.declared import DryRun, Map, leaves, same_bits, without_values
from vision_attn.networks.insertion.exact import begin
from vision_attn.networks.insertion.hooks import RECORD
from vision_attn.networks.insertion.makers import (
    ATTENTION_BLOCKS,
    OF_TIMM,
    SITE_ARGUMENTS,
    Maker,
    arguments_of,
    maker_of,
)
from vision_attn.networks.insertion.record import CHILD, InsertedBlock, InsertionReport, fitting_heads
from vision_attn.networks.insertion.sites import Names, select_sites, targets_of

#: Channels that a default block attends in at most: eight heads of 64. BoTNet attends in 512 in the last stage of a
#: ResNet-50, a quarter of its channels, and non-local networks in half of theirs.
WIDEST = 512


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

    The output of the module at a site becomes ``block(output)``. A block begins as the identity, or is made to: the
    network computes what it did before, bit for bit; its own keys and checkpoints stay valid; :func:`remove_` takes
    the blocks out. A site that is a ``Sequential`` means the end of it.

    Each block is tried on a random map. If its last layers can be zeros, as those in front of a sigmoid or at the end
    of a residual branch, they are, and what the sigmoids halve is doubled. Any other is ``x + gate · (block(x) − x)``
    with a gate of zeros. The report says which. What ``gate_init`` is given for begins as that says.

    Args:
        model: any network on images, sound or video. Its maps may be ``(b, c, h, w)``, ``(b, h, w, c)``, or the tokens
            ``(b, t, c)`` of a grid, with class and register tokens before them, which are left alone; alone or in a
            tuple, list or dictionary. With one or three axes they are ``(b, c, w)`` or ``(b, c, t, h, w)``, or the
            same with channels last.
        block: class or function called as ``block(channels, **block_options)``, with ``device`` and ``dtype`` where it
            has such arguments; or a name of timm's ``create_attn``, such as ``"cbam"``. When None,
            :class:`vision_attn.AttentionBlock2d`, or for maps with one and three axes :class:`AttentionBlock1d` and
            :class:`AttentionBlock3d`. It takes and returns ``(b, c, h, w)`` whatever the layout.
        stages: stages by index or name, as :func:`vision_attn.stage_names` lists them; negative indices count from the
            end.
        names: globs on module paths, case-sensitive: ``"layer3.*"`` is every child of ``layer3``, ``"**.conv2"`` every
            ``conv2`` at any depth; or compiled regular expressions that match whole paths.
        where: a function of path and module that is true at a site.
        exclude: globs or expressions like ``names``, for sites that are left out.
        at: ``"after"`` a site, ``"before"`` it, or in the ``"branch"`` of a residual block, before its addition.
        layout: how the maps lie in their tensors, where the shapes do not tell: ``"b c h w"``, ``"b h w c"``,
            ``"b (h w) c"``, or ``"b (1 + h w) c"`` after one class token.
        example_input: what the model's forward takes, for the dry run that finds the maps: a batch of images or its
            shape, a list of images ``(c, h, w)``, a tuple of arguments, or a dictionary of keyword arguments, in which
            the tensors with the most axes are the images. By default one image of the size that the
            model names, else (1, 3, 224, 224); for a network that begins with Conv3d (1, 3, 16, 112, 112).
        exact: False to leave a block as it is; the report then says by how much the output changes.
        **block_options: handed to ``block``; what is asked for is never changed. Without ``num_heads`` a block has 8
            heads or, where 8 do not divide the channels, the largest number below that does. The default block attends
            in 512 channels at most: where there are more, ``key_dim`` and ``value_dim`` are 512 channels divided by the
            heads. ``key_dim=None, value_dim=None`` asks for all channels. The record of the block has the numbers.

    Returns:
        A report that prints as a table.

    Raises:
        SiteError: nothing matches, a module that matches cannot take a block, or the block gives NaN there; the message
            says which and why, and the model is as it was.
        ValueError: not exactly one of ``stages``, ``names`` and ``where``, or options that the block refuses.

    >>> from torchvision.models import resnet18
    >>> report = insert_(resnet18(), stages=-1, num_heads=4)
    >>> report.blocks[0].site, report.blocks[0].tokens
    ('layer4.1', 49)
    """
    if stages is None and names is None and where is None:
        close = (difflib.get_close_matches(name, SITE_ARGUMENTS, n=1) for name in block_options)
        for name, (meant, *_) in ((name, found) for name, found in zip(block_options, close, strict=True) if found):
            raise TypeError(f"insert_() got an unexpected argument {name!r}. Did you mean {meant!r}?")
    model = changeable(model)
    run = DryRun(model, example_of(model, example_input), layout)
    sites = select_sites(run, stages=stages, names=names, where=where, exclude=exclude)
    side = "before" if at == "before" else "after"
    maps = run.the_maps(targets_of(run, sites, at), side)
    blocks = [new_block(run, block, one, side, block_options, exact=exact) for one in maps]
    report = reported(blocks, "inserted", run)
    try:
        changed = attach_checked(run, blocks)
    except SiteError:
        hold_inside(model, blocks)
        changed = attach_checked(run, blocks)
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
    """Put attention in the place of chosen modules of a model, in place.

    A ``Conv2d`` becomes a :class:`vision_attn.StridedAttention2d` from its input channels to its output channels, with
    its groups in the projections (``groups=1`` for dense ones) and an average pool for its stride, as in BoTNet; its
    kernel and dilation have no counterpart, since every position sees every other, and it attends in all channels. Any
    other module that returns a map of the shape it takes, such as squeeze and excitation, becomes the
    :class:`vision_attn.AttentionBlock2d` that :func:`insert_` inserts. What is new is untrained, and unlike
    :func:`insert_` this changes what the network computes. :func:`remove_` puts the old modules back.

    Args:
        model: any network on images whose maps are ``(b, c, h, w)``.
        block: class or function in the place of these two, called as ``block(channels, device=…, dtype=…,
            **block_options)``, and with ``stride=…, out_channels=…`` in the place of a convolution.
        stages: as in :func:`insert_`.
        names: as in :func:`insert_`: ``"layer4.*.conv2"`` are the 3×3 convolutions of a ResNet-50's last stage.
        where: as in :func:`insert_`.
        exclude: as in :func:`insert_`.
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
    >>> [(block.site, block.size) for block in report.blocks]
    [('layer4.0.conv2', '14×14'), ('layer4.1.conv2', '7×7'), ('layer4.2.conv2', '7×7')]
    """
    model = changeable(model)
    run = DryRun(model, example_of(model, example_input))
    sites = select_sites(run, stages=stages, names=names, where=where, exclude=exclude)
    blocks: list[nn.Module] = []
    for site, taken, given in zip(sites, run.the_maps(sites, "before"), run.the_maps(sites, "after"), strict=True):
        old = model.get_submodule(site)
        same = isinstance(old, nn.Conv2d) or taken.shape == given.shape
        plain = all(one.layout.startswith("b c") for one in (taken, given))
        if not (same and plain and taken.element == 0 and given.element is None):
            what = f"a {type(old).__name__} that makes {given.shape} of {taken.shape}"
            raise SiteError(f"{site!r} is {what}: choose a Conv2d, or what returns a map of the shape it takes")
        inner = any(other.startswith(f"{site}.") for other in sites)
        if inner or any(RECORD in vars(module) for module in old.modules()):
            raise SiteError(f"{site!r} is or holds an inserted block or another site: choose one, or remove_ it first")
        make, options = block, block_options
        if isinstance(old, nn.Conv2d) and block is None:
            make = StridedAttention2d
            options = {"groups": old.groups, **block_options} if old.groups > 1 else block_options
        blocks.append(new_block(run, make, taken, "instead", options, given))
    report = reported(blocks, "put in place", run)
    with attached(model, blocks):
        _, now = run.run()
    gone = (new + before - after for new, before, after in zip(report.added, run.whole, now, strict=True))
    return replace(report, gone=Share(*gone))


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
    blocks = [module for module in model.modules() if RECORD in vars(module)]
    if not blocks:
        raise ValueError("model has no inserted block to remove")
    run = {site: block for site, block in blocks_by_site(model).items() if block in blocks}
    report = InsertionReport(tuple(replace(vars(one)[RECORD], site=site) for site, one in run.items()), verb="removed")
    detach_(model, blocks)
    for block in blocks:
        del vars(block)[RECORD]
    forget_compiled_graphs()
    return report


def new_block(
    run: DryRun,
    block: Maker | str | None,
    one: Map,
    at: str,
    asked: Mapping[str, Any],
    given: Map | None = None,
    exact: bool = False,
) -> nn.Module:
    """A block for a map, with its record; in the place of a module it makes another map of it."""
    make = maker_of(block, len(one.size))
    options = {**fitted(make, one.shape[1], asked), **asked}
    if block in OF_TIMM and "feat_size" in arguments_of(make):
        options = {"feat_size": one.size, **options}
    held, element = (holder(run.model, one.target), one.element) if given is None else (CHILD, None)
    place = one.target, at, "", options, one.shape[1], one.size, 0, 0, run.example.shape
    record = InsertedBlock(*place, layout=one.layout, element=element, held=held, read=one.read)
    new = block_of(run.model, record, make, one.form)
    record = replace(record, block=block if isinstance(block, str) and block in OF_TIMM else type(new).__name__)
    if given is None and not isinstance(new, GatedResidual):
        if (form := one.form).device.type == "meta":  # nothing can be tried there
            form = form._replace(device=torch.device("cpu"))
            new = block_of(run.model, record, make, form)
        record = replace(record, **begin(new, one.target, one.shape, form, exact))
    new = with_record(new, record, one.form)
    parameters, multiply_adds = cost(new, one.target, one.shape[1:], (given or one).shape[1:])
    if len(one.calls) > 1:
        multiply_adds = sum(count_multiply_adds(new, shape) for shape in one.shapes)
    compared = pairs_compared(new, one.size)
    vars(new)[RECORD] = replace(record, parameters=parameters, multiply_adds=multiply_adds, compared=compared)
    return new


def fitted(make: Maker, channels: int, asked: Mapping[str, Any]) -> dict[str, int]:
    """The heads and the widths of a block, as far as it is asked for none and would not choose them so by itself.

    A default block attends in 512 channels at most, in heads of a multiple of 8. Heads that share all channels divide
    them.

    >>> fitted(AttentionBlock2d, 2048, {}), fitted(AttentionBlock2d, 2048, {"num_heads": 12, "value_dim": 64})
    ({'key_dim': 64, 'value_dim': 64}, {'key_dim': 40})
    >>> fitted(AttentionBlock2d, 185, {}), fitted(AttentionBlock2d, 2050, {"key_dim": None, "value_dim": None})
    ({'num_heads': 5}, {'num_heads': 5})
    """
    usual = getattr(inspect.signature(make).parameters.get("num_heads"), "default", None)
    count = asked.get("num_heads", usual)
    found: dict[str, int] = {}
    if make in ATTENTION_BLOCKS.values() and channels > WIDEST and isinstance(count, int) and count > 0:
        width = WIDEST // count
        found = {name: max(width // 8 * 8, width % 8, 1) for name in ("key_dim", "value_dim") if name not in asked}
    shared = any({**asked, **found}.get(name) is None for name in ("key_dim", "value_dim"))
    if shared and "num_heads" not in asked and isinstance(usual, int) and channels % usual:
        found["num_heads"] = fitting_heads(channels, usual)
    return found


def reported(blocks: Sequence[nn.Module], verb: str, run: DryRun) -> InsertionReport:
    """The report on new blocks; its warnings come before anything is changed, as they may have been made errors."""
    report = InsertionReport(tuple(vars(block)[RECORD] for block in blocks), verb, run.whole)
    for line in report.warnings:
        warnings.warn(line, stacklevel=4)  # insert_ is decorated
    return report


def attach_checked(run: DryRun, blocks: Sequence[nn.Module]) -> float:
    """Attach blocks if the network's output stays bitwise identical, but for what the blocks themselves change.

    Returns:
        By how much the blocks change the output, as a ratio.
    """
    with attached(run.model, blocks):
        failure = None
        try:
            output = run_with(run, blocks)
            if same_bits(run.output, output):
                return 0.0
        except SiteError as error:
            failure = error
        # Copies of the maps in place of the blocks' outputs separate a block from the network around it.
        copy = run_with(run, blocks, blocks)
        # A network that gives other numbers each time cannot be compared.
        if not same_bits(run.output, copy) and same_bits(copy, run_with(run, blocks, blocks)):
            if not same_bits(run.output, run_with(run, blocks, ())):
                raise takes_no_child(blocks)
            culprits = [one for one in blocks if not same_bits(run.output, run_with(run, blocks, [one]))]
            raise SiteError(
                f"{sites_of(culprits)} cannot take a block: the network changes this tensor in place and reads it "
                "elsewhere too, where it would lack the change. Choose another module, or set inplace=False in it"
            )
        if failure is not None:
            raise failure
        changed = difference(run.output, output) if same_bits(run.output, copy) else 0.0
        if not math.isfinite(changed):
            raise SiteError(f"{vars(blocks[0])[RECORD].block} makes NaN or infinity of the network's output")
        return changed


def sites_of(blocks: Iterable[nn.Module]) -> str:
    return ", ".join(repr(vars(block)[RECORD].site) for block in blocks)


def takes_no_child(blocks: Iterable[nn.Module]) -> SiteError:
    what = "takes no child, since it loops over or counts its own"
    return SiteError(f"{sites_of(blocks)} {what}: choose another module")


def run_with(run: DryRun, blocks: Sequence[nn.Module], copies: Collection[nn.Module] | None = None) -> object:
    """Run the network with its blocks, or without them: some return a copy of their input, the others the input.

    Raises:
        SiteError: the network does not run, or calls a block not as often as the module at its site.
    """
    calls: list[nn.Module] = []

    def forward(block: nn.Module, own: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        calls.append(block)
        if copies is None:
            return own(x)
        return x.clone() if block in copies else x

    try:
        for block in blocks:
            vars(block)["forward"] = partial(forward, block, block.forward)
        output = run_quietly(run.model, run.example)
    except SiteError as error:
        if copies is None:
            raise
        raise takes_no_child(blocks) from error
    finally:
        for block in blocks:
            vars(block).pop("forward", None)
    if wrong := [one for one in blocks if calls.count(one) != len(run.calls[vars(one)[RECORD].site])]:
        raise takes_no_child(wrong)
    return output


def difference(one: object, other: object) -> float:
    """The root mean square by which two outputs differ, as a share of that of the first."""
    apart, whole = 0.0, 0.0
    for x, y in zip(leaves(one), leaves(other), strict=True):
        if not without_values(x):
            y = y if y.shape == x.shape else torch.zeros_like(x)  # as many boxes as are found, for one
            apart += float((y.double() - x.double())[x.isfinite()].square().sum())
            whole += float(x.double()[x.isfinite()].square().sum())
    return math.sqrt(apart / whole) if apart else 0.0


# --- blocks for timm's hooks -----------------------------------------------------------------------------------------

#: What timm tells a layer of the bottleneck of channels in squeeze-and-excitation, which attention does not have.
OF_A_BOTTLENECK = ("act_layer", "rd_channels", "rd_divisor", "rd_ratio")


def block_for_timm(
    block: Maker, options: Mapping[str, Any], channels: int, *, device: Any = None, dtype: Any = None, **words: Any
) -> nn.Module:
    """A block as timm's networks ask for a layer."""
    if channels == 8 and words == {"rd_ratio": 1.0}:
        # So timm's EfficientNets ask whether a layer takes rd_ratio. The answer spares a block of 8 channels, which
        # not every number of heads divides.
        raise TypeError("rd_ratio is for layers with a bottleneck of channels: attention has none")
    known = inspect.signature(block).parameters
    unused = {*OF_A_BOTTLENECK, *({"feat_size"} - known.keys())}  # without tables a block is for maps of any size
    words = {name: value for name, value in words.items() if name not in unused}
    if "stride" not in known and (stride := words.pop("stride", 1)) != 1:
        what = f"block must take stride, as timm_layer(StridedAttention2d, …) does, where timm strides by {stride}"
        raise ValueError(f"{what}; got {block}")
    return block(channels, device=device, dtype=dtype, **options, **words)


def timm_layer(block: Maker | None = None, **options: Any) -> Maker:
    """A block as a layer that timm's networks are made with, where they take a class of their own attention.

    ``timm.create_model("resnet50", block_args=dict(attn_layer=timm_layer(num_heads=4)))`` has the block in every
    residual block, before the addition. The default block begins as the identity: the network then computes what it
    does without such a layer. ``self_attn_layer`` of timm's BoTNets stands in for a convolution, stride and all, and
    takes ``timm_layer(StridedAttention2d)``.

    Such a network has no record of its layers: it is made again by the same call, and each layer has the class's own
    defaults, so that its checkpoints fit. :class:`AttentionBlock2d` attends in all channels then, which in the last
    stages of a ResNet-50 are 1,024 and 2,048: ``timm_layer(key_dim=64, value_dim=64)`` attends in 512 of them, as
    blocks of :func:`insert_` do.

    Args:
        block: class or function called as ``block(channels, device=…, dtype=…, **options)``, with ``stride`` and
            ``feat_size`` too where it has such arguments and timm gives them; :class:`vision_attn.AttentionBlock2d`
            when None.
        **options: handed to ``block``.

    Returns:
        A callable that can be copied and pickled where ``block`` can.

    >>> import torch
    >>> layer = timm_layer(num_heads=4)
    >>> layer(64)(torch.randn(2, 64, 7, 7)).shape
    torch.Size([2, 64, 7, 7])
    """
    return partial(block_for_timm, AttentionBlock2d if block is None else block, options)

"""Blocks into a network that is there already, by :func:`insert_` and :func:`replace_`, and out again.

What the network declares, one dry run, sites, blocks; then the blocks are attached, the network runs once more, and if
its output is not the same bits they are detached again. For timm's hooks, :func:`timm_layer` makes blocks.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from vision_attn.attention.blocks import AttentionBlock1d, AttentionBlock2d, AttentionBlock3d, StridedAttention2d
from vision_attn.errors import SiteError
from vision_attn.networks.insertion.attach import (
    RECORD,
    attached,
    detach_,
    forget_compiled_graphs,
    hold_inside,
    holder,
    inserted,
    records,
    replacement_options,
)
from vision_attn.networks.insertion.backbone import changeable, example_of, run_quietly, shown
from vision_attn.networks.insertion.declared import DryRun, Map, same_bits
from vision_attn.networks.insertion.record import CHILD, InsertedBlock, InsertionReport, cost, fitting_heads
from vision_attn.networks.insertion.sites import Names, select_sites, targets_of

#: What a user can say of how a map lies.
LAYOUT = re.compile(r"b c (t )?(h )?w|b (t )?(h )?w c|b \((\d+ \+ )?h w\) c")

#: What makes a block.
Maker = Callable[..., nn.Module]

#: The default block, by how many axes a map has.
ATTENTION_BLOCKS: dict[int, Maker] = {1: AttentionBlock1d, 2: AttentionBlock2d, 3: AttentionBlock3d}


def insert_(
    model: nn.Module,
    block: Maker | None = None,
    *,
    stages: int | str | Iterable[int | str] | None = None,
    names: Names | Iterable[Names] | None = None,
    where: Callable[[str, nn.Module], bool] | None = None,
    exclude: Names | Iterable[Names] | None = None,
    at: str = "after",
    layout: str | None = None,
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
        exclude: globs or expressions like ``names``, for sites that are left out.
        at: ``"after"`` a site, ``"before"`` it, or in the ``"branch"`` of a residual block, before its addition.
        layout: how the maps lie in their tensors, where the shapes do not tell: ``"b c h w"``, ``"b h w c"``,
            ``"b (h w) c"``, or ``"b (1 + h w) c"`` after one class token.
        example_input: what the model's forward takes, for the dry run that finds the maps: a batch of images or its
            shape, a list of images ``(c, h, w)``, a tuple of arguments, or a dictionary of keyword arguments, in which
            the tensors with the most axes are the images. By default one image of the size that the
            model names, else (1, 3, 224, 224); for a network that begins with Conv3d (1, 3, 16, 112, 112).
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
    if layout is not None and not (isinstance(layout, str) and LAYOUT.fullmatch(layout)):
        raise ValueError(f'layout must be "b c h w", "b h w c", "b (h w) c" or "b (1 + h w) c"; got {layout!r}')
    model = changeable(model)
    run = DryRun(model, example_of(model, example_input), layout)
    sites = select_sites(run, stages=stages, names=names, where=where, exclude=exclude)
    side = "before" if at == "before" else "after"
    maps = run.the_maps(targets_of(run, sites, at), side)
    blocks = [new_block(run, block, one, side, block_options, held=holder(model, one.target)) for one in maps]
    report = reported(blocks, "inserted")
    try:
        attach_unseen(run, blocks)
    except SiteError:
        hold_inside(model, blocks)
        attach_unseen(run, blocks)
    return report


def replace_(
    model: nn.Module,
    block: Maker | None = None,
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
    check_maker(block)
    model = changeable(model)
    run = DryRun(model, example_of(model, example_input))
    sites = select_sites(run, stages=stages, names=names, where=where, exclude=exclude)
    blocks: list[nn.Module] = []
    for site in sites:
        old = model.get_submodule(site)
        check_replaceable(site, old, sites)
        taken, given = maps_around(run, site)
        make, options = block, dict(block_options)
        if isinstance(old, nn.Conv2d) and block is None:
            make = StridedAttention2d
            options = {"groups": old.groups, **options} if old.groups > 1 else options
        elif not isinstance(old, nn.Conv2d) and taken.shape != given.shape:
            raise SiteError(
                f"{site!r} is a {type(old).__name__} that makes {given.shape} of {taken.shape}: replace_ takes Conv2d, "
                "and modules that return a map of the shape they take"
            )
        blocks.append(new_block(run, make, taken, "instead", options, given, replacement_options(old)))
    report = reported(blocks, "put in place")
    with attached(model, blocks):
        called: set[str] = set()
        run_quietly(model, run.example, {site: lambda *_, site=site: called.add(site) for site in sites})
        if idle := [repr(site) for site in sites if site not in called]:
            raise SiteError(
                f"{', '.join(idle)} would be replaced and never called: the network keeps its modules in a list of its "
                "own beside its children. Choose others, or put them into an nn.ModuleList"
            )
    return report


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
        detach_(model, site, block)
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
    block: Maker | None,
    one: Map,
    at: str,
    asked: Mapping[str, Any],
    given: Map | None = None,
    own: Mapping[str, Any] | None = None,
    held: str = CHILD,
) -> nn.Module:
    """A block for a map with its record; refused where it is no new one, or does not fit."""
    make = ATTENTION_BLOCKS[len(one.size)] if block is None else block
    fitted = {} if "num_heads" in asked or {"key_dim", "value_dim"} <= asked.keys() else heads(make, one)
    options = {**fitted, **asked}
    channels = one.shape[1]
    try:
        new: object = make(channels, device=one.form.device, dtype=one.form.dtype, **{**(own or {}), **options})
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"the block at {one.target!r}, for {channels} channels: {error}") from error
    if not isinstance(new, nn.Module) or RECORD in vars(new):
        raise ValueError(f"block must make a new module for each site; it made {shown(new)[:60]}")
    new.train(run.model.get_submodule(one.target).training)
    costs = cost(new, one.target, one.shape[1:], (given or one).shape[1:])
    name, images, element = type(new).__name__, run.example.shape, one.element if given is None else None
    record = InsertedBlock(one.target, at, name, options, channels, one.size, *costs, images, one.layout, element)
    vars(new)[RECORD] = replace(record, held=held, fitted_heads=bool(fitted), read=one.read)
    return new


def heads(make: Maker, one: Map) -> dict[str, int]:
    """The heads of a block that is asked for none, where as many as it has by itself do not divide the channels."""
    usual = getattr(inspect.signature(make).parameters.get("num_heads"), "default", None)
    if not isinstance(usual, int) or one.shape[1] % usual == 0:
        return {}
    return {"num_heads": fitting_heads(one.shape[1], usual)}


def check_replaceable(site: str, old: nn.Module, sites: Iterable[str]) -> None:
    """Refuse what holds a block, has other sites inside of it, or is a convolution that strides unevenly."""
    if any(RECORD in vars(module) for module in old.modules()):
        raise SiteError(f"{site!r} holds an inserted block or is one: take it out with remove_ first")
    if inner := [other for other in sites if other.startswith(f"{site}.")]:
        raise SiteError(f"{inner[0]!r} lies inside of {site!r}: replace one of the two")
    if isinstance(old, nn.Conv2d) and len(set(old.stride)) > 1:
        raise SiteError(f"{site!r} has the stride {old.stride}: replace_ takes convolutions with one for both axes")


def maps_around(run: DryRun, site: str) -> tuple[Map, Map]:
    """The one map that a module takes, and the one that it makes of it."""
    (taken,), (given,) = run.the_maps([site], "before"), run.the_maps([site], "after")
    if taken.element != 0 or given.element is not None or not all(m.layout.startswith("b c") for m in (taken, given)):
        raise SiteError(f"{site!r} does not make one map (b, c, h, w) of another: choose a module that does")
    return taken, given


def reported(blocks: Sequence[nn.Module], verb: str) -> InsertionReport:
    """The report on new blocks; its warnings come before anything is changed, as they may have been made errors."""
    report = InsertionReport(tuple(vars(block)[RECORD] for block in blocks), verb)
    for line in report.warnings:
        warnings.warn(line.removeprefix("warning: "), stacklevel=3)
    return report


def attach_unseen(run: DryRun, blocks: Sequence[nn.Module]) -> None:
    """Attach blocks if the network gives the same bits with each of them standing still, and called once."""
    calls: list[nn.Module] = []

    def stand_still(block: nn.Module, x: Tensor) -> Tensor:
        calls.append(block)
        return x

    with attached(run.model, blocks):
        try:
            for block in blocks:
                vars(block)["forward"] = partial(stand_still, block)
            output = run_quietly(run.model, run.example)
            wrong = [block for block in blocks if calls.count(block) != 1]
            # A network that gives other numbers each time cannot be compared.
            same = same_bits(run.output, output) or not same_bits(output, run_quietly(run.model, run.example))
        except SiteError:
            wrong, same = list(blocks), False
        finally:
            for block in blocks:
                vars(block).pop("forward", None)
        if wrong or not same:
            sites = ", ".join(repr(vars(block)[RECORD].site) for block in wrong or blocks)
            raise SiteError(
                f"{sites} takes no child, since it loops over or counts those it has: choose another module"
            )


# --- blocks for timm's hooks -----------------------------------------------------------------------------------------

#: What timm tells a layer of the bottleneck of channels in squeeze-and-excitation: how narrow it is, its activation.
#: Attention has no such bottleneck: these are for nobody.
OF_A_BOTTLENECK = ("act_layer", "rd_channels", "rd_divisor", "rd_ratio")


@dataclass(frozen=True)
class TimmLayer:
    """What :func:`timm_layer` returns: called as timm calls its layers, it makes the block."""

    #: class or function that makes the block
    block: Maker
    #: further arguments of it
    options: Mapping[str, Any] = field(hash=False)

    def __call__(self, channels: int, *, device: Any = None, dtype: Any = None, **words: Any) -> nn.Module:
        """Make the block."""
        if channels == 8 and words == {"rd_ratio": 1.0}:
            # So timm's EfficientNets ask whether a layer takes rd_ratio. The answer spares a block of 8 channels, which
            # not every number of heads divides.
            raise TypeError("rd_ratio is for layers with a bottleneck of channels: attention has none")
        words = {name: value for name, value in words.items() if name not in OF_A_BOTTLENECK}
        known = inspect.signature(self.block).parameters
        if "feat_size" not in known:
            words.pop("feat_size", None)  # a block without tables is for maps of any size
        if "stride" not in known and (stride := words.pop("stride", 1)) != 1:
            raise ValueError(
                f"stride must be 1 for {name_of(self.block)}, which gives maps of the size it takes; got {stride}: "
                "where timm's layer strides use timm_layer(StridedAttention2d, …)"
            )
        return self.block(channels, device=device, dtype=dtype, **self.options, **words)

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"timm_layer({name_of(self.block)}{options})"


def timm_layer(block: Maker | None = None, **options: Any) -> TimmLayer:
    """A block as a layer that timm's networks are made with, where they take a class of their own attention.

    ``timm.create_model("resnet50", block_args=dict(attn_layer=timm_layer(num_heads=4)))`` has the block in every
    residual block, before the addition. The default block begins as the identity: the network then computes what it
    does without such a layer. ``self_attn_layer`` of timm's BoTNets stands in for a convolution, stride and all, and
    takes ``timm_layer(StridedAttention2d)``.

    Args:
        block: class or function called as ``block(channels, device=…, dtype=…, **options)``, with ``stride`` and
            ``feat_size`` too where it has such arguments and timm gives them; :class:`vision_attn.AttentionBlock2d`
            when None.
        **options: handed to ``block``.

    Returns:
        A callable that prints as code, and can be copied and pickled where ``block`` can.

    Raises:
        ValueError: ``block`` is no class or function.

    >>> import torch
    >>> layer = timm_layer(num_heads=4)
    >>> layer
    timm_layer(AttentionBlock2d, num_heads=4)
    >>> layer(64)(torch.randn(2, 64, 7, 7)).shape
    torch.Size([2, 64, 7, 7])
    """
    check_maker(block)
    return TimmLayer(AttentionBlock2d if block is None else block, options)


def name_of(block: Maker) -> str:
    return getattr(block, "__qualname__", repr(block))

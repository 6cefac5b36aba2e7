"""Attention in the place of modules that a backbone has: of convolutions, or of squeeze and excitation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from vision_attn.blocks import AttentionBlock2d, StridedAttention2d
from vision_attn.errors import SiteError
from vision_attn.insertion.attach import RECORD
from vision_attn.insertion.dry_run import DryRun
from vision_attn.insertion.exchange import put_in_place
from vision_attn.insertion.insert import check_maker, check_new, warn
from vision_attn.insertion.layout import FIRST
from vision_attn.insertion.out import forget_compiled_graphs
from vision_attn.insertion.report import InsertionReport, describe
from vision_attn.insertion.running import changeable, example_images
from vision_attn.insertion.selection import select_sites
from vision_attn.insertion.sites import Names

__all__ = ["replace_"]


def replace_(
    model: nn.Module,
    block: Callable[..., nn.Module] | None = None,
    *,
    stages: int | str | Iterable[int | str] | None = None,
    names: Names | Iterable[Names] | None = None,
    where: Callable[[str, nn.Module], bool] | None = None,
    example_input: Tensor | tuple[int, ...] | None = None,
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
    run = DryRun(model, example_images(model, example_input))
    sites = select_sites(run, stages=stages, names=names, where=where)
    refuse_nested(sites)
    pairs: list[tuple[nn.Module, nn.Module]] = []
    for site in sites:
        old = model.get_submodule(site)
        refuse_inserted(site, old)
        stride = stride_of(site, old)
        channels, shape, expected = shapes_at(run, site)
        tensor = run.calls[site][0].taken[0]
        factory: dict[str, Any] = {"device": tensor.device, "dtype": tensor.dtype}
        if isinstance(old, nn.Conv2d):
            make = StridedAttention2d if block is None else block
            own = {"groups": old.groups} if block is None else {}
            new = make(channels, stride=stride, out_channels=old.out_channels, **factory, **{**own, **block_options})
        elif shape == expected:
            new = (AttentionBlock2d if block is None else block)(channels, **factory, **block_options)
        else:
            raise SiteError(
                f"{site!r} is a {type(old).__name__} that makes {expected} of {shape}: replace_ takes Conv2d, and "
                "modules that return a map of the shape they take"
            )
        check_new(new, (other for _, other in pairs))
        new.train(old.training)
        vars(new)[RECORD] = describe(
            new,
            shape,
            expected,
            site=site,
            at="instead",
            options=block_options,
            input_shape=tuple(run.example.shape),
        )
        pairs.append((old, new))
    report = InsertionReport(tuple(vars(new)[RECORD] for _, new in pairs), verb="put in place")
    warn(report)
    # Only now, when nothing can fail any more, is the model changed.
    for old, new in pairs:
        put_in_place(model, old, new)
    forget_compiled_graphs()
    return report


def refuse_inserted(site: str, old: nn.Module) -> None:
    if any(RECORD in vars(module) for module in old.modules()):
        raise SiteError(f"{site!r} holds an inserted block or is one: take it out with remove_ first")


def refuse_nested(sites: list[str]) -> None:
    for site in sites:
        inner = next((other for other in sites if other.startswith(f"{site}.")), None)
        if inner is not None:
            raise SiteError(f"{inner!r} lies inside of {site!r}: replace one of the two")


def shapes_at(run: DryRun, site: str) -> tuple[int, tuple[int, int, int, int], tuple[int, ...]]:
    """Channels and shape of the one map that a module takes, and the shape of the one that it returns."""
    element, taken, layout = run.the_map(site, "before")
    back, given, after = run.the_map(site, "after")
    if element != 0 or back is not None or (layout, after) != (FIRST, FIRST):
        raise SiteError(
            f"{site!r} does not make one map (batch, channels, height, width) of another, its only argument: "
            "choose a module that does"
        )
    shape = layout.map_shape(taken.shape)
    return shape[1], shape, given.shape


def stride_of(site: str, old: nn.Module) -> int:
    stride = set(old.stride) if isinstance(old, nn.Conv2d) else {1}
    if len(stride) > 1:
        raise SiteError(f"{site!r} has the stride {old.stride}: replace_ takes convolutions with one for both axes")
    return int(stride.pop())

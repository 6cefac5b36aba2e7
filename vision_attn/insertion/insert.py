"""Into a backbone: blocks at sites of a model that is there already, which begin as the identity.

A block becomes a child of the module at its site, under the name :data:`CHILD`, and a hook applies it to what that
module gives or takes. No module of the model is renamed or wrapped, so its checkpoints fit before and after.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from vision_attn.blocks import AttentionBlock2d
from vision_attn.insertion.attach import RECORD, attach, find_holders
from vision_attn.insertion.dry_run import DryRun
from vision_attn.insertion.out import forget_compiled_graphs
from vision_attn.insertion.report import InsertionReport, describe
from vision_attn.insertion.running import changeable, example_images
from vision_attn.insertion.selection import hosts_of, select_sites
from vision_attn.insertion.sites import Names

__all__ = ["check_maker", "check_new", "insert_", "warn"]


def insert_(
    model: nn.Module,
    block: Callable[..., nn.Module] | None = None,
    *,
    stages: int | str | Iterable[int | str] | None = None,
    names: Names | Iterable[Names] | None = None,
    where: Callable[[str, nn.Module], bool] | None = None,
    at: str = "after",
    example_input: Tensor | tuple[int, ...] | None = None,
    **block_options: Any,
) -> InsertionReport:
    """Insert a block at chosen modules of a model, in place.

    The output of the module at a site becomes ``block(output)``. The default block begins as the identity: the
    network computes what it did before, bit for bit; its own keys and checkpoints stay valid; :func:`remove_` takes
    the blocks out. A site that is a ``Sequential`` means the end of it.

    Args:
        model: any network on images. Its maps may be ``(b, c, h, w)``, ``(b, h, w, c)``, or the tokens ``(b, t, c)`` of
            a grid, with class and register tokens before them, which are left alone; alone or in a tuple, list or
            dictionary.
        block: class or function called as ``block(channels, device=…, dtype=…, **block_options)``;
            :class:`vision_attn.AttentionBlock2d` when None. It takes and returns ``(b, c, h, w)`` whatever the layout.
        stages: stages by index or name, as :func:`vision_attn.stage_names` lists them; negative indices count from the
            end.
        names: globs on module paths, case-sensitive: ``"layer3.*"`` is every child of ``layer3``, ``"**.conv2"`` every
            ``conv2`` at any depth; or compiled regular expressions that match whole paths.
        where: a function of path and module that is true at a site.
        at: ``"after"`` a site, ``"before"`` it, or in the ``"branch"`` of a residual block, before its addition.
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
    check_maker(block)
    model = changeable(model)
    run = DryRun(model, example_images(model, example_input))
    hosts = hosts_of(run, select_sites(run, stages=stages, names=names, where=where), at)
    side = "before" if at == "before" else "after"
    maps = run.the_maps(hosts, side)
    holders = find_holders(model, hosts, run.example)

    unread = set() if side == "before" else run.unread(maps)
    make = AttentionBlock2d if block is None else block
    blocks: dict[str, nn.Module] = {}
    for host, (element, tensor, layout) in maps.items():
        shape = layout.map_shape(tensor.shape)
        new = make(shape[1], device=tensor.device, dtype=tensor.dtype, **block_options)
        check_new(new, blocks.values())
        new.train(model.get_submodule(host).training)
        vars(new)[RECORD] = describe(
            new,
            shape,
            site=host,
            at=side,
            options=block_options,
            input_shape=tuple(run.example.shape),
            element=element,
            layout=layout,
            read=host not in unread,
        )
        blocks[host] = new
    report = InsertionReport(tuple(vars(new)[RECORD] for new in blocks.values()))
    warn(report)
    # Only now, when nothing can fail any more, is the model changed.
    for host, new in blocks.items():
        attach(model, host, holders[host], new)
    forget_compiled_graphs()
    return report


def check_maker(block: object) -> None:
    """Refuse what makes no blocks."""
    if block is not None and (isinstance(block, nn.Module) or not callable(block)):
        raise ValueError(f"block must be a class or a function that makes a block, or None; got {block!r}")


def check_new(block: object, others: Iterable[nn.Module]) -> None:
    """Refuse what is no new block."""
    if not isinstance(block, nn.Module):
        raise ValueError(f"block must make a module for each site; it made {block!r}")
    if RECORD in vars(block) or any(block is other for other in others):
        raise ValueError(f"block must make a new module for each site; it made the same {type(block).__name__} again")


def warn(report: InsertionReport) -> None:
    """Give the report's warnings, before anything is changed: a person may have made them errors."""
    for line in report.warnings:
        warnings.warn(line.removeprefix("warning: "), stacklevel=3)

"""Into a backbone and out again: blocks at sites of a model that is there already, behind a gate that begins at zero.

A block becomes a child of the module at its site, under the name :data:`CHILD`, and a forward hook applies it to what
that module returns. No module of the model is renamed or wrapped, so its checkpoints fit before and after.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.blocks import AttentionBlock2d
from vision_attn.insertion.dry_run import example_images, trace_maps, verify_reached
from vision_attn.insertion.report import InsertionReport, describe
from vision_attn.insertion.sites import CHILD, select_sites

__all__ = ["insert_", "inserted", "inserted_keys", "remove_"]

#: The attribute in which an inserted block keeps what it is, for the report of its removal.
RECORD = "insertion"


def insert_(
    model: nn.Module,
    block: Callable[..., nn.Module] | None = None,
    *,
    stages: int | str | Iterable[int | str] | None = None,
    names: str | Iterable[str] | None = None,
    where: Callable[[str, nn.Module], bool] | None = None,
    example_input: Tensor | tuple[int, ...] | None = None,
    **block_options: Any,
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

    make = AttentionBlock2d if block is None else block
    attached: dict[str, nn.Module] = {}
    try:
        for site in sites:
            found = maps[site]
            host = model.get_submodule(site)
            new = make(found.shape[1], device=found.device, dtype=found.dtype, **block_options)
            new.train(host.training)
            host.add_module(CHILD, new)
            host.register_forward_hook(run_inserted)
            attached[site] = new
        verify_reached(model, attached, example)
        for site, new in attached.items():
            vars(new)[RECORD] = describe(site, new, maps[site].shape, tuple(example.shape))
    except BaseException:
        for site in attached:
            detach(model.get_submodule(site))
        raise

    forget_compiled_graphs()
    report = InsertionReport(tuple(vars(new)[RECORD] for new in attached.values()))
    for line in report.warnings:
        warnings.warn(line.removeprefix("warning: "), stacklevel=2)
    return report


def remove_(model: nn.Module) -> InsertionReport:
    """Take every inserted block out again; what is left is the model as it was, object for object.

    Args:
        model: a model that :func:`insert_` worked on.

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
    for site in blocks:
        detach(model.get_submodule(site))
    forget_compiled_graphs()
    return InsertionReport(tuple(vars(block).pop(RECORD) for block in blocks.values()), verb="removed")


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
    return getattr(module, CHILD)(output)


def detach(host: nn.Module) -> None:
    for key, hook in list(host._forward_hooks.items()):
        if hook is run_inserted:
            del host._forward_hooks[key]
    delattr(host, CHILD)


def forget_compiled_graphs() -> None:
    """A model that was compiled runs the graph it had, and does not look whether its hooks are still the same."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()

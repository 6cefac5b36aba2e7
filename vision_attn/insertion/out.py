"""What is inserted in a model, and out again with it."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from torch import nn

from vision_attn.insertion.attach import RECORD, detach, is_host
from vision_attn.insertion.exchange import REPLACED, put_back
from vision_attn.insertion.report import InsertedBlock, InsertionReport
from vision_attn.insertion.running import plain_network
from vision_attn.insertion.sites import CHILD

__all__ = ["forget_compiled_graphs", "inserted", "inserted_keys", "records", "remove_"]


def remove_(model: nn.Module) -> InsertionReport:
    """Take out every block that was inserted, and put back what was replaced: the model as it was, object for object.

    Args:
        model: a model that :func:`insert_` or :func:`replace_` worked on.

    Returns:
        A report of what was removed.

    Raises:
        ValueError: nothing is inserted in the model.

    >>> from torchvision.models import resnet18
    >>> from vision_attn.insertion import insert_
    >>> model = resnet18()
    >>> keys = list(model.state_dict())
    >>> report = insert_(model, stages=[-2, -1])
    >>> len(remove_(model)), list(model.state_dict()) == keys
    (2, True)
    """
    model = plain_network(model)
    blocks = inserted(model)
    if not blocks:
        raise ValueError("model has no inserted block to remove")
    report = InsertionReport(records(model), verb="removed")
    for site, block in blocks.items():
        if REPLACED in vars(block):
            put_back(model, block)
        else:
            detach(model, model.get_submodule(site))
        del vars(block)[RECORD]
    forget_compiled_graphs()
    return report


def inserted(model: nn.Module) -> dict[str, nn.Module]:
    """The inserted blocks of a model by site, those that replaced a module among them.

    >>> inserted(nn.Sequential(nn.ReLU()))
    {}
    """
    model = plain_network(model)
    return {
        name: getattr(module, CHILD) if is_host(module) else module
        for name, module in model.named_modules()
        if is_host(module) or REPLACED in vars(module)
    }


def records(model: nn.Module) -> tuple[InsertedBlock, ...]:
    """Where the inserted blocks of a model are, what they are and what they cost.

    >>> records(nn.Sequential(nn.ReLU()))
    ()
    """
    # A model may have become part of another since: a block is where it is now.
    return tuple(replace(vars(block)[RECORD], site=site) for site, block in inserted(model).items())


def inserted_keys(model: nn.Module) -> set[str]:
    """The keys of a model's state dict that belong to inserted blocks: new by design for any other checkpoint."""
    blocks = {id(block) for block in inserted(model).values()}
    return {
        ".".join(filter(None, (name, key)))
        for name, module in plain_network(model).named_modules()
        if id(module) in blocks
        for key in module.state_dict()
    }


def forget_compiled_graphs() -> None:
    """A model that was compiled runs the graph it had, and does not look whether its hooks are still the same."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()

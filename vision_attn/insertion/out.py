"""What is inserted in a model, and out again with it."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from torch import nn

from vision_attn.errors import SiteError
from vision_attn.insertion.attach import RECORD, block_at, detach, is_host
from vision_attn.insertion.exchange import REPLACED, put_back
from vision_attn.insertion.report import InsertedBlock, InsertionReport
from vision_attn.insertion.running import changeable, plain_network

__all__ = ["forget_compiled_graphs", "inserted", "inserted_keys", "keys_of_blocks", "records", "remove_", "replaced"]


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
    model = changeable(model)
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

    Args:
        model: any network.

    Raises:
        SiteError: a block is there and nothing runs it, since what it was inserted at was converted into another
            module.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU())
    >>> inserted(model)
    {}
    >>> from vision_attn.insertion import insert_
    >>> report = insert_(model, names="0", example_input=(1, 3, 16, 16))
    >>> list(inserted(model))
    ['0']
    """
    model = plain_network(model)
    refuse_orphans(model)
    found = {}
    for name, module in model.named_modules():
        if is_host(module):
            found[name] = block_at(module)
        elif REPLACED in vars(module):
            found[name] = module
    return found


def replaced(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that :func:`replace_` took out of a model, by site, kept for when they come back.

    >>> from vision_attn.insertion import replace_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU())
    >>> report = replace_(model, names="0", num_heads=3, value_dim=4, example_input=(1, 3, 16, 16))
    >>> replaced(model)
    {'0': Conv2d(3, 8, kernel_size=(1, 1), stride=(1, 1))}
    """
    return {site: vars(block)[REPLACED] for site, block in inserted(model).items() if REPLACED in vars(block)}


def refuse_orphans(model: nn.Module) -> None:
    """Say so where a block is there and nothing runs it: a conversion made another module of the one at its site."""
    run = {id(block_at(module)) for module in model.modules() if is_host(module)}
    for name, module in model.named_modules():
        if RECORD in vars(module) and REPLACED not in vars(module) and id(module) not in run:
            raise SiteError(
                f"the block {name!r} is no longer run: what it was inserted at was converted into another module, as "
                "by convert_sync_batchnorm. Convert first, then insert, and load the blocks' weights there"
            )


def records(model: nn.Module) -> tuple[InsertedBlock, ...]:
    """Where the inserted blocks of a model are, what they are and what they cost.

    >>> from vision_attn.insertion import insert_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU())
    >>> report = insert_(model, names="0", example_input=(1, 3, 16, 16))
    >>> [(record.site, record.block, record.tokens) for record in records(model)]
    [('0', 'AttentionBlock2d', 256)]
    """
    # A model may have become part of another since: a block is where it is now.
    return tuple(replace(vars(block)[RECORD], site=site) for site, block in inserted(model).items())


def inserted_keys(model: nn.Module) -> set[str]:
    """The keys of a model's state dict that belong to inserted blocks: new by design for any other checkpoint.

    >>> from vision_attn.insertion import insert_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU())
    >>> report = insert_(model, names="0", example_input=(1, 3, 16, 16))
    >>> sorted(inserted_keys(model))[0]
    '0.inserted.attn.proj.bias'
    """
    return set().union(*keys_of_blocks(model).values())


def keys_of_blocks(model: nn.Module) -> dict[str, set[str]]:
    """The keys of a model's state dict that belong to the block of each site.

    A block that a model has under several names has keys under each.

    >>> from vision_attn.insertion import insert_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU())
    >>> report = insert_(model, names="0", example_input=(1, 3, 16, 16))
    >>> {site: len(keys) for site, keys in keys_of_blocks(model).items()}
    {'0': 7}
    """
    sites = {id(block): site for site, block in inserted(model).items()}
    keys: dict[str, set[str]] = {site: set() for site in sites.values()}
    for name, module in plain_network(model).named_modules(remove_duplicate=False):
        if id(module) in sites:
            keys[sites[id(module)]] |= {".".join(filter(None, (name, key))) for key in module.state_dict()}
    return keys


def forget_compiled_graphs() -> None:
    """A model that was compiled runs the graph it had, and does not look whether its hooks are still the same."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()

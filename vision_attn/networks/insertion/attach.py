"""Blocks in a model: how one is held and run, put in and taken out again, and which there are.

A block becomes a child of its target, or of a module inside or around it, and a hook at the target applies it to the
map that the target returns or takes. No module of the model is renamed or wrapped. A block that replaces a module takes
its place and keeps it. The record of a block says where it goes: :func:`attach_` and :func:`detach_` need nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from vision_attn.errors import SiteError
from vision_attn.networks.insertion import hooks
from vision_attn.networks.insertion.backbone import modules_around, plain_network
from vision_attn.networks.insertion.exact import ExactBlock
from vision_attn.networks.insertion.hooks import HELD, RECORD, REPLACED, is_site
from vision_attn.networks.insertion.makers import hint, make_block, reason
from vision_attn.networks.insertion.record import CHILD, InsertedBlock
from vision_attn.networks.insertion.untrained import warn_if_untrained

#: Modules that hold others and may loop over them.
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def holder(model: nn.Module, target: str, inside: bool = False) -> str:
    """The path from a target to where its block is held.

    That is a child of the target, unless the target is a container, which would run the block as one of its row, or has
    an attribute of that name, or is seen to mind its children (``inside``). Then it is a child of the first module
    inside it that is no container. A norm or convolution may be frozen, fused or converted later: the module around it
    holds its block, and a dot at the beginning of the path stands for each level up.
    """
    module = model.get_submodule(target)
    if hooks.is_fusible(module) and not inside:
        parts = target.split(".")
        for level in range(1, len(parts)):  # not the network itself, whose children other code may run in a row
            child = f"{CHILD}_{'_'.join(parts[-level:])}"
            around = model.get_submodule(".".join(parts[:-level]))
            if not isinstance(around, CONTAINERS) and not hasattr(around, child):
                return "." * level + child
    paths = [] if inside or isinstance(module, CONTAINERS) else [CHILD]
    for name, inner in module.named_modules():
        # What replaced a module goes when that module comes back, and its parts with it.
        temporary = any(REPLACED in vars(module.get_submodule(part)) for part in (*modules_around(name), name))
        if name and not temporary and not isinstance(inner, CONTAINERS):
            paths.append(f"{name}.{CHILD}_{target.replace('.', '_')}")
    for path in paths or [CHILD]:
        owner, _, child = path.rpartition(".")
        if not hasattr(module.get_submodule(owner), child):
            return path
    raise SiteError(f"{target!r} takes no child, since it has attributes called {CHILD!r}: choose another module")


def hold_inside(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Let modules inside their targets hold blocks: the targets mind how many children they have."""
    for block in blocks:
        record: InsertedBlock = vars(block)[RECORD]
        vars(block)[RECORD] = replace(record, held=holder(model, record.site, inside=True))


def path_of_block(record: InsertedBlock) -> tuple[str, str]:
    """Return the path of the module that holds a block, and the name of the block in it."""
    levels = len(record.held) - len(record.held.lstrip("."))
    parts = [*record.site.split("."), *record.held.lstrip(".").split(".")]
    del parts[-1 - levels : -1]
    return ".".join(parts[:-1]), parts[-1]


def attach_(model: nn.Module, block: nn.Module) -> None:
    """Let a block run where its record says; :func:`detach_` undoes it."""
    record: InsertedBlock = vars(block)[RECORD]
    target = model.get_submodule(record.site)
    path, child = path_of_block(record)
    owner = model.get_submodule(path)
    if record.at not in ("after", "before", "instead") or not child.startswith(CHILD):
        raise SiteError(f"{record.site!r}: no block can be {record.at!r} a module as its child {child!r}")
    if is_site(target) or (record.at != "instead" and hasattr(owner, child)):
        raise SiteError(
            f"{record.site!r} already has a block, or is one. To run two blocks in order, insert one class that holds "
            "both, such as a subclass of nn.Sequential; to replace the block, call va.remove_(model) first"
        )
    if record.at == "instead":
        vars(block)[REPLACED] = target
        exchange_(model, target, block)
        return
    owner.add_module(child, block)
    held: str | hooks.Place = f"{path}.{child}" if record.held.startswith(".") else hooks.Place(record.held)
    hooks.hook_(target, block, held if isinstance(held, hooks.Place) else block)
    for around in {"", path if isinstance(held, str) else called_around(model, record.site)}:
        inside = len(around) + bool(around)
        from_there = held[inside:] if isinstance(held, str) else held
        keep = partial(hooks.keep_block, target=record.site[inside:], held=from_there, record=record)
        model.get_submodule(around).register_forward_pre_hook(keep)
    if "(" in record.layout:
        model.register_forward_pre_hook(partial(hooks.check_grid, record=record), with_kwargs=True)


def called_around(model: nn.Module, path: str) -> str:
    """Return the path of the nearest module around a module that is called in a forward pass."""
    names = reversed(modules_around(path))
    return next((x for x in names if type(model.get_submodule(x)).forward is not nn.Module.forward), "")


def attach_records_(
    model: nn.Module, wanted: Iterable[InsertedBlock], makers: Mapping[str, Callable[..., nn.Module]]
) -> tuple[InsertedBlock, ...]:
    """Make blocks anew and put them where records say they were, without running the network.

    Args:
        model: a network like the one that the records are of, with nothing inserted.
        wanted: the records, as :func:`records` gives them.
        makers: what makes a block, called as :func:`insert_` calls it, by the name of its class.

    Returns:
        The records again.

    Raises:
        SiteError: a place does not exist in the model, or is taken; the model is as it was.

    >>> from vision_attn.attention.blocks import AttentionBlock2d
    >>> from vision_attn.networks.insertion import insert_, remove_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1))
    >>> report = insert_(model, names="0", example_input=(1, 3, 16, 16))
    >>> removed = remove_(model)
    >>> attach_records_(model, report.blocks, {"AttentionBlock2d": AttentionBlock2d}) == report.blocks
    True
    """
    # What replaces a module comes first: no block is held by a module that goes.
    wanted = sorted(wanted, key=lambda record: record.at != "instead")
    with attached(model, (block_of(model, record, makers[record.block]) for record in wanted)):
        return tuple(wanted)


@contextmanager
def attached(model: nn.Module, blocks: Iterable[nn.Module]) -> Iterator[None]:
    """Attach blocks, and detach them all where that, or what is done in the ``with`` block, fails."""
    done: list[nn.Module] = []
    try:
        for block in blocks:
            attach_(model, block)
            done.append(block)
            warn_if_untrained(model, block, vars(block)[RECORD].site)
        forget_compiled_graphs()
        yield
    except BaseException:
        detach_(model, done)
        forget_compiled_graphs()
        raise


def block_of(model: nn.Module, record: InsertedBlock, make: Callable[..., nn.Module], like: Any = None) -> nn.Module:
    """A new block with its record, in the mode of the module at its site.

    Its device and type are those of ``like``, or else of that module or its model.
    """
    site, (owner, _) = record.site, path_of_block(record)
    try:
        target, _ = model.get_submodule(site), model.get_submodule(owner)
    except AttributeError as error:
        raise SiteError(f"{site!r}: the model has no place for a block there ({error})") from error
    if like is None:
        floats = (p for module in (target, model) for p in module.parameters() if p.is_floating_point())
        like = next(floats, torch.empty(0))
    own = replacement_options(target) if record.at == "instead" else {}
    try:
        block = make_block(make, record.channels, device=like.device, dtype=like.dtype, **own, **record.options)
    except Exception as error:  # a block of the user's may fail in any way
        kind = TypeError if isinstance(error, TypeError) else ValueError
        what = f"the block at {site!r}, for {record.channels} channels"
        raise kind(f"{what}: {reason(error)}{hint(error, make)}") from error
    if not isinstance(block, nn.Module) or RECORD in vars(block):
        raise ValueError(f"block must make a new module for each site; it made {type(block).__name__}")
    block.train(target.training)
    return with_record(block, record, like)


def with_record(block: nn.Module, record: InsertedBlock, like: Any) -> nn.Module:
    """A block with its record, in what lets it begin as the identity if the record says so."""
    if record.around:
        inner = block
        vars(inner).pop(RECORD, None)
        block = ExactBlock(inner, record.channels, device=like.device, dtype=like.dtype, **record.around)
        block.train(inner.training)
    vars(block)[RECORD] = record
    return block.to(like.device) if like.device.type == "meta" else block


def replacement_options(old: nn.Module) -> dict[str, int]:
    """What a block in the place of a convolution takes over from it."""
    return {"stride": int(old.stride[0]), "out_channels": old.out_channels} if isinstance(old, nn.Conv2d) else {}


def detach_(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Take blocks out, and put back what they replaced: where, and of the type and in the mode that, the model is now.

    The blocks keep their records, which say where they were.
    """
    for block in reversed(blocks):
        if REPLACED in vars(block):
            old: nn.Module = vars(block).pop(REPLACED)
            as_now(old, block)
            exchange_(model, block, old)
    registered = {*model.modules()}
    kept = [vars(module)[RECORD] for module in registered.difference(blocks) if RECORD in vars(module)]
    for module in [*model.modules()]:
        # A module that was fused may have a hook without a block, or run a copy of its block.
        if HELD not in vars(module) or (block := hooks.block_at(module)) in blocks or block not in registered:
            hooks.unhook_(module)
        for name in [name for name, child in module._modules.items() if child in blocks]:
            del module._modules[name]
        pre_hooks: dict[int, Any] = module._forward_pre_hooks
        for key, hook in [*pre_hooks.items()]:
            if (
                getattr(hook, "func", None) in (hooks.keep_block, hooks.check_grid)
                and hook.keywords["record"] not in kept
            ):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def as_now(module: nn.Module, like: nn.Module) -> None:
    """Give a module that was aside the device, type and mode of one that was in the model."""
    now, before = next(like.parameters(), None), next(module.parameters(), None)
    if now is not None and before is not None and (before.device, before.dtype) != (now.device, now.dtype):
        module.to(device=now.device, dtype=now.dtype)
    if module.training != like.training:
        module.train(like.training)


def exchange_(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module wherever in the model another one is."""
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is old:
                module._modules[name] = new


def inserted_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The inserted blocks of a model by site, those that replaced a module among them.

    Args:
        model: any network.

    Raises:
        SiteError: a block is no longer run, since other code has replaced or removed the module at which it was
            inserted.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU())
    >>> inserted_blocks(model)
    {}
    >>> from vision_attn.networks.insertion import insert_
    >>> report = insert_(model, names="0", example_input=(1, 3, 16, 16))
    >>> list(inserted_blocks(model))
    ['0']
    """
    network = plain_network(model)
    for owner in network.modules():
        for hook in owner._forward_pre_hooks.values():
            if getattr(hook, "func", None) is hooks.keep_block:
                hook(owner, ())
    return blocks_by_site(network)


def blocks_by_site(network: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module if REPLACED in vars(module) else hooks.block_at(module)
        for name, module in network.named_modules()
        if is_site(module)
    }


def replaced(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that :func:`replace_` took out of a model, by site, kept for when they come back.

    >>> from vision_attn.networks.insertion import replace_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU())
    >>> report = replace_(model, names="0", num_heads=3, value_dim=4, example_input=(1, 3, 16, 16))
    >>> replaced(model)
    {'0': Conv2d(3, 8, kernel_size=(1, 1), stride=(1, 1))}
    """
    return {site: vars(block)[REPLACED] for site, block in inserted_blocks(model).items() if REPLACED in vars(block)}


def records(model: nn.Module) -> tuple[InsertedBlock, ...]:
    """Where the inserted blocks of a model are, what they are and what they cost.

    >>> from vision_attn.networks.insertion import insert_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU())
    >>> report = insert_(model, names="0", example_input=(1, 3, 16, 16))
    >>> [(record.site, record.block, record.tokens) for record in records(model)]
    [('0', 'AttentionBlock2d', 256)]
    """
    # A model may have become part of another since: a block is where it is now.
    return tuple(replace(vars(block)[RECORD], site=site) for site, block in inserted_blocks(model).items())


def inserted_keys(model: nn.Module) -> set[str]:
    """The keys of a model's state dict that belong to inserted blocks: new by design for any other checkpoint.

    >>> from vision_attn.networks.insertion import insert_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU())
    >>> report = insert_(model, names="0", example_input=(1, 3, 16, 16))
    >>> sorted(inserted_keys(model))[0]
    '0.inserted.attn.proj.bias'
    """
    return set().union(*keys_of_blocks(model).values())


def keys_of_blocks(model: nn.Module) -> dict[str, set[str]]:
    """The keys of a model's state dict that belong to the block of each site.

    A block that a model has under several names has keys under each.

    >>> from vision_attn.networks.insertion import insert_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU())
    >>> report = insert_(model, names="0", example_input=(1, 3, 16, 16))
    >>> {site: len(keys) for site, keys in keys_of_blocks(model).items()}
    {'0': 7}
    """
    sites = {id(block): site for site, block in inserted_blocks(model).items()}
    keys: dict[str, set[str]] = {site: set() for site in sites.values()}
    for name, module in plain_network(model).named_modules(remove_duplicate=False):
        if id(module) in sites:
            keys[sites[id(module)]] |= {".".join(filter(None, (name, key))) for key in module.state_dict()}
    return keys


def forget_compiled_graphs() -> None:
    """A model that was compiled runs the graph it had, and does not look whether its hooks are still the same."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()

"""Blocks in a model: how one is held and run, put in and taken out again, and which there are.

A block becomes a child of its target, or of a module inside that, and a hook at the target applies it to the map that
the target gives or takes. No module of the model is renamed or wrapped. A block that replaces a module is in its place,
and keeps it. Where it goes, a block says in its record: :func:`attach_` and :func:`detach_` need nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.errors import SiteError
from vision_attn.networks.insertion.backbone import modules_around, plain_network
from vision_attn.networks.insertion.exact import ExactBlock
from vision_attn.networks.insertion.makers import hint, make_block, reason
from vision_attn.networks.insertion.record import CHILD, InsertedBlock, change, of_map, prefix_of, to_map, token_grid

#: Modules that hold others and may loop over them.
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

#: The attribute in which a block keeps where it is and what it costs: an :class:`InsertedBlock`.
RECORD = "insertion"

#: The attribute in which a target whose block is no child of it keeps the block's path from itself.
HELD = "inserted_at"

#: The attribute in which a block keeps the module that it replaced; that is no child, so that its keys are gone.
REPLACED = "replaced"


def run_after(module: nn.Module, args: tuple[object, ...], output: object) -> object:
    """The forward hook. It looks its block up by name, so that copies and pickles of a model run their own."""
    return run_block(block_at(module), output)


def run_before(
    module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """The hook that runs a block on what its module is given."""
    block = block_at(module)
    if isinstance(vars(block)[RECORD].element, str):
        return args, run_block(block, kwargs)
    return run_block(block, args), kwargs


def block_at(module: nn.Module) -> nn.Module:
    """The block that runs at a module: its child, or one that a module inside it holds."""
    return module.get_submodule(vars(module).get(HELD, CHILD))


def run_block(block: nn.Module, value: Any) -> Any:
    """The same value with the block applied to the map in it."""
    record: Any = block.insertion
    layout, size = record.layout, record.map_size

    def run_on(x: Tensor) -> Tensor:
        if "(" in layout and x.shape[1] != prefix_of(layout) + record.tokens:
            raise wrong_grid(record, f"{x.shape[1] - prefix_of(layout)} tokens")
        return of_map(x, block(to_map(x, layout, size)), layout)

    return change(value, record.element, run_on)


def check_grid(network: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], record: InsertedBlock) -> None:
    """Refuse images whose tokens are as many as a block expects, and another grid: 448×112 pixels for 224×224."""
    images = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() == len(record.input_shape))
    size = next((tuple(x.shape[2:]) for x in images), ())
    if len(size) != 2 or size == record.input_shape[2:]:
        return
    grid = token_grid(record.tokens, *size)
    if grid not in (None, record.map_size):
        raise wrong_grid(record, f"{grid[0]}×{grid[1]} for images of {size[0]}×{size[1]}")


def wrong_grid(record: InsertedBlock, got: str) -> ValueError:
    """The error where tokens are of another grid than a block was inserted for."""
    remedy = "insert it with example_input of the size that is used"
    return ValueError(f"the block at {record.site!r} is for a grid of {record.size} tokens; got {got}: {remedy}")


def is_site(module: nn.Module) -> bool:
    """Whether a block runs at this module, or is in its place."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return REPLACED in vars(module) or run_after in hooks or run_before in hooks


def holder(model: nn.Module, target: str, inside: bool = False) -> str:
    """The path from a target to where its block is held.

    That is a child of the target, unless the target is a container, which would run the block as one of its row, or has
    an attribute of that name, or is seen to mind its children (``inside``). Then it is a child of the first module
    inside it that is no container.
    """
    module = model.get_submodule(target)
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


def attach_(model: nn.Module, block: nn.Module) -> None:
    """Let a block run where its record says; :func:`detach_` undoes it."""
    record: InsertedBlock = vars(block)[RECORD]
    target = model.get_submodule(record.site)
    path, _, child = f"{record.site}.{record.held}".rpartition(".")
    owner = model.get_submodule(path)
    if record.at not in ("after", "before", "instead") or not child.startswith(CHILD):
        raise SiteError(f"{record.site!r}: no block can be {record.at!r} a module as its child {child!r}")
    if is_site(target) or (record.at != "instead" and hasattr(owner, child)):
        raise SiteError(f"{record.site!r} has an inserted block already, or is one: remove_ it first")
    if record.at == "instead":
        vars(block)[REPLACED] = target
        exchange_(model, target, block)
        return
    owner.add_module(child, block)
    if record.held != CHILD:
        vars(target)[HELD] = record.held
    if record.at == "before":
        target.register_forward_pre_hook(run_before, with_kwargs=True)
    else:
        target.register_forward_hook(run_after)
    if "(" in record.layout:
        model.register_forward_pre_hook(partial(check_grid, record=record), with_kwargs=True)


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
        forget_compiled_graphs()
        yield
    except BaseException:
        for block in reversed(done):
            detach_(model, vars(block)[RECORD].site, block)
        forget_compiled_graphs()
        raise


def block_of(model: nn.Module, record: InsertedBlock, make: Callable[..., nn.Module], like: Any = None) -> nn.Module:
    """A new block with its record, in the mode of the module at its site.

    Its device and type are those of ``like``, or else of that module or its model.
    """
    site, owner = record.site, f"{record.site}.{record.held}".rpartition(".")[0]
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


def detach_(model: nn.Module, site: str, block: nn.Module) -> None:
    """Take a block out, or put back what it replaced: where, and of the type and in the mode that, the model is now.

    The block keeps its record, which says where it was.
    """
    record = vars(block)[RECORD]
    vars(block)[RECORD] = replace(record, site=site)
    if REPLACED in vars(block):
        old: nn.Module = vars(block).pop(REPLACED)
        as_now(old, block)
        exchange_(model, block, old)
        return
    target = model.get_submodule(site)
    owner, _, child = f"{site}.{vars(target).pop(HELD, CHILD)}".rpartition(".")
    del model.get_submodule(owner)._modules[child]
    for module in model.modules():
        for hooks, with_kwargs in (
            (module._forward_hooks, module._forward_hooks_with_kwargs),
            (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        ):
            for key, hook in list(hooks.items()):
                runs_block = module is target and hook in (run_after, run_before)
                if runs_block or getattr(hook, "keywords", {}).get("record") == record:
                    del hooks[key]
                    with_kwargs.pop(key, None)


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
    >>> from vision_attn.networks.insertion import insert_
    >>> report = insert_(model, names="0", example_input=(1, 3, 16, 16))
    >>> list(inserted(model))
    ['0']
    """
    modules = list(plain_network(model).named_modules())
    blocks = {
        name: module if REPLACED in vars(module) else block_at(module) for name, module in modules if is_site(module)
    }
    run = set(map(id, blocks.values()))
    if lost := [name for name, module in modules if RECORD in vars(module) and id(module) not in run]:
        remedy = "convert norms to synchronised ones first, and insert then"
        raise SiteError(f"the block {lost[0]!r} is no longer run, as what it was at was converted: {remedy}")
    return blocks


def replaced(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that :func:`replace_` took out of a model, by site, kept for when they come back.

    >>> from vision_attn.networks.insertion import replace_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU())
    >>> report = replace_(model, names="0", num_heads=3, value_dim=4, example_input=(1, 3, 16, 16))
    >>> replaced(model)
    {'0': Conv2d(3, 8, kernel_size=(1, 1), stride=(1, 1))}
    """
    return {site: vars(block)[REPLACED] for site, block in inserted(model).items() if REPLACED in vars(block)}


def records(model: nn.Module) -> tuple[InsertedBlock, ...]:
    """Where the inserted blocks of a model are, what they are and what they cost.

    >>> from vision_attn.networks.insertion import insert_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU())
    >>> report = insert_(model, names="0", example_input=(1, 3, 16, 16))
    >>> [(record.site, record.block, record.tokens) for record in records(model)]
    [('0', 'AttentionBlock2d', 256)]
    """
    # A model may have become part of another since: a block is where it is now.
    return tuple(replace(vars(block)[RECORD], site=site) for site, block in inserted(model).items())


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

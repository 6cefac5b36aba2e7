"""Attach blocks to a model, detach them, and list the inserted blocks of a model.

A block becomes a child of its target, or of a module inside or around the target, and a hook at the target applies it
to the feature map that the target returns or receives. No module of the model is renamed or wrapped. A block that
replaces a module becomes a child in its place and stores the module. :func:`attach_` and :func:`detach_` read the
target and these paths from the record of the block.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from vision_attn.errors import SiteError
from vision_attn.networks.insertion import hooks
from vision_attn.networks.insertion.block_factories import describe_error, make_block, suggest_argument
from vision_attn.networks.insertion.exact import ExactBlock
from vision_attn.networks.insertion.hooks import LOCATION, RECORD, REPLACED, is_site
from vision_attn.networks.insertion.record import CHILD, InsertedBlock
from vision_attn.networks.insertion.untrained import warn_if_untrained
from vision_attn.networks.network import unwrap_model
from vision_attn.networks.selection import ancestor_paths

#: Modules that contain other modules and may loop over them.
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def choose_block_path(model: nn.Module, target: str, inside: bool = False) -> str:
    """Choose the path from a target to its block, which becomes a child of the first possible of these modules.

    - If the target is a norm or convolution, which other code may freeze, fuse or convert: the nearest parent that is
      not a container. The path starts with a dot for each level up.
    - The target, unless it is a container, which would run the block as one of its children, or ``inside`` is set,
      because the target depends on its number of children.
    - The first module inside the target that is not a container.

    >>> model = nn.Sequential(nn.ModuleDict({"conv": nn.Conv2d(3, 8, 1)}), nn.Flatten())
    >>> choose_block_path(model, "1"), choose_block_path(model, "0")
    ('inserted', 'conv.inserted_0')
    """
    module = model.get_submodule(target)
    if hooks.is_fusible(module) and not inside:
        # The network itself is not considered: it may run its children in sequence.
        for level, path in enumerate(reversed(ancestor_paths(target)), 1):
            around, child = model.get_submodule(path), f"{CHILD}_{target[len(path) + 1 :].replace('.', '_')}"
            if not isinstance(around, CONTAINERS) and not hasattr(around, child):
                return "." * level + child
    paths = [] if inside or isinstance(module, CONTAINERS) else [CHILD]
    for name, inner in module.named_modules():
        # A block that replaced a module is removed with all of its children when the module is restored.
        temporary = any(REPLACED in vars(module.get_submodule(part)) for part in (*ancestor_paths(name), name))
        if name and not temporary and not isinstance(inner, CONTAINERS):
            paths.append(f"{name}.{CHILD}_{target.replace('.', '_')}")
    for path in paths or [CHILD]:
        owner, _, child = path.rpartition(".")
        if not hasattr(module.get_submodule(owner), child):
            return path
    raise SiteError(
        f"{target!r} cannot have a child {CHILD!r}: it has an attribute of that name. Choose another module"
    )


def locate_block(record: InsertedBlock) -> tuple[str, str]:
    """Return the path of the parent module of a block, and the name of the block in it."""
    child = record.block_path.lstrip(".")
    around = record.site.rsplit(".", len(record.block_path) - len(child))[0]
    owner, _, name = f"{around}.{child}".rpartition(".")
    return owner, name


def attach_(model: nn.Module, block: nn.Module) -> None:
    """Attach a block at the site in its record; :func:`detach_` reverts it."""
    record: InsertedBlock = vars(block)[RECORD]
    target = model.get_submodule(record.site)
    path, child = locate_block(record)
    owner = model.get_submodule(path)
    if record.at not in ("after", "before", "replace") or not child.startswith(CHILD):
        raise SiteError(f"{record.site!r}: the record of the block is invalid (at={record.at!r}, child {child!r})")
    if is_site(target) or (record.at != "replace" and hasattr(owner, child)):
        raise SiteError(
            f"{record.site!r} already has an inserted block, or is one. To replace the block, call va.remove_(model) "
            "first. To run two blocks in order, insert one class that contains both, such as an nn.Sequential subclass"
        )
    if record.at == "replace":
        vars(block)[REPLACED] = target
        replace_module_(model, target, block)
        return
    owner.add_module(child, block)
    hooks.hook_(target, block)
    # A hook of the network checks that the block still runs, and so does a hook of a module that may be called alone.
    outside = record.block_path.startswith(".")
    runs = (x for x in ancestor_paths(record.site) if type(model.get_submodule(x)).forward is not nn.Module.forward)
    for around in {"", path if outside else max(runs, key=len, default="")}:
        start = len(around) + bool(around)
        block_path = f"{path}.{child}"[start:] if outside else None
        check = partial(hooks.check_block, target=record.site[start:], path=block_path, record=record)
        model.get_submodule(around).register_forward_pre_hook(check)
    if "(" in record.layout:
        # Methods such as forward_features do not run the hooks of the network, but run its patch embedding.
        convolutions = (x for x in model.modules() if isinstance(x, nn.modules.conv._ConvNd))
        first = next((x for x in convolutions if x.in_channels == record.input_shape[1]), model)
        for module in {model, first}:
            module.register_forward_pre_hook(partial(hooks.check_grid, record=record), with_kwargs=True)


def attach_records_(
    model: nn.Module, wanted: Iterable[InsertedBlock], factories: Mapping[str, Callable[..., nn.Module]]
) -> tuple[InsertedBlock, ...]:
    """Build blocks and attach them at the sites in their records, without running the network.

    Args:
        model: a network of the same architecture as the one with the records, without inserted blocks.
        wanted: records from :func:`records`.
        factories: classes or functions that build the blocks, called as in :func:`insert_`, by the name of the class.

    Returns:
        The records.

    Raises:
        SiteError: a site does not exist in the model, or already has a block. The model is unchanged.

    >>> from vision_attn.attention.blocks import AttentionBlock2d
    >>> from vision_attn.networks.insertion import insert_, remove_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1))
    >>> report = insert_(model, names="0", example_input=(1, 3, 16, 16))
    >>> removed = remove_(model)
    >>> attach_records_(model, report.blocks, {"AttentionBlock2d": AttentionBlock2d}) == report.blocks
    True
    """
    # Replacements are attached first, because a block must not become a child of a module that is replaced.
    wanted = sorted(wanted, key=lambda record: record.at != "replace")
    with attach_blocks_(model, (build_block(model, record, factories[record.block]) for record in wanted)):
        return tuple(wanted)


@contextmanager
def attach_blocks_(model: nn.Module, blocks: Iterable[nn.Module]) -> Iterator[None]:
    """Attach blocks, and detach all of them if attaching or the body of the ``with`` statement fails."""
    with ExitStack() as stack:
        for block in blocks:
            attach_(model, block)
            stack.callback(detach_, model, [block])
            warn_if_untrained(model, block, vars(block)[RECORD].site)
        reset_compiled_graphs()
        yield
        stack.pop_all()


def build_block(model: nn.Module, record: InsertedBlock, make: Callable[..., nn.Module], like: Any = None) -> nn.Module:
    """Build a block with its record, in the training or evaluation mode of the module at its site.

    Device and dtype are copied from ``like``, or by default from this module or the model.
    """
    site, (owner, _) = record.site, locate_block(record)
    try:
        target, _ = model.get_submodule(site), model.get_submodule(owner)
    except AttributeError as error:
        raise SiteError(f"the model has no module {site!r} for a block ({error})") from error
    if like is None:
        like = next((p for part in (target, model) for p in part.parameters() if p.is_floating_point()), torch.empty(0))
    own = replacement_options(target) if record.at == "replace" else {}
    try:
        block = make_block(make, record.channels, device=like.device, dtype=like.dtype, **own, **record.options)
    except Exception as error:  # A custom block may raise any exception.
        kind = TypeError if isinstance(error, TypeError) else ValueError
        why = f"{describe_error(error)}{suggest_argument(error, make)}"
        raise kind(f"the block at {site!r} cannot be built for {record.channels} channels: {why}") from error
    if not isinstance(block, nn.Module) or RECORD in vars(block):
        raise ValueError(f"block must return a new module for each site, got {type(block).__name__}")
    block.train(target.training)
    return add_record(block, record, like)


def add_record(block: nn.Module, record: InsertedBlock, like: Any) -> nn.Module:
    """Store the record in a block and return the block, inside an :class:`ExactBlock` if the record requires one."""
    if record.wrapper_options:
        vars(block).pop(RECORD, None)
        block = ExactBlock(block, record.channels, like, **record.wrapper_options).train(block.training)
    vars(block)[RECORD] = record
    return block.to(like.device) if like.device.type == "meta" else block


def replacement_options(old: nn.Module) -> dict[str, int]:
    """Return the options of a block that are copied from the convolution that it replaces."""
    return {"stride": int(old.stride[0]), "out_channels": old.out_channels} if isinstance(old, nn.Conv2d) else {}


def detach_(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Remove blocks and restore the modules that they replaced, on the device and in the mode of the blocks.

    The blocks keep their records.
    """
    for block in reversed(blocks):
        if (old := vars(block).pop(REPLACED, None)) is not None:
            match_state_(old, block, model)
            replace_module_(model, block, old)
    modules = [*model.modules()]
    kept = [vars(module)[RECORD] for module in modules if RECORD in vars(module) and module not in blocks]
    for module in modules:
        # A fused module may have a hook without a block, or run a copy of its block.
        if LOCATION not in vars(module) or (block := hooks.get_block(module)) in blocks or block not in modules:
            hooks.unhook_(module)
        for name in [name for name, child in module._modules.items() if child in blocks]:
            del module._modules[name]
        hooks.drop_hooks_(
            module, lambda x: getattr(x, "func", None) in hooks.CHECKS and x.keywords["record"] not in kept
        )
    reset_compiled_graphs()


def match_state_(module: nn.Module, block: nn.Module, model: nn.Module) -> None:
    """Move a module to the mode, device and dtype of the block that replaced it.

    If the block has no parameters, device and dtype are those of the model.
    """
    now = {(p.device, p.dtype) for p in ([*block.parameters()][:1] or model.parameters())}
    before = next(((p.device, p.dtype) for p in module.parameters()), None)
    if before is not None and before not in now and len(now) == 1:  # A model may have several devices and dtypes.
        device, dtype = now.pop()
        module.to(device=device, dtype=dtype)
    if module.training != block.training:
        module.train(block.training)


def replace_module_(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace a module in each of its parent modules."""
    for module in list(model.modules()):
        module._modules.update({name: new for name, child in module._modules.items() if child is old})


def inserted_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the inserted blocks of a model by site, including blocks that replaced a module.

    Args:
        model: any network.

    Raises:
        SiteError: a block no longer runs, because other code has replaced or removed the module at its site.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU())
    >>> inserted_blocks(model)
    {}
    >>> from vision_attn.networks.insertion import insert_
    >>> report = insert_(model, names="0", example_input=(1, 3, 16, 16))
    >>> list(inserted_blocks(model))
    ['0']
    """
    network = unwrap_model(model)
    for owner in network.modules():
        for hook in owner._forward_pre_hooks.values():
            if getattr(hook, "func", None) is hooks.check_block:
                hook(owner, ())
    return blocks_by_site(network)


def blocks_by_site(network: nn.Module) -> dict[str, nn.Module]:
    return {name: hooks.get_block(module) for name, module in network.named_modules() if is_site(module)}


def replaced_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that :func:`replace_` removed from a model, by site.

    >>> from vision_attn.networks.insertion import replace_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU())
    >>> report = replace_(model, names="0", num_heads=3, value_dim=4, example_input=(1, 3, 16, 16))
    >>> replaced_modules(model)
    {'0': Conv2d(3, 8, kernel_size=(1, 1), stride=(1, 1))}
    """
    return {site: vars(block)[REPLACED] for site, block in inserted_blocks(model).items() if REPLACED in vars(block)}


def records(model: nn.Module) -> tuple[InsertedBlock, ...]:
    """Return the records of the inserted blocks of a model: their sites, feature maps and costs.

    >>> from vision_attn.networks.insertion import insert_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU())
    >>> report = insert_(model, names="0", example_input=(1, 3, 16, 16))
    >>> [(record.site, record.block, record.tokens) for record in records(model)]
    [('0', 'AttentionBlock2d', 256)]
    """
    # The sites are computed again, because the model may have become part of another model.
    return tuple(replace(vars(block)[RECORD], site=site) for site, block in inserted_blocks(model).items())


def inserted_keys(model: nn.Module) -> set[str]:
    """Return the keys of a model's state dict that belong to inserted blocks.

    >>> from vision_attn.networks.insertion import insert_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU())
    >>> report = insert_(model, names="0", example_input=(1, 3, 16, 16))
    >>> sorted(inserted_keys(model))[0]
    '0.inserted.attn.proj.bias'
    """
    return set().union(*keys_by_site(model).values())


def keys_by_site(model: nn.Module) -> dict[str, set[str]]:
    """Return the keys of a model's state dict that belong to the block of each site.

    A block that a model contains under several names has keys under each name.

    >>> from vision_attn.networks.insertion import insert_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU())
    >>> report = insert_(model, names="0", example_input=(1, 3, 16, 16))
    >>> {site: len(keys) for site, keys in keys_by_site(model).items()}
    {'0': 7}
    """
    sites = {id(block): site for site, block in inserted_blocks(model).items()}
    keys: dict[str, set[str]] = {site: set() for site in sites.values()}
    for name, module in unwrap_model(model).named_modules(remove_duplicate=False):
        if id(module) in sites:
            keys[sites[id(module)]] |= {".".join(filter(None, (name, key))) for key in module.state_dict()}
    return keys


def reset_compiled_graphs() -> None:
    """Force compiled models to recompile, because their graphs have no guards on hooks."""
    if "torch._dynamo" in sys.modules:
        # If CUDA is initialized, torch.compiler.reset() would also import the compiler, which takes seconds.
        torch._dynamo.reset_code_caches()

"""Attach blocks to a model, detach them, and list the inserted blocks of a model.

A block becomes a child of its target, or of a module inside or around the target, and a hook at the target applies it
to the feature map that the target returns or receives. No module of the model is renamed or wrapped. A block that
replaces a module becomes a child in its place, and its record contains the module.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.fx import GraphModule

from vision_attn.errors import SiteError
from vision_attn.networks.insertion.attributes import RECORD, get_record, is_inserted, replaced_module
from vision_attn.networks.insertion.build import CONTAINERS, rebuild
from vision_attn.networks.insertion.hooks import block_at, checked_network, context_path, hook_, hooks_inside, unhook_
from vision_attn.networks.insertion.record import CHILD, InsertedBlock
from vision_attn.networks.inspection.selection import own_children, require_module
from vision_attn.networks.inspection.wrappers import layer_wrappers, unwrap_key
from vision_attn.networks.untrained import warn_if_untrained


def attach_(model: nn.Module, block: nn.Module) -> None:
    """Attach a block at the site in its record; :func:`detach_` reverts it."""
    record = get_record(block)
    path, _, child = record.block_path.rpartition(".")
    target, owner = require_module(model, record.site), require_module(model, path)
    at, near = record.target.at, record.is_child or not path or record.site.startswith(f"{path}.")
    # A container would run the block as one of its children.
    fits = near and child.startswith(CHILD) and not isinstance(owner, CONTAINERS)
    if at not in ("after", "before", "replace") or not (at == "replace" or fits):
        what = f"at={at!r}, block {record.block_path!r}"
        raise SiteError(f"{record.site!r}: the record of the block is invalid ({what})")
    if {block_at(target), replaced_module(target)} != {None}:
        what = f"{record.site!r} already has an inserted block, or is one. To replace it, call va.remove_(model) first"
        remedy = "To run two blocks in order, insert one class that contains both, such as an nn.Sequential subclass"
        raise SiteError(f"{what}. {remedy}")
    if at != "replace" and hasattr(owner, child):
        what = f"the block at {record.site!r} would be {record.block_path!r}, which already exists"
        raise SiteError(f"{what}. Insert it in a separate call of va.insert_")
    if isinstance(target, GraphModule):
        what = f"{record.site!r} is a graph of torch.fx, whose hooks are not pickled"
        raise SiteError(f"{what}. Choose a module inside, or insert before tracing")
    if at == "replace":
        replace_module_(model, target, block)
    else:
        owner.add_module(child, block)
        hook_(model, block)


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
    blocks = [rebuild(model, x, factories) for x in sorted(wanted, key=lambda record: record.target.at != "replace")]
    with attach_blocks_(model, blocks):
        return tuple(map(get_record, blocks))


@contextmanager
def attach_blocks_(model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Attach blocks, and detach all of them if attaching or the body of the ``with`` statement fails."""
    with ExitStack() as stack:
        for block in blocks:
            attach_(model, block)
            stack.callback(detach_, model, [block])
        torch.compiler.reset()  # compiled graphs have no guards on hooks
        yield
        warn_if_untrained(model, {get_record(block).site: block for block in blocks})
        stack.pop_all()


def detach_(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Remove blocks and their records, and restore the replaced modules on the device and in the mode of the blocks."""
    wrappers = layer_wrappers(model)
    for block in reversed(blocks):
        if (old := replaced_module(block)) is not None:
            match_state_(old, block, model)
            outer = block
            while outer in wrappers:
                outer = wrappers[outer]
            replace_module_(model, outer, old)
    for module in [*model.modules()]:
        unhook_(module, blocks)
        for name in [name for name, child in module.named_children() if child in blocks]:
            delattr(module, name)
    for block in blocks:
        vars(block).pop(RECORD, None)  # a wrapper has none, and may show that of the block
    torch.compiler.reset()


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
        for name, child in own_children(module).items():
            if child is old:
                module.add_module(name, new)


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
    return blocks_by_site(checked_network(model))


def blocks_by_site(network: nn.Module) -> dict[str, nn.Module]:
    """Return the inserted blocks of a network without wrappers, whether they run or not."""
    found = dict[str, nn.Module]()
    for path, module in network.named_modules():
        if replaced_module(module) is not None:
            found[unwrap_key(path)] = module
        elif (block := block_at(module)) is not None:
            found[path] = block
    return found


def all_blocks(network: nn.Module) -> list[nn.Module]:
    """Return the blocks of a network without :func:`graph_blocks`, including blocks that only hooks refer to."""
    nodes = {*graph_blocks(network).values()}
    blocks = {module: None for module in network.modules() if is_inserted(module) and module not in nodes}
    blocks |= dict.fromkeys(hook.keywords["block"] for _, hook in hooks_inside(network))
    return [*filter(is_inserted, blocks)]  # not blocks that were removed from a part of the network


def graph_blocks(network: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks that run as nodes of torch.fx graphs, by path; a graph does not run without them."""
    run_by_hooks = {*blocks_by_site(network).values()}
    nodes = {x for graph in network.modules() if isinstance(graph, GraphModule) for x in graph.modules()}
    return {path: x for path, x in network.named_modules() if x in nodes - run_by_hooks and is_inserted(x)}


def replaced_modules(network: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that :func:`replace_` removed from a network without wrappers, by site.

    >>> from vision_attn.networks.insertion import replace_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU())
    >>> report = replace_(model, names="0", num_heads=3, value_dim=4, example_input=(1, 3, 16, 16))
    >>> replaced_modules(model)
    {'0': Conv2d(3, 8, kernel_size=(1, 1), stride=(1, 1))}
    """
    found = {site: replaced_module(block) for site, block in blocks_by_site(network).items()}
    return {site: old for site, old in found.items() if old is not None}


def records(model: nn.Module) -> tuple[InsertedBlock, ...]:
    """Return the records of the inserted blocks of a model: their sites, feature maps and costs.

    >>> from vision_attn.networks.insertion import insert_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU())
    >>> report = insert_(model, names="0", example_input=(1, 3, 16, 16))
    >>> [(record.site, record.block, record.tokens) for record in records(model)]
    [('0', 'AttentionBlock2d', 256)]
    """
    return tuple(iter_records(checked_network(model)))


def iter_records(network: nn.Module) -> Iterator[InsertedBlock]:
    """Yield the records of blocks with their paths in a network, which other code may have moved or wrapped."""
    paths = {block: path for path, block in network.named_modules()}
    for site, block in blocks_by_site(network).items():
        record = get_record(block)
        yield record.moved(site, paths.get(block, record.block_path), context_path(network, site))


def inserted_keys(model: nn.Module) -> set[str]:
    """Return the keys of a model's state dict that belong to inserted blocks, without the parts of wrappers.

    >>> from vision_attn.networks.insertion import insert_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU())
    >>> report = insert_(model, names="0", example_input=(1, 3, 16, 16))
    >>> sorted(inserted_keys(model))[0]
    '0.inserted.attn.proj.bias'
    """
    return set().union(*keys_by_site(checked_network(model)).values())


def keys_by_site(network: nn.Module) -> dict[str, set[str]]:
    """Return the keys of the state dict of a network that belong to the block of each site.

    The keys do not contain the parts that wrappers add. A block that a network contains under several names has keys
    under each name.

    >>> from vision_attn.networks.insertion import insert_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU())
    >>> report = insert_(model, names="0", example_input=(1, 3, 16, 16))
    >>> {site: len(keys) for site, keys in keys_by_site(model).items()}
    {'0': 7}
    """
    sites = {id(block): site for site, block in (graph_blocks(network) | blocks_by_site(network)).items()}
    keys: dict[str, set[str]] = {site: set() for site in sites.values()}
    for name, module in network.named_modules(remove_duplicate=False):
        if id(module) in sites:
            keys[sites[id(module)]] |= {unwrap_key(f"{name}.{key}").removeprefix(".") for key in module.state_dict()}
    return keys

"""A block at a module: the hook that runs it, and the module that it is a child of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from vision_attn.errors import SiteError
from vision_attn.insertion.elements import change
from vision_attn.insertion.exchange import REPLACED
from vision_attn.insertion.running import run_quietly
from vision_attn.insertion.sites import CHILD

__all__ = ["RECORD", "attach", "block_at", "detach", "find_holders", "is_host"]

#: The attribute in which a block keeps where it is and what it costs: an :class:`InsertedBlock`.
RECORD = "insertion"

#: The attribute in which a module that loops over its children keeps the path, from itself, of its block.
HELD = "inserted_at"


def run_after(module: nn.Module, args: tuple[object, ...], output: object) -> object:
    """The forward hook. It looks its block up by name, so that copies and pickles of a model run their own."""
    return run_block(block_at(module), output)


def run_before(
    module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """The hook that runs a block on what its module is given."""
    block = block_at(module)
    record: Any = block.insertion
    if isinstance(record.element, str):
        return args, run_block(block, kwargs)
    return run_block(block, args), kwargs


def block_at(module: nn.Module) -> nn.Module:
    """The block that runs at a module: its child, or one that a module inside it holds."""
    return module.get_submodule(vars(module).get(HELD, CHILD))


def run_block(block: nn.Module, value: Any) -> Any:
    """The same value with the block applied to the map in it."""
    record: Any = block.insertion
    return change(value, record.element, lambda x: run_on(block, x))


def run_on(block: nn.Module, x: Tensor) -> Tensor:
    record: Any = block.insertion
    layout = record.layout
    if layout.grid is not None and x.shape[1] != layout.prefix + layout.grid[0] * layout.grid[1]:
        height, width = layout.grid
        raise ValueError(
            f"the block at {record.site!r} was inserted for a grid of {height}×{width} tokens and {layout.prefix} "
            f"others; got {x.shape[1]} tokens: insert it with example_input of the size that is used"
        )
    y: Tensor = layout.of_map(x, block(layout.to_map(x)))
    return y


def is_host(module: nn.Module) -> bool:
    """Whether a block runs at this module."""
    return run_after in module._forward_hooks.values() or run_before in module._forward_pre_hooks.values()


class Probe(nn.Module):
    """Counts its calls: a child that nobody knows of is called only by a module that loops over its children."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, *args: object, **kwargs: object) -> object:
        self.calls += 1
        return args[0] if args else None


def find_holders(model: nn.Module, sites: Iterable[str], example: Tensor) -> dict[str, tuple[str, str]]:
    """The module that the block of each site can be a child of, and the name of the child.

    That is the module at the site, unless it loops over its children and would run the block as one of them, as a dense
    block does. Then it is the first module inside it that does not.
    """
    candidates = {site: candidates_at(model, site) for site in sites}
    holders = {site: next(candidates[site]) for site in candidates}
    unsettled = set(holders)
    while unsettled:
        failed, looping = probe(model, {site: holders[site] for site in unsettled}, example)
        if failed and not looping:
            # A module minds its new child without calling it. Which one it is shows when they are tried one by one.
            looping = {site for site in unsettled if probe(model, {site: holders[site]}, example)[0]}
            if not looping:
                raise SiteError(f"the model does not run with blocks at {', '.join(map(repr, sorted(unsettled)))}")
        for site in looping:
            following = next(candidates[site], None)
            if following is None:
                raise SiteError(
                    f"{site!r} takes no child, since it loops over or counts those it has: choose another module"
                )
            holders[site] = following
        unsettled = unsettled if failed else looping
    return holders


def candidates_at(model: nn.Module, site: str) -> Iterator[tuple[str, str]]:
    """A module at or inside a site, and what a block of this site is called there."""
    yield site, CHILD
    for name, module in model.get_submodule(site).named_modules(prefix=site):
        containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
        # What replaced a module goes when that module comes back, and its parts with it.
        temporary = any(REPLACED in vars(part) for part in parts_of(model, name))
        if name != site and not isinstance(module, containers) and not temporary:
            yield name, f"{CHILD}_{site.replace('.', '_')}"


def parts_of(model: nn.Module, path: str) -> Iterator[nn.Module]:
    """The modules along a path."""
    for name in path.split("."):
        model = model.get_submodule(name)
        yield model


def probe(model: nn.Module, holders: dict[str, tuple[str, str]], example: Tensor) -> tuple[bool, set[str]]:
    """Whether the model fails with children that do nothing, and at which sites these were called."""
    probes = {site: Probe() for site in holders}
    try:
        for site, (holder, child) in holders.items():
            model.get_submodule(holder).add_module(child, probes[site])
        run_quietly(model, example)
        failed = False
    except SiteError:
        failed = True
    finally:
        for holder, child in holders.values():
            model.get_submodule(holder)._modules.pop(child, None)
    return failed, {site for site, probe in probes.items() if probe.calls}


def attach(model: nn.Module, site: str, holder: tuple[str, str], block: nn.Module) -> None:
    """Let a block that has its record run at a site."""
    host = model.get_submodule(site)
    path, child = holder
    model.get_submodule(path).add_module(child, block)
    if path != site:
        vars(host)[HELD] = f"{path.removeprefix(f'{site}.')}.{child}"
    if vars(block)[RECORD].at == "before":
        host.register_forward_pre_hook(run_before, with_kwargs=True)
    else:
        host.register_forward_hook(run_after)


def detach(model: nn.Module, host: nn.Module) -> None:
    """Undo :func:`attach`."""
    block = block_at(host)
    for hooks, flags, ours in (
        (host._forward_hooks, (host._forward_hooks_with_kwargs, host._forward_hooks_always_called), run_after),
        (host._forward_pre_hooks, (host._forward_pre_hooks_with_kwargs,), run_before),
    ):
        for key in [key for key, hook in hooks.items() if hook is ours]:
            for entries in (hooks, *flags):
                entries.pop(key, None)
    vars(host).pop(HELD, None)
    for module in model.modules():
        for child in [name for name, other in module._modules.items() if other is block]:
            del module._modules[child]

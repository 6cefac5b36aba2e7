"""The hooks that run a block at its site, and those that notice when other code takes the block away.

A block is a child of its target, or of a module inside or around that, and a hook at the target applies it to the map
that the target returns or takes. Its record says where it goes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.fx import Proxy

from vision_attn.attention.blocks.gated_residual import GatedResidual
from vision_attn.attention.scopes import scoped_output
from vision_attn.errors import SiteError
from vision_attn.networks.insertion.record import InsertedBlock, change, of_map, prefix_of, to_map, token_grid

#: The attribute in which a block keeps where it is and what it costs: an :class:`InsertedBlock`.
RECORD = "insertion"

#: The attribute of a target that says where its block is: a :class:`Place` inside the target, or the block itself where
#: a module around the target holds it.
HELD = "inserted_at"

#: Normalization layers, whose scales do not decay whatever their shape.
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

#: Layers that passes over a network fuse or drop, beside normalization layers.
FUSED = (nn.modules.conv._ConvNd, nn.Linear, nn.modules.dropout._DropoutNd)

#: The attribute in which a block keeps the module that it replaced; that is no child, so that its keys are gone.
REPLACED = "replaced"


class Place:
    """The path from a target to its block. A copy of the target alone, as fusing makes, has another object."""

    def __init__(self, path: str) -> None:
        self.path = path


def run_after(module: nn.Module, args: tuple[object, ...], output: object) -> object:
    """The forward hook. It looks its block up by name, so that copies and pickles of a model run their own."""
    return run_block(block_at(module), output) if HELD in vars(module) else output  # a hook moved by fuse_modules


def run_before(
    module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """The hook that runs a block on what its module is given."""
    block = block_at(module)
    if isinstance(vars(block)[RECORD].element, str):
        return args, run_block(block, kwargs)
    return run_block(block, args), kwargs


def block_at(module: nn.Module) -> nn.Module:
    """Return the block that runs at a module: its child, or one that a module inside or around it holds."""
    held: Any = vars(module)[HELD]
    block: nn.Module = module.get_submodule(held.path) if isinstance(held, Place) else held
    return block


def keep_block(
    owner: nn.Module, args: tuple[object, ...], *, target: str, held: str | Place, record: InsertedBlock
) -> None:
    """Check that a block still runs at a module inside ``owner``, which other code may have replaced.

    A forward pre-hook of ``owner``. A block that is ``held`` at a path outside of its module goes on at the norm that
    is there now, such as a frozen one. A block that went with its module, or whose module was fused, is an error.
    """
    try:
        module, outside = owner.get_submodule(target), owner.get_submodule(held) if isinstance(held, str) else None
    except AttributeError:
        raise lost(record, "removed") from None
    if outside is None:
        kept = any(is_site(part) and (not is_fusible(part) or vars(part)[HELD] is held) for part in module.modules())
    else:
        kept = any(vars(part).get(HELD) is outside for part in module.modules())
        if not kept and is_norm(module):
            hook_(module, outside, outside)
            kept = True
    if not kept:
        raise lost(record, f"replaced by a {type(module).__name__}")
    tracer: Any = next((x.tracer for x in args if isinstance(x, Proxy)), None)
    if outside is not None and tracer is not None and tracer.is_leaf_module(module, target):
        raise untraceable(module, record)


def lost(record: InsertedBlock, how: str) -> SiteError:
    """The error where other code has taken the module of a block away."""
    remedy = "Replace, fuse and reparameterize modules before inserting blocks; va.remove_(model) removes the others"
    return SiteError(f"the block at {record.site!r} is no longer run: the module there was {how}. {remedy}")


def refuse_tracing(module: nn.Module, args: tuple[object, ...]) -> None:
    """A forward pre-hook of norms, which torch.fx cannot trace into, so that the block has no node of its own."""
    if any(isinstance(x, Proxy) for x in args):
        raise untraceable(module, vars(block_at(module))[RECORD])


def untraceable(module: nn.Module, record: InsertedBlock) -> SiteError:
    """The error where a graph would hold a block inside of a module that passes over the graph fuse or drop."""
    why = f"fusing or dropping the {type(module).__name__} would lose it"
    remedy = "Trace, fuse or quantize before inserting, or insert after a residual block"
    return SiteError(f"the block at {record.site!r} cannot be traced by torch.fx: {why}. {remedy}")


def hook_(module: nn.Module, block: nn.Module, held: object) -> None:
    """Let a module run a block: before older hooks, so that feature taps see the map with the block."""
    vars(module)[HELD] = held
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    if run_after in hooks or run_before in hooks:
        return  # a replica of ``nn.DataParallel``
    if vars(block)[RECORD].at == "before":
        module.register_forward_pre_hook(run_before, with_kwargs=True, prepend=True)
    else:
        module.register_forward_hook(run_after, prepend=True)
    if type(module).__module__.startswith(("torch.nn", "torch.ao.nn")):
        vars(module)["__module__"] = __name__  # torch.fx traces into it, and the block becomes a node
    if isinstance(module, nn.modules.batchnorm._NormBase):
        module.register_forward_pre_hook(refuse_tracing, prepend=True)


def unhook_(module: nn.Module) -> None:
    """Undo :func:`hook_`."""
    for hooks, with_kwargs in (
        (module._forward_hooks, module._forward_hooks_with_kwargs),
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
    ):
        for key in [key for key, hook in hooks.items() if hook in (run_after, run_before, refuse_tracing)]:
            del hooks[key]
            with_kwargs.pop(key, None)
    if vars(module).pop(HELD, None) is not None:
        vars(module).pop("__module__", None)


def is_norm(module: nn.Module) -> bool:
    return isinstance(module, NORMS) or "Norm" in type(module).__name__


def is_fusible(module: nn.Module) -> bool:
    return is_norm(module) or isinstance(module, FUSED)


def run_block(block: nn.Module, value: Any) -> Any:
    """The same value with the block applied to the map in it."""
    record: Any = block.insertion
    layout, size = record.layout, record.map_size

    def run_on(x: Tensor) -> Tensor:
        if "(" in layout and x.shape[1] != prefix_of(layout) + record.tokens:
            raise wrong_grid(record, f"{x.shape[1] - prefix_of(layout)} tokens")
        x_map = to_map(x, layout, size)
        if isinstance(x_map, Proxy):  # one node of a traced graph
            path = x_map.tracer.path_of_module(block)
            return of_map(x, x_map.tracer.create_proxy("call_module", path, (x_map,), {}), layout)
        y = block(x_map)
        return of_map(x, y if isinstance(block, GatedResidual) else scoped_output(block, x_map, y), layout)

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
    """Return True if a block runs at this module or replaced it."""
    return REPLACED in vars(module) or HELD in vars(module)

"""The hooks that run a block at its site, and those that report a block whose site other code has taken away.

A block is a child of its target, or of a module inside or around the target. A hook at the target applies the block to
the feature map that the target returns or receives. The record of the block defines where it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.fx import Proxy

from vision_attn.attention.blocks.gated_residual import GatedResidual
from vision_attn.attention.scopes import scoped_output
from vision_attn.errors import SiteError
from vision_attn.networks.insertion.layout import change, count_prefix, from_map, to_map, token_grid
from vision_attn.networks.insertion.record import InsertedBlock

#: The attribute in which a block keeps its :class:`InsertedBlock`.
RECORD = "insertion"

#: The attribute of a target that locates its block: the record of a block inside the target, whose path it has, or the
#: block itself where it is a child of a module around the target. A copy of the target alone has another record object.
LOCATION = "inserted_at"

#: Normalization layers, whose scales do not decay whatever their shape.
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

#: Layers that passes over a network fuse or drop, beside normalization layers.
FUSED = (nn.modules.conv._ConvNd, nn.Linear, nn.modules.dropout._DropoutNd)

#: The attribute in which a block keeps the module that it replaced, which is not a child: its keys are not the model's.
REPLACED = "replaced"


def run_after(module: nn.Module, args: tuple[object, ...], output: object) -> object:
    """The forward hook. It looks its block up by name, so that copies and pickles of a model run their own blocks."""
    return run_block(get_block(module), output) if LOCATION in vars(module) else output  # a hook moved by fuse_modules


def run_before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The forward pre-hook that runs a block on the input of its target."""
    block = get_block(module)
    if isinstance(vars(block)[RECORD].element, str):
        return args, run_block(block, kwargs)
    return run_block(block, args), kwargs


def get_block(module: nn.Module) -> nn.Module:
    """Return the block that runs at a module, or has replaced a module itself."""
    location: Any = vars(module).get(LOCATION, module)
    return module.get_submodule(location.held) if isinstance(location, InsertedBlock) else location


def check_block(owner: nn.Module, args: Any, *, target: str, path: str | None, record: InsertedBlock) -> None:
    """Check that a block still runs at a module inside ``owner``, which other code may have replaced.

    A forward pre-hook of ``owner``. A block outside its target, at ``path``, is attached again to the norm that is at
    the target now, such as a frozen one. A block whose target was replaced or fused is an error.
    """
    try:
        module, outside = owner.get_submodule(target), None if path is None else owner.get_submodule(path)
    except AttributeError:
        raise missing_block_error(record, "removed") from None
    if outside is None:
        runs = any(is_site(x) and (not is_fusible(x) or vars(x).get(LOCATION) is record) for x in module.modules())
    else:
        runs = any(vars(part).get(LOCATION) is outside for part in module.modules())
    if not runs and outside is not None and is_norm(module):
        hook_(module, outside)
    elif not runs:
        raise missing_block_error(record, f"replaced by a {type(module).__name__}")
    tracers: list[Any] = [x.tracer for x in args if isinstance(x, Proxy)]
    if outside is not None and any(tracer.is_leaf_module(module, target) for tracer in tracers):
        raise tracing_error(module, record)


def missing_block_error(record: InsertedBlock, change: str) -> SiteError:
    """Return the error where other code has taken the target of a block away."""
    remedy = "Replace, fuse and reparameterize modules before inserting blocks; va.remove_(model) removes the others"
    return SiteError(f"the block at {record.site!r} is no longer run: the module there was {change}. {remedy}")


def refuse_tracing(module: nn.Module, args: tuple[object, ...]) -> None:
    """A forward pre-hook of norms, which torch.fx does not trace into: the block would have no node of the graph."""
    if any(isinstance(x, Proxy) for x in args):
        raise tracing_error(module, vars(get_block(module))[RECORD])


def tracing_error(module: nn.Module, record: InsertedBlock) -> SiteError:
    """Return the error where a graph would hold a block inside a module that passes over the graph fuse or drop."""
    why = f"fusing or dropping the {type(module).__name__} would lose it"
    remedy = "Trace, fuse or quantize before inserting, or insert after a residual block"
    return SiteError(f"the block at {record.site!r} cannot be traced by torch.fx: {why}. {remedy}")


def hook_(module: nn.Module, block: nn.Module) -> None:
    """Let a module run a block: before older hooks, so that feature taps see the map with the block."""
    record: InsertedBlock = vars(block)[RECORD]
    vars(module)[LOCATION] = block if record.held.startswith(".") else record
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    if run_after in hooks or run_before in hooks:
        return  # a replica of ``nn.DataParallel``
    if record.at == "before":
        module.register_forward_pre_hook(run_before, with_kwargs=True, prepend=True)
    else:
        module.register_forward_hook(run_after, prepend=True)
    if type(module).__module__.startswith(("torch.nn", "torch.ao.nn")):
        vars(module)["__module__"] = __name__  # torch.fx traces into it, and the block becomes a node
    if isinstance(module, nn.modules.batchnorm._NormBase):
        module.register_forward_pre_hook(refuse_tracing, prepend=True)


def unhook_(module: nn.Module) -> None:
    """Undo :func:`hook_`."""
    drop_hooks_(module, lambda hook: hook in (run_after, run_before, refuse_tracing))
    if vars(module).pop(LOCATION, None) is not None:
        vars(module).pop("__module__", None)


def drop_hooks_(module: nn.Module, condition: Callable[[Any], bool]) -> None:
    """Remove the forward hooks and pre-hooks of a module that meet a condition."""
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        hooks: dict[int, Any] = vars(module)[name]
        for key in [key for key, hook in hooks.items() if condition(hook)]:
            del hooks[key]
            vars(module)[f"{name}_with_kwargs"].pop(key, None)


def is_norm(module: nn.Module) -> bool:
    return isinstance(module, NORMS) or "Norm" in type(module).__name__


def is_fusible(module: nn.Module) -> bool:
    return is_norm(module) or isinstance(module, FUSED)


def run_block(block: nn.Module, value: Any) -> Any:
    """Return the value with the block applied to the map in it."""
    record: Any = block.insertion
    layout, size = record.layout, record.map_size

    def run_on(x: Tensor) -> Tensor:
        if "(" in layout and x.shape[1] != count_prefix(layout) + record.tokens:
            raise grid_error(record, f"{x.shape[1] - count_prefix(layout)} tokens")
        x_map = to_map(x, layout, size)
        if isinstance(x_map, Proxy):  # one node of a traced graph
            path = x_map.tracer.path_of_module(block)
            return from_map(x, x_map.tracer.create_proxy("call_module", path, (x_map,), {}), layout)
        y = block(x_map)
        return from_map(x, y if isinstance(block, GatedResidual) else scoped_output(block, x_map, y), layout)

    return change(value, record.element, run_on)


def check_grid(network: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], record: InsertedBlock) -> None:
    """Refuse images with as many tokens as a block expects in another grid: 448×112 pixels for 224×224."""
    images = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() == len(record.input_shape))
    size = next((tuple(x.shape[2:]) for x in images), ())
    if len(size) != 2 or size == record.input_shape[2:]:
        return
    grid = token_grid(record.tokens, *size)
    if grid not in (None, record.map_size):
        raise grid_error(record, f"{grid[0]}×{grid[1]} for images of {size[0]}×{size[1]}")


def grid_error(record: InsertedBlock, got: str) -> ValueError:
    """Return the error where tokens are of another grid than a block was inserted for."""
    remedy = "insert it with example_input of the size that is used"
    return ValueError(f"the block at {record.site!r} is for a grid of {record.size} tokens; got {got}: {remedy}")


def is_site(module: nn.Module) -> bool:
    """Return True if a block runs at this module or replaced it."""
    return REPLACED in vars(module) or LOCATION in vars(module)


#: Hooks that check a block, as functions of partials with its record.
CHECKS = (check_block, check_grid)

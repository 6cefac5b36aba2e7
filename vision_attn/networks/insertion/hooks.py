"""Hooks that run a block at its site, and hooks that raise an error if other code has removed the site.

A block is a child of its target, or of a module inside or around the target. A hook at the target applies the block to
the feature map that the target returns or receives. The record of the block defines the site.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.fx import Proxy

from vision_attn.attention.blocks.gated_residual import GatedResidual
from vision_attn.attention.scopes import scoped_output
from vision_attn.errors import SiteError
from vision_attn.networks.insertion.record import InsertedBlock
from vision_attn.networks.layout import apply_to_element, count_prefix, from_map, to_map, token_grid
from vision_attn.networks.network import NORMS

#: The attribute in which a block stores its :class:`InsertedBlock`.
RECORD = "insertion"

#: The attribute of a target that locates its block. For a block inside the target, it is the record, which contains the
#: path. For a block that is a child of a module around the target, it is the block. In a copy of the target, the record
#: is another object.
LOCATION = "inserted_at"

#: Other layers that graph transformations fuse or remove.
FUSED = (nn.modules.conv._ConvNd, nn.Linear, nn.modules.dropout._DropoutNd)

#: The attribute in which a block stores the module that it replaced. The module is not a child, so its keys are not in
#: the state dict of the model.
REPLACED = "replaced"


def run_after(module: nn.Module, args: tuple[object, ...], output: object) -> object:
    """Run a block on the output of its target, in a forward hook.

    The block is found by name, so that copies and pickles of a model run their own blocks.
    """
    # fuse_modules moves the hook to another module, which has no block.
    return run_block(get_block(module), output) if LOCATION in vars(module) else output


def run_before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Run a block on the input of its target, in a forward pre-hook."""
    block = get_block(module)
    if isinstance(vars(block)[RECORD].element, str):
        return args, run_block(block, kwargs)
    return run_block(block, args), kwargs


def get_block(module: nn.Module) -> nn.Module:
    """Return the block that runs at a module; if a block replaced the module, return this block."""
    location: Any = vars(module).get(LOCATION, module)
    return module.get_submodule(location.block_path) if isinstance(location, InsertedBlock) else location


def check_block(owner: nn.Module, args: Any, *, target: str, path: str | None, record: InsertedBlock) -> None:
    """Check in a forward pre-hook of ``owner`` that a block still runs at a module inside.

    Other code may have replaced the target. If the new module is a norm, such as a frozen batch norm, a block outside
    its target, at ``path``, is attached to it. For any other replaced or fused module, an error is raised.
    """
    try:
        module, outside = owner.get_submodule(target), None if path is None else owner.get_submodule(path)
    except AttributeError:
        raise missing_block_error(record, "removed") from None
    if outside is None:
        runs = any(is_site(x) and (not is_fusible(x) or vars(x).get(LOCATION) is record) for x in module.modules())
    else:
        runs = any(vars(part).get(LOCATION) is outside for part in module.modules())
    # In a replica of ``nn.DataParallel``, the site still refers to the block of the original network.
    replicated = LOCATION in vars(module) and getattr(module, "_is_replica", False)
    if not runs and outside is not None and (is_norm(module) or replicated):
        hook_(module, outside)
    elif not runs:
        raise missing_block_error(record, f"replaced by {type(module).__name__}")
    tracers: list[Any] = [x.tracer for x in args if isinstance(x, Proxy)]
    if outside is not None and any(tracer.is_leaf_module(module, target) for tracer in tracers):
        raise tracing_error(module, record)


def missing_block_error(record: InsertedBlock, change: str) -> SiteError:
    """Return the error for a block whose target other code has removed or replaced."""
    remedy = "Call va.remove_(model), and replace, fuse and reparameterize modules before inserting blocks"
    return SiteError(f"the block at {record.site!r} no longer runs: the module there was {change}. {remedy}")


def refuse_tracing(module: nn.Module, args: tuple[object, ...]) -> None:
    """Raise in a forward pre-hook of a norm if it is traced, because the graph would not contain the block."""
    if any(isinstance(x, Proxy) for x in args):
        raise tracing_error(module, vars(get_block(module))[RECORD])


def tracing_error(module: nn.Module, record: InsertedBlock) -> SiteError:
    """Return the error for a block inside a module that graph transformations fuse or remove."""
    why = f"fusing or removing the {type(module).__name__} would remove the block"
    remedy = "Trace, fuse or quantize before inserting, or insert after a residual block"
    return SiteError(f"the block at {record.site!r} cannot be traced by torch.fx: {why}. {remedy}")


def hook_(module: nn.Module, block: nn.Module) -> None:
    """Register the hook that runs a block, before older hooks, so that feature taps receive the block's output."""
    record: InsertedBlock = vars(block)[RECORD]
    vars(module)[LOCATION] = block if record.block_path.startswith(".") else record
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    if run_after in hooks or run_before in hooks:
        return  # Replicas of ``nn.DataParallel`` already have the hook.
    if record.at == "before":
        module.register_forward_pre_hook(run_before, with_kwargs=True, prepend=True)
    else:
        module.register_forward_hook(run_after, prepend=True)
    if type(module).__module__.startswith(("torch.nn", "torch.ao.nn")):
        vars(module)["__module__"] = __name__  # With this name torch.fx traces into it, and the block becomes a node.
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
    """Return the value with the block applied to the feature map in it."""
    record: Any = block.insertion
    layout, size = record.layout, record.map_size

    def run_on(x: Tensor) -> Tensor:
        if "(" in layout and x.shape[1] != count_prefix(layout) + record.tokens:
            raise grid_error(record, f"{x.shape[1] - count_prefix(layout)} tokens")
        x_map = to_map(x, layout, size)
        if isinstance(x_map, Proxy):  # A traced graph contains the block as one node.
            path = x_map.tracer.path_of_module(block)
            return from_map(x, x_map.tracer.create_proxy("call_module", path, (x_map,), {}), layout)
        y = block(x_map)
        return from_map(x, y if isinstance(block, GatedResidual) else scoped_output(block, x_map, y), layout)

    return apply_to_element(value, record.element, run_on)


def check_grid(network: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], record: InsertedBlock) -> None:
    """Raise for images with the same number of tokens in another grid, such as 448×112 instead of 224×224 pixels."""
    images = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() == len(record.input_shape))
    size = next((tuple(x.shape[2:]) for x in images), ())
    if len(size) != 2 or size == record.input_shape[2:]:
        return
    grid = token_grid(record.tokens, *size)
    if grid not in (None, record.map_size):
        raise grid_error(record, f"{grid[0]}×{grid[1]} for images of {size[0]}×{size[1]}")


def grid_error(record: InsertedBlock, got: str) -> ValueError:
    """Return the error for tokens of another grid than the grid of a block."""
    remedy = "Insert the block with an example_input of the size that you use"
    return ValueError(f"the block at {record.site!r} expects a grid of {record.size} tokens, got {got}. {remedy}")


def is_site(module: nn.Module) -> bool:
    """Return True if a block runs at this module, or if the module is a block that replaced another module."""
    return REPLACED in vars(module) or LOCATION in vars(module)


#: Hooks that check a block; they are registered as partials with its record.
CHECKS = (check_block, check_grid)

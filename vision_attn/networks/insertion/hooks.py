"""Hooks that run a block at its target, and hooks that raise an error if the block no longer runs.

Each hook is a partial of a function in this module, and refers to its block. Copies and pickles of a model therefore
run their own blocks. A block inside its target is found by its path from the target, so that a module that other code
puts in its place, such as a wrapper of PEFT or FSDP, runs instead.
"""

import threading
from collections.abc import Callable, Collection, Container, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from vision_attn.attention.blocks.gated_residual import is_residual
from vision_attn.attention.graphs import is_symbolic
from vision_attn.attention.recomputation import backward_pass
from vision_attn.attention.scopes import scoped_output, scoped_values
from vision_attn.errors import SiteError
from vision_attn.networks.insertion.attributes import SUBSTITUTE, get_record, is_inserted
from vision_attn.networks.insertion.record import InsertedBlock
from vision_attn.networks.inspection import feature_maps
from vision_attn.networks.inspection.network import CONVS, NORMS, hook_dicts
from vision_attn.networks.inspection.selection import ancestor_paths, find_module, require_module
from vision_attn.networks.inspection.wrappers import unwrap_model

#: Layers other than norms that graph transformations fuse or remove.
FUSED = (*CONVS, nn.Linear, nn.Dropout)


class Contexts(threading.local):
    """Second feature maps of the running forward pass in a thread, by the block that will process them.

    The second part of a key is the backward pass that computes a checkpointed segment again, and -1 otherwise.
    """

    def __init__(self) -> None:
        self.maps: dict[tuple[nn.Module, int], Tensor] = {}


CONTEXTS = Contexts()


def keep_context(module: nn.Module, args: tuple[object, ...], output: object, *, block: nn.Module) -> None:
    """Keep the second feature map of a block until the block runs, in a forward hook."""
    if not is_inserted(block):  # removed from a part of the network
        return
    second: Any = get_record(block).second

    def keep(x: Tensor) -> Tensor:
        CONTEXTS.maps[block, backward_pass()] = feature_maps.to_map(x, second.layout, second.size)
        return x

    if feature_maps.has_element(output, second.element):
        feature_maps.apply_to_element(output, second.element, keep)


def find_context(block: nn.Module, original: nn.Module) -> dict[str, Tensor]:
    """Return the second feature map as a keyword argument; empty if the block has none."""
    record = get_record(block)
    if record.second is not None:
        if (found := CONTEXTS.maps.pop((original, backward_pass()), None)) is None:
            what = f"the block at {record.site!r} has no context: {record.second.path!r} did not run before it"
            remedy = "Choose a context that runs earlier, checkpoint both modules in one segment"
            raise SiteError(f"{what}. {remedy}, and compile both modules or neither")
        return {"context": found}
    if record.context_shape is None:
        return {}
    (values,) = scoped_values(block, "context")
    if not values:
        remedy = "Run the model inside va.context(model, …); to export it, enter va.context in the forward of a module"
        raise SiteError(f"the block at {record.site!r} requires a context. {remedy}")
    if torch.compiler.is_exporting() and not is_symbolic(values[-1]):
        raise constant_error(record)
    return {"context": values[-1]}


def constant_error(record: InsertedBlock) -> SiteError:
    """Return the error for features of ``va.context`` that a traced or exported graph would contain."""
    what = f"the context of the block at {record.site!r} would be a constant of the graph"
    return SiteError(f"{what}. Trace or export a module whose forward() receives the features and enters va.context")


def drop_context(model: nn.Module, args: object, output: object, *, block: nn.Module) -> None:
    """Drop the second feature map of a block that did not run, in a hook that is also called after an error."""
    CONTEXTS.maps.pop((block, backward_pass()), None)


def find_block(module: nn.Module, block: nn.Module, path: str | None) -> nn.Module | None:
    """Return the module that runs at a target: the one at a path inside the target, or else the block outside."""
    return getattr(module, SUBSTITUTE, (block,))[0] if path is None else find_module(module, path)


def run_block(module: nn.Module, args: Any, value: Any, *, block: nn.Module, path: str | None) -> Any:
    """Run a block on the output of its target in a forward hook, or on an argument of the target in a pre-hook.

    ``value`` is the output, or the keyword arguments. A replica has the hooks of the original.
    """
    if (running := find_block(module, block, path)) is None:
        raise missing_block_error(get_record(block), "replaced")
    record, context = get_record(running), find_context(running, block)
    layout, size, element = record.target.layout, record.map_size, record.target.element
    before = record.target.at == "before"
    if not feature_maps.has_element(args if before and not isinstance(element, str) else value, element):
        what = f"the block at {record.site!r} does not find its feature map: the module there"
        how = "was called with other arguments" if before else "returned another value"
        remedy = "Insert the block with an example of this call"
        raise SiteError(f"{what} {how} than for the example_input of the insertion. {remedy}")

    def run_on(x: Tensor) -> Tensor:
        if not isinstance(x, Proxy) and x.dim() == layout.count(" ") and "(" not in layout:  # without a batch axis
            return run_on(x[None])[0]
        if "(" in layout and x.shape[1] != feature_maps.count_prefix(layout) + record.tokens:
            raise grid_error(record, f"{x.shape[1] - feature_maps.count_prefix(layout)} tokens")
        x_map = feature_maps.to_map(x, layout, size)
        if isinstance(x_map, Proxy):  # A traced graph contains the block as one node.
            if any(isinstance(features, Tensor) for features in context.values()):
                raise constant_error(record)
            node = x_map.tracer.path_of_module(running)
            return feature_maps.from_map(x, x_map.tracer.create_proxy("call_module", node, (x_map,), context), layout)
        if x.is_quantized:
            what = f"the block at {record.site!r} cannot process a quantized tensor ({x.dtype})"
            raise SiteError(f"{what}. Quantize before va.insert_, and dequantize the feature map in front of the block")
        y = running(x_map, **context)
        y = y if is_residual(running) else scoped_output(running, x_map, y)
        return feature_maps.from_map(x, y, layout)

    return feature_maps.apply_to_call(args, value, () if before else (value,), element, run_on)


def still_runs(module: nn.Module, block: nn.Module, found: nn.Module | None) -> bool:
    """Return True if a block runs at a module or inside it, which may be a wrapper, such as a layer of PEFT.

    Args:
        module: the module at the target of the block.
        block: the block.
        found: the module at the path of the block.
    """
    for part, hook in hooks_inside(module, (run_block,)):
        path = hook.keywords["path"]
        runs = found if path is None else find_module(part, path)
        if hook.keywords["block"] is block and runs is not None:
            return True
    return False


def check_block(owner: nn.Module, args: Any, *, block: nn.Module, target: str, child: str) -> None:
    """Check in a forward pre-hook of ``owner`` that a block still runs at its target.

    If the target was replaced by another norm, such as a frozen batch norm, the block is attached to it. For any other
    replaced or fused module, an error is raised.
    """
    if not is_inserted(block):  # removed from a part of the network
        return
    record, module = get_record(block), find_module(owner, target)
    if module is None:
        raise missing_block_error(record, "removed")
    inside = child[len(target) + 1 :] if child.startswith(f"{target}.") else None
    found = find_module(owner, child)
    if not still_runs(module, block, found):
        if not is_norm(module) or found is None:
            raise missing_block_error(record, f"replaced by {type(module).__name__}")
        if (copied := block_at(module)) is not None:
            unhook_(module, [copied])
        run_at_(module, block, inside)
    if found is not None and inside is None and found is not find_block(module, block, None):
        setattr(module, SUBSTITUTE, (found,))
    tracers: list[Any] = [x.tracer for x in args if isinstance(x, Proxy)]
    if inside is None and any(tracer.is_leaf_module(module, target) for tracer in tracers):
        why = f"fusing or removing the {type(module).__name__} would remove the block"
        remedy = "Trace, fuse or quantize before inserting, or insert after a residual block"
        raise SiteError(f"the block at {record.site!r} cannot be traced by torch.fx: {why}. {remedy}")


def checked_network(model: nn.Module) -> nn.Module:
    """Return the network inside wrappers, after :func:`check_block` for each block, as in a forward pass."""
    network = unwrap_model(model)
    for owner, hook in hooks_inside(network, (check_block,)):
        hook(owner, ())
    return network


def missing_block_error(record: InsertedBlock, change: str) -> SiteError:
    """Return the error for a block whose target other code has removed or replaced."""
    remedy = "Call va.remove_(model), and replace, fuse and reparameterize modules before inserting blocks"
    return SiteError(f"the block at {record.site!r} no longer runs: the module there was {change}. {remedy}")


def check_grid(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], *, block: nn.Module) -> None:
    """Raise for images with the same number of tokens in another grid, such as 448×112 instead of 224×224 pixels."""
    if not is_inserted(block):  # removed from a part of the network
        return
    record = get_record(block)
    tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
    size = next((tuple(x.shape[2:]) for x in tensors if x.dim() == len(record.target.input_shape)), ())
    if len(size) == 2 and size != record.target.input_shape[2:]:
        grid = feature_maps.token_grid(record.tokens, *size)
        if grid not in (None, record.map_size):
            raise grid_error(record, f"{grid[0]}×{grid[1]} for images of {size[0]}×{size[1]}")


def grid_error(record: InsertedBlock, got: str) -> ValueError:
    """Return the error for tokens of another grid than the grid of a block."""
    remedy = "Insert the block with an example_input of the size that you use"
    return ValueError(f"the block at {record.site!r} expects a grid of {record.size} tokens, got {got}. {remedy}")


def is_norm(module: nn.Module) -> bool:
    return isinstance(module, NORMS) or "Norm" in type(module).__name__


#: Hooks of a block.
HOOKS = (run_block, keep_context, drop_context, check_block, check_grid)

# --- hooks of a module ------------------------------------------------------------------------------------------------


def our_hooks(module: nn.Module, functions: Container[Any] = HOOKS) -> Iterator[partial[Any]]:
    """Yield the hooks of a module that are partials of some functions, by default of those of blocks.

    Hooks are found by their function, because their handles do not survive copies and pickles.
    """
    pre_hooks, hooks, *_ = hook_dicts(module)
    for hook in (*hooks.values(), *pre_hooks.values()):
        if isinstance(hook, partial) and hook.func in functions:
            yield hook


def hooks_inside(network: nn.Module, functions: Container[Any] = HOOKS) -> Iterator[tuple[nn.Module, partial[Any]]]:
    """Yield the modules of a network with their hooks, as :func:`our_hooks` does for one module."""
    yield from ((module, hook) for module in network.modules() for hook in our_hooks(module, functions))


def remove_hooks_(module: nn.Module, condition: Callable[[partial[Any]], bool]) -> None:
    """Remove the hooks of a module that are partials and meet a condition."""
    registers: tuple[Callable[..., Any], ...] = module.register_forward_pre_hook, module.register_forward_hook
    for hooks, register in zip(hook_dicts(module), registers, strict=False):
        if keys := [key for key, hook in hooks.items() if isinstance(hook, partial) and condition(hook)]:
            handle = register(check_grid)  # a handle also removes the options of a hook, given its number
            for key in (*keys, handle.id):
                handle.id = key
                handle.remove()


def hook_(model: nn.Module, block: nn.Module) -> None:
    """Register the hooks of a block that a model contains."""
    record = get_record(block)
    inside = record.block_path[len(record.site) + 1 :] if record.is_child else None
    run_at_(require_module(model, record.site), block, inside)
    if record.second is not None:
        require_module(model, record.second.path).register_forward_hook(partial(keep_context, block=block))
        # The network and each part around both modules, which other code may call alone, can fail between them.
        common = [path for path in ancestor_paths(record.site) if f"{record.second.path}.".startswith(f"{path}.")]
        for path in ("", *common):
            model.get_submodule(path).register_forward_hook(partial(drop_context, block=block), always_call=True)
    # The network, and the nearest module around the block that other code may call alone, check that the block runs.
    around = ancestor_paths(record.site if record.is_child else record.block_path)
    called = [path for path in around if type(model.get_submodule(path)).forward is not nn.Module.forward]
    for path in {"", *called[-1:]}:
        start = len(path) + bool(path)
        check = partial(check_block, block=block, target=record.site[start:], child=record.block_path[start:])
        model.get_submodule(path).register_forward_pre_hook(check)
    if "(" in record.target.layout:
        # Methods such as forward_features do not run the hooks of the network, but run its patch embedding.
        convolutions = (x for x in model.modules() if isinstance(x, CONVS))
        first = next((x for x in convolutions if x.in_channels == record.target.input_shape[1]), model)
        # Other code replaces the convolution, so that the module around it checks the images as well.
        for module in {first, *(x for x in model.modules() if first in x.children())}:
            module.register_forward_pre_hook(partial(check_grid, block=block), with_kwargs=True)


def run_at_(module: nn.Module, block: nn.Module, path: str | None) -> None:
    """Register the hook that runs a block, before older hooks, so that feature taps receive the block's output."""
    hook = partial(run_block, block=block, path=path)
    if get_record(block).target.at == "before":
        module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
    else:
        module.register_forward_hook(hook, prepend=True)


def unhook_(module: nn.Module, blocks: Collection[nn.Module]) -> None:
    """Remove the hooks of some blocks from a module."""
    vars(module).pop(SUBSTITUTE, None)  # a block that stays sets it again in its next forward pass
    remove_hooks_(module, lambda hook: hook.func in HOOKS and hook.keywords["block"] in blocks)


def block_at(module: nn.Module) -> nn.Module | None:
    """Return the block that runs at a module, or None."""
    hook = next(our_hooks(module, (run_block,)), None)
    return None if hook is None else find_block(module, **hook.keywords)


def context_path(network: nn.Module, site: str) -> str | None:
    """Return the path of the module that gives the second feature map of the block at a site; None if there is none."""
    blocks = {hook.keywords["block"] for hook in our_hooks(network.get_submodule(site), (run_block,))}
    for path, module in network.named_modules():
        if any(hook.keywords["block"] in blocks for hook in our_hooks(module, (keep_context,))):
            return path
    return None

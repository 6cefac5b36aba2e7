"""Run a network in evaluation mode without side effects on its tensors, hooks and random states."""

import inspect
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from vision_attn.attention.scopes import scope
from vision_attn.checks import get_version
from vision_attn.networks.inspection.wrappers import unwrap_model

#: Normalization layers. Their scales have no weight decay, whatever their shape.
NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
)

#: Convolutions on feature maps with any number of axes.
CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

#: A running call of a module: the module, its arguments and its keyword arguments.
Call: TypeAlias = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def running_calls() -> Iterator[Call]:
    """Yield the running calls of modules in this thread, starting with the innermost.

    The calls are read from the stack: hooks would also run in other threads, and torch does not support that one thread
    removes a hook while another one calls the module.
    """
    frame, code = inspect.currentframe(), nn.Module.__call__.__code__
    while frame is not None:
        if frame.f_code is code:
            (module,), args, kwargs, values = inspect.getargvalues(frame)
            yield values[module], values[str(args)], values[str(kwargs)]
        frame = frame.f_back


@contextmanager
def fixed_seed(model: nn.Module) -> Iterator[None]:
    """Seed the random number generators of torch, NumPy and Python, and restore their states afterwards."""
    available = torch.cuda.is_available()  # Fake tensors may be on a GPU that does not exist.
    gpus = sorted({parameter.device.index for parameter in model.parameters() if parameter.is_cuda and available})
    with torch.random.fork_rng(gpus), ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        random.seed(0)
        np.random.seed(0)
        # torch.manual_seed would also seed GPUs that are not in use yet, and their state would not be restored.
        for generator in (torch.default_generator, *(torch.cuda.default_generators[index] for index in gpus)):
            generator.manual_seed(0)
        yield


@contextmanager
def kept_tensors(model: nn.Module, parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Run a model on copies of its buffers, and restore the parameters that a forward pass changes.

    Args:
        model: the network.
        parameters: parameters that may change in place. Only these are copied.

    Yields:
        A list that contains the parameters that have changed in place, when the context ends.

    >>> norm = nn.BatchNorm2d(3)
    >>> with kept_tensors(norm, norm.parameters()) as changed:
    ...     y = norm(torch.ones(2, 3, 4, 4))
    >>> changed, norm.running_mean
    ([], tensor([0., 0., 0.]))
    """
    registered = [(x, own_tensors(x), {*dir(x)}) for x in model.modules()]
    # Meta tensors have no values, and inference tensors no version.
    values = [(x, get_version(x), x.detach().clone()) for x in parameters if not (x.is_meta or x.is_inference())]
    copies = {id(x): x.detach().clone() for x in model.buffers()}
    changed: list[Tensor] = []
    try:
        # Batch norm and fused operations change a buffer without a new version, so buffers are not restored by version.
        for module, own, _ in registered:
            set_tensors_(module, {name: copies[id(x)] for name, x in own.items() if id(x) in copies})
        yield changed
    finally:
        for module, own, names in registered:
            # A buffer that did not exist is kept. A name that existed without a tensor becomes None again.
            now = own_tensors(module)
            set_tensors_(module, {name: own.get(name) for name in names if now.get(name) is not own.get(name)})
        with torch.no_grad():
            for x, version, value in values:
                if get_version(x) != version:
                    x.copy_(value)
                    changed.append(x)


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module itself, without its submodules."""
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(recurse=False, remove_duplicate=False))}


def set_tensors_(module: nn.Module, tensors: Mapping[str, Tensor | None]) -> None:
    """Set parameters and buffers, also in a class with another ``__setattr__``."""
    for name, x in tensors.items():
        nn.Module.__setattr__(module, name, x)  # type: ignore[arg-type]


def hook_dicts(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return the pre-hooks and hooks of the forward pass, and of the backward pass, each by its number.

    torch has no public list of hooks, and the handles of hooks are lost in copies.
    """
    return module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Leave out the forward hooks of a model, except the hooks of torch, such as weight norm, and of this library."""
    every = [(hooks, dict(hooks)) for module in model.modules() for hooks in hook_dicts(module)[:2]]
    try:
        for hooks, before in every:
            for key, hook in before.items():
                if not is_library_hook(hook):
                    del hooks[key]
        yield
    finally:
        for hooks, before in every:
            hooks.clear()
            hooks.update(before)


def is_library_hook(hook: Any) -> bool:
    function = getattr(hook, "func", hook)  # a partial
    package = getattr(function, "__module__", None) or type(function).__module__
    return str(package).partition(".")[0] in ("torch", "vision_attn")


@contextmanager
def quiet_eval(model: nn.Module, training: bool = False) -> Iterator[None]:
    """Run a model in evaluation and eager mode without gradients, and restore the mode of every module afterwards.

    With ``training``, the model runs in training mode instead.

    >>> model = nn.Dropout()
    >>> with quiet_eval(model):
    ...     model.training, torch.is_grad_enabled()
    (False, False)
    >>> model.training
    True
    """
    modes, network = [(module, module.training) for module in model.modules()], unwrap_model(model)
    try:
        for module, _ in modes:
            module.training = training  # A network may override train(), so it is not called.
        # Compiled models run in eager mode, because graphs do not run hooks.
        with torch.no_grad(), scope(network, "eager", {model: True}), ExitStack() as stack:
            for device in {parameter.device.type for parameter in model.parameters()} - {"meta"}:
                stack.enter_context(torch.autocast(device, enabled=False))  # Feature maps keep the network's dtype.
            yield
    finally:
        for module, before in modes:
            module.training = before

"""A backbone as it stands: inside its wrappers, row by row of its modules, and run on an example without a trace."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.errors import SiteError

__all__ = [
    "Hook",
    "changeable",
    "declared_stages",
    "end_of_sequential",
    "example_images",
    "modules_around",
    "plain_network",
    "quiet_eval",
    "run_quietly",
]

#: A forward hook that is given keyword arguments, too.
Hook = Callable[[nn.Module, Any, Any, Any], Any]

#: Classes that count a network's parameters when they wrap it, by name: importing them all takes a while.
SYNCHRONISED = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


def plain_network(model: nn.Module) -> nn.Module:
    """The network inside the wrappers of torch.compile and of running in parallel.

    >>> plain_network(nn.DataParallel(nn.ReLU()))
    ReLU()
    """
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and (isinstance(model, nn.DataParallel) or is_synchronised(model)):
            inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def is_synchronised(module: nn.Module) -> bool:
    return any(kind.__name__ in SYNCHRONISED for kind in type(module).__mro__)


def changeable(model: nn.Module) -> nn.Module:
    """The network inside its wrappers, where modules can still be put in and taken out.

    >>> changeable(nn.DataParallel(nn.ReLU()))
    ReLU()
    """
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise SiteError(f"{type(module).__name__}: a TorchScript program cannot be changed: insert before tracing")
        if is_synchronised(module):
            raise SiteError(
                f"model is wrapped in {type(module).__name__}, which has counted its parameters already: insert into "
                "the network and wrap it then"
            )
    return plain_network(model)


def example_images(model: nn.Module, example_input: Tensor | tuple[int, ...] | None) -> Tensor:
    """The images of a dry run, ``(b, c, h, w)``: those given, or empty ones of the shape given or of the model's own.

    >>> example_images(nn.Conv2d(1, 8, 3), None).shape
    torch.Size([1, 1, 224, 224])
    """
    if isinstance(example_input, Tensor):
        return example_input
    if example_input is None:
        config = getattr(model, "pretrained_cfg", None) or {}
        channels, height, width = config.get("input_size", (3, 224, 224))
        # timm's configuration is of the published weights, and does not know of other channels.
        channels = next((module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)), channels)
        example_input = (1, channels, height, width)
    shape = tuple(example_input) if isinstance(example_input, Sequence) else ()
    if len(shape) != 4 or any(isinstance(side, bool) or not isinstance(side, int) or side < 1 for side in shape):
        raise ValueError(
            "example_input must be an image batch or its shape (batch, channels, height, width), of whole numbers; got "
            f"{example_input!r}"
        )
    reference = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    return torch.zeros(shape, device=reference.device, dtype=reference.dtype)


def declared_stages(model: nn.Module) -> list[tuple[str, int]]:
    """The path and channels of the stages in timm's ``feature_info``; empty where a model has none."""
    info = getattr(model, "feature_info", None)
    entries = getattr(info, "info", info) or []
    return [(entry.get("module") or "", entry["num_chs"]) for entry in entries]


def end_of_sequential(model: nn.Module, name: str, index: int = -1) -> str:
    """The module that gives a plain Sequential its output or, at index 0, takes what it takes; any other is its own.

    A Sequential calls every child it has, so a block cannot be one of them without being run in their row.
    """
    module = model.get_submodule(name)
    while True:
        # The wrapper of torch.compile has no hooks of its own.
        if isinstance(inner := module._modules.get("_orig_mod"), nn.Module):
            name, module = f"{name}._orig_mod", inner
        elif type(module).forward is nn.Sequential.forward and len(module._modules):
            child = list(module._modules)[index]
            name, module = f"{name}.{child}", module.get_submodule(child)
        else:
            return name


def modules_around(name: str) -> list[str]:
    """The paths of the modules that a module is inside of, without the model."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def run_quietly(model: nn.Module, example: Tensor, hooks: Mapping[str, Hook] | None = None) -> object:
    """What a model gives for an example, in one forward that leaves no trace in it.

    Hooks, by the paths of their modules, are called as ``hook(module, args, kwargs, output)`` and then removed.
    """
    try:
        with quiet_eval(model), ExitStack() as stack:
            for path, hook in (hooks or {}).items():
                handle = model.get_submodule(path).register_forward_hook(hook, with_kwargs=True)
                stack.callback(handle.remove)
            return model(example)
    except Exception as error:
        raise SiteError(
            f"the model does not run on an example of shape {tuple(example.shape)} ({type(error).__name__}: {error}): "
            "give one that it takes as example_input"
        ) from error


@contextmanager
def quiet_eval(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, uncompiled; afterwards every module is in the mode it was in.

    >>> model = nn.Dropout()
    >>> with quiet_eval(model):
    ...     model.training, torch.is_grad_enabled()
    (False, False)
    >>> model.training
    True
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False  # without its train(), which may keep account of what it is told
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for device in {parameter.device.type for parameter in model.parameters()} - {"meta"}:
                stack.enter_context(torch.autocast(device, enabled=False))  # maps have the type of the network
            if "torch._dynamo" in sys.modules:  # parts of the model may be compiled, and are not to be again for this
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
    finally:
        for module, training in modes:
            module.training = training

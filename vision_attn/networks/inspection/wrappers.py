"""Find the network inside wrappers, such as those of ``torch.compile`` and of data parallelism."""

import gc
import re
from collections.abc import Collection, Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn

from vision_attn.errors import SiteError

#: The child of the wrapper of ``torch.compile``.
COMPILED = "_orig_mod"

#: A part that torch.compile, activation checkpointing or FSDP adds to the path of a wrapped layer.
WRAPPER = re.compile(rf"{COMPILED}|_[a-z]+_wrapped_module")

#: Class names of wrappers that register the parameters when they are created. Importing the classes would be slow.
SYNCHRONIZED = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the network inside the wrappers of ``torch.compile`` and of data parallelism.

    >>> unwrap_model(nn.DataParallel(nn.ReLU()))
    ReLU()
    """
    if not isinstance(model, nn.Module):
        remedy = "Create it first, for example with timm.create_model" if isinstance(model, str) else "Pass an instance"
        raise TypeError(f"model must be a torch.nn.Module, got {model!r:.80}. {remedy}")
    while True:
        inner = getattr(model, COMPILED, None)
        if inner is None and (isinstance(model, nn.DataParallel) or is_synchronized(model)):
            inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def unwrap_average(model: nn.Module) -> nn.Module:
    """Return the network inside a weight average of torch or timm, without wrappers."""
    is_average = type(model).__name__ in ("AveragedModel", "ModelEmaV2", "ModelEmaV3")
    return unwrap_model(model.get_submodule("module") if is_average else model)


def unwrap_key(key: str, wrappers: Collection[str] = ()) -> str:
    """Return the path of a module or tensor in the network without wrappers; ``wrappers`` are further parts.

    >>> unwrap_key("layer3._orig_mod.0.conv1.weight")
    'layer3.0.conv1.weight'
    """
    return ".".join(part for part in key.split(".") if part not in wrappers and not WRAPPER.fullmatch(part))


def is_layer_wrapper(module: nn.Module) -> bool:
    """Return True for a module that torch.compile, activation checkpointing or FSDP put around a layer."""
    return any(WRAPPER.fullmatch(name) for name, _ in module.named_children())


def layer_wrappers(network: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return the wrappers of single layers, as in :func:`is_layer_wrapper`, by the module inside."""
    wrappers = filter(is_layer_wrapper, network.modules())
    return {layer: wrapper for wrapper in wrappers for layer in wrapper.children()}


def is_synchronized(module: nn.Module) -> bool:
    return any(kind.__name__ in SYNCHRONIZED for kind in type(module).__mro__)


def require_modifiable(model: nn.Module, call: str) -> nn.Module:
    """Return the network inside its wrappers; raise if a call can no longer add or remove modules.

    >>> require_modifiable(nn.DataParallel(nn.ReLU()), "va.insert_")
    ReLU()
    """
    network = unwrap_model(model)
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise SiteError(f"model contains a TorchScript program, which cannot be changed. Call {call} before tracing")
    if (wrapper := synchronizer(model)) is not None:
        what = f"model is wrapped in {wrapper}, which does not synchronize parameters that are added later"
        raise SiteError(f"{what}. Call {call} on the network before wrapping it")
    return network


def synchronizer(model: nn.Module) -> str | None:
    """Return the name of the class that synchronizes a model, or a model that contains it, between processes, or None.

    A network does not refer to the wrapper around it, so the wrapper is searched among all objects.
    """
    around: Iterable[Any] = ()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        gc.collect()  # removes wrappers that are no longer used
        around = (x for x in gc.get_objects() if issubclass(type(x), nn.Module) and is_synchronized(x))
    modules = chain(model.modules(), (x for x in around if any(model is part for part in x.modules())))
    return next((type(x).__name__ for x in modules if is_synchronized(x)), None)

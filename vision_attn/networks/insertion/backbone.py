"""Helpers for a network: unwrapping, example inputs, and evaluation mode without side effects."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from vision_attn.attention.scopes import scope
from vision_attn.checks import check_type
from vision_attn.errors import SiteError

#: Default sizes of audio (one second at 16 kHz), images, and video (16 frames), by number of axes.
DEFAULT_SIZES = {1: (16_000,), 2: (224, 224), 3: (16, 112, 112)}

#: Class names of wrappers that register the parameters when they are created. Importing the classes would be slow.
SYNCHRONIZED = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the network inside the wrappers of ``torch.compile`` and of data parallelism.

    >>> unwrap_model(nn.DataParallel(nn.ReLU()))
    ReLU()
    """
    check_type("model", model, nn.Module, "an nn.Module")
    while True:
        wraps = isinstance(model, nn.DataParallel) or is_synchronized(model)
        inner = getattr(model, "_orig_mod", getattr(model, "module", None) if wraps else None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def is_synchronized(module: nn.Module) -> bool:
    return any(kind.__name__ in SYNCHRONIZED for kind in type(module).__mro__)


def require_modifiable(model: nn.Module) -> nn.Module:
    """Return the network inside its wrappers; raise if modules can no longer be inserted or removed.

    >>> require_modifiable(nn.DataParallel(nn.ReLU()))
    ReLU()
    """
    network = unwrap_model(model)
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise SiteError(f"a TorchScript program ({type(module).__name__}) cannot be changed. Insert before tracing")
        if is_synchronized(module):
            raise SiteError(
                f"model is wrapped in {type(module).__name__}: insert into the network first and wrap it afterwards"
            )
    return network


@dataclass(frozen=True)
class Example:
    """Arguments of a forward pass; the tensors with the most axes are the images."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    #: number of axes of an image: one for audio, two for images, three for videos and volumes
    axes: int = 2

    @cached_property
    def image(self) -> Tensor:
        """The first image tensor: images, volumes, audio, or the input of a generator."""
        tensors = [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]
        if not tensors:
            raise ValueError(f"model must be called with images as tensors, got {self}")
        return max(float_tensors(tensors) or tensors, key=Tensor.dim)  # Integer images have no float tensor.

    @cached_property
    def count(self) -> int:
        """Number of images in a list of ``(c, h, w)`` tensors, as in detection models; 0 for a batch."""
        if self.image.dim() > 1 + self.axes:  # This is a list of batches, such as the two pathways of SlowFast.
            return 0
        lists = [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, (list, tuple))]
        return next((len(value) for value in lists if any(item is self.image for item in value)), 0)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the images: batch, channels and size."""
        return (self.count, *self.image.shape) if self.count else tuple(self.image.shape)

    @property
    def size(self) -> tuple[int, ...]:
        """Size of the images along one to three axes."""
        return self.shape[2:] or self.shape[1:]  # A batch (b, w) is audio without a channel axis.

    def __str__(self) -> str:
        keywords = (f"{name}={format_value(value)}" for name, value in self.kwargs.items())
        inputs = [*map(format_value, self.args), *keywords]
        return f"of shape {inputs[0]}" if len(inputs) == 1 and not self.kwargs else f"({', '.join(inputs)})"


def float_tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def format_value(value: object) -> str:
    """Format an argument for a message, with tensors replaced by their shapes."""
    return repr(tree_map_only(Tensor, lambda tensor: tuple(tensor.shape), value))


def make_example(model: nn.Module, example_input: Any = None) -> Example:
    """Return the arguments of a dry run: the given input, or random images of the given or default shape.

    >>> make_example(nn.Conv2d(1, 8, 3)).shape
    (1, 1, 224, 224)
    """
    if isinstance(example_input, Example):
        return example_input
    convolutions = [module for module in model.modules() if isinstance(module, nn.modules.conv._ConvNd)]
    images_2d = [module for module in convolutions if len(module.kernel_size) == 2]  # A Conv1d may process vectors.
    first = next(iter(images_2d or convolutions), None)
    axes = 2 if first is None else len(first.kernel_size)
    if example_input is None:
        example_input = default_shape(model, first, axes)
    if isinstance(example_input, Mapping) and float_tensors(dict(example_input)):
        return Example((), dict(example_input), axes)
    if isinstance(example_input, Tensor) or (isinstance(example_input, (tuple, list)) and float_tensors(example_input)):
        return Example(example_input if isinstance(example_input, tuple) else (example_input,), axes=axes)
    shape = tuple(example_input) if isinstance(example_input, Sequence) else ()
    counts = [isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in shape]
    if not all(counts) or len(shape) not in range(2, 6) or len(shape) == 1 + axes > 2:
        what = "images, their shape, or a tuple or dictionary of arguments that contains images"
        raise ValueError(f"example_input must be {what}, got {format_value(example_input)}")
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    # The images are random, because a network without biases maps zeros to zeros.
    images = torch.rand(shape, generator=torch.Generator().manual_seed(0), device="cpu")
    return Example((images.to(device=like.device, dtype=like.dtype),), axes=axes)


def default_shape(model: nn.Module, first: nn.Module | None, axes: int) -> tuple[int, ...]:
    """Return the shape of one image, read from the first convolution, the patch embedding or timm's configuration."""
    config = getattr(model, "pretrained_cfg", None) or {}
    channels, *size = config.get("input_size", (3, *DEFAULT_SIZES[axes]))
    # timm's configuration describes the published weights. The model may have other channels or another image size.
    img_size = getattr(getattr(model, "patch_embed", None), "img_size", None) or getattr(model, "image_size", None)
    if axes == 2 and img_size is not None:
        size = [img_size] * 2 if isinstance(img_size, int) else list(img_size)
    return (1, getattr(first, "in_channels", 0) or channels, *size)


def end_of_sequential(model: nn.Module, name: str, index: int = -1) -> str:
    """Return the path of the last module of a plain Sequential (of the first module for index 0), or the path itself.

    A block cannot be a child of a Sequential, which would call it as one of its layers. A ModuleList and the modules of
    a traced graph are never called, so their last module is used as well.
    """
    module = model.get_submodule(name)
    while True:
        kind = type(module)
        is_sequence = kind.forward is nn.Sequential.forward or isinstance(module, nn.ModuleList) or kind is nn.Module
        # The wrapper of torch.compile does not run hooks.
        if isinstance(inner := module._modules.get("_orig_mod"), nn.Module):
            name, module = f"{name}._orig_mod", inner
        elif is_sequence and len(module._modules):
            child = list(module._modules)[index]
            name, module = f"{name}.{child}", module.get_submodule(child)
        else:
            return name


def ancestor_paths(name: str) -> list[str]:
    """Return the paths of the modules that contain a module, except the model."""
    return list(accumulate(name.split(".")[:-1], lambda path, part: f"{path}.{part}"))


@contextmanager
def fixed_seed(model: nn.Module) -> Iterator[None]:
    """Seed the random number generators of torch, NumPy and Python, and restore their states afterwards."""
    available = torch.cuda.is_available()  # Fake tensors may be on a GPU that does not exist.
    gpus = sorted({parameter.device.index for parameter in model.parameters() if parameter.is_cuda and available})
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(gpus), ExitStack() as stack:
        stack.callback(random.setstate, python_state)
        stack.callback(np.random.set_state, numpy_state)
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
    registered = [(x, dict(x._parameters), dict(x._buffers)) for x in model.modules()]
    # Meta tensors have no values, and inference tensors no version.
    values = [(x, x._version, x.detach().clone()) for x in parameters if not (x.is_meta or x.is_inference())]
    copies = {id(x): x.detach().clone() for x in model.buffers()}
    changed: list[Tensor] = []
    try:
        # Batch norm and fused operations change a buffer without a new version, so buffers are not restored by version.
        for module, _, buffers in registered:
            module._buffers.update({name: x if x is None else copies[id(x)] for name, x in buffers.items()})
        yield changed
    finally:
        for module, own, buffers in registered:
            module._parameters.update(own)
            module._buffers.update(buffers)
        with torch.no_grad():
            for x, version, value in values:
                if x._version != version:
                    x.copy_(value)
                    changed.append(x)


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Leave out the forward hooks of a model, except the hooks of torch, such as weight norm, and of this library."""
    removed: list[tuple[Any, dict[int, Any]]] = []
    try:
        for module in model.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                if any(not is_library_hook(hook) for hook in hooks.values()):
                    removed.append((hooks, dict(hooks)))
                    for key in [key for key, hook in hooks.items() if not is_library_hook(hook)]:
                        del hooks[key]
        yield
    finally:
        for hooks, before in removed:
            hooks.clear()
            hooks.update(before)


def is_library_hook(hook: Any) -> bool:
    function = getattr(hook, "func", hook)  # a partial
    package = getattr(function, "__module__", None) or type(function).__module__
    return str(package).partition(".")[0] in ("torch", "vision_attn")


def uncompiled(model: nn.Module) -> AbstractContextManager[object]:
    """Return a context in which compiled models run in eager mode in this thread, because graphs do not run hooks."""
    # If dynamo is not loaded, no model is compiled. Importing it would take a second.
    return scope(unwrap_model(model), "eager", {model: True}) if "torch._dynamo" in sys.modules else nullcontext()


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
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = training  # A network may override train(), so it is not called.
        with torch.no_grad(), uncompiled(model), ExitStack() as stack:
            for device in {parameter.device.type for parameter in model.parameters()} - {"meta"}:
                stack.enter_context(torch.autocast(device, enabled=False))  # Feature maps keep the network's dtype.
            yield
    finally:
        for module, before in modes:
            module.training = before

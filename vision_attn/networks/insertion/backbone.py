"""A network as it stands: inside its wrappers, and run on an example without a trace."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from vision_attn.attention.scopes import scope
from vision_attn.checks import check_type
from vision_attn.errors import SiteError

#: A forward hook that is given keyword arguments, too.
Hook = Callable[[nn.Module, Any, Any, Any], Any]

#: Images, sound and video where nothing else is said: a second at 16 kHz, pixels, 16 frames.
USUAL = {1: (16_000,), 2: (224, 224), 3: (16, 112, 112)}

#: Classes that count a network's parameters when they wrap it, by name: importing them all takes a while.
SYNCHRONISED = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


def plain_network(model: nn.Module) -> nn.Module:
    """The network inside the wrappers of torch.compile and of running in parallel.

    >>> plain_network(nn.DataParallel(nn.ReLU()))
    ReLU()
    """
    check_type("model", model, nn.Module, "a network, an nn.Module")
    while True:
        wraps = isinstance(model, nn.DataParallel) or is_synchronised(model)
        inner = getattr(model, "_orig_mod", getattr(model, "module", None) if wraps else None)
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
    network = plain_network(model)
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise SiteError(f"{type(module).__name__}: a TorchScript program cannot be changed: insert before tracing")
        if is_synchronised(module):
            raise SiteError(f"model is wrapped in {type(module).__name__}: insert into the network and wrap it then")
    return network


@dataclass(frozen=True)
class Example:
    """The arguments of a forward pass; the images among them are all its tensors with the most axes."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    #: of an image: one for sound, two for photographs, three for videos and volumes
    axes: int = 2

    @cached_property
    def image(self) -> Tensor:
        """The first of the images: photographs, volumes, sounds, or what a generator makes them of."""
        leaves = tree_leaves((self.args, self.kwargs))
        found = tensors_in(leaves) or [leaf for leaf in leaves if isinstance(leaf, Tensor)]  # images in whole numbers
        if found:
            return max(found, key=Tensor.dim)
        raise ValueError(f"model must be called with images as tensors; got {self}")

    @cached_property
    def count(self) -> int:
        """How many there are in a list, as detection models take them, each ``(c, h, w)``; 0 if they are a batch."""
        if self.image.dim() > 1 + self.axes:  # a list of batches, such as the pathways of SlowFast
            return 0
        lists = [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, (list, tuple))]
        return next((len(value) for value in lists if any(item is self.image for item in value)), 0)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the images: batch, channels, and the size."""
        return (self.count, *self.image.shape) if self.count else tuple(self.image.shape)

    @property
    def size(self) -> tuple[int, ...]:
        """Of the images, along one to three axes. What has a batch and one more axis is sound without channels."""
        return self.shape[2:] or self.shape[1:]

    def __str__(self) -> str:
        words = [*map(shown, self.args), *(f"{name}={shown(value)}" for name, value in self.kwargs.items())]
        return f"of shape {words[0]}" if len(words) == 1 and not self.kwargs else f"({', '.join(words)})"


def tensors_in(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def shown(value: object) -> str:
    """An argument in a message: of a tensor its shape."""
    return repr(tree_map_only(Tensor, lambda tensor: tuple(tensor.shape), value))


def example_of(model: nn.Module, given: Any = None) -> Example:
    """The arguments of a dry run: those given, or random images of the shape given or of the model's own.

    >>> example_of(nn.Conv2d(1, 8, 3)).shape
    (1, 1, 224, 224)
    """
    if isinstance(given, Example):
        return given
    convolutions = [module for module in model.modules() if isinstance(module, nn.modules.conv._ConvNd)]
    of_images = [module for module in convolutions if len(module.kernel_size) == 2]  # others may be of vectors
    first = next(iter(of_images or convolutions), None)
    axes = 2 if first is None else len(first.kernel_size)
    if given is None:
        given = own_shape(model, first, axes)
    if isinstance(given, Mapping) and all(isinstance(key, str) for key in given) and tensors_in(dict(given)):
        return Example((), dict(given), axes)
    if isinstance(given, tuple) and tensors_in(given):
        return Example(given, axes=axes)
    if isinstance(given, Tensor) or (isinstance(given, list) and tensors_in(given)):
        return Example((given,), axes=axes)
    shape = tuple(given) if isinstance(given, Sequence) else ()
    whole = [isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in shape]
    if not all(whole) or len(shape) not in range(2, 6) or len(shape) == 1 + axes > 2:
        what = "images, their shape, or a tuple or dictionary of arguments with images among them"
        raise ValueError(f"example_input must be {what}; got {shown(given)}")
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    # Zeros would come out as zeros whatever a network does with them.
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(0), device="cpu")
    return Example((drawn.to(device=like.device, dtype=like.dtype),), axes=axes)


def own_shape(model: nn.Module, first: nn.Module | None, axes: int) -> tuple[int, ...]:
    """The shape of one image as a model says it, by its first convolution, its patches or timm's configuration."""
    config = getattr(model, "pretrained_cfg", None) or {}
    channels, *size = config.get("input_size", (3, *USUAL[axes]))
    # timm's configuration is of the published weights: it knows neither of other channels nor of another size.
    made_for = getattr(getattr(model, "patch_embed", None), "img_size", None) or getattr(model, "image_size", None)
    if axes == 2 and made_for is not None:
        size = [made_for] * 2 if isinstance(made_for, int) else list(made_for)
    return (1, getattr(first, "in_channels", 0) or channels, *size)


def end_of_sequential(model: nn.Module, name: str, index: int = -1) -> str:
    """The module that gives a plain Sequential its output or, at index 0, takes what it takes; any other is its own.

    A Sequential calls every child it has, so a block cannot be one of them without being run in their row. Of a
    ModuleList, or a module of a traced graph, which are not called themselves, the last module is meant, too.
    """
    module = model.get_submodule(name)
    while True:
        kind = type(module)
        row = kind.forward is nn.Sequential.forward or isinstance(module, nn.ModuleList) or kind is nn.Module
        # The wrapper of torch.compile has no hooks of its own.
        if isinstance(inner := module._modules.get("_orig_mod"), nn.Module):
            name, module = f"{name}._orig_mod", inner
        elif row and len(module._modules):
            child = list(module._modules)[index]
            name, module = f"{name}.{child}", module.get_submodule(child)
        else:
            return name


def modules_around(name: str) -> list[str]:
    """The paths of the modules that a module is inside of, without the model."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def run_quietly(
    model: nn.Module,
    example: Example,
    hooks: Iterable[tuple[str, Hook]] = (),
    gradients: bool = False,
    before: bool = False,
) -> object:
    """Run a model on a copy of an example, in evaluation mode, with the same random numbers each time.

    Hooks, each after the path of its module, are called as ``hook(module, args, kwargs, output)``, or ``before`` the
    module as ``hook(module, args, kwargs)``, and then removed.
    """
    try:
        with quiet_eval(model), same_random_numbers(model), torch.set_grad_enabled(gradients), ExitStack() as stack:
            for path, hook in hooks:
                module = model.get_submodule(path)
                register: Any = module.register_forward_pre_hook if before else module.register_forward_hook
                stack.callback(register(hook, with_kwargs=True, prepend=True).remove)
            # A forward may normalize an image in place, assign to a list or pop from a dictionary.
            args, kwargs = tree_map_only(Tensor, lambda x: x.detach().clone(), (example.args, dict(example.kwargs)))
            return model(*args, **kwargs)
    except SiteError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).partition('tensor(')[0][:300]}"  # tensors are no message
        remedy = "give what its forward takes as example_input: images, their shape, or a tuple or dictionary"
        raise SiteError(f"the model does not run on an example {example} ({why}): {remedy}") from error


@contextmanager
def same_random_numbers(model: nn.Module) -> Iterator[None]:
    """Begin with the same random numbers, and go on afterwards as if nothing had been drawn."""
    there = torch.cuda.is_available()  # tensors without values may only say that they are on a GPU
    gpus = sorted({parameter.device.index for parameter in model.parameters() if parameter.is_cuda and there})
    with torch.random.fork_rng(gpus):
        # Not torch.manual_seed, which would seed GPUs for good that are not in use yet.
        for generator in (torch.default_generator, *(torch.cuda.default_generators[index] for index in gpus)):
            generator.manual_seed(0)
        yield


def uncompiled(model: nn.Module) -> AbstractContextManager[object]:
    """Return a context in which compiled models run in eager in this thread: a compiled graph does not see hooks."""
    # Without dynamo nothing is compiled, and importing it takes a second.
    return scope(plain_network(model), "eager", {model: True}) if "torch._dynamo" in sys.modules else nullcontext()


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
        with torch.no_grad(), uncompiled(model), ExitStack() as stack:
            for device in {parameter.device.type for parameter in model.parameters()} - {"meta"}:
                stack.enter_context(torch.autocast(device, enabled=False))  # maps have the type of the network
            yield
    finally:
        for module, training in modes:
            module.training = training

"""A backbone as it stands: inside its wrappers, row by row of its modules, and run on an example without a trace."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils._pytree import tree_leaves, tree_map_only

from vision_attn.checks import check_type
from vision_attn.errors import SiteError

#: A forward hook that is given keyword arguments, too.
Hook = Callable[[nn.Module, Any, Any, Any], Any]

P = ParamSpec("P")
R = TypeVar("R")

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
    network = plain_network(model)
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise SiteError(f"{type(module).__name__}: a TorchScript program cannot be changed: insert before tracing")
        if is_synchronised(module):
            raise SiteError(
                f"model is wrapped in {type(module).__name__}, which has counted its parameters already: insert into "
                "the network and wrap it then"
            )
    return network


@dataclass(frozen=True)
class Example:
    """The arguments of a forward pass; the images among them are all its tensors with the most axes."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def image(self) -> Tensor:
        """The first of the images: photographs, volumes, sounds, or what a generator makes them of."""
        return max(tensors_in((self.args, self.kwargs)), key=Tensor.dim)

    @cached_property
    def count(self) -> int:
        """How many there are in a list, as detection models take them, each ``(c, h, w)``; 0 if they are a batch."""
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

    def changed(self, function: Callable[[Tensor], Tensor]) -> Example:
        """The same arguments with other images."""
        axes = self.image.dim()
        args, kwargs = tree_map_only(
            Tensor,
            lambda x: function(x) if x.dim() == axes and x.is_floating_point() else x,
            (self.args, dict(self.kwargs)),
        )
        return Example(args, kwargs)

    def __str__(self) -> str:
        words = [*map(shown, self.args), *(f"{name}={shown(value)}" for name, value in self.kwargs.items())]
        return f"of shape {words[0]}" if len(words) == 1 and not self.kwargs else f"({', '.join(words)})"


def tensors_in(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def shown(value: object) -> str:
    """An argument in a message: of a tensor its shape."""
    return repr(tree_map_only(Tensor, lambda tensor: tuple(tensor.shape), value))


def example_of(model: nn.Module, given: Any = None) -> Example:
    """The arguments of a dry run: those given, or empty images of the shape given or of the model's own.

    >>> example_of(nn.Conv2d(1, 8, 3)).shape
    (1, 1, 224, 224)
    """
    if isinstance(given, Example):
        return given
    convolutions = [module for module in model.modules() if isinstance(module, nn.modules.conv._ConvNd)]
    # Not of their weights, which spectral norm changes where they are looked at. Others may be of vectors beside them.
    images = [module for module in convolutions if len(module.kernel_size) == 2]
    first = next(iter(images or convolutions), None)
    axes = 2 if first is None else len(first.kernel_size)
    if given is None:
        config = getattr(model, "pretrained_cfg", None) or {}
        channels, *size = config.get("input_size", (3, *USUAL[axes]))
        # timm's configuration is of the published weights, and does not know of other channels.
        given = (1, channels if first is None else first.in_channels, *size)
    if isinstance(given, Mapping) and all(isinstance(key, str) for key in given) and tensors_in(dict(given)):
        return Example((), dict(given))
    if isinstance(given, tuple) and tensors_in(given):
        return Example(given)
    if isinstance(given, Tensor) or (isinstance(given, list) and tensors_in(given)):
        return Example((given,))
    shape = tuple(given) if isinstance(given, Sequence) else ()
    whole = [isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in shape]
    if not all(whole) or len(shape) not in range(2, 6) or len(shape) == 1 + axes > 2:
        raise ValueError(
            "example_input must be images, their shape (batch, channels, height, width), of whole numbers, a tuple of "
            f"arguments or a dictionary of keyword arguments with images among them; got {shown(given)}"
        )
    reference = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    return Example((torch.zeros(shape, device=reference.device, dtype=reference.dtype),))


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


def run_quietly(model: nn.Module, example: Example, hooks: Mapping[str, Hook] | None = None) -> object:
    """What a model gives for an example, in one forward that leaves no trace in it.

    Hooks, by the paths of their modules, are called as ``hook(module, args, kwargs, output)`` and then removed.
    """
    try:
        with unchanged(model), quiet_eval(model), ExitStack() as stack:
            for path, hook in (hooks or {}).items():
                handle = model.get_submodule(path).register_forward_hook(hook, with_kwargs=True)
                stack.callback(handle.remove)
            return model(*example.args, **example.kwargs)
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).partition('tensor(')[0][:300]}"  # tensors are no message
        raise SiteError(
            f"the model does not run on an example {example} ({why}): give what its forward takes as example_input, "
            "images or their shape, a tuple of arguments or a dictionary of keyword arguments"
        ) from error


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Afterwards buffers, attributes and hooks are as they were: what a forward counts, keeps or sets up is gone."""
    restore = remembered(model)
    try:
        yield
    finally:
        restore()


def all_or_nothing(change: Callable[P, R]) -> Callable[P, R]:
    """What changes a model, its first argument, leaves it as it was where it fails, at whatever step."""

    @wraps(change)
    def changed(*args: P.args, **kwargs: P.kwargs) -> R:
        model = args[0] if args else kwargs.get("model")
        restore = remembered(model) if isinstance(model, nn.Module) else None
        try:
            return change(*args, **kwargs)
        except BaseException:
            if restore is not None:
                restore()
            raise

    return changed


def remembered(model: nn.Module) -> Callable[[], None]:
    """What brings back the modules, attributes, buffers and hooks that a model has now, and the random numbers to come.

    Of parameters it brings back which they are and whether they are trained, not their values.
    """
    before = [
        (module, type(module), [(held, dict(held)) for held in held_in(module)], clones_of(module))
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    numbers = torch.get_rng_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore() -> None:
        if all(type(module) is kind or not issubclass(kind, LazyModuleMixin) for module, kind, *_ in before):
            torch.set_rng_state(numbers)  # which what was made now has drawn from
            for index, state in enumerate(on_gpus):
                torch.cuda.set_rng_state(state, index)
        for module, kind, all_held, clones in before:
            if type(module) is not kind:
                if issubclass(kind, LazyModuleMixin):  # which is made now
                    continue
                module.__class__ = kind
            for held, attributes in all_held:
                held.clear()  # hooks and children in the order that they had, too
                held.update(attributes)
            for buffer, clone in clones:
                if not torch.equal(buffer, clone):
                    with torch.no_grad():
                        buffer.copy_(clone)
        for parameter, requires_grad in trained:
            parameter.requires_grad_(requires_grad)

    return restore


def held_in(module: nn.Module) -> list[dict[str, Any]]:
    """The attributes of a module, and those of them that are plain dictionaries, as its buffers and hooks are."""
    return [vars(module), *(value for value in vars(module).values() if type(value) in (dict, OrderedDict))]


def clones_of(module: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """The buffers that hold numbers, and copies of them."""
    return [(x, x.detach().clone()) for x in module._buffers.values() if x is not None and not x.is_meta]


def uncompiled() -> AbstractContextManager[object]:
    """A context in which compiled models run in eager: what is compiled does not see new hooks."""
    # Without dynamo nothing is compiled, and importing it takes a second.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


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
            stack.enter_context(uncompiled())
            yield
    finally:
        for module, training in modes:
            module.training = training

"""The end of a residual branch: the module after which a block's output still goes through the addition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vision_attn.errors import SiteError
from vision_attn.insertion.backbone import Hook, run_quietly

__all__ = ["branch_end"]

ADDITIONS = (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__, Tensor.__radd__)


def branch_end(model: nn.Module, site: str, example: Tensor) -> str:
    """The module in a residual block whose output is the branch that is added to the shortcut.

    Of the last two maps that the block adds, the branch is the one that more operations led to.
    """
    following = Following()
    block = model.get_submodule(site)
    hooks = {f"{site}.{name}": following.give(f"{site}.{name}") for name, _ in block.named_modules() if name}
    handle = block.register_forward_pre_hook(lambda module, args: following.watch(True))
    try:
        with following:
            run_quietly(model, example, {**hooks, site: lambda *_: following.watch(False)})
    finally:
        handle.remove()
    if following.last is None:
        raise SiteError(
            f"{site!r} adds no two maps, so it has no residual branch: choose a residual block, or at='after'"
        )
    one, other = following.last
    branch = max(one, other, key=lambda step: step.depth)
    if one.depth == other.depth or branch.module is None:
        what = (
            "adds two branches of equal length, and it cannot be told which is the shortcut"
            if one.depth == other.depth
            else "adds what is no output of a module, so nothing can follow the branch"
        )
        raise SiteError(f"{site!r} {what}: choose a module inside of a branch by names=, with at='after'")
    return branch.module


@dataclass
class Origin:
    """How a tensor came about."""

    #: the tensor itself, kept so that its identity is not given to another
    tensor: Tensor
    #: the longest row of operations that led to it from what the block was given
    depth: int
    #: the module that returned it as it is
    module: str | None = None


class Following(TorchFunctionMode):
    """Follows the tensors of one block through its operations to the last addition of two maps."""

    def __init__(self) -> None:
        super().__init__()
        self.watching = False
        self.origins: dict[int, Origin] = {}
        self.last: tuple[Origin, Origin] | None = None

    def watch(self, on: bool) -> None:
        self.watching = on

    def give(self, name: str) -> Hook:
        def hook(module: nn.Module, args: object, kwargs: object, output: object) -> None:
            if isinstance(output, Tensor):
                self.origin(output).module = name

        return hook

    def origin(self, tensor: Tensor) -> Origin:
        return self.origins.setdefault(id(tensor), Origin(tensor, 0))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.watching:
            return func(*args, **kwargs)
        taken = [self.origin(tensor) for tensor in tensors_of((*args, *kwargs.values()))]
        if func in ADDITIONS and len(taken) == 2:
            one, other = taken
            if one.tensor.shape == other.tensor.shape and one.tensor.dim() >= 3:
                self.last = replace(one), replace(other)
        output = func(*args, **kwargs)
        if isinstance(output, Tensor):
            # In place or not, this is no longer what a module returned.
            self.origins[id(output)] = Origin(output, 1 + max((origin.depth for origin in taken), default=0))
        return output


def tensors_of(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_of(value)

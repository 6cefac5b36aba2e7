"""The tensors in what a module takes or gives: the value itself, or one of the items of a tuple, list or dictionary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Element", "FeatureMap", "change", "pick", "tensors_in"]

#: An index of a tuple or list, a key of a dictionary, or ``None`` where the value is the tensor itself.
Element = int | str | None


@dataclass(frozen=True)
class FeatureMap:
    """A tensor without its values."""

    #: of the tensor
    shape: tuple[int, ...]
    #: of its numbers
    dtype: torch.dtype
    #: where it is
    device: torch.device


def tensors_in(value: object) -> dict[Element, FeatureMap]:
    """The tensors of a value, without their values."""
    if isinstance(value, Tensor):
        return {None: FeatureMap(tuple(value.shape), value.dtype, value.device)}
    items: list[tuple[Element, object]] = []
    if isinstance(value, Mapping):
        items = [(key, item) for key, item in value.items() if isinstance(key, str)]
    elif isinstance(value, (tuple, list)):
        items = list(enumerate(value))
    return {key: tensors_in(item)[None] for key, item in items if isinstance(item, Tensor)}


def pick(value: Any, element: Element) -> Tensor:
    """One of the tensors of a value."""
    tensor: Tensor = value if element is None else value[element]
    return tensor


def change(value: Any, element: Element, function: Callable[[Tensor], Tensor]) -> Any:
    """A value of the same kind with a function applied to one of its tensors."""
    if element is None:
        return function(value)
    if isinstance(element, str):
        changed = value.copy()
        changed[element] = function(value[element])
        return changed
    items = [function(item) if index == element else item for index, item in enumerate(value)]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)

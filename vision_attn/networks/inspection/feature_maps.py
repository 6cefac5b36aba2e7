"""The layout of a feature map in a tensor, and the position of the tensor in the input or output of a module.

Layouts are ``"b c h w"``, ``"b h w c"``, and tokens such as ``"b (1 + h w) c"``, in this example after a class token.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

#: An index of a tuple or list, a key of a dictionary, or None if the value is the tensor itself.
Element = int | str | None


class TensorSpec(NamedTuple):
    """Shape, dtype and device of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def read(cls, value: object) -> dict[Element, Self]:
        """Return the specifications of the tensors in the input or output of a module."""
        items: list[tuple[Element, object]] = [(None, value)]
        if isinstance(value, Mapping):
            items = [(key, item) for key, item in value.items() if isinstance(key, str)]
        elif isinstance(value, (tuple, list)):
            items = list(enumerate(value))
        return {key: cls(tuple(x.shape), x.dtype, x.device) for key, x in items if isinstance(x, Tensor)}


class FeatureMap(NamedTuple):
    """A feature map in the input or output of a module, its **target**."""

    target: str
    element: Element
    spec: TensorSpec
    layout: str
    #: rows and columns of the feature map; of the largest feature map if the module is called several times
    size: tuple[int, ...]
    #: True if the output of the network depends on the feature map
    used: bool = True
    #: the tensors in all calls of the module
    calls: tuple[TensorSpec, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the feature map: batch, channels, and one to three axes, such as rows and columns."""
        return map_shape(self.spec.shape, self.layout, self.size)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shape of the feature map in each call of the module."""
        return [map_shape(spec.shape, self.layout, self.size) for spec in self.calls]


def count_prefix(layout: str) -> int:
    """Return the number of tokens before the grid: 5 in ``"b (5 + h w) c"``."""
    first = layout.partition("(")[2].partition(" ")[0]
    return int(first) if first.isdigit() else 0


def map_shape(shape: tuple[int, ...], layout: str, size: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return the shape ``(b, c, h, w)`` of the feature map in a tensor. The size is needed for the grid of tokens."""
    if layout.startswith("b c"):
        return shape
    return (shape[0], shape[-1], *(size if "(" in layout else shape[1:-1]))


def to_map(x: Tensor, layout: str, size: tuple[int, ...]) -> Tensor:
    """Return the feature map ``(b, c, h, w)`` in a tensor."""
    x = x if layout.startswith("b c") else x.movedim(-1, 1)
    return x[:, :, count_prefix(layout) :].unflatten(2, size) if "(" in layout else x


def from_map(x: Tensor, y: Tensor, layout: str) -> Tensor:
    """Return a tensor like ``x`` in which the feature map is replaced by ``y``, ``(b, c, h, w)``."""
    y = y.flatten(2) if "(" in layout else y
    y = y if layout.startswith("b c") else y.movedim(1, -1)
    prefix = count_prefix(layout)
    return torch.cat([x[:, :prefix], y], dim=1) if prefix else y


def token_grid(tokens: int, rows: int, columns: int) -> tuple[int, int] | None:
    """Return the rows and columns of a grid of tokens with the aspect ratio of the image, or None.

    >>> token_grid(12, 64, 48), token_grid(2, 80, 10)
    ((4, 3), None)
    """
    if tokens < 2:  # A single token is a class token or a vector.
        return None
    height = math.sqrt(tokens * rows / columns)
    heights = range(max(1, math.floor(height) - 1), math.ceil(height) + 2)
    grids = ((height, tokens // height) for height in heights if tokens % height == 0)
    return next((grid for grid in grids if abs(grid[1] - grid[0] * columns / rows) < 1), None)


def has_element(value: Any, element: Element) -> bool:
    """Return True if a value has an element, so that :func:`apply_to_element` calls its function."""
    if element is None:
        return not isinstance(value, (tuple, list, Mapping))
    return not isinstance(value, Tensor) and element in (value if isinstance(element, str) else range(len(value)))


def apply_to_element(value: Any, element: Element, function: Callable[[Any], Any]) -> Any:
    """Return a value of the same type with a function applied to one of its elements."""
    if element is None:
        return function(value)
    if hasattr(value, "__setitem__"):
        changed = copy(value)  # the method of a dictionary would drop attributes of a subclass
        changed[element] = function(value[element])
        return changed
    items = [function(item) if index == element else item for index, item in enumerate(value)]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def apply_to_call(args: Any, kwargs: Any, output: Sequence[Any], element: Element, function: Callable[..., Any]) -> Any:
    """Apply a function to an element of the output of a module, or, without an output, of its arguments, for a hook."""
    if output:
        return apply_to_element(output[0], element, function)
    if isinstance(element, str):
        return args, apply_to_element(kwargs, element, function)
    return apply_to_element(args, element, function), kwargs

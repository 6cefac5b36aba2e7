"""Pointwise (1×1) convolution, run as a linear layer on channels-last tokens; and memory formats of maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["POINTWISE", "Pointwise", "Pointwise2d", "in_format_of", "linear"]


class Pointwise:
    """What makes a convolution pointwise: kernel and stride are 1, and a matrix product computes the same.

    The library behind a convolution may reorder its weights in every call, which costs as much as the product.
    """

    def forward(self: nn.modules.conv._ConvNd, x: Tensor) -> Tensor:  # type: ignore[misc]
        if self.groups > 1:
            return super().forward(x)  # type: ignore[misc]
        return linear(x, self.weight, self.bias)

    def _apply(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Keep the strides that the gradient of a matrix has, also in a network that is made channels-last.

        Those of axes of length one say nothing about the memory, but DistributedDataParallel compares and warns.
        """
        super()._apply(fn, recurse)  # type: ignore[misc]
        weight = self._parameters.get("weight")
        if weight is not None and self.groups == 1 and weight.stride(-1) != 1:
            weight.data = weight.data.flatten(1).view(weight.shape)
        return self


class Pointwise1d(Pointwise, nn.Conv1d):
    """``Conv1d(in_channels, out_channels, 1)`` as a linear layer."""


class Pointwise2d(Pointwise, nn.Conv2d):
    """``Conv2d(in_channels, out_channels, 1)`` as a linear layer."""


class Pointwise3d(Pointwise, nn.Conv3d):
    """``Conv3d(in_channels, out_channels, 1)`` as a linear layer."""


#: The pointwise convolution for maps with one, two and three axes.
POINTWISE: dict[int, Callable[..., nn.modules.conv._ConvNd]] = {1: Pointwise1d, 2: Pointwise2d, 3: Pointwise3d}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A pointwise convolution of ``(b, c, *size)`` or ``(c, *size)`` with weights ``(c', c, 1, …)``."""
    channels = 1 - weight.dim()
    return F.linear(x.movedim(channels, -1).contiguous(), weight.flatten(1), bias).movedim(-1, channels)


def in_format_of(x: Tensor, y: Tensor) -> Tensor:
    """A map in the memory format of another; where that is in both, as with a single channel, in the default one."""
    if x.shape[1] > 1 and x.stride(1) == 1 and not x.is_contiguous():
        return y.movedim(1, -1).contiguous().movedim(-1, 1)
    if y.shape[0] == 1 and y.stride(1) == 1:  # a matrix is transposed in blocks, up to four times as fast on the CPU
        return y.movedim(1, -1).reshape(-1, y.shape[1]).t().contiguous().view(y.shape)
    return y.contiguous()

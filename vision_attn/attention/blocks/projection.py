"""1×1 convolutions as linear layers, layer norm over channels, and the feature maps that blocks take and return."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention.dispatch import can_chunk
from vision_attn.attention.kernels import channels_first, channels_last

#: A convolution on feature maps with any number of axes.
Conv = nn.modules.conv._ConvNd

#: The axes of a feature map in messages, by their number.
AXES_IN_WORDS = {1: "width", 2: "height, width", 3: "depth, height, width"}


def on_feature_maps(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Check the map of a block, also accept one without a batch, and make the block one node of a torch.fx graph."""

    @wraps(forward)
    def batched(self: Any, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        given = (mask,) if context is None else (mask, context)  # not every block has a context
        if isinstance(x, torch.fx.Proxy):  # the operations depend on the size of the map
            return x.tracer.create_proxy("call_module", x.tracer.path_of_module(self), (x, *given), {})
        if isinstance(x, Tensor) and x.dim() == 2 + self.rank and x.shape[1] == self.channels:
            return forward(self, x, *given)
        if isinstance(x, Tensor) and x.dim() == 1 + self.rank:
            return batched(self, x[None], mask, *(y[None] for y in given[1:]))[0]
        raise not_a_map("x", x, self.channels, self.rank)

    return batched


def not_a_map(name: str, x: Any, channels: int, rank: int) -> ValueError:
    """Return the error for what is not a batch of feature maps ``(b, channels, …)`` with ``rank`` axes."""
    got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
    return ValueError(f"{name} must be maps of shape (batch, {channels}, {AXES_IN_WORDS[rank]}); got {got}")


class Pointwise:
    """A convolution with kernel and stride 1 as a matrix product.

    The library behind a convolution may reorder its weights in every call, which takes as long as the product.
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        if self.groups > 1:
            return super().forward(x)  # type: ignore[misc]
        if x.dim() == 1 + len(self.kernel_size):
            return self.forward(x[None])[0]
        weight, tokens = self.weight.flatten(1), x.flatten(2).transpose(1, 2)
        if self.bias is not None and x.is_contiguous() and reads_in_place(x, weight):
            y = torch.baddbmm(self.bias, tokens, weight.t().expand(len(x), -1, -1))
        else:
            y = F.linear(tokens.contiguous(), weight, self.bias)
        return y.transpose(1, 2).unflatten(2, x.shape[2:])

    def _apply(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Keep the strides of a matrix, which its gradient has, also in a channels-last network.

        Strides of axes of length one do not affect the memory, but DistributedDataParallel compares them and warns.
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


#: The 1×1 convolution for feature maps with one, two and three axes.
POINTWISE: dict[int, Callable[..., Conv]] = {1: Pointwise1d, 2: Pointwise2d, 3: Pointwise3d}


def reads_in_place(x: Tensor, weight: Tensor) -> bool:
    """Return True if one product per image, which needs no copy of x, is faster than one for all images.

    It is for feature maps with many positions. In training it is not: gradients of weights would be computed for each
    image, and summed. Quantized weights are for one product.
    """
    if x.dtype != torch.float32 or type(weight) is not Tensor or not can_chunk(x):
        return False
    trained = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return not trained and 8 * x.shape[2:].numel() >= len(weight)


class ChannelNorm(nn.LayerNorm):
    """Layer normalization over the channels of ``(b, c, *size)``, at each position separately."""

    def forward(self, x: Tensor) -> Tensor:
        return channels_first(super().forward(channels_last(x)))


def to_memory_format_of(x: Tensor, y: Tensor) -> Tensor:
    """Return a map in the memory format of x; where x is in both formats, in the default one."""
    if x.shape[1] > 1 and x.stride(1) == 1 and not x.is_contiguous():
        return channels_first(channels_last(y).contiguous())
    if y.shape[0] == 1 and y.stride(1) == 1:  # a matrix is transposed in blocks, up to four times as fast on a CPU
        return channels_last(y).reshape(-1, y.shape[1]).t().contiguous().view(y.shape)
    return y.contiguous()

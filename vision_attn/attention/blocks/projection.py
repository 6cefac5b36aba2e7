"""How blocks take, project and give back maps: pointwise convolutions as linear layers, norms, memory formats."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention.blocks.matching import EXACT_MATCH
from vision_attn.attention.choices import runs_in_parts
from vision_attn.attention.masks import upcast

#: How messages call the axes of a map, by how many there are.
AXES_IN_WORDS = {1: "width", 2: "height, width", 3: "depth, height, width"}


def on_maps(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A block's forward that also takes one map without a batch, and is one node where torch.fx traces a network."""

    @wraps(forward)
    def taken(self: Any, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        given = (mask,) if context is None else (mask, context)  # not every block has a context
        if isinstance(x, torch.fx.Proxy):  # what happens inside depends on the size of the map
            return x.tracer.create_proxy("call_module", x.tracer.path_of_module(self), (x, *given), {})
        if isinstance(x, Tensor) and x.dim() == 1 + self.rank:
            return forward(self, x[None], mask, *(y[None] for y in given[1:]))[0]
        return forward(self, x, *given)

    return taken


def check_map(name: str, x: Tensor, channels: int, rank: int) -> None:
    """Refuse all but a batch of maps ``(b, channels, …)`` with ``rank`` axes."""
    if not isinstance(x, Tensor) or x.dim() != 2 + rank or x.shape[1] != channels:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be maps of shape (batch, {channels}, {AXES_IN_WORDS[rank]}); got {got}")


class Pointwise:
    """What makes a convolution pointwise: kernel and stride are 1, and a matrix product computes the same.

    The library behind a convolution may reorder its weights in every call, which costs as much as the product.
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        if self.groups > 1:
            return super().forward(x)  # type: ignore[misc]
        last = x.dim() - 1
        weight, channels = self.weight.flatten(1), last - len(self.kernel_size)  # of maps (b, c, *size) or (c, *size)
        if channels == 1 and self.bias is not None and x.is_contiguous() and spares_a_copy(x, weight):
            y = torch.baddbmm(self.bias, x.flatten(2).mT, weight.t().expand(len(x), -1, -1))
            return y.mT.unflatten(2, x.shape[2:])
        y = F.linear(x.movedim(channels, last).contiguous(), weight, self.bias)
        return y.movedim(last, channels)

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


def spares_a_copy(x: Tensor, weight: Tensor) -> bool:
    """Whether a product for each map, which reads it as it lies, is faster than one for all.

    It is where maps have many. For training it is not: gradients of weights would be made for each map, and summed.
    Weights in fewer bits are for products for all.
    """
    if x.dtype != torch.float32 or type(weight) is not Tensor or 8 * x.shape[2:].numel() < len(weight):
        return False
    return runs_in_parts(x) and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))


def in_format_of(x: Tensor, y: Tensor) -> Tensor:
    """A map in the memory format of another; where that is in both, as with a single channel, in the default one."""
    last = y.dim() - 1
    if x.shape[1] > 1 and x.stride(1) == 1 and not x.is_contiguous():
        return y.movedim(1, last).contiguous().movedim(last, 1)
    if y.shape[0] == 1 and y.stride(1) == 1:  # a matrix is transposed in blocks, up to four times as fast on the CPU
        return y.movedim(1, last).reshape(-1, y.shape[1]).t().contiguous().view(y.shape)
    return y.contiguous()


class UnitLength(nn.Module):
    """Vectors ``(b, n, tokens, d)`` of length one, times ``exp(logit_scale)`` of their head if there is one."""

    def __init__(self, num_heads: int | None = None, scale: float = 10.0, **factory: Any) -> None:
        super().__init__()
        scales = None if num_heads is None else torch.full((num_heads, 1, 1), math.log(scale), **factory)
        self.logit_scale: nn.Parameter | None = None if scales is None else nn.Parameter(scales)

    def forward(self, x: Tensor) -> Tensor:
        x = F.normalize(upcast(x), dim=-1)  # half precision has no number as small as what its length is at least
        return x if self.logit_scale is None else x * self.logit_scale.clamp(max=math.log(100)).exp()


def qk_norms(kind: bool | str, width: int, num_heads: int, **factory: Any) -> tuple[nn.Module | None, nn.Module | None]:
    """The norms of queries and of keys: none, layer norms, or cosines as in Swin v2 and where they are to match."""
    if isinstance(kind, str):
        return UnitLength(num_heads, EXACT_MATCH if kind == "match" else 10.0, **factory), UnitLength()
    return (nn.LayerNorm(width, **factory), nn.LayerNorm(width, **factory)) if kind else (None, None)

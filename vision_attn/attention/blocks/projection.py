"""1×1 convolutions as linear layers, layer norm over channels, and checks and memory formats of feature maps."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention.kernels import TO_FIRST, TO_LAST
from vision_attn.attention.kind import shape_error

#: A convolution on feature maps with any number of axes.
Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


def accepts_unbatched(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate a ``forward`` method to check its input, accept unbatched feature maps, and be one torch.fx node."""

    @wraps(forward)
    def batched(self: Any, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        if isinstance(x, Tensor) and x.dim() == 2 + self.rank and x.shape[1] == self.channels:
            try:  # some blocks have no argument context
                return forward(self, x, mask) if context is None else forward(self, x, mask, context)
            except RuntimeError as error:
                if "mixed torch.Tensor and DTensor" not in str(error):
                    raise
                what = f"{type(self).__name__} adds tensors of its pattern or positions to a DTensor"
                remedy = "Run the model and the backward pass in torch.distributed.tensor.experimental"
                raise RuntimeError(f"{what}. {remedy}.implicit_replication()") from error
        inputs = (mask,) if context is None else (mask, context)
        if isinstance(x, torch.fx.Proxy):  # the operations inside depend on the size of the feature map
            return x.tracer.create_proxy("call_module", x.tracer.path_of_module(self), (x, *inputs), {})
        if isinstance(x, Tensor) and x.dim() == 1 + self.rank and x.shape[0] == self.channels:
            return batched(self, x[None], mask, *(y[None] for y in inputs[1:]))[0]
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise shape_error("x", got, self.channels, self.rank)

    return batched


class Pointwise:
    """A 1×1 convolution that runs as a matrix product.

    Convolution libraries may reorder the weights in every call, which can take as long as the product itself.
    """

    #: True for the last layer of a residual branch that is zero at initialization.
    zero_init: bool = False

    def reset_parameters(self: Any) -> None:
        super().reset_parameters()  # type: ignore[misc]
        for parameter in self.parameters() if self.zero_init else ():
            nn.init.zeros_(parameter)

    def forward(self: Any, x: Tensor) -> Tensor:
        if self.groups > 1 or (dim := x.dim()) == 1 + len(self.kernel_size):
            return super().forward(x)  # type: ignore[misc]
        x = x.permute(*TO_LAST[dim]).contiguous()
        return F.linear(x, self.weight.flatten(1), self.bias).permute(*TO_FIRST[dim])

    def _apply(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Keep the weight's strides equal to those of its gradient, also in channels-last networks.

        Strides of axes of length one do not affect memory, but DistributedDataParallel warns if they differ.
        """
        super()._apply(fn, recurse)  # type: ignore[misc]
        weight = getattr(self, "weight", None)
        if isinstance(weight, nn.Parameter) and self.groups == 1 and weight.stride(-1) != 1:
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


class ChannelNorm(nn.LayerNorm):
    """Layer normalization over the channels of ``(b, c, *size)``, at each position separately."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x.permute(*TO_LAST[x.dim()]), self.normalized_shape, self.weight, self.bias, self.eps)
        return y.permute(*TO_FIRST[x.dim()])


def to_memory_format_of(x: Tensor, y: Tensor) -> Tensor:
    """Return ``y`` in the memory format of ``x``, or contiguous if ``x`` is in both formats."""
    if x.stride() == y.stride():
        return y
    dim = x.dim()
    if x.shape[1] > 1 and x.stride(1) == 1 and not x.is_contiguous():
        last = y.permute(*TO_LAST[dim])
        return y if last.is_contiguous() else last.contiguous().permute(*TO_FIRST[dim])
    return y.contiguous()

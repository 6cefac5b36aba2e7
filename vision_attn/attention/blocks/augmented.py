"""Attention that replaces a convolution, or is concatenated with one."""

from collections.abc import Collection
from numbers import Integral
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention.blocks.attention import Attention2d
from vision_attn.attention.blocks.config import Configurable
from vision_attn.attention.position import RelPosDecomposed
from vision_attn.checks import check_above, check_bool, check_divides, check_kernel_size


class AugmentedConv2d(Configurable):
    """``concat(conv(x), attention(x))`` over channels: an attention-augmented convolution.

    Replaces ``Conv2d(in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2)``. With a stride above
    one, the input of the attention is averaged over squares of side ``stride``.

    Args:
        in_channels: input channels.
        out_channels: output channels, of which attention computes ``value_channels``.
        kernel_size: kernel size of the convolution; odd.
        stride: stride of the block.
        num_heads: number of heads.
        key_channels: channels of the queries, and of the keys, over all heads; divisible by ``num_heads``.
        value_channels: output channels of the attention; divisible by ``num_heads``, fewer than ``out_channels``.
        bias: add a bias in the convolution.
        device: device of the parameters.
        dtype: dtype of the parameters.
        **attention: further arguments of :class:`Attention2d`; the paper uses ``position=RelPosDecomposed(…)``.

    Raises:
        ValueError: an argument is out of range; the message names it and states the expected and the given value.

    Source: Bello et al., *Attention Augmented Convolutional Networks*, 2019, https://arxiv.org/abs/1904.09925

    >>> conv = AugmentedConv2d(16, 32, 3, stride=2, num_heads=4, key_channels=16, value_channels=8)
    >>> conv(torch.randn(2, 16, 9, 7)).shape
    torch.Size([2, 32, 5, 4])
    """

    fixed: ClassVar[Collection[str]] = ("stride",)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 3,
        *,
        stride: int = 1,
        num_heads: int = 8,
        key_channels: int,
        value_channels: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **attention: Any,
    ) -> None:
        super().__init__()
        check_divides("num_heads", num_heads, "key_channels", key_channels)
        check_divides("num_heads", num_heads, "value_channels", value_channels)
        check_kernel_size(kernel_size)
        check_above(0, Integral, stride=stride)
        check_bool(bias=bias)
        if value_channels >= out_channels:
            raise ValueError(f"value_channels must be less than out_channels={out_channels}, got {value_channels}")
        self.stride = stride
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        conv_channels, padding = out_channels - value_channels, kernel_size // 2
        self.conv: nn.Conv2d = nn.Conv2d(in_channels, conv_channels, kernel_size, stride, padding, bias=bias, **factory)
        key_dim, value_dim = key_channels // num_heads, value_channels // num_heads
        options = {"key_dim": key_dim, "value_dim": value_dim, "out_channels": value_channels, **factory}
        self.attn: Attention2d = Attention2d(in_channels, num_heads, **options, **attention)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the convolution and the attention, and concatenate both outputs.

        Args:
            x: feature maps, ``(b, in_channels, h, w)``, or a single feature map, ``(in_channels, h, w)``.
            mask: as in :meth:`Attention2d.forward`, for the size after the stride.

        Returns:
            ``(b, out_channels, ⌈h / stride⌉, ⌈w / stride⌉)``.

        Raises:
            ValueError: the shape or dtype of ``mask`` is wrong.
        """
        pooled = x if self.stride == 1 else F.avg_pool2d(x, self.stride, ceil_mode=True)
        return torch.cat([self.conv(x), self.attn(pooled, mask)], dim=-3)


class StridedAttention2d(Configurable):
    """``avg_pool(attention(x))``: attention that replaces ``Conv2d(channels, out_channels, 3, stride, padding=1)``.

    Attention runs at full resolution. With a stride above one, its output is averaged over squares of side ``stride``;
    a square at the border is averaged over the positions inside the feature map. The state dict is ``attn.*``.

    Args:
        channels: input channels.
        num_heads: number of heads.
        stride: stride of the block.
        out_channels: output channels; ``channels`` if None.
        feat_size: size of the feature map before the stride, in positions. If it is given, ``position`` defaults to
            ``RelPosDecomposed(feat_size)``.
        device: device of the parameters.
        dtype: dtype of the parameters.
        **attention: further arguments of :class:`Attention2d`.

    Raises:
        ValueError: an argument is out of range; the message names it and states the expected and the given value.

    Source: Srinivas et al., *Bottleneck Transformers*, 2021, section 3, https://arxiv.org/abs/2101.11605

    >>> StridedAttention2d(64, 4, stride=2, feat_size=(14, 10))(torch.randn(2, 64, 14, 10)).shape
    torch.Size([2, 64, 7, 5])
    """

    fixed: ClassVar[Collection[str]] = ("stride",)

    def __init__(
        self,
        channels: int,
        num_heads: int = 8,
        *,
        stride: int = 1,
        out_channels: int | None = None,
        feat_size: int | tuple[int, int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **attention: Any,
    ) -> None:
        super().__init__()
        check_above(0, Integral, stride=stride)
        if feat_size is not None and attention.get("position") is None:
            attention["position"] = RelPosDecomposed(feat_size)
        self.stride = stride
        attention |= {"out_channels": out_channels, "device": device, "dtype": dtype}
        self.attn: Attention2d = Attention2d(channels, num_heads, **attention)

    def forward(self, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        """Compute attention, then average its output.

        Args:
            x: feature maps, ``(b, c, h, w)``, or a single feature map, ``(c, h, w)``.
            mask: as in :meth:`Attention2d.forward`, for the size before the stride.
            context: as in :meth:`Attention2d.forward`.

        Returns:
            ``(b, out_channels, ⌈h / stride⌉, ⌈w / stride⌉)``.

        Raises:
            ValueError: as in :meth:`Attention2d.forward`.
        """
        y = self.attn(x, mask, context)
        return y if self.stride == 1 else F.avg_pool2d(y, self.stride, ceil_mode=True)

"""Attention as a replacement of a convolution, and beside a convolution."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention.blocks.attention import Attention2d
from vision_attn.attention.blocks.config import Configurable
from vision_attn.attention.position import RelPosDecomposed
from vision_attn.checks import check_count, check_counts, check_divides, check_new


class AugmentedConv2d(Configurable):
    """``[conv(x), attention(x)]``, side by side: an attention-augmented convolution.

    It replaces ``Conv2d(in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2)``. With a
    stride, attention runs on the map averaged over squares of that side.

    Args:
        in_channels: channels of the map.
        out_channels: channels of the result, ``value_channels`` of them from attention.
        kernel_size: side of the convolution's kernel, in positions; odd.
        stride: positions from one output to the next.
        num_heads: number of heads.
        key_channels: channels of queries, and of keys, in all heads; divisible by ``num_heads``.
        value_channels: channels from attention in the result; divisible by ``num_heads``, fewer than ``out_channels``.
        bias: whether the convolution has a bias.
        device: device of the parameters.
        dtype: dtype of the parameters.
        **attention: further arguments of :class:`Attention2d`; the paper has ``position=RelPosDecomposed(…)``.

    Raises:
        ValueError: an argument is out of range; the message names it, with the expected and the given value.

    Source: Bello et al., *Attention Augmented Convolutional Networks*, 2019, https://arxiv.org/abs/1904.09925

    >>> conv = AugmentedConv2d(16, 32, 3, stride=2, num_heads=4, key_channels=16, value_channels=8)
    >>> conv(torch.randn(2, 16, 9, 7)).shape
    torch.Size([2, 32, 5, 4])
    """

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
        check_new(device, dtype, in_channels=in_channels, out_channels=out_channels, num_heads=num_heads)
        check_counts(kernel_size=kernel_size, stride=stride, key_channels=key_channels, value_channels=value_channels)
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd, so that both branches give maps of one size; got {kernel_size}")
        for name in {"key_dim", "value_dim", "out_channels", "context_channels"} & attention.keys():
            raise ValueError(f"{name} must be left out of AugmentedConv2d, which has key_channels and value_channels")
        check_divides("num_heads", num_heads, "key_channels", key_channels)
        check_divides("num_heads", num_heads, "value_channels", value_channels)
        if value_channels >= out_channels:
            raise ValueError(f"value_channels must be fewer than out_channels={out_channels}; got {value_channels}")
        self.stride = stride
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        conv_channels, padding = out_channels - value_channels, kernel_size // 2
        self.conv: nn.Conv2d = nn.Conv2d(in_channels, conv_channels, kernel_size, stride, padding, bias=bias, **factory)
        attention |= {"key_dim": key_channels // num_heads, "value_dim": value_channels // num_heads, **factory}
        self.attn: Attention2d = Attention2d(in_channels, num_heads, out_channels=value_channels, **attention)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Convolve and attend.

        Args:
            x: maps, ``(b, in_channels, h, w)``, or one map, ``(in_channels, h, w)``.
            mask: as in :meth:`Attention2d.forward`, for the map after the stride.

        Returns:
            ``(b, out_channels, ⌈h / stride⌉, ⌈w / stride⌉)``.

        Raises:
            ValueError: ``mask`` does not fit.
        """
        pooled = x if self.stride == 1 else F.avg_pool2d(x, self.stride, ceil_mode=True)
        return torch.cat([self.conv(x), self.attn(pooled, mask)], dim=-3)

    def get_config(self) -> dict[str, object]:
        return {"stride": self.stride}


class StridedAttention2d(Configurable):
    """``average(attention(x))``: attention that replaces ``Conv2d(channels, out_channels, 3, stride, padding=1)``.

    Attention runs on the complete map; with a stride, its output is averaged over squares of that side. A square over
    the border is averaged over the positions in it that are on the map. The state dict is ``attn.*``.

    Args:
        channels: channels of the map.
        num_heads: number of heads.
        stride: positions from one output to the next.
        out_channels: channels of the result; ``channels`` when None.
        feat_size: size of the map, in positions before the stride: ``position`` is ``RelPosDecomposed(feat_size)``
            where it is not given.
        device: device of the parameters.
        dtype: dtype of the parameters.
        **attention: further arguments of :class:`Attention2d`.

    Raises:
        ValueError: an argument is out of range; the message names it, with the expected and the given value.

    Source: Srinivas et al., *Bottleneck Transformers*, 2021, section 3, https://arxiv.org/abs/2101.11605

    >>> StridedAttention2d(64, 4, stride=2, feat_size=(14, 10))(torch.randn(2, 64, 14, 10)).shape
    torch.Size([2, 64, 7, 5])
    """

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
        check_count("stride", stride)
        if feat_size is not None and attention.get("position") is None:
            attention["position"] = RelPosDecomposed(feat_size)
        self.stride = stride
        attention |= {"out_channels": out_channels, "device": device, "dtype": dtype}
        self.attn: Attention2d = Attention2d(channels, num_heads, **attention)

    def forward(self, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        """Attend, then average.

        Args:
            x: maps, ``(b, c, h, w)``.
            mask: as in :meth:`Attention2d.forward`, for the map before the stride.
            context: as in :meth:`Attention2d.forward`.

        Returns:
            ``(b, out_channels, ⌈h / stride⌉, ⌈w / stride⌉)``.

        Raises:
            ValueError: as :meth:`Attention2d.forward`.
        """
        y = self.attn(x, mask, context)
        return y if self.stride == 1 else F.avg_pool2d(y, self.stride, ceil_mode=True)

    def get_config(self) -> dict[str, object]:
        return {"stride": self.stride}

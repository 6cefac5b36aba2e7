"""Conditional positional encoding: a depthwise convolution that is added to the feature map."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vision_attn.attention.kind import AttentionConfig
from vision_attn.attention.patterns.grouping import Grouping
from vision_attn.attention.position.encoding import PositionEncoding
from vision_attn.checks import check_kernel_size


@dataclass(frozen=True)
class ConditionalPos:
    """Conditional positional encoding, as in CPVT: a depthwise convolution that is added to the feature map.

    ::

        x = x + depthwise_conv(x)        before the projection to queries, keys and values

    The zero padding of the convolution encodes the borders of the feature map. The parameters are
    ``position.conv.weight (c, 1, k, k)`` and ``position.conv.bias (c)``, for feature maps of any size.

    Args:
        kernel_size: size of the convolution kernel, in positions; an odd integer.

    Raises:
        ValueError: ``kernel_size`` is even or smaller than 1.

    Source: Chu et al., *Conditional Positional Encodings for Vision Transformers*, 2021,
    https://arxiv.org/abs/2102.10882

    >>> ConditionalPos(3)
    ConditionalPos(kernel_size=3)
    """

    kernel_size: int = 3

    def __post_init__(self) -> None:
        check_kernel_size(self.kernel_size)

    def build(self, block: AttentionConfig, device: Any = None, dtype: Any = None) -> PositionEncoding:
        return ConditionalEncoding(self, block, device, dtype)


class ConditionalEncoding(PositionEncoding):
    adds_to_map = True

    def __init__(self, config: ConditionalPos, block: AttentionConfig, device: Any, dtype: Any) -> None:
        super().__init__(config)
        side, c = config.kernel_size, block.channels
        conv = getattr(nn, f"Conv{block.rank}d")
        self.conv: nn.Module = conv(c, c, side, padding=side // 2, groups=c, device=device, dtype=dtype)

    def add_to_map(self, x: Tensor, grouping: Grouping) -> Tensor:
        return x + self.conv(x)

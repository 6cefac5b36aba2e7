"""Controls: blocks of as many parameters as attention's or fewer, which tell what of its gain is owed to attending."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention.blocks.gated_residual import GatedResidual
from vision_attn.attention.blocks.linear import LinearAttention2d
from vision_attn.attention.blocks.projection import Pointwise2d
from vision_attn.checks import check_count, check_number


class ConvBlock2d(GatedResidual):
    """A convolution in the place of attention: the control that tells what attention adds beyond its parameters.

    ``x + gate · W₂ gelu(depthwise(W₁ norm(x)))``, where the hidden width makes the number of parameters that of
    :class:`AttentionBlock2d`, to the nearest width. With a large kernel it sees as far as attention may, by weights
    that are the same whatever is on the map. With the mean over the map in the place of the convolution it is a
    perceptron on the pooled map, added to every position: it needs the whole map, but no places in it.

    Args:
        channels: channels of the map.
        kernel_size: rows and columns of the depthwise kernel, odd; None for the mean over the map.
        gate_init: None for a gate of one and a last convolution of zeros; a number for that gate in every channel.

    Raises:
        ValueError: ``channels`` is not a whole number of at least 1, ``kernel_size`` not odd, or ``gate_init`` not
            finite.

    >>> from vision_attn.attention.blocks import AttentionBlock2d
    >>> count = lambda block: sum(p.numel() for p in block.parameters())
    >>> count(ConvBlock2d(64)), count(ConvBlock2d(64, kernel_size=13)), count(AttentionBlock2d(64))
    (16797, 16701, 16832)
    """

    #: projections of the map before the convolution
    projections = 1

    def __init__(self, channels: int, *, kernel_size: int | None = 3, gate_init: float | None = None) -> None:
        super().__init__(channels, gate_init)
        # Attention has 4c² + 4c parameters, this branch hidden(p·c + p + kernel² + 1 + c) + c for p projections.
        each = self.projections * (channels + 1) + channels + (0 if kernel_size is None else kernel_size**2 + 1)
        hidden = max(1, round((4 * channels**2 + 3 * channels) / each))
        self.expand = Pointwise2d(channels, self.projections * hidden, 1)
        self.depthwise: nn.Module | None = None
        if kernel_size is not None:
            check_count("kernel_size", kernel_size)
            if kernel_size % 2 == 0:
                raise ValueError(f"kernel_size must be odd, so that it has a middle; got {kernel_size}")
            self.depthwise = nn.Conv2d(hidden, hidden, kernel_size, padding=kernel_size // 2, groups=hidden)
        self.project = Pointwise2d(hidden, channels, 1)
        self.zero_init_last()

    def last_projection(self) -> nn.Module:
        return self.project

    def forward(self, x: Tensor) -> Tensor:
        y = self.expand(self.norm(x))
        y = y.mean((-2, -1), keepdim=True) if self.depthwise is None else self.depthwise(y)
        return self.add(x, self.project(F.gelu(y)))


class GatedConvBlock2d(ConvBlock2d):
    """A gated long convolution: what multiplies two places of a map with each other, without softmax.

    ``x + gate · W₃ (u · depthwise(v))`` with ``u, v = W₁ norm(x), W₂ norm(x)``, where the hidden width makes the number
    of parameters that of :class:`AttentionBlock2d`, to the nearest width.

    Args:
        channels: channels of the map.
        kernel_size: rows and columns of the depthwise kernel, odd: twice the side of the map minus one sees all of it.
        gate_init: as of :class:`ConvBlock2d`.

    Raises:
        ValueError: as :class:`ConvBlock2d`.

    Source: one step of the operator of Poli et al., *Hyena Hierarchy*, 2023, https://arxiv.org/abs/2302.10866, with an
    explicit kernel over two axes

    >>> import torch
    >>> GatedConvBlock2d(64, kernel_size=23)(torch.randn(2, 64, 12, 12)).shape
    torch.Size([2, 64, 12, 12])
    """

    projections = 2
    depthwise: nn.Module

    def __init__(self, channels: int, *, kernel_size: int, gate_init: float | None = None) -> None:
        super().__init__(channels, kernel_size=kernel_size, gate_init=gate_init)

    def forward(self, x: Tensor) -> Tensor:
        u, v = self.expand(self.norm(x)).chunk(2, dim=1)
        return self.add(x, self.project(u * self.depthwise(v)))


class LinearBlock2d(GatedResidual):
    """:class:`LinearAttention2d` in the place of attention: keys and values are summed before any query is known.

    Args:
        channels: channels of the map; divisible by ``num_heads``.
        num_heads: number of heads.
        gate_init: as of :class:`ConvBlock2d`.

    Raises:
        ValueError: as :class:`LinearAttention2d`.

    >>> import torch
    >>> LinearBlock2d(64)(torch.randn(2, 64, 7, 7)).shape
    torch.Size([2, 64, 7, 7])
    """

    def __init__(self, channels: int, num_heads: int = 8, *, gate_init: float | None = None) -> None:
        super().__init__(channels, gate_init)
        self.attn = LinearAttention2d(channels, num_heads)
        self.zero_init_last()

    def last_projection(self) -> nn.Module:
        return self.attn.proj

    def forward(self, x: Tensor) -> Tensor:
        return self.add(x, self.attn(self.norm(x)))


class NormBlock2d(GatedResidual):
    """The normalised shortcut alone, ``x + gate · norm(x)``: what of a block's gain is owed to what is around it.

    Args:
        channels: channels of the map.
        gate_init: initial gate of every channel.

    Raises:
        ValueError: ``channels`` is not a whole number of at least 1, or ``gate_init`` is not finite.

    >>> import torch
    >>> NormBlock2d(64)(torch.randn(2, 64, 7, 7)).shape
    torch.Size([2, 64, 7, 7])
    """

    def __init__(self, channels: int, *, gate_init: float = 0.0) -> None:
        check_number("gate_init", gate_init)  # None is for blocks that end in a projection
        super().__init__(channels, gate_init)

    def forward(self, x: Tensor) -> Tensor:
        return self.add(x, self.norm(x))


class SqueezeExciteBlock2d(NormBlock2d):
    """Residual block with squeeze and excitation, which does not compare positions.

    ``x + gate · y · sigmoid(W₂ relu(W₁ mean(y)))`` with ``y = norm(x)``. The hidden width is about twice the number of
    channels, so that the number of parameters is as close as possible to that of :class:`AttentionBlock2d`. There is no
    last projection to initialize with zeros, so the gate is initialized with zeros and grows slowly.

    The block of the paper, which scales the channels of a residual branch, is ``timm.layers.SqueezeExcite`` with
    ``at="branch"``. :class:`NormBlock2d` is the control for the normalization and gate of this block.

    Args:
        channels: number of channels.
        gate_init: initial gate of every channel.

    Raises:
        ValueError: ``channels`` is not a positive integer, or ``gate_init`` is not finite.

    Source: Hu et al., *Squeeze-and-Excitation Networks*, 2018, https://arxiv.org/abs/1709.01507

    >>> import torch
    >>> block = SqueezeExciteBlock2d(64)
    >>> sum(p.numel() for p in block.parameters()), block(torch.randn(2, 64, 7, 7)).shape
    (16768, torch.Size([2, 64, 7, 7]))
    """

    def __init__(self, channels: int, *, gate_init: float = 0.0) -> None:
        from timm.layers import SqueezeExcite

        super().__init__(channels, gate_init=gate_init)
        # Attention has 4c² + 4c parameters, this branch has hidden·(2c + 1) + c.
        hidden = max(1, round((4 * channels**2 + 3 * channels) / (2 * channels + 1)))
        self.excite = SqueezeExcite(channels, rd_channels=hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.add(x, self.excite(self.norm(x)))

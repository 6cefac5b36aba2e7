"""Controls: blocks without attention, with about as many parameters as :class:`AttentionBlock2d` or fewer.

Comparisons with them show how much of the gain of a block is due to attention.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention.blocks.gated_residual import GatedResidual
from vision_attn.attention.blocks.projection import Pointwise2d


class ConvBlock2d(GatedResidual):
    """Residual block with a depthwise convolution instead of attention.

    ``x + gate · W₂ gelu(depthwise(W₁ norm(x)))``. The hidden width is chosen so that the number of parameters is as
    close as possible to that of :class:`AttentionBlock2d`. A large kernel covers as many positions as attention, but
    its weights do not depend on the input. With ``kernel_size=None``, a global mean replaces the convolution, and the
    block adds the output of a perceptron on the pooled feature map to every position.

    Args:
        channels: number of channels.
        kernel_size: odd height and width of the depthwise kernel; None for the global mean.
        gate_init: initial gate of every channel; None for gates of one and a last convolution with zero weights.

    Raises:
        ValueError: ``kernel_size`` is even.

    >>> from vision_attn.attention.blocks import AttentionBlock2d
    >>> count = lambda block: sum(p.numel() for p in block.parameters())
    >>> count(ConvBlock2d(64)), count(ConvBlock2d(64, kernel_size=13)), count(AttentionBlock2d(64))
    (16797, 16701, 16832)
    """

    def __init__(self, channels: int, *, kernel_size: int | None = 3, gate_init: float | None = None) -> None:
        super().__init__(channels, gate_init)
        # Attention has 4c² + 4c parameters, this branch has hidden(2c + kernel² + 2) + c.
        each = 2 * channels + 1 + (0 if kernel_size is None else kernel_size**2 + 1)
        hidden = max(1, round((4 * channels**2 + 3 * channels) / each))
        self.expand = Pointwise2d(channels, hidden, 1)
        self.depthwise: nn.Module | None = None
        if kernel_size is not None:
            if kernel_size % 2 == 0:
                raise ValueError(f"kernel_size must be odd, got {kernel_size}")
            self.depthwise = nn.Conv2d(hidden, hidden, kernel_size, padding=kernel_size // 2, groups=hidden)
        self.project = Pointwise2d(hidden, channels, 1)
        self.zero_init_last()

    def last_projection(self) -> nn.Module:
        return self.project

    def forward(self, x: Tensor) -> Tensor:
        y = self.expand(self.norm(x))
        y = y.mean((-2, -1), keepdim=True) if self.depthwise is None else self.depthwise(y)
        return self.add(x, self.project(F.gelu(y)))


class NormBlock2d(GatedResidual):
    """Residual block with only a normalization and a gate, ``x + gate · norm(x)``.

    A comparison with it shows how much of the gain of a block is due to its normalization and gate.

    Args:
        channels: number of channels.
        gate_init: initial gate of every channel.

    >>> import torch
    >>> NormBlock2d(64)(torch.randn(2, 64, 7, 7)).shape
    torch.Size([2, 64, 7, 7])
    """

    def __init__(self, channels: int, *, gate_init: float = 0.0) -> None:
        super().__init__(channels, gate_init)

    def forward(self, x: Tensor) -> Tensor:
        return self.add(x, self.norm(x))


class SqueezeExciteBlock2d(NormBlock2d):
    """Residual block with squeeze and excitation, which does not compare positions.

    ``x + gate · y · sigmoid(W₂ relu(W₁ mean(y)))`` with ``y = norm(x)``. The hidden width is about twice the number of
    channels, so that the number of parameters is as close as possible to that of :class:`AttentionBlock2d`. There is no
    last projection to initialize with zeros, so the gate is initialized with zeros and grows slowly.

    The block of the paper, which scales the channels of a residual branch, is ``timm.layers.SqueezeExcite`` after
    the last norm of the branch. :class:`NormBlock2d` is the control for the normalization and gate of this block.

    Args:
        channels: number of channels.
        gate_init: initial gate of every channel.

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


class CostVolumeBlock2d(GatedResidual):
    """Residual block with a cost volume, the usual operator for correspondences, in place of attention.

    ``x + gate · W₃ softmax(s · cos(f, g)) W₂ norm(x)`` with features ``f = W₁ norm(x)``, a learned scale ``s`` of each
    head, and ``g = f``, as is usual. With separate features, ``g = W₄ norm(x)``, the match need not be symmetric, and
    the block is attention with cosine similarity. No position is compared with itself.

    Args:
        channels: number of channels.
        num_heads: number of heads with separate cosines.
        separate: compute the features ``g`` by separate weights.
        gate_init: initial gate of every channel; None for gates of one and a last convolution with zero weights.

    >>> count = lambda block: sum(p.numel() for p in block.parameters())
    >>> count(CostVolumeBlock2d(64)), count(CostVolumeBlock2d(64, 4, separate=True))
    (12673, 16836)
    """

    def __init__(
        self, channels: int, num_heads: int = 1, *, separate: bool = False, gate_init: float | None = None
    ) -> None:
        super().__init__(channels, gate_init)
        self.features = Pointwise2d(channels, (1 + separate) * channels, 1)
        self.value, self.proj = Pointwise2d(channels, channels, 1), Pointwise2d(channels, channels, 1)
        self.logit_scale = nn.Parameter(torch.full((num_heads, 1, 1), math.log(14)))
        self.separate = separate
        self.zero_init_last()

    def last_projection(self) -> nn.Module:
        return self.proj

    def forward(self, x: Tensor) -> Tensor:
        y, heads = self.norm(x), len(self.logit_scale)
        features, values = (
            z.flatten(2).unflatten(1, (-1, heads, x.shape[1] // heads)) for z in (self.features(y), self.value(y))
        )
        f, g = F.normalize(features[:, 0], dim=2), F.normalize(features[:, -1], dim=2)
        logits = self.logit_scale.exp() * f.mT @ g
        itself = torch.eye(logits.shape[-1], dtype=torch.bool, device=x.device)
        weights = logits.masked_fill(itself, -torch.inf).softmax(-1).to(values.dtype)
        return self.add(x, self.proj((values[:, 0] @ weights.mT).reshape(x.shape)))

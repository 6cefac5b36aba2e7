"""Absolute positions: added to the map before it is projected, as waves or a convolution (CPVT), or learned by keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from vision_attn.attention.patterns import Partition
from vision_attn.attention.position.rotary import check_temperature
from vision_attn.attention.position.term import AXIS_NAMES, BlockShape, PositionTerm, check_feat_size

__all__ = ["CONVOLUTIONS", "AbsPos", "ConditionalPos", "SinCos"]

#: The convolution for maps with one, two and three axes.
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


@dataclass(frozen=True)
class SinCos:
    """``x + p``, where ``p`` holds sines and cosines of every place: no parameters, and any size of map.

    Channels are ``[sin y, sin x, cos y, cos x]``, each ``place · temperature^(-k/m)`` for ``k`` from 0 to ``m - 1``.

    Args:
        temperature: how much slower the slowest wave is than the fastest.

    Raises:
        ValueError: a temperature that is no number above one; channels that are no multiple of twice the axes of the
            map (when the block is made).

    Source: Vaswani et al., *Attention Is All You Need*, 2017, section 3.5, https://arxiv.org/abs/1706.03762; on maps:
    Chen et al., *An Empirical Study of Training Self-Supervised Vision Transformers*, 2021,
    https://arxiv.org/abs/2104.02057

    >>> SinCos()
    SinCos(temperature=10000.0)
    """

    temperature: float = 10000.0

    def __post_init__(self) -> None:
        check_temperature("SinCos", self.temperature)

    def build(self, shape: BlockShape, device: Any = None, dtype: Any = None) -> PositionTerm:
        if shape.channels % (2 * shape.rank):
            raise ValueError(
                f"SinCos: channels must be a multiple of {2 * shape.rank}, a sine and a cosine for each axis; "
                f"got {shape.channels}"
            )
        return SinCosTerm(self)


class SinCosTerm(PositionTerm):
    specification: SinCos
    needs_channels = True

    def add_to_map(self, x: Tensor) -> Tensor:
        size = x.shape[2:]
        waves = x.shape[1] // (2 * len(size))
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        speed = float(self.specification.temperature) ** -(torch.arange(waves, device=x.device, dtype=dtype) / waves)
        angles = []
        for axis, length in enumerate(size):
            angle = speed[:, None] * torch.arange(length, device=x.device, dtype=dtype)
            angles.append(
                angle.view(-1, *(length if other == axis else 1 for other in range(len(size)))).expand(-1, *size)
            )
        angle = torch.cat(angles)
        return x + torch.cat([angle.sin(), angle.cos()]).to(x.dtype)


@dataclass(frozen=True)
class ConditionalPos:
    """``x + depthwise(x)``: a convolution whose zero padding tells where the borders are, as in CPVT.

    Parameters: ``position.conv.weight (c, 1, k, k)`` and ``position.conv.bias (c)``. Any size of map.

    Args:
        kernel_size: side of the kernel, in positions; odd.

    Raises:
        ValueError: a kernel that is not odd.

    Source: Chu et al., *Conditional Positional Encodings for Vision Transformers*, 2021,
    https://arxiv.org/abs/2102.10882

    >>> ConditionalPos(3)
    ConditionalPos(kernel_size=3)
    """

    kernel_size: int = 3

    def __post_init__(self) -> None:
        if isinstance(self.kernel_size, bool) or not isinstance(self.kernel_size, int) or self.kernel_size % 2 != 1:
            raise ValueError(f"ConditionalPos: kernel_size must be an odd whole number; got {self.kernel_size!r}")
        if self.kernel_size < 1:
            raise ValueError(f"ConditionalPos: kernel_size must be at least 1; got {self.kernel_size}")

    def build(self, shape: BlockShape, device: Any = None, dtype: Any = None) -> PositionTerm:
        return ConditionalTerm(self, shape, device, dtype)


class ConditionalTerm(PositionTerm):
    needs_channels = True

    def __init__(self, specification: ConditionalPos, shape: BlockShape, device: Any, dtype: Any) -> None:
        super().__init__(specification)
        side, c = specification.kernel_size, shape.channels
        self.conv = CONVOLUTIONS[shape.rank](c, c, side, padding=side // 2, groups=c, device=device, dtype=dtype)

    def add_to_map(self, x: Tensor) -> Tensor:
        return x + self.conv(x)


@dataclass(frozen=True)
class AbsPos:
    """The logit of query ``i`` and key ``j`` grows by ``scale · q_i · (H[y_j] + W[x_j])``: keys learn where they are.

    Parameters: ``position.height (h, d)`` and ``position.width (w, d)``, shared by the heads. On a map of another size
    they are stretched linearly.

    Args:
        feat_size: size of the map that they are learned on, in positions; one for all axes or one for each.

    Raises:
        ValueError: ``feat_size`` is no size, or not one for each axis of the map (when the block is made).

    Source: the absolute positions that Srinivas et al., *Bottleneck Transformers*, 2021, compare with,
    https://arxiv.org/abs/2101.11605

    >>> AbsPos(feat_size=(14, 14))
    AbsPos(feat_size=(14, 14))
    """

    feat_size: int | tuple[int, ...] | None

    def __post_init__(self) -> None:
        check_feat_size("AbsPos", self.feat_size)

    def build(self, shape: BlockShape, device: Any = None, dtype: Any = None) -> PositionTerm:
        return AbsTerm(self, shape, device, dtype)


class AbsTerm(PositionTerm):
    def __init__(self, specification: AbsPos, shape: BlockShape, device: Any, dtype: Any) -> None:
        super().__init__(specification)
        size = specification.feat_size
        lengths = size if isinstance(size, tuple) else (size,) * shape.rank
        if len(lengths) != shape.rank or None in lengths:
            raise ValueError(f"AbsPos: feat_size must be a size for each of {shape.rank} axes; got {size!r}")
        self.names = AXIS_NAMES[-shape.rank :]
        for name, length in zip(self.names, lengths, strict=True):
            table = torch.randn(length or 0, shape.key_dim, device=device, dtype=dtype) * shape.key_dim**-0.5
            self.register_parameter(name, nn.Parameter(table))

    def forward(
        self, q: Tensor, k: Tensor, scale: float, part: Partition, keys: Partition
    ) -> tuple[Tensor, Tensor, float, Tensor | None]:
        here = k.new_zeros((1,) * len(keys.size) + k.shape[-1:])
        for axis, (name, length) in enumerate(zip(self.names, keys.size, strict=True)):
            table = stretched(getattr(self, name), length).to(k.dtype)
            here = here + table.view([length if other == axis else 1 for other in range(len(keys.size))] + [-1])
        here = here.flatten(0, -2)
        if keys.is_global:
            return q, k + here, scale, None
        index = keys.index()[1]
        here = here[index] * (index >= 0)[..., None]  # what is beyond the map is nowhere
        return q, (k.unflatten(0, (-1, len(index))) + here[:, None]).flatten(0, 1), scale, None

    def resampled(self, name: str, saved: Tensor) -> Tensor | None:
        table = getattr(self, name)
        return stretched(saved, len(table)) if saved.dim() == 2 and saved.shape[1] == table.shape[1] else None


def stretched(table: Tensor, length: int) -> Tensor:
    """A table by place, ``(places, d)``, for another number of places."""
    return table if len(table) == length else interpolate(table.T[None], size=length, mode="linear")[0].T

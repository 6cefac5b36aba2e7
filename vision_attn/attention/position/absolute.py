"""Absolute positions: added to the map (waves, a convolution), learned by the keys, or as rotations (RoPE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from vision_attn.attention.masks import upcast
from vision_attn.attention.patterns.partition import Partition, Side
from vision_attn.attention.patterns.specifications import check_lengths
from vision_attn.attention.position.term import AXIS_NAMES, BlockShape, Placed, PositionTerm
from vision_attn.checks import check_number

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
        check_number("SinCos: temperature", self.temperature, above=1)

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
        exact: dict[str, Any] = {"device": x.device, "dtype": upcast(x[:0]).dtype}
        speed = speeds(x.shape[1] // (2 * len(size)), self.specification.temperature, exact)
        places = torch.meshgrid([torch.arange(length, **exact) for length in size], indexing="ij")
        angle = torch.cat([speed.view(-1, *(1,) * len(size)) * place for place in places])
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
        if type(self.kernel_size) is not int or self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise ValueError(f"ConditionalPos: kernel_size must be an odd whole number; got {self.kernel_size!r}")

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

    feat_size: int | tuple[int, ...]

    def __post_init__(self) -> None:
        check_lengths("AbsPos", "feat_size", self.feat_size)

    def build(self, shape: BlockShape, device: Any = None, dtype: Any = None) -> PositionTerm:
        return AbsTerm(self, shape, device, dtype)


class AbsTerm(PositionTerm):
    def __init__(self, specification: AbsPos, shape: BlockShape, device: Any, dtype: Any) -> None:
        super().__init__(specification)
        size = specification.feat_size
        lengths = size if isinstance(size, tuple) else (size,) * shape.rank
        if len(lengths) != shape.rank:
            raise ValueError(f"AbsPos: feat_size must be a size for each of {shape.rank} axes; got {size!r}")
        self.names: tuple[str, ...] = AXIS_NAMES[-shape.rank :]
        for name, length in zip(self.names, lengths, strict=True):
            table = torch.randn(length, shape.key_dim, device=device, dtype=dtype) * shape.key_dim**-0.5
            self.register_parameter(name, nn.Parameter(table))

    def forward(self, q: Tensor, k: Tensor, scale: float, part: Partition) -> Placed:
        size = part.keys.size
        here = k.new_zeros((1,) * len(size) + k.shape[-1:])
        for axis, (name, length) in enumerate(zip(self.names, size, strict=True)):
            table = stretched(getattr(self, name), length).to(k.dtype)
            here = here + table.view([length if other == axis else 1 for other in range(len(size))] + [-1])
        here = here.flatten(0, -2)
        if part.is_global:
            return q, k + here, scale, None
        index = part.keys.index()
        here = here[index] * (index >= 0)[..., None]  # keys beyond the map have no position
        return q, (k.unflatten(0, (-1, len(index))) + here[:, None]).flatten(0, 1), scale, None

    def resampled(self, name: str, saved: Tensor) -> Tensor | None:
        table = getattr(self, name)
        return stretched(saved, len(table)) if saved.dim() == 2 and saved.shape[1] == table.shape[1] else None


def stretched(table: Tensor, length: int) -> Tensor:
    """A table by place, ``(places, d)``, for another number of places."""
    return table if len(table) == length else interpolate(table.T[None], size=length, mode="linear")[0].T


@dataclass(frozen=True)
class Rope2d:
    """Axial rotary positions: pairs of neighbouring channels are rotated, half of each head by ``y``, half by ``x``.

    ``(q_2k, q_2k+1)`` is rotated by ``y · temperature^(-4k/d)`` in the first half of the head, by ``x`` in the
    second; keys likewise. ``y`` and ``x`` are those on the map, whatever the pattern, and pixels' centres are laid over
    each other where the keys' map is of another size. There are no parameters.

    Args:
        temperature: how much slower the slowest pair rotates than the fastest.
        feat_size: size of the map, in positions, over which ``y`` and ``x`` are measured: a map of another size has
            them stretched to it. None measures in positions.

    Raises:
        ValueError: an argument out of range; heads whose width is no multiple of four, or maps without two axes (when
            the block is made).

    Source: Su et al., *RoFormer*, 2021, https://arxiv.org/abs/2104.09864; axial on images: Heo et al., *Rotary Position
    Embedding for Vision Transformer*, 2024, https://arxiv.org/abs/2403.13298

    >>> Rope2d()
    Rope2d(temperature=10000.0, feat_size=None)
    """

    temperature: float = 10000.0
    feat_size: int | tuple[int, int] | None = None

    def __post_init__(self) -> None:
        check_number("Rope2d: temperature", self.temperature, above=1)
        if self.feat_size is not None:
            check_lengths("Rope2d", "feat_size", self.feat_size)
        if isinstance(self.feat_size, tuple) and len(self.feat_size) != 2:
            raise ValueError(f"Rope2d: feat_size must be for two axes; got {self.feat_size!r}")

    def build(self, shape: BlockShape, device: Any = None, dtype: Any = None) -> PositionTerm:
        if shape.rank != 2:
            raise ValueError(f"Rope2d: position must be for maps with two axes; got a block for {shape.rank}")
        if shape.key_dim % 4:
            raise ValueError(f"Rope2d: key_dim must be a multiple of 4, a pair for each axis; got {shape.key_dim}")
        return RotaryTerm(self)


class RotaryTerm(PositionTerm):
    specification: Rope2d

    def forward(self, q: Tensor, k: Tensor, scale: float, part: Partition) -> Placed:
        q = rotate(q, self.angles(q, part.queries, part))
        return q, rotate(k, self.angles(k, part.keys, part)), scale, None

    def angles(self, x: Tensor, side: Side, part: Partition) -> Tensor:
        """The angle of every pair of ``x``, ``(…, d)``, at each token: ``(i, pairs)`` or ``(groups, i, pairs)``."""
        exact: dict[str, Any] = {"device": x.device, "dtype": upcast(x[:0]).dtype}
        speed = speeds(x.shape[-1] // 4, self.specification.temperature, exact)
        feat_size = self.specification.feat_size
        angles = []
        for axis, (length, reference) in enumerate(zip(side.size, part.queries.size, strict=True)):
            position = (torch.arange(length, **exact) + 0.5) * (reference / length) - 0.5
            if feat_size is not None:
                position = position * ((feat_size if isinstance(feat_size, int) else feat_size[axis]) / reference)
            angle = position[:, None] * speed
            angles.append((angle[:, None] if axis == 0 else angle[None]).expand(*side.size, -1))
        on_map = torch.cat(angles, dim=-1).flatten(0, 1)
        return on_map if part.is_global else on_map[side.index()]


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Pairs of channels of ``(b·groups, n, i, d)``, rotated by angles ``(i, pairs)`` or ``(groups, i, pairs)``."""
    groups = angles.shape[0] if angles.dim() == 3 else 1
    even, odd = upcast(x).unflatten(0, (-1, groups)).unflatten(-1, (-1, 2)).unbind(-1)  # b groups n i pairs
    if angles.dim() == 3:
        angles = angles[:, None]
    cos, sin = angles.cos(), angles.sin()
    rotated = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return rotated.flatten(-2).flatten(0, 1).to(x.dtype)


def speeds(waves: int, temperature: float, exact: dict[str, Any]) -> Tensor:
    """The factor on a place for each wave, ``temperature^(-k/m)``: the fastest first."""
    return float(temperature) ** -(torch.arange(waves, **exact) / waves)

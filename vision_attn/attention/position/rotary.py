"""2-D rotary position embedding (RoPE): half of each head is rotated by row, half by column."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vision_attn.attention.attend import upcast
from vision_attn.attention.patterns import Partition
from vision_attn.attention.position.term import BlockShape, PositionTerm, check_feat_size

__all__ = ["Rope2d"]


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
        check_temperature("Rope2d", self.temperature)
        check_feat_size("Rope2d", self.feat_size)
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

    def forward(
        self, q: Tensor, k: Tensor, scale: float, part: Partition, keys: Partition
    ) -> tuple[Tensor, Tensor, float, Tensor | None]:
        angles, angles_of_keys = self.angles(q, part, part), self.angles(k, keys, part)
        if not part.is_global:
            queries, keys_index = part.index()
            angles, angles_of_keys = angles[queries], angles_of_keys[keys_index]
        return rotate(q, angles), rotate(k, angles_of_keys), scale, None

    def angles(self, x: Tensor, here: Partition, queries: Partition) -> Tensor:
        """The angle of every pair of a head at every position of a map, ``(h·w, pairs)``; ``x`` is ``(…, d)``."""
        exact: dict[str, Any] = {"device": x.device, "dtype": upcast(x[:0]).dtype}
        each = x.shape[-1] // 4
        speed = float(self.specification.temperature) ** -(torch.arange(each, **exact) / each)
        feat_size = self.specification.feat_size
        angles = []
        for axis, (length, reference) in enumerate(zip(here.size, queries.size, strict=True)):
            position = (torch.arange(length, **exact) + 0.5) * (reference / length) - 0.5
            if feat_size is not None:
                position = position * ((feat_size if isinstance(feat_size, int) else feat_size[axis]) / reference)
            angle = position[:, None] * speed
            angles.append((angle[:, None] if axis == 0 else angle[None]).expand(*here.size, -1))
        return torch.cat(angles, dim=-1).flatten(0, 1)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Pairs of channels of ``(b·groups, n, i, d)`` rotated by angles ``(i, pairs)`` or ``(groups, i, pairs)``."""
    groups = angles.shape[0] if angles.dim() == 3 else 1
    even, odd = upcast(x).unflatten(0, (-1, groups)).unflatten(-1, (-1, 2)).unbind(-1)  # b groups n i pairs
    if angles.dim() == 3:
        angles = angles[:, None]
    cos, sin = angles.cos(), angles.sin()
    rotated = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return rotated.flatten(-2).flatten(0, 1).to(x.dtype)


def check_temperature(owner: str, temperature: float) -> None:
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 1 < temperature < math.inf:
        raise ValueError(f"{owner}: temperature must be a finite number above 1; got {temperature!r}")

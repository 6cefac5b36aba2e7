"""Rotary positions: queries and keys turned by angles that grow with their place, so that logits see the difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vision_attn.attend.masks import at_least_float32
from vision_attn.position.extents import check_feat_size
from vision_attn.position.term import BlockShape, PositionTerm

__all__ = ["Rope2d"]


@dataclass(frozen=True)
class Rope2d:
    """Axial rotary positions: pairs of neighbouring channels are turned, half of each head by ``y``, half by ``x``.

    ``(q_2k, q_2k+1)`` is turned by the angle ``y · temperature^(-4k/d)`` in the first half of the head, by ``x`` in the
    second; keys likewise. Places are those on the map, whatever the pattern, and pixels' centres are laid over each
    other where the keys' map is of another size. There are no parameters.

    Args:
        temperature: how much slower the slowest pair turns than the fastest.
        feat_size: size of the map, in positions, over which places are measured: a map of another size has its places
            stretched to it. None measures in positions.

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

    def build(
        self, shape: BlockShape, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> PositionTerm:
        """The term for one block; it has no parameters.

        Arguments are those of :meth:`vision_attn.position.Specification.build`.

        Raises:
            ValueError: the width of the block's heads is no multiple of four, or its maps do not have two axes.
        """
        if shape.rank != 2:
            raise ValueError(f"Rope2d: position must be for maps with two axes; got a block for {shape.rank}")
        if shape.key_dim % 4:
            raise ValueError(f"Rope2d: key_dim must be a multiple of 4, a pair for each axis; got {shape.key_dim}")
        return RotaryTerm(self)


class RotaryTerm(PositionTerm):
    specification: Rope2d

    def turn(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        size = q.shape[3:]
        return self.turned(q, size), self.turned(k, size)

    def turned(self, x: Tensor, size: Sequence[int]) -> Tensor:
        """Pairs of ``(b, n, d, h, w)`` turned, by places measured on the queries' map."""
        # With the width of a head innermost, as fused kernels want it: b n h w (pair two).
        pairs = at_least_float32(x).movedim(2, -1).unflatten(-1, (-1, 2))
        angle = self.angles(pairs, size)
        cos, sin = angle.cos(), angle.sin()
        even, odd = pairs.unbind(-1)
        turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
        return turned.flatten(-2).to(x.dtype).movedim(-1, 2)

    def angles(self, pairs: Tensor, size: Sequence[int]) -> Tensor:
        """The angle of every pair of a head at every place of ``(b, n, h, w, pairs, 2)``, ``(h, w, pairs)``."""
        here, each = pairs.shape[2:4], pairs.shape[4] // 2
        exact: dict[str, Any] = {"device": pairs.device, "dtype": pairs.dtype}
        speed = self.specification.temperature ** -(torch.arange(each, **exact) / each)
        feat_size = self.specification.feat_size
        angles = []
        for axis, (length, queries) in enumerate(zip(here, size, strict=True)):
            place = (torch.arange(length, **exact) + 0.5) * (queries / length) - 0.5
            if feat_size is not None:
                place = place * ((feat_size if isinstance(feat_size, int) else feat_size[axis]) / queries)
            angle = place[:, None] * speed
            angles.append((angle[:, None] if axis == 0 else angle[None]).expand(*here, -1))
        return torch.cat(angles, dim=-1)


def check_temperature(owner: str, temperature: float) -> None:
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 1 < temperature < math.inf:
        raise ValueError(f"{owner}: temperature must be a finite number above 1; got {temperature!r}")

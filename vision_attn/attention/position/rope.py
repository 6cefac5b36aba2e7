"""Axial rotary positions: queries and keys are rotated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vision_attn.attention.masks import upcast
from vision_attn.attention.patterns.grouping import Grouping
from vision_attn.attention.patterns.layout import TokenLayout
from vision_attn.attention.patterns.pattern import check_lengths, for_axes
from vision_attn.attention.position.encoding import AttentionShape, Encoded, PositionEncoding
from vision_attn.attention.position.sin_cos import frequencies
from vision_attn.checks import check_number


@dataclass(frozen=True)
class Rope2d:
    """Axial rotary positions: pairs of neighboring channels are rotated, half of each head by ``y``, half by ``x``.

    ``(q_2k, q_2k+1)`` is rotated by ``y · temperature^(-4k/d)`` in the first half of the head, by ``x`` in the
    second; keys likewise. ``y`` and ``x`` are positions on the map, in every pattern; where the keys' map has another
    size, the two maps cover the same area, with pixel centers aligned. There are no parameters.

    Args:
        temperature: ratio of the highest and the lowest frequency.
        feat_size: size of the map, in positions, that ``y`` and ``x`` are scaled to, whatever the size of the map.
            None uses positions as they are.

    Raises:
        ValueError: an argument out of range; heads whose width is not a multiple of four, or maps without two axes
            (when the block is built).

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
            for_axes("Rope2d", "feat_size", self.feat_size, 2)

    def build(self, shape: AttentionShape, device: Any = None, dtype: Any = None) -> PositionEncoding:
        if shape.rank != 2:
            raise ValueError(f"Rope2d: position must be for maps with two axes; got a block for {shape.rank}")
        if shape.key_dim % 4:
            raise ValueError(f"Rope2d: key_dim must be a multiple of 4, a pair for each axis; got {shape.key_dim}")
        return RotaryEncoding(self)


class RotaryEncoding(PositionEncoding):
    config: Rope2d

    def forward(self, q: Tensor, k: Tensor, grouping: Grouping) -> Encoded:
        q = rotate(q, *self.cos_sin(q, grouping.query_layout, grouping))
        return q, rotate(k, *self.cos_sin(k, grouping.key_layout, grouping)), None

    def cos_sin(self, x: Tensor, layout: TokenLayout, grouping: Grouping) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines for each channel of each token, ``(groups, 1, i, d)``, in the dtype of x."""

        def make() -> tuple[Tensor, Tensor]:
            angles = self.angles(x, layout, grouping.query_layout.size)
            cos, sin = angles.cos(), angles.sin()
            pairs = torch.stack([cos, cos], dim=-1), torch.stack([-sin, sin], dim=-1)
            return pairs[0].flatten(-2).to(x.dtype), pairs[1].flatten(-2).to(x.dtype)

        side = "queries" if layout is grouping.query_layout else "keys"
        return grouping.cached((side, "cos_sin", x.dtype), make)

    def angles(self, x: Tensor, layout: TokenLayout, reference: tuple[int, ...]) -> Tensor:
        """Return the angle of every pair of channels, ``(groups, 1, i, pairs)``, on the scale of the queries' map."""
        exact: dict[str, Any] = {"device": x.device, "dtype": upcast(x[:0]).dtype}
        frequency, feat_size = frequencies(x.shape[-1] // 4, self.config.temperature, exact), self.config.feat_size
        angles = []
        for axis, (length, queries) in enumerate(zip(layout.size, reference, strict=True)):
            position = (torch.arange(length, **exact) + 0.5) * (queries / length) - 0.5
            if feat_size is not None:
                position = position * (for_axes("Rope2d", "feat_size", feat_size, 2)[axis] / queries)
            angle = position[:, None] * frequency
            angles.append((angle[:, None] if axis == 0 else angle[None]).expand(*layout.size, -1))
        on_map = torch.cat(angles, dim=-1).flatten(0, 1)
        return (on_map[None] if layout.is_whole else on_map[layout.index()])[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of channels of ``(b·groups, n, i, d)``: each channel becomes ``x cos + partner (±sin)``."""
    x = x.unflatten(0, (-1, len(cos)))
    partner = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(x * cos, partner, sin).flatten(0, 1)

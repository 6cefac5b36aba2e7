"""Axial rotary position embedding of queries and keys."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vision_attn.attention.kind import AttentionConfig
from vision_attn.attention.masks import upcast
from vision_attn.attention.patterns.grouping import Grouping
from vision_attn.attention.patterns.layout import TokenLayout
from vision_attn.attention.patterns.pattern import check_lengths, to_ntuple
from vision_attn.attention.position.encoding import Encoded, PositionEncoding
from vision_attn.attention.position.sin_cos import frequencies
from vision_attn.checks import check_above, check_bool


@dataclass(frozen=True)
class Rope:
    """Axial rotary position embedding: pairs of adjacent channels of queries and keys are rotated.

    ::

        (q_2k, q_2k+1) is rotated by the angle    y · temperature^(-4k/d)    in the first half of each head
                                                  x · temperature^(-4k/d)    in the second half of each head
        k = 0, …, d/4 - 1 in each half

    ``(y, x)`` is the position on the complete feature map, also inside windows. With one or three axes, a head has one
    or three parts instead of two halves. If the feature map of the keys has another size, its positions are scaled, so
    that both feature maps cover the same area with aligned pixel centers. There are no parameters.

    Args:
        temperature: base of the frequencies; larger values give longer wavelengths.
        feat_size: size of the feature map, in positions, to which ``y`` and ``x`` are scaled: an integer for all axes,
            or a tuple with one integer per axis. If None, positions are not scaled.
        normalized: measure positions from -2π to 2π over the feature map instead: ``y = 2π · (2 (row + 0.5) / h - 1)``.
            DINOv3 does so, with ``temperature=100``.

    Raises:
        ValueError: ``temperature`` is not above 0, or ``feat_size`` is given with ``normalized``; or, when the block is
            built, ``feat_size`` does not match the number of axes, or the width of a head is not a multiple of twice
            the number of axes.

    Source: Su et al., *RoFormer*, 2021, https://arxiv.org/abs/2104.09864; axial on images: Heo et al., *Rotary Position
    Embedding for Vision Transformer*, 2024, https://arxiv.org/abs/2403.13298; normalized: Siméoni et al., *DINOv3*,
    2025, https://arxiv.org/abs/2508.10104

    >>> Rope(temperature=100.0, normalized=True)
    Rope(temperature=100.0, feat_size=None, normalized=True)
    """

    temperature: float = 10000.0
    feat_size: int | tuple[int, ...] | None = None
    normalized: bool = False

    def __post_init__(self) -> None:
        check_above(0, temperature=self.temperature)
        check_bool(normalized=self.normalized)
        if self.normalized and self.feat_size is not None:
            raise ValueError(f"Rope: feat_size must be None with normalized=True, got {self.feat_size}")

    def build(self, block: AttentionConfig, device: Any = None, dtype: Any = None) -> PositionEncoding:
        check_lengths("Rope", "feat_size", self.feat_size, optional=True)
        to_ntuple("Rope", "feat_size", self.feat_size, block.rank)
        if block.key_dim % (2 * block.rank):
            raise ValueError(f"Rope: key_dim must be a multiple of {2 * block.rank}, got {block.key_dim}")
        return RotaryEncoding(self)


class RotaryEncoding(PositionEncoding):
    config: Rope

    def forward(self, q: Tensor, k: Tensor, grouping: Grouping) -> Encoded:
        q = rotate(q, *self.cos_sin(q, grouping.query_layout, grouping))
        return q, rotate(k, *self.cos_sin(k, grouping.key_layout, grouping)), None

    def cos_sin(self, x: Tensor, layout: TokenLayout, grouping: Grouping) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines for each token and channel, ``(groups, 1, i, d)``, in the dtype of ``x``."""

        def compute() -> tuple[Tensor, Tensor]:
            angles = self.angles(x, layout, grouping.query_layout.size)
            cos, sin = angles.cos(), angles.sin()
            pairs = torch.stack([cos, cos], dim=-1), torch.stack([-sin, sin], dim=-1)
            return pairs[0].flatten(-2).to(x.dtype), pairs[1].flatten(-2).to(x.dtype)

        name = "queries" if layout is grouping.query_layout else "keys"
        return grouping.cached((name, "cos_sin", x.dtype), compute)

    def angles(self, x: Tensor, layout: TokenLayout, reference: tuple[int, ...]) -> Tensor:
        """Return the angle of each pair of channels, ``(groups, 1, i, pairs)``; ``reference`` is the queries' size."""
        exact: dict[str, Any] = {"device": x.device, "dtype": upcast(x[:0]).dtype}
        axes, config = len(reference), self.config
        frequency = frequencies(x.shape[-1] // (2 * axes), config.temperature, exact)
        positions = []
        for axis, (length, queries) in enumerate(zip(layout.size, reference, strict=True)):
            center = torch.arange(length, **exact) + 0.5
            if config.normalized:
                position = 2 * math.pi * (2 * center / length - 1)
            else:
                size = to_ntuple("Rope", "feat_size", config.feat_size, axes)[axis] or queries
                position = (center * (queries / length) - 0.5) * (size / queries)
            positions.append(position)
        coords = torch.stack(torch.meshgrid(positions, indexing="ij"), dim=-1).flatten(0, -2)  # (tokens, axes)
        by_position = (coords[:, :, None] * frequency).flatten(1)
        return (by_position[None] if layout.is_identity else by_position[layout.index()])[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of channels of ``(b·groups, n, i, d)``: ``x · cos + partner · (±sin)``."""
    shape, groups = x.shape, cos.shape[0]
    x = x if groups == 1 else x.reshape(-1, groups, *shape[1:])
    partner = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    y = torch.addcmul(x * cos, partner, sin)
    return y if groups == 1 else y.flatten(0, 1)

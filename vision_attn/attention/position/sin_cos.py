"""Sines and cosines of the position, added to the feature map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vision_attn.attention.masks import upcast
from vision_attn.attention.patterns.grouping import Grouping
from vision_attn.attention.position.encoding import AttentionShape, PositionEncoding
from vision_attn.checks import check_number


@dataclass(frozen=True)
class SinCos:
    """``x + p``, where ``p`` holds sines and cosines of every position: no parameters, and any size of map.

    Channels are ``[sin y, sin x, cos y, cos x]``, each of ``position · temperature^(-k/m)`` for ``k`` from 0 to
    ``m - 1``.

    Args:
        temperature: ratio of the highest and the lowest frequency.

    Raises:
        ValueError: a temperature that is not a number above one; channels that are not a multiple of twice the number
            of axes (when the block is built).

    Source: Vaswani et al., *Attention Is All You Need*, 2017, section 3.5, https://arxiv.org/abs/1706.03762; on feature
    maps: Chen et al., *An Empirical Study of Training Self-Supervised Vision Transformers*, 2021,
    https://arxiv.org/abs/2104.02057

    >>> SinCos()
    SinCos(temperature=10000.0)
    """

    temperature: float = 10000.0

    def __post_init__(self) -> None:
        check_number("SinCos: temperature", self.temperature, above=1)

    def build(self, shape: AttentionShape, device: Any = None, dtype: Any = None) -> PositionEncoding:
        if shape.channels % (2 * shape.rank):
            raise ValueError(f"SinCos: channels must be a multiple of {2 * shape.rank}; got {shape.channels}")
        return SinCosEncoding(self)


class SinCosEncoding(PositionEncoding):
    config: SinCos
    adds_to_map = True

    def add_to_map(self, x: Tensor, grouping: Grouping) -> Tensor:
        size = x.shape[2:]
        exact: dict[str, Any] = {"device": x.device, "dtype": upcast(x[:0]).dtype}

        def waves() -> Tensor:
            frequency = frequencies(x.shape[1] // (2 * len(size)), self.config.temperature, exact)
            positions = torch.meshgrid([torch.arange(length, **exact) for length in size], indexing="ij")
            angle = torch.cat([frequency.view(-1, *(1,) * len(size)) * position for position in positions])
            return torch.cat([angle.sin(), angle.cos()]).to(x.dtype)

        return x + grouping.cached(("waves", tuple(size), x.dtype), waves)


def frequencies(count: int, temperature: float, exact: dict[str, Any]) -> Tensor:
    """Return the factor on a position for each wave, ``temperature^(-k/m)``, the highest frequency first."""
    return float(temperature) ** -(torch.arange(count, **exact) / count)

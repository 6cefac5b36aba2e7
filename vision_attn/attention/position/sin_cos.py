"""Sine-cosine position embedding, which is added to the feature map."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vision_attn.attention.kind import AttentionConfig
from vision_attn.attention.masks import upcast
from vision_attn.attention.patterns.grouping import Grouping
from vision_attn.attention.position.encoding import PositionEncoding
from vision_attn.checks import check_above


@dataclass(frozen=True)
class SinCos:
    """Fixed sine-cosine position embedding, which is added to the feature map.

    ::

        x = x + [sin(y ω_k), sin(x ω_k), cos(y ω_k), cos(x ω_k)]        concatenated over channels
        ω_k = temperature^(-k/m)                                        k = 0, …, m - 1, m = c / 4

    ``(y, x)`` is the position on the feature map. With one or three axes, ``m`` is ``c / 2`` or ``c / 6``. There are no
    parameters, and feature maps may have any size.

    Args:
        temperature: base of the frequencies; larger values give longer wavelengths.

    Raises:
        ValueError: ``temperature`` is not above 0; or, when the block is built, the number of channels is not a
            multiple of twice the number of axes.

    Source: Vaswani et al., *Attention Is All You Need*, 2017, section 3.5, https://arxiv.org/abs/1706.03762; on feature
    maps: Chen et al., *An Empirical Study of Training Self-Supervised Vision Transformers*, 2021,
    https://arxiv.org/abs/2104.02057

    >>> SinCos()
    SinCos(temperature=10000.0)
    """

    temperature: float = 10000.0

    def __post_init__(self) -> None:
        check_above(0, temperature=self.temperature)

    def build(self, block: AttentionConfig, device: Any = None, dtype: Any = None) -> PositionEncoding:
        if block.channels % (2 * block.rank):
            raise ValueError(f"SinCos: channels must be a multiple of {2 * block.rank}, got {block.channels}")
        return SinCosEncoding(self)


class SinCosEncoding(PositionEncoding):
    config: SinCos
    adds_to_map = True

    def add_to_map(self, x: Tensor, grouping: Grouping) -> Tensor:
        size = x.shape[2:]
        exact: dict[str, Any] = {"device": x.device, "dtype": upcast(x[:0]).dtype}

        def embedding() -> Tensor:
            frequency = frequencies(x.shape[1] // (2 * len(size)), self.config.temperature, exact)
            positions = torch.meshgrid([torch.arange(length, **exact) for length in size], indexing="ij")
            angle = torch.cat([frequency.view(-1, *(1,) * len(size)) * position for position in positions])
            return torch.cat([angle.sin(), angle.cos()]).to(x.dtype)

        return x + grouping.cached(("sin_cos", tuple(size), x.dtype), embedding)


def frequencies(count: int, temperature: float, exact: dict[str, Any]) -> Tensor:
    """Return the frequencies ``temperature^(-k/m)`` for ``k = 0, …, m - 1``, in descending order."""
    return float(temperature) ** -(torch.arange(count, **exact) / count)

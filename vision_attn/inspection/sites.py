"""Places of a network with what a block costs there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vision_attn.blocks import AttentionBlock2d, attention_modules
from vision_attn.inspection.memory import IMPLS_COUNTED, count_multiply_adds, count_saved_bytes
from vision_attn.inspection.network import Share

__all__ = ["Cost", "Site", "cost_of", "cost_of_default", "heads_for"]


@dataclass(frozen=True)
class Cost:
    """What a block costs."""

    #: of its attention; 0 without any
    num_heads: int
    #: numbers that are learned
    parameters: int
    #: in one forward of one image
    multiply_adds: int
    #: bytes that training keeps for the backward pass of a batch, by implementation
    saved: Mapping[str, int]


@dataclass(frozen=True)
class Site:
    """A place of a network, its map, and what a block costs there.

    >>> cost = Cost(num_heads=8, parameters=1_051_648, multiply_adds=52_625_408, saved={})
    >>> site = Site("layer4", stage=3, channels=512, height=7, width=7, share=None, cost=cost)
    >>> site.size, site.tokens
    ('7×7', 49)
    """

    #: of the module
    path: str
    #: its index among the stages; None for a site that was chosen by name
    stage: int | None
    #: of the map
    channels: int
    #: rows of the map
    height: int
    #: columns of the map
    width: int
    #: what the network has between the stage before and this one; None for a site that was chosen
    share: Share | None
    #: of a block there
    cost: Cost
    #: whether the module has parameters: the activation that ends a stem has none
    learns: bool = True
    #: whether a block is inserted there already, so that no other can be
    occupied: bool = False

    @property
    def tokens(self) -> int:
        """Positions of the map, each a token."""
        return self.height * self.width

    @property
    def size(self) -> str:
        """Rows × columns of the map."""
        return f"{self.height}×{self.width}"


def cost_of(
    block: nn.Module,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    impls: Sequence[str] = IMPLS_COUNTED,
) -> Cost:
    """What a block costs on maps ``(b, c, h, w)``."""
    heads = [attention.num_heads for attention in attention_modules(block).values()]
    return Cost(
        num_heads=max(heads, default=0),
        parameters=sum(p.numel() for p in block.parameters()),
        multiply_adds=count_multiply_adds(block, shape, dtype),
        saved={impl: count_saved_bytes(block, shape, impl, dtype) for impl in impls},
    )


def cost_of_default(
    shape: tuple[int, int, int, int],
    num_heads: int,
    dtype: torch.dtype,
    options: Mapping[str, Any],
    impls: Sequence[str] = IMPLS_COUNTED,
) -> Cost:
    """What :class:`vision_attn.AttentionBlock2d` costs on maps ``(b, c, h, w)``."""
    return cost_of(AttentionBlock2d(shape[1], num_heads, device="meta", dtype=dtype, **options), shape, dtype, impls)


def heads_for(channels: int, most: int = 8) -> int:
    """The largest number of heads that divides the channels.

    >>> heads_for(64), heads_for(20), heads_for(64, most=5)
    (8, 5, 4)
    """
    return next(heads for heads in range(most, 0, -1) if channels % heads == 0)

"""Blocks of queries that see the keys in them and in a halo around them, as in HaloNet.

Queries are cut by the line of windows. The same line cuts the keys, of a map on which the blocks lie beside each other
with their halos: there it is of longer windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_attn.attention.patterns.line import Cut
from vision_attn.attention.patterns.partition import LinePartition, LinePartitioner, Partition, ReadLine
from vision_attn.checks import product

__all__ = ["HaloPartitioner"]


@dataclass(frozen=True)
class HaloPartitioner(LinePartitioner):
    """Blocks as a line of windows cuts them, and how far they see beyond their borders."""

    halo: tuple[int, ...] = ()

    same_tokens = False

    def __post_init__(self) -> None:
        super().__post_init__()
        # How far the furthest key is from a query, and the query itself: that is what tables are for.
        reach = tuple(side + by for side, by in zip(self.line.multiples, self.halo, strict=True))
        object.__setattr__(self, "window_shape", reach)

    def partition(self, size: Sequence[int], device: torch.device) -> Partition:
        return HaloPartition(self, size, device)


class HaloPartition(LinePartition):
    """A map of one size, cut into blocks."""

    def __init__(self, partitioner: HaloPartitioner, size: Sequence[int], device: torch.device) -> None:
        super().__init__(partitioner, size, device)
        self.mask = None  # keys beyond the map are zeros and are seen
        line, self.halo = partitioner.line, partitioner.halo
        sides = [side + 2 * by for side, by in zip(line.multiples, self.halo, strict=True)]
        wide = replace(line, sizes=tuple((name, side) for (name, _), side in zip(line.sizes, sides, strict=True)))
        self.starts = [
            torch.arange(0, whole, side, device=device)
            for whole, side in zip(self.cut.shape, line.multiples, strict=True)
        ]
        self.places = [torch.arange(side, device=device) for side in sides]
        self.key_cut = Cut(wide, [len(x) * side for x, side in zip(self.starts, sides, strict=True)])

    def offsets(self) -> tuple[Tensor, ...]:
        along = zip(self.places, self.indices, self.halo, strict=True)
        return tuple([(key - by - query[:, None])[None] for key, query, by in along])

    def fit(self, x: Tensor, split: ReadLine) -> Tensor:
        return x

    def queries(self, q: Tensor, split: ReadLine) -> Tensor:
        return split(self.cut, self.padded_and_rolled(q))

    def keys(self, kv: Tensor, split: ReadLine) -> Tensor:
        return split(self.key_cut, self.side_by_side(kv))

    def index(self) -> tuple[Tensor, Tensor]:
        numbers = torch.arange(product(self.size), device=self.indices[0].device).view(1, 1, *self.size)
        keys = self.key_cut.split_torch(self.side_by_side(numbers, -1))
        return super().index()[0], keys.reshape(self.groups, self.key_cut.tokens)

    def cut_mask(self, mask: Tensor) -> Tensor:
        beyond = (self.index()[1] < 0)[None, :, None, None, :]
        return super().cut_mask(mask).masked_fill(beyond, mask.dtype == torch.bool)

    def side_by_side(self, x: Tensor, value: float = 0.0) -> Tensor:
        """The blocks of a map with their halos, beside each other as a map."""
        ends = zip(reversed(self.halo), reversed(self.padding), strict=True)
        x = F.pad(x, [side for by, end in ends for side in (by, end + by)], value=value)
        for axis, (start, place) in enumerate(zip(self.starts, self.places, strict=True), 2):
            x = x.index_select(axis, (start[:, None] + place).flatten())
        return x

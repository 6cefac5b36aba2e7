"""Neighborhood attention: every query looks at the ``kernel_size`` keys around it, along each axis.

A query's own keys would have to be copied for each query. Instead queries are cut into tiles, and each tile gets all
keys that its queries look at: one step longer than a kernel for each further query. The mask then leaves to each
query its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vision_attn.attention.patterns.line import Cut, Line
from vision_attn.attention.patterns.partition import Partition, Partitioner, ReadLine, outer, row_major
from vision_attn.checks import product

__all__ = ["NeighborhoodPartitioner"]

#: Tiles and their tokens are the two axes of the gathered map.
LINE = Line.parse("b n d g w -> (b g) n w d", {})


@dataclass(frozen=True)
class NeighborhoodPartitioner(Partitioner):
    """Tiles of queries with the keys around them."""

    #: keys that a query looks at, along each axis
    kernel: tuple[int, ...]
    #: positions from one of them to the next, along each axis
    dilation: tuple[int, ...]
    #: queries in a row that look at the keys of one of them
    stride: tuple[int, ...]
    #: whether a query looks at no key behind it
    causal: tuple[bool, ...]

    same_tokens = False
    is_global = False

    def __post_init__(self) -> None:
        rank = len(self.kernel)
        for name, value in {"rank": rank, "attended": (True,) * rank, "window_shape": self.kernel}.items():
            object.__setattr__(self, name, value)

    def partition(self, size: Sequence[int], device: torch.device) -> Partition:
        return NeighborhoodPartition(self, size, device)


class NeighborhoodPartition(Partition):
    """A map of one size, cut into tiles."""

    def __init__(self, partitioner: NeighborhoodPartitioner, size: Sequence[int], device: torch.device) -> None:
        tiles = self.along = axis_tiles_of(partitioner, size, device)
        queries = [along.queries.shape[1] for along in tiles]
        groups = [along.queries.shape[0] for along in tiles]
        cut = Cut(LINE, (product(groups), product(queries)))
        key_cut = Cut(LINE, (product(groups), product([along.keys.shape[1] for along in tiles])))
        super().__init__(partitioner, size, cut, key_cut, queries)
        self.tiles = tuple(groups)
        self.kernel = partitioner.kernel
        self.mask = outer([along.allowed for along in tiles], torch.logical_and)
        lengths = list(self.size)
        self.query_index = row_major([along.queries for along in tiles], lengths)
        self.key_index = row_major([along.keys for along in tiles], lengths)
        # Where among all queries of all tiles each position of the map is one.
        tile = row_major([along.tile_of[None] for along in tiles], groups)
        query = row_major([along.query_of[None] for along in tiles], queries)
        self.position_of = (tile * product(queries) + query).flatten()

    def offsets(self) -> tuple[Tensor, ...]:
        # Keys beyond the kernel are in a tile for other queries: their offset is of no account.
        return tuple(
            [tile.offsets.clamp(1 - kernel, kernel - 1) for tile, kernel in zip(self.along, self.kernel, strict=True)]
        )

    def queries(self, q: Tensor, split: ReadLine) -> Tensor:
        return split(self.cut, gather(q, self.query_index))

    def keys(self, kv: Tensor, split: ReadLine) -> Tensor:
        return split(self.key_cut, gather(kv, self.key_index))

    def restore(self, y: Tensor, merge: ReadLine) -> Tensor:
        y = merge(self.cut, y).flatten(2).movedim(1, -1).index_select(1, self.position_of)
        return y.movedim(-1, 1).unflatten(2, self.size)

    def index(self) -> tuple[Tensor, Tensor]:
        real_queries = outer([axis.query_is_real for axis in self.along], torch.logical_and)
        real_keys = outer([axis.key_is_real for axis in self.along], torch.logical_and)
        return torch.where(real_queries, self.query_index, -1), torch.where(real_keys, self.key_index, -1)


@dataclass(frozen=True)
class AxisTiles:
    """Tiles along one axis: where their queries and keys lie on it, and which look at which.

    With a dilation the axis falls into as many classes, each with every ``dilation``-th position, which do not see each
    other; tiles of the first class come first.
    """

    queries: Tensor  # (tiles, queries): index on the axis
    keys: Tensor  # (tiles, keys)
    offsets: Tensor  # (tiles, queries, keys): key less query, in steps of the dilation
    allowed: Tensor  # (tiles, queries, keys)
    query_is_real: Tensor  # (tiles, queries): no copy that fills the last tile
    key_is_real: Tensor  # (tiles, keys)
    tile_of: Tensor  # (length,): the tile that each position of the axis is a query of
    query_of: Tensor  # (length,): which query of it


def axis_tiles(
    length: int, kernel: int, dilation: int, stride: int, causal: bool, tile: int, device: torch.device
) -> AxisTiles:
    tiles = -(-length // (dilation * tile))
    first = torch.arange(dilation, device=device)[:, None, None]
    members = (length - first + dilation - 1) // dilation  # positions in each class
    width = members.clamp(max=kernel)  # never shrunk at a border, only by a class that has no more

    def start(query: Tensor) -> Tensor:
        """The first key that a query looks at. An even kernel has the further key before the query."""
        leader = query // stride * stride + (stride - 1 if causal else stride // 2)
        before = kernel - 1 if causal else kernel // 2
        return torch.minimum((torch.minimum(leader, members - 1) - before).clamp(min=0), members - width)

    tile_first = torch.arange(tiles, device=device)[None, :, None] * tile
    index_in_class = tile_first + torch.arange(tile, device=device)
    query = torch.minimum(index_in_class, (members - 1).clamp(min=0))
    key = start(query[:, :, :1]) + torch.arange(tile + kernel + stride - 2, device=device)
    begin = start(query)[..., None]
    key_of_query = key[:, :, None, :]
    allowed = (key_of_query >= begin) & (key_of_query < begin + width[..., None])
    if causal:
        allowed = allowed & (key_of_query <= query[..., None])
    position = torch.arange(length, device=device)
    return AxisTiles(
        queries=(first + dilation * query).clamp(max=length - 1).flatten(0, 1),
        keys=(first + dilation * key).clamp(max=length - 1).flatten(0, 1),
        offsets=(key_of_query - query[..., None]).flatten(0, 1),
        allowed=allowed.flatten(0, 1),
        query_is_real=(index_in_class < members).flatten(0, 1),
        key_is_real=(key < members).flatten(0, 1),
        tile_of=position % dilation * tiles + position // dilation // tile,
        query_of=position // dilation % tile,
    )


def axis_tiles_of(partitioner: NeighborhoodPartitioner, size: Sequence[int], device: torch.device) -> list[AxisTiles]:
    found = []
    p = partitioner
    for length, kernel, dilation, stride, causal in zip(size, p.kernel, p.dilation, p.stride, p.causal, strict=True):
        if isinstance(length, int):  # and no symbol: what reaches beyond the map need not be copied
            dilation = min(dilation, length)
            kernel = min(kernel, -(-length // dilation))
        # Tiles of a kernel's length: longer ones hold more keys than a query needs, shorter ones copy more keys.
        found.append(axis_tiles(length, kernel, dilation, stride, causal, tile=kernel, device=device))
    return found


def gather(x: Tensor, index: Tensor) -> Tensor:
    """The positions ``(groups, tokens)`` of a map ``(b, c, *size)`` as a map ``(b, c, groups, tokens)``."""
    x = x.flatten(2).movedim(1, -1).index_select(1, index.flatten())  # whole positions are copied, with all channels
    return x.unflatten(1, index.shape).movedim(-1, 1)

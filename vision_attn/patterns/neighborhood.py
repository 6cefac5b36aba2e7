"""Neighbourhoods: every query looks at the ``kernel_size`` keys around it, along each axis.

A query's own keys would have to be copied for each query. Instead queries are cut into tiles, and each tile gets all
keys that its queries look at: one step longer than a kernel for each further query. The mask then leaves to each
query its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from vision_attn.patterns.line import product

__all__ = ["NeighborhoodTiling"]


@dataclass(frozen=True)
class AxisTiles:
    """Tiles along one axis: where their queries and keys lie on it, and which look at which.

    With a dilation the axis falls into as many classes, each with every ``dilation``-th place, which do not see each
    other; tiles of the first class come first.
    """

    queries: Tensor  # (tiles, queries): places on the axis
    keys: Tensor  # (tiles, keys)
    offsets: Tensor  # (tiles, queries, keys): key less query, in steps of the dilation
    allowed: Tensor  # (tiles, queries, keys)
    query_is_real: Tensor  # (tiles, queries): no copy that fills the last tile
    key_is_real: Tensor  # (tiles, keys)
    tile_of: Tensor  # (length,): the tile that each place of the axis is a query of
    query_of: Tensor  # (length,): which query of it


def axis_tiles(length: int, kernel: int, dilation: int, tile: int, device: torch.device) -> AxisTiles:
    tiles = -(-length // (dilation * tile))
    first = torch.arange(dilation, device=device)[:, None, None]
    members = (length - first + dilation - 1) // dilation  # places in each class
    width = members.clamp(max=kernel)  # never shrunk at a border, only by a class that has no more

    def start(query: Tensor) -> Tensor:
        """The first key that a query looks at. An even kernel has the further key before the query."""
        return torch.minimum((query - kernel // 2).clamp(min=0), members - width)

    tile_first = torch.arange(tiles, device=device)[None, :, None] * tile
    place_in_class = tile_first + torch.arange(tile, device=device)
    query = torch.minimum(place_in_class, (members - 1).clamp(min=0))
    key = start(query[:, :, :1]) + torch.arange(tile + kernel - 1, device=device)
    begin = start(query)[..., None]
    key_of_query = key[:, :, None, :]
    allowed = (key_of_query >= begin) & (key_of_query < begin + width[..., None])
    place = torch.arange(length, device=device)
    return AxisTiles(
        queries=(first + dilation * query).clamp(max=length - 1).flatten(0, 1),
        keys=(first + dilation * key).clamp(max=length - 1).flatten(0, 1),
        offsets=(key_of_query - query[..., None]).flatten(0, 1),
        allowed=allowed.flatten(0, 1),
        query_is_real=(place_in_class < members).flatten(0, 1),
        key_is_real=(key < members).flatten(0, 1),
        tile_of=place % dilation * tiles + place // dilation // tile,
        query_of=place // dilation % tile,
    )


class NeighborhoodTiling:
    """Tiles of queries with the keys around them.

    Its further methods are those of :class:`vision_attn.patterns.tiling.LineTiling`.

    Args:
        kernel: keys that a query looks at, along each axis.
        dilation: positions from one of them to the next, along each axis.
    """

    ordered = False
    whole = False

    def __init__(self, kernel: Sequence[int], dilation: Sequence[int]) -> None:
        self.rank = len(kernel)
        self.kernel = tuple(kernel)
        self.dilation = tuple(dilation)
        self.attended = (True,) * self.rank
        self.fixed_extents: tuple[int | None, ...] = self.kernel

    def split(self, x: Tensor, *, einx: bool = False, keys: bool = False) -> Tensor:
        places = self.places(self.tiles(x.shape[3:], x.device), keys=keys)
        return gather_einx(x.flatten(3), places) if einx else gather_bmm(x.flatten(3), places)

    def merge(self, y: Tensor, size: Sequence[int], *, einx: bool = False) -> Tensor:
        tiles = self.tiles(size, y.device)
        groups, queries = (product([along.queries.shape[side] for along in tiles]) for side in (0, 1))
        tile = row_major([along.tile_of[None] for along in tiles], [along.queries.shape[0] for along in tiles])
        query = row_major([along.query_of[None] for along in tiles], [along.queries.shape[1] for along in tiles])
        at = (tile * queries + query).flatten()
        x = scatter_einx(y, at, groups) if einx else scatter_bmm(y, at, groups)
        return x.unflatten(3, tuple(size))

    def mask(self, size: Sequence[int], device: torch.device) -> Tensor | None:
        tiles = self.tiles(size, device)
        allowed = torch.ones((1,) * (3 * self.rank), dtype=torch.bool, device=device)
        for axis, along in enumerate(tiles):
            view = [1] * (3 * self.rank)  # tiles of every axis, then queries, then keys
            view[axis], view[self.rank + axis], view[2 * self.rank + axis] = along.allowed.shape
            allowed = allowed & along.allowed.view(view)
        return allowed.flatten(2 * self.rank).flatten(self.rank, -2).flatten(0, self.rank - 1)

    def index(self, size: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        tiles = self.tiles(size, device)
        real_queries = outer([axis.query_is_real for axis in tiles], torch.logical_and)
        real_keys = outer([axis.key_is_real for axis in tiles], torch.logical_and)
        queries, keys = (self.places(tiles, keys=keys) for keys in (False, True))
        return torch.where(real_queries, queries, -1), torch.where(real_keys, keys, -1)

    def offsets(self, size: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
        # Keys beyond the kernel are in a tile for other queries: their offset is of no account.
        return tuple(
            along.offsets.clamp(1 - kernel, kernel - 1)
            for along, kernel in zip(self.tiles(size, device), self.kernel, strict=True)
        )

    def places(self, tiles: Sequence[AxisTiles], *, keys: bool) -> Tensor:
        """Where on the map, row-major, each query or key of each tile lies, ``(groups, tokens)``.

        Args:
            tiles: along each axis.
            keys: whether it is asked of keys, or of queries.
        """
        along = [axis.keys if keys else axis.queries for axis in tiles]
        return row_major(along, [axis.tile_of.shape[0] for axis in tiles])

    def tiles(self, size: Sequence[int], device: torch.device) -> list[AxisTiles]:
        """The tiles along each axis of a map.

        Args:
            size: of the map, in positions.
            device: where their places are to be.
        """
        found = []
        for length, kernel, dilation in zip(size, self.kernel, self.dilation, strict=True):
            if isinstance(length, int):  # and no symbol: what reaches beyond the map need not be copied
                dilation = min(dilation, length)
                kernel = min(kernel, -(-length // dilation))
            # Tiles of a kernel's length: longer ones hold more keys than a query needs, shorter ones copy more keys.
            found.append(axis_tiles(length, kernel, dilation, tile=kernel, device=device))
        return found


def outer(along: Sequence[Tensor], combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """What each axis says of its ``(tiles, tokens)``, combined for all axes, first axis first: ``(groups, tokens)``."""
    rank = len(along)
    views = []
    for axis, part in enumerate(along):
        view = [1] * (2 * rank)  # tiles of every axis, then tokens
        view[axis], view[rank + axis] = part.shape
        views.append(part.view(view))
    return reduce(combine, views).flatten(rank).flatten(0, rank - 1)


def row_major(along: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """Numbers along each axis, each below its length, as one number for all axes, ``(groups, tokens)``."""
    strides = [product(lengths[axis + 1 :]) for axis in range(len(lengths))]
    return outer([part * stride for part, stride in zip(along, strides, strict=True)], torch.add)


# --- the two forms, to be read against each other ---------------------------------------------------------------------


def gather_einx(x: Tensor, places: Tensor) -> Tensor:
    """Tokens ``(b·groups, n, tokens, d)`` from the places ``(groups, tokens)`` of a map ``(b, n, d, places)``."""
    import einx

    return einx.get_at("b n d [p], g i -> (b g) n i d", x, places)


def gather_bmm(x: Tensor, places: Tensor) -> Tensor:
    """The twin of :func:`gather_einx` without einx: whole places are copied, with all their heads."""
    b, n, d, _ = x.shape
    groups, tokens = places.shape
    x = x.permute(0, 3, 1, 2).index_select(1, places.flatten())  # b (g i) n d
    return x.view(b, groups, tokens, n, d).transpose(2, 3).flatten(0, 1)


def scatter_einx(y: Tensor, at: Tensor, groups: int) -> Tensor:
    """The map ``(b, n, d, places)`` from tokens ``(b·groups, n, tokens, d)``; ``at`` says where each place stands."""
    import einx

    y = einx.id("(b g) n i d -> b (g i) n d", y, g=groups)
    return einx.get_at("b [t] n d, p -> b n d p", y, at)


def scatter_bmm(y: Tensor, at: Tensor, groups: int) -> Tensor:
    """The twin of :func:`scatter_einx` without einx."""
    y = y.unflatten(0, (-1, groups)).transpose(2, 3).flatten(1, 2)  # b (g i) n d
    return y.index_select(1, at).permute(0, 2, 3, 1)

"""The interface of a pattern: how it cuts each axis of a feature map into tiles, and what a query may attend to."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from vision_attn.attention.patterns.line import Rearrangement
from vision_attn.checks import MOST


class AxisLayout(NamedTuple):
    """The tokens of each tile along one axis of a feature map."""

    positions: Tensor  # (tiles, tokens): the position of each token on the axis; -1 beyond the map
    coords: Tensor  # (tiles or 1, tokens): its coordinate, in steps of the pattern
    sizes: tuple[int, ...] | None = None  # lengths of the names that the line splits the axis into; None: gathered


class AxisTiles(NamedTuple):
    """One axis of a feature map in tiles of queries, with the keys of each tile."""

    queries: AxisLayout
    keys: AxisLayout
    extent: int  # positions from the first to the last one that attend to each other, in steps of the pattern
    allowed: Tensor | None = None  # (tiles, queries, keys): which keys a query may attend to; None: all of its tile


class AnyPattern:
    """Which positions of a feature map attend to each other: :meth:`axis_tiles` cuts one axis of it.

    A group of tokens has one tile of every axis, and its tokens are the positions in all of them.
    """

    #: the line of einx that cuts a map into groups; None: positions are gathered, group by group
    line: Rearrangement | None = None
    #: whether keys beyond the map are attended to, as zeros
    zero_padded: bool = False

    def for_rank(self, rank: int) -> Any:
        """Return the pattern for maps with ``rank`` axes, with a length for each; refuse another number of axes."""
        pattern, owner = cast(Any, self), type(self).__name__
        values = {one.name: for_axes(owner, one.name, getattr(self, one.name), rank) for one in fields(pattern)}
        return replace(pattern, **values)

    @property
    def rank(self) -> int:
        """The number of axes of the feature map."""
        return len(self.window_shape)

    @property
    def is_global(self) -> bool:
        """True if the map is one group."""
        return False

    @property
    def attention_axes(self) -> tuple[bool, ...]:
        """For each axis, whether positions along it attend to each other."""
        return (True,) * self.rank

    @property
    def window_shape(self) -> tuple[int | None, ...]:
        """The largest distance of a query and a key along each axis plus one; None where it grows with the map."""
        raise NotImplementedError

    def axis_tiles(self, axis: int, length: int, device: torch.device) -> AxisTiles:
        """Cut one axis of so many positions into tiles."""
        raise NotImplementedError

    def axis_as_one_tile(self, axis: int, length: int, device: torch.device) -> AxisTiles:
        """Return the same relation of queries and keys with the axis as a single tile: positions in their order."""
        tiles = self.axis_tiles(axis, length, device)
        queries, positions = tiles.queries, length
        query, key = queries.positions[:, :, None], tiles.keys.positions[:, None, :]
        is_pair = torch.logical_and(query >= 0, key >= 0)
        if tiles.allowed is not None:
            is_pair = torch.logical_and(is_pair, tiles.allowed)
        # Pairs and tokens beyond the map go to one index behind all others.
        pairs = torch.where(is_pair, query * positions + key, positions**2).flatten()
        allowed = is_pair.new_zeros(positions**2 + 1).index_fill(0, pairs, True)[:-1].view(1, positions, positions)
        tokens = torch.where(queries.positions < 0, positions, queries.positions).flatten()
        coords = queries.coords.expand(queries.positions.shape).flatten()
        coords = coords.new_zeros(positions + 1).index_copy(0, tokens, coords)[None, :-1]
        whole = AxisLayout(torch.arange(length, device=device)[None], coords, (length,))
        return AxisTiles(whole, whole, tiles.extent, allowed)


def check_lengths(owner: str, name: str, value: object, least: int = 1) -> None:
    """Raise unless the value is a length, or a tuple of lengths."""
    values = value if isinstance(value, tuple) else (value,)
    if not values or any(isinstance(n, bool) or not isinstance(n, int) or not least <= n <= MOST for n in values):
        raise ValueError(f"{owner}: {name} must be a whole number from {least}, or a tuple of them; got {value!r}")


def same_length(*values: int | tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return tuples of one length."""
    rank = max(len(value) if isinstance(value, tuple) else 1 for value in values)
    return [value if isinstance(value, tuple) else (value,) * rank for value in values]


def for_axes(owner: str, name: str, value: Any, rank: int) -> tuple[Any, ...]:
    """Return one value for each of ``rank`` axes."""
    values = value if isinstance(value, tuple) else (value,) * rank
    if len(values) != rank:
        raise ValueError(f"{owner}: {name} must be for maps with {rank} axes; got {value!r}")
    return values

"""The interface of a pattern, which splits each axis of a feature map into tiles of queries and their keys."""

from dataclasses import fields, replace
from numbers import Integral
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from vision_attn.attention.patterns.rearrangement import Rearrangement


class AxisLayout(NamedTuple):
    """The tokens of each tile along one axis of a feature map."""

    positions: Tensor  # (tiles, tokens): position of each token on the axis; -1 for padding
    coords: Tensor  # (tiles or 1, tokens): coordinate of each token, in steps of the pattern, for relative positions
    # sizes of the names into which the einx expression splits the axis; None if the tokens are gathered
    sizes: tuple[int, ...] | None = None


class AxisTiles(NamedTuple):
    """One axis of a feature map, split into tiles of queries, with the keys of each tile."""

    queries: AxisLayout
    keys: AxisLayout
    extent: int  # largest distance between a query and a key plus one, in steps of the pattern
    allowed: Tensor | None = None  # (tiles, queries, keys) bool: True = may attend; None: all keys of the tile


class AnyPattern:
    """Base class of all patterns, which select the positions of a feature map that attend to each other.

    Subclasses are frozen dataclasses and implement :meth:`axis_tiles`, which splits one axis of the feature map into
    tiles. A group of tokens is the Cartesian product of one tile per axis. A field with a tuple in its annotation, such
    as ``int | tuple[int, ...]``, has one value for each axis inside a block.
    """

    #: The einx expression that partitions a feature map into groups. If it is None, tokens are gathered by index.
    rearrangement: Rearrangement | None = None
    #: True if keys outside the feature map are zeros that queries attend to. If False, they are masked.
    zero_padded: bool = False

    def expand_to_rank(self, rank: int) -> Any:
        """Return the pattern with one value for each of ``rank`` axes; raise if it has another number of axes."""
        pattern, owner = cast(Any, self), type(self).__name__
        names = [field.name for field in fields(pattern) if "tuple" in str(field.type)]
        return replace(pattern, **{name: to_ntuple(owner, name, getattr(self, name), rank) for name in names})

    @property
    def rank(self) -> int:
        """The number of axes of the feature map."""
        return len(self.window_shape)

    @property
    def is_global(self) -> bool:
        """True if all positions of the feature map form one group, for feature maps of any size."""
        return self.rearrangement is not None and self.rearrangement.is_identity

    @property
    def attention_axes(self) -> tuple[bool, ...]:
        """For each axis, True if positions along this axis attend to each other."""
        return (True,) * self.rank

    @property
    def window_shape(self) -> tuple[int | None, ...]:
        """The largest distance between query and key plus one, for each axis; None if it grows with the feature map."""
        raise NotImplementedError

    def axis_tiles(self, axis: int, length: int, device: torch.device) -> AxisTiles:
        """Split one axis with ``length`` positions into tiles."""
        raise NotImplementedError

    def axis_as_one_tile(self, axis: int, length: int, device: torch.device) -> AxisTiles:
        """Return one tile with all positions of the axis, and with the pattern as its mask ``allowed``."""
        tiles = self.axis_tiles(axis, length, device)
        queries = tiles.queries
        query, key = queries.positions[:, :, None], tiles.keys.positions[:, None, :]
        is_pair = torch.logical_and(query >= 0, key >= 0)
        if tiles.allowed is not None:
            is_pair = torch.logical_and(is_pair, tiles.allowed)
        # Pairs and tokens of the padding are written to one additional element at the end, which is then dropped.
        pairs = torch.where(is_pair, query * length + key, length**2).flatten()
        allowed = is_pair.new_zeros(length**2 + 1).index_fill(0, pairs, True)[:-1].view(1, length, length)
        tokens = torch.where(queries.positions < 0, length, queries.positions).flatten()
        coords = queries.coords.expand(queries.positions.shape).flatten()
        coords = coords.new_zeros(length + 1).index_copy(0, tokens, coords)[None, :-1]
        layout = AxisLayout(torch.arange(length, device=device)[None], coords, (length,))
        return AxisTiles(layout, layout, tiles.extent, allowed)


def check_lengths(
    owner: str, name: str, value: int | tuple[int | None, ...] | None, least: int = 1, *, optional: bool = False
) -> None:
    """Raise unless all values are integers and at least ``least``, or None if they are optional."""
    lengths = [n for n in (value if isinstance(value, tuple) else (value,)) if not (optional and n is None)]
    if not all(isinstance(length, Integral) and length >= least for length in lengths):
        raise ValueError(f"{owner}: {name} must be an integer or a tuple, at least {least}, got {value!r}")


def same_length(*values: int | tuple[int, ...]) -> list[tuple[int, ...]]:
    """Convert the values to tuples of equal length; a single number is repeated."""
    rank = max(len(value) if isinstance(value, tuple) else 1 for value in values)
    return [value if isinstance(value, tuple) else (value,) * rank for value in values]


def to_ntuple(owner: str, name: str, value: Any, rank: int) -> tuple[Any, ...]:
    """Convert a value to a tuple with one element per axis; raise if a tuple has another length."""
    values = value if isinstance(value, tuple) else (value,) * rank
    if len(values) != rank:
        raise ValueError(f"{owner}: {name} must have one value for each of the {rank} axes, got {value!r}")
    return values

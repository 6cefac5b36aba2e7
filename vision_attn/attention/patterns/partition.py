"""What a pattern makes of maps of one size: along each axis, which positions are the queries and keys of each tile.

A group has one tile of every axis, and its tokens are the positions that those tiles share. A map is laid out first
(padded, rolled, or picked position by position), so that the pattern's line of einx cuts it into its groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_attn.attention.patterns.line import Cut, Line, uncut
from vision_attn.checks import product

#: Sizes of maps whose partitions a block keeps.
SIZES = 4


class Lay(NamedTuple):
    """One axis of a map as the line finds it: padded, then rolled back or picked position by position, then split."""

    places: Tensor  # (tiles, tokens): the position on the axis that each token is; -1 beyond it
    steps: Tensor  # (tiles or 1, tokens): where it stands, in steps of the pattern
    lengths: tuple[int, ...]  # of the names that the line splits the axis into
    before: int = 0  # zeros before its first position
    after: int = 0  # and after its last one
    roll: int = 0
    pick: Tensor | None = None  # which position comes where
    back: Tensor | None = None  # and where each position has come to


class Axis(NamedTuple):
    """One axis of a map in tiles of queries, with the keys that each tile has."""

    queries: Lay
    keys: Lay
    allowed: Tensor | None = None  # (tiles, queries, keys): which keys a query may attend to; None: all of its tile


@dataclass(frozen=True)
class Partitioner:
    """A pattern for maps with ``rank`` axes: :meth:`along` says how it cuts one of them."""

    #: cuts a map that is laid out into groups
    line: Line

    @property
    def rank(self) -> int:
        return len(self.line.axes)

    @property
    def is_global(self) -> bool:
        """Whether there is one group, the map itself."""
        return False

    @property
    def attended(self) -> tuple[bool, ...]:
        """For each axis, whether positions along it attend to each other."""
        return (True,) * self.rank

    @property
    def window_shape(self) -> tuple[int | None, ...]:
        """How many tokens a group has along each axis, where that is the same on every map."""
        raise NotImplementedError

    def along(self, axis: int, length: int, device: torch.device) -> Axis:
        """One axis of so many positions, in tiles."""
        raise NotImplementedError


class Side:
    """The map of the queries, or that of the keys."""

    def __init__(self, line: Line, size: Sequence[int], lays: Sequence[Lay]) -> None:
        self.size: tuple[int, ...] = tuple(size)
        self.lays = lays
        self.cut: Cut = Cut(line, [lay.lengths for lay in lays])
        #: cuts a group that has become a small map, its tokens along the last axis: it is one group itself
        self.cut_of_group: Cut = Cut(uncut(len(lays)), [*[(1,)] * (len(lays) - 1), (self.cut.tokens,)])
        self.pad: list[int] = [side for lay in reversed(lays) for side in (lay.before, lay.after)]
        self.roll: list[int] = [lay.roll for lay in lays]
        self.is_padded: bool = any(self.pad)
        self.is_rolled: bool = any(self.roll)
        self.as_it_is: bool = not self.is_padded and not self.is_rolled and all(lay.pick is None for lay in lays)
        self.axes: list[int] = list(range(1, 1 + len(lays)))  # of a map with its channels last

    def lay_out(self, x: Tensor) -> Tensor:
        """A map ``(b, c, *size)`` as the line cuts it."""
        if self.as_it_is:
            return x
        # With the channels of a position beside each other: whole positions are copied, not single numbers.
        x = x.movedim(1, x.dim() - 1)
        if self.is_padded:
            x = F.pad(x, [0, 0, *self.pad])
        if self.is_rolled:
            x = x.roll([-by for by in self.roll], self.axes)
        for axis, lay in enumerate(self.lays, 1):
            if lay.pick is not None:
                x = x.index_select(axis, lay.pick)
        return x.movedim(x.dim() - 1, 1)

    def take_back(self, y: Tensor) -> Tensor:
        """The map ``(b, c, *size)`` that was laid out so."""
        if self.as_it_is:
            return y
        y = y.movedim(1, y.dim() - 1)
        if self.is_rolled:
            y = y.roll(self.roll, self.axes)
        for axis, (lay, length) in enumerate(zip(self.lays, self.size, strict=True), 1):
            if lay.back is not None:
                y = y.index_select(axis, lay.back)
            elif lay.before or lay.after:
                y = y.narrow(axis, lay.before, length)
        return y.movedim(y.dim() - 1, 1)

    def index(self) -> Tensor:
        """Where on the map, row-major, each token stands, ``(groups, tokens)``; -1 beyond it."""
        places = [lay.places for lay in self.lays]
        strides = [product(self.size[axis + 1 :]) for axis in range(len(places))]
        index = outer([at * stride for at, stride in zip(places, strides, strict=True)], torch.add)
        return index.masked_fill(outer([at < 0 for at in places], torch.logical_or), -1)


class Partition:
    """What a pattern makes of maps of one size, and of keys from maps of one size."""

    def __init__(
        self, partitioner: Partitioner, size: Sequence[int], keys_size: Sequence[int], device: torch.device
    ) -> None:
        axes = [partitioner.along(axis, length, device) for axis, length in enumerate(size)]
        self.is_global: bool = partitioner.is_global
        self.window_shape: tuple[int | None, ...] = partitioner.window_shape
        self.queries: Side = Side(partitioner.line, size, [axis.queries for axis in axes])
        if tuple(keys_size) != self.queries.size:  # of a pattern with one group
            others = [partitioner.along(axis, length, device) for axis, length in enumerate(keys_size)]
            self.keys: Side = Side(partitioner.line, keys_size, [axis.keys for axis in others])
        else:
            same = all(axis.queries is axis.keys for axis in axes)
            self.keys = self.queries if same else Side(partitioner.line, size, [axis.keys for axis in axes])
        self.groups: int = self.queries.cut.groups
        #: (1, groups, 1, queries, keys) bool, which keys a query may attend to; None: all of its group
        self.mask: Tensor | None = None
        if any(axis.allowed is not None for axis in axes):
            allowed = [everything(axis) if axis.allowed is None else axis.allowed for axis in axes]
            self.mask = outer(allowed, torch.logical_and)[None, :, None]

    def steps(self) -> list[Tensor]:
        """Along each axis, from query to key in steps of the pattern, ``(tiles or 1, queries, keys)``."""
        found = []
        for query, key, side in zip(self.queries.lays, self.keys.lays, self.window_shape, strict=True):
            steps = key.steps[:, None, :] - query.steps[:, :, None]
            # A tile also has keys that are too far for this query: they are masked, and a table has no row for them.
            found.append(steps if side is None else steps.clamp(1 - side, side - 1))
        return found

    def causal_mask(self) -> Tensor:
        """Which keys of its group are no later on the map than the query, ``(1, groups, 1, queries, keys)``."""
        queries, keys = self.queries.index()[:, :, None], self.keys.index()[:, None, :]
        # Padding sees everything: it is left out of the result, and a row of nothing would have gradients of NaN.
        return ((keys <= queries) | (queries < 0))[None, :, None]

    def cut_mask(self, mask: Tensor) -> Tensor:
        """A mask ``(b, n, tokens, tokens)`` of the map as its groups see it, ``(b, groups, n, queries, keys)``.

        It says nothing of what lies beyond the map: there every query and key is open.
        """
        if self.is_global:
            return mask[:, None]
        queries, keys = self.queries.index()[:, :, None], self.keys.index()[:, None, :]
        rows = queries.clamp(min=0) if mask.shape[2] > 1 else torch.zeros_like(queries)
        columns = keys.clamp(min=0) if mask.shape[3] > 1 else torch.zeros_like(keys)
        cut = mask[:, :, rows, columns].transpose(1, 2)
        return cut.masked_fill(((queries < 0) | (keys < 0))[:, None], mask.dtype == torch.bool)

    def group_and_row(self, wanted: Tensor | None) -> tuple[Tensor, Tensor]:
        """The group of each wanted query of the map, row-major, and which of its queries it is; of all when None."""
        queries = self.queries.index()
        tokens = product(self.queries.size)
        # Padding (-1) goes to an index beyond the map.
        order = torch.arange(queries.numel(), device=queries.device)
        place = queries.new_zeros(tokens + 1).index_put((queries.flatten() % (tokens + 1),), order)[:tokens]
        place = place if wanted is None else place[wanted]
        return place // queries.shape[1], place % queries.shape[1]

    def on_map(self, weights: Tensor, group: Tensor) -> Tensor:
        """Weights ``(b, n, i, j)`` of queries for the keys of their groups, on the whole map, ``(b, n, i, tokens)``.

        Outside of its group a query has zeros.
        """
        tokens = product(self.keys.size)
        columns = (self.keys.index() % (tokens + 1))[group]  # padding (-1) beyond the map
        dense = weights.new_zeros(*weights.shape[:3], tokens + 1)
        return dense.scatter(3, columns.expand(*weights.shape[:2], -1, -1), weights)[..., :tokens]


class Partitions:
    """The partitions of the sizes that a block last saw. Copies and pickles of a block begin without any."""

    def __init__(self, partitioner: Partitioner) -> None:
        self.partitioner = partitioner
        self.kept: dict[Any, Partition] = {}

    def __reduce__(self) -> Any:
        return Partitions, (self.partitioner,)

    def of(self, x: Tensor, keys_size: Sequence[int]) -> Partition:
        """That of maps of the size of ``x`` with keys of another map."""
        size = tuple(x.shape[2:])
        key = (size, keys_size, x.device)
        plain = type(x) is Tensor and type(size[0]) is int and not torch.compiler.is_compiling()
        part = self.kept.get(key) if plain else None
        if part is None:
            with torch.inference_mode(False):  # so that it serves training too
                part = Partition(self.partitioner, size, keys_size, x.device)
            if plain and lasts(part.queries.lays[0].places):
                if len(self.kept) >= SIZES:
                    self.kept.clear()
                self.kept[key] = part
        return part


def lasts(x: Tensor) -> bool:
    """Whether a tensor is memory: of no mode or transform that ends, and not to be filled by a CUDA graph."""
    ends = type(x) is not Tensor or torch._C._functorch.is_functorch_wrapped_tensor(x)
    return not ends and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def everything(axis: Axis) -> Tensor:
    """A mask in which each query of a tile may attend to each of its keys."""
    places = axis.queries.places
    return torch.ones((), dtype=torch.bool, device=places.device).expand(*places.shape, axis.keys.places.shape[1])


def outer(along: Sequence[Tensor], combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The values along each axis, combined for all axes, the first axis first.

    They are ``(tiles, tokens)`` or ``(tiles, queries, keys)`` of one axis, and come out as those of the whole map.

    >>> outer([torch.tensor([[10, 20]]), torch.tensor([[1, 2, 3]])], torch.add)
    tensor([[11, 12, 13, 21, 22, 23]])
    """
    rank, kinds = len(along), along[0].dim()
    views = []
    for axis, part in enumerate(along):
        view = [1] * (kinds * rank)  # tiles of every axis, then queries of every axis, then keys
        view[axis::rank] = part.shape
        views.append(part.reshape(view))
    combined = reduce(combine, views)
    for kind in reversed(range(kinds)):
        combined = combined.flatten(kind * rank, (kind + 1) * rank - 1)
    return combined

"""Partition a map into groups of tokens: pad it, roll it (shifted windows), and say which token stands where.

A :class:`Partitioner` is what a pattern is on maps with some number of axes; a :class:`Partition` is what it makes of
one size of map. A block moves a tensor through it in four steps: :meth:`Partition.fit` the map before it is projected,
:meth:`Partition.queries` and :meth:`Partition.keys` of what it is projected to, and :meth:`Partition.restore` the map
from what was attended to. They are given how the block's implementation reads the line of the pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention.patterns.line import Cut, Line
from vision_attn.checks import product

__all__ = ["LinePartitioner", "Partition", "Partitioner", "outer", "partition_of", "row_major"]

#: How an implementation cuts a map into groups by a line, or puts them back.
ReadLine = Callable[[Cut, Tensor], Tensor]


class Partitioner:
    """What a pattern is on maps with ``rank`` axes; compares equal to another of the same pattern."""

    rank: int
    #: there is one group, the map itself
    is_global: bool
    #: queries and keys of a group are the same tokens, in the order of the map
    same_tokens: bool
    #: for each axis, whether it tells the tokens of a group apart
    attended: tuple[bool, ...]
    #: how many tokens a group has along each axis, where that is the same on every map
    window_shape: tuple[int | None, ...]

    def partition(self, size: Sequence[int], device: torch.device) -> Partition:
        """What it makes of maps of one size."""
        raise NotImplementedError


class Partition:
    """What a pattern makes of maps of one size."""

    #: (groups, queries, keys) bool, which keys a query may attend to; None: all of its group
    mask: Tensor | None = None

    def __init__(
        self, partitioner: Partitioner, size: Sequence[int], cut: Cut, key_cut: Cut, window_shape: Sequence[int]
    ) -> None:
        self.is_global = partitioner.is_global
        self.same_tokens = partitioner.same_tokens
        #: of the map
        self.size = tuple(size)
        #: the pattern's line on the maps of queries and of keys
        self.cut = cut
        self.key_cut = key_cut
        self.groups = cut.groups
        #: queries of a group along each axis of the map
        self.window_shape = tuple(window_shape)
        #: groups along each axis that :meth:`offsets` tell apart; as many ones where they are the same for all groups
        self.tiles: tuple[int, ...] = (1,) * len(self.size)
        #: what terms make of the offsets once
        self.kept: dict[Any, Tensor] = {}

    def offsets(self) -> tuple[Tensor, ...]:
        """Along each axis key's index less query's, ``(tiles, queries, keys)``."""
        raise NotImplementedError

    def fit(self, x: Tensor, split: ReadLine) -> Tensor:
        """A map ``(b, c, *size)`` as it is projected: its groups as maps, ``(b·groups, c, *window)``, or as it is."""
        return x

    def queries(self, q: Tensor, split: ReadLine) -> Tensor:
        """The queries of each group, ``(b·groups, c, *window)``, of what was fitted and projected."""
        return q

    def keys(self, kv: Tensor, split: ReadLine) -> Tensor:
        """The keys and values of each group, likewise."""
        return kv

    def restore(self, y: Tensor, merge: ReadLine) -> Tensor:
        """The map ``(b, c, *size)`` of the queries of its groups ``(b·groups, c, *window)``."""
        return y

    def index(self) -> tuple[Tensor, Tensor]:
        """Where on the map, row-major, each query and each key stands, ``(groups, tokens)``; -1 for padding."""
        raise NotImplementedError

    def causal_mask(self) -> Tensor:
        """Which keys of its group are no later on the map than the query, ``(groups, queries, keys)``."""
        queries, keys = self.index()
        # Padding sees everything: it is left out of the result, and a row of nothing would have gradients of NaN.
        return (keys[:, None, :] <= queries[:, :, None]) | (queries < 0)[:, :, None]

    def cut_mask(self, mask: Tensor) -> Tensor:
        """A mask ``(b, n, tokens, tokens)`` of the map as its groups see it, ``(b, groups, n, queries, keys)``."""
        if self.is_global:
            return mask[:, None]
        # Padding (-1) takes some value of the mask: what it is does not matter, the pattern masks it.
        queries, keys = (index.clamp(min=0) for index in self.index())
        rows = queries if mask.shape[2] > 1 else torch.zeros_like(queries)
        columns = keys if mask.shape[3] > 1 else torch.zeros_like(keys)
        return mask[:, :, rows[:, :, None], columns[:, None, :]].transpose(1, 2)

    def group_and_row(self, wanted: Tensor | None) -> tuple[Tensor, Tensor]:
        """The group of each wanted query of the map, row-major, and which of its queries it is; of all when None."""
        queries, _ = self.index()
        tokens = product(self.size)
        # Padding (-1) goes to an index beyond the map.
        order = torch.arange(queries.numel(), device=queries.device)
        place = queries.new_zeros(tokens + 1).index_put((queries.flatten() % (tokens + 1),), order)[:tokens]
        place = place if wanted is None else place[wanted]
        return place // queries.shape[1], place % queries.shape[1]

    def on_map(self, weights: Tensor, group: Tensor) -> Tensor:
        """Weights ``(b, n, i, j)`` of queries for the keys of their groups, on the whole map, ``(b, n, i, tokens)``.

        Outside of its group a query has zeros.
        """
        _, keys = self.index()
        tokens = product(self.size)
        columns = (keys % (tokens + 1))[group]  # padding (-1) beyond the map
        dense = weights.new_zeros(*weights.shape[:3], tokens + 1)
        return dense.scatter(3, columns.expand(*weights.shape[:2], -1, -1), weights)[..., :tokens]


@dataclass(frozen=True)
class LinePartitioner(Partitioner):
    """Groups of tokens as a line of einx cuts them, the same for queries and keys.

    A map whose sides are no multiples of what the line needs is padded at the end of each axis. With a ``shift`` the
    first whole window begins so many positions from the border, as in Swin.
    """

    line: Line
    shift: tuple[int, ...] = ()

    same_tokens = True

    def __post_init__(self) -> None:
        line, given = self.line, dict(self.line.sizes)
        for name, value in {
            "rank": line.rank,
            "is_global": not line.groups and not line.sizes and not any(self.shift),
            "attended": tuple(any(name in line.tokens for name in axis) for axis in line.axes),
            "window_shape": tuple(
                product([given[name] for name in tokens]) if all(name in given for name in tokens) else None
                for tokens in ([name for name in axis if name in line.tokens] for axis in line.axes)
            ),
        }.items():
            object.__setattr__(self, name, value)

    def partition(self, size: Sequence[int], device: torch.device) -> Partition:
        return LinePartition(self, size, device)


class LinePartition(Partition):
    """A map of one size, cut by a line."""

    def __init__(self, partitioner: LinePartitioner, size: Sequence[int], device: torch.device) -> None:
        line = partitioner.line
        padded = padded_size(line, size)
        cut = Cut(line, padded)
        super().__init__(partitioner, size, cut, cut, cut.window)
        #: positions that the map is padded by at the end of each axis, and those that it is rolled back by: none where
        #: one window holds the whole axis, as in Swin
        self.padding = tuple(whole - length for length, whole in zip(size, padded, strict=True))
        self.shift = tuple(
            by if whole > side else 0
            for by, whole, side in zip(partitioner.shift or (0,) * len(padded), padded, line.multiples, strict=True)
        )
        self.indices = [torch.arange(side, device=device) for side in cut.window]
        if any(self.padding) or any(self.shift):
            # Tokens of one region see each other. Where the map was rolled, its two sides meet in one group: they
            # differ. Padding is a region of its own, so that its rows have keys too, and nothing real looks at it.
            region = torch.zeros((1,) * len(padded), dtype=torch.int64, device=device)
            for axis, (length, by) in enumerate(zip(size, self.shift, strict=True)):
                rolled = (torch.arange(length, device=device) < by).long() << axis
                region = region + rolled.view([-1 if other == axis else 1 for other in range(len(padded))])
            region = self.in_groups(region)
            self.mask = region[:, :, None] == region[:, None, :]

    def offsets(self) -> tuple[Tensor, ...]:
        return tuple([(along - along[:, None])[None] for along in self.indices])

    def fit(self, x: Tensor, split: ReadLine) -> Tensor:
        return x if self.is_global else split(self.cut, self.padded_and_rolled(x))

    def restore(self, y: Tensor, merge: ReadLine) -> Tensor:
        return y if self.is_global else self.cropped(merge(self.cut, y))

    def padded_and_rolled(self, x: Tensor, value: float = 0.0) -> Tensor:
        padded, rolled = any(self.padding), any(self.shift)
        if not padded and not rolled:
            return x
        # With the channels of a position beside each other: whole positions are copied, not single numbers.
        x = x.movedim(1, -1)
        if padded:
            x = F.pad(x, [0, 0, *(side for end in reversed(self.padding) for side in (0, end))], value=value)
        if rolled:
            x = x.roll([-by for by in self.shift], list(range(1, 1 + len(self.shift))))
        return x.movedim(-1, 1)

    def cropped(self, y: Tensor) -> Tensor:
        if any(self.shift):
            y = y.movedim(1, -1).roll(self.shift, list(range(1, 1 + len(self.shift)))).movedim(-1, 1)
        for axis, (length, end) in enumerate(zip(self.size, self.padding, strict=True), 2):
            if end:
                y = y.narrow(axis, 0, length)
        return y

    def index(self) -> tuple[Tensor, Tensor]:
        tokens = self.in_groups(torch.arange(product(self.size), device=self.indices[0].device).view(self.size))
        return tokens, tokens

    def in_groups(self, numbers: Tensor) -> Tensor:
        """The whole numbers on a map as they come to stand in the groups, ``(groups, tokens)``; -1 for padding."""
        numbers = self.padded_and_rolled(numbers.expand(*self.size)[None, None], value=-1)
        return self.cut.split_torch(numbers).reshape(self.cut.groups, self.cut.tokens)


def padded_size(line: Line, size: Sequence[int]) -> tuple[int, ...]:
    """The size that a map is padded to."""
    if not line.sizes:
        return tuple(size)
    given = dict(line.sizes)
    padded = []
    for axis, length, multiple in zip(line.axes, size, line.multiples, strict=True):
        if all(name in given for name in axis) and length > multiple:
            raise ValueError(
                f"x must have at most {multiple} positions along {' '.join(axis)} for the pattern {line.einx!r}; "
                f"got a map of {'×'.join(map(str, size))}: leave one of the sizes open"
            )
        padded.append(length + -length % multiple)
    return tuple(padded)


def outer(along: Sequence[Tensor], combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """What each axis of the map says, combined for all of them, the first axis first.

    It is said of its ``(tiles, tokens)`` or its ``(tiles, queries, keys)``; so is what comes out.

    >>> outer([torch.tensor([[10, 20]]), torch.tensor([[1, 2, 3]])], torch.add)
    tensor([[11, 12, 13, 21, 22, 23]])
    """
    rank, kinds = len(along), along[0].dim()
    views = []
    for axis, part in enumerate(along):
        view = [1] * (kinds * rank)  # tiles of every axis, then queries of every axis, then keys
        view[axis::rank] = part.shape
        views.append(part.view(view))
    combined = reduce(combine, views)
    for kind in reversed(range(kinds)):
        combined = combined.flatten(kind * rank, (kind + 1) * rank - 1)
    return combined


def row_major(along: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """Numbers along each axis, each below its length, as one number for all axes, in the form of :func:`outer`."""
    strides = [product(lengths[axis + 1 :]) for axis in range(len(lengths))]
    return outer([part * stride for part, stride in zip(along, strides, strict=True)], torch.add)


def partition_of(partitioner: Partitioner, x: Tensor) -> Partition:
    """What a pattern makes of maps of the size of ``x``; kept for the sizes last seen where tensors are plain ones."""
    size = x.shape[2:]
    if (
        torch.compiler.is_compiling()
        or type(x) not in (Tensor, nn.Parameter)  # no fake tensor, whose masks would be fake as well
        or set(map(type, size)) != {int}  # nor a symbol, or what torch.jit.trace has in its place
        or torch._C._are_functorch_transforms_active()  # what is made inside one of them ends with it
        or torch._C._len_torch_dispatch_stack()  # nor may a mode have it made as a fake tensor
        or (x.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        return partitioner.partition(size, x.device)
    return kept_partition(partitioner, size, x.device)


@lru_cache(maxsize=16)
def kept_partition(partitioner: Partitioner, size: tuple[int, ...], device: torch.device) -> Any:
    with torch.inference_mode(False):  # so that it serves training too
        return partitioner.partition(size, device)

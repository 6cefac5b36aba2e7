"""How each kind of pattern cuts one axis: by a line (windows, grids, rows), with a halo, or as neighbourhoods."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vision_attn.attention.patterns.partition import Axis, Lay, Partitioner
from vision_attn.checks import product


@dataclass(frozen=True)
class LinePartitioner(Partitioner):
    """Groups as a line of einx cuts them, the same for queries and keys.

    An axis that is no multiple of what the line needs is padded at its end. With a ``shift`` the first whole window
    begins so many positions from the border, as in Swin.
    """

    shift: tuple[int, ...] = (0, 0, 0)

    @property
    def is_global(self) -> bool:
        return not self.line.groups and not self.line.sizes

    @property
    def attended(self) -> tuple[bool, ...]:
        return tuple([any(name in self.line.tokens for name in names) for names in self.line.axes])

    @property
    def window_shape(self) -> tuple[int | None, ...]:
        given = dict(self.line.sizes)
        tokens = [[given.get(name) for name in names if name in self.line.tokens] for names in self.line.axes]
        return tuple([None if None in lengths else product(filter(None, lengths)) for lengths in tokens])

    def along(self, axis: int, length: int, device: torch.device) -> Axis:
        line, given, names, multiple = self.line, dict(self.line.sizes), self.line.axes[axis], self.line.multiples[axis]
        if all(name in given for name in names) and length > multiple:
            raise ValueError(
                f"x must have at most {multiple} positions along {' '.join(names)} for the pattern {line.einx!r}; "
                f"got {length}: leave one of the sizes open"
            )
        whole = length if multiple == 1 else length + -length % multiple
        roll = self.shift[axis] if whole > multiple else 0  # as in Swin: not where one window holds the whole axis
        lengths = tuple([given.get(name, whole // multiple) for name in names])
        order = sorted(range(len(names)), key=lambda i: names[i] in line.tokens)  # tiles first, then tokens
        tiles = product([n for n, name in zip(lengths, names, strict=True) if name in line.groups])

        def in_tiles(along: Tensor) -> Tensor:
            return along.view(lengths).permute(order).reshape(tiles, whole // tiles)

        place, allowed = torch.arange(whole, device=device), None
        if whole != length or roll:
            # Padding is a region of its own, which nothing on the map looks at. Where the axis was rolled, its two
            # ends meet in one tile: they do not see each other.
            place = place.roll(-roll, 0)
            region = in_tiles((place >= length).long() - (place < roll).long())
            allowed = region[:, :, None] == region[:, None, :]
            place = place.masked_fill(place >= length, -1)
        steps = torch.arange(whole // tiles, device=device)[None]
        lay = Lay(in_tiles(place), steps, lengths, after=whole - length, roll=roll)
        return Axis(lay, lay, allowed)


@dataclass(frozen=True)
class HaloPartitioner(Partitioner):
    """Blocks of queries that see the keys in them and in a halo around them, as in HaloNet."""

    halo: tuple[int, ...]

    @property
    def window_shape(self) -> tuple[int | None, ...]:
        # How far the furthest key is from a query, and the query itself: that is what tables are for.
        return tuple([side + by for side, by in zip(self.line.multiples, self.halo, strict=True)])

    def along(self, axis: int, length: int, device: torch.device) -> Axis:
        side, halo = self.line.multiples[axis], self.halo[axis]
        tiles, after = -(-length // side), -length % side
        first = torch.arange(tiles, device=device)[:, None] * side
        query, key = torch.arange(side, device=device), torch.arange(side + 2 * halo, device=device) - halo
        queries, keys = ((first + at).masked_fill(first + at >= length, -1).clamp(min=-1) for at in (query, key))
        pick = (first + key + halo).flatten()
        # Keys beyond the map are zeros, and are seen.
        return Axis(
            Lay(queries, query[None], (tiles, side), after=after),
            Lay(keys, key[None], (tiles, side + 2 * halo), before=halo, after=after + halo, pick=pick),
        )


@dataclass(frozen=True)
class NeighborhoodPartitioner(Partitioner):
    """Tiles of queries with all keys that one of them looks at; the mask leaves to each query its own.

    With a dilation the axis falls into as many classes, each with every ``dilation``-th position, which do not see each
    other; tiles of the first class come first.
    """

    dilation: tuple[int, ...]
    stride: tuple[int, ...]
    causal: tuple[bool, ...]

    @property
    def window_shape(self) -> tuple[int | None, ...]:
        return self.line.multiples  # the kernel

    def along(self, axis: int, length: int, device: torch.device) -> Axis:
        kernel, dilation, stride = self.line.multiples[axis], self.dilation[axis], self.stride[axis]
        if isinstance(length, int):  # and no symbol: what reaches beyond the map need not be copied
            dilation = min(dilation, length)
            kernel = min(kernel, -(-length // dilation))
        tile = kernel  # longer ones hold more keys than a query needs, shorter ones copy more keys
        tiles = -(-length // (dilation * tile))
        first = torch.arange(dilation, device=device)[:, None, None]
        members = (length - first + dilation - 1) // dilation  # positions in each class
        width = members.clamp(max=kernel)  # never shrunk at a border, only by a class that has no more

        def start(query: Tensor) -> Tensor:
            """The first key that a query looks at. An even kernel has the further key before the query."""
            leader = query // stride * stride + (stride - 1 if self.causal[axis] else stride // 2)
            before = kernel - 1 if self.causal[axis] else kernel // 2
            return torch.minimum((torch.minimum(leader, members - 1) - before).clamp(min=0), members - width)

        in_class = torch.arange(tiles, device=device)[:, None] * tile + torch.arange(tile, device=device)
        query = torch.minimum(in_class, (members - 1).clamp(min=0))  # (dilation, tiles, tile)
        key = start(query[:, :, :1]) + torch.arange(tile + kernel + stride - 2, device=device)
        begin, seen = start(query)[..., None], key[:, :, None, :]
        allowed = (seen >= begin) & (seen < begin + width[..., None])
        if self.causal[axis]:
            allowed = allowed & (seen <= query[..., None])
        real = in_class.expand_as(query) < members, key < members
        position = torch.arange(length, device=device)
        back = (position % dilation * tiles + position // dilation // tile) * tile + position // dilation % tile
        queries, keys = (
            Lay(
                places=pick.masked_fill(~on_map, -1).flatten(0, 1),
                steps=at.flatten(0, 1),
                lengths=(dilation * tiles, at.shape[2]),
                pick=pick.flatten(),
                back=back,
            )
            for at, on_map in zip((query, key), real, strict=True)
            for pick in [(first + dilation * at).clamp(max=length - 1)]
        )
        return Axis(queries, keys, allowed.flatten(0, 1))

"""A line on maps of any size: padded to where it fits, shifted, cut, and put back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_attn.patterns.line import Line, product

__all__ = ["LineTiling"]


class LineTiling:
    """Groups of tokens, the same for queries and for keys.

    A map whose sides are no multiples of what the line needs is padded at the end of each axis; with a shift it is
    rolled. Padding, and neighbours that are so only because the map was rolled, are told apart by :meth:`mask`.

    Args:
        line: what cuts the map.
        shift: where the first whole window begins along each axis, in positions; empty for no shift.

    Attributes:
        ordered: queries and keys of a group are the same tokens, in the order of the map.
        whole: there is one group, the map itself.
        attended: for each axis, whether its places tell the tokens of a group apart.
        fixed_extents: how many places along each axis a group has, where that is the same on every map.
    """

    ordered = True

    def __init__(self, line: Line, shift: Sequence[int] = ()) -> None:
        self.line = line
        self.rank = line.rank
        self.shift = tuple(shift)
        self.whole = not line.groups and not line.sizes and not any(shift)
        self.attended = tuple(any(name in line.tokens for name in axis) for axis in line.axes)
        self.fixed_extents = tuple(
            product([line.sizes[name] for name in tokens]) if all(name in line.sizes for name in tokens) else None
            for tokens in ([name for name in axis if name in line.tokens] for axis in line.axes)
        )

    def split(self, x: Tensor, *, einx: bool = False, keys: bool = False) -> Tensor:
        """The tokens ``(b·groups, n, tokens, d)`` of ``(b, n, d, *size)``.

        Args:
            x: a map, ``(b, n, d, *size)``.
            einx: whether it is done by einx or by torch.
            keys: whether they are keys, for tilings that tell them from queries.

        Raises:
            ValueError: the map has more places along an axis than the line has room for.
        """
        x = self.fitted(x, value=0.0)
        return self.line.split_einx(x) if einx else self.line.split_bmm(x)

    def merge(self, y: Tensor, size: Sequence[int], *, einx: bool = False) -> Tensor:
        """The map ``(b, n, d, *size)`` of tokens ``(b·groups, n, tokens, d)``.

        Args:
            y: the tokens, ``(b·groups, n, tokens, d)``.
            size: of the map, in positions.
            einx: whether it is done by einx or by torch.
        """
        padded = self.padded(size)
        x = self.line.merge_einx(y, padded) if einx else self.line.merge_bmm(y, padded)
        shift = self.shift_on(size)
        if any(shift):
            x = x.movedim((1, 2), (-2, -1)).roll(shift, list(range(1, 1 + self.rank))).movedim((-2, -1), (1, 2))
        for axis, (length, whole) in enumerate(zip(size, padded, strict=True), 3):
            if whole != length:
                x = x.narrow(axis, 0, length)
        return x

    def mask(self, size: Sequence[int], device: torch.device) -> Tensor | None:
        """Which keys of its group a query may attend to, ``(groups, tokens, tokens)``; None where that is all.

        Args:
            size: of the map, in positions.
            device: where the mask is to be.
        """
        shift = self.shift_on(size)
        if self.padded(size) == tuple(size) and not any(shift):
            return None
        # Tokens of one number see each other. Where the map was rolled, its two sides meet in one group: they differ.
        # Padding has a number of its own, so that a row of padding has keys too, and nothing real looks at it.
        numbers = torch.zeros((1,) * self.rank, dtype=torch.int64, device=device)
        for axis, (length, by) in enumerate(zip(size, shift, strict=True)):
            rolled = (torch.arange(length, device=device) < by).long() << axis
            numbers = numbers + rolled.view([-1 if other == axis else 1 for other in range(self.rank)])
        numbers = self.numbers_of_tokens(numbers, size)
        return numbers[:, :, None] == numbers[:, None, :]

    def index(self, size: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """The place of every query and of every key on the map, row-major, ``(groups, tokens)``; -1 for padding.

        Args:
            size: of the map, in positions.
            device: where the places are to be.
        """
        places = torch.arange(product(size), device=device).view(*size)
        tokens = self.numbers_of_tokens(places, size)
        return tokens, tokens

    def offsets(self, size: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
        """For each axis, key's place less query's place in the group, ``(1, queries, keys)`` along that axis.

        Args:
            size: of the map, in positions.
            device: where the offsets are to be.

        Returns:
            One tensor for each axis, ``(1, queries, keys)``.
        """
        extents = self.line.extents(self.line.lengths(self.padded(size)))
        places = [torch.arange(extent, device=device) for extent in extents]
        return tuple((place[None, :] - place[:, None])[None] for place in places)

    # --- how it is done -----------------------------------------------------------------------------------------------

    def padded(self, size: Sequence[int]) -> tuple[int, ...]:
        """The size that a map is padded to, in positions.

        Args:
            size: of the map, in positions.

        Raises:
            ValueError: the map has more places along an axis than the line has room for.
        """
        if not self.line.sizes:
            return tuple(size)
        padded = []
        for axis, length, multiple in zip(self.line.axes, size, self.line.multiples, strict=True):
            if all(name in self.line.sizes for name in axis) and length > multiple:
                raise ValueError(
                    f"x must have at most {multiple} places along {' '.join(axis)} for the pattern {self.line.einx!r}; "
                    f"got a map of {'×'.join(map(str, size))}: leave one of the sizes open"
                )
            padded.append(length + -length % multiple)
        return tuple(padded)

    def shift_on(self, size: Sequence[int]) -> tuple[int, ...]:
        """The shift along each axis, in positions: none where one window holds the whole axis, as in Swin.

        Args:
            size: of the map, in positions.
        """
        if not self.shift:
            return (0,) * self.rank
        windows = self.line.multiples
        return tuple(
            by if whole > window else 0
            for by, whole, window in zip(self.shift, self.padded(size), windows, strict=True)
        )

    def fitted(self, x: Tensor, value: float) -> Tensor:
        """A map ``(b, n, d, *size)`` padded to where the line fits, and rolled back by the shift.

        Args:
            x: a map, ``(b, n, d, *size)``.
            value: of the padding.
        """
        size = x.shape[3:]
        padded, shift = self.padded(size), self.shift_on(size)
        if padded == tuple(size) and not any(shift):
            return x
        # With the channels of a place beside each other: whole places are copied, not single numbers.
        x = x.movedim((1, 2), (-2, -1))
        ends = [whole - length for length, whole in zip(size, padded, strict=True)]
        if any(ends):
            x = F.pad(x, [0, 0, 0, 0, *(p for end in reversed(ends) for p in (0, end))], value=value)
        if any(shift):
            x = x.roll([-by for by in shift], list(range(1, 1 + self.rank)))
        return x.movedim((-2, -1), (1, 2))

    def numbers_of_tokens(self, numbers: Tensor, size: Sequence[int]) -> Tensor:
        """The whole numbers on a map as they come to stand in the groups, ``(groups, tokens)``; -1 for padding.

        Args:
            numbers: one for each place of the map, ``(*size)``, or axes of one where they are the same along an axis.
            size: of the map, in positions.
        """
        numbers = self.fitted(numbers.expand(*size)[None, None, None], value=-1)
        return self.line.split_bmm(numbers)[:, 0, :, 0]

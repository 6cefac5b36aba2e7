"""One line of einx as an attention pattern: which axes of a feature map number the groups, and which the tokens.

``b n d (gh h) (gw w) -> (b gh gw) n (h w) d`` cuts every head of a map into windows. It runs in two steps: the map is
cut into small maps, ``b c (gh h) (gw w) -> (b gh gw) c h w``, and each of them is split into heads, in the same way
for every pattern.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from vision_attn.checks import MOST, product

#: Names of the axes of a feature map; a map with fewer axes has the last ones: ``w``, ``h w`` or ``t h w``.
AXES = ("t", "h", "w")

#: How a line splits each axis into groups ``g<axis>`` of tokens ``<axis>``.
WINDOWS, GRIDS = "(g{axis} {axis})", "({axis} g{axis})"

NAME = r"[a-z][a-z0-9_]*"
#: A name, or names in parentheses; and one side of a line.
ITEM = rf"{NAME}|\(\s*{NAME}(?:\s+{NAME})*\s*\)"
SIDE = re.compile(rf"\s*(?:{ITEM})(?:\s+(?:{ITEM}))*\s*")

#: Names with another meaning: in the line itself, in the two steps (``c``), and as arguments of ``einx.id``.
RESERVED = ("b", "c", "n", "d", "backend", "graph")
FORM = "'b n d <axes of the map> -> (b <groups>) n (<tokens>) d', as in 'b n d h (s w) -> (b s) n (h w) d' with s=2"


@dataclass(frozen=True)
class Rearrangement:
    """A parsed line. Groups and tokens are kept in the order of the map: attention is the same in any order."""

    #: for each axis of the map, the names that it is split into
    axes: tuple[tuple[str, ...], ...]
    #: the names that number the groups; groups do not attend to each other
    groups: tuple[str, ...]
    #: the names that number the tokens of a group
    tokens: tuple[str, ...]
    #: names with a given size
    sizes: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def parse(text: str, sizes: Mapping[str, int]) -> Rearrangement:
        """Parse a line, given the size of each name that does not follow from the map.

        >>> Rearrangement.parse("b n d h (w s) -> (b s) n (h w) d", {"s": 2}).groups
        ('s',)
        """

        def refuse(why: str) -> ValueError:
            return ValueError(f"pattern must be a line of einx of the form {FORM}; got {text!r}: {why}")

        sides = text.split("->")
        if len(sides) != 2:
            raise refuse("it must have exactly one '->'")
        if not all(map(SIDE.fullmatch, sides)):
            raise refuse("each side must be names and names in parentheses")
        left, right = ([tuple(item.strip("()").split()) for item in re.findall(ITEM, side)] for side in sides)
        if left[:3] != [("b",), ("n",), ("d",)] or not 1 <= len(left) - 3 <= len(AXES):
            raise refuse("its left side must be 'b n d' and one to three axes of the map")
        if len(right) != 4 or right[0][:1] != ("b",) or right[1] != ("n",) or right[3] != ("d",) or not right[2]:
            raise refuse("its right side must be '(b <groups>) n (<tokens>) d'")
        axes, groups, tokens = left[3:], right[0][1:], right[2]
        names = [name for axis in axes for name in axis]
        for name in {*names, *groups, *tokens}:
            before, after = names.count(name), (*groups, *tokens).count(name)
            if name in RESERVED:
                raise refuse(f"{name!r} is reserved and cannot name a part of an axis")
            if before != 1 or after != 1:
                raise refuse(f"it must be a permutation of the map, but {name!r} occurs {before} and {after} times")
        for name, size in sizes.items():
            if name not in names:
                raise refuse(f"the size {size!r} is for {name!r}, which is not in the line")
            if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MOST:
                raise refuse(f"the size of {name!r} must be a whole number of at least 1, got {size!r}")
        for axis in axes:
            unknown = [name for name in axis if name not in sizes]
            if len(unknown) > 1:
                raise refuse(f"give the size of {' or '.join(map(repr, unknown))}")
        groups, tokens = (tuple(name for name in names if name in side) for side in (groups, tokens))
        given = tuple((name, sizes[name]) for name in names if name in sizes)
        return Rearrangement(tuple(axes), groups, tokens, given)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(chain(*self.axes))

    @property
    def axes_text(self) -> str:
        return " ".join(map(joined, self.axes))

    @property
    def einx(self) -> str:
        """The line itself, as ``einx.id`` reads it."""
        return f"b n d {self.axes_text} -> {joined(('b', *self.groups))} n {joined(self.tokens)} d"

    @property
    def torch(self) -> str:
        """The same in torch, as an expression of ``maps``."""
        names = ["b", "n", "d", *self.names]
        order = ", ".join(str(names.index(name)) for name in ("b", *self.groups, "n", *self.tokens, "d"))
        groups, tokens = ("*".join(part) for part in (("b", *self.groups), self.tokens))
        return f"maps.view({', '.join(names)}).permute({order}).reshape({groups}, n, {tokens}, d)"


class BoundRearrangement:
    """A line with the length of every name in it, on feature maps of one size."""

    def __init__(self, line: Rearrangement, lengths: Sequence[Sequence[int]]) -> None:
        self.sizes: dict[str, int] = dict(zip(line.names, chain(*lengths), strict=True))
        tokens = [[name for name in axis if name in line.tokens] for axis in line.axes]
        #: the map, ``b c (gh h) (gw w)``, and its groups as small maps, ``(b gh gw) h w c``, for einx
        self.map_text: str = f"b c {line.axes_text}"
        self.groups_text: str = f"{joined(('b', *line.groups))} {' '.join(map(joined, tokens))} c"
        #: the permutation from (b, <axes, split>, c) to (b, <groups>, <tokens>, c), and back
        split, grouped = ["b", *line.names, "c"], ["b", *line.groups, *line.tokens, "c"]
        self.forward_perm: list[int] = [split.index(name) for name in grouped]
        self.inverse_perm: list[int] = [grouped.index(name) for name in split]
        self.size: tuple[int, ...] = tuple([product(axis) for axis in lengths])
        self.split_size: list[int] = list(self.sizes.values())
        self.group_size: tuple[int, ...] = tuple([product([self.sizes[name] for name in axis]) for axis in tokens])
        self.grouped_size: list[int] = [self.sizes[name] for name in grouped[1:-1]]


@lru_cache
def split_every_axis(form: str, sides: tuple[int, ...]) -> Rearrangement:
    """Build the line that splits each axis in the same way, into groups of so many tokens along it."""
    axes = AXES[-len(sides) :]
    split = " ".join(form.format(axis=axis) for axis in axes)
    text = f"b n d {split} -> (b {' '.join(f'g{axis}' for axis in axes)}) n ({' '.join(axes)}) d"
    return Rearrangement.parse(text, dict(zip(axes, sides, strict=True)))


def joined(names: Sequence[str]) -> str:
    """Write names as one axis; an axis without names has length one."""
    return f"({' '.join(names)})" if len(names) > 1 else names[0] if names else "1"

"""One line of einx as an attention pattern: which axes of a map tell groups apart, and which the tokens of a group."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from vision_attn.checks import MOST, product

#: Names of a map's axes, of which a map with fewer has the last ones: ``w``, ``h w`` and ``t h w``.
AXES = ("t", "h", "w")

#: How a line splits each axis into groups ``g<axis>`` of tokens ``<axis>``.
WINDOWS, GRIDS = "(g{axis} {axis})", "({axis} g{axis})"

NAME = r"[a-z][a-z0-9_]*"
#: A name, or names in brackets; and the items of a side of a line.
ITEM = rf"{NAME}|\(\s*{NAME}(?:\s+{NAME})*\s*\)"
SIDE = re.compile(rf"\s*(?:{ITEM})(?:\s+(?:{ITEM}))*\s*")

#: Names with another meaning: in the line itself, where it is read (``c``), and to ``einx.id``.
TAKEN = ("b", "c", "n", "d", "backend", "graph")
FORM = "'b n d <axes of the map> -> (b <groups>) n (<tokens>) d', as in 'b n d h (s w) -> (b s) n (h w) d' with s=2"


@dataclass(frozen=True)
class Line:
    """A line that was read. Groups and tokens are kept in the order of the map: attention is the same in any order."""

    #: for each axis of the map, the names it is split into
    axes: tuple[tuple[str, ...], ...]
    #: the names that number the groups; groups do not see each other
    groups: tuple[str, ...]
    #: the names that number the tokens of a group
    tokens: tuple[str, ...]
    #: names whose size is given
    sizes: tuple[tuple[str, int], ...] = ()
    #: what the length of each axis must be a multiple of
    multiples: tuple[int, ...] = field(init=False, compare=False)
    #: the order to permute to: (b, <axes, split>, c) to (b, <groups>, <tokens>, c)
    apart: tuple[int, ...] = field(init=False, compare=False)
    #: and back
    together: tuple[int, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        given = dict(self.sizes)
        map_names = ["b", *self.names, "c"]
        token_names = ["b", *self.groups, *self.tokens, "c"]
        for name, value in {
            "multiples": tuple(product([given.get(name, 1) for name in axis]) for axis in self.axes),
            "apart": tuple(map_names.index(name) for name in token_names),
            "together": tuple(token_names.index(name) for name in map_names),
        }.items():
            object.__setattr__(self, name, value)

    @staticmethod
    def parse(text: str, sizes: Mapping[str, int]) -> Line:
        """Read a line, with the size of each name that does not follow from the map.

        >>> Line.parse("b n d h (w s) -> (b s) n (h w) d", {"s": 2}).multiples
        (1, 2)
        """

        def refuse(why: str) -> ValueError:
            return ValueError(f"pattern must be a line of einx of the form {FORM}; got {text!r}: {why}")

        sides = text.split("->")
        if len(sides) != 2:
            raise refuse("it has no single '->'")
        left, right = (items(side, refuse) for side in sides)
        if left[:3] != [("b",), ("n",), ("d",)] or not 1 <= len(left) - 3 <= len(AXES):
            raise refuse("its left side is not 'b n d' and one to three axes of the map")
        if len(right) != 4 or right[0][:1] != ("b",) or right[1] != ("n",) or right[3] != ("d",) or not right[2]:
            raise refuse("its right side is not '(b <groups>) n (<tokens>) d'")
        axes, groups, tokens = left[3:], right[0][1:], right[2]
        names = [name for axis in axes for name in axis]
        for name in {*names, *groups, *tokens}:
            before, after = names.count(name), (*groups, *tokens).count(name)
            if name in TAKEN:
                raise refuse(f"{name!r} has another meaning and cannot name a part of an axis")
            if before != 1 or after != 1:
                raise refuse(f"it is no permutation of the map, since {name!r} stands {before} and {after} times in it")
        for name, size in sizes.items():
            if name not in names:
                raise refuse(f"there is no {name!r} in it to have the size {size!r}")
            if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MOST:
                raise refuse(f"the size of {name!r} must be a whole number of at least 1; got {size!r}")
        for axis in axes:
            unknown = [name for name in axis if name not in sizes]
            if len(unknown) > 1:
                raise refuse(f"give the size of {' or '.join(map(repr, unknown))}")
        groups, tokens = (tuple(name for name in names if name in side) for side in (groups, tokens))
        return Line(tuple(axes), groups, tokens, tuple((name, sizes[name]) for name in names if name in sizes))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for axis in self.axes for name in axis)

    @property
    def rank(self) -> int:
        """How many axes the map has."""
        return len(self.axes)

    @property
    def map_text(self) -> str:
        """The axes of the map, split into names: ``(gh h) (gw w)``."""
        return " ".join(bracketed(axis) for axis in self.axes)

    @property
    def group_text(self) -> str:
        """The tokens of every group, in each head: ``(b gh gw) n (h w) d``."""
        return f"{bracketed(('b', *self.groups))} n {bracketed(self.tokens)} d"

    @property
    def einx(self) -> str:
        """The line itself, as ``einx.id`` reads it."""
        return f"b n d {self.map_text} -> {self.group_text}"

    @property
    def torch(self) -> str:
        """The same in torch, as an expression of ``maps``."""
        names = ["b", "n", "d", *self.names]
        order = ", ".join(str(names.index(name)) for name in ("b", *self.groups, "n", *self.tokens, "d"))
        groups, tokens = ("*".join(part) for part in (("b", *self.groups), self.tokens))
        return f"maps.view({', '.join(names)}).permute({order}).reshape({groups}, n, {tokens}, d)"


class Cut:
    """A line on maps of one size: how long every name in it is, by axis and name."""

    def __init__(self, line: Line, lengths: Sequence[Sequence[int]]) -> None:
        self.line = line
        every = (length for axis in lengths for length in axis)
        self.lengths: dict[str, int] = dict(zip(line.names, every, strict=True))
        #: of the map
        self.shape: tuple[int, ...] = tuple([product(axis) for axis in lengths])
        #: of the map that is cut: the groups, then the tokens
        self.group_lengths: list[int] = [self.lengths[name] for name in (*line.groups, *line.tokens)]
        self.groups: int = product([self.lengths[name] for name in line.groups])
        self.tokens: int = product([self.lengths[name] for name in line.tokens])


def items(side: str, refuse: Callable[[str], ValueError]) -> list[tuple[str, ...]]:
    """The items of one side: a name, or names in brackets."""
    if not SIDE.fullmatch(side):
        raise refuse(f"{side.strip()!r} is not names and names in brackets")
    return [tuple(item.strip("()").split()) for item in re.findall(ITEM, side)]


def line_by_axis(form: str, sides: Sequence[int]) -> Line:
    """The line that splits every axis in the same way, into groups of so many tokens along it."""
    axes = AXES[-len(sides) :]
    split = " ".join(form.format(axis=axis) for axis in axes)
    text = f"b n d {split} -> (b {' '.join(f'g{axis}' for axis in axes)}) n ({' '.join(axes)}) d"
    return Line.parse(text, dict(zip(axes, sides, strict=True)))


def uncut(rank: int) -> Line:
    """The line that leaves a map whole."""
    names = AXES[-rank:]
    return Line(tuple((name,) for name in names), (), names)


def bracketed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"({' '.join(names)})"

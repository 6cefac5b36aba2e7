"""An einx expression as an attention pattern: some axes of the feature map index groups, the others index tokens.

``b n d (gh h) (gw w) -> (b gh gw) n (h w) d`` partitions every head of a feature map into windows. It runs in two
steps: ``b c (gh h) (gw w) -> (b gh gw) c h w`` partitions the feature map into small feature maps, and each small
feature map is then split into heads in the same way for every pattern.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from numbers import Integral

from vision_attn.checks import product

#: Names of the axes of a feature map. A feature map with fewer axes has the last names: ``w``, ``h w`` or ``t h w``.
AXES = ("t", "h", "w")

#: Axes of an expression that are split into groups ``g<axis>`` and tokens ``<axis>``: contiguous windows, and grids.
WINDOWS, GRIDS = "(g{axis} {axis})", "({axis} g{axis})"

NAME = r"[a-z][a-z0-9_]*"
#: A name, or names in parentheses, and the two sides of an expression.
ITEM = rf"(?:{NAME}|\(\s*{NAME}(?:\s+{NAME})*\s*\))"
LEFT = rf"\s*b\s+n\s+d((?:\s+{ITEM}){{1,3}})\s*"
RIGHT = rf"\s*(?:b|\(\s*b((?:\s+{NAME})*)\s*\))\s+n\s+({ITEM})\s+d\s*"

#: Names that have another meaning: in the expression, in its two steps (``c``), or as arguments of ``einx.id``.
RESERVED = ("b", "c", "n", "d", "backend", "graph")
FORM = "'b n d <axes> -> (b <groups>) n (<tokens>) d', as in 'b n d h (s w) -> (b s) n (h w) d' with s=2"


@dataclass(frozen=True)
class Rearrangement:
    """A parsed expression.

    Names of groups and tokens are sorted in the order of the feature map, which does not change the attention.
    """

    #: For each axis of the feature map, the names into which it is split.
    axes: tuple[tuple[str, ...], ...]
    #: The names that index the groups. Groups do not attend to each other.
    groups: tuple[str, ...]
    #: The names that index the tokens of a group.
    tokens: tuple[str, ...]
    #: The names with a given size, and their sizes.
    sizes: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def parse(text: str, sizes: Mapping[str, int]) -> Rearrangement:
        """Parse an expression; ``sizes`` holds the size of each name that does not follow from the feature map.

        >>> Rearrangement.parse("b n d h (w s) -> (b s) n (h w) d", {"s": 2}).groups
        ('s',)
        """

        def reject(*why: str) -> ValueError:
            message = f"pattern must be an einx expression of the form {FORM}, with one to three axes, got {text!r}"
            return ValueError(": ".join([message, *why]))

        if (match := re.fullmatch(f"{LEFT}->{RIGHT}", text)) is None:
            raise reject()
        axes = [tuple(re.findall(NAME, item)) for item in re.findall(ITEM, match[1])]
        groups, tokens = (tuple(re.findall(NAME, side or "")) for side in match.groups()[1:])
        names = [name for axis in axes for name in axis]
        for name in {*names, *groups, *tokens}:
            before, after = names.count(name), (*groups, *tokens).count(name)
            if name in RESERVED:
                raise reject(f"{name!r} is a reserved name. Choose another name for this part of an axis")
            if before != 1 or after != 1:
                raise reject(f"each name must occur once on each side, but {name!r} occurs {before} and {after} times")
        for name, size in sizes.items():
            if name not in names or not (isinstance(size, Integral) and size >= 1):
                raise reject(f"sizes must be positive integers for names in the expression, got {name}={size!r}")
        for axis in axes:
            unknown = [name for name in axis if name not in sizes]
            if len(unknown) > 1:
                raise reject(f"pass the size of {' or '.join(map(repr, unknown))} as a keyword argument")
        groups, tokens = (tuple(name for name in names if name in side) for side in (groups, tokens))
        fixed = tuple((name, sizes[name]) for name in names if name in sizes)
        return Rearrangement(tuple(axes), groups, tokens, fixed)

    @property
    def is_identity(self) -> bool:
        """True if all positions of a feature map form one group, for feature maps of any size."""
        return not self.groups and not self.sizes

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(chain(*self.axes))

    @property
    def axes_text(self) -> str:
        return " ".join(map(join_names, self.axes))

    @property
    def einx(self) -> str:
        """The expression for ``einx.id``."""
        return f"b n d {self.axes_text} -> {join_names(('b', *self.groups))} n {join_names(self.tokens)} d"

    @property
    def torch(self) -> str:
        """The equivalent torch expression, for a feature map named ``maps``."""
        names = ["b", "n", "d", *self.names]
        order = ", ".join(str(names.index(name)) for name in ("b", *self.groups, "n", *self.tokens, "d"))
        groups, tokens = ("*".join(part) for part in (("b", *self.groups), self.tokens))
        return f"maps.view({', '.join(names)}).permute({order}).reshape({groups}, n, {tokens}, d)"


class BoundRearrangement:
    """An expression and the size of each of its names, for feature maps of one size."""

    def __init__(self, line: Rearrangement, lengths: Sequence[Sequence[int]]) -> None:
        self.sizes: dict[str, int] = dict(zip(line.names, chain(*lengths), strict=True))
        self.is_identity: bool = line.is_identity
        tokens = [[name for name in axis if name in line.tokens] for axis in line.axes]
        groups = join_names(("b", *line.groups))
        #: The einx expression that partitions the feature map, ``b c (gh h) (gw w) -> (b gh gw) h w c``.
        self.to_groups: str = f"b c {line.axes_text} -> {groups} {' '.join(map(join_names, tokens))} c"
        #: The expression that merges the heads and groups, ``(b gh gw) n (h w) d -> b (n d) (gh h) (gw w)``.
        self.to_map: str = f"{groups} n {join_names(line.tokens)} d -> b (n d) {line.axes_text}"
        #: The permutation from ``(b, c, <split axes>)`` to ``(b, <groups>, <tokens>, c)``.
        split = ["b", "c", *line.names]
        self.forward_perm: list[int] = [split.index(name) for name in ("b", *line.groups, *line.tokens, "c")]
        #: The permutation from ``(b, <groups>, n, <tokens>, d)`` to ``(b, <split axes>, n, d)``.
        grouped = ["b", *line.groups, "n", *line.tokens, "d"]
        self.inverse_perm: list[int] = [grouped.index(name) for name in ("b", *line.names, "n", "d")]
        self.size: tuple[int, ...] = tuple([product(axis) for axis in lengths])
        self.group_size: tuple[int, ...] = tuple([product([self.sizes[name] for name in axis]) for axis in tokens])
        self.groups: list[int] = [self.sizes[name] for name in line.groups]
        self.tokens: list[int] = [self.sizes[name] for name in line.tokens]


@lru_cache
def split_every_axis(template: str, sides: tuple[int, ...]) -> Rearrangement:
    """Build the expression that splits every axis by the same template; ``sides`` is the size of a group."""
    axes = AXES[-len(sides) :]
    split = " ".join(template.format(axis=axis) for axis in axes)
    text = f"b n d {split} -> (b {' '.join(f'g{axis}' for axis in axes)}) n ({' '.join(axes)}) d"
    return Rearrangement.parse(text, dict(zip(axes, sides, strict=True)))


def join_names(names: Sequence[str]) -> str:
    """Write names as one axis of an einx expression; an axis without names has length one."""
    return f"({' '.join(names)})" if len(names) > 1 else names[0] if names else "1"

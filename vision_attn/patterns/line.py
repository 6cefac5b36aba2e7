"""One line of einx, read: the groups and tokens it makes of a map, and the view, permute and reshape it stands for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["AXES", "Line", "product"]

#: Names of a map's axes, the last ones first to be there: ``w``, ``h w`` and ``t h w``.
AXES = ("t", "h", "w")

NAME = re.compile(r"[a-z][a-z0-9_]*")

#: Names with another meaning: in the line itself, and to ``einx.id``.
TAKEN = ("b", "n", "d", "backend", "graph")
FORM = "'b n d <axes of the map> -> (b <groups>) n (<tokens>) d', as in 'b n d h (s w) -> (b s) n (h w) d' with s=2"


@dataclass(frozen=True)
class Line:
    """What a line says.

    Tokens are kept in the order of the map, which attention does not look at.

    Attributes:
        axes: for each axis of the map, the names it is split into.
        groups: the names that tell one group of tokens from another; groups do not see each other.
        tokens: the names that tell the tokens of a group apart, in the order of the map.
        sizes: names whose size is given.
        multiples: what the length of each axis must be a multiple of.
        order: where each axis of the tokens, split into its names, stands among those of the map.
    """

    axes: tuple[tuple[str, ...], ...]
    groups: tuple[str, ...]
    tokens: tuple[str, ...]
    sizes: Mapping[str, int]
    multiples: tuple[int, ...] = field(init=False, compare=False)
    order: tuple[int, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        multiples = tuple(product([self.sizes.get(name, 1) for name in axis]) for axis in self.axes)
        names = ["b", "n", "d", *(name for axis in self.axes for name in axis)]
        order = tuple(names.index(name) for name in ("b", *self.groups, "n", *self.tokens, "d"))
        object.__setattr__(self, "multiples", multiples)
        object.__setattr__(self, "order", order)

    @staticmethod
    def parse(text: str, sizes: Mapping[str, int]) -> Line:
        """The line that a text says.

        Args:
            text: ``"b n d <axes of the map> -> (b <groups>) n (<tokens>) d"``.
            sizes: the size of each name that does not follow from the map, in positions.

        Raises:
            ValueError: it is not of that form, is no permutation of the map, or leaves a size open.

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
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise refuse(f"the size of {name!r} must be a whole number of at least 1; got {size!r}")
        for axis in axes:
            unknown = [name for name in axis if name not in sizes]
            if len(unknown) > 1:
                raise refuse(f"give the size of {' or '.join(map(repr, unknown))}")
        ordered = tuple(name for name in names if name in tokens)
        return Line(tuple(axes), groups, ordered, {name: sizes[name] for name in names if name in sizes})

    @property
    def rank(self) -> int:
        """How many axes the map has."""
        return len(self.axes)

    @property
    def map_text(self) -> str:
        """The left side: the map, its axes split into names."""
        return " ".join(["b n d", *(bracketed(axis) for axis in self.axes)])

    @property
    def token_text(self) -> str:
        """The side with the groups and their tokens."""
        return f"{bracketed(('b', *self.groups))} n {bracketed(self.tokens)} d"

    @property
    def einx(self) -> str:
        """The line itself, as ``einx.id`` reads it."""
        return f"{self.map_text} -> {self.token_text}"

    @property
    def torch(self) -> str:
        """The same in torch, as an expression of ``maps``."""
        names = ", ".join(["b", "n", "d", *(name for axis in self.axes for name in axis)])
        groups, tokens = ("*".join(part) for part in (("b", *self.groups), self.tokens))
        return f"maps.view({names}).permute({', '.join(map(str, self.order))}).reshape({groups}, n, {tokens}, d)"

    def lengths(self, size: Sequence[int]) -> dict[str, int]:
        """The size of every name on a map of ``size``, whose axes are multiples of :attr:`multiples`.

        Args:
            size: of the map, in positions.
        """
        lengths = {}
        for axis, whole, multiple in zip(self.axes, size, self.multiples, strict=True):
            lengths.update({name: self.sizes.get(name, whole // multiple) for name in axis})
        return lengths

    def extents(self, lengths: Mapping[str, int]) -> tuple[int, ...]:
        """How many places along each axis the tokens of a group have.

        Args:
            lengths: the size of every name, from :meth:`lengths`.
        """
        return tuple(product([lengths[name] for name in axis if name in self.tokens]) for axis in self.axes)

    # --- the two forms, to be read against each other -----------------------------------------------------------------

    def split_einx(self, x: Tensor) -> Tensor:
        """The tokens ``(b·groups, n, tokens, d)`` of ``(b, n, d, *size)``.

        Args:
            x: a map ``(b, n, d, *size)`` whose axes are multiples of :attr:`multiples`.
        """
        import einx

        return einx.id(self.einx, x, **self.sizes)

    def split_bmm(self, x: Tensor) -> Tensor:
        """The twin of :meth:`split_einx` without einx; a view, where the groups and the tokens are axes of ``x``.

        Arguments and result are those of :meth:`Line.split_einx`.
        """
        b, n, d, *size = x.shape
        lengths = self.lengths(size)
        groups, tokens = (product([lengths[name] for name in part]) for part in (self.groups, self.tokens))
        return x.view(b, n, d, *lengths.values()).permute(self.order).reshape(b * groups, n, tokens, d)

    def merge_einx(self, y: Tensor, size: Sequence[int]) -> Tensor:
        """The map ``(b, n, d, *size)`` of tokens ``(b·groups, n, tokens, d)``.

        Args:
            y: the tokens, ``(b·groups, n, tokens, d)``.
            size: of the map, in positions; multiples of :attr:`multiples`.
        """
        import einx

        return einx.id(f"{self.token_text} -> {self.map_text}", y, **self.lengths(size))

    def merge_bmm(self, y: Tensor, size: Sequence[int]) -> Tensor:
        """Arguments and result are those of :meth:`Line.merge_einx`."""
        lengths = self.lengths(size)
        groups, tokens = ([lengths[name] for name in part] for part in (self.groups, self.tokens))
        n, d = y.shape[1], y.shape[3]
        b = y.shape[0] // product(groups)
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return y.reshape(b, *groups, n, *tokens, d).permute(back).reshape(b, n, d, *size)


def items(side: str, refuse: Callable[[str], ValueError]) -> list[tuple[str, ...]]:
    """The items of one side: a name, or names in brackets."""
    found, brackets = [], []
    for bracket, name in re.findall(r"\(([^()]*)\)|([^\s()]+)", side):
        found.append(tuple(bracket.split()) if bracket else (name,))
        brackets.append(bool(bracket))
    again = " ".join(
        f"({' '.join(item)})" if bracket else item[0] for item, bracket in zip(found, brackets, strict=True)
    )
    if any(not NAME.fullmatch(name) for item in found for name in item) or again != normal(side):
        raise refuse(f"{side.strip()!r} is not names and names in brackets")
    return found


def normal(side: str) -> str:
    """With one space wherever there is any."""
    return re.sub(r"\(\s+|\s+\)", lambda found: found.group().strip(), " ".join(side.split()))


def bracketed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"({' '.join(names)})"


def product(factors: Iterable[int]) -> int:
    """The product of sizes; some may be symbols, which ``math.prod`` does not take where a graph is compiled.

    Args:
        factors: whole numbers, or symbols for them.
    """
    result = 1
    for factor in factors:
        result = result * factor
    return result

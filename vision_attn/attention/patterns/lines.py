"""Patterns that are one line of einx: full, rows, columns, windows, grids, and any other line."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from vision_attn.attention.patterns.line import AXES, GRIDS, WINDOWS, Rearrangement, split_every_axis
from vision_attn.attention.patterns.pattern import AnyPattern, AxisLayout, AxisTiles, check_lengths, same_length
from vision_attn.checks import product


class LinePattern(AnyPattern):
    """Groups as a line of einx cuts them, the same for queries and keys.

    An axis whose length is not a multiple of the line's sizes is padded at its end. With a ``shift``, the first whole
    window starts at that position, as in Swin.
    """

    line: Rearrangement
    shift: int | tuple[int, ...] = 0

    @property
    def rank(self) -> int:
        return len(self.line.axes)

    @property
    def is_global(self) -> bool:
        return not self.line.groups and not self.line.sizes

    @property
    def attention_axes(self) -> tuple[bool, ...]:
        return tuple([any(name in self.line.tokens for name in names) for names in self.line.axes])

    @property
    def window_shape(self) -> tuple[int | None, ...]:
        given = dict(self.line.sizes)
        tokens = [[given.get(name) for name in names if name in self.line.tokens] for names in self.line.axes]
        return tuple([None if None in lengths else product(filter(None, lengths)) for lengths in tokens])

    def axis_tiles(self, axis: int, length: int, device: torch.device) -> AxisTiles:
        line, given, names = self.line, dict(self.line.sizes), self.line.axes[axis]
        multiple = product([given.get(name, 1) for name in names])
        if all(name in given for name in names) and length > multiple:
            raise ValueError(f"x must have at most {multiple} positions on this axis of {self}; got {length}")
        padded = length if multiple == 1 else length + -length % multiple
        any_length = torch.compiler.is_exporting() and not isinstance(length, int)  # a graph without guards on it
        # As in Swin, there is no shift where one window holds the axis.
        shift: int | Tensor = (
            same_length(self.shift, (0,) * self.rank)[0][axis] if any_length or padded > multiple else 0
        )
        sizes = tuple([given.get(name, padded // multiple) for name in names])
        order = sorted(range(len(names)), key=lambda i: names[i] in line.tokens)  # tiles first, then tokens
        tiles = product([n for n, name in zip(sizes, names, strict=True) if name in line.groups])

        def in_tiles(along: Tensor) -> Tensor:
            return along.view(sizes).permute(order).reshape(tiles, padded // tiles)

        coords = torch.arange(padded // tiles, device=device)[None]
        if not shift and (multiple == 1 or (not any_length and padded == length)):
            layout = AxisLayout(in_tiles(torch.arange(length, device=device)), coords, sizes)
            return AxisTiles(layout, layout, padded // tiles)
        # Padding is a region that no position of the map attends to. Where the axis is shifted, its two ends meet in
        # one tile: they do not attend to each other.
        position = torch.arange(padded, device=device)
        if any_length:
            shift = shift * (position[-1:] >= multiple).long()
        position = position + shift
        position = torch.where(position >= padded, position - padded, position)
        region = in_tiles((position >= length).long() - (position < shift).long())
        layout = AxisLayout(in_tiles(position.masked_fill(position >= length, -1)), coords)
        return AxisTiles(layout, layout, padded // tiles, region[:, :, None] == region[:, None, :])


@dataclass(frozen=True, init=False, repr=False)
class Pattern(LinePattern):
    """Any pattern that is one line of einx: which positions of a feature map attend to each other.

    ``b n d`` and the axes of the map (``w``; ``h w``; ``t h w``) on the left; on the right ``(b <groups>) n (<tokens>)
    d``. Tokens of one group attend to each other and to nothing else. Every axis may leave one size open. A map whose
    size is not a multiple of the given sizes is padded, and nothing attends to the padding.

    Args:
        line: the line.
        **sizes: the size of each name in it that does not follow from the map, in positions.

    Raises:
        ValueError: the line does not have this form, is not a permutation of the map, or leaves a size open.

    Striped attention, between the columns of the same parity:

    >>> stripes = Pattern("b n d h (w s) -> (b s) n (h w) d", s=2)
    >>> print(stripes.line.torch)
    maps.view(b, n, d, h, w, s).permute(0, 5, 1, 3, 4, 2).reshape(b*s, n, h*w, d)
    """

    text: str = field(compare=False)
    sizes: tuple[tuple[str, int], ...] = field(compare=False)
    line: Rearrangement

    def __init__(self, line: str, /, **sizes: int) -> None:
        if not isinstance(line, str):
            raise ValueError(f"Pattern: line must be a line of einx, as 'b n d h w -> (b h) n w d'; got {line!r}")
        vars(self).update(text=line, sizes=tuple(sizes.items()), line=Rearrangement.parse(line, sizes))

    def for_rank(self, rank: int) -> Pattern:
        if rank != self.rank:
            raise ValueError(f"pattern must be for maps with {rank} axes; got {self}, which is for {self.rank}")
        return self

    def __repr__(self) -> str:
        return f"Pattern({', '.join([repr(self.text), *(f'{name}={size}' for name, size in self.sizes)])})"


@dataclass(frozen=True)
class Axial(AnyPattern):
    """Attention along some axes of the map, counted from the last; all axes together are full attention."""

    name: str
    axes: tuple[int, ...] | None

    def for_rank(self, rank: int) -> Pattern:
        names = AXES[-rank:]
        if self.axes is not None and rank < -min(self.axes):
            raise ValueError(f"pattern {self.name!r} needs a map with {-min(self.axes)} axes; got {rank}")
        tokens = [names[axis] for axis in self.axes] if self.axes else names
        groups = " ".join(["b", *(name for name in names if name not in tokens)])
        return Pattern(f"b n d {' '.join(names)} -> ({groups}) n ({' '.join(tokens)}) d")


@dataclass(frozen=True)
class Window(LinePattern):
    """Attention inside windows that do not overlap, as in Swin.

    ``b n d (gh h) (gw w) -> (b gh gw) n (h w) d`` with ``h`` and ``w`` the sides of a window. A window over the border
    holds only positions of the map. With a shift, the windows start at ``shift``, and those at the border are smaller;
    there is no shift along an axis that fits into one window.

    Args:
        size: side of a window, in positions; one for all axes or one for each.
        shift: where the first whole window starts, in positions; smaller than the window.

    Raises:
        ValueError: a side below one, or a shift that is not a position of a window.

    Source: Liu et al., *Swin Transformer*, 2021, section 3.2, https://arxiv.org/abs/2103.14030

    >>> Window(7, shift=3)
    Window(size=7, shift=3)
    """

    size: int | tuple[int, ...]
    shift: int | tuple[int, ...] = 0

    def __post_init__(self) -> None:
        check_lengths("Window", "size", self.size)
        check_lengths("Window", "shift", self.shift, least=0)
        sides, shifts = same_length(self.size, self.shift)
        if len(sides) != len(shifts):
            raise ValueError(f"Window: size and shift must be for as many axes; got {self.size} and {self.shift}")
        if any(by >= side for side, by in zip(sides, shifts, strict=True)):
            raise ValueError(f"Window: shift must be smaller than size; got size={self.size} and shift={self.shift}")

    @property
    def line(self) -> Rearrangement:  # type: ignore[override]
        return split_every_axis(WINDOWS, *same_length(self.size))


@dataclass(frozen=True)
class Grid(LinePattern):
    """Attention between positions at a fixed distance, ``size`` of them along each axis, as in MaxViT.

    ``b n d (h gh) (w gw) -> (b gh gw) n (h w) d`` with ``h`` and ``w`` the sides of a grid.

    Args:
        size: side of a grid, in positions; one for all axes or one for each.

    Raises:
        ValueError: a side below one.

    Source: Tu et al., *MaxViT*, 2022, section 3.2, https://arxiv.org/abs/2204.01697

    >>> Grid(7)
    Grid(size=7)
    """

    size: int | tuple[int, ...]

    def __post_init__(self) -> None:
        check_lengths("Grid", "size", self.size)

    @property
    def line(self) -> Rearrangement:  # type: ignore[override]
        return split_every_axis(GRIDS, *same_length(self.size))


#: The patterns that have a name.
PATTERNS = {"full": Axial("full", None), "rows": Axial("rows", (-1,)), "columns": Axial("columns", (-2,))}


def resolve_pattern(pattern: str | AnyPattern) -> AnyPattern:
    """Return the pattern of a name or of a line of einx without open sizes, or the pattern itself."""
    if isinstance(pattern, str) and "->" in pattern:
        return Pattern(pattern)
    if isinstance(pattern, str) and pattern in PATTERNS:
        return PATTERNS[pattern]
    if isinstance(pattern, AnyPattern):
        return pattern
    kinds = "a Window, Grid, Halo, Neighborhood or Pattern, or a line of einx"
    raise ValueError(f"pattern must be one of {', '.join(map(repr, PATTERNS))}, {kinds}; got {pattern!r}")

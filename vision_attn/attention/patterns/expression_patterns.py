"""Patterns that are one einx expression: full, rows, columns, windows, grids and custom expressions."""

from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from vision_attn.attention.patterns.pattern import AnyPattern, AxisLayout, AxisTiles, check_lengths, same_length
from vision_attn.attention.patterns.rearrangement import AXES, GRIDS, WINDOWS, Rearrangement, split_every_axis
from vision_attn.checks import product


class ExpressionPattern(AnyPattern):
    """Base class of patterns whose groups follow from an einx expression, and are the same for queries and keys.

    If the length of an axis is not a multiple of the sizes in the expression, the axis is padded at its end. ``shift``
    is the position at which the first complete window starts, as in Swin.
    """

    rearrangement: Rearrangement
    shift: int | tuple[int, ...] = 0

    @property
    def attention_axes(self) -> tuple[bool, ...]:
        return tuple([any(name in self.rearrangement.tokens for name in names) for names in self.rearrangement.axes])

    @property
    def window_shape(self) -> tuple[int | None, ...]:
        fixed = dict(self.rearrangement.sizes)
        axes, tokens = self.rearrangement.axes, self.rearrangement.tokens
        sizes = [[fixed.get(name) for name in names if name in tokens] for names in axes]
        return tuple([None if None in lengths else product(filter(None, lengths)) for lengths in sizes])

    def axis_tiles(self, axis: int, length: int, device: torch.device) -> AxisTiles:
        fixed, names, tokens = dict(self.rearrangement.sizes), self.rearrangement.axes[axis], self.rearrangement.tokens
        multiple = product([fixed.get(name, 1) for name in names])
        if all(name in fixed for name in names) and length > multiple:
            raise ValueError(f"x must have at most {multiple} positions on axis {axis + 2} for {self}, got {length}")
        padded = length if multiple == 1 else length + -length % multiple
        # A graph that is exported with a symbolic length, or traced, must not depend on its value.
        any_length = isinstance(length, Tensor) or (torch.compiler.is_exporting() and not isinstance(length, int))
        # As in Swin, an axis that fits into one window is not shifted.
        given_shift = self.shift[axis] if isinstance(self.shift, tuple) else self.shift
        shift: int | Tensor = given_shift if any_length or padded > multiple else 0
        sizes = tuple([fixed.get(name, padded // multiple) for name in names])
        order = sorted(range(len(names)), key=lambda i: names[i] in tokens)  # tiles first, then tokens
        tiles = product([n for n, name in zip(sizes, names, strict=True) if name not in tokens])

        def split(values: Tensor) -> Tensor:
            return values.view(sizes).permute(order).reshape(tiles, padded // tiles)

        coords = torch.arange(padded // tiles, device=device)[None]
        if not shift and (multiple == 1 or (not any_length and padded == length)):
            layout = AxisLayout(split(torch.arange(length, device=device)), coords, sizes)
            return AxisTiles(layout, layout, padded // tiles)
        # Queries and keys attend to each other only inside a region. Padding is a separate region. On a shifted axis,
        # the start and the end of the axis share one tile; they are separate regions, too.
        position = torch.arange(padded, device=device)
        if any_length:
            shift = shift * (position[-1:] >= multiple).long()
        position = position + shift
        position = torch.where(position >= padded, position - padded, position)
        region = split((position >= length).long() - (position < shift).long())
        layout = AxisLayout(split(position.masked_fill(position >= length, -1)), coords)
        return AxisTiles(layout, layout, padded // tiles, region[:, :, None] == region[:, None, :])


@dataclass(frozen=True, init=False, repr=False)
class Pattern(ExpressionPattern):
    """A custom pattern: an einx expression that partitions a feature map into groups of tokens.

    ::

        b n d <axes of the feature map> -> (b <groups>) n (<tokens>) d

    The axes are ``w``, ``h w`` or ``t h w``. Each axis may be split into several names in parentheses, and every name
    occurs exactly once on each side. Tokens attend to each other inside their group only. For each axis, the size of
    one name may be omitted: it follows from the size of the feature map. If the size of a feature map is not a multiple
    of the given sizes, the feature map is padded, and the padding is masked.

    Args:
        expression: the einx expression.
        **sizes: sizes of names in the expression, in positions.

    Raises:
        ValueError: the expression does not have this form, or the size of a name is missing, invalid or unused.

    Source: the notation of einx, https://einx.readthedocs.io

    Columns of the same parity attend to each other:

    >>> stripes = Pattern("b n d h (w s) -> (b s) n (h w) d", s=2)
    >>> print(stripes.rearrangement.torch)
    maps.view(b, n, d, h, w, s).permute(0, 5, 1, 3, 4, 2).reshape(b*s, n, h*w, d)
    >>> halves = Pattern("b n d (y p) w -> (b y) n (p w) d", y=2, p=3)  # for at most six rows
    >>> halves.axis_tiles(0, 6, torch.device("cpu")).extent
    3
    """

    text: str = field(compare=False)
    sizes: tuple[tuple[str, int], ...] = field(compare=False)
    rearrangement: Rearrangement

    def __init__(self, expression: str, /, **sizes: int) -> None:
        rearrangement = Rearrangement.parse(expression, sizes)
        vars(self).update(text=expression, sizes=tuple(sizes.items()), rearrangement=rearrangement)

    def expand_to_rank(self, rank: int) -> Self:
        if rank != self.rank:
            raise ValueError(f"pattern must be for feature maps with {rank} axes, got {self}, which is for {self.rank}")
        return self

    def __repr__(self) -> str:
        return f"Pattern({', '.join([repr(self.text), *(f'{name}={size}' for name, size in self.sizes)])})"


@dataclass(frozen=True)
class Axial(AnyPattern):
    """Axial attention along the given axes of a feature map, counted from the last; full attention if None."""

    name: str
    axes: tuple[int, ...] | None

    def expand_to_rank(self, rank: int) -> Pattern:
        names = AXES[-rank:]
        if self.axes is not None and rank < -min(self.axes):
            raise ValueError(f"pattern {self.name!r} requires a feature map with {-min(self.axes)} axes, got {rank}")
        tokens = [names[axis] for axis in self.axes] if self.axes else names
        groups = " ".join(["b", *(name for name in names if name not in tokens)])
        return Pattern(f"b n d {' '.join(names)} -> ({groups}) n ({' '.join(tokens)}) d")


@dataclass(frozen=True)
class Window(ExpressionPattern):
    """Attention inside non-overlapping windows, as in Swin.

    ::

        b n d (gh h) (gw w) -> (b gh gw) n (h w) d        h, w: size of a window

    The size of the feature map need not be a multiple of the window size: a window at the border contains only
    positions inside the feature map. With ``shift``, the first complete window starts at position ``shift``, and the
    windows at the border are smaller. An axis that fits into one window is not shifted.

    Args:
        size: size of a window, in positions: an integer for all axes, or a tuple with one integer per axis.
        shift: position at which the first complete window starts, smaller than ``size``: an integer for all axes, or a
            tuple with one integer per axis. Swin uses ``size // 2`` in every other layer.

    Raises:
        ValueError: ``size`` is smaller than 1, or ``shift`` is negative or not smaller than ``size``.

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
        if len(sides) != len(shifts) or any(by >= side for side, by in zip(sides, shifts, strict=True)):
            expected = "shift must have the length of size and be smaller than size"
            raise ValueError(f"Window: {expected}, got size={self.size} and shift={self.shift}")

    @property
    def rearrangement(self) -> Rearrangement:  # type: ignore[override]
        return split_every_axis(WINDOWS, *same_length(self.size))


@dataclass(frozen=True)
class Grid(ExpressionPattern):
    """Attention between the positions of a grid that is spread over the feature map, as in MaxViT.

    ::

        b n d (h gh) (w gw) -> (b gh gw) n (h w) d        h, w: size of a grid

    Each grid contains ``size`` positions along each axis, at a fixed spacing that is the size of the feature map
    divided by ``size``, rounded up. If the size of the feature map is not a multiple of ``size``, it is padded, and the
    padding is masked.

    Args:
        size: size of a grid, in positions: an integer for all axes, or a tuple with one integer per axis.

    Raises:
        ValueError: ``size`` is smaller than 1.

    Source: Tu et al., *MaxViT*, 2022, section 3.2, https://arxiv.org/abs/2204.01697

    >>> Grid(7)
    Grid(size=7)
    """

    size: int | tuple[int, ...]

    def __post_init__(self) -> None:
        check_lengths("Grid", "size", self.size)

    @property
    def rearrangement(self) -> Rearrangement:  # type: ignore[override]
        return split_every_axis(GRIDS, *same_length(self.size))


#: Named patterns, for the argument ``pattern`` of a block.
PATTERNS = {"full": Axial("full", None), "rows": Axial("rows", (-1,)), "columns": Axial("columns", (-2,))}


def resolve_pattern(pattern: str | AnyPattern) -> AnyPattern:
    """Convert a name, or an einx expression that needs no sizes, to a pattern; return patterns unchanged."""
    if isinstance(pattern, str) and "->" in pattern:
        return Pattern(pattern)
    if isinstance(pattern, str) and pattern in PATTERNS:
        return PATTERNS[pattern]
    if isinstance(pattern, AnyPattern):
        return pattern
    names, expression = ", ".join(map(repr, PATTERNS)), "an expression such as 'b n d h w -> (b h) n w d'"
    instances = "an instance such as va.Window(7), va.Grid(7), va.Halo(8, 3) or va.Neighborhood(7)"
    raise ValueError(f"pattern must be one of {names}, {expression}, or {instances}, got {pattern!r}")

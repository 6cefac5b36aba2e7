"""The patterns one may ask for: small frozen values that print as the code that makes them."""

from __future__ import annotations

from dataclasses import dataclass

from vision_attn.attention.patterns.line import AXES, GRIDS, WINDOWS, Line, line_by_axis
from vision_attn.attention.patterns.partition import Partitioner
from vision_attn.attention.patterns.tiles import HaloPartitioner, LinePartitioner, NeighborhoodPartitioner
from vision_attn.checks import MOST


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Pattern:
    """Any pattern that one line of einx says: which positions of a map attend to each other.

    ``b n d`` and the axes of the map (``w``; ``h w``; ``t h w``) on the left; on the right ``(b <groups>) n (<tokens>)
    d``. Tokens of one group attend to each other and to nothing else. Every axis may leave one size open; a map that
    is no multiple of the given ones is padded, and nothing attends to the padding.

    Args:
        line: the line.
        **sizes: the size of each name in it that does not follow from the map, in positions.

    Raises:
        ValueError: the line is not of this form, is no permutation of the map, or leaves a size open.

    Striped attention, between the columns of the same parity:

    >>> stripes = Pattern("b n d h (w s) -> (b s) n (h w) d", s=2)
    >>> print(stripes.partitioner(2).line.torch)
    maps.view(b, n, d, h, w, s).permute(0, 5, 1, 3, 4, 2).reshape(b*s, n, h*w, d)
    """

    line: str
    sizes: tuple[tuple[str, int], ...]
    parsed: Line

    def __init__(self, line: str, /, **sizes: int) -> None:
        if not isinstance(line, str):
            raise ValueError(f"Pattern: line must be a line of einx, as 'b n d h w -> (b h) n w d'; got {line!r}")
        object.__setattr__(self, "line", line)
        object.__setattr__(self, "sizes", tuple(sizes.items()))
        object.__setattr__(self, "parsed", Line.parse(line, sizes))

    def partitioner(self, rank: int) -> Partitioner:
        """How the pattern cuts maps with ``rank`` axes; refused where it is for another number of them."""
        if rank != self.parsed.rank:
            raise ValueError(f"pattern must be for maps with {rank} axes; got {self}, which is for {self.parsed.rank}")
        return LinePartitioner(self.parsed)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pattern) and self.parsed == other.parsed

    def __hash__(self) -> int:
        return hash(self.parsed)

    def __repr__(self) -> str:
        return f"Pattern({', '.join([repr(self.line), *(f'{name}={size}' for name, size in self.sizes)])})"


@dataclass(frozen=True)
class Axial:
    """Attention along some axes of the map, counted from the last; all axes together are full attention."""

    axes: tuple[int, ...] | None

    def partitioner(self, rank: int) -> Partitioner:
        names = AXES[-rank:]
        if self.axes is not None and rank < -min(self.axes):
            raise ValueError(f"pattern {name_of(self)!r} needs a map with {-min(self.axes)} axes; got {rank}")
        tokens = tuple(names[axis] for axis in self.axes) if self.axes else names
        groups = tuple(name for name in names if name not in tokens)
        return LinePartitioner(Line(tuple((name,) for name in names), groups, tokens))


@dataclass(frozen=True)
class Window:
    """Attention inside windows that do not overlap, as in Swin.

    ``b n d (gh h) (gw w) -> (b gh gw) n (h w) d`` with ``h`` and ``w`` the sides of a window. Windows over the border
    hold their real tokens only. With a shift the windows begin at ``shift``, and those cut by the border are smaller;
    along an axis that one window holds whole there is no shift.

    Args:
        size: side of a window, in positions; one for all axes or one for each.
        shift: where the first whole window begins, in positions; smaller than the window.

    Raises:
        ValueError: a side below one, or a shift that is no position of a window.

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

    def partitioner(self, rank: int) -> Partitioner:
        """How the pattern cuts maps with ``rank`` axes; refused where it is for another number of them."""
        sides = for_axes(self, "size", self.size, rank)
        return LinePartitioner(line_by_axis(WINDOWS, sides), for_axes(self, "shift", self.shift, rank))


@dataclass(frozen=True)
class Grid:
    """Attention between positions a fixed number of steps apart, ``size`` of them along each axis, as in MaxViT.

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

    def partitioner(self, rank: int) -> Partitioner:
        """How the pattern cuts maps with ``rank`` axes; refused where it is for another number of them."""
        return LinePartitioner(line_by_axis(GRIDS, for_axes(self, "size", self.size, rank)))


@dataclass(frozen=True)
class Halo:
    """Attention of blocks, as windows, to the keys in them and in a halo around them, as in HaloNet.

    ``b n d (gh h) (gw w) -> (b gh gw) n (h w) d`` with ``h`` and ``w`` the sides of a block for queries, and those of a
    block and its halos for keys. Keys and values beyond the map are zeros, which are not masked, as in timm's
    ``HaloAttn``: near a border the weights of the keys on the map sum to less than one.

    Args:
        block_size: side of a block, in positions; one for all axes or one for each.
        halo_size: how far a block sees beyond each of its sides, in positions; likewise.

    Raises:
        ValueError: a side below one, or a halo below zero.

    Source: Vaswani et al., *Scaling Local Self-Attention for Parameter Efficient Visual Backbones*, 2021,
    https://arxiv.org/abs/2103.12731

    >>> Halo(8, halo_size=3)
    Halo(block_size=8, halo_size=3)
    """

    block_size: int | tuple[int, ...]
    halo_size: int | tuple[int, ...]

    def __post_init__(self) -> None:
        check_lengths("Halo", "block_size", self.block_size)
        check_lengths("Halo", "halo_size", self.halo_size, least=0)

    def partitioner(self, rank: int) -> Partitioner:
        """How the pattern cuts maps with ``rank`` axes; refused where it is for another number of them."""
        block = for_axes(self, "block_size", self.block_size, rank)
        return HaloPartitioner(line_by_axis(WINDOWS, block), for_axes(self, "halo_size", self.halo_size, rank))


@dataclass(frozen=True)
class Neighborhood:
    """Every position attends to the ``kernel_size`` positions around it along each axis, as in NATTEN.

    At a border the neighbourhood is shifted, never shrunk: every query has as many keys. An even kernel has its further
    key before the query. With a dilation the keys are that many positions apart. Along an axis too short for the kernel
    a query sees all positions of its class.

    With a stride so many queries in a row see the keys of the one in their middle. Along an axis that is causal a query
    sees itself and the ``kernel_size - 1`` positions before it, fewer at the border.

    Args:
        kernel_size: keys along an axis; one for all axes or one for each.
        dilation: positions from one key to the next; one for all axes or one for each.
        stride: queries that share their keys; one for all axes or one for each; at most the kernel.
        causal: whether no position sees one behind it; one for all axes or one for each.

    Raises:
        ValueError: a kernel, dilation or stride below one, a stride above the kernel, or a ``causal`` that is no bool.

    Source: Hassani et al., *Neighborhood Attention Transformer*, 2022, https://arxiv.org/abs/2204.07143; with
    dilation: Hassani and Shi, 2022, https://arxiv.org/abs/2209.15001; with a stride: Hassani et al., *Generalized
    Neighborhood Attention*, 2025, https://arxiv.org/abs/2504.16922

    >>> Neighborhood(7, dilation=2)
    Neighborhood(kernel_size=7, dilation=2, stride=1, causal=False)
    """

    kernel_size: int | tuple[int, ...]
    dilation: int | tuple[int, ...] = 1
    stride: int | tuple[int, ...] = 1
    causal: bool | tuple[bool, ...] = False

    def __post_init__(self) -> None:
        for name in ("kernel_size", "dilation", "stride"):
            check_lengths("Neighborhood", name, getattr(self, name))
        kernels, strides = same_length(self.kernel_size, self.stride)
        if any(stride > kernel for kernel, stride in zip(kernels, strides, strict=False)):
            raise ValueError(f"Neighborhood: stride must be at most kernel_size, {self.kernel_size}; got {self.stride}")
        if {*map(type, self.causal if isinstance(self.causal, tuple) else (self.causal,))} != {bool}:
            raise ValueError(f"Neighborhood: causal must be True, False or a tuple of them; got {self.causal!r}")

    def partitioner(self, rank: int) -> Partitioner:
        """How the pattern cuts maps with ``rank`` axes; refused where it is for another number of them."""
        names = ("kernel_size", "dilation", "stride")
        kernel, dilation, stride = (for_axes(self, name, getattr(self, name), rank) for name in names)
        causal = tuple(map(bool, for_axes(self, "causal", self.causal, rank)))
        return NeighborhoodPartitioner(line_by_axis(WINDOWS, kernel), dilation, stride, causal)


AnyPattern = Pattern | Axial | Window | Grid | Halo | Neighborhood

#: The patterns that have a name.
PATTERNS = {"full": Axial(None), "rows": Axial((-1,)), "columns": Axial((-2,))}


def resolve_pattern(pattern: str | AnyPattern) -> AnyPattern:
    """The pattern of a name, a line of einx with no open sizes, or the pattern itself."""
    if isinstance(pattern, str) and "->" in pattern:
        return Pattern(pattern)
    if isinstance(pattern, str) and pattern in PATTERNS:
        return PATTERNS[pattern]
    if isinstance(pattern, AnyPattern):
        return pattern
    raise ValueError(
        f"pattern must be one of {', '.join(map(repr, PATTERNS))}, a Window, Grid, Halo, Neighborhood or Pattern, or a "
        f"line of einx; got {pattern!r}"
    )


def name_of(pattern: AnyPattern) -> str:
    return next((name for name, named in PATTERNS.items() if named == pattern), repr(pattern))


def check_lengths(owner: str, name: str, value: object, least: int = 1) -> None:
    lengths = value if isinstance(value, tuple) else (value,)
    if not lengths or any(isinstance(n, bool) or not isinstance(n, int) or not least <= n <= MOST for n in lengths):
        raise ValueError(
            f"{owner}: {name} must be a whole number of at least {least}, or a tuple (…, …) of them; got {value!r}"
        )


def same_length(*values: int | tuple[int, ...]) -> list[tuple[int, ...]]:
    rank = max(len(value) if isinstance(value, tuple) else 1 for value in values)
    return [value if isinstance(value, tuple) else (value,) * rank for value in values]


def for_axes(owner: object, name: str, value: int | tuple[int, ...], rank: int) -> tuple[int, ...]:
    lengths = value if isinstance(value, tuple) else (value,) * rank
    if len(lengths) != rank:
        raise ValueError(f"pattern must be for maps with {rank} axes; got {owner}, whose {name} is for {len(lengths)}")
    return lengths

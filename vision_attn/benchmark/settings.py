"""The settings of a benchmark: what is measured, on what, and how often."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from vision_attn.checks import check_count, check_divides, check_flags

__all__ = ["DEVICES", "DTYPES", "RELATIVE_SHAPES", "SHAPES", "Settings", "Shape", "parse_shape"]

#: Batch, channels, height and width of the maps.
Shape = tuple[int, int, int, int]

#: The largest difference of an output from ours, in parts of ours' largest value, by the type of the numbers.
DTYPES = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
#: What may be measured on.
DEVICES = ("cpu", "cuda")

#: What plain attention is compared at where nothing else is asked for.
SHAPES: tuple[Shape, ...] = ((8, 64, 8, 8), (8, 256, 14, 14), (2, 256, 32, 32), (1, 128, 64, 64))
#: What attention with relative positions is compared at where nothing else is asked for.
RELATIVE_SHAPES: tuple[Shape, ...] = ((1, 256, 56, 56),)


@dataclass(frozen=True)
class Settings:
    """What a benchmark does.

    Raises:
        ValueError: a value is out of range, or ``heads`` do not divide the channels of a shape.

    >>> Settings(shapes=((8, 64, 8, 8),)).groups
    (((8, 64, 8, 8), False),)
    """

    #: shapes to compare plain attention at; with neither kind of shapes given, :data:`SHAPES`
    shapes: tuple[Shape, ...] | None = None
    #: shapes to compare attention with relative positions at; with neither kind given, :data:`RELATIVE_SHAPES`
    relative_shapes: tuple[Shape, ...] | None = None
    #: heads of every contestant
    heads: int = 8

    #: ``cpu``, ``cuda``, or None for the best there is
    device: str | None = None
    #: type of maps and weights, one of :data:`DTYPES`
    dtype: str = "float32"
    #: threads of the CPU; None for as many as torch has
    threads: int | None = None
    #: measurements of each contestant
    rounds: int = 15
    #: whether the maps come in the channels-last memory format
    channels_last: bool = False
    #: JSON file for everything that was measured; None for none
    output: str | None = None

    def __post_init__(self) -> None:
        check_count("heads", self.heads)
        check_count("rounds", self.rounds)
        if self.threads is not None:
            check_count("threads", self.threads)
        check_flags(channels_last=self.channels_last)
        for name, choices in (("dtype", tuple(DTYPES)), ("device", (None, *DEVICES))):
            if getattr(self, name) not in choices:
                allowed = ", ".join(str(choice) for choice in choices if choice)
                raise ValueError(f"{name} must be one of {allowed}; got {getattr(self, name)!r}")
        for name in ("shapes", "relative_shapes"):
            for shape in getattr(self, name) or ():
                check_shape(name, shape)
        for shape, _ in self.groups:
            check_divides("heads", self.heads, "channels", shape[1])

    @property
    def groups(self) -> tuple[tuple[Shape, bool], ...]:
        """What is measured, in order: each shape, and whether with relative positions."""
        plain, relative = self.shapes, self.relative_shapes
        if plain is None and relative is None:
            plain, relative = SHAPES, RELATIVE_SHAPES
        return (*((shape, False) for shape in plain or ()), *((shape, True) for shape in relative or ()))

    def as_dict(self) -> dict[str, object]:
        """The settings by their names."""
        return asdict(self)


def parse_shape(name: str, text: str) -> Shape:
    """A shape as it is written on the command line.

    Args:
        name: the setting it is for, in messages.
        text: ``batch,channels,height,width``.

    Raises:
        ValueError: it is not four whole numbers of at least 1.

    >>> parse_shape("shapes", "8,256,14,14")
    (8, 256, 14, 14)
    """
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise ValueError(wrong_shape(name, text))
    shape = tuple(int(part) for part in parts)
    check_shape(name, shape)
    return shape  # type: ignore[return-value]


def check_shape(name: str, shape: tuple[int, ...]) -> None:
    if len(shape) != 4 or any(length < 1 for length in shape):
        raise ValueError(wrong_shape(name, ",".join(map(str, shape))))


def wrong_shape(name: str, got: str) -> str:
    return (
        f"{name} must each be batch,channels,height,width, four whole numbers of at least 1 such as 8,256,14,14; "
        f"got {got!r}"
    )

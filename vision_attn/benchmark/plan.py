"""The plan of a benchmark: what is measured, on what, and how often."""

from __future__ import annotations

from dataclasses import dataclass

from vision_attn.benchmark.contestants import COMPARISONS, LAYOUTS, Shape

__all__ = ["DEVICES", "DTYPES", "ROWS", "Plan", "parse_shape"]

#: The largest difference of an output from ours, in parts of ours' largest value, by the type of the numbers.
DTYPES = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
DEVICES = ("cpu", "cuda")
#: What ``--rows`` takes; compiling takes minutes, and is done only where it is asked for by name.
ROWS = (*COMPARISONS, "all")
IN_ALL = tuple(name for name in COMPARISONS if name != "compiled")


@dataclass(frozen=True)
class Plan:
    """What a benchmark does.

    >>> Plan(rows=("windows",)).comparisons
    ('windows',)
    """

    #: names of comparisons
    rows: tuple[str, ...] = ("implementations",)
    #: shapes of the maps, for one comparison; None for its own
    shapes: tuple[Shape, ...] | None = None
    #: heads of every contestant; None for those that go with a comparison's own shapes, and 8 with others
    heads: int | None = None
    #: memory formats of the maps; None for the comparison's own
    layouts: tuple[str, ...] | None = None
    device: str | None = None
    dtype: str = "float32"
    #: threads of the CPU; None for as many as torch has
    threads: int | None = None
    #: measurements of each contestant
    rounds: int = 15
    #: JSON file for everything that was measured
    output: str | None = None
    #: PNG file for time and memory against tokens
    chart: str | None = None

    def __post_init__(self) -> None:
        for name in ("heads", "threads", "rounds"):
            count = getattr(self, name)
            if count is not None and (not isinstance(count, int) or count < 1):
                raise ValueError(f"{name} must be a whole number of at least 1; got {count!r}")
        if self.dtype not in DTYPES or self.device not in (None, *DEVICES):
            raise ValueError(f"dtype and device must be of {[*DTYPES]} and {DEVICES}; got {self.dtype}, {self.device}")
        if not {*self.rows} <= {*ROWS} or not {*(self.layouts or ())} <= {*LAYOUTS}:
            raise ValueError(f"rows and layouts must be of {ROWS} and {[*LAYOUTS]}; got {self.rows}, {self.layouts}")
        if self.shapes and len(self.comparisons) > 1:
            raise ValueError(f"shapes can be given for one of the rows at a time; got {', '.join(self.comparisons)}")
        for name in self.comparisons:
            for shape, heads in self.shapes_of(name).items():
                if len(shape) != 4 or min(shape) < 1:
                    raise ValueError(wrong_shape(",".join(map(str, shape))))
                if name != "backbone" and shape[1] % heads:
                    raise ValueError(f"heads must divide channels; got heads={heads} and channels={shape[1]} in {name}")
        if self.chart and self.comparisons != ("implementations",):
            raise ValueError("chart is of implementations alone: leave --rows out")
        varying = {shape[:2] for shape in self.shapes or ()}
        if self.chart and (len(varying) > 1 or len(self.layouts or ()) > 1):
            raise ValueError("chart needs shapes of one batch and one number of channels, in one layout")

    @property
    def comparisons(self) -> tuple[str, ...]:
        """What is measured, in order."""
        return tuple(dict.fromkeys(name for row in self.rows for name in (IN_ALL if row == "all" else (row,))))

    def shapes_of(self, name: str) -> dict[Shape, int]:
        """The shapes of a comparison, and the heads at each."""
        if self.shapes:
            return dict.fromkeys(self.shapes, self.heads or 8)
        return {shape: self.heads or heads for shape, heads in COMPARISONS[name].shapes.items()}


def parse_shape(text: str) -> Shape:
    """A shape as it is written on the command line.

    >>> parse_shape("8,256,14,14")
    (8, 256, 14, 14)
    """
    parts = text.split(",")
    if len(parts) != 4 or not all(part.isdecimal() for part in parts):
        raise ValueError(wrong_shape(text))
    b, c, h, w = map(int, parts)
    return b, c, h, w


def wrong_shape(got: str) -> str:
    return f"shapes must each be batch,channels,height,width, numbers of at least 1 such as 8,256,14,14; got {got!r}"

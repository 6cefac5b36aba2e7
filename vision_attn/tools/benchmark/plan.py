"""The plan of a benchmark: what is measured, on what, and how often. Light: the command line's flags are made of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from vision_attn.checks import check_counts, check_divides
from vision_attn.tools.training.settings import setting

__all__ = ["COMPARISONS", "DTYPES", "LAYOUTS", "ROWS", "Plan", "Shape", "chosen", "parse_shape"]

#: Batch, channels, height and width of maps.
Shape = tuple[int, int, int, int]

#: More end a process without a word.
MOST_THREADS = 1024
LAYOUTS = {"nchw": torch.contiguous_format, "channels-last": torch.channels_last}
#: The largest difference of an output from ours, in parts of ours' largest value, by the type of the numbers.
DTYPES = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}


@dataclass(frozen=True)
class Comparison:
    """What ``--rows`` names: who runs is made in contestants.py; shapes with heads, and layouts, if none are given."""

    text: str
    shapes: Mapping[Shape, int]
    layouts: tuple[str, ...] = ("nchw",)


BOTH = tuple(LAYOUTS)
SIZES: dict[Shape, int] = {(8, 256, 14, 14): 8, (2, 256, 32, 32): 8, (1, 128, 64, 64): 4}

COMPARISONS = {
    "implementations": Comparison(
        "every implementation, attention written out by hand, timm, torch and the floor",
        {(1, 128, side, side): 4 for side in (8, 16, 32, 64)},
    ),
    "attention": Comparison(
        "sdpa, timm, torch and the floor",
        {(8, 64, 8, 8): 8, (32, 512, 7, 7): 8, **SIZES, (1, 256, 56, 56): 8},
        BOTH,
    ),
    "backbone": Comparison(
        "two blocks in resnet50: inserted, and by hand with timm's layers",
        {(4, 3, 224, 224): 8, (16, 3, 224, 224): 8},
    ),
    "positions": Comparison(
        "RelPosDecomposed and timm's BottleneckAttn", {(8, 256, 14, 14): 8, (2, 256, 28, 28): 8, (1, 256, 56, 56): 8}
    ),
    "windows": Comparison("windows with a table, ours and torchvision's", {(2, 96, 56, 56): 3}, BOTH),
    "einx": Comparison("einx and bmm", SIZES),
    "compiled": Comparison("einx and bmm, compiled", SIZES),
    "memory": Comparison(
        "positions and patterns of ours, with four times the tokens", {(1, 64, 28, 28): 4, (1, 64, 56, 56): 4}
    ),
    "swap": Comparison("networks before and after swap_", {(4, 3, 224, 224): 1}),
    "calls": Comparison("Python calls of ours in a forward of these", {(2, 64, 14, 14): 4}),
}
#: What ``--rows`` takes; compiling takes minutes, and is done only where it is asked for by name.
ROWS = (*(name for name in COMPARISONS if name != "swap"), "all")
IN_ALL = tuple(name for name in COMPARISONS if name not in ("compiled", "swap"))
#: Those whose shapes are of images.
OF_IMAGES = ("backbone", "swap")


@dataclass(frozen=True)
class Plan:
    """What a benchmark does.

    >>> Plan(rows=("windows",)).comparisons
    ('windows',)
    """

    rows: tuple[str, ...] = setting(("implementations",), "what is measured, by name; see below", ROWS)
    swap: tuple[str, ...] = setting((), "in place of rows, networks by name before and after swap_")
    only: tuple[str, ...] = setting((), "contestants, by parts of their names: sdpa, floor, timm, … (default: all)")
    shapes: tuple[Shape, ...] | None = setting(None, "of maps, or images (default: the row's own)", metavar="B,C,H,W")
    heads: int | None = setting(None, "heads of every contestant (default: by the shape; 8 at those given)")
    layouts: tuple[str, ...] | None = setting(None, "memory formats of the maps (default: by the rows)", tuple(LAYOUTS))
    device: str | None = setting(None, "where it runs (default: cuda, if any)", ("cpu", "cuda"))
    dtype: str = setting("float32", "type of maps and weights", tuple(DTYPES))
    threads: int | None = setting(None, "threads of the CPU (default: as many as torch has)")
    rounds: int = setting(15, "measurements of each contestant")
    output: str | None = setting(None, "JSON file for all that was measured")
    markdown: str | None = setting(None, "Markdown file for the tables")
    chart: str | None = setting(None, "PNG file for time and memory against tokens")

    def __post_init__(self) -> None:
        check_counts(heads=self.heads, threads=self.threads, rounds=self.rounds)
        if (self.threads or 1) > MOST_THREADS:
            raise ValueError(f"threads must be at most {MOST_THREADS:,}; got {self.threads:,}")
        if self.chart and not self.chart.endswith(".png"):
            raise ValueError(f"chart must end in .png; got {self.chart!r}")
        if self.shapes and len(self.comparisons) > 1:
            raise ValueError(f"shapes can be given for one of the rows at a time; got {', '.join(self.comparisons)}")
        for name in self.comparisons:
            for _, shape, heads in self.maps_of(name):
                if name not in OF_IMAGES:
                    check_divides("heads", heads, "channels", shape[1])
        tables = {(name, layout, *shape[:2]) for name in self.comparisons for layout, shape, _ in self.maps_of(name)}
        if self.chart and (len(tables) > 1 or self.rows == ("calls",)):
            raise ValueError(
                "chart is of one of the rows but calls, at shapes of one batch and one number of channels, in one "
                "layout: give such --rows, --shapes and --layouts"
            )

    @property
    def comparisons(self) -> tuple[str, ...]:
        """What is measured, in order."""
        if self.swap:
            return ("swap",)
        return tuple(dict.fromkeys(name for row in self.rows for name in (IN_ALL if row == "all" else (row,))))

    def maps_of(self, name: str) -> list[tuple[str, Shape, int]]:
        """The layouts and shapes of a comparison, and the heads at each."""
        usual = COMPARISONS[name]
        shapes = dict.fromkeys(self.shapes, 8) if self.shapes else usual.shapes
        layouts = self.layouts or usual.layouts
        return [(layout, shape, self.heads or heads) for shape, heads in shapes.items() for layout in layouts]


def chosen(names: Iterable[str], only: Sequence[str]) -> tuple[str, ...]:
    """The names that have one of some parts in them, whatever the case; all where no part is given.

    >>> chosen(["ours sdpa", "ours bmm", "torch MHA"], ["mha", "sdpa"])
    ('ours sdpa', 'torch MHA')
    """
    return tuple(name for name in names if not only or any(part.lower() in name.lower() for part in only))


def parse_shape(text: str) -> Shape:
    """A shape as it is written on the command line.

    >>> parse_shape("8,256,14,14")
    (8, 256, 14, 14)
    """
    parts = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if len(parts) != 4 or 0 in parts:
        raise ValueError(
            f"shapes must each be batch,channels,height,width, numbers of at least 1 such as 8,256,14,14; got {text!r}"
        )
    return parts[0], parts[1], parts[2], parts[3]

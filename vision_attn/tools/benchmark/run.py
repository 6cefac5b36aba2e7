"""Contestants are made, compared with their twins and timed in turns: a table of time and memory for each map."""

from __future__ import annotations

import copy
import json
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import Measurement, Timer

from vision_attn.checks import check_counts, check_divides
from vision_attn.errors import BenchmarkError
from vision_attn.networks.convert import swap_
from vision_attn.networks.inspection import network_of
from vision_attn.networks.safe import write_atomically
from vision_attn.text import markdown, table
from vision_attn.tools.benchmark.contestants import CONTESTANTS, LAYOUTS, ROWS, Maker, Row, Shape

__all__ = ["BenchmarkTable", "Timing", "parse_shape", "peak_memory", "run_benchmark", "time_in_turns"]

#: A measurement takes at least this long, in seconds: a shorter call is repeated in it.
SHORTEST = 5e-3
#: On an idle machine the quartiles of a contestant are at most this part of its median apart.
STILL = 0.1
#: The largest difference of an output from its twin's, in parts of the twin's largest value, by the type of numbers.
DTYPES = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
HEADER = """\
Medians of {rounds} rounds in which the contestants take turns. ÷: the first one's time over this one's, the median of
the rounds. gradients: forward and backward. MiB: peak beyond what was held before. floor: projection, fused kernel,
projection, each on contiguous inputs of its own."""


@dataclass(frozen=True)
class Timing:
    """One contestant."""

    #: by pass, forward or gradients: seconds, one number for each round
    seconds: Mapping[str, Sequence[float]]
    #: by pass: the peak beyond what was held before
    mebibytes: Mapping[str, float]


@dataclass(frozen=True)
class BenchmarkTable:
    """The contestants on one map, the first of whom is compared with the others."""

    title: str
    timings: Mapping[str, Timing]

    def ratio(self, name: str, what: str) -> float:
        """The first contestant's time over another's, the median over rounds."""
        first = next(iter(self.timings.values()))
        return float(np.median(np.array(first.seconds[what]) / np.array(self.timings[name].seconds[what])))

    def rows(self) -> list[list[str]]:
        """Cells, the header first."""
        passes = next(iter(self.timings.values())).seconds
        rows = [["", *(f"{what} {of}" for what in passes for of in ("ms", "÷", "MiB"))]]
        for name, one in self.timings.items():
            row = [name]
            for what, seconds in one.seconds.items():
                row += [written(1000 * float(np.median(seconds))), written(self.ratio(name, what))]
                row += [written(one.mebibytes[what])]
            rows.append(row)
        return rows

    @property
    def warning(self) -> str:
        """Why the times may be off; empty where nothing speaks against them."""
        for name, one in self.timings.items():
            for seconds in one.seconds.values():
                low, middle, high = np.quantile(seconds, (0.25, 0.5, 0.75))
                if high - low > STILL * middle:
                    return f"Warning: the times of {name} vary by {(high - low) / middle:.0%}: is the machine idle?"
        return ""


def run_benchmark(
    rows: Sequence[str] = ("implementations",),
    *,
    swap: Sequence[str] = (),
    only: Sequence[str] = (),
    shapes: Sequence[Shape] = (),
    heads: int | None = None,
    layouts: Sequence[str] = (),
    device: str | None = None,
    dtype: str = "float32",
    threads: int | None = None,
    rounds: int = 15,
    output: str | Path | None = None,
    markdown_output: str | Path | None = None,
    say: Callable[[str], None] = print,
) -> list[BenchmarkTable]:
    """Compare ours with the others: outputs first, then time and memory, forward and with gradients.

    Args:
        rows: names in ``ROWS``, or ``"all"``.
        swap: in place of rows, networks by name, before and after ``swap_``.
        only: contestants, by parts of their names; all by default.
        shapes: of maps, ``(b, c, h, w)``; by default the row's own.
        heads: of every contestant; by default the row's own, 8 at given shapes.
        layouts: ``"nchw"``, ``"channels-last"``; by default the row's own.
        device: ``"cpu"`` or ``"cuda"``; by default CUDA, if there is a GPU.
        dtype: of maps and weights: ``"float32"``, ``"bfloat16"``, ``"float16"``.
        threads: of the CPU; by default as many as torch has.
        rounds: measurements of each contestant.
        output: JSON file for all that was measured, written after each table.
        markdown_output: Markdown file for the tables, the same.
        say: is given each table as text.

    Raises:
        ValueError: an argument is wrong.
        BenchmarkError: a contestant does not compute what its twin of ours with the same weights does.

    >>> (found,) = run_benchmark(shapes=[(1, 8, 4, 4)], heads=2, device="cpu", rounds=1, say=lambda text: None)
    >>> found.title
    'implementations: batch 1, 8 channels, 4×4, 2 heads, nchw'
    """
    check_counts(heads=heads, threads=threads, rounds=rounds)
    chosen = rows_of(rows, swap)
    if shapes and len(chosen) > 1:
        raise ValueError(f"shapes can be given for one of the rows at a time; got {', '.join(chosen)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for and there is no CUDA device: leave --device out, or give cpu")
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    about = describe_machine(place, threads or torch.get_num_threads(), dtype)
    say(f"{about}\n\n{HEADER.format(rounds=rounds)}")
    found: list[BenchmarkTable] = []
    for name, row, makers in chosen:
        makers = {who: make for who, make in makers.items() if not only or any(part.lower() in who.lower() for part in only)}
        if not makers:
            raise ValueError(f"only: no contestant of {name} has {' or '.join(only)} in its name")
        for shape, usual in (dict.fromkeys(shapes, 8) or row.shapes).items():
            for layout in layouts or row.layouts:
                ...
    return found

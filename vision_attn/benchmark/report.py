"""What was measured, as a table, as JSON and as a chart."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from vision_attn.benchmark.contestants import Shape
from vision_attn.benchmark.measure import Spread
from vision_attn.text import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["BEST", "ResultTable", "as_json", "as_text", "chart", "header"]

#: The row of the fastest of the other libraries.
BEST = "best of the others"

#: A number, or first quartile, median and third quartile; None where there is nothing to measure.
Value = float | Spread | None


@dataclass(frozen=True)
class ResultTable:
    """One table: the rows have the same columns, named by what was run and by what was measured of it."""

    comparison: str
    title: str
    shape: Shape
    heads: int
    layout: str
    rows: dict[str, dict[str, Value]]
    note: str
    #: what the rows were computed from: seconds of each round, calls of each function
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.shape[2] * self.shape[3]


def header(machine: Mapping[str, Any], dtype: str, rounds: int) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    # With other work on the cores the threads wait for each other, and what is measured is how often.
    load = "" if machine["load"] is None else f", load before {machine['load']:.1f} on {machine['cores']} cores"
    return (
        f"{machine['device']}, threads {machine['threads']}, dtype {dtype}{load}\n{versions}\n\n"
        f"Median (quartiles) of {rounds} rounds in which the contestants take turns, and of the ratios in each round.\n"
        "gradients: forward and backward. MiB: peak beyond what was held before.\n"
        "floor: projection, fused kernel, projection, each on contiguous inputs, measured apart and summed."
    )


def as_text(result: ResultTable) -> str:
    b, c, h, w = result.shape
    title = f"--- {result.title}: batch {b}, {c} channels, {h}×{w}, {result.heads} heads, {result.layout}"
    columns = list(next(iter(result.rows.values())))
    passes, _, names = zip(*(column.rpartition(" ") for column in columns), strict=True)
    cells = [
        ["", *(name if name != before else "" for before, name in zip(("", *passes), passes, strict=False))],
        ["", *("ours ÷ it" if name == "ratio" else name for name in names)],
        *([name, *(written(row[column]) for column in columns)] for name, row in result.rows.items()),
    ]
    return "\n".join([title, table(cells if any(passes) else cells[1:]), result.note])


def written(value: Value) -> str:
    """A number by three digits; a spread as its median and quartiles.

    >>> [written(value) for value in (12, 1.23456, 12.3456, (0.95, 1.0, 1.123), None)]
    ['12', '1.23', '12.3', '1.00 (0.95–1.12)', '–']
    """
    if value is None:
        return "–"
    if isinstance(value, tuple):
        low, middle, high = map(written, value)
        return f"{middle} ({low}–{high})"
    if isinstance(value, int):
        return str(value)
    places = next((places for places, limit in ((3, 0.1), (2, 10), (1, 100)) if abs(value) < limit), 0)
    return f"{value:.{places}f}"


def as_json(machine: Mapping[str, Any], settings: Mapping[str, Any], results: Sequence[ResultTable]) -> str:
    document = {"machine": machine, "settings": settings, "results": [asdict(result) for result in results]}
    return json.dumps(document, indent=2)


def chart(results: Sequence[ResultTable]) -> Figure:
    """Time and memory against tokens, a line for each contestant; the tables differ in the sides of their maps."""
    from matplotlib.figure import Figure

    rows = results[0].rows
    columns = [column for column in rows[BEST] if not column.endswith("ratio")]
    figure = Figure(figsize=(4 * len(columns), 5), layout="constrained")
    for axis, column in zip(figure.subplots(1, len(columns)), columns, strict=True):
        for number, name in enumerate(name for name in rows if name != BEST):
            points = sorted((result.tokens, result.rows[name][column]) for result in results)
            if None not in (value for _, value in points):
                middle = [(tokens, value[1] if isinstance(value, tuple) else value) for tokens, value in points]
                axis.plot(*zip(*middle, strict=True), color=f"C{number}", marker="ovsD^"[number % 5], label=name)
        axis.set(xscale="log", yscale="log", xlabel="tokens", title=column)
        axis.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    return figure

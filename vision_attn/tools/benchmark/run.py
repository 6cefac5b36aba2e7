"""A benchmark: contestants are made, compared and measured in turns; a table, JSON and a chart of what was measured."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from vision_attn.errors import BenchmarkError
from vision_attn.networks.checkpoints import write_atomically
from vision_attn.text import markdown, table
from vision_attn.tools.benchmark.contestants import CASES, Case, make_map, swap
from vision_attn.tools.benchmark.measure import Spread, count_calls, peak_memory, quartiles, ratio, time_in_turns
from vision_attn.tools.benchmark.plan import DTYPES, Plan, Shape, chosen

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["BEST", "ResultTable", "as_text", "chart", "run_benchmark"]

#: The row of the fastest of the other libraries.
BEST = "best of the others"

#: A number, or first quartile, median and third quartile; None where there is nothing to measure.
Value = float | Spread | None

MEBI = 2**20

#: On a machine that is idle the quartiles of a contestant are at most this part of its median apart.
STILL = 0.1


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
    def heading(self) -> str:
        b, c, h, w = self.shape
        heads = "" if self.comparison == "swap" else f" {self.heads} heads,"
        return f"{self.title}: batch {b}, {c} channels, {h}×{w},{heads} {self.layout}"

    @property
    def tokens(self) -> int:
        return self.shape[2] * self.shape[3]


def run_benchmark(plan: Plan, say: Callable[[str], None] = print) -> list[ResultTable]:
    """Compare ours with the others: outputs first, then time, forward and with gradients, and memory.

    >>> plan = Plan(shapes=((1, 8, 4, 4),), heads=2, device="cpu", rounds=1)
    >>> (result,) = run_benchmark(plan, say=lambda text: None)
    >>> result.tokens
    16
    """
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for and there is no CUDA device: leave --device out, or give cpu")
    device = torch.device(plan.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    for path in filter(None, (plan.output, plan.markdown, plan.chart)):
        open(path, "ab").close()  # what cannot be written is said before anything is measured for it
    results: list[ResultTable] = []
    maps = [(name, *one) for name in plan.comparisons for one in plan.maps_of(name)]
    # On a terminal a line says how far it is.
    with prepared(plan.threads, device), tqdm(maps, leave=False, disable=None) as progress:
        machine = describe_machine(device)
        say(header(machine, plan.dtype, plan.rounds))
        try:
            for name, layout, shape, heads in progress:
                progress.set_description(place := f"{name} at {','.join(map(str, shape))}")
                with enough_memory(place):
                    x = make_map(shape, layout, device, getattr(torch, plan.dtype))
                    for case in swap(x, plan.swap) if name == "swap" else CASES[name](x, heads):
                        if not (case := only(case, plan.only)).contestants:
                            continue
                        rows, note, details = (python_calls if name == "calls" else times)(case, x, place, plan)
                        note = "\n".join(filter(None, (note, unrest(rows))))
                        results.append(ResultTable(name, case.title, shape, heads, layout, rows, note, details))
                        with progress.external_write_mode():
                            say("\n" + as_text(results[-1]))
                        # After each table, so that an interrupted run has what it measured.
                        write_reports(plan, machine, results)
        finally:
            if results and plan.chart:
                from vision_attn.networks.figures import save_figure

                save_figure(chart(results), plan.chart)
            files = [path for path in (plan.output, plan.markdown, plan.chart) if path]
            if results and files:
                say(f"\n{len(results)} tables are in {', '.join(files)}.")
    if not results:
        raise ValueError(
            f"only: no contestant of {', '.join(plan.comparisons)} has {' or '.join(plan.only)} in its name"
        )
    return results


def only(case: Case, parts: Sequence[str]) -> Case:
    """The case with those of its contestants that are chosen."""
    names = chosen(case.contestants, parts)
    return replace(
        case,
        contestants={name: case.contestants[name] for name in names},
        rivals=tuple(name for name in case.rivals if name in names),
        base=case.base if case.base in names else None,
    )


def write_reports(plan: Plan, machine: Mapping[str, Any], results: Sequence[ResultTable]) -> None:
    if plan.output:
        document = {"machine": machine, "settings": asdict(plan), "results": [asdict(result) for result in results]}
        write_atomically(Path(plan.output), json.dumps(document, indent=2).encode())
    if plan.markdown:
        head = f"```text\n{header(machine, plan.dtype, plan.rounds)}\n```"
        write_atomically(Path(plan.markdown), "\n\n".join([head, *map(as_markdown, results), ""]).encode())


#: Of one case: the rows, a note below them, and what they were computed from.
Measured = tuple[dict[str, dict[str, Any]], str, dict[str, Any]]


def times(case: Case, x: Tensor, place: str, plan: Plan) -> Measured:
    """Time, ratios of the first contestant to each, and peak memory, forward and with gradients."""
    worst = check_outputs(case, x, place, plan.dtype)
    best = (BEST,) if len(case.rivals) > 1 else ()
    rows: dict[str, dict[str, Any]] = {name: {} for name in (*case.contestants, *best)}
    seconds = {}
    for what in ("forward", "gradients")[: 1 + case.gradients]:
        calls = {
            name: [step.forward if what == "forward" else step.gradients() for step in one.steps]
            for name, one in case.contestants.items()
        }
        taken = time_in_turns(calls, rounds=plan.rounds, device=x.device)
        seconds[what] = dict(taken)
        if best:
            taken[BEST] = min((taken[name] for name in case.rivals), key=lambda values: quartiles(values)[1])
        ours = next(iter(taken))
        for name, values in taken.items():
            base = None if case.base in (None, name) else taken[case.base]
            # The parts of the floor are not one call: there is no telling what is held between them.
            whole = len(calls.get(name, ())) == 1
            rows[name] |= {
                f"{what} ms": quartiles([1000 * value for value in values]),
                f"{what} ratio": None if name == ours else ratio(taken[ours], values, base),
                f"{what} MiB": peak_memory(calls[name][0], x.device) / MEBI if whole else None,
            }
    note = f"Outputs agree to {worst:.0e} of the largest value ({DTYPES[plan.dtype]:.0e} is allowed)." if worst else ""
    if case.base:
        note = f"Ratios are of what is added to the {case.base}; beside the {case.base} itself, of the whole. {note}"
    return rows, note, {"seconds": seconds}


def check_outputs(case: Case, x: Tensor, place: str, dtype: str) -> float:
    """The largest difference of an output from its twin's, in parts of the twin's largest value."""
    worst = 0.0
    for name, one in case.contestants.items():
        if one.twin is None:
            continue
        with torch.no_grad():
            found, expected = one.as_map(one.steps[-1].forward()).double(), one.twin(x).double()
        same_shape = found.shape == expected.shape
        largest = expected.abs().max().clamp(min=torch.finfo(torch.float32).tiny)  # of a head of zeros: nothing
        difference = float((found - expected).abs().max() / largest) if same_shape else torch.inf
        if not difference <= DTYPES[dtype]:  # nor when it is not a number
            raise BenchmarkError(
                f"{name}, {place}: its output differs from that of ours with the same weights by {difference:.2g} of "
                f"the largest value, and {DTYPES[dtype]:g} is allowed in {dtype}; nothing is timed"
            )
        worst = max(worst, difference)
    return worst


def python_calls(case: Case, x: Tensor, place: str, plan: Plan) -> Measured:
    """Calls of functions of ours in a forward that is not the first."""
    rows, walks = {}, {}
    for name, one in case.contestants.items():
        (step,) = one.steps
        step.forward()
        found = {key: count for key, count in count_calls(step.forward).items() if not key[0].startswith("benchmark")}
        rows[name] = {"calls": sum(found.values()), "functions": len(found), "files": len({file for file, _ in found})}
        walks[name] = [[file, function, count] for (file, function), count in found.items()]
    return rows, "Calls of functions of ours in a forward; each step of a generator is a call.", {"walks": walks}


@contextmanager
def prepared(threads: int | None, device: torch.device) -> Iterator[None]:
    """So many threads, a seed, and float32 that is float32; as it was before when it ends."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    # On CUDA convolutions take shorter numbers (TF32) by default and linear layers do not: that would compare types.
    float32 = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
    try:
        with float32, torch.random.fork_rng(devices=[torch.cuda.current_device()] if device.type == "cuda" else []):
            torch.manual_seed(0)
            yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def enough_memory(place: str) -> Iterator[None]:
    """Say of what there was too little, and the remedy."""
    try:
        yield
    except RuntimeError as error:
        # On the CPU the allocator of torch raises a plain RuntimeError.
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            raise BenchmarkError(f"{place}: there is not enough memory: choose smaller --shapes") from error
        raise


def describe_machine(device: torch.device) -> dict[str, Any]:
    """What is measured on."""
    info = Path("/proc/cpuinfo")  # which calls the processor by its name, on Linux
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    processor = next(names, platform.processor() or platform.machine())
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        # torch says with it what it was built for
        "versions": {"torch": str(torch.__version__)}
        | {name: version(name) for name in ("torchvision", "timm", "einx", "vision-attn")},
    }


def unrest(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Why times are not to be trusted; empty where nothing speaks against them."""
    name = "floor" if "floor" in rows else next(iter(rows))
    if "forward ms" not in rows[name]:
        return ""
    low, middle, high = rows[name]["forward ms"]
    spread = (high - low) / middle
    warning = f"Warning, the machine was not idle: half of the times of {name} are {spread:.0%} of the median apart."
    return f"{warning} Measure again when it is." if spread > STILL else ""


# --- reports ----------------------------------------------------------------------------------------------------------


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
    columns = list(next(iter(result.rows.values())))
    passes, _, names = zip(*(column.rpartition(" ") for column in columns), strict=True)
    cells = [
        ["", *(name if name != before else "" for before, name in zip(("", *passes), passes, strict=False))],
        ["", *(f"{next(iter(result.rows))} ÷ it" if name == "ratio" else name for name in names)],
        *([name, *(written(row[column]) for column in columns)] for name, row in result.rows.items()),
    ]
    return "\n".join(filter(None, [f"--- {result.heading}", table(cells if any(passes) else cells[1:]), result.note]))


def as_markdown(result: ResultTable) -> str:
    """A table as GitHub shows it, below a heading."""
    first, columns = next(iter(result.rows)), list(next(iter(result.rows.values())))
    cells = [
        ["", *(column.replace("ratio", f"{first} ÷ it") for column in columns)],
        *([name, *(written(row[column]) for column in columns)] for name, row in result.rows.items()),
    ]
    return "\n\n".join(filter(None, [f"### {result.heading}", markdown(cells), result.note]))


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


def chart(results: Sequence[ResultTable]) -> Figure:
    """Time and memory against tokens, a line for each contestant; the tables differ in the sides of their maps."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    results = sorted(results, key=lambda result: result.tokens)
    lines = dict.fromkeys((result.title, name) for result in results for name in result.rows if name != BEST)
    several = len({title for title, _ in lines}) > 1
    columns = [column for column in next(iter(results[0].rows.values())) if not column.endswith("ratio")]
    figure = Figure(figsize=(5 * len(columns) / 2 + 1, 9), layout="constrained")
    axes = figure.subplots(2, len(columns) // 2, sharex=True, squeeze=False)  # below each time its memory
    for axis, column in zip(axes.T.flat, columns, strict=True):
        for number, (title, name) in enumerate(lines):
            cells = [(result.tokens, result.rows[name][column]) for result in results if result.title == title]
            points = [(x, y[1] if isinstance(y, tuple) else y) for x, y in cells if y is not None]
            axis.plot(
                [x for x, _ in points],
                [y for _, y in points],
                color=f"C{number}",
                marker="ovsD^P*"[number % 7],  # ten colours, seven shapes: no two lines are alike
                linestyle="-" if name.startswith("ours") else "--",
                label=f"{name}, {title}" if several else name,
            )
        axis.set(xscale="log", yscale="log", title=column)
        axis.set_xticks(tokens := sorted({result.tokens for result in results}), tokens)
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("tokens")
    b, c = results[0].shape[:2]
    figure.suptitle(f"{results[0].comparison}: batch {b}, {c} channels, {results[0].heads} heads, {results[0].layout}")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    return figure

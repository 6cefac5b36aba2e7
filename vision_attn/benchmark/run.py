"""A benchmark from its plan: contestants are made, compared, measured in turns, and reported."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vision_attn.benchmark.contestants import COMPARISONS, Case, Shape, make_map
from vision_attn.benchmark.measure import count_calls, peak_memory, quartiles, ratio, time_in_turns
from vision_attn.benchmark.plan import DTYPES, Plan
from vision_attn.benchmark.report import BEST, ResultTable, as_json, as_text, chart, header
from vision_attn.checkpoints import write_atomically
from vision_attn.errors import BenchmarkError

__all__ = ["run_benchmark"]

MEBI = 2**20


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
    for path in filter(None, (plan.output, plan.chart)):
        check_writable(Path(path))
    results = []
    with prepared(plan.threads, device):
        machine = describe_machine(device)
        say(header(machine, plan.dtype, plan.rounds))
        for name in plan.comparisons:
            for shape, heads in plan.shapes_of(name).items():
                for layout in plan.layouts or COMPARISONS[name].layouts:
                    for result in measure(name, shape, heads, layout, plan, device):
                        say("\n" + as_text(result))
                        results.append(result)
    if plan.output:
        write_atomically(Path(plan.output), as_json(machine, asdict(plan), results).encode())
        say(f"\nAll of it is in {plan.output}.")
    if plan.chart:
        from vision_attn.figures import save_figure

        save_figure(chart(results), plan.chart)
        say(f"\nThe chart is {plan.chart}.")
    return results


def measure(
    name: str, shape: Shape, heads: int, layout: str, plan: Plan, device: torch.device
) -> Iterator[ResultTable]:
    place = f"{name} at {','.join(map(str, shape))}"
    try:
        x = make_map(shape, layout, device, getattr(torch, plan.dtype))
        for case in COMPARISONS[name].cases(x, heads):
            rows, note, details = MEASURES.get(name, times)(case, x, place, plan)
            yield ResultTable(name, case.title, shape, heads, layout, rows, note, details)
    except RuntimeError as error:
        # On the CPU the allocator of torch raises a plain RuntimeError.
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            raise BenchmarkError(f"{place}: there is not enough memory: choose smaller --shapes") from error
        raise
    finally:
        show_progress()


#: Of one case: the rows, a note below them, and what they were computed from.
Measured = tuple[dict[str, dict[str, Any]], str, dict[str, Any]]


def times(case: Case, x: Tensor, place: str, plan: Plan) -> Measured:
    """Time, ratios of the first contestant to each, and peak memory, forward and with gradients."""
    worst = check_outputs(case, x, place, plan.dtype)
    rows: dict[str, dict[str, Any]] = {name: {} for name in (*case.contestants, *((BEST,) if case.rivals else ()))}
    seconds = {}
    for what in ("forward", "gradients")[: 1 + case.gradients]:
        calls = {
            name: [step.forward if what == "forward" else step.gradients() for step in one.steps]
            for name, one in case.contestants.items()
        }
        progress = partial(show_progress, f"{place}, {what}")
        taken = time_in_turns(calls, rounds=plan.rounds, device=x.device, progress=progress)
        seconds[what] = dict(taken)
        if case.rivals:
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
    note = f"Outputs agree to {worst:.0e} of the largest value ({DTYPES[plan.dtype]:.0e} is allowed)."
    if case.base:
        note = f"Ratios are of what is added to the {case.base}; beside the {case.base} itself, of the whole. {note}"
    return rows, note, {"seconds": seconds}


def check_outputs(case: Case, x: Tensor, place: str, dtype: str) -> float:
    """The largest difference of an output from its twin's, in parts of the twin's largest value."""
    worst = 0.0
    for name, one in case.contestants.items():
        if one.twin is None:
            continue
        show_progress(place, f"comparing outputs, {name}")
        with torch.no_grad():
            found, expected = one.as_map(one.steps[-1].forward()).double(), one.twin(x).double()
        same_shape = found.shape == expected.shape
        difference = float((found - expected).abs().max() / expected.abs().max()) if same_shape else torch.inf
        if not difference <= DTYPES[dtype]:  # nor when it is not a number
            raise BenchmarkError(
                f"{name}, {place}: its output differs from that of ours with the same weights by {difference:.2g} of "
                f"the largest value, and {DTYPES[dtype]:g} is allowed in {dtype}; nothing is timed"
            )
        worst = max(worst, difference)
    return worst


def memory_growth(case: Case, x: Tensor, place: str, plan: Plan) -> Measured:
    """The peak at a map and at one with twice its sides."""
    rows: dict[str, dict[str, Any]] = {name: {} for name in case.contestants}
    for name, one in case.contestants.items():
        show_progress(place, name)
        for what in ("forward", "gradients"):
            peaks = {}
            for step in one.steps:
                call = step.forward if what == "forward" else step.gradients()
                call()  # what is made once and kept is not counted
                peaks["×".join(map(str, step.inputs[0].shape[2:]))] = peak_memory(call, x.device) / MEBI
            small, large = peaks.values()
            rows[name] |= {f"{what} {size}": peak for size, peak in peaks.items()} | {f"{what} times": large / small}
    return rows, "times: the peak with four times the tokens, in parts of that before.", {}


def python_calls(case: Case, x: Tensor, place: str, plan: Plan) -> Measured:
    """Calls of functions of ours in a forward that is not the first."""
    rows, walks = {}, {}
    for name, one in case.contestants.items():
        (step,) = one.steps
        step.forward()
        found = {key: count for key, count in count_calls(step.forward).items() if not key[0].startswith("benchmark")}
        rows[name] = {"calls": sum(found.values()), "functions": len(found), "files": len({file for file, _ in found})}
        walks[name] = [[file, function, count] for (file, function), count in found.items()]
    return rows, "Each step of a generator is a call.", {"walks": walks}


#: How a comparison is measured, where it is not timed.
MEASURES: dict[str, Callable[[Case, Tensor, str, Plan], Measured]] = {
    "memory": memory_growth,
    "calls": python_calls,
}


@contextmanager
def prepared(threads: int | None, device: torch.device) -> Iterator[None]:
    """So many threads, a seed, and float32 that is float32; as it was before when it ends."""
    before = torch.get_num_threads(), torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    # On CUDA convolutions take shorter numbers (TF32) by default and linear layers do not: that would compare types.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_num_threads(threads or before[0])
    try:
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if device.type == "cuda" else []):
            torch.manual_seed(0)
            yield
    finally:
        torch.set_num_threads(before[0])
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before[1:]


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
        "versions": {
            "torch": str(torch.__version__),  # with what it was built for
            **{name: version(name) for name in ("torchvision", "timm", "einx", "vision-attn")},
        },
    }


def check_writable(path: Path) -> None:
    """Refuse a file that could not be written before anything is measured for it."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: give a file")
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"there is no folder {path.parent} that {path.name} could be written into")


def show_progress(*parts: str) -> None:
    """One line that each call writes over, where a person sees it; nothing in a log file."""
    if sys.stderr.isatty():
        print("\r\033[K" + ": ".join(parts), end="", file=sys.stderr, flush=True)

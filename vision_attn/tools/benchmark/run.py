"""Contestants are made, compared with their twins and timed in turns: a table of time and memory for each map."""

from __future__ import annotations

import copy
import json
import os
import platform
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import Timer

from vision_attn.checks import check_counts
from vision_attn.errors import BenchmarkError
from vision_attn.networks.convert.swap import swap_
from vision_attn.networks.inspection import network_of
from vision_attn.networks.safe import check_writable, write_atomically
from vision_attn.text import table
from vision_attn.tools.benchmark.contest import Contest
from vision_attn.tools.benchmark.contestants import LAYOUTS, ROWS, Maker, Row, Shape

#: A measurement takes at least this long, in seconds: a shorter call is repeated in it.
SHORTEST = 5e-3
#: On an idle machine the quartiles of a contestant are at most this part of its median apart.
STILL = 0.1
#: The largest difference of an output from its twin's, in parts of the twin's largest value, by the type of numbers.
ALLOWED = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
#: The shape of images, with one head, which networks have no use for.
OF_IMAGES: dict[Shape, int] = {(4, 3, 224, 224): 1}
HEADER = """\
Medians of {rounds} rounds in which the contestants take turns. ÷: the first one's time over this one's, the median of
the rounds. gradients: forward and backward. MiB: peak beyond what was held before. floor: projection, fused kernel,
projection of the first one, each on contiguous inputs of its own."""


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


def run_benchmark(contest: Contest, *, say: Callable[[str], None] = print) -> list[BenchmarkTable]:
    """Compare ours with the others: outputs first, then time and memory, forward and with gradients.

    Args:
        contest: what is measured, and how.
        say: is given each table as text.

    Raises:
        ValueError: an argument is wrong.
        BenchmarkError: a contestant does not compute what its twin of ours with the same weights does.

    >>> (found,) = run_benchmark(Contest(shapes=("1,8,4,4",), heads=2, device="cpu", rounds=1), say=lambda text: None)
    >>> found.title
    'implementations: batch 1, 8 channels, 4×4, 2 heads, nchw'
    """
    check_counts(heads=contest.heads, threads=contest.threads, rounds=contest.rounds)
    if contest.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for and there is no CUDA device: leave --device out, or give cpu")
    place = torch.device(contest.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    threads, shapes = contest.threads or torch.get_num_threads(), [parse_shape(one) for one in contest.shapes]
    if contest.output:
        check_writable(contest.output)
    about = describe_machine(place, threads, contest.dtype)
    say(f"{about}\n\n{HEADER.format(rounds=contest.rounds)}")
    found: list[BenchmarkTable] = []
    for name, row in rows_of(contest.rows, contest.swap).items():
        for shape, usual in (dict.fromkeys(shapes, 8) or row.shapes).items():
            for layout in row.layouts:
                n = contest.heads or usual
                with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # float32 is float32 for all
                    x = torch.randn(shape).to(place, getattr(torch, contest.dtype)).to(memory_format=LAYOUTS[layout])
                    timings = measure(row.contestants, x, n, contest.rounds, threads)
                size = f"batch {shape[0]}, {shape[1]} channels, {shape[2]}×{shape[3]}, {n} heads, {layout}"
                found.append(BenchmarkTable(f"{name}: {size}", timings))
                said = [found[-1].title, table(found[-1].rows()), found[-1].warning]
                say("\n" + "\n".join(filter(None, said)))
                if contest.output:  # after each table, so that an interrupted run has what it measured
                    content = {"about": about, "tables": [asdict(one) for one in found]}
                    write_atomically(contest.output, json.dumps(content, indent=1).encode())
    return found


def rows_of(rows: Sequence[str], swap: Sequence[str]) -> dict[str, Row]:
    """What runs, by name."""
    if swap:
        return {name: Row({"swapped": swapped(name), "as it was": plain(name)}, OF_IMAGES) for name in swap}
    names = [name for row in rows for name in (ROWS if row == "all" else (row,))]
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        raise ValueError(f"rows must be among {', '.join(ROWS)}, all; got {', '.join(unknown)}")
    return {name: ROWS[name] for name in names}


def plain(name: str) -> Maker:
    return lambda x, n: network_of(name)


def swapped(name: str) -> Maker:
    def make(x: Tensor, n: int) -> tuple[nn.Module, nn.Module]:
        twin = network_of(name).eval()
        ours = copy.deepcopy(twin)
        report = swap_(ours)
        if not len(report):
            raise ValueError(f"swap: nothing of {name} can be swapped:\n{report}")
        return ours, twin

    return make


def measure(makers: Mapping[str, Maker], x: Tensor, n: int, rounds: int, threads: int) -> dict[str, Timing]:
    """Make everybody, compare them with their twins, then time all in turns."""
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    for name, make in makers.items():
        made = make(x, n)
        module, twin = (one.to(x.device, x.dtype).eval() for one in (made if isinstance(made, tuple) else (made, made)))
        if twin is not module:
            check_output(name, module, twin, x)
        calls[name, "forward"] = torch.no_grad()(lambda module=module: module(x))
        calls[name, "gradients"] = with_gradients(module, x)
    seconds = time_in_turns(calls, rounds=rounds, threads=threads)
    mebibytes = {key: peak_memory(call, x.device) / 2**20 for key, call in calls.items()}
    passes = ("forward", "gradients")
    return {
        name: Timing({what: seconds[name, what] for what in passes}, {what: mebibytes[name, what] for what in passes})
        for name in makers
    }


def outputs_of(y: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return y if isinstance(y, tuple) else (y,)


def with_gradients(module: nn.Module, x: Tensor) -> Callable[[], object]:
    """Forward and backward, to the map and to every parameter."""
    x = x.detach().requires_grad_()
    leaves = (x, *(parameter for parameter in module.parameters() if parameter.requires_grad))
    of_outputs = [torch.randn_like(y) for y in outputs_of(module(x))]
    return lambda: torch.autograd.grad(outputs_of(module(x)), leaves, of_outputs, allow_unused=True)


def check_output(name: str, module: nn.Module, twin: nn.Module, x: Tensor) -> None:
    """Refuse to time what computes something else than ours with the same weights."""
    with torch.no_grad():
        found, expected = outputs_of(module(x))[-1].double(), twin(x).double()
    allowed = ALLOWED[str(x.dtype).removeprefix("torch.")]
    largest = expected.abs().max().clamp(min=torch.finfo(torch.float32).tiny)  # of a head of zeros: nothing
    difference = float((found - expected).abs().max() / largest) if found.shape == expected.shape else torch.inf
    if not difference <= allowed:  # nor when it is not a number
        raise BenchmarkError(
            f"{name}: its output on a map of {tuple(x.shape)} differs from that of ours with the same weights by "
            f"{difference:.2g} of the largest value, and {allowed:g} is allowed in {x.dtype}; nothing is timed"
        )


def time_in_turns(
    calls: Mapping[Any, Callable[[], object]], *, rounds: int, threads: int | None = None
) -> dict[Any, list[float]]:
    """Seconds of each call, one number for each round, in each of which all take their turn.

    >>> len(time_in_turns({"add": lambda: 1 + 1}, rounds=3)["add"])
    3
    """
    threads = threads or torch.get_num_threads()
    timers = {name: Timer("call()", globals={"call": call}, num_threads=threads) for name, call in calls.items()}
    repeats = {}
    for name, timer in timers.items():
        timer.timeit(1)  # what the first call prepares is not counted
        repeats[name] = max(1, int(SHORTEST / timer.timeit(1).mean))
    seconds: dict[Any, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        # What ran before leaves its traces in the caches: nobody always follows the same one.
        for name in random.Random(turn).sample(list(calls), len(calls)):
            seconds[name].append(timers[name].timeit(repeats[name]).mean)
    return seconds


def peak_memory(call: Callable[[], object], device: torch.device) -> int:
    """The most bytes of tensors that a call holds at one moment beyond what it is given, its result included.

    Run the call once before, so that what is made once and kept is not counted. On the CPU torch's profiler records
    the allocations; what oneDNN allocates by itself is not among them.

    >>> peak_memory(lambda: torch.ones(1024, 1024) + 1, torch.device("cpu")) >> 20
    8
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - held
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or some versions write to the terminal that there is no GPU
    # Without acc_events some versions of torch warn that the events of earlier cycles, of which there are none, go.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    allocations = sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"])
    return max(accumulate(event["args"]["Bytes"] for event in allocations), default=0)


# --- reports ----------------------------------------------------------------------------------------------------------


def describe_machine(device: torch.device, threads: int, dtype: str) -> str:
    info = Path("/proc/cpuinfo")  # which calls the processor by its name, on Linux
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    processor = next(names, platform.processor() or platform.machine())
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else processor
    versions = ", ".join(f"{name} {version(name)}" for name in ("torchvision", "timm", "einx", "vision-attn"))
    return f"{place}, threads {threads}, dtype {dtype}; torch {torch.__version__}, {versions}"


def written(value: float) -> str:
    """A number by three digits.

    >>> [written(value) for value in (0.0123, 1.23456, 12.3456, 1234.5)]
    ['0.012', '1.23', '12.3', '1234']
    """
    places = next((places for places, limit in ((3, 0.1), (2, 10), (1, 100)) if abs(value) < limit), 0)
    return f"{value:.{places}f}"


def parse_shape(text: str) -> Shape:
    """A shape as it is written on the command line.

    >>> parse_shape("8,256,14,14")
    (8, 256, 14, 14)
    """
    parts = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if len(parts) != 4 or 0 in parts:
        raise ValueError(f"shapes must be batch,channels,height,width, such as 8,256,14,14; got {text!r}")
    return parts[0], parts[1], parts[2], parts[3]

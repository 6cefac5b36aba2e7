"""Compare the time and memory of attention with timm, torch and torchvision.

    python benchmarks/speed.py
    python benchmarks/speed.py --rows attention backbone --output times.json
    python benchmarks/speed.py --shapes 8,256,14,14 --heads 8 --threads 2
    python benchmarks/speed.py --rows all --device cuda
    python benchmarks/speed.py --swap torchvision:swin_t --shapes 4,3,224,224

The output of each candidate is first compared with a block of this library with the same weights. Then all candidates
are timed in turns, and their peak memory is measured. docs/performance.md describes the rows.
"""

import argparse
import copy
import json
import os
import platform
import random
import sys
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from candidates import LAYOUTS, ROWS, Row
from reach import create_network
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import Timer

from vision_attn import cli
from vision_attn.networks.convert.swap import swap_
from vision_attn.networks.safe import check_writable, write_atomically
from vision_attn.text import Table

#: The shortest measurement, in seconds. A shorter call is repeated.
MIN_SECONDS = 5e-3
#: The largest interquartile range of a candidate on an idle machine, as a fraction of its median.
MAX_SPREAD = 0.1
#: The largest allowed difference of an output from its reference, as a fraction of the largest value.
TOLERANCES = {"float32": 1e-4, "bfloat16": 1e-1, "float16": 1e-2}
PASSES = ("forward", "gradients")
HEADER = """\
Medians of {rounds} rounds in which the candidates take turns. ÷: time of the first candidate divided by the time of
each candidate, median over rounds. gradients: forward and backward pass. MiB: peak memory of new tensors.
lower bound: projections and fused kernel of the first candidate, on contiguous inputs."""


def build_parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rows = [*ROWS, "all"]
    add = parser.add_argument
    add(
        "--rows",
        nargs="+",
        default=["implementations"],
        choices=rows,
        metavar="ROW",
        help=f"candidates: {', '.join(rows)}",
    )
    add(
        "--swap",
        nargs="+",
        default=[],
        metavar="MODEL",
        help="measure networks with and without swap_, instead of rows",
    )
    add(
        "--shapes", nargs="+", type=parse_shape, metavar="B,C,H,W", help="input shapes (default: the shapes of the row)"
    )
    add("--heads", type=positive_int, help="number of heads (default: the number of the row)")
    add("--device", choices=["cpu", "cuda"], help="device (default: cuda if available)")
    add("--dtype", choices=list(TOLERANCES), default="float32", help="dtype of inputs and weights")
    add("--threads", type=positive_int, default=torch.get_num_threads(), help="number of CPU threads")
    add("--rounds", type=positive_int, default=15, help="number of rounds")
    add("-o", "--output", type=Path, help="JSON file for all measurements, updated after each table")
    return parser


def positive_int(text):
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def parse_shape(text):
    shape = tuple(map(positive_int, text.split(",")))
    if len(shape) != 4:
        raise argparse.ArgumentTypeError(f"expected batch,channels,height,width such as 8,256,14,14, got {text!r}")
    return shape


def compare(args):
    """Compare outputs, then time and memory. Print one table per input, and return the measurements."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: no CUDA device is available. Omit --device, or pass --device cpu.")
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if args.output:
        check_writable(args.output)
    about = describe_machine(device, args.threads, args.dtype)
    print(f"{about}\n\n{HEADER.format(rounds=args.rounds)}", flush=True)
    rows = {name: swap_row(name) for name in args.swap}
    rows = rows or {name: ROWS[name] for name in (ROWS if "all" in args.rows else args.rows)}
    tables = []
    for name, row in rows.items():
        for shape, row_heads in (dict.fromkeys(args.shapes, 8) if args.shapes else row.shapes).items():
            for layout in row.layouts:
                heads = args.heads or row_heads
                with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # full precision in float32
                    x = torch.randn(shape).to(device, getattr(torch, args.dtype)).to(memory_format=LAYOUTS[layout])
                    timings = measure(row.candidates, x, heads, args.rounds, args.threads)
                size = f"batch {shape[0]}, {shape[1]} channels, {shape[2]}×{shape[3]}, {heads} heads, {layout}"
                tables.append({"title": f"{name}: {size}", "timings": timings})
                print(f"\n{name}: {size}\n{format_timings(timings)}{warn_if_busy(timings)}", flush=True)
                if args.output:
                    write_atomically(args.output, json.dumps({"about": about, "tables": tables}, indent=1).encode())
    return tables


def swap_row(name):
    """Compare a network after `swap_` with the original network."""

    def build_swapped(x, n):
        original = create_network(name).eval()
        swapped = copy.deepcopy(original)
        report = swap_(swapped)
        if not report.swapped:
            raise ValueError(f"--swap: {name} has no layer that swap_ converts.\n{report}")
        return swapped, original

    return Row({"swapped": build_swapped, "original": lambda x, n: create_network(name)}, {(4, 3, 224, 224): 1})


# --- measurements -----------------------------------------------------------------------------------------------------


def measure(candidates, x, num_heads, rounds, threads):
    """Build all candidates, check their outputs, then time them in turns."""
    calls = {}
    for name, build in candidates.items():
        built = build(x, num_heads)
        pair = built if isinstance(built, tuple) else (built, built)
        module, reference = (built.to(x.device, x.dtype).eval() for built in pair)
        if reference is not module:
            check_output(name, module, reference, x)
        calls[name, "forward"] = torch.no_grad()(lambda module=module: module(x))
        calls[name, "gradients"] = with_gradients(module, x)
    seconds = time_in_turns(calls, rounds=rounds, threads=threads)
    mebibytes = {key: peak_memory(call, x.device) / 2**20 for key, call in calls.items()}
    return {
        name: {"seconds": {p: seconds[name, p] for p in PASSES}, "mebibytes": {p: mebibytes[name, p] for p in PASSES}}
        for name in candidates
    }


def outputs(y):
    return y if isinstance(y, tuple) else (y,)


def with_gradients(module, x):
    """Return a function that computes the output, and the gradients of the input and of all parameters."""
    x = x.detach().requires_grad_()
    leaves = (x, *(parameter for parameter in module.parameters() if parameter.requires_grad))
    gradients = [torch.randn_like(y) for y in outputs(module(x))]
    return lambda: torch.autograd.grad(outputs(module(x)), leaves, gradients, allow_unused=True)


def check_output(name, module, reference, x):
    """Raise unless a candidate computes the output of its reference."""
    with torch.no_grad():
        found, expected = outputs(module(x))[-1].double(), reference(x).double()
    tolerance = TOLERANCES[str(x.dtype).removeprefix("torch.")]
    largest = expected.abs().max().clamp(min=torch.finfo(torch.float32).tiny)  # a new classifier may be zero
    difference = float((found - expected).abs().max() / largest) if found.shape == expected.shape else torch.inf
    if not difference <= tolerance:  # NaN fails too
        raise RuntimeError(
            f"{name}: the output for an input of {tuple(x.shape)} differs from the output of the reference with the "
            f"same weights: expected at most {tolerance:g} of the largest value in {x.dtype}, got {difference:.2g}."
        )


def time_in_turns(calls, *, rounds, threads):
    """Return the seconds of each call, one number per round. All calls take turns in each round."""
    timers = {name: Timer("call()", globals={"call": call}, num_threads=threads) for name, call in calls.items()}
    # Timer.timeit runs the call before it measures.
    repeats = {name: max(1, int(MIN_SECONDS / timer.timeit(1).mean)) for name, timer in timers.items()}
    seconds = {name: [] for name in calls}
    for turn in range(rounds):
        # The previous call affects the caches, so the order varies.
        for name in random.Random(turn).sample(list(calls), len(calls)):
            seconds[name].append(timers[name].timeit(repeats[name]).mean)
    return seconds


def peak_memory(call, device):
    """Return the peak memory in bytes of tensors that are allocated during a call, including its result.

    Run the call once before, so that cached tensors are not counted. On a CPU, torch's profiler records allocations,
    except for internal allocations of oneDNN.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        allocated = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - allocated
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # hides messages about a missing GPU
    # Without acc_events, some versions of torch warn that events of earlier cycles are dropped.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))  # negative when freed
    return max(accumulate(sizes), default=0)


# --- output -----------------------------------------------------------------------------------------------------------


def format_timings(timings):
    rows = [["", *(f"{step} {unit}" for step in PASSES for unit in ("ms", "÷", "MiB"))]]
    for name, timing in timings.items():
        row = [name]
        for step in PASSES:
            milliseconds = 1000 * float(np.median(timing["seconds"][step]))
            row += map(format_number, (milliseconds, speedup(timings, name, step), timing["mebibytes"][step]))
        rows.append(row)
    return str(Table(rows))


def speedup(timings, name, step):
    """Return the time of the first candidate divided by the time of another candidate, as a median over rounds."""
    first = next(iter(timings.values()))["seconds"][step]
    return float(np.median(np.divide(first, timings[name]["seconds"][step])))


def warn_if_busy(timings):
    for name, timing in timings.items():
        for seconds in timing["seconds"].values():
            low, median, high = np.quantile(seconds, (0.25, 0.5, 0.75))
            if high - low > MAX_SPREAD * median:
                variation = f"the times of {name} vary by {(high - low) / median:.0%}"
                return f"\nWarning: {variation}. Repeat the benchmark on an idle machine."
    return ""


def describe_machine(device, threads, dtype):
    cpuinfo = Path("/proc/cpuinfo")  # contains the name of the processor on Linux
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    processor = next(names, platform.processor() or platform.machine())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor
    versions = ", ".join(f"{package} {version(package)}" for package in ("torchvision", "timm", "einx", "vision-attn"))
    return f"{name}, threads {threads}, dtype {dtype}; torch {torch.__version__}, {versions}"


def format_number(value):
    """Format a number with three digits."""
    decimals = next((decimals for decimals, limit in ((3, 0.1), (2, 10), (1, 100)) if abs(value) < limit), 0)
    return f"{value:.{decimals}f}"


def main(arguments=None):
    compare(build_parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(cli.run_program("speed", main))

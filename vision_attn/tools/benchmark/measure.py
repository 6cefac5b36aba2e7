"""Time in turns, peak memory, and Python calls of ours."""

from __future__ import annotations

import cProfile
import json
import math
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from types import CodeType

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["Action", "Spread", "count_calls", "peak_memory", "quartiles", "ratio", "time_in_turns"]

#: A measurement takes at least this long, in seconds: a call that is shorter is repeated in it.
SHORTEST = 5e-3
WARM_UP_ROUNDS = 2

PACKAGE = Path(__file__).parents[2]

#: What is measured, ready to be called.
Action = Callable[[], object]
#: First quartile, median, third quartile.
Spread = tuple[float, float, float]


def time_in_turns(
    calls: Mapping[str, Sequence[Action]],
    *,
    rounds: int,
    device: torch.device,
) -> dict[str, tuple[float, ...]]:
    """Seconds of each contestant, one number for each round; after a warm-up, in an order that changes by the round.

    A contestant may be several calls: each is measured apart, and its time is their sum.

    >>> times = time_in_turns({"add": [lambda: 1 + 1]}, rounds=3, device=torch.device("cpu"))
    >>> len(times["add"])
    3
    """
    repeats = {name: [enough_repeats(call, device) for call in parts] for name, parts in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        # What ran before leaves its traces in the caches: nobody always follows the same one.
        for name in random.Random(turn).sample(list(calls), len(calls)):
            parts_and_repeats = zip(calls[name], repeats[name], strict=True)
            times[name].append(sum(seconds(call, count, device) for call, count in parts_and_repeats))
    return {name: tuple(values) for name, values in times.items()}


def enough_repeats(call: Action, device: torch.device) -> int:
    for _ in range(WARM_UP_ROUNDS):  # what the first ones prepare is not counted
        last = seconds(call, 1, device)
    return max(1, math.ceil(SHORTEST / last))


def seconds(call: Action, repeats: int, device: torch.device) -> float:
    """Seconds of one call, the mean of some in a row."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize(device)
    return (time.perf_counter() - began) / repeats


def synchronize(device: torch.device) -> None:
    """Wait for what a GPU still computes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def quartiles(values: Sequence[float]) -> Spread:
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return float(low), float(middle), float(high)


def ratio(ours: Sequence[float], theirs: Sequence[float], base: Sequence[float] | None = None) -> Spread:
    """Ours in parts of theirs, round by round; where both add to a base, what ours adds in parts of what theirs adds.

    >>> ratio([1.5, 3.0, 2.0], [1.0, 2.0, 2.0])
    (1.25, 1.5, 1.5)
    >>> ratio([5.0, 5.0, 5.0], [6.0, 6.0, 6.0], base=[4.0, 4.0, 4.0])
    (0.5, 0.5, 0.5)
    """
    taken_off = np.zeros(len(ours)) if base is None else np.array(base)
    return quartiles(list((np.array(ours) - taken_off) / (np.array(theirs) - taken_off)))


def peak_memory(call: Action, device: torch.device) -> int:
    """The most bytes of tensors that a call holds at one moment, its result included, what it is given not.

    Run the call once before, so that what is made once and kept is not counted. On CUDA torch's allocator counts. On
    the CPU torch's profiler records the allocations; what oneDNN allocates by itself is not among them.

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
    return max(accumulate(allocations(call)), default=0)


def allocations(call: Action) -> list[int]:
    """The bytes of each allocation of a call on the CPU, in order; negative where they are given back."""
    # Some versions of the profiler write to the terminal that they began and ended, and that there is no GPU.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # Without acc_events some versions of torch warn that the events of earlier cycles, of which there are none, go.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    found = [event for event in events if event.get("name") == "[memory]"]
    return [event["args"]["Bytes"] for event in sorted(found, key=lambda event: event["ts"])]


def count_calls(call: Action, package: Path = PACKAGE) -> Counter[tuple[str, str]]:
    """How often a call enters each function of a package, by file and name; each step of a generator is one."""
    profiler = cProfile.Profile(builtins=False)
    profiler.runcall(call)
    found: Counter[tuple[str, str]] = Counter()
    for entry in profiler.getstats():
        if isinstance(entry.code, CodeType) and (path := Path(entry.code.co_filename)).is_relative_to(package):
            found[str(path.relative_to(package)), entry.code.co_qualname] += entry.callcount
    return found

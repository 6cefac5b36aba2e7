"""How much memory a call needs beyond what was held before it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["peak_memory"]


def peak_memory(call: Callable[[], object], device: torch.device) -> int:
    """The most bytes of tensors that a call holds at one moment, its result included, what it is given not.

    On CUDA torch's allocator counts them. On the CPU they are summed up from the allocations that torch's profiler
    records; what a library below torch, as oneDNN, allocates by itself is not among them.

    Args:
        call: what to run, once; run it before, so that what is made once and kept is not counted.
        device: where it runs.

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


def allocations(call: Callable[[], object]) -> list[int]:
    """The bytes of each allocation of a call on the CPU, in order; negative where they are given back."""
    # Without acc_events some versions of torch warn that the events of earlier cycles, of which there are none, go.
    with quiet_profiler(), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    found = [event for event in events if event.get("name") == "[memory]"]
    return [event["args"]["Bytes"] for event in sorted(found, key=lambda event: event["ts"])]


@contextmanager
def quiet_profiler() -> Iterator[None]:
    """Some versions of torch's profiler write to the terminal that they began and ended, and that there is no GPU."""
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = before or "99"  # read once, when a process first profiles
    try:
        yield
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]

"""How long calls take, measured in turns, so that whatever else the machine does falls on all of them alike."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from vision_attn.benchmark.errors import naming

__all__ = ["time_in_turns"]

#: A measurement takes at least this long, in seconds: a call that is shorter is repeated in it.
SHORTEST = 5e-3
WARM_UP_ROUNDS = 2

Call = Callable[[], object]


def time_in_turns(
    calls: Mapping[str, Sequence[Call]],
    *,
    rounds: int,
    device: torch.device,
    place: str,
    progress: Callable[[str], None],
) -> dict[str, tuple[float, ...]]:
    """Measure each contestant once in every round, after rounds of warm-up, in an order that changes by the round.

    Args:
        calls: what a contestant does, by its name: its time is the sum of its calls', each measured apart.
        rounds: how often.
        device: where the calls run.
        place: what is measured, in messages.
        progress: told how far it is.

    Returns:
        The seconds of each contestant, one number for each round.

    Raises:
        BenchmarkError: a contestant runs out of memory.

    >>> times = time_in_turns(
    ...     {"add": [lambda: 1 + 1]}, rounds=3, device=torch.device("cpu"), place="here", progress=lambda text: None
    ... )
    >>> len(times["add"])
    3
    """
    repeats = {}
    for name, parts in calls.items():
        progress(f"{place}: warm-up, {name}")
        with naming(name, place):
            repeats[name] = [enough_repeats(call, device) for call in parts]
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        progress(f"{place}: round {turn + 1}/{rounds}")
        # What ran before leaves its traces in the caches: nobody always follows the same one.
        for name in random.Random(turn).sample(list(calls), len(calls)):
            steps = zip(calls[name], repeats[name], strict=True)
            times[name].append(sum(seconds(call, count, device) for call, count in steps))
    return {name: tuple(values) for name, values in times.items()}


def enough_repeats(call: Call, device: torch.device) -> int:
    """How many calls take as long as a measurement should; what the first ones prepare is not counted."""
    for _ in range(WARM_UP_ROUNDS):
        last = seconds(call, 1, device)
    return max(1, math.ceil(SHORTEST / last))


def seconds(call: Call, repeats: int, device: torch.device) -> float:
    """Seconds of one call, the mean of some in a row: by the device's own clock on CUDA, by the wall's on the CPU."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / repeats
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - began) / repeats

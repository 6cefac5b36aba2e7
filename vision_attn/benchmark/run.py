"""A benchmark from its settings: at each shape the contestants are made, compared, timed in turns, and reported."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from vision_attn.benchmark.contestants import FLOOR, OURS, Contestant, contestants, contestants_relative, make_map
from vision_attn.benchmark.errors import BenchmarkError, naming
from vision_attn.benchmark.machine import choose_device, describe, prepared
from vision_attn.benchmark.marks import judge
from vision_attn.benchmark.memory import peak_memory
from vision_attn.benchmark.report import as_json, checklist, header, table
from vision_attn.benchmark.results import Cost, Group, Row
from vision_attn.benchmark.settings import DTYPES, Settings, Shape
from vision_attn.benchmark.timing import time_in_turns
from vision_attn.checkpoints import write_atomically

__all__ = ["run_benchmark"]


def run_benchmark(settings: Settings, say: Callable[[str], None] = print) -> list[Group]:
    """Compare ours with the others: outputs first, then time, forward and backward, and memory.

    Args:
        settings: what to do.
        say: told each part of the report.

    Returns:
        What was measured, at each shape.

    Raises:
        ValueError: settings that this machine cannot follow.
        BenchmarkError: a contestant's output is not ours, or it runs out of memory.
        OSError: the output file cannot be written.

    >>> settings = Settings(shapes=((1, 8, 4, 4),), heads=2, device="cpu", rounds=1)
    >>> (group,) = run_benchmark(settings, say=lambda text: None)
    >>> group.ours.name
    'ours sdpa'
    """
    device = choose_device(settings.device)
    output = None if settings.output is None else writable(Path(settings.output))
    groups = []
    with prepared(settings, device):
        machine = describe(device)
        say(header(machine, settings))
        for shape, relative in settings.groups:
            try:
                groups.append(measure(settings, shape, relative, device))
            finally:
                show_progress("")
            say("\n" + table(groups[-1], settings.dtype))
    marks = judge(groups, settings.dtype)
    say("\n" + checklist(marks))
    if output is not None:
        write_atomically(output, as_json(machine, settings, groups, marks).encode())
        say(f"\nAll of it is in {output}.")
    return groups


def measure(settings: Settings, shape: Shape, relative: bool, device: torch.device) -> Group:
    """One shape: who does not compute the same stops the benchmark before anything is timed."""
    place = f"{','.join(map(str, shape))}{' with relative positions' if relative else ''}"
    dtype = getattr(torch, settings.dtype)
    with naming("maps and weights", place):
        x = make_map(shape, device=device, dtype=dtype, channels_last=settings.channels_last)
        found = (contestants_relative if relative else contestants)(x, settings.heads)
    differences = compare(found, place, settings.dtype)
    costs = []
    for what, able in (("forward", found), ("forward_backward", [one for one in found if one.backward])):
        calls = {one.name: [getattr(step, what) for step in one.steps] for one in able}
        where = f"{place}, {what.replace('_', ' + ')}"
        times = time_in_turns(calls, rounds=settings.rounds, device=device, place=where, progress=show_progress)
        memory = {}
        for name, parts in calls.items():
            show_progress(f"{where}: memory, {name}")
            # The parts of the floor are not one call: there is no telling what is held between them.
            memory[name] = None if name == FLOOR else peak_memory(parts[0], device)
        costs.append({name: Cost(times[name], memory[name]) for name in calls})
    forward, both = costs
    rows = [Row(one.name, differences[one.name], forward[one.name], both.get(one.name)) for one in found]
    return Group(shape, settings.heads, relative, rows)


def compare(found: Sequence[Contestant], place: str, dtype: str) -> dict[str, float]:
    """How far each output is from ours, in parts of ours' largest value.

    Raises:
        BenchmarkError: one is farther than numbers of this type explain.
    """
    outputs = {}
    for one in found:
        show_progress(f"{place}: comparing outputs, {one.name}")
        with naming(one.name, place):
            outputs[one.name] = one.output().double()
    expected = outputs[OURS]
    differences = {}
    for name, output in outputs.items():
        if output.shape != expected.shape:
            raise BenchmarkError(
                f"{name} at {place}: its output has the shape {tuple(output.shape)}, and that of {OURS} "
                f"{tuple(expected.shape)}; nothing is timed there"
            )
        differences[name] = float((output - expected).abs().max() / expected.abs().max())
        if not differences[name] <= DTYPES[dtype]:  # nor when it is not a number
            raise BenchmarkError(
                f"{name} at {place}: its output differs from that of {OURS} by {differences[name]:.2g} of the largest "
                f"value, and {DTYPES[dtype]:g} is allowed in {dtype}; nothing is timed there: its weights or their "
                "order are not ours"
            )
    return differences


def writable(path: Path) -> Path:
    """Refuse an output that could not be written before anything is measured for it."""
    if path.is_dir():
        raise IsADirectoryError(f"output must be a file; {path} is a folder")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"output: there is no folder {path.parent} to write {path.name} into")
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"output: the folder {path.parent} is not writable")
    return path


def show_progress(text: str) -> None:
    """One line that each call writes over, where a person sees it; nothing in a log file."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

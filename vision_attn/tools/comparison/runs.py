"""The runs of a comparison: each in a folder of its own, several side by side, gone on with where they stopped."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from statistics import median
from typing import Any

import torch

from vision_attn.errors import TrainingError
from vision_attn.networks.checkpoints import write_atomically
from vision_attn.networks.insertion import count_multiply_adds
from vision_attn.tools.training.data import cores
from vision_attn.tools.training.network import add_block
from vision_attn.tools.training.settings import Settings
from vision_attn.tools.training.train import train

__all__ = ["Outcome", "carry_out"]

#: What a run that is complete leaves in its folder, beside what every run leaves, and what one in a process says.
OUTCOME, LOG = "outcome.json", "log.txt"
#: Runs side by side that are not asked for: each has a copy of the images.
MOST_JOBS = 16


@dataclass(frozen=True)
class Outcome:
    """What a run came to, after its last epoch: the best one would be chosen by the images that it is scored on."""

    #: in percent
    top1: float
    loss: float
    parameters: int
    #: of one image
    multiply_adds: int
    #: of a training step, the median over epochs
    milliseconds: float
    #: of training
    seconds: float
    #: share of the predictions that are others with the blocks closed, in percent; None without blocks
    changed: float | None


def carry_out(runs: Sequence[Settings], jobs: int | None, done: Callable[[Settings, Outcome], None]) -> None:
    """Make what is not complete yet complete, and tell of each run what it came to."""
    found = {settings: outcome_of(settings) for settings in runs}
    todo = [settings for settings, outcome in found.items() if outcome is None]
    gpus = torch.cuda.device_count() if runs[0].device != "cpu" else 0
    # Not by what is left to do: the last bits of a result depend on the threads that a run has.
    jobs = min(jobs or gpus or min(cores(), MOST_JOBS), len(runs))
    epochs = sum(settings.epochs for settings in todo)
    print(f"{len(todo)} of {len(runs)} runs are ahead, of {epochs:,} epochs together, {jobs} side by side", flush=True)
    for settings, outcome in found.items():
        if outcome is not None:
            done(settings, outcome)
    if jobs > 1:
        side_by_side(todo, jobs, gpus, done)
    else:
        for settings in todo:
            done(settings, run(settings))


def outcome_of(settings: Settings) -> Outcome | None:
    """What a run came to that is complete already."""
    path = settings.folder / OUTCOME
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
        differing, outcome = settings.differences(found["settings"]), Outcome(**found["outcome"])
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"output: {path} is damaged, or of another version: remove it, and the run is finished anew ({error})"
        ) from error
    if differing:
        raise ValueError(f"output: {settings.folder} holds a run whose {', '.join(differing)} differ: give another")
    return outcome


def run(settings: Settings) -> Outcome:
    """Train one arm with one seed, or go on with it, and note what it came to."""
    print(f"--- {settings.folder.name}")
    torch.compiler.reset()  # what is compiled of one network is no use to the next, and counts against a limit
    result = train(settings)
    network, closed = result.network, result.closed
    rows = csv.DictReader((settings.folder / "metrics.csv").read_text().splitlines())
    outcome = Outcome(
        top1=result.final.top1,
        loss=result.final.loss,
        parameters=network.parameters,
        multiply_adds=count_multiply_adds(network.model, (1, len(network.mean), *network.size)),
        milliseconds=1000 * settings.batch_size / median(float(row["images_per_second"]) for row in rows),
        seconds=result.seconds,
        changed=None if closed is None else 100 * closed.changed / closed.images,
    )
    content = {"settings": settings.as_dict(), "outcome": asdict(outcome)}
    write_atomically(settings.folder / OUTCOME, json.dumps(content, indent=1).encode())
    return outcome


def side_by_side(todo: Sequence[Settings], jobs: int, gpus: int, done: Callable[[Settings, Outcome], None]) -> None:
    """Run in so many processes at a time, each run in a new one: what it comes to depends on nothing before it."""
    context = multiprocessing.get_context("spawn")
    # Each GPU in turn, as the variable names them that says which there are: several runs may share one.
    devices = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))).split(",")
    waiting, free, running = list(todo)[::-1], list(range(jobs))[::-1], dict[Any, tuple[Any, Settings, int]]()
    try:
        while waiting or running:
            while waiting and free:
                settings, slot = waiting.pop(), free.pop()
                device = devices[slot % len(devices)] if gpus else None
                process = context.Process(target=run_alone, args=(settings, max(1, cores() // jobs), device))
                process.start()
                running[process.sentinel] = process, settings, slot
            for ended in wait(list(running)):
                process, settings, slot = running.pop(ended)
                process.join()
                free.append(slot)
                outcome = outcome_of(settings)
                if outcome is None:
                    path = settings.folder / LOG
                    said = path.read_text().strip().rpartition("\n")[2] if path.exists() else "it said nothing"
                    raise TrainingError(f"{settings.folder.name} ended early: {said} (all of it in {path})")
                done(settings, outcome)
    finally:
        for process, *_ in running.values():
            process.terminate()  # it saves, and leaves
        for process, *_ in running.values():
            process.join()


def run_alone(settings: Settings, threads: int, device: str | None) -> None:
    """What a process does that is there for one run."""
    threading.Thread(target=leave_with_the_parent, daemon=True).start()
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    torch.set_num_threads(threads)
    settings.folder.mkdir(parents=True, exist_ok=True)
    with open(settings.folder / LOG, "a", buffering=1) as log, redirect_stdout(log), redirect_stderr(log):
        try:
            add_block(settings.block)
            run(settings)
        except BaseException:  # a signal too, after which the run is saved
            traceback.print_exc()
            sys.exit(1)


def leave_with_the_parent() -> None:
    """A comparison that is killed leaves no runs behind that go on unseen: they save, and leave."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)

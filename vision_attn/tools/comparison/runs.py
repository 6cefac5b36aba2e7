"""Arms by seeds: each run in a folder of its own, several side by side, and a table of what came of them."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vision_attn.errors import Interrupted, TrainingError
from vision_attn.networks.figures import save_figure
from vision_attn.networks.insertion import count_multiply_adds
from vision_attn.networks.safe import write_atomically
from vision_attn.text import markdown
from vision_attn.tools.comparison.statistics import Difference, compare_scores, difference_figure, difference_table
from vision_attn.tools.training.data import cores
from vision_attn.tools.training.run import run_training
from vision_attn.tools.training.settings import Settings, differences
from vision_attn.version import __version__

#: What a complete run leaves in its folder, beside what every run leaves, and what one in a process of its own prints.
OUTCOME, LOG = "outcome.json", "log.txt"
#: Runs side by side that are not asked for: each has a copy of the images.
MOST_JOBS = 16
#: The columns of the table of arms that hold words.
WORDS = (0, 6)


@dataclass(frozen=True)
class Outcome:
    """What a run reached after its last epoch: the best one would be chosen by the images that it is scored on."""

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
    #: share of the predictions that change when the blocks are disabled, in percent; None without blocks
    changed: float | None


@dataclass(frozen=True)
class Comparison:
    """What came of a comparison."""

    #: by arm and seed
    outcomes: Mapping[str, Mapping[int, Outcome]]
    #: of every two arms, those of the last arm first
    differences: Sequence[Difference]
    #: the tables, as ``comparison.md`` has them
    text: str

    @property
    def best(self) -> str:
        """The arm with the highest mean."""
        means = {arm: np.mean([one.top1 for one in found.values()]) for arm, found in self.outcomes.items()}
        return max(means, key=lambda arm: means[arm])


def compare(
    arms: Mapping[str, Mapping[str, Any]],
    *,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    output: str = "runs/compare",
    jobs: int | None = None,
    command: str = "",
) -> Comparison:
    """Train each arm with each seed, and compare top-1 after the last epoch.

    Every run is one of ``vision-attn train``, in a folder of its own in ``output``. Complete runs are not trained
    again, and interrupted ones go on from where they were: the same call again, at any moment, ends with the same
    table, and with more seeds or arms adds them to those that are there.

    Args:
        arms: the settings of each, by its name.
        seeds: of each arm.
        output: folder of the runs and of ``comparison.md``, ``comparison.json`` and ``comparison.png``.
        jobs: runs side by side, each in a process of its own with its share of the cores, or on the next GPU; by
            default as many as there are GPUs, or cores. With one, the runs are made in this process.
        command: what made it, for ``comparison.md``.

    Raises:
        ValueError: settings are wrong, or the folder holds runs with others.
        TrainingError: a run failed; its own message says why.
        Interrupted: Ctrl-C or SIGTERM came; what was under way is saved.
    """
    if len(arms) < 2 or not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"arms must be two or more, and seeds one or more that differ; got {[*arms]}, {[*seeds]}")
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1; got {jobs}")
    # Seed by seed: cut short, there are as many of each arm.
    folders = {Path(output) / f"{arm}-{seed}": (arm, seed) for seed in seeds for arm in arms}
    runs = [
        Settings(**{**arms[arm], "seed": seed, "output": folder, "resume": "auto"})
        for folder, (arm, seed) in folders.items()
    ]
    outcomes: dict[str, dict[int, Outcome]] = {arm: {} for arm in arms}
    found = None

    def done(settings: Settings, outcome: Outcome) -> None:
        nonlocal found
        arm, seed = folders[folder_of(settings)]
        outcomes[arm] = dict(sorted([*outcomes[arm].items(), (seed, outcome)]))
        count = sum(map(len, outcomes.values()))
        print(f"{arm}, seed {seed}: top-1 {outcome.top1:.2f} % ({count} of {len(runs)} runs)", flush=True)
        if count % len(arms) == 0 and all(outcomes.values()):
            found = summary(outcomes, command, runs[-1])
            write(found, arms, Path(output))

    Path(output).mkdir(parents=True, exist_ok=True)
    try:
        carry_out(runs, jobs, done)
    except KeyboardInterrupt as stop:
        number = getattr(stop, "signal", signal.SIGINT)
        raise Interrupted(number, "interrupted and saved; the same command goes on from here") from None
    assert found is not None
    print(f"\n{found.text}\nIn {output}: comparison.md, comparison.json, comparison.png, and a folder for each run.")
    return found


def summary(outcomes: Mapping[str, Mapping[int, Outcome]], command: str, settings: Settings) -> Comparison:
    scores = {arm: [one.top1 for one in by_seed.values()] for arm, by_seed in outcomes.items()}
    rows = [("arm", "parameters", "multiply-adds", "ms a step", "changed when disabled %", "top-1 %", "by seed")]
    for arm, by_seed in outcomes.items():
        first, *_ = found = list(by_seed.values())
        time = f"{np.median([one.milliseconds for one in found]):.0f}"
        changed = "—" if first.changed is None else f"{np.mean([one.changed for one in found]):.1f}"
        spread = f" ± {np.std(scores[arm], ddof=1):.2f}" if len(found) > 1 else ""
        seeds = ", ".join(f"{seed}: {one.top1:.2f}" for seed, one in by_seed.items())
        cost = f"{first.parameters:,}", f"{first.multiply_adds:,}", time
        rows.append((arm, *cost, changed, f"{np.mean(scores[arm]):.2f}{spread}", seeds))
    machine = torch.cuda.get_device_name() if settings.device != "cpu" and torch.cuda.is_available() else "a CPU"
    held_out = " on held-out training images" if settings.val_share is not None else ""
    note = (
        f"Top-1 after the last epoch{held_out}, mean ± standard deviation; {machine}, torch {torch.__version__}, "
        f"vision_attn {__version__}."
    )
    note = f"{note} `{command}`" if command else note
    compared = compare_scores(scores)
    text = "\n\n".join([markdown(rows, WORDS), note, difference_table(compared)])
    return Comparison(outcomes, compared, f"{text}\n")


def write(found: Comparison, arms: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Leave it as Markdown, JSON and PNG; the picture shows the last arm's differences."""
    of_arms = {}
    for arm, by_seed in found.outcomes.items():
        scores = {seed: one.top1 for seed, one in by_seed.items()}
        by_run = {seed: asdict(one) for seed, one in by_seed.items()}
        of_arms[arm] = {"scores": scores, "runs": by_run, "settings": arms[arm]}
    content = {"arms": of_arms, "differences": [one.as_dict() for one in found.differences]}
    write_atomically(folder / "comparison.md", found.text.encode())
    write_atomically(folder / "comparison.json", json.dumps(content, indent=1, default=str).encode())
    save_figure(difference_figure(found.differences[: len(arms) - 1]), folder / "comparison.png")


def carry_out(runs: Sequence[Settings], jobs: int | None, done: Callable[[Settings, Outcome], None]) -> None:
    """Make the runs that are not complete yet, and hand over the outcome of each."""
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
    """The outcome of a run that is complete already."""
    path = folder_of(settings) / OUTCOME
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
        differing, outcome = differences(settings, Settings(**found["settings"])), Outcome(**found["outcome"])
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"output: {path} is damaged, or of another version: remove it, and the run is finished anew ({error})"
        ) from error
    if differing:
        raise ValueError(f"output: {path.parent} holds a run whose {', '.join(differing)} differ: give another")
    return outcome


def folder_of(settings: Settings) -> Path:
    return Path(str(settings.output))


def run(settings: Settings) -> Outcome:
    """Train one arm with one seed, or go on with it, and note its outcome."""
    print(f"--- {folder_of(settings).name}")
    torch.compiler.reset()  # what is compiled of one network is no use to the next, and counts against a limit
    result = run_training(settings)
    speed = float(np.median([row["images_per_second"] for row in result.rows]))
    outcome = Outcome(
        top1=result.final.top1,
        loss=result.final.loss,
        parameters=sum(parameter.numel() for parameter in result.model.parameters()),
        multiply_adds=count_multiply_adds(result.model, (1, *result.input_size)),
        milliseconds=1000 * settings.batch_size / speed,
        seconds=sum(row["seconds"] for row in result.rows),
        changed=None if result.disabled is None else 100 * result.disabled.changed / result.disabled.images,
    )
    content = {"settings": settings.as_dict(), "outcome": asdict(outcome)}
    write_atomically(folder_of(settings) / OUTCOME, json.dumps(content, indent=1).encode())
    return outcome


def side_by_side(todo: Sequence[Settings], jobs: int, gpus: int, done: Callable[[Settings, Outcome], None]) -> None:
    """Make each run in a process of its own, so many at a time: its outcome depends on nothing before it."""
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
                    path = folder_of(settings) / LOG
                    said = path.read_text().strip().rpartition("\n")[2] if path.exists() else "it said nothing"
                    raise TrainingError(f"{path.parent.name} ended early: {said} (all of it in {path})")
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
    folder_of(settings).mkdir(parents=True, exist_ok=True)
    with open(folder_of(settings) / LOG, "a", buffering=1) as log, redirect_stdout(log), redirect_stderr(log):
        try:
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

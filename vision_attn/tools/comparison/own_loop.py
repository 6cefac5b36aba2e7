"""Arms by seeds in a training loop of one's own: several runs side by side, kept as they end, compared by one rule."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vision_attn.checks import check_counts
from vision_attn.networks.safe import check_writable, write_atomically
from vision_attn.text import markdown
from vision_attn.tools.comparison.statistics import Difference, compare_scores, difference_table
from vision_attn.tools.training.data import cores

#: by arm and seed, what was measured by name
Found = dict[str, dict[str, dict[str, float]]]
#: Steps that are timed of each arm, in turn.
ROUNDS = 15


def trials(
    run: Callable[..., dict[str, float]],
    arms: Sequence[str],
    *,
    seeds: Sequence[int],
    output: str | Path,
    jobs: int | None = None,
    step: Callable[[str], Callable[[], object]] | None = None,
    **options: Any,
) -> Found:
    """Make a run of each arm with each seed, and compare what they measured.

    Each run has a process of its own with one thread, and is noted in ``runs.json`` as it ends: the same call goes on
    from there. ``trials.md`` has the tables; the last arm is compared with the others first.

    Args:
        run: ``run(arm, seed, **options)`` trains, and gives what it measured by name, which ends in ``%`` or ``dB``,
            of which more is better, in ``px``, or is of something counted.
        arms: names that ``run`` knows.
        seeds: of each arm.
        output: the folder to write.
        jobs: runs side by side; as many as cores when None.
        step: ``step(arm)`` gives what makes one training step; these are timed when no run is under way, in turn.
        **options: for ``run``; numbers and texts, which are noted too.

    Raises:
        ValueError: the folder holds runs with other options, ``seeds`` do not differ, or ``jobs`` is not at least 1.
    """
    check_counts(jobs=jobs)
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be one or more that differ; got {list(seeds)}")
    file = Path(output) / "runs.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    check_writable(file)
    noted = json.loads(file.read_text()) if file.exists() else {"options": options, "runs": {}}
    if noted["options"] != options:
        raise ValueError(f"output: {file} holds runs with {noted['options']}, not {options}: give another folder")
    found: Found = noted["runs"]
    todo = [(arm, seed) for seed in seeds for arm in arms if str(seed) not in found.get(arm, {})]

    def done(arm: str, seed: int, measured: dict[str, float]) -> None:
        found.setdefault(arm, {})[str(seed)] = measured
        write_atomically(file, json.dumps(noted, indent=1).encode())
        told = ", ".join(f"{value:.{decimals(name)}f} {name}" for name, value in measured.items())
        print(f"{arm}, seed {seed}: {told}", flush=True)

    jobs = jobs or min(cores(), len(todo))
    if jobs > 1:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, spawn, torch.set_num_threads, (1,), max_tasks_per_child=1) as pool:
            under_way = {pool.submit(run, arm, seed, **options): (arm, seed) for arm, seed in todo}
            for one in as_completed(under_way):
                done(*under_way[one], one.result())
    else:
        for arm, seed in todo:
            done(arm, seed, run(arm, seed, **options))
    chosen = {arm: {str(seed): found[arm][str(seed)] for seed in seeds} for arm in arms}
    if step is not None and not noted.get("milliseconds", {}).keys() >= set(arms):
        noted["milliseconds"] = milliseconds({arm: step(arm) for arm in arms})
    compared = differences(chosen)
    noted["differences"] = {name: [one.as_dict() for one in of] for name, of in compared.items()}
    write_atomically(file, json.dumps(noted, indent=1).encode())
    text = report(chosen, noted.get("milliseconds", {}), compared)
    write_atomically(file.with_name("trials.md"), text.encode())
    print(f"\n{text}\nin {file.with_name('trials.md')}")
    return chosen


def flags(about: str, arms: Sequence[str], *, steps: int, output: str) -> argparse.ArgumentParser:
    """A command line whose values :func:`trials` takes: ``--arms --seeds --steps --jobs --output``."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--arms", nargs="+", choices=arms, default=list(arms), help="some alone")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="of each arm")
    parser.add_argument("--steps", type=int, default=steps, help="of training")
    parser.add_argument("--jobs", type=int, help="runs side by side; as many as cores by default")
    parser.add_argument("--output", default=output, help="folder of the results")
    return parser


def milliseconds(steps: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """The median time of each of several steps, made in turn."""
    times: dict[str, list[float]] = {arm: [] for arm in steps}
    for _ in range(ROUNDS):
        for arm, step in steps.items():
            begin = time.perf_counter()
            step()
            times[arm].append(1000 * (time.perf_counter() - begin))
    return {arm: float(np.median(found[ROUNDS // 5 :])) for arm, found in times.items()}  # the first ones warm up


def differences(found: Found) -> dict[str, list[Difference]]:
    """By what was measured, each difference of two arms; none of what is the same in every run of an arm."""
    names = next(iter(next(iter(found.values())).values()))
    scores = {name: {arm: [one[name] for one in runs.values()] for arm, runs in found.items()} for name in names}
    vary = {name: any(len(set(values)) > 1 for values in by_arm.values()) for name, by_arm in scores.items()}
    less = {name: not name.endswith(("%", "dB")) for name in names}
    return {name: compare_scores(by, less=less[name]) for name, by in scores.items() if vary[name] and len(by) > 1}


def decimals(name: str) -> int:
    """Of percent one, of pixels and decibels two, of what is counted none."""
    return 1 if name.endswith("%") else 2 if name.endswith(("px", "dB")) else 0


def report(found: Found, times: Mapping[str, float], compared: Mapping[str, Sequence[Difference]]) -> str:
    """Mean, standard deviation and number of runs by arm, and the differences of the last arm, as Markdown."""
    names = list(next(iter(next(iter(found.values())).values())))
    rows = [("arm", *(["ms a step"] if times else []), *names, "runs")]
    for arm, runs in found.items():
        cells = []
        for name in names:
            values, digits = [one[name] for one in runs.values()], decimals(name)
            spread = f" ± {np.std(values, ddof=1):.{digits}f}" if len(set(values)) > 1 else ""
            cells.append(f"{np.mean(values):,.{digits}f}{spread}")
        rows.append((arm, *([f"{times[arm]:.0f}"] if times else []), *cells, str(len(runs))))
    parts = [markdown(rows)]
    for name, of in compared.items():
        parts += [f"{name}:", difference_table(of[: len(found) - 1])]
    return "\n\n".join(parts) + "\n"

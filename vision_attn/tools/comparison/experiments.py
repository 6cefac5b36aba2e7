"""Runs of variants with several seeds, in local processes, and tables that compare them."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from joblib import Parallel, cpu_count, delayed
from joblib.externals.loky.backend.context import set_start_method

from vision_attn.checks import check_above
from vision_attn.errors import TrainingError
from vision_attn.networks.capture.figures import save_figure
from vision_attn.networks.safe import check_writable, write_atomically
from vision_attn.text import Table, shorten
from vision_attn.tools.comparison.statistics import (
    Difference,
    as_markdown,
    compare_scores,
    difference_figure,
    difference_parts,
)
from vision_attn.tools.environment import describe_environment

#: measurements by name
Metrics = dict[str, float]
#: measurements by variant and seed
Runs = dict[str, dict[str, Metrics]]
#: Seconds between two messages on the progress of a run.
PROGRESS_EVERY = 10
#: Number of decimals by the unit at the end of a name. Measurements without a unit are integers and are not compared.
DECIMALS = {"%": 1, "dB": 2, "px": 2, "steps": 0}


def trials(
    run: Callable[..., Metrics],
    variants: Sequence[str] | Mapping[str, Mapping[str, Any]],
    *,
    seeds: Sequence[int],
    output: str | Path,
    jobs: int | None = None,
    gpu: bool = False,
    note: str = "",
    may_change: Collection[str] = (),
    **options: Any,
) -> Runs:
    """Run each variant with each seed and compare the measurements.

    The result of each run is saved in ``VARIANT-SEED/run.json``, with versions, device and commit. The same call
    resumes a comparison. To extend it, list additional seeds or variants after the earlier ones, whose runs are kept:
    ``runs.json`` contains the measurements of the listed runs only, ``comparison.md`` the tables, and
    ``comparison.png`` the differences between the last variant and the others.

    Args:
        run: function ``run(variant, seed, **options)`` that trains and returns measurements by name. Measurements are
            compared if their name ends in ``%`` or ``dB`` (higher is better), or in ``px`` or ``steps`` (lower is
            better).
        variants: names of variants, optionally with additional options for ``run``.
        seeds: random seeds of each variant.
        output: folder for the results.
        jobs: number of runs in parallel; the number of GPUs or cores by default. A single job uses this process.
        gpu: assign a GPU to each run if GPUs are available.
        note: text below the table.
        may_change: names of options that may differ when a comparison is resumed or extended, such as the device.
        **options: options for ``run``: numbers, strings and lists.

    Raises:
        ValueError: the folder contains runs with other options, ``seeds`` are not distinct, or ``jobs`` is less than 1.
        TrainingError: a run failed.
    """
    check_above(0, jobs=jobs)
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be distinct, with at least one seed, got {list(seeds)}")
    folder = Path(output).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "runs.json"
    check_writable(file)
    custom = variants if isinstance(variants, Mapping) else {variant: {} for variant in variants}
    settings = json.loads(json.dumps({variant: {**options, **custom[variant]} for variant in custom}))
    # Runs are ordered by seed, so that an interrupted comparison has a similar number of runs for each variant.
    runs = {(variant, seed): folder / f"{variant}-{seed}" / "run.json" for seed in seeds for variant in custom}
    todo = {key: path for key, path in runs.items() if not is_complete(path, settings[key[0]], may_change)}
    calls = [(run, *key, settings[key[0]], path) for key, path in todo.items()]
    execute(calls, jobs, len(runs), gpu)
    records = {key: json.loads(path.read_text()) for key, path in runs.items()}
    found = {variant: {str(seed): records[variant, seed]["measured"] for seed in seeds} for variant in custom}
    environments = [record["environment"] for record in records.values()]
    differences = compare_runs(found)
    distinct = [one for index, one in enumerate(environments) if one not in environments[:index]]
    summary = {"options": options, "environments": distinct, "runs": found, "differences": differences}
    write_atomically(file, json.dumps(summary, indent=1, default=Difference.as_dict).encode())
    parts = report_parts(found, differences, note)
    write_atomically(folder / "comparison.md", f"{as_markdown(parts)}\n".encode())
    print("\n\n".join(map(str, parts)), end="\n\n")
    print(f"Tables: {folder / 'comparison.md'}")
    if differences:
        save_figure(difference_figure(differences), folder / "comparison.png")
        print(f"Plot of the differences and their intervals: {folder / 'comparison.png'}")
    return found


def is_complete(file: Path, settings: Mapping[str, Any], may_change: Collection[str]) -> bool:
    """Return True if a run is complete; raise if settings other than ``may_change`` differ."""
    if not file.exists():
        return False
    before = json.loads(file.read_text())["settings"]
    fixed = [name for name in {**before, **settings} if name not in may_change]
    names = [name for name in fixed if before.get(name) != settings.get(name)]
    if changes := [f"{name}={before.get(name)!r} instead of {settings.get(name)!r}" for name in names]:
        others = shorten(changes, limit=3)
        raise ValueError(f"output: {file.parent} contains a run with {others}. Choose another folder")
    return True


def make_run(run: Callable[..., Metrics], variant: str, seed: int, settings: Mapping[str, Any], file: Path) -> None:
    """Execute one run, and save its measurements."""
    print(f"{variant}, seed {seed}: started", flush=True)
    file.parent.mkdir(exist_ok=True)
    try:
        measured = run(variant, seed, **settings)
    except Exception as error:
        raise TrainingError(f"{variant}, seed {seed} failed: {type(error).__name__}: {error}") from error
    record = {"settings": settings, "environment": describe_environment(), "measured": measured}
    write_atomically(file, json.dumps(record, indent=1).encode())
    values = ", ".join(f"{name} {format_values(name, [value])}" for name, value in measured.items())
    print(f"{variant}, seed {seed}: {values}", flush=True)


def progress_printer(variant: str, seed: int) -> Callable[[str], None]:
    """Return a function that prints the progress of a run to the present standard output, at most every ten seconds."""
    output, printed = sys.stdout, time.monotonic()

    def report(progress: str) -> None:
        nonlocal printed
        if time.monotonic() - printed > PROGRESS_EVERY:
            printed = time.monotonic()
            print(f"{variant}, seed {seed}: {progress}", file=output, flush=True)

    return report


def execute(calls: Sequence[tuple[Any, ...]], jobs: int | None, total: int, gpu: bool) -> None:
    """Make the runs in local processes, or a single job in this process."""
    set_start_method("loky_init_main", force=True)  # processes import the main script, as in multiprocessing
    gpus = torch.cuda.device_count() if gpu else 0
    jobs = min(jobs or gpus or min(cpu_count(), 16), total)  # each run needs memory for the images
    print(f"{total} runs, {total - len(calls)} of them complete, {jobs} in parallel", flush=True)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    start = {"initializer": start_worker, "initargs": (visible.split(",") if gpus else [],)}
    parallel = Parallel(jobs, backend="loky", batch_size=1, pre_dispatch=jobs, **start)
    parallel(delayed(make_run)(*call) for call in calls)


def start_worker(gpus: Sequence[str]) -> None:
    """Assign a GPU to this process and end the process with its parent. Several processes may share a GPU."""
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    # Loky's start method, which workers inherit, cannot start the worker processes of a DataLoader.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    if gpus:
        number = int(multiprocessing.current_process().name.rpartition("-")[2])  # consecutive, as in LokyProcess-1
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]


def end_with_parent(parent: int) -> None:
    """Wait until the parent has been killed, and then stop this process, which saves its run."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


def compare_runs(runs: Runs) -> dict[str, list[Difference]]:
    """Return the differences between the last variant and the others in all measurements that have a unit and vary."""
    found = {}
    for name in metric_names(runs):
        if name.endswith(tuple(DECIMALS)) and len(runs) > 1:
            scores = {variant: {seed: one[name] for seed, one in by_seed.items()} for variant, by_seed in runs.items()}
            if any(len(set(values.values())) > 1 for values in scores.values()):
                found[name] = compare_scores(scores, lower_is_better=not name.endswith(("%", "dB")))
    return found


def metric_names(runs: Runs) -> list[str]:
    """Return the names of the measurements of all variants."""
    return list(dict.fromkeys(name for by_seed in runs.values() for one in by_seed.values() for name in one))


def format_values(name: str, values: Sequence[float]) -> str:
    """Format the mean of a measurement, and its standard deviation if it varies."""
    digits = next((digits for unit, digits in DECIMALS.items() if name.endswith(unit)), 0)
    spread = f" ± {np.std(values, ddof=1):.{digits}f}" if len(set(values)) > 1 else ""
    return f"{np.mean(values):,.{digits}f}{spread}" if values else "—"


def report_parts(runs: Runs, differences: dict[str, list[Difference]], note: str) -> list[str | Table]:
    """Return tables of means, standard deviations and the differences between the last variant and the others."""
    names = metric_names(runs)
    rows = [("variant", *names, "runs")]
    for variant, by_seed in runs.items():
        cells = [format_values(name, [one[name] for one in by_seed.values() if name in one]) for name in names]
        rows.append((variant, *cells, str(len(by_seed))))
    parts: list[str | Table] = [Table(rows), note] if note else [Table(rows)]
    notes: list[str | Table] = []
    for name, found in differences.items():
        table, *explanations = difference_parts(found)
        parts += [f"Differences in {name}:", table]
        notes += [text for text in explanations if text not in notes]
    return parts + notes

"""Variants by seeds: joblib dispatches the runs to processes or to a cluster, and one table compares them."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from joblib import Parallel, cpu_count, delayed
from joblib.externals.loky.backend.context import set_start_method

from vision_attn.checks import check_counts
from vision_attn.errors import TrainingError
from vision_attn.networks.figures import save_figure
from vision_attn.networks.safe import check_writable, write_atomically
from vision_attn.text import markdown
from vision_attn.tools.comparison.statistics import Difference, compare_scores, difference_figure, difference_table

#: measurements by name
Measured = dict[str, float]
#: measurements by variant and seed
Runs = dict[str, dict[str, Measured]]
#: differences of every two variants by measurement, those of the last variant first
Differences = dict[str, list[Difference]]
#: Steps that are timed of each variant, in turn.
ROUNDS = 15
#: Decimals by the unit at the end of a name. Measurements without a unit have none, and are not compared.
DECIMALS = {"%": 1, "dB": 2, "px": 2, "steps": 0}


def trials(
    run: Callable[..., Measured],
    variants: Sequence[str] | Mapping[str, Mapping[str, Any]],
    *,
    seeds: Sequence[int],
    output: str | Path,
    jobs: int | None = None,
    backend: str = "loky",
    gpu: bool = False,
    step: Callable[[str], Callable[[], object]] | None = None,
    note: str = "",
    **options: Any,
) -> Runs:
    """Make a run of each variant with each seed, and compare their measurements.

    Each run is written to ``VARIANT-SEED/run.json`` as it ends: the same call resumes, and more seeds or variants
    extend the comparison. ``runs.json`` has all measurements, ``comparison.md`` the tables and ``comparison.png`` the
    differences of the last variant from the others.

    Args:
        run: ``run(variant, seed, **options)`` trains and returns measurements by name. Names that end in ``%`` or
            ``dB``, of which more is better, or in ``px`` or ``steps``, of which less is better, are compared.
        variants: names, or for each name further options for ``run``.
        seeds: seeds of each variant.
        output: folder of the results; on a cluster one that all machines share.
        jobs: runs at a time; by default as many as GPUs, or as cores. With one, the runs are made in this process.
        backend: joblib's backend: ``"loky"`` for processes of this machine, ``"ray"`` for a Ray cluster.
        gpu: give each run a GPU, if there are some.
        step: ``step(variant)`` returns a function that makes one training step; all are timed in turn after the runs.
        note: a line below the table.
        **options: options for ``run``: numbers, texts and lists of them.

    Raises:
        ValueError: the folder holds runs with other options, ``seeds`` are not distinct, ``jobs`` is not at least 1, or
            the package of the backend is not installed.
        TrainingError: a run failed.
    """
    check_counts(jobs=jobs)
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be distinct, and at least one; got {list(seeds)}")
    folder = Path(output).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "runs.json"
    check_writable(file)
    custom = variants if isinstance(variants, Mapping) else {variant: {} for variant in variants}
    settings = json.loads(json.dumps({variant: {**options, **custom[variant]} for variant in custom}))
    # Seed by seed: an interrupted comparison has as many runs of each variant.
    runs = {(variant, seed): folder / f"{variant}-{seed}" / "run.json" for seed in seeds for variant in custom}
    todo = {key: path for key, path in runs.items() if not is_complete(path, settings[key[0]])}
    with TemporaryDirectory() as slots:
        parallel = make_parallel(backend, jobs, len(runs), gpu, slots)
        print(f"{len(todo)} of {len(runs)} runs to make, {parallel.n_jobs} at a time", flush=True)
        parallel(delayed(make_run)(run, *key, settings[key[0]], path) for key, path in todo.items())
    found: Runs = {variant: {} for variant in custom}
    for (variant, seed), path in runs.items():
        found[variant][str(seed)] = json.loads(path.read_text())["measured"]
    times = json.loads(file.read_text()).get("milliseconds", {}) if file.exists() else {}
    if not times.keys() >= custom.keys():
        times = time_steps({variant: step(variant) for variant in custom}) if step else {}
    differences = compare_runs(found)
    summary = {"options": options, "runs": found, "milliseconds": times, "differences": differences}
    write_atomically(file, json.dumps(summary, indent=1, default=Difference.as_dict).encode())
    text = format_report(found, times, differences, note)
    write_atomically(folder / "comparison.md", text.encode())
    if differences:
        last = {name: of[: len(found) - 1] for name, of in differences.items()}
        save_figure(difference_figure(last), folder / "comparison.png")
    print(f"\n{text}\nin {folder / 'comparison.md'}")
    return found


def is_complete(file: Path, settings: Mapping[str, Any]) -> bool:
    """Return True if a run has been completed; refuse one with other settings."""
    if not file.exists():
        return False
    before = json.loads(file.read_text())["settings"]
    if differing := [name for name in {**before, **settings} if before.get(name) != settings.get(name)]:
        old, new = ({name: values.get(name) for name in differing} for values in (before, settings))
        raise ValueError(f"output: {file.parent} holds a run with {old}, not {new}: choose another folder")
    return True


def make_run(run: Callable[..., Measured], variant: str, seed: int, settings: Mapping[str, Any], file: Path) -> None:
    """Make one run, in the process that the backend selects, and note its measurements."""
    file.parent.mkdir(exist_ok=True)
    try:
        measured = run(variant, seed, **settings)
    except Exception as error:
        raise TrainingError(f"{variant}, seed {seed} failed: {type(error).__name__}: {error}") from error
    write_atomically(file, json.dumps({"settings": settings, "measured": measured}, indent=1).encode())
    values = ", ".join(f"{name} {format_values(name, [value])}" for name, value in measured.items())
    print(f"{variant}, seed {seed}: {values}", flush=True)


def make_parallel(backend: str, jobs: int | None, runs: int, gpu: bool, slots: str) -> Parallel:
    """Build joblib's dispatcher for some runs."""
    options: dict[str, Any] = {}
    if backend == "ray":
        try:
            import ray
            from ray.util.joblib import register_ray
        except ImportError as error:
            raise ValueError("backend 'ray' needs the package ray, which is not installed: pip install ray") from error
        register_ray()
        ray.init(ignore_reinit_error=True)
        cpus, gpus = (int(ray.cluster_resources().get(name, 0)) for name in ("CPU", "GPU"))
    else:
        set_start_method("loky_init_main", force=True)  # processes import the script, as those of multiprocessing do
        cpus, gpus = min(cpu_count(), 16), torch.cuda.device_count()  # each run has a copy of the images
    gpus = gpus if gpu else 0
    jobs = min(jobs or gpus or cpus, runs)
    if backend == "ray":
        options["ray_remote_args"] = {"num_gpus": 1 / math.ceil(jobs / gpus)} if gpus else {}
    else:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
        options |= {"initializer": start_worker, "initargs": (visible.split(",") if gpus else [], slots)}
    return Parallel(jobs, backend=backend, batch_size=1, pre_dispatch=jobs, **options)


def start_worker(gpus: Sequence[str], slots: str) -> None:
    """Assign a GPU to this process, which processes share if there are more of them, and end it with its parent."""
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    for slot in count() if gpus else ():
        with suppress(FileExistsError):
            (Path(slots) / str(slot)).mkdir()
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
            return


def end_with_parent(parent: int) -> None:
    """Stop this process, which saves its run, when its parent has been killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


def time_steps(steps: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median milliseconds of each of several steps, made in turn."""
    times: dict[str, list[float]] = {variant: [] for variant in steps}
    for _ in range(ROUNDS):
        for variant, step in steps.items():
            start = time.perf_counter()
            step()
            times[variant].append(1000 * (time.perf_counter() - start))
    return {variant: float(np.median(found[ROUNDS // 5 :])) for variant, found in times.items()}  # after a warm-up


def compare_runs(runs: Runs) -> Differences:
    """Return the differences of the variants by measurement, of those that have a unit and vary."""
    found = {}
    for name in measured_names(runs):
        if name.endswith(tuple(DECIMALS)) and len(runs) > 1:
            scores = {variant: [one[name] for one in by_seed.values()] for variant, by_seed in runs.items()}
            if any(len(set(values)) > 1 for values in scores.values()):
                found[name] = compare_scores(scores, less=not name.endswith(("%", "dB")))
    return found


def measured_names(runs: Runs) -> list[str]:
    """Return the names of all measurements, some of which not every variant has."""
    return list(dict.fromkeys(name for by_seed in runs.values() for one in by_seed.values() for name in one))


def format_values(name: str, values: Sequence[float]) -> str:
    """Format the mean of a measurement, and its standard deviation where it varies."""
    digits = next((digits for unit, digits in DECIMALS.items() if name.endswith(unit)), 0)
    spread = f" ± {np.std(values, ddof=1):.{digits}f}" if len(set(values)) > 1 else ""
    return f"{np.mean(values):,.{digits}f}{spread}" if values else "—"


def format_report(runs: Runs, times: Measured, differences: Differences, note: str) -> str:
    """Format means, standard deviations and the differences of the last variant as Markdown."""
    names = measured_names(runs)
    rows = [("variant", *(["ms a step"] if times else []), *names, "runs")]
    for variant, by_seed in runs.items():
        cells = [format_values(name, [one[name] for one in by_seed.values() if name in one]) for name in names]
        rows.append((variant, *([f"{times[variant]:.0f}"] if times else []), *cells, str(len(by_seed))))
    parts = [markdown(rows), note] if note else [markdown(rows)]
    for name, found in differences.items():
        parts += [f"{name}:", difference_table(found[: len(runs) - 1])]
    return "\n\n".join(parts) + "\n"

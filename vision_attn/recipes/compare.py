"""Compare blocks over several seeds, with paired confidence intervals.

    vision-attn compare --data flowers --model resnet18 --pretrained --stages -2 --freeze-backbone
    vision-attn compare --config runs/train-1 --variants plain cbam 'cbam=attention --block cbam'

Each run is a run of ``train.py`` in the folder ``VARIANT-SEED``. Run the same command again to resume a comparison:
complete runs are kept. Runs are started by joblib, with local processes or with a registered backend such as Ray.
"""

import json
import multiprocessing
import os
import shlex
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

import vision_attn as va
from vision_attn import cli
from vision_attn.errors import DataError, TrainingError
from vision_attn.recipes import runs
from vision_attn.recipes.differences import Metrics, format_values, plot, report
from vision_attn.recipes.settings import CALL, DATA, Comparison, Settings, check, flag
from vision_attn.recipes.train import train

#: A block of ConvNeXt with a depthwise convolution of 3×3 and about as many parameters as attention, the usual control.
CONVOLUTION = "--block timm.models.convnext:ConvNeXtBlock --block-options kernel_size=3 mlp_ratio=2 ls_init_value=None"
#: Variants: flags that change the common flags; None for the network without a block.
VARIANTS = {"plain": None, "convolution": CONVOLUTION, "se": "--block se", "averaging": "--block-options scale=0",
            "cost-volume": "--block-options num_heads=1 qk_norm=cosine", "attention": ""}  # fmt: skip
#: Settings of blocks, which the plain network does not have.
BLOCK_SETTINGS = ("stages", "names", "at", "block", "pattern", "block_options", "attention_lr")
Run = Callable[..., Metrics]
#: measurements by variant and seed
Results = dict[str, dict[str, Metrics]]


def trials(
    run: Run, variants: Sequence[str] | Mapping[str, Mapping[str, Any]], *, seeds: Sequence[int], output: str | Path,
    jobs: int | None = None, backend: str = "loky", note: str = "", **options: Any,
) -> Results:  # fmt: skip
    """Run each variant with each seed, compare the measurements, and write ``runs.json`` and ``comparison.md``.

    The result of each run is saved in ``VARIANT-SEED/run.json``. The same call resumes or extends a comparison. On a
    machine with GPUs, each run has one of them.

    Args:
        run: function ``run(variant, seed, **options)`` that trains and returns measurements by name. Measurements are
            compared if their name ends in ``%`` or ``dB`` (higher is better), or in ``px`` or ``steps`` (lower is
            better).
        variants: names of variants, optionally with additional options for ``run``.
        seeds: random seeds of each variant.
        output: folder for the results.
        jobs: number of runs in parallel; the number of GPUs or cores by default. A single job uses this process.
        backend: name of a joblib backend.
        note: text below the table.
        **options: options for ``run``: numbers, strings and lists. Those in ``settings.MACHINE`` may change when a
            comparison is resumed.
    """
    if not seeds or len({*seeds}) < len(seeds) or (jobs is not None and jobs < 1):
        raise ValueError(f"--seeds must be distinct, and --jobs at least 1, got {list(seeds)} and {jobs}")
    folder = Path(output).resolve()
    runs.refuse_other_folder(folder, "runs.json")
    custom = variants if isinstance(variants, Mapping) else {variant: {} for variant in variants}
    settings = json.loads(json.dumps({variant: {**options, **custom[variant]} for variant in custom}, default=str))
    # Runs are ordered by seed, so that an interrupted comparison has a similar number of runs for each variant.
    files = {(variant, seed): folder / f"{variant}-{seed}" / "run.json" for seed in seeds for variant in custom}
    known = {path: variant for (variant, _), file in files.items() for path in (file, file.with_name("settings.json"))}
    for path in filter(Path.exists, known):
        before = json.loads(path.read_text())
        if other := runs.changed_flags(before.get("settings", before), settings[known[path]]):
            what = f"--output: {folder} has a comparison with other settings ({other})"
            raise ValueError(f"{what}. Choose another folder")
    todo, gpus = [key for key, file in files.items() if not file.exists()], torch.cuda.device_count()
    jobs = max(1, min(jobs or gpus or min(joblib.cpu_count(), 16), len(todo)))
    print(f"comparing {', '.join(custom)} with the seeds {' '.join(map(str, seeds))}: {len(files)} runs, "
          f"{len(files) - len(todo)} of them complete, {jobs} in parallel", flush=True)  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "runs.json").touch()
    if backend == "ray":
        from ray.util.joblib import register_ray

        register_ray()
    start = joblib.delayed(make_run)
    calls = [start(run, *key, settings[key[0]], files[key], os.getpid(), at) for at, key in enumerate(todo)]
    try:
        with joblib.parallel_config(backend=backend):
            joblib.Parallel(jobs, batch_size=1, pre_dispatch=jobs)(calls)
    except BrokenProcessPool as error:
        remedy = "usually because memory ran out. Use fewer --jobs, and run the same command again"
        raise TrainingError(f"a process of the comparison was ended by the system, {remedy}") from error
    measured = {key: json.loads(file.read_text())["measured"] for key, file in files.items()}
    found = {variant: {str(seed): measured[variant, seed] for seed in seeds} for variant in custom}
    text, differences = report(found, note)
    rows = {name: [*map(asdict, of)] for name, of in differences.items()}
    about: dict[str, Any] = {"options": options, "environments": [runs.describe_environment()]}
    summary = about | {"runs": found, "differences": rows}
    runs.write_file(folder / "runs.json", json.dumps(summary, indent=1, default=str))
    runs.write_file(folder / "comparison.md", f"{text}\n")
    if differences:
        plot(differences, folder / "comparison.png")
    print(f"{text}\n\nTables and a plot of the intervals: {folder / 'comparison.md'}")
    return found


def make_run(run: Run, variant: str, seed: int, settings: dict[str, Any], file: Path, parent: int, at: int) -> None:
    """Make one run and save its measurements. A local process ends with the main process."""

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    if os.getppid() == parent:  # not in the main process or on another machine
        threading.Thread(target=end_with_parent, daemon=True).start()
        # Loky's start method, which its processes inherit, cannot start the processes of a DataLoader.
        multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
        if gpus := torch.cuda.device_count():
            torch.cuda.set_device(at % gpus)
    print(f"{variant}, seed {seed}: started", flush=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        measured = run(variant, seed, **settings)
    except Exception as error:
        raise TrainingError(f"{variant}, seed {seed} failed: {type(error).__name__}: {error}") from error
    runs.write_file(file, json.dumps({"settings": settings, "measured": measured}, indent=1))
    values = ", ".join(f"{name} {format_values(name, [value])}" for name, value in measured.items())
    print(f"{variant}, seed {seed}: {values}", flush=True)


def train_variant(variant: str, seed: int, *, output: Path, **settings: Any) -> Metrics:
    """Train a variant with a seed, or resume its run, and measure the network of the last epoch.

    The best epoch is not reported, because it is selected with the validation images.
    """
    folder = output / f"{variant}-{seed}"
    s: Settings = runs.from_json(settings, seed=seed, output=folder, resume="auto")

    def log(line: str) -> None:
        if line.startswith("epoch "):
            print(f"{variant}, seed {seed}: {line}", flush=True)

    history = train(s, log)
    complete = [file.parent for file in output.glob("*/run.json")]  # the states of other runs may change
    states = [(run, state) for run in (folder, *complete) if (state := runs.newest_state(run))]
    found = [(run.name.endswith(f"-{seed}"), runs.read_progress(state)["data"]) for run, state in states]
    first = found[0][1]
    # Each seed may hold out other images.
    digests = {tuple(data["digests"]) for same_seed, data in found if same_seed or not data.get("held_out", True)}
    if any(data["classes"] != first["classes"] for _, data in found) or len(digests) > 1:
        what = f"the runs in {output} have different classes, or different images for seed {seed}"
        remedy = "Restore the images of --data, and delete the runs with other images; or choose another --output"
        raise DataError(f"{what}. {remedy}")
    model: Any = va.load_model(folder, block=runs.import_block(s.block) if ":" in s.block else None)
    with warnings.catch_warnings(action="ignore"):  # a network can have attention of another library only
        va.set_impl_(model, "bmm")
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, *model.pretrained_cfg["input_size"]))
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "MACs": counter.get_total_flops() // 2,
        "images/s": float(np.median([row["images_per_second"] for row in history])),
        "top-1 %": history[-1]["eval_top1"],
    }


def settings_for_variant(word: str, common: Settings) -> tuple[str, Settings]:
    """Return the name of a variant and its settings: common settings, changed by its base and by its flags."""
    name, sign, text = word.partition("=")
    flags = cli.hyphenate(shlex.split(text))
    base = flags.pop(0) if flags and not flags[0].startswith("-") else "attention" if sign else name
    if base not in VARIANTS or not name or {*name} & {*"/|"}:
        expected = f"{', '.join(VARIANTS)} or NAME=VARIANT FLAGS"
        raise ValueError(f"--variants: expected {expected}, got {word!r}.{cli.did_you_mean(base, VARIANTS)}")
    common_flags = {"-o", *map(flag, (*CALL, *DATA, "seed"))}
    if fixed := common_flags.intersection(word.partition("=")[0] for word in flags):
        raise ValueError(f"--variants: {word!r} must not contain {min(fixed)}, which is the same for all variants")
    if (given := VARIANTS[base]) is None:
        frozen = common.freeze_backbone and (common.reset_head or common.pretrained)  # a new classifier is trained
        if common.freeze_backbone and not frozen:  # nothing of the network would be trained
            what = f"{name} has no block and no new classifier to train, so all its weights are trained"
            warnings.warn(what, stacklevel=2)
        s = replace(common, **{name: getattr(Settings(), name) for name in BLOCK_SETTINGS}, freeze_backbone=frozen)
        return name, cli.parse(Settings, flags, "compare", default=s)
    s = common if common.stages or common.names else replace(common, stages=(-1,))
    for words in (shlex.split(given), flags):
        if any(word.partition("=")[0] == "--block" for word in words):  # the common options belong to another block
            s = replace(s, block_options=(), pattern=None)
        before, s = s, cli.parse(Settings, words, "compare", default=s)
        options = {word.partition("=")[0]: word for word in (*before.block_options, *s.block_options)}
        moved = {"stages": ()} if s.names != before.names else {"names": ()} if s.stages != before.stages else {}
        s = replace(s, block_options=tuple(options.values()), **moved)
    return name, s


def compare(c: Comparison) -> Results:
    """Train each variant with each seed, and compare the top-1 accuracy after the last epoch."""
    common = Settings(**{field.name: getattr(c, field.name) for field in fields(Settings)})
    settings = dict(settings_for_variant(word, common) for word in c.variants)
    if len(settings) < max(2, len(c.variants)):
        raise ValueError(f"--variants: expected at least 2 distinct names, got {' '.join(c.variants)}")
    command, output = shlex.join(["vision-attn", *sys.argv[1:]]), c.output or Path("runs/compare")
    return compare_settings(settings, output=output, command=command, seeds=c.seeds, jobs=c.jobs, backend=c.backend)


def compare_settings(settings: Mapping[str, Settings], *, output: str | Path, command: str, **options: Any) -> Results:
    """Train the network of each variant, given by its settings, with each seed; ``options`` go to ``trials``."""
    checked = {name: check(s) for name, s in settings.items()}
    if len({(s.amp, s.device) for s in checked.values()}) > 1:  # Accelerate has one of each in a process
        raise ValueError("--amp and --device must be the same for all variants. Compare them in separate commands")
    kept = [field.name for field in fields(Settings) if field.name not in {*CALL, "seed"}]
    values = {name: {key: getattr(s, key) for key in kept} for name, s in checked.items()}
    note = f"Top-1 accuracy after the last epoch on the validation images. Command: `{command}`"
    run = partial(train_variant, output=Path(output).resolve())
    return trials(run, values, output=output, note=note, **options)


if __name__ == "__main__":
    cli.run_script("compare", compare)

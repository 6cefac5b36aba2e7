"""Comparison of variants that are trained on images by ``vision-attn train``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vision_attn.networks.inspection.macs import count_macs
from vision_attn.tools.comparison.experiments import Metrics, Runs, progress_printer, trials
from vision_attn.tools.training.run import run_training
from vision_attn.tools.training.settings import CALL_SETTINGS, MACHINE_SETTINGS, make_settings
from vision_attn.version import __version__


def compare(
    variants: Mapping[str, Mapping[str, Any]], *, output: str | Path = "runs/compare", command: str = "", **options: Any
) -> Runs:
    """Train each variant with each seed and compare the top-1 accuracy after the last epoch.

    Each run is a run of ``vision-attn train`` in the folder ``VARIANT-SEED``. The same call resumes a comparison:
    complete runs are kept, and interrupted runs are resumed.

    Args:
        variants: settings of each variant, by name.
        output: folder for the results, as in :func:`trials`.
        command: command line, for ``comparison.md``.
        **options: ``seeds`` and ``jobs`` of :func:`trials`.

    Raises:
        ValueError: a setting is wrong, or the folder contains runs with other settings.
        TrainingError: a run failed.
    """
    settings = {}
    if len(variants) < 2:
        raise ValueError(f"variants: expected at least 2, got {[*variants]}")
    for variant, given in variants.items():
        (complete := make_settings(**given)).require_model()
        values = complete.as_dict().items()
        settings[variant] = {name: value for name, value in values if name not in CALL_SETTINGS | {"seed"}}
    first = next(iter(settings.values()))
    images = "held-out training images" if first["val_fraction"] is not None else "the validation images"
    note = f"Top-1 accuracy after the last epoch on {images}, with torch {torch.__version__} and "
    note += f"vision_attn {__version__}. Command: `{command}`"
    run, gpu = partial(train_variant, output=Path(output).resolve()), first["device"] != "cpu"
    return trials(run, settings, output=output, gpu=gpu, note=note, may_change=MACHINE_SETTINGS, **options)


def train_variant(variant: str, seed: int, *, output: Path, **settings: Any) -> Metrics:
    """Train a variant with a seed, or resume its run, and measure the network of the last epoch.

    The best epoch is not reported, because it is selected with the validation images.
    """
    folder = output / f"{variant}-{seed}"
    report = progress_printer(variant, seed)

    def log(line: str) -> None:
        print(line)
        if line.startswith("epoch "):
            report(line)

    torch.compiler.reset()  # earlier runs count towards torch's recompilation limit
    with open(folder / "log.txt", "a", buffering=1) as file, redirect_stdout(file), redirect_stderr(file):
        result = run_training(make_settings(**settings, seed=seed, output=folder, resume="auto"), log=log)
    speed = float(np.median([row["images_per_second"] for row in result.history]))
    parameters = sum(parameter.numel() for parameter in result.model.parameters())
    macs, milliseconds = count_macs(result.model, (1, *result.input_size)), 1000 * result.settings.batch / speed
    measured = {"parameters": parameters, "MACs": macs, "ms per step": milliseconds}
    if result.ablation is not None:
        measured["% changed when disabled"] = 100 * result.ablation.predictions_changed / result.ablation.images
    return {**measured, "top-1 %": result.final.top1}

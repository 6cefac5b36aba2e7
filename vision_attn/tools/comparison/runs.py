"""Compare variants of a network that ``vision-attn train`` trains."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vision_attn.networks.insertion import count_macs
from vision_attn.tools.comparison.experiments import Measured, Runs, trials
from vision_attn.tools.training.run import run_training
from vision_attn.tools.training.settings import CALL_SETTINGS, Settings
from vision_attn.version import __version__


def compare(
    variants: Mapping[str, Mapping[str, Any]], *, output: str | Path = "runs/compare", command: str = "", **how: Any
) -> Runs:
    """Train each variant with each seed, and compare top-1 after the last epoch.

    Every run is one of ``vision-attn train``, in the folder ``VARIANT-SEED``. The same call resumes: complete runs are
    kept, interrupted ones go on from their last epoch.

    Args:
        variants: settings of each variant, by name.
        output: as in :func:`trials`.
        command: the command line, for ``comparison.md``.
        **how: ``seeds``, ``jobs`` and ``backend`` as in :func:`trials`.

    Raises:
        ValueError: settings are wrong, or the folder holds runs with other settings.
        TrainingError: a run failed.
    """
    if len(variants) < 2:
        raise ValueError(f"variants must be two or more; got {[*variants]}")
    settings = {
        variant: {key: value for key, value in Settings(**of).as_dict().items() if key not in CALL_SETTINGS | {"seed"}}
        for variant, of in variants.items()
    }
    first = next(iter(settings.values()))
    images = "held-out training images" if first["val_share"] is not None else "the evaluation images"
    note = f"Top-1 after the last epoch on {images}; torch {torch.__version__}, vision_attn {__version__}. `{command}`"
    run, gpu = partial(train_variant, output=Path(output).resolve()), first["device"] != "cpu"
    return trials(run, settings, output=output, gpu=gpu, note=note, **how)


def train_variant(variant: str, seed: int, *, output: Path, **settings: Any) -> Measured:
    """Train a variant with a seed, or resume its run, and measure the network after the last epoch.

    The best epoch is not reported: it would be selected by the images that it is scored on.
    """
    folder = output / f"{variant}-{seed}"
    torch.compiler.reset()  # what an earlier run compiled counts against a limit
    with open(folder / "log.txt", "a", buffering=1) as log, redirect_stdout(log), redirect_stderr(log):
        result = run_training(Settings(**settings, seed=seed, output=folder, resume="auto"))
    speed = float(np.median([row["images_per_second"] for row in result.rows]))
    disabled = result.disabled
    changed = {} if disabled is None else {"% changed when disabled": 100 * disabled.changed / disabled.images}
    return {
        "parameters": sum(parameter.numel() for parameter in result.model.parameters()),
        "MACs": count_macs(result.model, (1, *result.input_size)),
        "ms a step": 1000 * settings["batch_size"] / speed,
        **changed,
        "top-1 %": result.final.top1,
    }

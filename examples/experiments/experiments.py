"""Command line and timing of the experiments. ``trials`` runs variants with several seeds and compares them."""

import argparse
import json
import time
from pathlib import Path

import numpy as np

from vision_attn.recipes.compare import trials
from vision_attn.recipes.differences import table

__all__ = ["build_parser", "time_steps", "trials"]

#: number of timed steps of each variant
ROUNDS = 15


def build_parser(description, variants, *, steps, output):
    """Build a parser for the arguments of `trials` and `--steps`."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--variants", nargs="+", choices=variants, default=list(variants), help="variants to compare")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="random seeds of each variant")
    parser.add_argument("--steps", type=int, default=steps, help="training steps of each run")
    parser.add_argument("--jobs", type=int, help="runs at a time (default: number of cores)")
    parser.add_argument("--output", default=output, help="folder of the results")
    return parser


def time_steps(step, variants, output):
    """Print the median duration of a training step of each variant, and save it as `milliseconds.json`.

    `step(variant)` returns a function for one step. The variants alternate, and the first rounds are not counted.
    """
    steps, times = {variant: step(variant) for variant in variants}, {variant: [] for variant in variants}
    for _ in range(ROUNDS):
        for variant in variants:
            start = time.perf_counter()
            steps[variant]()
            times[variant].append(1000 * (time.perf_counter() - start))
    medians = {variant: float(np.median(times[variant][ROUNDS // 5 :])) for variant in variants}
    (Path(output) / "milliseconds.json").write_text(json.dumps(medians, indent=1))
    print(table([("variant", "ms per step"), *((variant, f"{median:.0f}") for variant, median in medians.items())]))

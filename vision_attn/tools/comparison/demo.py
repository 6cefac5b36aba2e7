"""Comparisons on the synthetic task recall, such as :func:`run_demo`, which take minutes on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

import vision_attn.networks.models  # noqa: F401  (registers the network with timm)
from vision_attn.checks import check_above
from vision_attn.networks.capture.figures import attention_figure, save_figure
from vision_attn.networks.capture.recording import capture
from vision_attn.networks.checkpoints.folder import load_model, save_model
from vision_attn.networks.inspection.network import quiet_eval
from vision_attn.tools.comparison.experiments import Metrics, Runs, progress_printer, trials
from vision_attn.tools.comparison.recall import CELLS, COLORS, NOTHING, PAIRS, PIXELS, accuracy, canvases, training
from vision_attn.tools.comparison.variants import BLOCK_SETTINGS, RECALL, settings_for_variant
from vision_attn.tools.explorer import explore
from vision_attn.tools.training.network import insert_blocks_
from vision_attn.tools.training.settings import make_settings

#: Variants of the demo with their custom settings.
MATCHING = {"block_options": ("qk_norm=match",)}
VARIANTS: dict[str, dict[str, Any]] = {"plain": {}, "large-kernel": {}, "averaging": {}, "attention": MATCHING}
#: Cell whose attention map is drawn, and number of canvases.
QUERY_CELL, CANVASES = (4, 2), 2


def run_demo(output: str | Path, *, steps: int = 400, seed: int = 0, jobs: int | None = None) -> None:
    """Train and compare the variants of the demo, and draw attention maps."""
    variants = {name: settings_for_variant(name, custom, RECALL) for name, custom in VARIANTS.items()}
    compare_on_recall(variants, seeds=(seed,), output=output, steps=steps, jobs=jobs)
    draw(load_model(Path(output) / f"attention-{seed}"), Path(output))
    print(f"Attention maps: {Path(output) / 'attention.png'} and {Path(output) / 'explorer.html'}")


def compare_on_recall(
    variants: Mapping[str, Mapping[str, Any]], *, output: str | Path, steps: int = 400, **options: Any
) -> Runs:
    """Train each variant on recall with each seed and compare the accuracies; ``options`` are as in :func:`trials`."""
    names = {name for settings in variants.values() for name in settings}
    if foreign := sorted(names - ({*BLOCK_SETTINGS} - {"attention_lr"})):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in foreign)
        raise ValueError(f"{flags}: not available without --data or --dataset")
    check_above(0, steps=steps)
    return trials(partial(train_recall, output=Path(output).resolve()), variants, output=output, steps=steps, **options)


def train_recall(variant: str, seed: int, *, steps: int, output: Path, **settings: Any) -> Metrics:
    """Train the network with the block of a variant, save it and measure its accuracy."""
    torch.manual_seed(seed)
    model = timm.create_model("recall")
    if (complete := make_settings(**settings)).has_blocks:
        insert_blocks_(model, complete, {"input_size": (3, CELLS * PIXELS, CELLS * PIXELS)})
    step, report = training(model, steps, seed), progress_printer(variant, seed)
    for number in range(steps):
        step()
        report(f"step {number + 1} of {steps}")
    save_model(model, output / f"{variant}-{seed}")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": parameters, **{f"{pairs} pairs %": accuracy(model, pairs) for pairs in PAIRS}}


def draw(model: nn.Module, folder: Path) -> None:
    """Draw the attention map of a black cell, and write an explorer page."""
    images, colors = canvases(256, 12, train=False, generator=torch.Generator().manual_seed(0))
    chosen = (colors[:, *QUERY_CELL] != NOTHING).nonzero()[:CANVASES, 0]
    images, colors = images[chosen], colors[chosen]
    query = tuple(PIXELS * (cell + 0.5) for cell in QUERY_CELL)
    with capture(model, queries=[query]) as maps, quiet_eval(model):
        predicted = model(images).argmax(1)[:, *QUERY_CELL]
    titles = [f"prediction for the framed glyph: {[*COLORS][label]}" for label in predicted.tolist()]
    (attention,) = maps.values()
    save_figure(attention_figure(images, attention, titles=titles, width=7.5), folder / "attention.png")
    explore(model, images, folder / "explorer.html", title="What color is the cell of the matching glyph?")

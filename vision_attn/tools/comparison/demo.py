"""The demo, and comparisons without data: variants of one network learn recall, in minutes on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

import vision_attn.networks.models  # noqa: F401  (registers the network with timm)
from vision_attn.networks.figures import attention_figure, save_figure
from vision_attn.networks.insertion import quiet_eval
from vision_attn.networks.models.folder import load_model, save_model
from vision_attn.networks.recording import capture
from vision_attn.tools.comparison.experiments import Measured, Runs, trials
from vision_attn.tools.comparison.recall import CELLS, COLOURS, NOTHING, PAIRS, PIXELS, accuracy, canvases, training
from vision_attn.tools.comparison.variants import BLOCK_SETTINGS, RECALL, settings_for_variant
from vision_attn.tools.explorer import explore
from vision_attn.tools.training.network import insert_blocks_
from vision_attn.tools.training.settings import Settings

#: The variants of the demo, with their custom settings.
MATCHING = {"block_options": ("qk_norm=match",)}
VARIANTS: dict[str, dict[str, Any]] = {"plain": {}, "large-kernel": {}, "averaging": {}, "attention": MATCHING}
#: The cell whose attention is drawn, and the number of canvases.
QUERY_CELL, CANVASES = (4, 2), 2

TASK = """\
Glyphs on coloured cells and on black ones: which colour has the twin of each black one? The network sees each cell
separately. A large kernel sees all cells, with weights that are the same for every canvas; averaging weights all cells
alike. Attention finds the twin. One recipe for all; the glyphs of the test are not in the training data. Chance is
12.5 %.
"""


def run_demo(output: str | Path, *, steps: int = 400, seed: int = 0, jobs: int | None = None) -> None:
    """Train and compare the variants of the demo, and draw what the attention attends to."""
    print(TASK)
    variants = {name: settings_for_variant(name, custom, RECALL) for name, custom in VARIANTS.items()}
    compare_on_recall(variants, seeds=(seed,), output=output, steps=steps, jobs=jobs)
    draw(load_model(Path(output) / f"attention-{seed}"), Path(output))
    print(f"Also in {output}: attention.png, explorer.html, and each trained network in the folder of its variant.")


def compare_on_recall(
    variants: Mapping[str, Mapping[str, Any]], *, output: str | Path, steps: int = 400, **how: Any
) -> Runs:
    """Train each variant on recall with each seed, and compare them; ``how`` as in :func:`trials`."""
    names = {name for settings in variants.values() for name in settings}
    if foreign := sorted(names - ({*BLOCK_SETTINGS} - {"attention_lr"})):
        raise ValueError(f"{', '.join(foreign)}: only for images; without --data the variants are compared on recall")
    return trials(partial(train_recall, output=Path(output).resolve()), variants, output=output, steps=steps, **how)


def train_recall(variant: str, seed: int, *, steps: int, output: Path, **settings: Any) -> Measured:
    """Train the network with the block of a variant, and save it."""
    torch.manual_seed(seed)
    model = timm.create_model("recall")
    if "insert" in settings:
        insert_blocks_(model, Settings(**settings), {"input_size": (3, CELLS * PIXELS, CELLS * PIXELS)})
    step = training(model, steps, seed)
    for _ in range(steps):
        step()
    save_model(model, output / f"{variant}-{seed}")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": parameters, **{f"{pairs} pairs %": accuracy(model, pairs) for pairs in PAIRS}}


def draw(model: nn.Module, folder: Path) -> None:
    """Draw what a black cell attends to, and write some canvases as a page to explore."""
    images, colours = canvases(256, 12, train=False, generator=torch.Generator().manual_seed(0))
    chosen = (colours[:, *QUERY_CELL] != NOTHING).nonzero()[:CANVASES, 0]
    images, colours = images[chosen], colours[chosen]
    query = tuple(PIXELS * (cell + 0.5) for cell in QUERY_CELL)
    with capture(model, queries=[query]) as maps, quiet_eval(model):
        predicted = model(images).argmax(1)[:, *QUERY_CELL]
    titles = [f"predicted for the marked glyph: {[*COLOURS][label]}" for label in predicted.tolist()]
    (attention,) = maps.values()
    save_figure(attention_figure(images, attention, titles=titles, width=7.5), folder / "attention.png")
    explore(model, images, folder / "explorer.html", title="Which colour has the twin of each glyph on black?")

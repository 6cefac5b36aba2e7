"""What attention is for, shown in minutes on a CPU: one task, four networks, the same recipe for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

import vision_attn.networks.models  # noqa: F401  (timm knows the network then)
from vision_attn.networks.figures import attention_figure, save_figure
from vision_attn.networks.insertion import quiet_eval
from vision_attn.networks.models.folder import load_model, save_model
from vision_attn.networks.recording import capture
from vision_attn.tools.comparison.arms import insert_arm_
from vision_attn.tools.comparison.own_loop import trials
from vision_attn.tools.comparison.recall import CELLS, COLOURS, NOTHING, PAIRS, PIXELS, accuracy, canvases, training
from vision_attn.tools.explorer import explore

ARMS: dict[str, dict[str, Any]] = {"plain": {}, "large-kernel": {}, "averaging": {}, "attention": {"qk_norm": "match"}}
#: What is drawn: canvases on which this cell asks.
ASKING, CANVASES = (4, 2), 2

TASK = """\
Glyphs on coloured cells and on black ones: which colour has the twin of each black one? The network sees every cell by
itself. A large kernel sees all cells, by weights that are the same for every canvas; averaging takes all of them alike.
Attention looks for the twin. One recipe for all; the glyphs below were never seen in training. Guessing scores 12.5 %.
"""


def run(arm: str, seed: int, steps: int, folder: str) -> dict[str, float]:
    """Train the network with the block of an arm, and keep it."""
    torch.manual_seed(seed)
    model = timm.create_model("recall")
    example = (1, 3, CELLS * PIXELS, CELLS * PIXELS)
    insert_arm_(model, arm, names="stage2", example_input=example, side=CELLS, num_heads=4, **ARMS[arm])
    step = training(model, steps, seed)
    for _ in range(steps):
        step()
    save_model(model, Path(folder) / arm)
    return {f"{pairs} pairs %": accuracy(model, pairs) for pairs in PAIRS}


def run_demo(output: str | Path, *, steps: int = 400, seed: int = 0, jobs: int | None = None) -> None:
    """Train the arms, compare them, and leave what they made in a folder."""
    print(TASK)
    trials(run, list(ARMS), seeds=(seed,), output=output, jobs=jobs, steps=steps, folder=str(output))
    draw(load_model(Path(output) / "attention"), Path(output))
    print(f"In {output} too: attention.png and explorer.html (look at them), and each trained network by its arm.")


def draw(model: nn.Module, folder: Path) -> None:
    """Where a cell looks that asks, on canvases where it does, and some canvases as a page to explore."""
    images, colours = canvases(256, 12, train=False, generator=torch.Generator().manual_seed(0))
    chosen = (colours[:, *ASKING] != NOTHING).nonzero()[:CANVASES, 0]
    images, colours = images[chosen], colours[chosen]
    query = tuple(PIXELS * (cell + 0.5) for cell in ASKING)
    with capture(model, queries=[query]) as maps, quiet_eval(model):
        answers = model(images).argmax(1)[:, *ASKING]
    titles = [f"the twin of the marked glyph: it says {[*COLOURS][answer]}" for answer in answers.tolist()]
    (attention,) = maps.values()
    save_figure(attention_figure(images, attention, titles=titles, width=7.5), folder / "attention.png")
    title = "Which colour has the twin of each glyph on black?"
    explore(model, images, folder / "explorer.html", title=title)

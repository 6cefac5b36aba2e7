"""Train a small network without and with attention on a task that requires comparing positions.

    vision-attn demo
    python my_demo.py --steps 800        # a copy of this file with your changes

Each image has 12×12 cells. Some cells contain a glyph on a color, and others the same glyphs on black, at random
positions. For each glyph on black, the network predicts the color of the cell with the same glyph; chance is 12.5 %.
All glyphs are new, so that they cannot be learned by heart. Three variants of one network are compared: without a
block, with a block that averages over all positions, and with attention.
"""

import json
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import vision_attn as va
from vision_attn import cli
from vision_attn.recipes.runs import refuse_other_folder, write_file
from vision_attn.recipes.settings import Demo

#: Number of cells along a side of an image, pixels along a side of a cell, pairs of cells, and images in a step.
CELLS, PIXELS, PAIRS, BATCH = 12, 8, 12, 24
COLORS = {
    "red": (0.9, 0.1, 0.1), "green": (0.1, 0.6, 0.1), "blue": (0.15, 0.25, 1.0), "yellow": (0.85, 0.75, 0.0),
    "purple": (0.75, 0.1, 0.8), "cyan": (0.0, 0.7, 0.75), "orange": (1.0, 0.5, 0.1), "gray": (0.5, 0.5, 0.5),
}  # fmt: skip
VARIANTS: dict[str, Any] = {"without a block": None, "averaging": {"scale": 0}, "attention": {"qk_norm": "match"}}


def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw images ``(count, 3, 96, 96)``, and the color of each cell ``(count, 12, 12)``; -100 where there is none."""
    glyphs = torch.rand(count, PAIRS, 4, 4, generator=generator).round().repeat_interleave(2, 2).repeat_interleave(2, 3)
    cells = torch.rand(count, CELLS**2, generator=generator).argsort(1)[:, : 2 * PAIRS]
    colors = torch.randint(len(COLORS), (count, PAIRS), generator=generator)
    glyph, image, images = (
        glyphs[:, :, None], torch.arange(count)[:, None], torch.zeros(count, CELLS**2, 3, PIXELS, PIXELS),
    )  # fmt: skip
    background = torch.tensor([*COLORS.values()])[colors][..., None, None]
    images[image, cells[:, :PAIRS]] = glyph + (1 - glyph) * background
    images[image, cells[:, PAIRS:]] = glyph.expand(-1, -1, 3, -1, -1)
    labels = torch.full((count, CELLS**2), -100)
    labels[image, cells[:, PAIRS:]] = colors
    images = images.view(count, CELLS, CELLS, 3, PIXELS, PIXELS).permute(0, 3, 1, 4, 2, 5)
    return images.reshape(count, 3, CELLS * PIXELS, CELLS * PIXELS), labels.view(count, CELLS, CELLS)


def build(options: dict[str, Any] | None) -> nn.Module:
    """Create a network that processes each cell separately, and insert a block after its second stage."""

    def layer(width_in: int, width: int, side: int) -> nn.Sequential:
        conv = nn.Conv2d(width_in, width, side, stride=side, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU())

    model = nn.Sequential(layer(3, 64, PIXELS), layer(64, 64, 1), layer(64, 64, 1), nn.Conv2d(64, len(COLORS), 1))
    if options is not None:
        va.insert_(model, names="1", num_heads=4, example_input=(1, 3, CELLS * PIXELS, CELLS * PIXELS), **options)
    return model


def train(name: str, model: nn.Module, steps: int, seed: int) -> float:
    """Train a network; return its accuracy in percent on images that it was not trained on."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(va.parameter_groups(model, lr=4e-3, weight_decay=0.01))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps)
    for _ in tqdm(range(steps), name, leave=False, disable=None):
        images, labels = draw(BATCH, generator)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    images, labels = draw(128, torch.Generator().manual_seed(2**31 + seed))
    with torch.inference_mode():
        hits = model.eval()(images).argmax(1)[labels >= 0] == labels[labels >= 0]
    return 100 * hits.double().mean().item()


def demo(d: Demo) -> dict[str, float]:
    """Train and compare the variants, and draw attention maps."""
    print(__doc__.partition("\n\n")[2].partition("\n\n")[2], flush=True)
    refuse_other_folder(d.output, "demo.json")
    d.output.mkdir(parents=True, exist_ok=True)
    import matplotlib.figure  # noqa: F401 - an error now if it is missing

    scores = {}
    for name, options in VARIANTS.items():
        torch.manual_seed(d.seed)
        model = build(options)
        scores[name] = train(name, model, d.steps, d.seed)
        print(f"{name:<16}{scores[name]:5.1f} %", flush=True)
    write_file(d.output / "demo.json", json.dumps(scores))
    images, labels = draw(64, torch.Generator().manual_seed(0))
    row, column = 4, 2
    chosen = (labels[:, row, column] >= 0).nonzero()[:2, 0]  # images with a glyph on black in this cell
    with va.capture(model, queries=[((row + 0.5) * PIXELS, (column + 0.5) * PIXELS)]) as maps, torch.no_grad():
        predicted = model(images[chosen]).argmax(1)[:, row, column]
    titles = [f"prediction for the framed glyph: {[*COLORS][label]}" for label in predicted]
    figure = next(iter(maps.values())).figure(images[chosen], titles=titles, width=7.5)
    figure.savefig(d.output / "attention.png", dpi=150)
    title = "What color has the cell of the same glyph?"
    page = va.explore(model, images[chosen], d.output / "explorer.html", title=title)
    print(f"Attention maps: {d.output / 'attention.png'} and {page}")
    return scores


if __name__ == "__main__":
    cli.run_script("demo", demo)

"""Recall: which colour has the twin of each glyph on black? Blocks that look it up, beside eleven that cannot.

    python examples/recall.py                                   # all blocks, five seeds, 600 steps each
    python examples/recall.py --variants averaging attention --seeds 0 1 --steps 300

The network (of `vision_attn.networks.models.recall_net`) sees each cell of a canvas alone. One block is inserted in its
middle, with about as many parameters for all but timm's three and the narrow one, and everything learns from scratch
on canvases with 4, 8, 16 or 32 pairs. Then 128 canvases for each number of pairs, of glyphs that were never seen, are
asked. `steps` is how many it takes until nine tenths of 8 pairs are answered rightly, looked at every 20 steps; all
steps where that is never.

The plan, written before the runs: attention answers at least 95 % of 32 pairs, every other block at most 35 % of 8 and
25 % of 32. The last variants are attention with other options: narrow, with heads of 4 channels instead of 16, with
layer norms or cosines of queries and keys, and with `qk_norm="match"`, which should take fewer steps.

Each run is noted in --output as it ends, and the same command goes on from there.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import vision_attn as va
from vision_attn.networks.figures import save_figure
from vision_attn.networks.insertion import quiet_eval
from vision_attn.networks.models.recall_net import RecallNet
from vision_attn.networks.recording import capture
from vision_attn.tools import cli
from vision_attn.tools.comparison.controls import ConvBlock2d, GatedConvBlock2d, LinearBlock2d, SqueezeExciteBlock2d
from vision_attn.tools.comparison.experiments import trials
from vision_attn.tools.comparison.recall import CELLS, NOTHING, PAIRS, accuracy, canvases, training


def retrieval_blocks(side):
    """The blocks that are compared on retrieval, with their options, for feature maps of side×side.

    All have about as many parameters as attention, except timm's.
    """
    full = {"kernel_size": 2 * side - 1}  # covers the feature map from every position
    return {
        "plain": (None, {}),
        "convolution": (ConvBlock2d, {}),
        "large-kernel": (ConvBlock2d, {"kernel_size": 13}),
        "map-kernel": (ConvBlock2d, full),
        "gated-convolution": (GatedConvBlock2d, full),
        "se-residual": (SqueezeExciteBlock2d, {}),
        "cbam": ("cbam", {}),
        "eca": ("eca", {}),
        "coordinate": ("coord", {}),
        "averaging": ("attention", {"scale": 0}),
        "linear": (LinearBlock2d, {}),
        "attention": ("attention", {}),
    }


def build_parser(about, variants, *, steps, output):
    """A command line with the arguments of `trials`, and `--steps`."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--variants", nargs="+", choices=variants, default=list(variants), help="variants to compare")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="seeds of each variant")
    parser.add_argument("--steps", type=int, default=steps, help="training steps")
    parser.add_argument("--jobs", type=int, help="runs at a time (default: as many as cores)")
    parser.add_argument("--backend", choices=("loky", "ray"), default="loky", help="processes, or a Ray cluster")
    parser.add_argument("--output", default=output, help="folder of the results")
    return parser


#: Further variants: attention with custom options.
ATTENTION = {
    "narrow": {"key_dim": 4, "value_dim": 4},
    "layer-norm": {"qk_norm": True},
    "cosine": {"qk_norm": "cosine"},
    "matching": {"qk_norm": "match"},
}
BLOCKS = retrieval_blocks(CELLS)
VARIANTS = (*BLOCKS, *ATTENTION)


def network(variant, seed):
    """The network with the block of a variant."""
    torch.manual_seed(seed)
    model = RecallNet()
    block, options = BLOCKS.get(variant, ("attention", ATTENTION.get(variant)))
    if block == "attention":
        options = {"num_heads": 4, **options}
    if block is not None:
        va.insert_(model, block, names="stage2", example_input=(1, 3, 96, 96), **options)
    return model


def run(variant, seed, steps):
    model = network(variant, seed)
    step = training(model, steps, seed)
    matched = steps
    for done in range(1, steps + 1):
        step()
        if done % 20 == 0 and matched == steps and accuracy(model, 8, count=32) >= 90:
            matched = done
    found = {f"{pairs} pairs %": accuracy(model, pairs) for pairs in PAIRS}
    return {"parameters": sum(p.numel() for p in model.parameters()), "steps": matched, **found}


def timed(variant):
    """One step of a variant, to be timed."""
    return training(network(variant, seed=0), steps=100, seed=0)


#: Variants that are named in the picture: colour, and by how many points their name is moved.
NAMED = {"matching": ("tab:blue", 5), "attention": ("tab:cyan", -6), "narrow": ("tab:green", 0)}
NAMED |= {"linear": ("tab:orange", 0), "cbam": ("tab:red", 5)}


def curve(found):
    """Accuracy over the number of pairs: means over seeds, with the standard deviation."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for variant, runs in found.items():
        scores = np.array([[one[f"{pairs} pairs %"] for pairs in PAIRS] for one in runs.values()])
        color, moved = NAMED.get(variant, ("silver", 0))
        spread = scores.std(0, ddof=1) if len(runs) > 1 else None
        axis.errorbar(PAIRS, scores.mean(0), spread, color=color, capsize=2, linewidth=2 if variant in NAMED else 1)
        if variant in NAMED:
            at = (PAIRS[-1], scores.mean(0)[-1])
            axis.annotate(variant, at, (8, moved), textcoords="offset points", va="center", color=color)
    axis.annotate("the others", (PAIRS[-1], 12.5), (8, -8), textcoords="offset points", va="center", color="gray")
    axis.set(xscale="log", xlim=(3.6, 56), ylim=(0, 106), xlabel="pairs on a canvas", ylabel="answered rightly, %")
    axis.set_xticks(PAIRS, map(str, PAIRS))
    axis.minorticks_off()
    axis.axhline(12.5, color="black", linewidth=0.7, linestyle=":")
    return figure


def beginnings(steps):
    """Where one cell that asks looks before training, after a hundred steps, and after all."""
    images, colours = canvases(64, 12, train=False, generator=torch.Generator().manual_seed(0))
    image = images[(colours[:, 4, 2] != NOTHING).nonzero()[0]]  # the first on which this cell asks
    figure, variants, looks = Figure((8.4, 4.4), layout="constrained"), ("attention", "matching"), (0, 100, steps)
    for variant, row in zip(variants, figure.subplots(2, 4), strict=True):
        row[0].imshow(image[0].permute(1, 2, 0).numpy())
        row[0].set_title(f"{variant}: the canvas", fontsize=9)
        model, axes = network(variant, seed=0), iter(row[1:])
        step = training(model, steps, seed=0)
        for done in range(steps + 1):
            if done in looks:
                with capture(model, queries=[(36, 20)], reduce="mean") as maps, quiet_eval(model):
                    model(image)
                axis = next(axes)
                axis.imshow(next(iter(maps.values())).weights[0, 0, 0].numpy(), extent=(0, 96, 96, 0), vmin=0)
                axis.set_title(f"after {done} steps", fontsize=9)
            if done < steps:
                step()
        for axis in row:
            axis.set_axis_off()
            axis.add_patch(Rectangle((16, 32), 8, 8, fill=False, edgecolor="tab:cyan", linewidth=2))
    return figure


def main(arguments=None):
    parser = build_parser(__doc__, VARIANTS, steps=600, output="runs/recall")
    parser.add_argument("--beginnings", metavar="FILE", help="train attention and matching, and draw where they look")
    told = vars(parser.parse_args(arguments))
    if file := told.pop("beginnings"):
        save_figure(beginnings(told["steps"]), file)
    else:
        save_figure(curve(trials(run, step=timed, **told)), Path(told["output"]) / "curve.png")


if __name__ == "__main__":
    sys.exit(cli.run_program("recall", main, interrupted="interrupted: the same command goes on from here"))

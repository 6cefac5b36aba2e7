"""Recall: which colour has the twin of each glyph on black? Blocks that look it up, beside eleven that cannot.

    python examples/recall.py                                   # all blocks, five seeds, 600 steps each
    python examples/recall.py --arms averaging attention --seeds 0 1 --steps 300

The network (`vision_attn.networks.models.recall`) sees each cell of a canvas by itself. One block is inserted in its
middle, with about as many parameters for all but timm's three and the narrow one, and everything learns from scratch
on canvases with 4, 8, 16 or 32 pairs. Then 128 canvases for each number of pairs, of glyphs that were never seen, are
asked. `steps` is how many it takes until nine tenths of 8 pairs are answered rightly, looked at every 20 steps; all
steps where that is never.

The plan, written before the runs: attention answers at least 95 % of 32 pairs, every other block at most 35 % of 8 and
25 % of 32. The last arms are attention that begins otherwise: narrow, with heads of 4 channels instead of 16, with
layer norms or cosines of queries and keys, and with `qk_norm="match"`, which should take fewer steps.

Each run is noted in --output as it ends, and the same command goes on from there.
"""

import argparse
import sys

import torch

from vision_attn.networks.models.recall import RecallNet
from vision_attn.tools import cli
from vision_attn.tools.comparison.arms import LOOKING_UP, insert_arm_
from vision_attn.tools.comparison.recall import CELLS, PAIRS, accuracy, training
from vision_attn.tools.comparison.trials import trials

#: Further arms: attention with options of its own.
ATTENTION = {
    "narrow": {"key_dim": 4, "value_dim": 4},
    "layer-norm": {"qk_norm": True},
    "cosine": {"qk_norm": "cosine"},
    "matching": {"qk_norm": "match"},
}
ARMS = (*LOOKING_UP, *ATTENTION)


def network(arm, seed):
    """The network with the block of an arm."""
    torch.manual_seed(seed)
    model = RecallNet()
    base, options = ("attention", ATTENTION[arm]) if arm in ATTENTION else (arm, {})
    insert_arm_(model, base, names="stage2", example_input=(1, 3, 96, 96), side=CELLS, num_heads=4, **options)
    return model


def run(arm, seed, steps):
    model = network(arm, seed)
    step = training(model, steps, seed)
    matched = steps
    for done in range(1, steps + 1):
        step()
        if done % 20 == 0 and matched == steps and accuracy(model, 8, count=32) >= 90:
            matched = done
    found = {f"{pairs} pairs %": accuracy(model, pairs) for pairs in PAIRS}
    return {"parameters": sum(p.numel() for p in model.parameters()), "steps": matched, **found}


def timed(arm):
    """One step of an arm, to be timed."""
    return training(network(arm, seed=0), steps=100, seed=0)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, help="some alone")
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2, 3, 4), help="of each arm")
    parser.add_argument("--steps", type=int, default=600, help="of training")
    parser.add_argument("--jobs", type=int, help="runs side by side; as many as cores by default")
    parser.add_argument("--output", default="runs/recall", help="folder of the results")
    told = parser.parse_args(arguments)
    trials(run, told.arms, seeds=told.seeds, output=told.output, jobs=told.jobs, step=timed, steps=told.steps)


if __name__ == "__main__":
    sys.exit(cli.run_program("recall", main, interrupted="interrupted: the same command goes on from here"))

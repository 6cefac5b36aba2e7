"""Shredded photographs: find the strip that follows each strip, and draw it.

    python examples/experiments/shredded.py --data cifar100  # with train/CLASS/IMAGE and test/CLASS/IMAGE

Sixteen photographs of CIFAR-100 (32×32 pixels) are cut into four vertical strips each, and the 64 strips are shuffled.
Two columns of pixels are lost at each edge of a strip, so four are missing between neighbors. A convolutional network
turns each strip into one position of an 8×8 feature map. One block and a decoder of each position follow, which draws
the strip on the right. The last strip of a photograph has none and is not scored.

A value must be found at an unknown position and copied, and the match is not symmetric: the strip on the left fits as
well as the strip on the right. `found %` is the percentage of drawn strips that are closer to the next strip of their
photograph than to any of the other 62, and dB the peak signal-to-noise ratio of the drawn strips. Two variants without
training compare the nearest columns of pixels: `borders` copies the strip whose left column is closest to the right
column of the query, and `soft-borders` averages all strips, weighted by a softmax over squared distances, with the
scale that finds most strips in training photographs. The cost volume uses the same features for queries and keys, as
is usual; with separate features, it would be attention. It does not compare a strip with itself.

The plan, written before the runs: eight trained variants, five seeds, 3,000 steps, test photographs. The learning rate
of each variant was selected from 0.0015, 0.003, 0.006 and 0.012 by 1,000 steps with seed 100, on 5,000 training
photographs that are held out for it (`--split val`). In these runs, `matching` found 33 % of the strips, attention 30
%, a cost volume 28 %, and every other block, like none, between 21 and 22 %. The border columns find 39 % of the test
strips. After 3,000 steps, `matching` is expected to find more strips than every variant that is not attention, and at
least five points more than every such block that is trained.

The result: both predictions hold. `matching` finds 49 % of the strips, attention 46 %, the cost volume 36 %, linear
attention 26 %, and the other blocks 23 to 24 %.
"""

import sys
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from experiments import build_parser, trials
from PIL import Image
from recall import retrieval_blocks
from torch import nn

import vision_attn as va
from vision_attn import cli
from vision_attn.networks.inspection.network import quiet_eval

PHOTOGRAPHS, STRIPS, SIDE, LOST, CELLS, WIDTH = 16, 4, 32, 2, 8, 128
STRIP = SIDE // STRIPS - 2 * LOST  # columns that remain
BATCH, EVALUATED, HELD_OUT = 8, 256, 10  # canvases of a step and of an evaluation; one photograph in ten is held out
UNTRAINED, SCALES = ("borders", "soft-borders"), (3.0, 10.0, 30.0, 100.0)
BLOCKS = retrieval_blocks(CELLS)
COMPARED = ("plain", "map-kernel", "gated-convolution", "averaging", "linear", "cost-volume", "attention", "matching")
VARIANTS = (*UNTRAINED, *COMPARED)
#: the selected learning rates
LEARNING_RATES = dict.fromkeys(VARIANTS, 0.012) | dict.fromkeys(("cost-volume", "attention"), 0.006)


@cache
def load_photographs(folder, split):
    """Return the photographs of a split as bytes, ``(n, 3, 32, 32)``."""
    paths = sorted(Path(folder, "test" if split == "test" else "train").glob("*/*"))
    if not paths:
        raise ValueError(
            f"--data: no photographs found, expected {folder}/train/CLASS/IMAGE and {folder}/test/CLASS/IMAGE"
        )
    kept = [path for n, path in enumerate(paths) if split == "test" or (n % HELD_OUT == 0) == (split == "val")]
    pixels = np.stack([np.asarray(Image.open(path).convert("RGB")) for path in kept])
    return torch.from_numpy(pixels).movedim(3, 1).contiguous()


def canvases(count, pool, generator):
    """Draw shuffled strips, ``(count, 64, 3, 32, 4)``, and the index of each next strip, -1 for a last strip."""
    chosen = torch.stack([torch.randperm(len(pool), generator=generator)[:PHOTOGRAPHS] for _ in range(count)])
    strips = pool[chosen].unflatten(4, (STRIPS, -1))[..., LOST:-LOST].movedim(4, 2).flatten(1, 2) / 255
    order = torch.rand(strips.shape[:2], generator=generator).argsort(1)  # strip at each position
    following = order.argsort(1).gather(1, (order + 1) % order.shape[1])
    following[order % STRIPS == STRIPS - 1] = -1
    return strips[torch.arange(count)[:, None], order], following


class CostVolume(nn.Module):
    """Average values by a softmax over cosines of the same features, with a learned temperature."""

    def __init__(self):
        super().__init__()
        self.features, self.value, self.proj = (nn.Conv2d(WIDTH, WIDTH, 1) for _ in range(3))
        self.logit_scale = nn.Parameter(torch.tensor(14.0).log())

    def forward(self, x):
        features = F.normalize(self.features(x).flatten(2), dim=1)
        logits = self.logit_scale.exp() * features.mT @ features
        weights = logits.masked_fill(torch.eye(len(logits[0]), dtype=torch.bool), -torch.inf).softmax(2)
        return x + self.proj((self.value(x).flatten(2) @ weights.mT).view_as(x))


class Drawer(nn.Module):
    """Draw the next strip of each strip, ``(b, 64, 3, 32, 4)``."""

    def __init__(self, variant):
        super().__init__()
        layers = []
        for in_channels, channels, stride in ((3, 32, (2, 1)), (32, 64, 2), (64, 64, (2, 1))):
            conv = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
            layers += [conv, nn.BatchNorm2d(channels), nn.ReLU()]
        flat = nn.Conv2d(64, WIDTH, (SIDE // 8, STRIP // 2), bias=False)
        self.encode = nn.Sequential(*layers, flat, nn.BatchNorm2d(WIDTH)).to(memory_format=torch.channels_last)
        self.block = nn.Sequential(CostVolume() if variant == "cost-volume" else nn.Identity())
        hidden = nn.Conv2d(WIDTH, WIDTH, 1), nn.BatchNorm2d(WIDTH), nn.ReLU()
        self.decode = nn.Sequential(*hidden, nn.Conv2d(WIDTH, 3 * SIDE * STRIP, 1))
        block, options = BLOCKS.get(variant, ("attention", {"qk_norm": "match"}))
        if block is not None and variant != "cost-volume":
            options = {"num_heads": 4, **options} if block == "attention" else options
            va.insert_(self.block, block, names="0", example_input=(1, WIDTH, CELLS, CELLS), **options)

    def forward(self, strips):
        features = self.encode(strips.flatten(0, 1) - 0.5).view(len(strips), CELLS, CELLS, WIDTH).movedim(3, 1)
        return self.decode(self.block(features)).flatten(2).mT.unflatten(2, strips.shape[2:]) + 0.5


def copy_by_borders(strips, scale=None):
    """Return the strip with the closest border of each strip, or the average weighted by a softmax."""
    right, left = strips[..., -1].flatten(2), strips[..., 0].flatten(2)
    distances = torch.cdist(right, left).square()
    distances.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    if scale is None:
        return take(strips, distances.argmin(2))
    return ((-scale * distances).softmax(2) @ strips.flatten(2)).view_as(strips)


def take(strips, index):
    return strips[torch.arange(len(strips))[:, None], index]


def train(variant, seed, steps, learning_rate, pool):
    torch.manual_seed(seed)
    model, generator = Drawer(variant), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(va.parameter_groups(model, learning_rate, weight_decay=0.01))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, max(steps, 20), pct_start=0.1)
    for _ in range(steps):
        strips, following = canvases(BATCH, pool, generator)
        with torch.autocast("cpu", torch.bfloat16):
            drawn = model(strips).float()
        loss = F.mse_loss(drawn[following >= 0], take(strips, following)[following >= 0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model


def nearest(drawn, strips):
    """Return the index of the strip that is closest to each drawn strip, and is not the strip that was given."""
    distances = torch.cdist(drawn.flatten(2), strips.flatten(2))
    distances.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    return distances.argmin(2)


@torch.no_grad()
def evaluate(draw, pool, seed):
    """Measure on the same canvases for all variants."""
    generator, found, errors = torch.Generator().manual_seed(seed), [], []
    for _ in range(EVALUATED // BATCH):
        strips, following = canvases(BATCH, pool, generator)
        drawn, scored = draw(strips), following >= 0
        found.append((nearest(drawn, strips) == following)[scored])
        errors.append((drawn - take(strips, following)).square().mean((2, 3, 4))[scored])
    error = torch.cat(errors).double().mean()
    return {"found %": 100 * torch.cat(found).double().mean().item(), "dB": -10 * error.log10().item()}


def run(variant, seed, steps, data, split, learning_rate):
    pool, parameters = load_photographs(data, split), 0
    if variant not in UNTRAINED:
        rate = learning_rate or LEARNING_RATES[variant]
        model = train(variant, seed, steps, rate, load_photographs(data, "train"))
        parameters = sum(p.numel() for p in model.parameters())
        with quiet_eval(model):
            return {"parameters": parameters, **evaluate(model, pool, seed)}
    candidates = [copy_by_borders] if variant == "borders" else [partial(copy_by_borders, scale=x) for x in SCALES]
    training = load_photographs(data, "train")
    return {
        "parameters": parameters,
        **evaluate(max(candidates, key=lambda x: evaluate(x, training, seed)["found %"]), pool, seed),
    }


def main(arguments=None):
    parser = build_parser(__doc__, VARIANTS, steps=3000, output="runs/shredded")
    parser.add_argument(
        "--data", required=True, help="folder of CIFAR-100, with train/CLASS/IMAGE and test/CLASS/IMAGE"
    )
    parser.add_argument("--split", choices=("val", "test"), default="test", help="photographs to evaluate on")
    parser.add_argument(
        "--learning-rate", type=float, help="learning rate of all variants (default: the selected rates)"
    )
    trials(run, **vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(cli.run_program("shredded", main, interrupted="interrupted; run the same command to resume"))

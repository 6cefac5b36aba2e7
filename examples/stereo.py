"""Stereo: how far is each pixel of the left view shifted in the right one? Attention along rows, and a cost volume.

    python examples/stereo.py                              # five variants, five seeds, 600 steps of 8 pairs each
    python examples/stereo.py --variants averaging matching --seeds 0 --steps 200

A small network learns from synthetic pairs: planes and shapes with the texture of photographs, which ship in
scikit-image. It is measured on 64 others, and on a real pair, the motorcycle of Middlebury (Scharstein et al., GCPR
2014), which ships there too, at a quarter of its size: mean error in pixels, and how many are off by three at most.

Both views go through the same convolutions to a quarter of their size. Then each position of a row looks for itself
among ten positions of the same row in the other view, and the same convolutions make a disparity of the left map, of
the offset that it expects and of the largest weight. Variants differ by what gives the weights: attention along rows,
matching (`qk_norm="match"`) or as it begins by default; averaging; or a cost volume, products of normalised features
shift by shift, which is nearly the same operator: what attention adds is a projection. In the first variant two 3×3
convolutions see both maps, and give two such numbers.

The plan, written before the runs: five seeds; attention that matches has at most 1.4 px on the real pair. Each run is
noted in --output as it ends, and the same command goes on from there. Needs `pip install scikit-image`.
"""

import sys
from functools import cache

import numpy as np
import skimage.data
import torch
import torch.nn.functional as F
from recall import build_parser
from torch import nn

import vision_attn as va
from vision_attn.networks.insertion import quiet_eval
from vision_attn.tools import cli
from vision_attn.tools.comparison.experiments import trials

VARIANTS = ("two-convolutions", "averaging", "attention", "cost-volume", "matching")
PHOTOGRAPHS = ("astronaut", "brick", "chelsea", "coffee", "grass", "gravel", "rocket", "retina", "hubble_deep_field",
               "immunohistochemistry")  # fmt: skip
HEIGHT, WIDTH, LARGEST = 64, 160, 40  # of a pair, and of its disparities, in pixels
BATCH, TESTED, CELL, CHANNELS = 8, 64, 4, 48
SHIFTS = LARGEST // CELL


@cache
def photographs():
    """Each with at least 240 pixels along a side, and 512 at most where that allows, ``(3, h, w)``."""
    found = []
    for name in PHOTOGRAPHS:
        image = torch.from_numpy(np.ascontiguousarray(getattr(skimage.data, name)())).float() / 255
        image = image.expand(3, *image.shape) if image.dim() == 2 else image[..., :3].movedim(2, 0)
        factor = max(241 / min(image.shape[1:]), min(1, 512 / max(image.shape[1:])))
        found.append(F.interpolate(image[None], scale_factor=factor, mode="bilinear", antialias=True)[0])
    return found


def pair(draw):
    """Left and right, ``(3, h, w)``, and the disparity of the left: a plane with two to five shapes before it."""

    def number(low, high):
        return low + (high - low) * torch.rand((), generator=draw).item()

    y, x = torch.meshgrid(torch.arange(HEIGHT).float(), torch.arange(WIDTH).float(), indexing="ij")
    left, right, disparity = torch.zeros(3, HEIGHT, WIDTH), torch.zeros(3, HEIGHT, WIDTH), torch.zeros(HEIGHT, WIDTH)
    depths = sorted(number(0, LARGEST - 4) for _ in range(int(number(2, 6))))
    back = number(0, 10)
    for layer, depth in enumerate([back, *(max(back, depth) for depth in depths)]):
        slope = number(-0.03, 0.03) if layer == 0 else number(-0.05, 0.05)
        middle, radius = (number(0, HEIGHT), number(0, WIDTH)), (number(6, 26), number(6, 46))
        box = number(0, 1) < 0.5

        def inside(x, y, layer=layer, middle=middle, radius=radius, box=box):
            across, down = (x - middle[1]) / radius[1], (y - middle[0]) / radius[0]
            return layer == 0 if not layer else (across.abs().maximum(down.abs()) if box else across**2 + down**2) < 1

        image = photographs()[int(number(0, len(PHOTOGRAPHS)))]
        top, start = int(number(0, image.shape[1] - HEIGHT)), int(number(0, image.shape[2] - WIDTH - 2 * LARGEST))
        texture = image[:, top : top + HEIGHT, start : start + WIDTH + 2 * LARGEST]
        seen = torch.as_tensor(inside(x, y)).expand_as(x)
        left = torch.where(seen, texture[..., LARGEST : LARGEST + WIDTH], left)
        disparity = torch.where(seen, (depth + slope * (x - WIDTH / 2)).clamp(0, LARGEST - 1), disparity)
        source = (x + depth - slope * WIDTH / 2) / (1 - slope)  # where in the left view the right one looks
        source = torch.where(depth + slope * (source - WIDTH / 2) < 0, x, source)
        grid = torch.stack([(source + LARGEST) / (texture.shape[2] - 1) * 2 - 1, y / (HEIGHT - 1) * 2 - 1], 2)
        warped = F.grid_sample(texture[None], grid[None], align_corners=True)[0]
        right = torch.where(torch.as_tensor(inside(source, y)).expand_as(x), warped, right)
    noisy = (one * number(0.8, 1.2) + 0.02 * torch.randn(one.shape, generator=draw) for one in (left, right))
    return *(one.clamp(0, 1) for one in noisy), disparity


def pairs(count, draw):
    return tuple(map(torch.stack, zip(*(pair(draw) for _ in range(count)), strict=True)))


@cache
def motorcycle():
    """The real pair at a quarter of its size, its disparity in pixels of that, and where it is known."""
    left, right, truth = (torch.from_numpy(np.ascontiguousarray(one)) for one in skimage.data.stereo_motorcycle())
    views = [F.interpolate(one.movedim(2, 0)[None] / 255, scale_factor=0.25, antialias=True, mode="bilinear")
             for one in (left, right)]  # fmt: skip
    high, wide = (length // CELL * CELL for length in views[0].shape[2:])
    truth = F.interpolate(truth.nan_to_num(posinf=-1e6)[None, None].float(), scale_factor=0.25)[0, :, :high, :wide] / 4
    return *(one[..., :high, :wide] for one in views), truth, (truth > 0) & (truth < LARGEST)


def convolution(in_channels, channels, kernel=3, stride=1):
    conv = nn.Conv2d(in_channels, channels, kernel, stride, kernel // 2)
    return nn.Sequential(conv, nn.BatchNorm2d(channels), nn.ReLU())


class Stereo(nn.Module):
    """The disparity of the left view, ``(b, h, w)``, from both."""

    def __init__(self, variant):
        super().__init__()
        self.variant, last = variant, nn.Conv2d(CHANNELS, CHANNELS, 3, 1, 1)
        self.features = nn.Sequential(
            convolution(3, 32, 3, 2), convolution(32, CHANNELS, 3, 2), convolution(CHANNELS, CHANNELS), last
        )
        self.temperature = nn.Parameter(torch.tensor(10.0).log())
        if variant == "two-convolutions":
            self.both = nn.Sequential(convolution(2 * CHANNELS, CHANNELS), convolution(CHANNELS, 2))
        elif variant != "cost-volume":
            options = {"averaging": {"scale": 0.0}, "attention": {}, "matching": {"qk_norm": "match"}}[variant]
            # Rows as maps of one axis. Its weights are used, and not what it makes of values.
            self.attend = va.Attention1d(CHANNELS, 1, value_dim=1, out_channels=1, **options)
        self.read = nn.Sequential(convolution(CHANNELS + 2, 64), convolution(64, 64), nn.Conv2d(64, 1, 3, 1, 1))

    def weights(self, left, right):
        """Of each position for the positions of its row in the other view, ``(b, h, w, w)``."""
        width = left.shape[3]
        shift = torch.arange(width)[:, None] - torch.arange(width)
        near = (shift >= 0) & (shift < SHIFTS)
        if self.variant == "cost-volume":
            one, other = (F.normalize(F.instance_norm(y), dim=1) for y in (left, right))
            logits = self.temperature.exp() * torch.einsum("bchi,bchj->bhij", one, other)
            return logits.masked_fill(~near, -torch.inf).softmax(3)
        rows = [y.transpose(1, 2).flatten(0, 1) for y in (left, right)]
        return self.attend.attention_weights(rows[0], near, context=rows[1])[:, 0].unflatten(0, left.shape[::2][:2])

    def forward(self, left, right):
        left, right = (self.features((y - 0.45) / 0.25) for y in (left, right))
        if self.variant == "two-convolutions":
            offset, sure = self.both(torch.cat([left, right], 1)).split(1, dim=1)
        else:
            weights, column = self.weights(left, right), torch.arange(left.shape[3]).float()
            offset, sure = (column - weights @ column)[:, None], weights.amax(3)[:, None]
        y = 8 * self.read(torch.cat([left, offset / 5 - 1, sure], 1)) + CELL * offset
        return F.interpolate(y, scale_factor=CELL, mode="bilinear", align_corners=False)[:, 0]


def training(variant, seed, steps):
    torch.manual_seed(seed)
    model, draw = Stereo(variant), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps)

    def step():
        left, right, disparity = pairs(BATCH, draw)
        loss = F.smooth_l1_loss(model(left, right), disparity)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()

    return model, step


def run(variant, seed, steps):
    model, step = training(variant, seed, steps)
    for _ in range(steps):
        step()
    left, right, truth = pairs(TESTED, torch.Generator().manual_seed(999))
    views, real, known = motorcycle()[:2], *motorcycle()[2:]
    with quiet_eval(model):
        drawn, error = (model(left, right) - truth).abs(), (model(*views) - real).abs()[known]
    found = {
        "synthetic px": drawn.mean(),
        "real px": error.mean(),
        "real within 3 px %": 100 * (error <= 3).float().mean(),
    }
    return {"parameters": sum(p.numel() for p in model.parameters()), **{k: v.item() for k, v in found.items()}}


def timed(variant):
    """One step of a variant, to be timed."""
    return training(variant, seed=0, steps=100)[1]


def main(arguments=None):
    parser = build_parser(__doc__, VARIANTS, steps=600, output="runs/stereo")
    trials(run, step=timed, **vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(cli.run_program("stereo", main, interrupted="interrupted: the same command goes on from here"))

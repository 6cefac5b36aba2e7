"""Reference: grey photographs beside the same ones in colour. Which block gives the grey ones their colours?

    python examples/colour_by_reference.py                              # thirteen blocks, five seeds, 800 steps
    python examples/colour_by_reference.py --picture colours.png        # averaging and matching alone, and no table

A canvas has four photographs of 24×24 pixels in grey on its left. On its right are the same ones in colour, in another
order, at random places, half of them flipped, at three quarters of their size and with noise of σ 0.03. They are crops
of photographs in scikit-image; those of the test, of three in scikit-learn and matplotlib. Crops with hardly any colour
are left out. In training the colours of each crop are turned by a random angle, so that nobody learns by heart that
skies are blue; in the test they are as they are.

The network has 3×3 convolutions for the brightness and patches of 4×4 for the colour, one block on both, and a decoder.
The plan: thirteen blocks, five seeds, 800 steps; dB of the two colours, from the mean square over the left of 256
canvases. Attention is to be better than every other block by 4 dB. Runs are noted in --output as they end, and the same
command goes on from there. It needs `pip install scikit-image`.
"""

import functools
import math
import sys

import torch
import torch.nn.functional as F
from matplotlib.cbook import get_sample_data
from matplotlib.image import imread
from recall import build_parser, retrieval_blocks
from sklearn.datasets import load_sample_image
from torch import nn

import vision_attn as va
from vision_attn.networks.figures import Figure, save_figure
from vision_attn.tools import cli
from vision_attn.tools.comparison.experiments import trials

TRAINING = ("astronaut", "chelsea", "coffee", "rocket", "stereo_motorcycle", "retina", "immunohistochemistry")
HELD_OUT = ("china.jpg", "flower.jpg", "grace_hopper.jpg")
#: brightness and two colour channels, as JPEG has them, of red, green and blue
YCBCR = torch.tensor([[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]])
#: pixels along a side of a photograph, of its smaller twin, of the half of a canvas, and of a cell of the map
SIDE, SMALL, HALF, CELL = 24, 18, 48, 4
NOISE, HARDLY_ANY, BATCH, CANVASES, RATE = 0.03, 0.04, 12, 256, 6e-3
BLOCKS = retrieval_blocks(2 * HALF // CELL)
#: The last is attention with `qk_norm="match"`, the one before it has layer norms of queries and keys.
VARIANTS = (*BLOCKS, "matching")


def photograph(name):
    """One that ships with a library, as an array ``(h, w, 3)`` of 0…255."""
    if name == "grace_hopper.jpg":
        return imread(get_sample_data(name, asfileobj=False))
    if name in HELD_OUT:
        return load_sample_image(name)
    import skimage.data

    found = getattr(skimage.data, name)()
    return found[0] if isinstance(found, tuple) else found  # of the two of a stereo pair


@functools.cache
def photographs(train):
    """All at a half and at a quarter of their size, brightness and two colours, ``(3, h, w)``."""
    images = [torch.from_numpy(photograph(name).copy()) / 255 for name in (TRAINING if train else HELD_OUT)]
    images = [(image @ YCBCR.T).permute(2, 0, 1)[None] for image in images]
    return [F.interpolate(image, scale_factor=1 / by, mode="area")[0] for image in images for by in (2, 4)]


def crops(count, train, draw):
    """Squares of photographs, ``(count, 3, 24, 24)``."""
    found = []
    while len(found) < count:
        image = photographs(train)[torch.randint(len(photographs(train)), (), generator=draw)]
        top, start = (torch.rand(2, generator=draw) * (torch.tensor(image.shape[1:]) - SIDE + 1)).long().tolist()
        crop = image[:, top : top + SIDE, start : start + SIDE]
        if crop[1:].square().mean().sqrt() > HARDLY_ANY:
            found.append(crop)
    images = torch.stack(found)
    if train:
        turn = torch.exp(2j * math.pi * torch.rand(count, 1, 1, generator=draw))
        turned = turn * torch.complex(images[:, 1], images[:, 2])
        images[:, 1], images[:, 2] = turned.real, turned.imag
    return images


def canvases(count, train, draw):
    """Canvases as they are given, ``(count, 3, 48, 96)``, and their left half in colour."""
    images, room = crops(4 * count, train, draw), SIDE - SMALL
    order = torch.rand(count, 4, generator=draw).argsort(1) + 4 * torch.arange(count)[:, None]
    twins = F.interpolate(images[order.flatten()], size=(SMALL, SMALL), mode="area")
    twins = torch.where(torch.rand(4 * count, 1, 1, 1, generator=draw) < 0.5, twins.flip(3), twins)
    moved = torch.randint(room + 1, (4 * count, 2), generator=draw).tolist()
    twins = torch.stack([F.pad(twin, (x, room - x, y, room - y)) for twin, (x, y) in zip(twins, moved, strict=True)])
    left, right = (
        half.view(count, 2, 2, 3, SIDE, SIDE).permute(0, 3, 1, 4, 2, 5).reshape(count, 3, HALF, HALF)
        for half in (images, twins)
    )
    grey = left * torch.tensor([1.0, 0.0, 0.0]).view(3, 1, 1)
    return torch.cat([grey, right + NOISE * torch.randn(right.shape, generator=draw)], 3), left


class Colourer(nn.Module):
    """The two colour channels of the left half of a canvas."""

    def __init__(self):
        super().__init__()
        layers = []
        for inside, channels, stride in ((1, 28, 2), (28, 56, 2), (56, 56, 1), (56, 56, 1), (64, 64, 1)):
            conv = nn.Conv2d(inside, channels, 3, stride, padding=1, bias=False)
            layers += [conv, nn.BatchNorm2d(channels), nn.ReLU()]
        self.brightness = nn.Sequential(*layers[:11])  # its last map is around zero, as cells are to be compared
        self.colour = nn.Sequential(nn.Conv2d(2, 8, CELL, CELL, bias=False), nn.BatchNorm2d(8))
        self.both = nn.Identity()
        self.decoder = nn.Sequential(*layers[12:], nn.Conv2d(64, 2 * CELL**2, 1), nn.PixelShuffle(CELL))

    def forward(self, x):
        y = self.both(torch.cat([self.brightness(x[:, :1]), self.colour(x[:, 1:])], 1))
        return self.decoder(y[..., : y.shape[3] // 2])


def training(variant, seed, steps):
    """A network with the block of a variant, and what makes a step of its training."""
    torch.manual_seed(seed)
    model, draw = Colourer(), torch.Generator().manual_seed(seed)
    block, options = BLOCKS.get(variant, ("attention", {"qk_norm": "match"}))
    if block == "attention":
        options = {"num_heads": 4, "key_dim": 32, "qk_norm": True, **options}
    if block is not None:
        va.insert_(model, block, names="both", example_input=(1, 3, HALF, 2 * HALF), **options)
    optimizer = torch.optim.AdamW(va.parameter_groups(model, RATE, weight_decay=0.01))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, max(steps, 20), pct_start=0.1)

    def step():
        given, left = canvases(BATCH, True, draw)
        loss = F.mse_loss(model(given), left[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()

    return model, step


def trained(variant, seed, steps):
    model, step = training(variant, seed, steps)
    for _ in range(steps):
        step()
    return model.eval()


@torch.no_grad()
def decibels(model):
    """Of the two colour channels, on canvases that are the same for all."""
    given, left = canvases(CANVASES, False, torch.Generator().manual_seed(0))
    return -10 * F.mse_loss(torch.cat([model(some) for some in given.split(32)]), left[:, 1:]).log10().item()


def run(variant, seed, steps):
    model = trained(variant, seed, steps)
    return {"parameters": sum(p.numel() for p in model.parameters()), "dB": decibels(model)}


def timed(variant):
    return training(variant, seed=0, steps=100)[1]


def picture(file, steps):
    """Three canvases: as given, coloured by two blocks, true, and lit where the most colourful cell looks."""
    models = {variant: trained(variant, 0, steps) for variant in ("averaging", "matching")}
    titles = [f"{variant}, {decibels(model):.1f} dB" for variant, model in models.items()]
    titles, figure = ["given", *titles, "true", "where the marked cell looks"], Figure((10, 4.7), layout="constrained")
    axes = figure.subplots(3, 5, width_ratios=(2, 1, 1, 1, 2))
    for row, given, left in zip(axes, *canvases(3, False, torch.Generator().manual_seed(1)), strict=True):
        cell = F.avg_pool2d(left[1:].square().sum(0, keepdim=True), CELL).argmax().item()
        y, x = (CELL * at + CELL // 2 for at in divmod(cell, HALF // CELL))
        with torch.no_grad(), va.capture(models["matching"], queries=[(y, x)], reduce="mean") as maps:
            coloured = [torch.cat([left[:1], model(given[None])[0]]) for model in models.values()]
        rgb = [torch.einsum("oc,chw->hwo", YCBCR.inverse(), image) for image in (given, *coloured, left, given)]
        light = F.interpolate(maps["both.inserted.attn"].weights[0], scale_factor=CELL, mode="bilinear")[0, 0]
        rgb[4] *= 0.15 + (light / light.max())[..., None]
        for axis, image, title in zip(row, rgb, titles, strict=True):
            axis.imshow(image.clamp(0, 1).numpy(), extent=(0, image.shape[1], HALF, 0))
            axis.set_axis_off()
            axis.set_title(title, fontsize=9)
        for axis in row[[0, 4]]:
            axis.plot(x, y, "s", markersize=7, markerfacecolor="none", markeredgecolor="cyan")
        titles = [""] * 5
    save_figure(figure, file)


def main(arguments=None):
    parser = build_parser(__doc__, VARIANTS, steps=800, output="runs/reference")
    parser.add_argument("--picture", metavar="FILE", help="train matching and averaging, and draw what they make")
    told = vars(parser.parse_args(arguments))
    if file := told.pop("picture"):
        picture(file, told["steps"])
    else:
        trials(run, step=timed, **told)


if __name__ == "__main__":
    sys.exit(cli.run_program("reference", main, interrupted="interrupted: the same command goes on from here"))

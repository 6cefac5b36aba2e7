"""Draw an example of shredded photographs and of tiles of photographs, from photographs that may be published.

    python examples/experiments/pieces_picture.py --output examples/experiments/results/pieces.png

The photographs are Chelsea (CC0, Stefan van der Walt), coffee (CC0, Pikolo Espresso), Eileen Collins (public domain,
NASA) and a rocket (CC0, SpaceX) of scikit-image, reduced to 32×32 pixels as in the tasks.

Requirements: `pip install ".[viz]" scikit-image`.
"""

import argparse
import sys

import numpy as np
import shredded
import tiles
import torch
from matplotlib.figure import Figure
from PIL import Image, ImageOps

from vision_attn import cli
from vision_attn.networks.capture.figures import save_figure

NAMES = ("chelsea", "coffee", "astronaut", "rocket")


def photographs():
    from skimage import data

    images = [ImageOps.fit(Image.fromarray(getattr(data, name)()), (32, 32), Image.Resampling.BOX) for name in NAMES]
    return torch.from_numpy(np.stack([np.asarray(image) for image in images])).movedim(3, 1)


def montage(pieces, columns, gap=1):
    """Arrange pieces in rows on white, ``(n, 3, h, w) -> (…, …, 3)``."""
    padded = torch.nn.functional.pad(pieces, (gap, gap, gap, gap), value=1.0)
    rows = padded.unflatten(0, (-1, columns))  # row, column, 3, h, w
    return rows.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", required=True, help="file of the figure")
    output, pool = parser.parse_args(arguments).output, photographs()
    generator = torch.Generator().manual_seed(1)
    strips = pool.unflatten(3, (shredded.STRIPS, -1))[..., shredded.LOST : -shredded.LOST].movedim(3, 1).flatten(0, 1)
    cut = tiles.cut(pool).flatten(0, 1)
    panels = {
        "photographs": montage(pool / 255, 2),
        "shredded: 4 of 16 photographs": montage(strips[torch.randperm(16, generator=generator)] / 255, 8),
        "tiles: find four neighbors of each": montage(cut[torch.randperm(64, generator=generator)], 8),
    }
    figure = Figure(figsize=(10, 3.4), layout="compressed")
    for axes, (title, panel) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        axes.imshow(panel, interpolation="nearest")
        axes.set_title(title, fontsize=11)
        axes.set_axis_off()
    save_figure(figure, output)


if __name__ == "__main__":
    sys.exit(cli.run_program("pieces_picture", main))

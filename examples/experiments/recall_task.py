"""Recall, a synthetic task and its network: predict the color of the cell with the same glyph as a black cell.

A canvas contains several pairs of cells with the same glyph, one cell in color and the other black, at random
positions. The color can only be read at the matching cell, so a network must compare the content of cells. A fixed
kernel or a global summary of the canvas is not sufficient.

The glyphs are the digits of scikit-learn (1,797 images of 8×8; E. Alpaydin, C. Kaynak, UCI Machine Learning Repository,
https://doi.org/10.24432/C50P49, CC BY 4.0). Glyphs for evaluation are not used in training.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.models import generate_default_cfgs
from torch import Tensor, nn

import vision_attn as va
from vision_attn.networks.inspection.network import quiet_eval
from vision_attn.networks.models.registry import StagedNetwork, register_network

__all__ = ["RecallNet"]  # timm adds the names of the networks

#: number of cells along a side of a canvas, and of pixels along a side of a cell
CELLS, PIXELS = 12, 8
#: classes with their RGB values
COLORS = {
    "red": (0.9, 0.1, 0.1), "green": (0.1, 0.6, 0.1), "blue": (0.15, 0.25, 1.0), "yellow": (0.85, 0.75, 0.0),
    "purple": (0.75, 0.1, 0.8), "cyan": (0.0, 0.7, 0.75), "orange": (1.0, 0.5, 0.1), "gray": (0.5, 0.5, 0.5),
}  # fmt: skip
#: numbers of pairs on a canvas
PAIRS = (4, 8, 16, 32)
#: number of canvases in a training step and in an evaluation
BATCH, EVALUATED = 24, 128
#: number of glyphs for training; the others are held out
TRAINING_GLYPHS = 1_400
#: label of all cells except the black cells of a pair; ``torch.nn.functional.cross_entropy`` ignores it
NOTHING = -100


@cache
def glyphs() -> Tensor:
    """Return all glyphs in 0…1, ``(1797, 8, 8)``, in a fixed random order."""
    from sklearn.datasets import load_digits

    images = torch.from_numpy(load_digits().images).float() / 16
    return images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]


def canvases(count: int, pairs: int, *, train: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw canvases with pairs of cells that contain the same glyph, one in color and one black, at random positions.

    Returns:
        Images ``(count, 3, 96, 96)`` in 0…1, and the class of each cell, ``(count, 12, 12)``.

    >>> images, colors = canvases(2, 8, train=True, generator=torch.Generator())
    >>> images.shape, colors.shape, int((colors != NOTHING).sum())
    (torch.Size([2, 3, 96, 96]), torch.Size([2, 12, 12]), 16)
    """
    pool = glyphs()[:TRAINING_GLYPHS] if train else glyphs()[TRAINING_GLYPHS:]
    chosen = torch.rand(count, len(pool), generator=generator).argsort(1)[:, :pairs]
    cells = torch.rand(count, CELLS**2, generator=generator).argsort(1)
    references, queries = cells[:, :pairs], cells[:, pairs : 2 * pairs]
    colors = torch.randint(len(COLORS), (count, pairs), generator=generator)
    glyph, canvas = pool[chosen][:, :, None], torch.arange(count)[:, None]

    drawn = torch.zeros(count, CELLS**2, 3, PIXELS, PIXELS)
    drawn[canvas, references] = glyph + (1 - glyph) * torch.tensor([*COLORS.values()])[colors][..., None, None]
    drawn[canvas, queries] = glyph.expand(-1, -1, 3, -1, -1)
    labels = torch.full((count, CELLS**2), NOTHING)
    labels[canvas, queries] = colors
    images = drawn.view(count, CELLS, CELLS, 3, PIXELS, PIXELS).permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
    return images, labels.view(count, CELLS, CELLS)


def training(model: nn.Module, steps: int, seed: int) -> Callable[[], None]:
    """Return a function that runs one of ``steps`` training steps. The seed determines the canvases."""
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(va.parameter_groups(model, 2e-3, weight_decay=0.01))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps)

    def step() -> None:
        pairs = PAIRS[int(torch.randint(len(PAIRS), (), generator=draw))]
        images, colors = canvases(BATCH, pairs, train=True, generator=draw)
        loss = F.cross_entropy(model(images), colors, ignore_index=NOTHING)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()

    return step


def accuracy(model: nn.Module, pairs: int, count: int = EVALUATED) -> float:
    """Return the accuracy in percent on black cells, on fixed canvases with held-out glyphs."""
    images, colors = canvases(count, pairs, train=False, generator=torch.Generator().manual_seed(0))
    queries = colors != NOTHING
    with quiet_eval(model):
        return 100 * float((model(images).argmax(1) == colors)[queries].double().mean())


def convolution(in_channels: int, channels: int, kernel: int) -> nn.Sequential:
    """Build a convolution whose stride equals its kernel size, with batch norm and ReLU."""
    conv = nn.Conv2d(in_channels, channels, kernel, kernel, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(channels), nn.ReLU(inplace=True))


class RecallNet(StagedNetwork):
    """Convolutions over the 8×8 pixels of a cell, two 1×1 convolutions, and a linear classifier for every cell.

    Args:
        num_classes: number of classes; 0 returns the features of the cells.
        in_chans: number of image channels.
        width: number of channels of the feature maps.
        drop_rate: as in :meth:`StagedNetwork.add_head`.
        global_pool: as in :meth:`StagedNetwork.add_head`.

    >>> import torch
    >>> RecallNet()(torch.randn(4, 3, 96, 96)).shape
    torch.Size([4, 8, 12, 12])
    """

    def __init__(
        self, num_classes: int = 8, in_chans: int = 3, width: int = 64, drop_rate: float = 0.0, global_pool: str = ""
    ) -> None:
        super().__init__((width // 2, width, width), (4, 8, 8), "stage")
        self.stage1: nn.Sequential = convolution(in_chans, width // 2, 4)
        self.stage2: nn.Sequential = nn.Sequential(convolution(width // 2, width, 2), convolution(width, width, 1))
        self.stage3: nn.Sequential = convolution(width, width, 1)
        self.add_head(num_classes, drop_rate, global_pool)


_CFG = {
    "num_classes": 8, "input_size": (3, 96, 96), "pool_size": (12, 12), "crop_pct": 1.0, "interpolation": "bilinear",
    "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0), "first_conv": "stage1.0", "classifier": "fc",
}  # fmt: skip

_TRAINED = _CFG | {"file": str(Path(__file__).with_name("recall_attention") / "model.safetensors")}

default_cfgs = generate_default_cfgs({"recall.untrained": _CFG, "recall_attention.seed0": _TRAINED})


class RecallAttentionNet(RecallNet):
    """:class:`RecallNet` with an attention block after ``stage2``; the demo trains this network."""

    def __init__(self, num_classes: int = 8, in_chans: int = 3, width: int = 64, **head: Any) -> None:
        super().__init__(num_classes, in_chans, width, **head)
        va.insert_(self, stages="stage2", num_heads=4, qk_norm="match", example_input=(1, in_chans, 96, 96))


PLAIN = "Network for the recall task without attention, which stays at chance."
ATTENTION = "Network for the recall task with an attention block; ``pretrained=True`` loads weights of the library."
recall = register_network("recall", PLAIN, RecallNet)
recall_attention = register_network("recall_attention", ATTENTION, RecallAttentionNet)

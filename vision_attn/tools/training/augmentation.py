"""What training images go through on the device, a whole batch at a time: crops, flips, erasing, mixup and cutmix.

What is random is drawn for the batch of all processes together, of which each then takes its :func:`share`. timm mixes
an image with the one that stands as far from the other end of the batch, and a share holds both of such a pair.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from timm.data import Mixup
from timm.data.random_erasing import RandomErasing
from torch import Tensor

from vision_attn.tools.training.settings import Settings

__all__ = ["Augmentation", "Choice", "crop_and_flip", "cut_out", "seeded", "share"]


@dataclass(frozen=True)
class Choice:
    """What is drawn for a batch of ``b`` images."""

    #: row and column of the padded image at which each crop begins, ``(2, b)``
    corner: Tensor
    #: whether each is flipped, ``(b,)``
    flip: Tensor
    #: row and column of the middle of each square that is cut out, ``(2, b)``
    centre: Tensor | None
    #: what the erasing of each follows from, ``(b,)``
    erasing: Tensor | None
    #: what mixup and cutmix of the batch follow from
    seed: int

    def __getitem__(self, part: Tensor) -> Choice:
        centre = None if self.centre is None else self.centre[:, part]
        erasing = None if self.erasing is None else self.erasing[part]
        return Choice(self.corner[:, part], self.flip[part], centre, erasing, self.seed)


@dataclass(frozen=True)
class Augmentation:
    """How images of a size are varied in training.

    >>> augmentation = Augmentation(Settings(dataset="digit-pairs", cutout=4, mixup=0.2), (8, 8))
    >>> images, labels = torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 2, 0])
    >>> choice = next(augmentation.choices(4, seed=0, device="cpu"))
    >>> images, labels = augmentation.apply(images, labels, choice, normalize=torch.Tensor.float, classes=3)
    >>> images.shape, labels.shape
    (torch.Size([4, 3, 8, 8]), torch.Size([4, 3]))
    """

    settings: Settings
    #: rows and columns
    size: tuple[int, int]

    def __post_init__(self) -> None:
        cutout, side = self.settings.cutout, min(self.size)
        if cutout > side:
            raise ValueError(f"cutout must be at most the shorter side of the images, {side} pixels; got {cutout}")

    @property
    def padding(self) -> int:
        """Pixels around an image that is cropped; none where crops of any size are made while it is decoded."""
        return self.settings.crop_padding if self.settings.train_crop == "pad" else 0

    def choices(self, batch_size: int, *, seed: int, device: torch.device | str) -> Iterator[Choice]:
        """What is drawn for one batch after the other, without end."""
        generator = torch.Generator(device).manual_seed(seed)
        seeds = np.random.default_rng(seed)
        sides = torch.tensor(self.size, device=device)[:, None]
        while True:
            corner = torch.randint(2 * self.padding + 1, (2, batch_size), generator=generator, device=device)
            flip = torch.rand(batch_size, generator=generator, device=device) < self.settings.hflip
            centre = erasing = None
            if self.settings.cutout:
                centre = (torch.rand(2, batch_size, generator=generator, device=device) * sides).long()
            if self.settings.reprob:
                erasing = torch.randint(2**62, (batch_size,), generator=generator, device=device)
            yield Choice(corner, flip, centre, erasing, int(seeds.integers(2**32)))

    def apply(
        self, images: Tensor, labels: Tensor, choice: Choice, *, normalize: Callable[[Tensor], Tensor], classes: int
    ) -> tuple[Tensor, Tensor]:
        """All of it, from pixels to what a network and its loss take."""
        how = self.settings
        images = normalize(crop_and_flip(images, choice, self.padding))
        if choice.centre is not None:
            images = cut_out(images, choice.centre, how.cutout)
        if choice.erasing is not None:
            erase(images, choice.erasing, RandomErasing(how.reprob, mode=how.remode, device=images.device))
        if not (how.mixup or how.cutmix):
            return images, labels
        mixup = Mixup(how.mixup, how.cutmix, None, 1.0, how.mixup_switch_prob, label_smoothing=0.0, num_classes=classes)
        with seeded(choice.seed):
            return mixup(images, labels)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """What torch, NumPy and Python draw by themselves follows from a seed inside, and afterwards goes on as before."""
    numbers, python = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            yield
    finally:
        np.random.set_state(numbers)
        random.setstate(python)


def share(batch_size: int, process: int, processes: int) -> Tensor:
    """A process's part of a batch: whole pairs of the first and the last, the second and the last but one, ….

    >>> share(8, 1, 2)
    tensor([2, 3, 4, 5])
    """
    places = torch.arange(batch_size)
    pairs = torch.stack([places, places.flip(0)], 1).flatten()[:batch_size]
    return pairs.view(processes, -1)[process].sort().values


def crop_and_flip(images: Tensor, choice: Choice, padding: int) -> Tensor:
    """Crop each image out of its zero-padded self and flip it left to right, in one gather."""
    b, _, h, w = images.shape
    device = images.device
    top, left = choice.corner
    rows = top[:, None] + torch.arange(h, device=device)
    columns = left[:, None] + torch.arange(w, device=device)
    columns = torch.where(choice.flip[:, None], columns.flip(1), columns)
    padded = F.pad(images, (padding, padding, padding, padding))
    image = torch.arange(b, device=device)
    return padded[image[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def erase(images: Tensor, seeds: Tensor, erasing: RandomErasing) -> None:
    """Erase a part of some images, where they lie."""
    with seeded(0):
        for image, seed in zip(images, seeds.tolist(), strict=True):
            random.seed(seed)
            torch.manual_seed(seed)
            erasing(image)


def cut_out(images: Tensor, centre: Tensor, side: int) -> Tensor:
    """Set a square of each image to zero; what of it lies outside the image is lost.

    Source: DeVries and Taylor, Improved Regularization of Convolutional Neural Networks with Cutout, 2017, section 3,
    https://arxiv.org/abs/1708.04552
    """
    first_row, first_column = centre - side // 2
    rows = torch.arange(images.shape[2], device=images.device) - first_row[:, None]
    columns = torch.arange(images.shape[3], device=images.device) - first_column[:, None]
    inside_rows, inside_columns = ((places >= 0) & (places < side) for places in (rows, columns))
    return images.masked_fill((inside_rows[:, :, None] & inside_columns[:, None, :])[:, None], 0.0)

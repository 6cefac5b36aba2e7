"""What training images go through on the device, a whole batch at a time: crop, flip, cutout, mixup and cutmix.

What is random is drawn for the batch of all processes together, of which each then takes its :func:`share`. Images are
mixed with those that stand as far from the other end of the batch, as in timm, and a share holds both of such a pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from timm.data.mixup import mixup_target
from torch import Tensor

__all__ = ["Augmentation", "Choice", "Mixing", "crop_and_flip", "cut_out", "draw_mixing", "mix", "share"]


@dataclass(frozen=True)
class Augmentation:
    """How training images are varied; the names are those of :class:`~vision_attn.training.settings.Settings`.

    >>> augmentation = Augmentation((8, 8), crop_padding=1, cutout=4, mixup=0.2)
    >>> images, labels = torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 2, 0])
    >>> choice = next(augmentation.choices(4, seed=0, device="cpu"))
    >>> images, labels = augmentation.apply(images, labels, choice, normalize=torch.Tensor.float, classes=3)
    >>> images.shape, labels.shape
    (torch.Size([4, 3, 8, 8]), torch.Size([4, 3]))
    """

    size: tuple[int, int]
    crop_padding: int = 0
    hflip: float = 0.0
    cutout: int = 0
    mixup: float = 0.0
    cutmix: float = 0.0
    mixup_switch_prob: float = 0.5

    def __post_init__(self) -> None:
        if self.cutout > min(self.size):
            raise ValueError(
                f"cutout must be at most the shorter side of the images, {min(self.size)} pixels; got {self.cutout}"
            )

    def choices(self, batch_size: int, *, seed: int, device: torch.device | str) -> Iterator[Choice]:
        """What is drawn for one batch after the other, without end."""
        generator = torch.Generator(device).manual_seed(seed)
        numbers = np.random.default_rng(seed)  # torch draws no beta distribution from a generator
        while True:
            yield self.draw(batch_size, generator, numbers)

    def draw(self, count: int, generator: torch.Generator, numbers: np.random.Generator) -> Choice:
        """What happens to each image of a batch."""
        device = generator.device
        top, left = torch.randint(2 * self.crop_padding + 1, (2, count), generator=generator, device=device)
        flip = torch.rand(count, generator=generator, device=device) < self.hflip
        centre = None
        if self.cutout:
            places = torch.rand(2, count, generator=generator, device=device)
            centre = torch.stack([place * side for place, side in zip(places, self.size, strict=True)]).long()
        mixing = None
        if self.mixup or self.cutmix:
            cut = numbers.random() < self.mixup_switch_prob if self.mixup and self.cutmix else bool(self.cutmix)
            mixing = draw_mixing(self.size, self.cutmix if cut else self.mixup, cut=cut, numbers=numbers)
        return Choice(top, left, flip, centre, mixing)

    def apply(
        self,
        images: Tensor,
        labels: Tensor,
        choice: Choice,
        *,
        normalize: Callable[[Tensor], Tensor],
        classes: int,
    ) -> tuple[Tensor, Tensor]:
        """All of it, from pixels to what a network and its loss take."""
        images = normalize(crop_and_flip(images, choice, self.crop_padding))
        if choice.centre is not None:
            images = cut_out(images, choice.centre, self.cutout)
        return mix(images, labels, choice.mixing, classes) if choice.mixing else (images, labels)


@dataclass(frozen=True)
class Choice:
    """What is drawn for a batch of ``b`` images."""

    #: row of the padded image at which each crop begins, ``(b,)``
    top: Tensor
    #: column of the padded image at which each crop begins, ``(b,)``
    left: Tensor
    #: whether each is flipped, ``(b,)``
    flip: Tensor
    #: row and column of the middle of each square that is cut out, ``(2, b)``
    centre: Tensor | None = None
    #: how pairs of images are mixed
    mixing: Mixing | None = None

    def __getitem__(self, part: Tensor) -> Choice:
        centre = None if self.centre is None else self.centre[:, part]
        return Choice(self.top[part], self.left[part], self.flip[part], centre, self.mixing)


@dataclass(frozen=True)
class Mixing:
    """How all images of a batch are mixed with their partners."""

    #: share of an image itself
    share: float
    #: what is the partner's, from and to which row, from and to which column; None where both are laid over each other
    box: tuple[int, int, int, int] | None = None


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
    rows = choice.top[:, None] + torch.arange(h, device=device)
    columns = choice.left[:, None] + torch.arange(w, device=device)
    columns = torch.where(choice.flip[:, None], columns.flip(1), columns)
    padded = F.pad(images, (padding, padding, padding, padding))
    image = torch.arange(b, device=device)
    return padded[image[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


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


def draw_mixing(size: tuple[int, int], alpha: float, *, cut: bool, numbers: np.random.Generator) -> Mixing:
    """How much of its partner an image gets and, for cutmix, in which box."""
    own = float(numbers.beta(alpha, alpha))
    if not cut:
        return Mixing(own)
    box: list[int] = []
    for length in size:
        side = int(length * math.sqrt(1 - own))
        middle = int(numbers.integers(length))
        box += max(0, middle - side // 2), min(length, middle + (side + 1) // 2)
    top, bottom, left, right = box
    return Mixing(1 - (bottom - top) * (right - left) / math.prod(size), (top, bottom, left, right))


def mix(images: Tensor, labels: Tensor, mixing: Mixing, classes: int) -> tuple[Tensor, Tensor]:
    """Mix each image and its label with the one that stands as far from the other end of the batch.

    Source: Zhang et al., mixup: Beyond Empirical Risk Minimization, 2017, https://arxiv.org/abs/1710.09412; Yun et al.,
    CutMix, 2019, https://arxiv.org/abs/1905.04899; as ``timm.data.Mixup`` does it in its mode ``batch``.
    """
    if mixing.box is None:
        mixed = images * mixing.share + images.flip(0) * (1 - mixing.share)
    else:
        top, bottom, left, right = mixing.box
        mixed = images.clone()
        mixed[:, :, top:bottom, left:right] = images.flip(0)[:, :, top:bottom, left:right]
    return mixed, mixup_target(labels, classes, mixing.share)

"""Images and their classes as training and evaluation see them: so many, in batches of any order, on the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["ImageSet", "Images"]


class Images(Protocol):
    """What a run asks of its images, wherever they are kept."""

    @property
    def kept(self) -> str:
        """How they are kept, for the log."""

    @property
    def device(self) -> torch.device:
        """Where batches are."""

    def __len__(self) -> int: ...

    def batches(self, rows: Iterable[Tensor], *, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The images of one batch after the other.

        Args:
            rows: for each batch which images, ``(b,)``, on the CPU.
            seed: of the crops, where images are cropped at random as they are decoded.

        Yields:
            Images, uint8, ``(b, C, H, W)``, and their classes ``(b,)``, on the device.
        """


@dataclass(frozen=True)
class ImageSet:
    """Images held in memory as one tensor, decoded once; its methods are those of :class:`Images`.

    Args:
        images: uint8, ``(N, C, H, W)``.
        labels: class of each image, int64, ``(N,)``.
    """

    images: Tensor
    labels: Tensor

    kept = "in memory"

    def __len__(self) -> int:
        return len(self.images)

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.images.device

    def to(self, device: torch.device | str) -> ImageSet:
        """The same images on a device.

        Args:
            device: where to.

        Returns:
            Images ``(N, C, H, W)`` and labels ``(N,)`` as they are here.
        """
        return ImageSet(self.images.to(device), self.labels.to(device))

    def batches(self, rows: Iterable[Tensor], *, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in rows:
            here = chosen.to(self.device, non_blocking=True)
            yield self.images[here], self.labels[here]

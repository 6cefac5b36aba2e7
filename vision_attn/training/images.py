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
        """The images of one batch after the other."""


@dataclass(frozen=True)
class ImageSet:
    """Images held in memory as one tensor, decoded once; its methods are those of :class:`Images`."""

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
        """The same images on a device."""
        return ImageSet(self.images.to(device), self.labels.to(device))

    def batches(self, rows: Iterable[Tensor], *, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in rows:
            here = chosen.to(self.device, non_blocking=True)
            yield self.images[here], self.labels[here]

"""A trained network with what must be known to use it."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vision_attn.blocks import set_impl
from vision_attn.insertion import inserted, plain_network
from vision_attn.version import __version__

__all__ = ["Classifier", "NormalizedNetwork"]


@dataclass(frozen=True)
class Classifier:
    """A network, its classes and what it is fed with.

    >>> network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2))
    >>> classifier = Classifier(network, ("cat", "dog"), (3, 8, 8), mean=(0.5,) * 3, std=(0.25,) * 3)
    >>> classifier.about(normalize=True)["classes"]
    ['cat', 'dog']
    """

    #: gives logits ``(b, classes)`` for images ``(b, c, h, w)``
    model: nn.Module
    #: name of each class
    classes: tuple[str, ...]
    #: channels, rows and columns of an image
    input_size: tuple[int, int, int]
    #: mean of each channel, of pixels in 0…1
    mean: tuple[float, ...]
    #: standard deviation of each channel
    std: tuple[float, ...]
    #: the name under which timm makes the network without its blocks, if it does
    architecture: str | None = None

    def __post_init__(self) -> None:
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != self.input_size[0]:
                raise ValueError(
                    f"{name} must have a value for each of the {self.input_size[0]} channels; got {tuple(values)}"
                )
        if not all(0.0 < value < math.inf for value in self.std):
            raise ValueError(f"std must be positive; got {tuple(self.std)}")

    def about(self, *, normalize: bool) -> dict[str, object]:
        """What whoever runs the network has to know, as plain values."""
        return {
            "classes": list(self.classes),
            "input_size": list(self.input_size),
            "pixels": "0…1" if normalize else "0…1, then (pixels - mean) / std",
            "mean": list(self.mean),
            "std": list(self.std),
            "architecture": self.architecture,
            "inserted": list(inserted(self.model)),
            "library": f"vision_attn {__version__}",
        }

    def to_export(self) -> Classifier:
        """The same with a copy of the network: on the CPU, in float32 and evaluation mode, its attention as ``"sdpa"``.

        All implementations compute the same; this is the one that exports with any batch.
        """
        model = copy.deepcopy(plain_network(self.model)).cpu().float().eval()
        set_impl(model, "sdpa")
        return replace(self, model=model)


class NormalizedNetwork(nn.Module):
    """A network behind the normalisation of its images: takes pixels in 0…1."""

    mean: Tensor
    std: Tensor

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        self.model = classifier.model
        self.register_buffer("mean", torch.tensor(classifier.mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(classifier.std).view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        return self.model((images - self.mean) / self.std)

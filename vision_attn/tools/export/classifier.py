"""A trained classifier, ready to use: the network, its classes and what makes an input of an image."""

from __future__ import annotations

import copy
import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor, nn
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms.v2 import Normalize

from vision_attn.attention.blocks import set_impl_
from vision_attn.checks import check_type
from vision_attn.errors import DataError
from vision_attn.networks.checkpoints import write_atomically
from vision_attn.networks.insertion import inserted, plain_network, quiet_eval
from vision_attn.networks.models.folder import load_model
from vision_attn.networks.models.registry import config_of
from vision_attn.tools.training.images import prepare, rgb
from vision_attn.version import __version__

__all__ = ["Classifier", "images_in", "load_run", "write_predictions"]


@dataclass(frozen=True)
class Classifier:
    """A network, its classes and what it is fed with.

    >>> network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2))
    >>> classifier = Classifier(network, ("cat", "dog"), (3, 8, 8), mean=(0.5,) * 3, std=(0.25,) * 3)
    >>> classifier.transform(Image.new("RGB", (20, 10))).shape
    torch.Size([3, 8, 8])
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
    #: share of the image's shorter side that is seen, and how it is resized, in the words of timm
    crop_pct: float = 1.0
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        for name in ("classes", "input_size", "mean", "std"):
            check_type(name, getattr(self, name), (tuple, list), "a tuple")
        if len(self.input_size) != 3:
            raise ValueError(f"input_size must be channels, rows and columns; got {tuple(self.input_size)}")
        if not len(self.mean) == len(self.std) == self.input_size[0] or not min(self.std) > 0:
            raise ValueError(
                f"mean and std must have a value for each of the {self.input_size[0]} channels, and std positive ones; "
                f"got {tuple(self.mean)} and {tuple(self.std)}"
            )

    @cached_property
    def transform(self) -> Callable[[Image.Image], Tensor]:
        """Makes an input ``(c, h, w)`` of an image of Pillow's, as evaluation in training does."""
        channels, *size = self.input_size
        whole = (self.crop_pct, self.interpolation) == (1.0, "bilinear")  # as our own runs evaluate
        of_timm = create_transform(
            self.input_size,
            interpolation=self.interpolation,
            mean=self.mean,
            std=self.std,
            crop_pct=self.crop_pct,
        )

        def transform(image: Image.Image) -> Tensor:
            image = rgb(image) if channels == 3 else rgb(image).convert("L")
            if not whole:
                found: Tensor = of_timm(image)
                return found
            pixels: Tensor = self.normalization(prepare(image, (size[0], size[1]), None) / 255)
            return pixels

        return transform

    def predict(
        self, paths: Sequence[str | Path], *, top: int = 5, batch_size: int = 32
    ) -> Iterator[list[tuple[str, float]]]:
        """Of each image file the classes that the network takes it for, the likeliest first, with probabilities."""
        place = next(self.model.parameters())
        for begin in range(0, len(paths), batch_size):
            images = torch.stack([self.transform(open_image(path)) for path in paths[begin : begin + batch_size]])
            with torch.no_grad(), quiet_eval(self.model):
                shares = self.model(images.to(place)).float().softmax(1)
            best, labels = shares.topk(min(top, len(self.classes)), dim=1)
            for values, numbers in zip(best.tolist(), labels.tolist(), strict=True):
                yield [(self.classes[number], value) for number, value in zip(numbers, values, strict=True)]

    def about(self, *, normalize: bool) -> str:
        """What whoever runs the network has to know, as JSON."""
        notes = {
            "classes": self.classes,
            "input_size": self.input_size,
            "pixels": "0…1" if normalize else "0…1, then (pixels - mean) / std",
            "mean": self.mean,
            "std": self.std,
            "architecture": self.architecture,
            "inserted": list(inserted(self.model)),
            "library": f"vision_attn {__version__}",
        }
        return json.dumps(notes, ensure_ascii=False)

    def to_export(self) -> Classifier:
        """The same with a copy of the network: on the CPU, in float32 and evaluation mode, its attention as ``"sdpa"``.

        All implementations compute the same; this is the one that exports with any batch.
        """
        model = copy.deepcopy(plain_network(self.model)).cpu().float().eval()
        set_impl_(model, "sdpa")
        return replace(self, model=model)

    @property
    def normalization(self) -> Normalize:
        """From pixels in 0…1 to what the network takes."""
        return Normalize(list(self.mean), list(self.std))

    def to_trace(self, normalize: bool) -> tuple[nn.Module, tuple[Tensor]]:
        """The network that becomes a graph, and images to trace it with: one image would fix the batch."""
        network = nn.Sequential(self.normalization, self.model).eval() if normalize else self.model
        return network, (torch.zeros(2, *self.input_size),)


def open_image(path: str | Path) -> Image.Image:
    """An image file; what cannot be read is named."""
    try:
        with Image.open(path) as file:
            return rgb(file)
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged file can make Pillow fail in any way
        raise DataError(f"{path} cannot be read as an image ({error})") from error


def load_run(
    path: str | Path, *, weights: str | None = None, block: Callable[..., nn.Module] | None = None
) -> Classifier:
    """A trained model, ready to use: ``.model``, ``.transform`` (image to input) and ``.classes``.

    Args:
        path: the folder of a run of ``vision-attn train`` (of which the best epoch is taken), its ``best.pth``,
            ``last.pth`` or ``adapter.safetensors``, or a folder that :func:`vision_attn.save_model` or
            ``vision-attn export`` wrote.
        weights: for an adapter, the checkpoint of the network that it was trained on, by default the file that the run
            began from; ``"pretrained"`` fetches the weights that come with timm's name.
        block: of a folder, the class of the inserted blocks, where it is none of this library's.

    Returns:
        The network in evaluation mode on the CPU, with its classes, and what makes an input of an image. Of the files
        nothing is run, and nothing is fetched that they name.

    Raises:
        FileNotFoundError: there is no such file or folder.
        CheckpointError: it is damaged, or none of these.
        ValueError: ``weights`` are needed and not given, or given and not needed.

    >>> from vision_attn.networks.models.registry import weights_folder
    >>> run = load_run(weights_folder() / "resnet20_attention_cifar100")
    >>> run.classes[:2], run.model(run.transform(Image.new("RGB", (60, 40)))[None]).shape
    (('apple', 'aquarium_fish'), torch.Size([1, 100]))
    """
    path = Path(path)
    if not (path / "config.json").is_file():
        from vision_attn.tools.training.trained import open_trained

        trained = open_trained(path, weights=weights)
        network = trained.network
        channels = len(network.mean)
        return Classifier(
            network.model.eval(),
            trained.classes,
            (channels, *network.size),
            network.mean,
            network.std,
            trained.settings.model.partition(".")[0],
        )
    if weights is not None:
        raise ValueError(f"weights apply to adapters, and {path} has all weights: leave them out")
    model = load_model(path, block=block)
    config: dict[str, Any] = config_of(model)
    classes = config.get("label_names") or [str(number) for number in range(config["num_classes"])]
    return Classifier(
        model,
        tuple(classes),
        tuple(config["input_size"]),
        tuple(config["mean"]),
        tuple(config["std"]),
        config["architecture"],
        config["crop_pct"],
        config["interpolation"],
    )


def images_in(names: Sequence[str | Path]) -> list[Path]:
    """Image files by name, and all those in folders, by their endings; not what is hidden by a dot before its name."""
    found: list[Path] = []
    for path in map(Path, names):
        inner = [path]
        if path.is_dir():
            images = sorted(one for one in path.rglob("*") if one.suffix.lower() in IMG_EXTENSIONS and one.is_file())
            inner = [one for one in images if not any(name[0] == "." for name in one.relative_to(path).parts)]
        if not inner:
            raise DataError(f"{path} has no images, which end in {', '.join(IMG_EXTENSIONS)}")
        found += inner
    return found


def write_predictions(path: str | Path, found: Sequence[tuple[Path, Sequence[tuple[str, float]]]]) -> None:
    """Write a table with a row for each image: its classes, the likeliest first, with probabilities."""
    most = len(found[0][1])
    table = io.StringIO()
    rows = csv.writer(table, lineterminator="\n")
    rows.writerow(
        ["image", *(name for rank in range(1, most + 1) for name in (f"class_{rank}", f"probability_{rank}"))]
    )
    rows.writerows([image, *(cell for name, share in best for cell in (name, f"{share:.6f}"))] for image, best in found)
    write_atomically(Path(path), table.getvalue().encode())

"""Data sets: what they are called, what they hold, and where their images are kept."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from timm.data import IterableImageDataset, create_dataset
from torch import Tensor
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS
from tqdm import tqdm

from vision_attn.errors import DataError
from vision_attn.training import digits
from vision_attn.training.images import Decoder, ImageLoader, Images, ImageSet, ImageStream, prepare, rgb
from vision_attn.training.settings import Settings

__all__ = ["Source", "image_folder", "open_data", "open_images"]

#: Bytes of images, at the network's size, up to which a set is kept in memory unasked, on the device that trains.
SMALL = 2 * 2**30
#: Worker processes that are not asked for: more seldom help, and each takes memory.
MOST_WORKERS = 16
#: Names that the evaluation half of an image folder goes by.
EVALUATION_FOLDERS = ("val", "validation", "valid", "test")


@dataclass(frozen=True)
class Source:
    """A half of a data set that is known but not yet read: what it holds, and how to read it."""

    name: str
    classes: tuple[str, ...]
    channels: int
    #: rows and columns of its images, where all have the same
    size: tuple[int, int] | None
    count: int
    #: of torchvision's or timm's
    dataset: Any = None
    #: gives all images and their classes, where they come as tensors
    tensors: Callable[[], tuple[Tensor, Tensor]] | None = None

    def __len__(self) -> int:
        return self.count

    def read(self, size: tuple[int, int]) -> ImageSet:
        """All images at a size, in memory."""
        if self.tensors is not None and size == self.size:
            return ImageSet(*self.tensors())
        with ThreadPoolExecutor(os.cpu_count()) as pool:

            def in_threads(*task: Any) -> tqdm[Any]:
                return tqdm(pool.map(*task), "decode", self.count, leave=False, disable=None)

            return ImageSet(*Decoder(self.dataset, size).decode(range(self.count), run=in_threads))


def open_data(settings: Settings, *, train: bool) -> Source:
    """The training or the evaluation half of the data that settings name; looks, but reads no image yet."""
    if settings.dataset == "digit-pairs":
        half, count = ("training", digits.TRAIN_CANVASES) if train else ("held-out", digits.EVAL_CANVASES)
        tensors = partial(digits.digit_pairs, train)
        return Source(f"digit pairs ({half} digits)", digits.CLASSES, 1, digits.CANVAS, count, tensors=tensors)
    if settings.dataset == "folder":
        assert settings.data is not None
        return image_folder(split_folder(Path(settings.data).expanduser(), train, settings.test_only))
    return named(settings, train)


def named(settings: Settings, train: bool) -> Source:
    """A data set that timm opens by its name."""
    name = settings.dataset if "/" in settings.dataset else f"torch/{settings.dataset}"
    split = settings.train_split if train else settings.val_split
    root = None if settings.data is None else str(Path(settings.data).expanduser())
    try:
        found = create_dataset(
            name, root, split, is_training=train, download=settings.dataset_download, seed=settings.seed
        )
    except (AssertionError, ImportError, OSError, RuntimeError) as error:
        fetch = ", or fetch it with --dataset-download" if name.startswith("torch/") else ""
        raise DataError(
            f"{settings.dataset} cannot be read in {root} ({error}): name the folder it is in{fetch}"
        ) from error
    reader: Any = getattr(found, "reader", None)
    stream = isinstance(found, IterableImageDataset)
    if stream and not train:  # each process evaluates its rows of the whole stream
        reader.dist_rank, reader.dist_num_replicas = 0, 1
    count = reader.num_samples if stream else len(found)
    if not count:
        raise DataError(f"{name} does not say how many images {split} has: give them as in 'val-{{0..9}}.tar|10000'")
    classes = getattr(found, "classes", None) or list(getattr(reader, "class_to_idx", ()))
    if not classes and settings.num_classes is None:
        raise ValueError(f"num_classes must be given for {name}, which does not say what its classes are")
    classes = [one if isinstance(one, str) else ", ".join(one) for one in classes]  # those of ImageNet have synonyms
    pixels = getattr(found, "data", None)  # of CIFAR and MNIST
    return Source(
        f"{settings.dataset} ({split})",
        tuple(classes or map(str, range(settings.num_classes or 0))),
        3,
        None if pixels is None else (pixels.shape[1], pixels.shape[2]),
        count,
        found,
        None if pixels is None else partial(as_tensors, found),
    )


def as_tensors(dataset: Any) -> tuple[Tensor, Tensor]:
    """The pixels that a data set of torchvision's holds: ``(b, h, w, 3)``, or ``(b, h, w)`` of grey."""
    pixels = torch.as_tensor(dataset.data)
    pixels = pixels[..., None].expand(-1, -1, -1, 3) if pixels.ndim == 3 else pixels
    return pixels.permute(0, 3, 1, 2).contiguous(), torch.as_tensor(dataset.targets)


def split_folder(root: Path, train: bool, test_only: bool) -> Path:
    if not root.is_dir():
        raise DataError(f"{root}: there is no such folder of images")
    names = ("train",) if train else EVALUATION_FOLDERS
    found = [root / name for name in names if (root / name).is_dir()] or [root] * test_only
    if not found:
        folders = " or ".join(map(repr, names))
        raise DataError(f"{root} has no folder {folders}: expected train/CLASS/IMAGE and val/CLASS/IMAGE in it")
    return found[0]


class Folder(ImageFolder):
    """A folder of class folders; what has a name that begins with a dot is neither a class nor an image."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), loader=open_image, is_valid_file=self.is_image)

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        names = sorted(found.name for found in Path(directory).glob("[!.]*") if found.is_dir())
        if len(names) < 2:
            raise DataError(f"{directory} has {len(names)} class folders: expected CLASS/IMAGE in it, of two or more")
        return names, {name: label for label, name in enumerate(names)}

    def is_image(self, path: str) -> bool:
        hidden = f"{os.sep}." in path.removeprefix(str(self.root))
        return not hidden and path.lower().endswith(IMG_EXTENSIONS)


def image_folder(folder: Path) -> Source:
    """A folder of class folders, ``CLASS/IMAGE``."""
    try:
        found = Folder(folder)
    except FileNotFoundError as error:  # which names the classes that have no images
        endings = ", ".join(IMG_EXTENSIONS)
        raise DataError(f"{folder}: {error}Fill their folders or remove them; images end in {endings}") from error
    return Source(str(folder), tuple(found.classes), 3, None, len(found), found)


def open_image(path: str) -> Image.Image:
    with Image.open(path) as file:
        return rgb(file)


def open_images(
    source: Source,
    size: tuple[int, int],
    device: torch.device,
    *,
    workers: int | None = None,
    cache: str = "auto",
    crop_scale: float | None = None,
) -> Images:
    """The images of a source at a size: in memory, decoded by worker processes in every epoch, or as a stream.

    Args:
        source: of what.
        size: rows and columns, in pixels.
        device: where batches are wanted.
        workers: processes that decode; where they are given, images are not kept in memory unasked.
        cache: ``"ram"`` and ``"none"`` keep images in memory or do not; ``"auto"`` keeps what takes no more than
            :data:`SMALL`.
        crop_scale: least share of an image that a random crop has; of what is in memory there are none.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # of this run on this machine, as torchrun says
    decoding = workers or max(1, min(MOST_WORKERS, cores() // processes))
    if isinstance(source.dataset, IterableImageDataset):
        source.dataset.transform = partial(prepare, size=size, crop_scale=crop_scale)
        return ImageStream(source.dataset, workers=decoding, device=device)
    small = source.count * source.channels * math.prod(size) <= SMALL
    keep = cache == "ram" or (cache == "auto" and small and not workers)
    if source.dataset is not None and (crop_scale is not None or not keep):
        return ImageLoader(Decoder(source.dataset, size, crop_scale), workers=decoding, device=device)
    found, place = source.read(size), device if small else torch.device("cpu")
    return ImageSet(found.images.to(place), found.labels.to(place), device)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

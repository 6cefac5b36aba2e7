"""Images held as one uint8 tensor, decoded once, on the device that trains; crops and flips are made there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torchvision import datasets
from torchvision.transforms import functional as transforms
from tqdm import tqdm

from vision_attn.training import digits
from vision_attn.training.errors import DataError
from vision_attn.training.settings import Settings

__all__ = ["ImageSet", "Source", "augment", "draw_augmentation", "image_folder", "open_data"]

#: Names that the evaluation half of an image folder goes by.
EVALUATION_FOLDERS = ("val", "validation", "valid", "test")


@dataclass(frozen=True)
class ImageSet:
    """Images and their classes.

    Args:
        images: uint8, ``(N, C, H, W)``.
        labels: class of each image, int64, ``(N,)``.
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device | str) -> ImageSet:
        """The same images on a device.

        Args:
            device: where to.
        """
        return ImageSet(self.images.to(device), self.labels.to(device))

    def batches(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All images in order.

        Args:
            batch_size: images in a batch; the last one may have fewer.

        Yields:
            Images ``(b, C, H, W)`` and their classes ``(b,)``.
        """
        yield from zip(self.images.split(batch_size), self.labels.split(batch_size), strict=True)


@dataclass(frozen=True)
class Source:
    """A half of a data set that is known but not yet read: what it holds, and how to read it.

    Args:
        name: where it comes from.
        classes: name of each class.
        channels: of its images.
        size: rows and columns of its images in pixels, where they have one of their own.
        read: reads it at a size.
        count: of its images.
    """

    name: str
    classes: tuple[str, ...]
    channels: int
    size: tuple[int, int] | None
    read: Callable[[tuple[int, int]], ImageSet]
    count: int

    def __len__(self) -> int:
        return self.count


def open_data(settings: Settings, *, train: bool) -> Source:
    """The training or the evaluation half of the data that settings name; looks, but reads no image yet.

    Args:
        settings: ``dataset``, ``data``, ``dataset_download`` and ``test_only`` are used.
        train: whether the training half, or the other.

    Raises:
        DataError: the data is missing or empty; the message says what to do.
    """
    if settings.dataset == "digit-pairs":
        return digit_pairs(train)
    assert settings.data is not None
    root = Path(settings.data).expanduser()
    if settings.dataset == "folder":
        return image_folder(split_folder(root, train, settings.test_only))
    return cifar(settings.dataset, root, train, settings.dataset_download)


def digit_pairs(train: bool) -> Source:
    half = "training" if train else "held-out"
    count = digits.TRAIN_CANVASES if train else digits.EVAL_CANVASES

    def read(size: tuple[int, int]) -> ImageSet:
        return ImageSet(*digits.digit_pairs(train))

    return Source(f"digit pairs ({half} digits)", digits.CLASSES, 1, digits.CANVAS, read, count)


def cifar(dataset: str, root: Path, train: bool, download: bool) -> Source:
    kind = datasets.CIFAR10 if dataset == "cifar10" else datasets.CIFAR100
    try:
        found = kind(str(root), train=train, download=download)
    except RuntimeError as error:
        raise DataError(
            f"{dataset} is not in {root}: name the folder it is in, or fetch it with --dataset-download"
        ) from error

    def read(size: tuple[int, int]) -> ImageSet:
        images = torch.from_numpy(found.data).permute(0, 3, 1, 2).contiguous()
        if images.shape[2:] != size:
            images = transforms.resize(images, list(size), antialias=True)
        return ImageSet(images, torch.tensor(found.targets))

    return Source(
        f"{dataset} ({'train' if train else 'test'})", tuple(found.classes), 3, (32, 32), read, len(found.data)
    )


def split_folder(root: Path, train: bool, test_only: bool) -> Path:
    if not root.is_dir():
        raise DataError(f"{root}: there is no such folder of images")
    names = ("train",) if train else EVALUATION_FOLDERS
    for name in names:
        if (root / name).is_dir():
            return root / name
    if test_only:
        return root
    raise DataError(
        f"{root} has no folder {' or '.join(map(repr, names))}: expected train/CLASS/IMAGE and val/CLASS/IMAGE in it"
    )


def image_folder(folder: Path) -> Source:
    """A folder of class folders, ``CLASS/IMAGE``; each image is resized by its shorter side and cropped to its centre.

    Args:
        folder: with a folder for each class in it.

    Raises:
        DataError: there are no images; on reading: one cannot be read, or all together do not fit into memory.
    """
    try:
        listing = datasets.ImageFolder(str(folder), allow_empty=True)
    except FileNotFoundError as error:
        raise DataError(f"{folder} has no class folders: expected CLASS/IMAGE inside it") from error
    empty = set(range(len(listing.classes))) - {label for _, label in listing.samples}
    if empty:
        names = ", ".join(repr(listing.classes[label]) for label in sorted(empty)[:6])
        raise DataError(
            f"{folder}: no images in {names}: fill it or remove the folder "
            f"(images are {', '.join(datasets.folder.IMG_EXTENSIONS)})"
        )
    paths = [path for path, _ in listing.samples]
    labels = torch.tensor([label for _, label in listing.samples])

    def read(size: tuple[int, int]) -> ImageSet:
        needed, free = len(paths) * 3 * size[0] * size[1], psutil.virtual_memory().available
        if needed > 0.8 * free:
            raise DataError(
                f"{folder}: {len(paths):,} images of {size[0]}×{size[1]} take {needed / 2**30:.1f} GiB of memory and "
                f"{free / 2**30:.1f} GiB are free: choose a smaller --img-size"
            )
        images = torch.empty(len(paths), 3, *size, dtype=torch.uint8)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            decoded = pool.map(partial(decode, size=size), paths)
            for index, pixels in enumerate(tqdm(decoded, "decode", len(paths), leave=False, disable=None)):
                images[index] = torch.from_numpy(pixels).permute(2, 0, 1)
        return ImageSet(images, labels)

    return Source(str(folder), tuple(listing.classes), 3, None, read, len(paths))


def decode(path: str, size: tuple[int, int]) -> np.ndarray:
    try:
        with Image.open(path) as file:
            image = ImageOps.exif_transpose(file)
            if image.mode.startswith("I"):  # 16 bits a pixel, of which the upper 8 are kept
                image = Image.fromarray((np.asarray(image) // 256).clip(0, 255).astype(np.uint8))
            image = image.convert("RGB")
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} is damaged or no image ({error}): fetch it again or remove it") from error
    if image.size != (size[1], size[0]):
        image = ImageOps.fit(image, (size[1], size[0]), Image.Resampling.BILINEAR)
    return np.array(image)


# --- on the device ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Augmentation:
    """For each image of a batch, where its crop begins and whether it is flipped."""

    top: Tensor
    left: Tensor
    flip: Tensor

    def __getitem__(self, part: slice) -> Augmentation:
        return Augmentation(self.top[part], self.left[part], self.flip[part])


def draw_augmentation(count: int, *, padding: int, hflip: float, generator: torch.Generator) -> Augmentation:
    """Draw random crops out of ``padding`` pixels around an image, and flips with probability ``hflip``.

    Args:
        count: how many images.
        padding: pixels on each side that a crop may reach into.
        hflip: probability of a flip from left to right.
        generator: source of randomness, on the device of the images.

    Returns:
        For each image where its crop begins and whether it is flipped, each ``(count,)``.
    """
    device = generator.device
    top, left = torch.randint(2 * padding + 1, (2, count), generator=generator, device=device)
    return Augmentation(top, left, torch.rand(count, generator=generator, device=device) < hflip)


def augment(images: Tensor, choice: Augmentation, padding: int) -> Tensor:
    """Crop each image out of its zero-padded self and flip it left to right, in one gather on the device.

    Args:
        images: ``(b, c, h, w)``, any type.
        choice: where to crop and what to flip, from :func:`draw_augmentation`.
        padding: pixels on each side that a crop may reach into.

    Returns:
        ``(b, c, h, w)``.

    >>> images = torch.zeros(4, 3, 32, 32, dtype=torch.uint8)
    >>> choice = draw_augmentation(4, padding=4, hflip=0.5, generator=torch.Generator())
    >>> augment(images, choice, padding=4).shape
    torch.Size([4, 3, 32, 32])
    """
    b, _, h, w = images.shape
    device = images.device
    rows = choice.top[:, None] + torch.arange(h, device=device)
    columns = choice.left[:, None] + torch.arange(w, device=device)
    columns = torch.where(choice.flip[:, None], columns.flip(1), columns)
    padded = F.pad(images, (padding, padding, padding, padding))
    image = torch.arange(b, device=device)
    return padded[image[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)

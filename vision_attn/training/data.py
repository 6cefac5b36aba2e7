"""Data sets: what they are called, what they hold, and how their images are come by."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from torchvision import datasets
from torchvision.transforms import functional as transforms

from vision_attn.errors import DataError
from vision_attn.training import digits
from vision_attn.training.image_files import ImageFiles
from vision_attn.training.image_loader import ImageLoader
from vision_attn.training.images import Images, ImageSet
from vision_attn.training.settings import Settings

__all__ = ["Source", "image_folder", "open_data", "open_images"]

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
    size: tuple[int, int] | None
    read: Callable[[tuple[int, int]], ImageSet]
    count: int
    files: ImageFiles | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.count


def open_data(settings: Settings, *, train: bool) -> Source:
    """The training or the evaluation half of the data that settings name; looks, but reads no image yet."""
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
    """A folder of class folders, ``CLASS/IMAGE``, whose images :class:`ImageFiles` decodes.

    What has a name that begins with a dot, of notebooks and file systems, is neither a class nor an image.
    """
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise DataError(f"{folder} has no class folders: expected CLASS/IMAGE inside it")
    left_out: Counter[str] = Counter()

    def is_image(path: str) -> bool:
        hidden = f"{os.sep}." in path.removeprefix(str(folder))
        if not hidden and path.lower().endswith(datasets.folder.IMG_EXTENSIONS):
            return True
        left_out["hidden" if hidden else Path(path).suffix or Path(path).name] += 1
        return False

    labels = {name: label for label, name in enumerate(classes)}
    samples = datasets.folder.make_dataset(folder, labels, is_valid_file=is_image, allow_empty=True)
    empty = set(labels.values()) - {label for _, label in samples}
    if empty:
        names = ", ".join(repr(classes[label]) for label in sorted(empty)[:6])
        raise DataError(
            f"{folder}: no images in {names}: fill it or remove the folder "
            f"(images are {', '.join(datasets.folder.IMG_EXTENSIONS)})"
        )
    if len(classes) < 2:
        raise DataError(f"{folder} has one class folder, {classes[0]!r}: at least two are needed to tell apart")
    files = ImageFiles(*zip(*samples, strict=True))
    return Source(str(folder), tuple(classes), 3, None, files.read, len(files), files, left_out)


def open_images(
    source: Source,
    size: tuple[int, int],
    device: torch.device,
    *,
    workers: int | None = None,
    crop_scale: float | None = None,
) -> Images:
    """The images of a source at a size, held in memory or decoded by worker processes as they are needed."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # of this run on this machine, as torchrun says
    needed, room = source.count * source.channels * math.prod(size), memory_for_images(device, processes)
    if source.files is not None and (workers or crop_scale is not None or needed > room):
        workers = workers or max(1, min(MOST_WORKERS, cores() // processes))
        return ImageLoader(source.files, size, workers=workers, device=device, crop_scale=crop_scale)
    if needed > room:
        raise DataError(
            f"{source.name}: {source.count:,} images of {size[0]}×{size[1]} take {needed / 2**30:.1f} GiB of memory "
            f"and there is room for {room / 2**30:.1f} GiB: choose a smaller --img-size"
        )
    return source.read(size).to(device)


def memory_for_images(device: torch.device, processes: int) -> float:
    """Bytes that a half of the data may take: most of the free memory here, a quarter of it on a device that trains."""
    taken = psutil.Process().memory_info().rss
    free = 0.8 * min(psutil.virtual_memory().available / processes, container_limit() / processes - taken)
    return min(free, torch.cuda.mem_get_info(device)[0] / 4) if device.type == "cuda" else free


def container_limit(file: Path = Path("/sys/fs/cgroup/memory.max")) -> float:
    """Bytes that a container may take, which the machine's free memory does not say."""
    text = file.read_text().strip() if file.exists() else "max"
    return math.inf if text == "max" else int(text)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

"""Data sets: what they are called, what they hold, and where their images are kept."""

from __future__ import annotations

import heapq
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.data import IterableImageDataset, create_dataset
from timm.data.transforms_factory import transforms_imagenet_train
from torch import Tensor
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import v2

from vision_attn.errors import DataError
from vision_attn.text import shorten
from vision_attn.tools.training import digits
from vision_attn.tools.training.images import (
    Bar,
    Decoder,
    ImageLoader,
    Images,
    ImageSet,
    ImageStream,
    Vary,
    centre,
    open_image,
    prepare,
    refuse_other_labels,
)
from vision_attn.tools.training.settings import Settings

__all__ = ["Source", "image_folder", "open_data", "open_images", "varied"]

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
    #: whether a share of the images of one folder makes the evaluation half
    held_out: bool = False

    def __len__(self) -> int:
        return self.count

    def read(self, size: tuple[int, int]) -> ImageSet:
        """All images at a size, in memory."""
        if self.tensors is not None and size == self.size:
            return ImageSet(*self.tensors())
        with ThreadPoolExecutor(os.cpu_count()) as pool:

            def in_threads(*task: Any) -> Bar:
                return Bar(pool.map(*task), "decode", self.count)

            return ImageSet(*Decoder(self.dataset, size).decode(range(self.count), run=in_threads))


def open_data(settings: Settings, *, train: bool) -> Source:
    """The training or the evaluation half of the data that settings name; looks, but reads no image yet."""
    if settings.hold_out is not None:
        whole = open_data(replace(settings, hold_out=None), train=True)
        return half_of_images(whole, settings, train, settings.hold_out)
    if settings.dataset == "digit-pairs":
        half, count = ("training", digits.TRAIN_CANVASES) if train else ("held-out", digits.EVAL_CANVASES)
        tensors = partial(digits.digit_pairs, train)
        return Source(f"digit pairs ({half} digits)", digits.CLASSES, 1, digits.CANVAS, count, tensors=tensors)
    if settings.dataset == "folder":
        return half_of_folder(settings, train)
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


def half_of_folder(settings: Settings, train: bool) -> Source:
    """The training or the evaluation half of a folder; where it has but one, a share of each class is held out."""
    assert settings.data is not None
    root, asked = Path(settings.data).expanduser(), settings.val_split != Settings.val_split
    if not root.is_dir():
        raise DataError(f"{root}: there is no such folder of images")
    training = root / "train" if (root / "train").is_dir() else None
    evaluation = next((root / name for name in EVALUATION_FOLDERS if (root / name).is_dir()), None)
    if evaluation is not None:
        if asked:
            raise ValueError(f"val_split is for a folder without images to evaluate on, and there is {evaluation}")
        if train and training is None:
            raise DataError(f"{root} has no folder 'train': expected train/CLASS/IMAGE beside {evaluation.name}")
        return image_folder(training if train and training else evaluation)
    if training is None:
        if settings.test_only and not asked:
            return image_folder(root)
        if any(one.is_dir() for one in root.glob("[!.]*/[!.]*")):
            raise DataError(f"{root} has folders in class folders: expected CLASS/IMAGE, or train/CLASS/IMAGE, in it")
    whole = image_folder(training or root)
    return replace(half_of_images(whole, settings, train, settings.val_share), held_out=True)


def half_of_images(source: Source, settings: Settings, train: bool, share: float) -> Source:
    """All images but a share of each class, drawn by the seed, or that share."""
    from sklearn.model_selection import train_test_split

    dataset = source.dataset
    images = next((name for name in ("samples", "data") if hasattr(dataset, name)), None)
    if images is None or not hasattr(dataset, "targets"):
        raise ValueError(f"hold_out: {source.name} does not say what the classes of its images are: leave it out")
    try:
        halves = train_test_split(
            range(len(source)), test_size=share, stratify=dataset.targets, random_state=settings.seed
        )
    except ValueError as error:
        raise DataError(
            f"{source.name}: {share:g} of the images cannot be held out to evaluate on ({error}): give more images, or "
            "another share, by --hold-out, or by --val-split where there is no folder val"
        ) from error
    rows = sorted(halves[0 if train else 1])
    pixels = getattr(dataset, images)
    setattr(dataset, images, [pixels[row] for row in rows] if isinstance(pixels, list) else pixels[rows])
    dataset.targets = [dataset.targets[row] for row in rows]
    what = "without those" if train else f"{100 * share:.3g} % of each class, held out by seed {settings.seed}"
    return replace(source, name=f"{source.name}, {what}", count=len(rows))


class Folder(ImageFolder):
    """A folder of class folders; what has a name that begins with a dot is neither a class nor an image."""

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        names = sorted(found.name for found in Path(directory).glob("[!.]*") if found.is_dir())
        if len(names) < 2:
            raise DataError(f"{directory} has {len(names)} class folders: expected CLASS/IMAGE in it, of two or more")
        return names, {name: label for label, name in enumerate(names)}

    @staticmethod
    def make_dataset(directory: str | Path, class_to_idx: dict[str, int], *_: Any, **__: Any) -> list[tuple[str, int]]:
        """The images of each class, in torchvision's order: regular files, of each real folder once.

        Links are followed last: one that leads back into a class, or out to a folder around it, adds nothing.
        """
        root = Path(directory).resolve()
        samples, met = [], {root, *root.parents}
        places = [(label, os.path.join(directory, name)) for name, label in class_to_idx.items()]
        to_visit = [(os.path.islink(folder), label, folder) for label, folder in places]
        heapq.heapify(to_visit)
        while to_visit:
            label, folder = heapq.heappop(to_visit)[1:]
            if (real := Path(folder).resolve()) in met:
                continue
            met.add(real)
            with os.scandir(folder) as found:
                for entry in found:
                    # Where a link leads in a circle, an entry raises an error, and a path says that nothing is there.
                    one = Path(entry) if entry.is_symlink() else entry
                    if entry.name.startswith("."):
                        continue
                    if one.is_dir():
                        heapq.heappush(to_visit, (entry.is_symlink(), label, entry.path))
                    elif entry.name.lower().endswith(IMG_EXTENSIONS) and (
                        one.is_file() or not os.path.exists(entry)  # a link to nothing is a damaged image
                    ):
                        samples.append((entry.path, label))
        filled = {label for _, label in samples}
        empty = [name for name, label in class_to_idx.items() if label not in filled]
        if empty:
            raise DataError(
                f"{directory} has no images of {shorten(empty)}, which end in {', '.join(IMG_EXTENSIONS)}: fill the "
                "folders or remove them"
            )
        return sorted(samples, key=lambda one: (one[1], os.path.split(one[0])))


def image_folder(folder: Path) -> Source:
    """A folder of class folders, ``CLASS/IMAGE``."""
    found = Folder(str(folder), loader=open_image)
    return Source(str(folder), tuple(found.classes), 3, None, len(found), found)


def varied(settings: Settings, size: tuple[int, int], mean: Sequence[float]) -> Vary | None:
    """What training images go through while they are decoded, by chance: crops of any size, and what timm varies.

    Args:
        settings: say what.
        size: rows and columns of the images that come out.
        mean: of each channel in 0…1, a colour for what is empty where an image is turned or moved.
    """
    resized, timms = settings.train_crop == "resized", settings.aa or settings.color_jitter
    if not (resized or timms):
        return None
    parts = [v2.RandomResizedCrop(size, (settings.crop_scale, 1.0)) if resized else partial(centre, size=size)]
    if timms:
        try:
            _, between, _ = transforms_imagenet_train(
                size, separate=True, auto_augment=settings.aa, color_jitter=settings.color_jitter or None,
                force_color_jitter=True, interpolation="bilinear", mean=tuple(mean),
            )  # fmt: skip
        except (AssertionError, ValueError) as error:
            raise ValueError(
                f"aa: timm knows no {settings.aa!r} ({error}): give one such as rand-m9-mstd0.5"
            ) from error
        parts.append(between)
    return v2.Compose(parts)


def open_images(
    source: Source,
    size: tuple[int, int],
    device: torch.device,
    *,
    workers: int | None = None,
    cache: str = "auto",
    vary: Vary | None = None,
) -> Images:
    """The images of a source at a size: in memory, decoded by worker processes in every epoch, or as a stream.

    Args:
        source: of what.
        size: rows and columns, in pixels.
        device: where batches are wanted.
        workers: processes that decode, 0 for this one; where there are some, images are not kept in memory unasked.
        cache: ``"ram"`` and ``"none"`` keep images in memory or do not; ``"auto"`` keeps what takes no more than
            :data:`SMALL`.
        vary: what each image goes through anew in each epoch, to that size; what is in memory stays as it is.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # of this run on this machine, as torchrun says
    decoding = max(1, min(MOST_WORKERS, cores() // processes)) if workers is None else workers
    classes = len(source.classes)
    if isinstance(source.dataset, IterableImageDataset):
        if not decoding:
            raise ValueError("workers must be at least 1 for a stream, which draws its order in processes of its own")
        source.dataset.transform = partial(prepare, size=size, vary=vary)
        return ImageStream(source.dataset, workers=decoding, device=device, classes=classes)
    small = source.count * source.channels * math.prod(size) <= SMALL
    keep = cache == "ram" or (cache == "auto" and small and not workers)
    if source.dataset is not None and (vary is not None or not keep):
        return ImageLoader(Decoder(source.dataset, size, vary), workers=decoding, device=device, classes=classes)
    found, place = source.read(size), device if small else torch.device("cpu")
    refuse_other_labels(found.labels, classes)
    return ImageSet(found.images.to(place), found.labels.to(place), device)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

"""Images and their classes: folders, data sets of timm's, and digit pairs, in memory or decoded by worker processes."""

from __future__ import annotations

import math
import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from timm.data import create_dataset, create_transform
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import v2

from vision_attn.errors import DataError
from vision_attn.tools.training import digits
from vision_attn.tools.training.settings import Settings

__all__ = [
    "InMemory",
    "Source",
    "Workers",
    "cores",
    "crop_of",
    "images_in",
    "open_data",
    "open_image",
    "open_images",
    "seed_all",
]

#: Bytes up to which images that stay the same are kept in memory, on the device.
SMALL = 2 * 2**30
#: Images to a worker process, and the most of these: more seldom help, and each takes memory.
IMAGES_A_WORKER, MOST_WORKERS = 64, 16
#: Longest side, in pixels, of images that are cropped after padding by default; larger ones are photographs.
SMALL_SIDE = 64
#: Names that the evaluation half of an image folder goes by.
EVALUATION_FOLDERS = ("val", "validation", "valid", "test")


def seed_all(*numbers: int) -> None:
    """What torch, NumPy and Python draw next follows from these numbers alone."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def open_image(file: Any) -> Image.Image:
    """An image file in RGB, upright by its EXIF orientation; of 16 bits the upper 8."""
    with Image.open(file) as image:
        found = ImageOps.exif_transpose(image)
        # Pillow has some formats of 16 bits in a mode of 32, and would clip 16 bits at 255.
        if found.mode.startswith("I;16") or (found.mode == "I" and image.format in ("PNG", "PPM")):
            found = Image.fromarray((np.asarray(found) // 256).astype(np.uint8))
        if found.mode in ("I", "F"):
            raise ValueError("pixels of 32 bits, whose range is not known")
        return found.convert("RGBA" if "transparency" in found.info else "RGB").convert("RGB")


def is_image(path: str) -> bool:
    """Whether a file is an image by its ending, and not hidden by a dot before its name."""
    return path.lower().endswith(IMG_EXTENSIONS) and not os.path.basename(path).startswith(".")


def images_in(names: Sequence[str | Path]) -> list[Path]:
    """Image files by name, and all those in folders."""
    found: list[Path] = []
    for path in map(Path, names):
        inner = [path]
        if path.is_dir():
            inner = [one for one in sorted(path.rglob("*")) if is_image(one.name) and one.is_file()]
        if not inner:
            raise DataError(f"{path} has no images, which end in {', '.join(IMG_EXTENSIONS)}")
        found += inner
    return found


class Folder(ImageFolder):
    """A folder ``CLASS/IMAGE``; what has a name that begins with a dot is neither a class nor an image."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root), loader=open_image, is_valid_file=is_image)

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        names = sorted(found.name for found in Path(directory).glob("[!.]*") if found.is_dir())
        if len(names) < 2:
            raise DataError(f"{directory} has {len(names)} class folders: expected CLASS/IMAGE in it, of two or more")
        return names, {name: label for label, name in enumerate(names)}


@dataclass(frozen=True)
class Source:
    """A half of a data set that is known but not yet read."""

    name: str
    classes: tuple[str, ...]
    channels: int
    #: rows and columns of its images, where all have the same
    size: tuple[int, int] | None
    #: gives an image of Pillow's and its class by row
    dataset: Any
    #: the rows that belong to this half
    rows: Sequence[int]
    #: gives the images ``(b, c, h, w)`` in bytes and their classes, of all rows, where they come as tensors
    tensors: Callable[[], tuple[Tensor, Tensor]] | None = None

    def __len__(self) -> int:
        return len(self.rows)


def open_data(settings: Settings, *, train: bool) -> Source:
    """The training or the evaluation half of the data that settings name; reads no image yet."""
    if settings.dataset == "digit-pairs":
        count = digits.TRAIN_CANVASES if train else digits.EVAL_CANVASES
        name = f"digit pairs ({'training' if train else 'held-out'} digits)"
        return Source(
            name, digits.CLASSES, 1, digits.CANVAS, None, range(count), lambda: digits.digit_pairs(train=train)
        )
    if settings.data is None and not settings.dataset.startswith("hfds/"):
        raise ValueError(f"data must name the folder of the data set {settings.dataset!r}: give --data")
    share, source = settings.val_share, None
    if settings.dataset == "folder":
        root = Path(str(settings.data)).expanduser()
        if not root.is_dir():
            raise DataError(f"{root}: there is no such folder of images")
        training = root / "train" if (root / "train").is_dir() else root
        evaluation = next((root / name for name in EVALUATION_FOLDERS if (root / name).is_dir()), None)
        if evaluation is not None and training == root and (train or share is not None):
            raise DataError(f"{root} has no folder 'train': expected train/CLASS/IMAGE beside {evaluation.name}")
        if evaluation is None and share is None:
            share = 0.1
        source = folder_source(training if train or evaluation is None or share is not None else evaluation)
    else:
        source = named_source(settings, settings.train_split if train or share is not None else settings.val_split)
    return source if share is None else part_of(source, settings, train, share)


def folder_source(folder: Path) -> Source:
    """The images of a folder ``CLASS/IMAGE``."""
    try:
        found = Folder(folder)
    except FileNotFoundError as error:  # torchvision names the classes without images
        raise DataError(f"{folder}: {error}: fill the folders or remove them") from error
    return Source(str(folder), tuple(found.classes), 3, None, found, range(len(found)))


def named_source(settings: Settings, split: str) -> Source:
    """A data set that timm opens by its name."""
    name = settings.dataset if "/" in settings.dataset else f"torch/{settings.dataset}"
    kind, root = name.partition("/")[0], None if settings.data is None else str(settings.data.expanduser())
    if kind not in ("torch", "hfds") or settings.dataset == "torch":
        raise ValueError(
            f"dataset must be folder, cifar10, cifar100, digit-pairs, torch/… or hfds/…; got {settings.dataset!r}"
        )
    try:
        found: Any = create_dataset(name, root, split, is_training=True, download=settings.download)
    except (AssertionError, ImportError, OSError, RuntimeError) as error:
        fetch = ", or fetch it with --download" if kind == "torch" else ""
        raise DataError(
            f"{settings.dataset} cannot be read in {root} ({error}): name the folder it is in{fetch}"
        ) from error
    classes = getattr(found, "classes", None) or list(found.reader.class_to_idx)
    names = tuple(one if isinstance(one, str) else ", ".join(one) for one in classes)  # those of ImageNet have synonyms
    pixels, size, tensors = getattr(found, "data", None), None, None
    if isinstance(pixels, np.ndarray) and pixels.ndim == 4:  # of CIFAR
        size = (pixels.shape[1], pixels.shape[2])

        def tensors() -> tuple[Tensor, Tensor]:
            return torch.from_numpy(found.data).permute(0, 3, 1, 2).contiguous(), torch.as_tensor(found.targets)

    return Source(f"{settings.dataset} ({split})", names, 3, size, found, range(len(found)), tensors)


def labels_of(source: Source) -> Tensor:
    """The class of each image, without decoding one."""
    dataset = source.dataset
    reader: Any = getattr(dataset, "reader", None)
    found = getattr(dataset, "targets", None)
    if hasattr(reader, "label_key"):  # of Hugging Face's data sets
        found = list(reader.dataset[reader.label_key])
    if found is None:
        raise ValueError(f"{source.name} does not say what the classes of its images are: leave out class_weights")
    return torch.as_tensor(found)[list(source.rows)]


def part_of(source: Source, settings: Settings, train: bool, share: float) -> Source:
    """All images but a share of each class, drawn by the seed, or that share."""
    from sklearn.model_selection import train_test_split

    labels = labels_of(source).tolist()
    try:
        halves = train_test_split(source.rows, test_size=share, stratify=labels, random_state=settings.seed)
    except ValueError as error:
        raise DataError(
            f"{source.name}: {share:g} of the images cannot be held out to evaluate on ({error}): give more images, or "
            "another --val-share"
        ) from error
    rows = sorted(halves[0 if train else 1])
    what = "without those" if train else f"{100 * share:.3g} % of each class, held out by seed {settings.seed}"
    return Source(f"{source.name}, {what}", source.classes, 3, source.size, source.dataset, rows, source.tensors)


class Decoded(Dataset[tuple[Tensor, int]]):
    """The images of a source through a transform; what is random follows from the seed, the epoch and the row."""

    def __init__(self, source: Source, transform: Callable[[Image.Image], Tensor], seed: int) -> None:
        self.source, self.transform, self.seed = source, transform, seed
        self.epoch = torch.zeros((), dtype=torch.long).share_memory_()

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        row, dataset = self.source.rows[place], self.source.dataset
        try:
            if hasattr(dataset, "reader"):  # timm would put another image in the place of a damaged one
                file, label = dataset.reader[row]
                image = open_image(file)
            else:
                image, label = dataset[row]
        except Exception as error:  # a decoder can fail in any way
            name = dataset.samples[row][0] if hasattr(dataset, "samples") else f"image {row} of {self.source.name}"
            reason = " ".join(str(error).split())
            raise DataError(f"{name} is no image that can be read ({reason}): fetch it again or remove it") from error
        seed_all(self.seed, int(self.epoch), row)
        return self.transform(image.convert("RGB")), label


@dataclass(frozen=True)
class InMemory:
    """Images as one tensor of bytes, on the device that trains."""

    images: Tensor
    labels: Tensor
    kept = "in memory"

    def __len__(self) -> int:
        return len(self.images)

    def batches(self, rows: Sequence[Tensor], epoch: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in rows:
            here = chosen.to(self.images.device)
            yield self.images[here], self.labels[here]


@dataclass(frozen=True)
class Workers:
    """Images that worker processes decode in every epoch, ahead of the device."""

    dataset: Decoded
    workers: int
    device: torch.device

    @property
    def kept(self) -> str:
        return f"decoded in every epoch by {self.workers or 'no'} worker processes"

    @property
    def labels(self) -> Tensor:
        return labels_of(self.dataset.source)

    def __len__(self) -> int:
        return len(self.dataset)

    def batches(self, rows: Sequence[Tensor], epoch: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        self.dataset.epoch.fill_(epoch)
        loader = DataLoader(
            self.dataset,
            batch_sampler=[chosen.tolist() for chosen in rows],
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=ignore_ctrl_c,
            generator=torch.Generator().manual_seed(0),  # or it draws from torch's own, on which dropout depends
        )
        try:
            for images, labels in loader:
                yield images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
        except DataError as error:  # torch puts the traceback of the worker before its last line
            raise DataError(
                str(error).strip().splitlines()[-1].removeprefix("vision_attn.errors.DataError: ")
            ) from None
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):
                raise
            raise DataError(
                f"a worker process that decodes images ended, often for want of memory: give fewer --workers ({error})"
            ) from error


def ignore_ctrl_c(worker: int) -> None:
    """Ctrl-C reaches every process of a terminal; what comes of it is decided by the one that trains."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def varied(settings: Settings, config: Mapping[str, Any]) -> Callable[[Image.Image], Image.Image] | None:
    """What training images go through while they are decoded: crops of any size, and what timm varies; or None."""
    resized = crop_of(settings, config) == "resized"
    if not (resized or settings.aa or settings.color_jitter):
        return None
    try:
        crops, between, _ = create_transform(
            config["input_size"], is_training=True, separate=True, hflip=0.0, scale=(settings.crop_scale, 1.0),
            auto_augment=settings.aa, color_jitter=settings.color_jitter or None, force_color_jitter=True,
            interpolation=config["interpolation"], mean=config["mean"],
        )  # fmt: skip
    except (AssertionError, ValueError) as error:
        raise ValueError(f"aa: timm knows no {settings.aa!r} ({error}): give one such as rand-m9-mstd0.5") from error
    return v2.Compose([crops if resized else v2.Compose(evaluated(config).transforms[:-1]), between])


def evaluated(config: Mapping[str, Any]) -> Any:
    """The transform of evaluation, with the network's own crop and interpolation: an image to ``(c, h, w)`` of bytes."""
    how = {key: config[key] for key in ("interpolation", "crop_pct", "crop_mode", "mean") if key in config}
    return create_transform(config["input_size"], normalize=False, **how)


def open_images(
    source: Source, settings: Settings, config: Mapping[str, Any], device: torch.device, *, train: bool = False
) -> InMemory | Workers:
    """The images of a source as a network takes them, ``(b, c, h, w)`` of bytes: in memory where they stay the same.

    Args:
        source: of what.
        settings: of the run: how training images are varied, and how many workers there are.
        config: timm's of the network: ``input_size``, ``interpolation``, ``crop_pct``, ``crop_mode``, ``mean``.
        device: where batches are wanted.
        train: whether they are varied.
    """
    size = tuple(config["input_size"][1:])
    vary = varied(settings, config) if train else None
    if source.tensors is not None and vary is None and size == source.size:
        rows, (images, labels) = torch.as_tensor(source.rows), source.tensors()
        return InMemory(images[rows].to(device), labels[rows].to(device))
    if source.dataset is None:
        raise ValueError(f"img_size, crop, aa and color_jitter apply to image files, and {source.name} are none")
    transform = evaluated(config) if vary is None else v2.Compose([vary, v2.PILToTensor()])
    usual = min(MOST_WORKERS, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)), len(source) // IMAGES_A_WORKER)
    workers = usual if settings.workers is None else settings.workers
    loader = Workers(Decoded(source, transform, settings.seed), workers, device)
    if vary is not None or len(source) * math.prod(config["input_size"]) > SMALL:
        return loader
    images, labels = (
        torch.cat(part) for part in zip(*loader.batches(torch.arange(len(source)).split(256)), strict=True)
    )
    return InMemory(images, labels)


def crop_of(settings: Settings, config: Mapping[str, Any]) -> str:
    """Random resized crops for photographs; crops of the padded image for small ones, as CIFAR's."""
    return settings.crop or ("pad" if max(config["input_size"][1:]) <= SMALL_SIDE else "resized")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

"""Images and their classes: folders and timm's data sets, in memory or decoded by worker processes."""

from __future__ import annotations

import math
import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from timm.data import auto_augment, create_dataset, create_transform
from timm.data.transforms_factory import transforms_imagenet_train
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import v2

from vision_attn.errors import DataError
from vision_attn.tools.training.settings import Settings

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


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    """A half of a data set that is known but not yet decoded."""

    name: str
    classes: tuple[str, ...]
    #: gives an image of Pillow's and its class by row; small ones have the pixels ``(b, h, w, c)`` of all as ``data``
    dataset: Any
    #: those that belong to this half
    rows: Sequence[int]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def pixels(self) -> np.ndarray | None:
        """Of all images, where they come like that."""
        found = getattr(self.dataset, "data", None)
        return found if isinstance(found, np.ndarray) and found.ndim == 4 else None

    @property
    def labels(self) -> Tensor:
        """The class of each image, without decoding one."""
        reader: Any = getattr(self.dataset, "reader", None)  # of Hugging Face's data sets
        found = list(reader.dataset[reader.label_key]) if reader else self.dataset.targets
        return torch.as_tensor(found)[list(self.rows)]


def open_data(settings: Settings, *, train: bool) -> Source:
    """The training or the evaluation half of the data that settings name; decodes no image yet."""
    share, root = settings.val_share, settings.data and settings.data.expanduser()
    whole = train or share is not None
    if root is None and not settings.dataset.startswith("hfds/"):
        raise ValueError(f"data must name the folder of the data set {settings.dataset!r}: give --data")
    if settings.dataset != "folder":
        source = named(settings, settings.train_split if whole else settings.val_split)
    else:
        assert root is not None
        if not root.is_dir():
            raise DataError(f"{root}: there is no such folder of images")
        training = root / "train" if (root / "train").is_dir() else root
        evaluation = next((root / name for name in EVALUATION_FOLDERS if (root / name).is_dir()), None)
        if evaluation and whole and training == root:
            raise DataError(f"{root} has no folder 'train': expected train/CLASS/IMAGE beside {evaluation.name}")
        share = share or (None if evaluation else 0.1)
        folder = training if whole or evaluation is None else evaluation
        dataset = Folder(folder)
        source = Source(str(folder), tuple(dataset.classes), dataset, range(len(dataset)))
    return source if share is None else part_of(source, settings, train, share)


def named(settings: Settings, split: str) -> Source:
    """A data set that timm opens by its name."""
    name = settings.dataset if "/" in settings.dataset else f"torch/{settings.dataset}"
    root = settings.data and str(settings.data.expanduser())
    try:
        found: Any = create_dataset(name, root, split, is_training=True, download=settings.download)
    except (AssertionError, ImportError, OSError, RuntimeError) as error:
        raise DataError(f"{name} cannot be read in {root} ({error}): name its folder, or give --download") from error
    classes = getattr(found, "classes", None) or found.reader.class_to_idx
    return Source(f"{settings.dataset} ({split})", tuple(map(str, classes)), found, range(len(found)))


def part_of(source: Source, settings: Settings, train: bool, share: float) -> Source:
    """All images but a share of each class, drawn by the seed, or that share."""
    from sklearn.model_selection import train_test_split

    how = {"test_size": share, "stratify": source.labels.tolist(), "random_state": settings.seed}
    try:
        halves = train_test_split(source.rows, **how)
    except ValueError as error:
        raise DataError(f"{source.name}: {share:g} of the images cannot be held out ({error})") from error
    what = "without those" if train else f"{100 * share:.3g} % of each class, held out by seed {settings.seed}"
    return replace(source, name=f"{source.name}, {what}", rows=sorted(halves[0 if train else 1]))


class Decoded(Dataset[tuple[Tensor, int]]):
    """The images of a source through a transform; what is random follows from the seed, the epoch and the row."""

    def __init__(self, source: Source, transform: Callable[[Image.Image], Tensor], seed: int) -> None:
        self.source, self.transform, self.seed = source, transform, seed
        self.epoch = torch.zeros((), dtype=torch.long).share_memory_()

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        row, dataset = self.source.rows[place], self.source.dataset
        try:
            # timm would put another image in the place of a damaged one.
            image, label = dataset.reader[row] if hasattr(dataset, "reader") else dataset[row]
            with nullcontext() if isinstance(image, Image.Image) else image as file:
                image = open_image(file) if file else image.convert("RGB")
        except Exception as error:  # a decoder can fail in any way
            name = dataset.samples[row][0] if hasattr(dataset, "samples") else f"image {row} of {self.source.name}"
            reason = " ".join(str(error).split())
            raise DataError(f"{name} is no image that can be read ({reason}): fetch it again or remove it") from error
        seed_all(self.seed, int(self.epoch), row)
        return self.transform(image), label


@dataclass(frozen=True)
class InMemory:
    """Images as one tensor of bytes, on the device that trains."""

    images: Tensor
    labels: Tensor
    kept = "in memory"

    def batches(self, rows: Sequence[Tensor], epoch: int = 0) -> Iterator[list[Tensor]]:
        for chosen in rows:
            here = chosen.to(self.images.device)
            yield [self.images[here], self.labels[here]]


@dataclass(frozen=True)
class Workers:
    """Images that worker processes decode in every epoch, ahead of the device."""

    dataset: Decoded
    labels: Tensor
    workers: int
    kept = "decoded in every epoch"

    def batches(self, rows: Sequence[Tensor], epoch: int = 0) -> Iterator[list[Tensor]]:
        self.dataset.epoch.fill_(epoch)
        loader = DataLoader(
            self.dataset,
            batch_sampler=[chosen.tolist() for chosen in rows],
            num_workers=self.workers,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=ignore_ctrl_c,
            generator=torch.Generator().manual_seed(0),  # or it draws from torch's own, on which dropout depends
        )
        try:
            yield from loader
        except (EOFError, OSError, RuntimeError) as error:
            why = str(error).strip().rpartition("\n")[2]  # torch puts the traceback of the worker before its last line
            died = "" if isinstance(error, DataError) else "a worker process ended, so give fewer --workers: "
            raise DataError(f"{died}{why.removeprefix('vision_attn.errors.DataError: ')}") from error


def ignore_ctrl_c(worker: int) -> None:
    """Ctrl-C reaches every process of a terminal; what comes of it is decided by the one that trains."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """As timm's, which fails where it draws no bits at all, since Pillow 13 refuses these: then all is black."""
    return image.point(lambda value: value & (256 - 2 ** (8 - min(bits, 8))))


auto_augment.NAME_TO_OP |= dict.fromkeys(("Posterize", "PosterizeIncreasing", "PosterizeOriginal"), posterize)


def crop_of(settings: Settings, config: Mapping[str, Any]) -> str:
    """Random resized crops for photographs; crops of the padded image for small ones, as CIFAR's."""
    return settings.crop or ("pad" if max(config["input_size"][1:]) <= SMALL_SIDE else "resized")


def varied(settings: Settings, config: Mapping[str, Any]) -> Callable[[Image.Image], Tensor] | None:
    """What training images go through while they are decoded: crops of any size, and what timm varies; or None."""
    resized = crop_of(settings, config) == "resized"
    if not (resized or settings.aa or settings.color_jitter):
        return None
    try:
        crops, between, to_tensor = transforms_imagenet_train(
            config["input_size"][1:], separate=True, normalize=False, hflip=0.0,
            scale=(settings.crop_scale, 1.0), auto_augment=settings.aa, color_jitter=settings.color_jitter or None,
            force_color_jitter=True, interpolation=config["interpolation"], mean=config["mean"],
        )  # fmt: skip
    except (AssertionError, ValueError) as error:
        raise ValueError(f"aa: timm knows no {settings.aa!r} ({error}): give one such as rand-m9-mstd0.5") from error
    return v2.Compose([crops if resized else v2.Compose(evaluated(config).transforms[:-1]), between, to_tensor])


def evaluated(config: Mapping[str, Any]) -> Any:
    """The transform of evaluation, by the network's own crop and interpolation: images to bytes ``(c, h, w)``."""
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
        device: where images in memory lie.
        train: whether they are varied.
    """
    vary, pixels = varied(settings, config) if train else None, source.pixels
    if pixels is not None and vary is None and pixels.shape[1:3] == tuple(config["input_size"][1:]):
        images = torch.from_numpy(pixels[list(source.rows)]).permute(0, 3, 1, 2).contiguous()
        return InMemory(images.to(device), source.labels.to(device))
    usual = min(MOST_WORKERS, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)), len(source) // IMAGES_A_WORKER)
    dataset = Decoded(source, vary or evaluated(config), settings.seed)
    loader = Workers(dataset, source.labels, usual if settings.workers is None else settings.workers)
    if vary is not None or len(source) * math.prod(config["input_size"]) > SMALL:
        return loader
    parts = list(loader.batches(torch.arange(len(source)).split(256)))
    return InMemory(*(torch.cat(part).to(device) for part in zip(*parts, strict=True)))

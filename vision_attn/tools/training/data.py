"""Data sets: folders of images and timm's data sets, kept in memory or decoded by worker processes."""

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
from joblib import cpu_count
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

#: Largest size in bytes of images that are kept in memory, on the device.
MAX_IN_MEMORY = 2 * 2**30
#: Images per worker process, and the largest number of worker processes: more seldom help, and each takes memory.
IMAGES_PER_WORKER, MAX_WORKERS = 64, 16
#: Longest side, in pixels, of images that are cropped after padding by default; larger ones are photographs.
MAX_PAD_SIDE = 64
#: Names of the evaluation half of an image folder.
EVALUATION_FOLDERS = ("val", "validation", "valid", "test")


def seed_all(*numbers: int) -> None:
    """Seed torch, NumPy and Python from these numbers alone."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def open_image(file: Any) -> Image.Image:
    """Open an image file in RGB, upright by its EXIF orientation; of 16 bits keep the upper 8."""
    with Image.open(file) as image:
        found = ImageOps.exif_transpose(image)
        # Pillow has some formats of 16 bits in a mode of 32, and would clip 16 bits at 255.
        if found.mode.startswith("I;16") or (found.mode == "I" and image.format in ("PNG", "PPM")):
            found = Image.fromarray((np.asarray(found) // 256).astype(np.uint8))
        if found.mode in ("I", "F"):
            raise ValueError("pixels of 32 bits, whose range is not known")
        return found.convert("RGBA" if "transparency" in found.info else "RGB").convert("RGB")


def is_image(path: str) -> bool:
    """Return True for a file with the ending of an image and a name that does not begin with a dot."""
    return path.lower().endswith(IMG_EXTENSIONS) and not os.path.basename(path).startswith(".")


class Folder(ImageFolder):
    """A folder ``CLASS/IMAGE``; names that begin with a dot are ignored."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root), loader=open_image, is_valid_file=is_image)

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        names = sorted(found.name for found in Path(directory).glob("[!.]*") if found.is_dir())
        if len(names) < 2:
            raise DataError(f"{directory} has {len(names)} class folders: expected CLASS/IMAGE in it, of two or more")
        return names, {name: label for label, name in enumerate(names)}


@dataclass(frozen=True)
class Source:
    """The training or evaluation half of a data set, not decoded yet."""

    name: str
    classes: tuple[str, ...]
    #: gives a Pillow image and its class by row; data sets of small images hold all pixels ``(b, h, w, 3)`` as ``data``
    dataset: Any
    #: rows of the data set that belong to this half
    rows: Sequence[int]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def pixels(self) -> np.ndarray | None:
        """All images of the data set as one array, where the data set holds them so."""
        found = getattr(self.dataset, "data", None)
        return found if isinstance(found, np.ndarray) and found.ndim == 4 and found.shape[3] == 3 else None

    @property
    def labels(self) -> Tensor:
        """The class of each image, without decoding one."""
        reader: Any = getattr(self.dataset, "reader", None)  # of Hugging Face's data sets
        found = list(reader.dataset[reader.label_key]) if reader else self.dataset.targets
        return torch.as_tensor(found)[list(self.rows)]


def open_data(settings: Settings, *, train: bool) -> Source:
    """Open the training or evaluation half of a data set; no image is decoded yet."""
    fraction, root = settings.val_share, settings.data and settings.data.expanduser()
    from_train = train or fraction is not None
    if settings.dataset.startswith("hfds/") or (root and settings.dataset != "folder"):
        split = settings.train_split if from_train else settings.val_split
        name = settings.dataset if "/" in settings.dataset else f"torch/{settings.dataset}"
        try:
            dataset: Any = create_dataset(name, root and str(root), split, is_training=True, download=settings.download)
        except (AssertionError, ImportError, OSError, RuntimeError) as error:
            remedy = "name its folder, or give --download"
            raise DataError(f"{name} cannot be read in {root} ({error}): {remedy}") from error
        classes = getattr(dataset, "classes", None) or dataset.reader.class_to_idx
        name = f"{settings.dataset} ({split})"
    elif root is None:
        raise ValueError(f"data must name the folder of the data set {settings.dataset!r}: give --data")
    else:
        if not root.is_dir():
            raise DataError(f"{root}: there is no such folder of images")
        training = root / "train" if (root / "train").is_dir() else root
        evaluation = next((root / name for name in EVALUATION_FOLDERS if (root / name).is_dir()), None)
        if evaluation and from_train and training == root:
            raise DataError(f"{root} has no folder 'train': expected train/CLASS/IMAGE beside {evaluation.name}")
        fraction = fraction or (None if evaluation else 0.1)
        folder = training if from_train or evaluation is None else evaluation
        dataset, name = Folder(folder), str(folder)
        classes = dataset.classes
    source = Source(name, tuple(map(str, classes)), dataset, range(len(dataset)))
    return source if fraction is None else split_source(source, settings, train, fraction)


def split_source(source: Source, settings: Settings, train: bool, fraction: float) -> Source:
    """Hold out a fraction of each class, drawn by the seed; return the held-out images or the others."""
    from sklearn.model_selection import train_test_split

    options = {"test_size": fraction, "stratify": source.labels.tolist(), "random_state": settings.seed}
    try:
        halves = train_test_split(source.rows, **options)
    except ValueError as error:
        raise DataError(f"{source.name}: {fraction:g} of the images cannot be held out ({error})") from error
    held_out = f"{100 * fraction:.3g} % of each class, held out by seed {settings.seed}"
    name = f"{source.name}, {'without those' if train else held_out}"
    return replace(source, name=name, rows=sorted(halves[0 if train else 1]))


@dataclass(frozen=True)
class InMemory:
    """Images as one tensor of bytes, on the device that trains."""

    images: Tensor
    labels: Tensor
    storage = "in memory"

    def batches(self, rows: Sequence[Tensor], epoch: int = 0) -> Iterator[list[Tensor]]:
        for chosen in rows:
            index = chosen.to(self.images.device)
            yield [self.images[index], self.labels[index]]


class Decoded(Dataset[tuple[Tensor, int]]):
    """Images that worker processes decode in every epoch; randomness follows from the seed, the epoch and the row."""

    storage = "decoded in every epoch"

    def __init__(self, source: Source, transform: Callable[[Image.Image], Tensor], seed: int, workers: int) -> None:
        self.source, self.transform, self.seed, self.workers = source, transform, seed, workers
        self.labels = source.labels
        self.epoch = torch.zeros((), dtype=torch.long).share_memory_()

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        row, dataset = self.source.rows[index], self.source.dataset
        try:
            # timm would return another image in place of a damaged one.
            image, label = dataset.reader[row] if hasattr(dataset, "reader") else dataset[row]
            with nullcontext() if isinstance(image, Image.Image) else image as file:
                image = open_image(file) if file else image.convert("RGB")
        except Exception as error:  # a decoder can fail in any way
            name = dataset.samples[row][0] if hasattr(dataset, "samples") else f"image {row} of {self.source.name}"
            reason = " ".join(str(error).split())
            raise DataError(f"{name} is no image that can be read ({reason}): fetch it again or remove it") from error
        seed_all(self.seed, int(self.epoch), row)
        return self.transform(image), label

    def batches(self, rows: Sequence[Tensor], epoch: int = 0) -> Iterator[list[Tensor]]:
        self.epoch.fill_(epoch)
        loader = DataLoader(
            self,
            batch_sampler=[chosen.tolist() for chosen in rows],
            num_workers=self.workers,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=ignore_ctrl_c,
            generator=torch.Generator().manual_seed(0),  # or it draws from torch's own, on which dropout depends
        )
        try:
            yield from loader
        except (EOFError, OSError, RuntimeError) as error:
            reason = str(error).strip().rpartition("\n")[2]  # torch puts the worker's traceback before its last line
            died = "" if isinstance(error, DataError) else "a worker process ended, so give fewer --workers: "
            raise DataError(f"{died}{reason.removeprefix('vision_attn.errors.DataError: ')}") from error


def ignore_ctrl_c(worker: int) -> None:
    """Leave Ctrl-C, which reaches every process of a terminal, to the process that trains."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """Posterize as timm does, also to the 0 bits that Pillow 13 refuses: the image is black then."""
    return image.point(lambda value: value & (256 - 2 ** (8 - min(bits, 8))))


auto_augment.NAME_TO_OP |= dict.fromkeys(("Posterize", "PosterizeIncreasing", "PosterizeOriginal"), posterize)


def choose_crop(settings: Settings, config: Mapping[str, Any]) -> str:
    """Return "resized" for photographs, and "pad", as for CIFAR, for small images."""
    return settings.crop or ("pad" if max(config["input_size"][1:]) <= MAX_PAD_SIDE else "resized")


def train_transform(settings: Settings, config: Mapping[str, Any]) -> Callable[[Image.Image], Tensor] | None:
    """Build the random transform of training images on the CPU: resized crops and timm's augmentation; or None."""
    resized = choose_crop(settings, config) == "resized"
    if not (resized or settings.aa or settings.color_jitter):
        return None
    try:
        crop, augment, to_tensor = transforms_imagenet_train(
            config["input_size"][1:], separate=True, normalize=False, hflip=0.0,
            scale=(settings.crop_scale, 1.0), auto_augment=settings.aa, color_jitter=settings.color_jitter or None,
            force_color_jitter=True, interpolation=config["interpolation"], mean=config["mean"],
        )  # fmt: skip
    except (AssertionError, ValueError) as error:
        raise ValueError(f"aa: timm knows no {settings.aa!r} ({error}): give one such as rand-m9-mstd0.5") from error
    return v2.Compose([crop if resized else v2.Compose(eval_transform(config).transforms[:-1]), augment, to_tensor])


def eval_transform(config: Mapping[str, Any]) -> Any:
    """Build the evaluation transform, with the network's crop and interpolation: images to bytes ``(c, h, w)``."""
    options = {key: config[key] for key in ("interpolation", "crop_pct", "crop_mode", "mean") if key in config}
    return create_transform(config["input_size"], normalize=False, **options)


def open_images(
    source: Source, settings: Settings, config: Mapping[str, Any], device: torch.device, *, train: bool = False
) -> InMemory | Decoded:
    """Open images as bytes ``(b, c, h, w)`` of the network's size, in memory where they do not vary.

    Args:
        source: the images.
        settings: augmentation of training images, and the number of workers.
        config: timm's configuration of the network: ``input_size``, ``interpolation``, ``crop_pct``, ``crop_mode``,
            ``mean``.
        device: device of images in memory.
        train: augment the images.
    """
    augment, pixels = train_transform(settings, config) if train else None, source.pixels
    if pixels is not None and augment is None and pixels.shape[1:3] == tuple(config["input_size"][1:]):
        images = torch.from_numpy(pixels[list(source.rows)]).permute(0, 3, 1, 2).contiguous()
        return InMemory(images.to(device), source.labels.to(device))
    workers = settings.workers
    if workers is None:
        cores = cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        workers = min(MAX_WORKERS, cores, len(source) // IMAGES_PER_WORKER)
    decoded = Decoded(source, augment or eval_transform(config), settings.seed, workers)
    if augment is not None or len(source) * math.prod(config["input_size"]) > MAX_IN_MEMORY:
        return decoded
    parts = list(decoded.batches(torch.arange(len(source)).split(256)))
    return InMemory(*(torch.cat(part).to(device) for part in zip(*parts, strict=True)))

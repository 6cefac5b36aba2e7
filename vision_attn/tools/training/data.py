"""Image folders and timm data sets, kept in memory or decoded by worker processes."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather, set_seed
from joblib import cpu_count
from PIL import Image
from timm.data import auto_augment, create_dataset, create_transform
from timm.data.transforms_factory import transforms_imagenet_train
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from vision_attn.errors import DataError
from vision_attn.text import shorten
from vision_attn.tools.images import is_image, open_image
from vision_attn.tools.training.settings import Settings

#: Largest size in bytes of a data set that is kept in the memory of the device.
MAX_IN_MEMORY = 2 * 2**30
#: Images per worker process, and largest number of worker processes, each of which needs memory.
IMAGES_PER_WORKER, MAX_WORKERS = 64, 16
#: Longest side in pixels of images that are padded and cropped by default. Larger images are photographs.
MAX_PAD_SIDE = 64
#: Names of the validation folder.
EVALUATION_FOLDERS = ("val", "validation", "valid", "test")


def seed_all(*numbers: int) -> None:
    """Seed torch, NumPy and Python with a seed that depends only on these numbers."""
    set_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))


class Folder(ImageFolder):
    """Image folder ``CLASS/IMAGE``; names that start with a dot are ignored."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root), loader=open_image, is_valid_file=is_image)

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        names = sorted(found.name for found in Path(directory).glob("[!.]*") if found.is_dir())
        if len(names) < 2:
            raise DataError(f"{directory}: expected CLASS/IMAGE with at least 2 class folders, got {len(names)}")
        empty = [name for name in names if not any(map(is_image, map(str, Path(directory, name).rglob("*"))))]
        if empty:
            raise DataError(f"{directory}: no images in the class folders {shorten(empty)}. Add images or remove them")
        return names, {name: label for label, name in enumerate(names)}


@dataclass(frozen=True)
class DataSplit:
    """Training or validation part of a data set, before decoding."""

    name: str
    classes: tuple[str, ...]
    #: data set that returns a Pillow image and its class by row; its ``data`` may contain all pixels ``(b, h, w, 3)``
    dataset: Any
    #: indices of the images in the data set
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def pixels(self) -> np.ndarray | None:
        """Array of all images, or None if the data set does not have one."""
        found = getattr(self.dataset, "data", None)
        return found if isinstance(found, np.ndarray) and found.ndim == 4 and found.shape[3] == 3 else None

    @property
    def labels(self) -> Tensor:
        """Class of each image, without decoding the images."""
        reader: Any = getattr(self.dataset, "reader", None)  # Hugging Face data sets
        found = list(reader.dataset[reader.label_key]) if reader else self.dataset.targets
        return torch.as_tensor(found)[list(self.indices)]


def open_data(settings: Settings, *, train: bool, default_fraction: float | None = 0.1) -> DataSplit:
    """Open the training or validation part of a data set without decoding images.

    Without a validation folder and ``val_fraction``, ``default_fraction`` of the images is held out, and both parts
    contain all images if it is None.
    """
    fraction, root = settings.val_fraction, settings.data and settings.data.expanduser()
    from_train = train or fraction is not None
    if settings.dataset.startswith("hfds/") or (root and settings.dataset != "folder"):
        split = settings.train_split if from_train else settings.val_split
        name = settings.dataset if "/" in settings.dataset else f"torch/{settings.dataset}"
        if settings.dataset.startswith("hfds/") and find_spec("datasets") is None:
            raise ModuleNotFoundError(f"{name} requires the package datasets: pip install datasets", name="datasets")
        try:
            dataset: Any = create_dataset(name, root and str(root), split, is_training=True, download=settings.download)
        except (AssertionError, ImportError, OSError, RuntimeError) as error:
            remedy = "Pass its folder as --data, or pass --download"
            raise DataError(f"cannot read {name} in {root} ({error}). {remedy}") from error
        classes = getattr(dataset, "classes", None) or dataset.reader.class_to_idx
        name = f"{settings.dataset} ({split})"
    elif root is None:
        expected = "a folder of images" if settings.dataset == "folder" else f"the folder of {settings.dataset}"
        raise ValueError(f"data is required: expected {expected}. Example: --data flowers")
    else:
        if not root.is_dir():
            raise DataError(f"{root}: no such folder. Expected a folder with train/CLASS/IMAGE and val/CLASS/IMAGE")
        training = root / "train" if (root / "train").is_dir() else root
        evaluation = next((root / name for name in EVALUATION_FOLDERS if (root / name).is_dir()), None)
        if evaluation and from_train and training == root:
            raise DataError(f"{root} contains no folder 'train': expected train/CLASS/IMAGE next to {evaluation.name}")
        fraction = fraction or (None if evaluation else default_fraction)
        folder = training if from_train or evaluation is None else evaluation
        dataset, name = Folder(folder), str(folder)
        classes = dataset.classes
    source = DataSplit(name, tuple(map(str, classes)), dataset, range(len(dataset)))
    return source if fraction is None else split_source(source, settings, train, fraction)


def split_source(source: DataSplit, settings: Settings, train: bool, fraction: float) -> DataSplit:
    """Hold out a random fraction of each class; return the held-out images or the other images."""
    from sklearn.model_selection import train_test_split

    options = {"test_size": fraction, "stratify": source.labels.tolist(), "random_state": settings.seed}
    try:
        halves = train_test_split(source.indices, **options)
    except ValueError as error:
        what = f"{source.name}: cannot hold out {100 * fraction:.3g} % of the images ({error})"
        raise DataError(f"{what}. Add images of each class, hold out more, or add a folder val") from error
    percent, seed = 100 * (1 - fraction if train else fraction), f" (split with seed {settings.seed})"
    name = f"{source.name}, {percent:.3g} % of each class{seed}"
    return replace(source, name=name, indices=sorted(halves[0 if train else 1]))


@dataclass(frozen=True)
class InMemory:
    """Images as one tensor of bytes, on the training device."""

    images: Tensor
    labels: Tensor
    storage = "in memory"

    def close(self) -> None:
        """Do nothing: there are no worker processes."""

    def batches(self, indices: Sequence[Tensor], epoch: int = 0) -> Iterator[list[Tensor]]:
        for chosen in indices:
            index = chosen.to(self.images.device)
            yield [self.images[index], self.labels[index]]


class DecodedDataset(Dataset[tuple[Tensor, int]]):
    """Images as tensors; the seed, the epoch and the row determine all randomness."""

    def __init__(self, source: DataSplit, transform: Callable[[Image.Image], Tensor], seed: int) -> None:
        self.source, self.transform, self.seed = source, transform, seed
        self.epoch = torch.zeros((), dtype=torch.long).share_memory_()

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        row, dataset = self.source.indices[index], self.source.dataset
        try:
            # timm returns another image instead of a damaged image.
            image, label = dataset.reader[row] if hasattr(dataset, "reader") else dataset[row]
            with nullcontext() if isinstance(image, Image.Image) else image as file:
                image = open_image(file) if file else image.convert("RGB")
        except Exception as error:  # decoders raise many types of errors
            name = dataset.samples[row][0] if hasattr(dataset, "samples") else f"image {row} of {self.source.name}"
            reason = " ".join(str(error).split())
            raise DataError(f"{name} cannot be read as an image ({reason}). Replace or remove it") from error
        seed_all(self.seed, int(self.epoch), row)
        return self.transform(image), label


class DecodedImages:
    """Images decoded in every epoch by worker processes, which run until :meth:`close`."""

    storage = "decoded in every epoch"

    def __init__(self, source: DataSplit, transform: Callable[[Image.Image], Tensor], seed: int, workers: int) -> None:
        self.dataset, self.labels = DecodedDataset(source, transform, seed), source.labels
        self.rows: list[list[int]] = []
        self.loader: DataLoader[Any] | None = DataLoader(
            self.dataset,
            batch_sampler=self.rows,  # changes in every epoch
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=ignore_signals,
            generator=torch.Generator().manual_seed(0),  # keeps torch's global generator, which dropout uses, unchanged
        )

    def batches(self, indices: Sequence[Tensor], epoch: int = 0) -> Iterator[list[Tensor]]:
        self.dataset.epoch.fill_(epoch)
        self.rows[:] = [chosen.tolist() for chosen in indices]
        try:
            yield from self.loader or ()
        except (EOFError, OSError, RuntimeError) as error:
            self.close()
            reason = str(error).strip().rpartition("\n")[2]  # the last line of the worker's traceback
            died = "" if isinstance(error, DataError) else "a worker process ended. Use fewer --workers. Cause: "
            raise DataError(f"{died}{reason.removeprefix('vision_attn.errors.DataError: ')}") from error

    def close(self) -> None:
        """End the worker processes, also if the traceback of an exception refers to them.

        They ignore SIGTERM, by which multiprocessing ends them at exit, so that a program would wait for them forever.
        """
        if self.loader is not None and self.loader._iterator is not None:
            self.loader._iterator._shutdown_workers()  # type: ignore[attr-defined]
        self.loader = None


Images = InMemory | DecodedImages


def ignore_signals(worker: int) -> None:
    """Ignore Ctrl-C and SIGTERM, which reach the process group: the main process saves the run and ends the workers."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """Posterize like timm; 0 bits, which Pillow 13 does not accept, result in a black image."""
    return image.point(lambda value: value & (256 - 2 ** (8 - min(bits, 8))))


auto_augment.NAME_TO_OP |= dict.fromkeys(("Posterize", "PosterizeIncreasing", "PosterizeOriginal"), posterize)


def choose_crop(settings: Settings, config: Mapping[str, Any]) -> str:
    """Return the crop of the settings, or "pad" for small images such as CIFAR and "resized" for photographs."""
    return settings.crop or ("pad" if max(config["input_size"][1:]) <= MAX_PAD_SIDE else "resized")


def train_transform(settings: Settings, config: Mapping[str, Any]) -> Callable[[Image.Image], Tensor] | None:
    """Build the random transform of training images on the CPU, or return None if nothing in it is random."""
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
        expected = "expected a policy of timm such as rand-m9-mstd0.5"
        raise ValueError(f"aa: {expected}, got {settings.aa!r} ({error})") from error
    return v2.Compose([crop if resized else v2.Compose(eval_transform(config).transforms[:-1]), augment, to_tensor])


def eval_transform(config: Mapping[str, Any]) -> Any:
    """Build the transform from images to bytes ``(c, h, w)``, with the crop and interpolation of the network."""
    options = {key: config[key] for key in ("interpolation", "crop_pct", "crop_mode", "mean") if key in config}
    return create_transform(config["input_size"], normalize=False, **options)


def open_images(
    source: DataSplit, settings: Settings, config: Mapping[str, Any], device: torch.device, *, train: bool = False
) -> Images:
    """Open images as bytes ``(b, c, h, w)`` of the network's input size, in memory if possible.

    Args:
        source: the images.
        settings: augmentation of training images and number of workers.
        config: timm's configuration of the network: ``input_size``, ``interpolation``, ``crop_pct``, ``crop_mode``,
            ``mean``.
        device: device of images in memory.
        train: augment the images.
    """
    augment, pixels = train_transform(settings, config) if train else None, source.pixels
    if pixels is not None and augment is None and pixels.shape[1:3] == tuple(config["input_size"][1:]):
        images = torch.from_numpy(pixels[list(source.indices)]).permute(0, 3, 1, 2).contiguous()
        return InMemory(images.to(device), source.labels.to(device))
    workers = settings.workers
    if workers is None:
        cores = cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        workers = min(MAX_WORKERS, cores, len(source) // IMAGES_PER_WORKER)
    decoded = DecodedImages(source, augment or eval_transform(config), settings.seed, workers)
    if augment is not None or len(source) * math.prod(config["input_size"]) > MAX_IN_MEMORY:
        return decoded
    # Each process decodes an equal part of the training images; exchange_parts completes them.
    state = PartialState()
    process, processes = (state.process_index, state.num_processes) if train else (0, 1)
    part = torch.arange(process, process + -(-len(source) // processes) * processes, processes) % len(source)
    with closing(decoded):
        columns = zip(*decoded.batches(part.split(256)), strict=True)
        return InMemory(*(torch.cat(column).to(device) for column in columns))


def exchange_parts(data: Images, count: int) -> Images:
    """Return all training images, of which each process has decoded a part."""
    if isinstance(data, DecodedImages) or len(data.labels) == count:
        return data
    row, processes = torch.arange(count, device=data.labels.device), PartialState().num_processes
    order = row % processes * len(data.labels) + row // processes
    return InMemory(gather(data.images)[order], gather(data.labels)[order])

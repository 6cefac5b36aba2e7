"""Data sets of images: folders, CIFAR and those of timm, with held-out parts, checks and loaders."""

import hashlib
import json
import os
import random
import signal
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import create_dataset
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from tqdm import tqdm

from vision_attn.errors import DataError
from vision_attn.networks.models.images import to_rgb
from vision_attn.recipes.runs import is_image, shorten

#: Names of the folders of training and validation images, in any case, in the order of preference.
TRAINING, VALIDATION = ("train", "training"), ("val", "validation", "valid", "test", "testing")
#: Extensions of formats that Pillow opens only with another package.
UNSUPPORTED = (".heic", ".heif", ".avif", ".jxl", ".cr2", ".nef", ".dng")


def open_image(file: Any) -> Image.Image:
    """Open an image file as the transform of a loaded network does."""
    with Image.open(file) as image:
        return to_rgb(image)


def require_readable(files: Sequence[Path | str]) -> None:
    """Decode every image file once, and list all damaged files in one error."""
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(lambda file: open_image(file).close(), file) for file in files]
        found = [job.exception() for job in tqdm(jobs, "check images", leave=False, disable=None)]
    if damaged := [f"{file} ({' '.join(str(e).split())})" for file, e in zip(files, found, strict=True) if e]:
        raise DataError(f"{len(damaged)} images cannot be read: {shorten(damaged, 20)}. Replace or remove them")


def find_images(names: Sequence[Path]) -> list[Path]:
    """Return the given image files and all images in the given folders, each once; raise an error for damaged files."""
    if not names:
        raise ValueError("IMAGE is required: expected image files or folders of images, got none")
    found = {name: list_images(name) if name.is_dir() else [name] for name in names}
    if wrong := [name for name, files in found.items() if not (files and name.exists())]:
        raise DataError(f"{wrong[0]} {'contains no images' if wrong[0].exists() else 'does not exist'}")
    files = list(dict.fromkeys(file for files in found.values() for file in files))
    require_readable(files)
    return files


def list_images(root: Path) -> list[Path]:
    """Return the images in a folder and its subfolders, without hidden ones; links are followed, as in training."""
    inside = ((folder, names) for folder, _, names in os.walk(root, followlinks=True))
    visible = ((folder, names) for folder, names in inside if "/." not in folder.removeprefix(str(root)))
    return sorted(Path(folder, name) for folder, names in visible for name in names if is_image(name))


class Folder(ImageFolder):
    """Image folder ``CLASS/IMAGE``; hidden files and ``__MACOSX`` are ignored."""

    def __init__(self, root: Path) -> None:
        def is_visible(name: str) -> bool:  # folders above the root may be hidden
            return is_image(name) and "/." not in name.removeprefix(str(root))

        super().__init__(str(root), loader=open_image, is_valid_file=is_visible, allow_empty=True)
        files = (name for _, _, names in os.walk(root, followlinks=True) for name in names)
        unread = [name for name in files if is_image(name, UNSUPPORTED)]
        note = f"{len(unread)} {Path(unread[0]).suffix} files cannot be read. Convert them to JPEG" if unread else ""
        folders = {tuple(sorted(path.name for path in (root / name).glob("*/"))) for name in self.classes}
        direct = any(Path(file).parent.parent == root for file, _ in self.samples)
        if len(folders) == 1 and len(same := folders.pop()) > 1 and not direct:
            what = f"{root}: {' and '.join(self.classes[:3])} contain the same folders {shorten(same)}"
            raise DataError(f"{what}, so they are not classes. Name them train and val, or pass one of them")
        if empty := sorted({*self.classes} - {self.classes[label] for label in self.targets}):
            what = f"{root}: no images in the class folders {shorten(empty)}"
            raise DataError(f"{what}. {note or 'Add images, remove them, or pass an --output elsewhere'}")
        if note:
            warnings.warn(f"{root}: {note}", stacklevel=3)

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        folders = (path for path in Path(directory).glob("[!.]*") if path.is_dir() and path.name != "__MACOSX")
        names = sorted(path.name for path in folders)
        if len(names) < 2:
            what = "" if Path(directory).is_dir() else "no such folder; "
            raise DataError(f"{directory}: {what}expected CLASS/IMAGE with at least 2 class folders, got {len(names)}")
        return names, {name: label for label, name in enumerate(names)}


class Images:
    """Some images of a data set, transformed; the seed, the epoch and the image determine the augmentation."""

    def __init__(self, source: Any, rows: Sequence[int]) -> None:
        self.source, self.rows = source, rows
        self.reader: Any = getattr(source, "reader", None)  # of Hugging Face data sets
        labels = list(self.reader.dataset[self.reader.label_key]) if self.reader else source.targets
        self.labels = [int(labels[row]) for row in rows]
        #: file of each image; empty for a data set without files
        self.files = [source.samples[row][0] for row in rows] if hasattr(source, "samples") else []
        self.transform: Any = None
        #: index of the output of the network for each label, if they differ
        self.order: Sequence[int] | None = None
        #: seed of the augmentation; None if nothing is random
        self.seed: int | None = None
        #: number of the epoch, also for worker processes; -1 when they may end
        self.epoch = torch.zeros((), dtype=torch.long).share_memory_()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        row = self.rows[index]
        try:
            if self.reader:  # timm returns another image instead of a damaged image
                file, label = self.reader[row]
                with file:
                    image = open_image(file)
            else:
                image, label = self.source[row]
        except (OSError, ValueError) as error:
            name = self.files[index] if self.files else f"image {row}"
            raise DataError(f"{name} cannot be read ({error}). Replace or remove it") from error
        if self.seed is not None:
            seed_all(self.seed, int(self.epoch), row)
        return self.transform(image.convert("RGB")), label if self.order is None else self.order[label]

    def digest(self) -> str:
        """Return a hash of the names and sizes of the images, or of their classes in a data set without files."""
        sizes = (os.path.exists(file) and os.path.getsize(file) for file in self.files)  # a link may be broken
        names = [(*Path(file).parts[-2:], size) for file, size in zip(self.files, sizes, strict=True)] or self.labels
        return hashlib.sha256(json.dumps(names).encode()).hexdigest()

    def start_worker(self, worker: int) -> None:
        """Ignore signals to the process group until training ends: the main process saves the run first."""
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0) if self.epoch < 0 else None)


def seed_all(*numbers: int) -> None:
    """Seed torch, NumPy and Python with a seed that depends only on these numbers."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes a hundred times as long without CUDA
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def open_data(s: Any, fraction: float | None = 0.1) -> tuple[list[str], Images, Images]:
    """Return the classes, the training images and the validation images of the data set in the settings.

    Without validation images and ``val_fraction``, a fraction is held out; both parts are all images if it is None.
    """
    if s.dataset == "folder":
        root = Path(str(s.data)).expanduser()
        parts = {path.name.lower(): path for path in sorted(root.glob("*")) if path.is_dir()}
        train, val = (next(filter(None, map(parts.get, names)), None) for names in (TRAINING, VALIDATION))
        if val and not train and fraction:
            raise DataError(f"{root} contains no folder 'train': expected train/CLASS/IMAGE next to {val.name}")
        used = [train or val or root] if s.val_fraction or not val else [train or val, val]
        sources: list[Any] = [Folder(path) for path in dict.fromkeys(used)]
    else:
        name = s.dataset if "/" in s.dataset else f"torch/{s.dataset}"
        options = {"root": s.data and str(s.data.expanduser()), "is_training": True, "download": s.download}
        try:
            splits = [s.train_split, *([] if s.val_fraction else [s.val_split])]
            sources = [create_dataset(name, split=split, **options) for split in splits]
        except (AssertionError, ImportError, OSError, RuntimeError) as error:
            remedy = "Pass its folder as --data, or --download" if "hfds/" not in name else "pip install datasets"
            raise DataError(f"cannot read {name} in {s.data} ({error}). {remedy}") from error
    kinds = [[*map(str, getattr(one, "classes", None) or one.reader.class_to_idx)] for one in sources]
    if kinds[0] != kinds[-1]:
        only = sorted({*kinds[0]} ^ {*kinds[-1]})
        how = f"{shorten(only)} are in one only" if only else "they have another order"
        raise DataError(f"classes of training and validation images differ: {how}")
    rows: list[Sequence[int]] = [range(len(source)) for source in sources]
    if len(sources) == 1 and (held := s.val_fraction or fraction):
        rows = split_rows(Images(sources[0], rows[0]).labels, kinds[0], held, s.seed)
    return kinds[0], Images(sources[0], rows[0]), Images(sources[-1], rows[-1])


def split_rows(labels: Iterable[int], classes: Sequence[str], fraction: float, seed: int) -> list[Sequence[int]]:
    """Hold out a random fraction of each class; return the rows of the other images and of the held-out images."""
    classes_of, numbers = np.array(labels), np.random.default_rng(seed)
    groups = [numbers.permutation(np.flatnonzero(classes_of == label)) for label in range(len(classes))]
    held = [group[: max(1, round(fraction * len(group)))] for group in groups]
    if few := [name for name, group, part in zip(classes, groups, held, strict=True) if len(group) == len(part)]:
        reason = f"cannot hold out {100 * fraction:.3g} % of the images: too few images of {shorten(few)}"
        raise DataError(f"{reason}. Add images, change --val-fraction, or add a folder val")
    val = np.concatenate(held)
    return [np.setdiff1d(np.arange(len(classes_of)), val).tolist(), np.sort(val).tolist()]


def make_loader(acc: Any, images: Any, batch: int, workers: int | None, train: bool = False) -> Any:
    """Create a loader whose batches are divided among the processes."""
    from accelerate.data_loader import prepare_data_loader
    from joblib import cpu_count

    if workers is None:
        cores = cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        workers = min(16, cores, len(images) // 64)
    loader: Any = DataLoader(images, batch, shuffle=train, drop_last=train, num_workers=workers,
                        persistent_workers=workers > 0, pin_memory=torch.cuda.is_available(),
                        worker_init_fn=images.start_worker, generator=torch.Generator().manual_seed(0))  # fmt: skip
    return prepare_data_loader(loader, acc.device, acc.num_processes, acc.process_index, split_batches=True,
                               put_on_device=True, use_seedable_sampler=True, data_seed=images.seed)  # fmt: skip

"""Images and their classes as training and evaluation see them: in batches of any order, on the device.

They lie in memory, are decoded by worker processes in every epoch, or arrive as a stream. The first two give the same
batches, bit for bit.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from timm.data import ImageDataset
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2
from tqdm import tqdm

from vision_attn.errors import DataError
from vision_attn.tools.training.augmentation import seeded

__all__ = [
    "Bar",
    "Decoder",
    "ImageLoader",
    "ImageSet",
    "ImageStream",
    "Images",
    "Vary",
    "centre",
    "lost_worker_named",
    "open_image",
    "prepare",
    "refuse_other_labels",
    "rgb",
]

CPU = torch.device("cpu")
#: What an image is turned into by chance, while it is decoded.
Vary: TypeAlias = Callable[[Image.Image], Image.Image]
#: Seconds between two lines of a :class:`Bar`, and what they say.
PAUSE = 30.0
LINE = "{desc}: {n_fmt} of {total_fmt} in {elapsed}, {remaining} to go{postfix}"
#: How many damaged files one message names.
NAMED = 20
#: Images that a worker hands over at a time from a stream.
CHUNK = 32


class Bar(tqdm):  # type: ignore[type-arg]
    """How far something has come: a bar on a terminal, and elsewhere a line every half minute."""

    monitor_interval = 0  # no thread looks after it

    def __init__(self, items: Iterable[Any], text: str, total: int, *, initial: int = 0, hidden: bool = False) -> None:
        self.lines = not sys.stderr.isatty()
        how: dict[str, Any] = {"mininterval": PAUSE, "delay": PAUSE, "bar_format": LINE, "file": io.StringIO()}
        how = how if self.lines else {"file": sys.stderr}
        super().__init__(items, text, total, initial=initial, leave=False, miniters=1, disable=hidden, **how)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Draw it, or say it; at the end tqdm asks for an empty one."""
        if not self.lines:
            super().display(msg, pos)
        elif msg is None:
            print(self, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class ImageSet:
    """Images in memory as one tensor; batches are copied to the device where that is another."""

    images: Tensor
    labels: Tensor
    device: torch.device = CPU

    kept = "in memory"

    def __len__(self) -> int:
        return len(self.images)

    def batches(self, rows: Iterable[Tensor], *, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in rows:
            here = chosen.to(self.images.device, non_blocking=True)
            yield to_device((self.images[here], self.labels[here]), self.device)


class ImageLoader:
    """Images of a :class:`Decoder` that worker processes decode ahead of the device; without any they wait for it."""

    verb = "decoded in every epoch"

    def __init__(self, dataset: Any, *, workers: int, device: torch.device, classes: int | None = None) -> None:
        self.dataset = dataset
        self.workers = workers
        self.device = device
        self.classes = classes
        processes = f"{workers} worker process{'es' if workers > 1 else ''}" if workers else "the process that trains"
        self.kept = f"{self.verb} by {processes}"

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def labels(self) -> Tensor:
        """The class of each image, without decoding one."""
        dataset = self.dataset.dataset
        reader: Any = getattr(dataset, "reader", None)
        if hasattr(reader, "samples"):  # of timm's folders
            return torch.tensor([label for _, label in reader.samples])
        if hasattr(reader, "label_key"):  # of Hugging Face's data sets
            return torch.tensor(list(reader.dataset[reader.label_key]))
        found = next((vars(dataset)[name] for name in ("targets", "labels", "_labels") if name in vars(dataset)), None)
        if found is None:
            raise ValueError(f"class_weights: {type(dataset).__name__} does not say what the classes of its images are")
        return torch.as_tensor(found)

    def batches(self, rows: Iterable[Tensor], *, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        order = [(chosen.tolist(), seed) for chosen in rows]
        for found in self.from_workers(seed, batch_size=None, sampler=order):  # an element of the order is a batch
            yield to_device(found, self.device)

    def from_workers(self, seed: int, **how: Any) -> Iterator[Any]:
        loader = DataLoader(
            self.dataset,
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=obey_the_parent_alone,
            generator=torch.Generator().manual_seed(seed),  # or it draws from torch's own, on which dropout depends
            **how,
        )
        with lost_worker_named():
            for found in loader:
                if isinstance(found, DataError):
                    raise found
                if self.classes is not None:
                    refuse_other_labels(found[1], self.classes)
                yield found


class ImageStream(ImageLoader):
    """Images of shards that are read from their beginning, in an order that timm's reader shuffles by the seed.

    Training takes as many as its rows have, of the shards of this process; evaluation takes those at its rows.
    """

    verb = "streamed"

    def __len__(self) -> int:
        return int(self.dataset.reader.num_samples)  # len(dataset) is rounded up for the workers

    def batches(self, rows: Iterable[Tensor], *, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        rows = list(rows)
        self.dataset.set_epoch(seed % 2**31)
        chunks = self.from_workers(seed, batch_size=CHUNK)
        images = (pair for chunk in chunks for pair in zip(*chunk, strict=True))
        if not self.dataset.reader.is_training:
            wanted = set(torch.cat(rows).tolist()) if rows else set()
            images = (pair for place, pair in enumerate(images) if place in wanted)
        for chosen in rows:
            taken = list(islice(images, len(chosen)))
            if len(taken) < len(chosen):
                raise DataError(
                    f"the stream ends before its {len(self):,} images: say how many there are, give each process a "
                    "shard or more, and see timm's warnings of images that it leaves out"
                )
            found, labels = (torch.stack(part) for part in zip(*taken, strict=True))
            yield to_device((found, labels), self.device)


#: What a run asks of its images, wherever they are: ``len``, ``device``, ``kept`` (for the log) and ``batches``.
Images: TypeAlias = ImageSet | ImageLoader | ImageStream


class Decoder(Dataset[tuple[Tensor, Tensor] | DataError]):
    """The images of a map-style data set of torchvision's or timm's, decoded to pixels of one size."""

    def __init__(self, dataset: Any, size: tuple[int, int], vary: Vary | None = None) -> None:
        self.dataset = dataset
        self.size = size
        self.vary = vary

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, batch: tuple[Sequence[int], int]) -> tuple[Tensor, Tensor] | DataError:
        """A batch; an error is handed over, as DataLoader would wrap the worker's traceback around one raised."""
        try:
            return self.decode(*batch)
        except DataError as error:
            return error

    def decode(
        self, rows: Sequence[int], seed: int = 0, run: Callable[..., Iterable[Any]] = map
    ) -> tuple[Tensor, Tensor]:
        """Some of the images and their classes; what is random follows from the seed and the row."""
        images = torch.empty(len(rows), 3, *self.size, dtype=torch.uint8)
        labels = torch.empty(len(rows), dtype=torch.long)
        damaged = []
        for index, found in enumerate(run(partial(self.one, seed=seed), rows)):
            if isinstance(found, str):
                damaged.append(found)
            else:
                images[index], labels[index] = found
        if damaged:
            more = f" and {len(damaged) - NAMED:,} more" if len(damaged) > NAMED else ""
            raise DataError(
                f"damaged or no images: {', '.join(sorted(damaged)[:NAMED])}{more}: fetch them again or remove them"
            )
        return images, labels

    def one(self, row: int, seed: int) -> tuple[Tensor, int] | str:
        """An image and its class, or which it is that cannot be decoded, and why."""
        try:
            image, label = self.open(row)
        except Exception as error:  # what a decoder raises that meets bytes of any kind, is not known to its caller
            reason = "is of no known format" if isinstance(error, UnidentifiedImageError) else error
            return f"{self.name(row)} ({' '.join(str(reason).split())})"
        with seeded(int(np.random.SeedSequence((seed, row)).generate_state(1)[0])) if self.vary else nullcontext():
            return prepare(image, self.size, self.vary), label

    def open(self, row: int) -> tuple[Image.Image, int]:
        if isinstance(self.dataset, ImageDataset):  # by itself it would give another image in place of a damaged one
            file, label = self.dataset.reader[row]
            with file:
                return open_image(file), label
        image, label = self.dataset[row]
        return rgb(image), label

    def name(self, row: int) -> str:
        if hasattr(self.dataset, "samples"):
            return str(self.dataset.samples[row][0])
        return str(self.dataset.filename(row) if hasattr(self.dataset, "filename") else f"image {row}")


def open_image(file: Any) -> Image.Image:
    """An image file, by its path or opened already, as :func:`rgb` makes it."""
    with Image.open(file) as image:
        return rgb(image)


def rgb(image: Image.Image) -> Image.Image:
    """An image upright by its EXIF orientation, in 8 bits: of 16 the upper ones; transparency is dropped.

    One of more pixels than Pillow calls safe, 89 million, is refused before it is decoded, at up to 8 bytes each.
    """
    most = Image.MAX_IMAGE_PIXELS
    if most is not None and image.width * image.height > most:
        raise ValueError(
            f"{image.width}×{image.height} pixels, more than the {most:,} that one image may have: make it smaller, or "
            "raise PIL.Image.MAX_IMAGE_PIXELS in a script"
        )
    # Pillow has some formats of 16 bits in a mode of 32, and would clip 16 bits at 255.
    deep = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
    if image.mode in ("I", "F") and not deep:
        raise ValueError("pixels of 32 bits, whose range is not known")
    ImageOps.exif_transpose(image, in_place=True)
    if deep:
        image = Image.fromarray((np.asarray(image) // 256).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # or Pillow warns
    return image.convert("RGB")


def prepare(image: Image.Image, size: tuple[int, int], vary: Vary | None) -> Tensor:
    """An image as it is varied, else its centre, as ``(3, *size)`` of bytes."""
    return v2.functional.pil_to_tensor(centre(image, size) if vary is None else vary(image))


def centre(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The centre of an image, at a size of rows and columns."""
    return image if image.size == size[::-1] else ImageOps.fit(image, size[::-1], Image.Resampling.BILINEAR)


def refuse_other_labels(labels: Tensor, classes: int) -> None:
    """Refuse labels of no class, at which the loss would fail, and on CUDA without saying why."""
    other = labels[(labels < 0) | (labels >= classes)]
    if len(other):
        raise DataError(
            f"an image has the label {int(other[0])}, and labels go from 0 to {classes - 1}: see --num-classes"
        )


def to_device(batch: tuple[Tensor, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    images, labels = batch
    return images.to(device, non_blocking=True), labels.to(device, non_blocking=True)


@contextmanager
def lost_worker_named() -> Iterator[None]:
    """Say what it means that a worker is no more, which torch raises wherever the main thread is."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise DataError(
            "a worker process that decodes images ended, often for want of (shared) memory: give fewer --workers or a "
            f"smaller --batch-size ({error})"
        ) from error


def obey_the_parent_alone(worker: int) -> None:
    """Ctrl-C and SIGTERM may reach every process of a job: what comes of them is decided by the one that trains."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=end_with_the_parent, daemon=True).start()


def end_with_the_parent() -> None:
    """Wait for the SIGTERM by which the parent ends workers that are left over when it exits."""
    parent = multiprocessing.parent_process()
    while parent is not None and signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
        pass
    os._exit(0)

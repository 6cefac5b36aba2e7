"""Images decoded by worker processes ahead of the device, for folders that do not fit into memory."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vision_attn.training.errors import DataError
from vision_attn.training.image_files import ImageFiles

__all__ = ["ImageLoader"]


class ImageLoader:
    """Image files that give the same batches, bit for bit, as the same images held in memory.

    The methods are those of :class:`vision_attn.training.images.Images`.

    Args:
        files: the images.
        size: height and width that they are brought to, in pixels.
        workers: processes that decode; they start with the first batch and live as long as this does.
        device: where batches go.
        crop_scale: least share of an image that a random crop of it has; None to crop none at random.
    """

    def __init__(
        self,
        files: ImageFiles,
        size: tuple[int, int],
        *,
        workers: int,
        device: torch.device,
        crop_scale: float | None = None,
    ) -> None:
        self.files = files
        self.device = device
        self.kept = f"decoded in every epoch by {workers} worker process{'es' if workers > 1 else ''}"
        #: the batches to come, which persistent workers have to be told through the sampler they were made with
        self.order: list[tuple[list[int], int]] = []
        self.loader = DataLoader(
            Decoder(files, size, crop_scale),
            batch_size=None,  # an element of the order is a batch
            sampler=self.order,
            num_workers=workers,
            persistent_workers=True,
            pin_memory=device.type == "cuda",
            worker_init_fn=leave_interrupts_alone,
            generator=torch.Generator(),  # or it draws from torch's own, on which dropout depends
        )

    def __len__(self) -> int:
        return len(self.files)

    def batches(self, rows: Iterable[Tensor], *, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        self.order[:] = [(chosen.tolist(), seed) for chosen in rows]
        for (chosen, _), images in zip(self.order, self.decoded(), strict=True):
            labels = self.files.labels[chosen]
            yield images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)

    def decoded(self) -> Iterator[Tensor]:
        """What the workers make of the order.

        Raises:
            DataError: files are damaged, and all of them are named; or a worker ended.
        """
        batches = iter(self.loader)
        while True:
            try:
                found = next(batches)
            except StopIteration:
                return
            except RuntimeError as error:
                if not str(error).startswith("DataLoader worker"):
                    raise  # an error in a worker, and no worker that is no more
                raise DataError(
                    "a worker process that decodes images ended, often for want of (shared) memory: give fewer "
                    f"--workers or a smaller --batch-size ({error})"
                ) from error
            if isinstance(found, DataError):
                self.files.check()  # names those of batches to come as well
                raise found
            yield found


def leave_interrupts_alone(worker: int) -> None:
    """Ctrl-C reaches every process of a terminal: what comes of it is decided by the one that trains."""
    # Not so SIGTERM, by which that one ends workers that are left over when it exits.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Decoder(Dataset[Tensor | DataError]):
    """Batches as worker processes make them.

    What is wrong with a file is handed over, not raised: DataLoader would wrap the worker's traceback around it.
    """

    def __init__(self, files: ImageFiles, size: tuple[int, int], crop_scale: float | None) -> None:
        self.files = files
        self.size = size
        self.crop_scale = crop_scale

    def __getitem__(self, batch: tuple[list[int], int]) -> Tensor | DataError:
        rows, seed = batch
        try:
            return self.files.decode(rows, self.size, crop_scale=self.crop_scale, seed=seed)
        except DataError as error:
            return error

"""Images decoded by worker processes ahead of the device, for folders that do not fit into memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vision_attn.errors import DataError
from vision_attn.training.image_files import ImageFiles

__all__ = ["ImageLoader", "refuse_lost_worker"]


class ImageLoader:
    """Image files that give the same batches, bit for bit, as the same images held in memory.

    The methods are those of :class:`vision_attn.training.images.Images`.
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
            worker_init_fn=obey_the_parent_alone,
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
        """What the workers make of the order."""
        batches = iter(self.loader)
        while True:
            try:
                found = next(batches)
            except StopIteration:
                return
            except RuntimeError as error:
                refuse_lost_worker(error)
                raise
            if isinstance(found, DataError):
                self.files.check()  # names those of batches to come as well
                raise found
            yield found


def refuse_lost_worker(error: BaseException | None) -> None:
    """Say what it means that a worker is no more, which torch raises wherever the main thread is."""
    if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker"):
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

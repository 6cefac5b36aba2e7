"""The folder of a run: settings, metrics and checkpoints, each file written whole or not at all."""

from __future__ import annotations

import csv
import errno
import io
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import yaml

from vision_attn.checkpoints import write_atomically
from vision_attn.errors import TrainingError
from vision_attn.training.settings_file import read_yaml

__all__ = ["RunFolder"]


#: What a run leaves.
FILES = ("settings.yaml", "metrics.csv", "last.pth", "best.pth", "inserted.txt", "adapter.safetensors", "curves.png")


class RunFolder:
    """Where a run leaves what it makes.

    =======================  =========================================================================
    ``settings.yaml``        the settings of the run
    ``metrics.csv``          a row for each epoch
    ``curves.png``           loss, accuracy, size of the blocks' branches and rate against epochs
    ``last.pth``             everything that is needed to go on after the last epoch, or from the middle of one
    ``best.pth``             the weights of the epoch with the highest accuracy, ready to load
    ``inserted.txt``         what was inserted where, and its cost
    ``adapter.safetensors``  of that epoch the blocks alone, and a new head, where the backbone is frozen
    =======================  =========================================================================
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def files(self) -> list[Path]:
        """Files of a run that lie in the folder."""
        return [self.path / name for name in FILES if (self.path / name).exists()]

    def refuse_another_run(self) -> None:
        """Refuse a folder that holds a run."""
        if self.files:
            raise ValueError(
                f"output: {self.path} holds a run already: choose another --output, go on with it by "
                f"--resume {self.path / 'last.pth'}, or begin anew with --overwrite"
            )

    def open(self, *, clear: bool, last_bytes: int = 0, best_bytes: int = 0) -> None:
        """Make the folder and prove that it can be written and has room, before any training is done."""
        self.path.mkdir(parents=True, exist_ok=True)
        for name in FILES:  # of a process that was killed while it wrote
            for path in self.path.glob(f".{name}.*.partial"):
                path.unlink()
        probe = self.path / ".writable"
        write_atomically(probe, b"")
        probe.unlink()
        self.refuse_full_disk(last_bytes, best_bytes)
        if clear and self.files:
            for path in self.files:
                path.unlink()
            shutil.rmtree(self.path / "tensorboard", ignore_errors=True)

    def refuse_full_disk(self, last_bytes: int, best_bytes: int) -> None:
        """Refuse a disk without room for both checkpoints and, while one is replaced, for its old version."""
        there = sum(path.stat().st_size for path in self.files if path.suffix == ".pth")
        needed, free = 2 * last_bytes + best_bytes - there, shutil.disk_usage(self.path).free
        if needed > free:
            raise TrainingError(
                f"output: the checkpoints of this run take about {needed / 2**20:,.1f} MiB, the old one beside the new "
                f"while it is replaced, and {free / 2**20:,.1f} MiB are free in {self.path}: make room or choose "
                "another --output"
            )

    def read_settings(self) -> object:
        """The settings of the run that lies in the folder, as its file has them; None where they are not known."""
        path = self.path / "settings.yaml"
        return read_yaml(path) if path.exists() else None

    def write_text(self, name: str, text: str) -> None:
        """Write a text."""
        write_atomically(self.path / name, text.encode())

    def write_settings(self, settings: Mapping[str, object]) -> None:
        """Write ``settings.yaml``."""
        self.write_text("settings.yaml", yaml.safe_dump(dict(settings), sort_keys=False))

    def write_metrics(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Write ``metrics.csv``, once there is a row for it."""
        if not rows:
            return
        table = io.StringIO()
        writer = csv.DictWriter(table, fieldnames=list(rows[-1]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        self.write_text("metrics.csv", table.getvalue())

    def save(self, name: str, content: Mapping[str, object]) -> Path:
        """Write a checkpoint."""
        path, buffer = self.path / name, io.BytesIO()
        torch.save(dict(content), buffer)
        old = f"the {name} of before is whole" if path.exists() else f"there is no {name} yet"
        try:
            write_atomically(path, buffer.getbuffer())
        except OSError as error:
            room = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "see to the folder"
            raise TrainingError(
                f"{path} cannot be written ({error.strerror}), and {old}: {room} and go on with "
                f"--resume {self.path / 'last.pth'}"
            ) from error
        return path

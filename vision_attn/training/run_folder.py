"""The folder of a run: settings, metrics and checkpoints, each file written whole or not at all."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import yaml

from vision_attn.checkpoints import write_atomically

__all__ = ["RunFolder"]


#: What a run leaves.
FILES = ("settings.yaml", "metrics.csv", "last.pth", "best.pth", "inserted.txt", "adapter.safetensors")


class RunFolder:
    """Where a run leaves what it makes.

    =======================  =========================================================================
    ``settings.yaml``        the settings of the run
    ``metrics.csv``          a row for each epoch
    ``last.pth``             everything that is needed to go on after the last epoch
    ``best.pth``             the weights of the epoch with the highest accuracy, ready to load
    ``inserted.txt``         what was inserted where, and its cost
    ``adapter.safetensors``  of that epoch the blocks alone, and a new head, where the backbone is frozen
    =======================  =========================================================================

    Args:
        path: of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def left(self) -> list[Path]:
        """Files of a run that lie in the folder."""
        return [self.path / name for name in FILES if (self.path / name).exists()]

    def refuse_another_run(self) -> None:
        """Refuse a folder that holds a run.

        Raises:
            ValueError: it holds a file of one.
        """
        if self.left:
            raise ValueError(
                f"output: {self.path} holds a run already: choose another --output, go on with it by "
                f"--resume {self.path / 'last.pth'}, or begin anew with --overwrite"
            )

    def open(self, *, clear: bool) -> None:
        """Make the folder and prove that it can be written, before any training is done.

        Args:
            clear: remove what is left of another run.

        Raises:
            OSError: it cannot be made or written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for path in self.left if clear else ():
            path.unlink()
        probe = self.path / ".writable"
        write_atomically(probe, b"")
        probe.unlink()

    def write_text(self, name: str, text: str) -> None:
        """Write a text.

        Args:
            name: of the file.
            text: all of it.

        Raises:
            OSError: it cannot be written.
        """
        write_atomically(self.path / name, text.encode())

    def write_settings(self, settings: Mapping[str, object]) -> None:
        """Write ``settings.yaml``.

        Args:
            settings: plain values by name.

        Raises:
            OSError: it cannot be written.
        """
        self.write_text("settings.yaml", yaml.safe_dump(dict(settings), sort_keys=False))

    def write_metrics(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Write ``metrics.csv``, once there is a row for it.

        Args:
            rows: one for each epoch, all with the same columns.

        Raises:
            OSError: it cannot be written.
        """
        if not rows:
            return
        table = io.StringIO()
        writer = csv.DictWriter(table, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        self.write_text("metrics.csv", table.getvalue())

    def save(self, name: str, content: Mapping[str, object]) -> Path:
        """Write a checkpoint.

        Args:
            name: of the file.
            content: tensors and plain values.

        Returns:
            The path of the file.

        Raises:
            OSError: it cannot be written.
        """
        buffer = io.BytesIO()
        torch.save(dict(content), buffer)
        write_atomically(self.path / name, buffer.getvalue())
        return self.path / name

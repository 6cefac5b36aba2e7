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


class RunFolder:
    """Where a run leaves what it makes.

    ==================  ==========================================================================
    ``settings.yaml``   the settings of the run
    ``metrics.csv``     a row for each epoch
    ``last.pth``        everything that is needed to go on after the last epoch
    ``best.pth``        the weights of the epoch with the highest accuracy, ready to load
    ``inserted.txt``    what was inserted where, and its cost
    ==================  ==========================================================================
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> None:
        """Make the folder and prove that it can be written, before any work is done.

        Raises:
            OSError: it cannot.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        probe = self.path / ".writable"
        write_atomically(probe, b"")
        probe.unlink()

    def write_text(self, name: str, text: str) -> None:
        write_atomically(self.path / name, text.encode())

    def write_settings(self, settings: Mapping[str, object]) -> None:
        self.write_text("settings.yaml", yaml.safe_dump(dict(settings), sort_keys=False))

    def write_metrics(self, rows: Sequence[Mapping[str, object]]) -> None:
        if not rows:
            return
        table = io.StringIO()
        writer = csv.DictWriter(table, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        self.write_text("metrics.csv", table.getvalue())

    def save(self, name: str, content: Mapping[str, object]) -> Path:
        buffer = io.BytesIO()
        torch.save(dict(content), buffer)
        write_atomically(self.path / name, buffer.getvalue())
        return self.path / name

"""The folder of a run, and tables in it.

``model`` contains the network of the epoch with the highest top-1 accuracy, for ``load_model``. With a frozen backbone,
``adapter.safetensors`` contains its blocks and a new classifier. ``state`` contains the state for resuming the run, and
``logs`` the output of trackers.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path

from vision_attn.networks.safe import write_atomically


def newest_state(folder: Path) -> Path | None:
    """Return the folder of the newest complete state, ``state/EPOCH-STEP``."""
    return max((folder / "state").glob("[0-9]*-[0-9]*"), default=None)


def numbered_folder(root: Path = Path("runs")) -> Path:
    """Create the next folder of the sequence ``train-1``, ``train-2``, …."""
    taken = [int(path.name[6:]) for path in root.glob("train-*") if path.name[6:].isdecimal()]
    folder = root / f"train-{max(taken, default=0) + 1}"
    folder.mkdir(parents=True)
    return folder


def write_table(path: Path, lines: Iterable[Iterable[object]]) -> None:
    """Write a CSV file."""
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows(lines)
    write_atomically(path, table.getvalue().encode())

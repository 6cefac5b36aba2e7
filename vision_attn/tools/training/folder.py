"""The folder of a run, and what is written there for people: metrics and curves.

The network of the epoch with the highest top-1 is in ``model``, ready for ``load_model``; where the backbone is frozen,
its blocks alone, and a new head, in ``adapter.safetensors``; all that is needed to go on, from the middle of an epoch
too, in ``state``; what trackers write in ``logs``.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from vision_attn.networks.figures import save_figure
from vision_attn.networks.safe import write_atomically


def newest_state(folder: Path) -> Path | None:
    """The folder of the newest state of a run, ``state/EPOCH-STEP``; each was written aside and renamed when whole."""
    return max((folder / "state").glob("[0-9]*-[0-9]*"), default=None)


def numbered_folder(root: Path = Path("runs")) -> Path:
    """Make the next of ``train-1``, ``train-2``, …."""
    taken = [int(path.name[6:]) for path in root.glob("train-*") if path.name[6:].isdecimal()]
    folder = root / f"train-{max(taken, default=0) + 1}"
    folder.mkdir(parents=True)
    return folder


def write_table(path: Path, lines: Iterable[Iterable[object]]) -> None:
    """Write a CSV file."""
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows(lines)
    write_atomically(path, table.getvalue().encode())


def write_rows(folder: Path, rows: Sequence[Mapping[str, Any]], *, draw: bool) -> None:
    """Write ``metrics.csv``, and draw ``curves.png``."""
    write_table(folder / "metrics.csv", [list(rows[0]), *(row.values() for row in rows)])
    if draw:
        save_figure(curves_figure(rows), folder / "curves.png")


def curves_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Loss of training and evaluation, top-1, rate, and with blocks the size of their branches, one above the other."""
    panels = {"loss": ("eval_loss", "train_loss"), "top-1 %": ("eval_top1",), "rate": ("lr",)}
    if rows[0]["branch_share"] is not None:
        panels["branch/stream"] = ("branch_share",)
    figure = Figure(figsize=(6, 2 * len(panels)), layout="constrained")
    epochs = [row["epoch"] for row in rows]
    for axis, (label, columns) in zip(figure.subplots(len(panels), sharex=True), panels.items(), strict=True):
        for column in columns:
            axis.plot(epochs, [row[column] for row in rows], marker="." if len(rows) < 40 else "", label=column)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    figure.axes[0].legend(frameon=False, fontsize=9)
    figure.axes[-1].set_xlabel("epoch")
    return figure

"""The folder of a run, and the metrics and curves in it.

The network of the epoch with the highest top-1 is in ``model``, for ``load_model``; with a frozen backbone, its blocks
and a new head are in ``adapter.safetensors``; all that is needed to resume the run is in ``state``; trackers write to
``logs``.
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
    """Return the folder of the newest state, ``state/EPOCH-STEP``; each was renamed when it was complete."""
    return max((folder / "state").glob("[0-9]*-[0-9]*"), default=None)


def numbered_folder(root: Path = Path("runs")) -> Path:
    """Create the next of ``train-1``, ``train-2``, …."""
    taken = [int(path.name[6:]) for path in root.glob("train-*") if path.name[6:].isdecimal()]
    folder = root / f"train-{max(taken, default=0) + 1}"
    folder.mkdir(parents=True)
    return folder


def write_table(path: Path, lines: Iterable[Iterable[object]]) -> None:
    """Write a CSV file."""
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows(lines)
    write_atomically(path, table.getvalue().encode())


def write_metrics(folder: Path, rows: Sequence[Mapping[str, Any]], *, draw: bool) -> None:
    """Write ``metrics.csv``, and draw ``curves.png``."""
    write_table(folder / "metrics.csv", [list(rows[0]), *(row.values() for row in rows)])
    if draw:
        save_figure(curves_figure(rows), folder / "curves.png")


def curves_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the losses, top-1, the learning rate, and with blocks the size of their branches, one above the other."""
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

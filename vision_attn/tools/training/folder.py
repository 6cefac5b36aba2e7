"""The folder of a run, and the metrics and curves in it.

``model`` contains the network of the epoch with the highest top-1 accuracy, for ``load_model``. With a frozen backbone,
``adapter.safetensors`` contains its blocks and a new classifier. ``state`` contains the state for resuming the run, and
``logs`` the output of trackers.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from vision_attn.networks.capture.figures import save_figure
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


def write_metrics(folder: Path, history: Sequence[Mapping[str, Any]], *, draw: bool) -> None:
    """Write ``metrics.csv`` and, if requested, ``curves.png``."""
    write_table(folder / "metrics.csv", [list(history[0]), *(row.values() for row in history)])
    if draw:
        save_figure(curves_figure(history), folder / "curves.png")


def curves_figure(history: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot the losses, the top-1 accuracy, the learning rate and, if there are blocks, residual ratio by epoch."""
    panels = {"loss": ("eval_loss", "train_loss"), "top-1 %": ("eval_top1",), "learning rate": ("lr",)}
    if history[0]["residual_ratio"] is not None:
        panels["residual ratio"] = ("residual_ratio",)
    figure = Figure(figsize=(6, 2 * len(panels)), layout="constrained")
    epochs = [row["epoch"] for row in history]
    for axis, (label, columns) in zip(figure.subplots(len(panels), sharex=True), panels.items(), strict=True):
        for column in columns:
            axis.plot(epochs, [row[column] for row in history], marker="." if len(history) < 40 else "", label=column)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    figure.axes[0].legend(frameon=False, fontsize=9)
    figure.axes[-1].set_xlabel("epoch")
    return figure

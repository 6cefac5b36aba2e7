"""Metrics of each epoch as a table and as curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from vision_attn.networks.capture.figures import save_figure
from vision_attn.tools.training.folder import write_table


def write_metrics(folder: Path, history: Sequence[Mapping[str, Any]]) -> None:
    """Write ``metrics.csv`` and ``curves.png``."""
    write_table(folder / "metrics.csv", [list(history[0]), *(row.values() for row in history)])
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

"""How a run went, in one picture: loss, accuracy, rate and size of the blocks' branches against epochs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vision_attn.figures import save_figure

__all__ = ["Curves", "curves_figure"]

#: Seconds between two drawings while a run goes on, since each takes a part of one.
PAUSE = 30.0


def curves_figure(rows: Sequence[Mapping[str, object]]) -> Figure:
    """Loss of training and evaluation, top-1, rate, and with blocks the size of their branches, one above the other.

    >>> row = {"epoch": 1, "lr": "0.1", "train_loss": "1.2", "eval_loss": "1.1", "eval_top1": "40"}
    >>> [axis.get_ylabel() for axis in curves_figure([row]).axes]
    ['loss', 'top-1 %', 'rate']
    """
    columns = {key: [float(str(row[key])) for row in rows] for key in rows[0] if rows[0][key] != ""}
    epochs, shares = columns["epoch"], columns.get("branch_share")
    figure = Figure(figsize=(6, 6 if shares is None else 7))
    heights = (3, 3, 1) if shares is None else (3, 3, 1, 1.4)
    loss, top1, rate, *more = figure.subplots(len(heights), sharex=True, height_ratios=heights)
    figure.subplots_adjust(left=0.12, right=0.97, top=0.97, bottom=0.09, hspace=0.12)
    # A line of one point is seen by its marker; a long one is clearer without.
    marker = "o" if len(rows) < 40 else ""
    style = {"marker": marker, "markersize": 3, "linewidth": 1.5}
    loss.plot(epochs, columns["train_loss"], color="tab:gray", label="training, as augmented", **style)
    loss.plot(epochs, columns["eval_loss"], color="tab:blue", label="evaluation", **style)
    loss.legend(frameon=False, fontsize=9)
    top1.plot(epochs, columns["eval_top1"], color="tab:blue", **style)
    best = max(range(len(rows)), key=lambda row: columns["eval_top1"][row])
    top1.axhline(columns["eval_top1"][best], color="tab:blue", linewidth=0.7, linestyle=":")
    top1.text(0.99, 0.06, f"best {columns['eval_top1'][best]:.2f} %, epoch {epochs[best]:.0f}",
              transform=top1.transAxes, ha="right", fontsize=9)  # fmt: skip
    rate.plot(epochs, columns["lr"], color="tab:orange", **style)
    rate.set_ylim(bottom=0)
    labelled = [(loss, "loss"), (top1, "top-1 %"), (rate, "rate")]
    if shares is not None:
        more[0].plot(epochs, shares, color="tab:green", **style)
        more[0].set_ylim(bottom=0)
        labelled.append((more[0], "branch/stream"))
    for axis, label in labelled:
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    labelled[-1][0].set_xlabel("epoch")
    rate.set_xlim(0, 1.02 * epochs[-1])
    rate.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    figure.align_ylabels()
    return figure


class Curves:
    """``curves.png`` of a run, drawn anew every now and then."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.drawn = time.monotonic()

    def draw(self, rows: Sequence[Mapping[str, object]], *, at_once: bool = False) -> None:
        """Draw the epochs so far, unless that was done, or the run began, a moment ago."""
        if rows and (at_once or time.monotonic() - self.drawn > PAUSE):
            save_figure(curves_figure(rows), self.path)
            self.drawn = time.monotonic()

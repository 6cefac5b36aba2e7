"""The folder of a run: settings, metrics, curves and checkpoints, each file written whole or not at all."""

from __future__ import annotations

import csv
import errno
import io
import itertools
import math
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import yaml
from filelock import FileLock, Timeout
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from vision_attn.errors import TrainingError
from vision_attn.networks.checkpoints import write_atomically
from vision_attn.networks.figures import save_figure
from vision_attn.tools.training.settings import Settings, concerning

__all__ = ["RunFolder", "curves_figure", "numbered_folder", "read_config"]

#: What a run leaves.
FILES = (
    "settings.yaml", "inserted.txt", "metrics.csv", "curves.png", "last.pth", "best.pth", "adapter.safetensors",
    "classes.csv", "confusion.csv", "confusion.png",
)  # fmt: skip
#: Seconds between two drawings of curves while a run goes on, since each takes a part of one.
PAUSE = 30.0
#: Seconds for which a run waits for its folder: workers of one that was killed hold it until they notice.
PATIENCE = 10.0
#: Most names at the side of a confusion matrix, and most classes of one that has numbers in it.
NAMED, NUMBERED = 60, 20


class RunFolder:
    """Where a run leaves what it makes.

    =======================  =========================================================================
    ``settings.yaml``        the settings of the run
    ``inserted.txt``         what was inserted where, and its cost
    ``metrics.csv``          a row for each epoch
    ``curves.png``           loss, accuracy, rate and size of the blocks' branches against epochs
    ``last.pth``             everything that is needed to go on, from the middle of an epoch too
    ``best.pth``             the weights of the epoch with the highest accuracy, ready to load
    ``adapter.safetensors``  of that epoch the blocks alone, and a new head, where the backbone is frozen
    ``classes.csv``          of that epoch the accuracy of each class, on request
    ``confusion.csv``        how many images of each class were taken for which, on request; a picture beside it
    ``logs``                 what trackers write
    ``.lock``                held while a run goes on, so that no two write here at once
    =======================  =========================================================================
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.drawn = time.monotonic()

    def refuse_another_run(self) -> None:
        """Refuse a folder that holds a run."""
        if any((self.path / name).exists() for name in ("last.pth", "best.pth")):
            raise ValueError(
                f"output: {self.path} holds a run already: choose another --output, go on with it by "
                f"--resume {self.path / 'last.pth'}, or begin anew with --overwrite"
            )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the folder for one run; another that is still at work in it is waited for a moment, and then refused."""
        lock = FileLock(self.path / ".lock", timeout=PATIENCE)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except Timeout as error:
            raise ValueError(
                f"output: another run is at work in {self.path}: wait for its end, or choose another --output"
            ) from error
        except (NotImplementedError, OSError):
            pass  # some network disks have no locks; that a folder cannot be written is said when it is written
        try:
            yield
        finally:
            lock.release()

    def open(self, settings: Settings, *, clear: bool) -> None:
        """Write the settings, and remove what another run left, all but its ``last.pth``, where that is wanted."""
        for name in FILES:
            for path in self.path.glob(f".{name}.*.partial"):  # of a process that was killed while it wrote
                path.unlink()
            if clear and name != "last.pth":
                (self.path / name).unlink(missing_ok=True)
        if clear:
            shutil.rmtree(self.path / "logs", ignore_errors=True)
        self.write_settings(settings.as_dict())

    def write(self, name: str, content: bytes | memoryview) -> None:
        """Write a file."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / name, content)

    def write_settings(self, settings: Mapping[str, object]) -> None:
        """Write ``settings.yaml``."""
        self.write("settings.yaml", yaml.safe_dump(dict(settings), sort_keys=False).encode())

    def write_table(self, name: str, lines: Iterable[Iterable[object]]) -> None:
        """Write a CSV file."""
        table = io.StringIO()
        csv.writer(table, lineterminator="\n").writerows(lines)
        self.write(name, table.getvalue().encode())

    def write_metrics(self, rows: Sequence[Mapping[str, object]], *, at_end: bool = False) -> None:
        """Write ``metrics.csv`` and, now and then and at the end, ``curves.png``, once there is a row for them."""
        if not rows:
            return
        self.write_table("metrics.csv", [list(rows[-1]), *(row.values() for row in rows)])
        if at_end or time.monotonic() - self.drawn > PAUSE:
            save_figure(curves_figure(rows), self.path / "curves.png")
            self.drawn = time.monotonic()

    def write_classes(self, confusions: Tensor, classes: Sequence[str]) -> None:
        """Write the accuracy of each class, and for which class its images were taken, as tables and as a picture."""
        images, right = confusions.sum(1).tolist(), confusions.diagonal().tolist()
        rows = [
            (name, count, good, f"{100 * good / count:.2f}" if count else "")
            for name, count, good in zip(classes, images, right, strict=True)
        ]
        self.write_table("classes.csv", [("class", "images", "right", "accuracy"), *rows])
        counts = [(name, *row) for name, row in zip(classes, confusions.tolist(), strict=True)]
        self.write_table("confusion.csv", [("class \\ predicted", *classes), *counts])
        save_figure(confusion_figure(confusions, classes), self.path / "confusion.png")

    def save(self, name: str, content: Mapping[str, object]) -> None:
        """Write a checkpoint."""
        path, buffer = self.path / name, io.BytesIO()
        torch.save(dict(content), buffer)
        old = f"the {name} of before is whole" if path.exists() else f"there is no {name} yet"
        try:
            self.write(name, buffer.getbuffer())
        except OSError as error:
            room = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "see to the folder"
            raise TrainingError(
                f"{path} cannot be written ({error.strerror}), and {old}: {room} and go on with "
                f"--resume auto --output {self.path}"
            ) from error


def numbered_folder(root: Path = Path("runs")) -> Path:
    """Make the next of ``train-1``, ``train-2``, …, for one run alone though several may begin at once."""
    taken = [int(path.name[6:]) for path in root.glob("train-*") if path.name[6:].isdecimal()]
    for number in itertools.count(max(taken, default=0) + 1):
        path = root / f"train-{number}"
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise AssertionError


def curves_figure(rows: Sequence[Mapping[str, object]]) -> Figure:
    """Loss of training and evaluation, top-1, rate, and with blocks the size of their branches, one above the other.

    >>> row = {"epoch": 1, "lr": "0.1", "train_loss": "1.2", "eval_loss": "1.1", "eval_top1": "40"}
    >>> [axis.get_ylabel() for axis in curves_figure([row]).axes]
    ['loss', 'top-1 %', 'rate']
    """
    columns = {key: [float(str(row[key])) for row in rows] for key in rows[0] if rows[0][key] != ""}
    panels = {"loss": ("eval_loss", 3.0), "top-1 %": ("eval_top1", 3.0), "rate": ("lr", 1.0)}
    if "branch_share" in columns:
        panels["branch/stream"] = ("branch_share", 1.4)
    figure = Figure(figsize=(6, 3 + len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), sharex=True, height_ratios=[height for _, height in panels.values()])
    # A line of one point is seen by its marker; a long one is clearer without.
    style: dict[str, Any] = {"marker": "o" if len(rows) < 40 else "", "markersize": 3, "linewidth": 1.5}
    for axis, (label, (column, _)) in zip(axes, panels.items(), strict=True):
        axis.plot(columns["epoch"], columns[column], label="evaluation", **style)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    loss, top1, *others = axes
    loss.plot(columns["epoch"], columns["train_loss"], color="tab:gray", label="training, as augmented", **style)
    loss.legend(frameon=False, fontsize=9)
    best = max(columns["eval_top1"])
    epoch = columns["epoch"][columns["eval_top1"].index(best)]
    top1.axhline(best, linewidth=0.7, linestyle=":")
    top1.text(0.99, 0.06, f"best {best:.2f} %, epoch {epoch:.0f}", transform=top1.transAxes, ha="right", fontsize=9)
    for axis in others:
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("epoch")
    axes[-1].set_xlim(0, 1.02 * columns["epoch"][-1])
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return figure


def confusion_figure(confusions: Tensor, classes: Sequence[str]) -> Figure:
    """A confusion matrix, drawn by scikit-learn."""
    from sklearn.metrics import ConfusionMatrixDisplay

    count = len(classes)
    figure = Figure(figsize=(min(16.0, 3 + 0.25 * count),) * 2, layout="constrained")
    axis = figure.subplots()
    ConfusionMatrixDisplay(confusions.numpy(), display_labels=classes).plot(
        ax=axis, cmap="Blues", include_values=count <= NUMBERED, colorbar=False
    )
    some = slice(None, None, math.ceil(count / NAMED))
    axis.set_xticks(range(count)[some], classes[some], rotation="vertical")
    axis.set_yticks(range(count)[some], classes[some])
    return figure


class Loader(yaml.SafeLoader):
    """Plain values alone, without the aliases by which a short file stands for a very long one."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.peek_event().anchor is not None:
            raise yaml.YAMLError("it has an anchor or an alias")
        return super().compose_node(parent, index)


# YAML 1.1 takes 1e-3, as people write it, for a text.
Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+e[-+]?\d+$", re.I), list("-+0123456789"))


def read_config(path: str | Path) -> dict[str, Any]:
    """The settings of another run, without those that each run has of its own, such as its folder.

    Raises:
        ValueError: the file cannot be read, or is not one of settings that this version knows.
    """
    try:
        values = Settings.values_in(yaml.load(Path(path).read_bytes(), Loader))
    except OSError as error:
        raise ValueError(f"config: {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"config: {path} is no file of settings: {' '.join(str(error).split())}") from error
    except ValueError as error:
        raise ValueError(f"config: {error}") from error
    return {name: values[name] for name in concerning("result", "machine") if name in values}

"""The folder of a run, and what is written there for people: settings, metrics, curves, scores by class."""

from __future__ import annotations

import csv
import io
import itertools
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from matplotlib.figure import Figure
from torch import Tensor

from vision_attn.networks.figures import save_figure
from vision_attn.networks.safe import write_atomically
from vision_attn.tools.training.settings import Settings, read_settings

__all__ = [
    "alone_in",
    "clear",
    "newest_state",
    "numbered_folder",
    "refuse_another_run",
    "refuse_old_run",
    "settings_of_run",
    "write_classes",
    "write_rows",
]

#: What a run leaves, beside ``.lock``, which is held while it goes on.
FILES = {
    "settings.yaml": "the settings of the run",
    "inserted.txt": "what was inserted where, and its cost",
    "first_batch.png": "images of the first step, as the network got them",
    "metrics.csv": "a row for each epoch",
    "curves.png": "loss, accuracy, rate and size of the blocks' branches against epochs",
    "model": "the network of the epoch with the highest accuracy, ready for load_model",
    "adapter.safetensors": "of that epoch the blocks alone, and a new head, where the backbone is frozen",
    "classes.csv": "of that epoch the accuracy of each class, on request",
    "confusion.csv": "how many images of each class were taken for which, on request",
    "state": "all that is needed to go on, from the middle of an epoch too",
    "logs": "what trackers write",
}
#: Seconds for which a run waits for its folder: workers of one that was killed hold it until they notice.
PATIENCE = 10.0


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder for one run; another that is still at work in it is waited for a moment, and then refused."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", timeout=PATIENCE)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(
            f"output: another run is at work in {folder}: wait for its end, or choose another --output"
        ) from error
    try:
        yield
    finally:
        lock.release()


def clear(folder: Path) -> None:
    """Remove what another run left."""
    for name in FILES:
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
        else:
            (folder / name).unlink(missing_ok=True)


def newest_state(folder: Path) -> Path | None:
    """The folder of the newest state of a run, ``state/EPOCH-STEP``; each was written aside and renamed when whole."""
    return max((folder / "state").glob("[0-9]*-[0-9]*"), default=None)


def refuse_old_run(path: Path) -> None:
    """Refuse a run, or a checkpoint of a run, as versions before 0.1.0 left them."""
    for name in ("last.pth", "best.pth"):
        if path.name == name or ((path / name).exists() and not (path / "model").exists()):
            file = path if path.name == name else path / name
            raise ValueError(
                f"{file} is a checkpoint of an earlier version, which this one cannot go on from or open by itself: begin "
                f"from its weights, with --weights {file.with_name('best.pth')} and --model and --insert as it was made"
            )


def refuse_another_run(folder: Path) -> None:
    """Refuse a folder that holds a run."""
    refuse_old_run(folder)
    if newest_state(folder):
        raise ValueError(
            f"output: {folder} holds a run already: choose another --output, go on with it by --resume {folder}, or "
            "begin anew with --overwrite"
        )


def settings_of_run(folder: Path, given: Mapping[str, Any] | None = None, *, trusted: bool = False) -> Settings:
    """The settings of the run in a folder, and those that are given in the place of its own."""
    refuse_old_run(folder)
    if not (folder / "settings.yaml").is_file():
        raise FileNotFoundError(f"{folder} is no folder of a run: there is no {folder / 'settings.yaml'}")
    return read_settings(folder / "settings.yaml", given, trusted=trusted)


def numbered_folder(root: Path = Path("runs")) -> Path:
    """Make the next of ``train-1``, ``train-2``, …, for one run alone though several may begin at once."""
    taken = [int(path.name[6:]) for path in root.glob("train-*") if path.name[6:].isdecimal()]
    for number in itertools.count(max(taken, default=0) + 1):
        with suppress(FileExistsError):
            (root / f"train-{number}").mkdir(parents=True)
            break
    return root / f"train-{number}"


def write_table(path: Path, lines: Iterable[Iterable[object]]) -> None:
    """Write a CSV file."""
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows(lines)
    write_atomically(path, table.getvalue().encode())


def write_rows(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write ``metrics.csv`` and ``curves.png``, once there is a row for them."""
    if rows:
        write_table(folder / "metrics.csv", [list(rows[0]), *(row.values() for row in rows)])
        save_figure(curves_figure(rows), folder / "curves.png")


def write_classes(folder: Path, confusions: Tensor, classes: Sequence[str]) -> None:
    """Write the accuracy of each class, and for which class its images were taken."""
    found = zip(classes, confusions.sum(1).tolist(), confusions.diagonal().tolist(), strict=True)
    rows = [(name, count, right, f"{100 * right / count:.2f}" if count else "") for name, count, right in found]
    write_table(folder / "classes.csv", [("class", "images", "right", "accuracy"), *rows])
    counts = [(name, *row) for name, row in zip(classes, confusions.tolist(), strict=True)]
    write_table(folder / "confusion.csv", [("class \\ predicted", *classes), *counts])


def curves_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Loss of training and evaluation, top-1, rate, and with blocks the size of their branches, one above the other."""
    panels = {
        "loss": ("eval_loss", "train_loss"), "top-1 %": ("eval_top1",), "rate": ("lr",),
        "branch/stream": ("branch_share",),
    }  # fmt: skip
    panels = {label: columns for label, columns in panels.items() if rows[0][columns[0]] is not None}
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

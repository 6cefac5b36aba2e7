"""Folders of runs: their settings, locks and states. Files are written completely or not at all."""

import csv
import importlib.metadata
import io
import json
import os
import pkgutil
import platform
import re
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

import vision_attn as va
from vision_attn.errors import CheckpointError, DataError, TrainingError
from vision_attn.recipes.settings import CALL, MACHINE, Settings, check, flag

#: Seconds to wait for the lock on a folder, which worker processes of a killed run hold for a moment.
LOCK_TIMEOUT = 5.0
#: Extensions of image files.
EXTENSIONS = (".jpg", ".jpeg", ".jfif", ".jp2", ".png", ".gif", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
#: Types of values in JSON by the names in annotations. A number may be an integer, and a path is text.
JSON_TYPES: Any = {"bool": bool, "int": int, "float": (int, float), "str": str, "Path": str, "None": type(None)}
#: Files of folders that the recipes write.
MARKS = {"settings.json": "a run", "runs.json": "a comparison", "demo.json": "a demo", "config.json": "a network"}


def is_image(name: str | Path, extensions: tuple[str, ...] = EXTENSIONS) -> bool:
    """Return True for a name with an image extension that does not start with a dot."""
    return str(name).lower().endswith(extensions) and not os.path.basename(name).startswith(".")


def shorten(names: Sequence[str], most: int = 6) -> str:
    """Join the first names, and count the others.

    >>> shorten(["daisy", "lily", "rose"], 2), shorten(["daisy", "lily"], 2)
    ('daisy, lily and 1 more', 'daisy, lily')
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def require_run(name: str | Path, order: str) -> Path:
    """Return the folder of a run or of ``va.save_model``, or ``hf-hub:OWNER/NAME``; raise an error for another path.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> write_file(folder / "runs.json", "{}")
    >>> require_run(folder, "evaluate RUN")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: ... is the folder of a comparison, not the folder of a run. The order is evaluate RUN
    """
    folder, marks = Path(name), ("settings.json", "config.json", "model/config.json")
    if str(name).startswith("hf-hub:") or any((folder / mark).is_file() for mark in marks):
        return folder
    if not folder.exists():
        raise DataError(f"{name}: no such run")
    kind = next((f"the folder of {kind}" for mark, kind in MARKS.items() if (folder / mark).is_file()), "")
    if folder.is_file():
        kind = "a file"
    elif not kind and any(map(is_image, folder.rglob("*"))):
        kind = "a folder of images"
    what = f"{kind}, not the folder of a run" if kind else "not the folder of a run: it has no config.json"
    raise ValueError(f"{name} is {what}. The order is {order}")


def load_run(name: str | Path, blocks: Sequence[str], order: str) -> Any:
    """Load the network of a run, with blocks of the classes ``MODULE:CLASS``."""
    folder = require_run(name, order)
    return va.load_model(folder, block=[import_block(block) for block in blocks if ":" in block])


def import_block(name: str) -> Any:
    """Import the class ``MODULE:CLASS`` of a block; return another name unchanged."""
    if ":" not in name:
        return name
    sys.path.append(os.getcwd())  # as with python -m, but last, so that no other module is hidden
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--block must be a name or a class MODULE:CLASS, got {name!r} ({error})") from error


def read_settings(path: Path, words: Sequence[str], kind: type[Any] = Settings) -> Any:
    """Read the settings of another run. Those that download or run code are used only if they are typed as well."""
    file = require_run(path, "--config RUN, --resume RUN") / "settings.json" if not path.is_file() else path
    try:
        values = {name: x for name, x in json.loads(file.read_bytes()).items() if name not in CALL | {"download"}}
        for typed, unused in (("--stages", "names"), ("--names", "stages")):  # one of them selects the sites
            values = {name: x for name, x in values.items() if typed not in words or name != unused}
        if kind is not Settings:  # a comparison has its own seeds and blocks
            other = {"block_options", "pattern"} if values.get("block", "attention") != "attention" else set()
            values = {name: x for name, x in values.items() if name not in {"seed", "block", *other}}
        if unknown := values.keys() - kind.__dataclass_fields__.keys():
            raise ValueError(f"unknown settings {', '.join(sorted(unknown))}")
        found = from_json(values, kind)
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} does not contain settings of a run: {error}") from error
    for name, mark in (("dataset", "hfds/"), ("block", ":")):
        if mark in (value := str(getattr(found, name))) and flag(name) not in words:
            what = f"{file} contains {flag(name)} {value}, which can download or run code"
            raise ValueError(f"{what}: pass {flag(name)} {value} if you trust it")
    return found


def from_json(values: dict[str, Any], kind: type[Any] = Settings, **others: Any) -> Any:
    """Return settings from values of JSON, in which tuples are lists and paths are text; raise for other types."""
    for name, x in values.items():
        expected = str(kind.__dataclass_fields__[name].type)
        kinds = tuple(JSON_TYPES[word] for word in re.findall(r"\w+", expected) if word in JSON_TYPES)
        items = x if isinstance(x, list | tuple) else [x]
        is_right = all(isinstance(one, kinds) and (bool in kinds or not isinstance(one, bool)) for one in items)
        if not is_right or ("tuple" in expected) != isinstance(x, list | tuple):
            raise ValueError(f"{name} must be {expected}, got {x!r}")
    kept = {name: tuple(x) if isinstance(x, list) else x for name, x in values.items()}
    return kind(**{**kept, "data": values.get("data") and Path(values["data"]), **others})


def refuse_other_folder(folder: Path, mark: str) -> None:
    """Raise an error for an output folder with images or other results; ``mark`` is a file of folders of this kind."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output: {folder} is a file. Pass a folder")
    for file, kind in MARKS.items():
        if file != mark and (folder / file).is_file():
            raise ValueError(f"--output: {folder} is the folder of {kind}. Choose another folder")
    inner = (path for depth in ("*", "*/*", "*/*/*") for path in folder.glob(depth))  # of data sets too
    if not (folder / mark).exists() and any(map(is_image, inner)):
        raise ValueError(f"--output: {folder} is a folder of images. Choose another folder")


def claim_folder(s: Settings, stack: ExitStack) -> tuple[Path, Path | None, dict[str, Any]]:
    """Lock the folder of the run; return it, the state from which to resume or None, and the progress of the run."""
    resumed = None if s.resume in (None, "auto") else Path(str(s.resume))
    if s.resume == "auto" and s.output is None:
        raise ValueError("--resume auto requires --output: the folder of the run to resume or to start")
    if resumed and s.output and s.output.resolve() != resumed.resolve():
        raise ValueError(f"--output must be the folder of --resume {resumed}, got {s.output}")
    taken = [int(path.name[6:]) for path in Path("runs").glob("train-*") if path.name[6:].isdecimal()]
    folder = resumed or s.output or Path("runs", f"train-{max(taken, default=0) + 1}")
    refuse_other_folder(require_run(folder, "--resume RUN") if resumed else folder, "settings.json")
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    from filelock import FileLock, Timeout

    try:
        stack.enter_context(FileLock(folder / ".lock", timeout=LOCK_TIMEOUT))
    except Timeout:
        raise TrainingError(f"another process is training in {folder}. Wait for it, or pass another --output") from None
    if is_new:  # a run that fails before its first state leaves no folder
        stack.callback(lambda: None if newest_state(folder) else shutil.rmtree(folder))
    check_writable(folder / "metrics.csv")
    state = newest_state(folder)  # after the lock: another process may have completed a run
    if state is None and resumed:
        raise ValueError(f"--resume: {folder} contains no state of a run. Train again with another --output")
    if state is None and (folder / "model" / "config.json").is_file():
        raise ValueError(f"--output: {folder} contains a network, but no state of a run. Choose another folder")
    if state is None:
        return folder, None, {"epoch": 0, "step": 0, "loss": 0.0, "history": []}
    if s.resume is None:
        raise ValueError(f"--output: {folder} already contains a run. Pass another folder or --resume {folder}")
    before: Settings = check(read_settings(folder, ("--dataset", "--block")))
    progress = read_progress(state)
    batch = progress.get("batch", before.batch_size)  # the settings may contain the default
    now = replace(s, batch_size=s.batch_size or batch, epochs=min(s.epochs, before.epochs))
    if names := changed_flags(vars(before) | {"batch_size": batch}, vars(now)):
        raise ValueError(f"--resume: these settings differ from {folder}: {names}. Pass the same values")
    return folder, state, progress


def has_blocks(run: str | None) -> bool:
    """Return True for a run with inserted blocks, whose weights do not fit the network without them."""
    folders = (Path(run), *Path(run).parents[:2]) if run else ()  # of RUN/model/model.safetensors, too
    files = (folder / "settings.json" for folder in folders)
    file = next(filter(Path.is_file, files), None)
    try:
        return file is not None and any(map(json.loads(file.read_bytes()).get, ("stages", "names")))
    except (ValueError, AttributeError):  # of another program
        return False


def changed_flags(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return the flags whose values differ, except those that may change when a run is resumed."""
    names = (before.keys() & now.keys()) - MACHINE - CALL
    return ", ".join(flag(name) for name in sorted(names) if before[name] != now[name])


def newest_state(folder: Path) -> Path | None:
    """Return the folder of the newest complete state, ``state/EPOCH-STEP``."""
    return max((folder / "state").glob("[0-9]*-[0-9]*"), default=None)


def read_progress(state: Path) -> dict[str, Any]:
    """Read the progress of a run: its epoch and step, the rows of ``metrics.csv``, and a description of its data."""
    try:
        progress: dict[str, Any] = json.loads((state / "progress.json").read_bytes())
        if missing := {"epoch", "step", "loss", "history", "data", "processes"} - {*progress}:
            raise ValueError(f"progress.json has no {', '.join(sorted(missing))}")
        return progress
    except Exception as error:  # a damaged state can cause any error
        raise CheckpointError(f"{state} is damaged, so the run cannot be resumed: {error}") from error


def compare_data(progress: dict[str, Any], data: dict[str, Any]) -> None:
    """Raise an error for other classes, and for other images within an epoch; warn about other images otherwise."""
    if (before := progress["data"])["classes"] != data["classes"]:
        old, new = (shorten(one["classes"]) for one in (before, data))
        raise DataError(f"the classes differ from those of the run: expected {old}, got {new}. Restore --data")
    if before["digests"] != data["digests"]:
        numbers = f"{data['images']} training and validation images, {before['images']} before"
        what = f"the images changed since the run was started ({numbers})"
        if progress["step"]:
            raise DataError(f"{what}, and it was interrupted within an epoch. Restore the images of --data")
        held_out = ", and some validation images may have been used for training" * data["held_out"]
        warnings.warn(f"{what}: results may differ{held_out}", stacklevel=3)


def save_state(acc: Any, folder: Path, progress: dict[str, Any]) -> Path:
    """Write the complete state of a run to a temporary folder, rename it, and remove older states."""
    path = folder.resolve() / "state" / f"{progress['epoch']:05}-{progress['step']:07}"
    new = path.with_name(f".{path.name}.new")  # the same name in every process and after a restart
    try:
        acc.save_state(str(new))
        acc.wait_for_everyone()
        if acc.is_main_process:
            write_file(new / "progress.json", json.dumps(progress))
            os.replace(new, path)
            for old in {*path.parent.glob("[0-9]*-[0-9]*"), *path.parent.glob(".*-*.new")} - {path}:
                shutil.rmtree(old)
    except Exception as error:
        shutil.rmtree(new, ignore_errors=True)
        if not isinstance(error, OSError | SafetensorError) and "inline_container" not in str(error):
            raise  # an error of torch.save contains inline_container
        reason = f"cannot write to {folder} ({' '.join(str(error).split())})"
        remedy = f"continue with --resume {folder}" if newest_state(folder) else "start again"
        raise TrainingError(f"{reason}. Check the disk, and {remedy}") from error
    acc.wait_for_everyone()
    return path


def catch_signals(stack: ExitStack) -> list[int]:
    """Collect Ctrl-C, SIGTERM and SIGHUP, so that training stops after a step; ignored signals stay ignored."""
    received: list[int] = []
    in_main = threading.current_thread() is threading.main_thread()  # required to handle signals
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if in_main else ():
        if (before := signal.getsignal(number)) not in (signal.SIG_IGN, None):
            stack.callback(signal.signal, number, before)
            signal.signal(number, lambda number, frame: received.append(number))
    return received


def unwrap(model: Any) -> Any:
    """Return the network inside the wrappers of torch.compile and of data parallelism, which is their only child."""
    wrapped = type(model).__name__ in ("OptimizedModule", "DataParallel", "DistributedDataParallel")
    return unwrap(next(model.children())) if wrapped else model


def check_writable(path: Path, inputs: Iterable[Path] = ()) -> None:
    """Raise an error if a file cannot be written or is one of the inputs; call this before a long computation."""
    existed = path.exists()
    if existed and any(map(path.samefile, inputs)):
        raise ValueError(f"--output must not be one of the images, got {path}")
    open(path, "ab").close()
    if not existed:
        path.unlink()


def write_file(path: Path, content: str | bytes) -> None:
    """Write a complete file or none; a pipe or device such as ``/dev/stdout`` is written to directly."""
    new = path if path.exists() and not path.is_file() else path.with_name(f".{path.name}.new")
    try:  # names of files may have other bytes than UTF-8
        new.write_bytes(content.encode(errors="surrogateescape") if isinstance(content, str) else content)
        if new != path:
            os.replace(new, path)
    except OSError as error:
        if new == path:
            raise
        new.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_csv(path: Path, lines: Iterable[Iterable[object]]) -> None:
    """Write a CSV file."""
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows(lines)
    write_file(path, table.getvalue())


def describe_environment() -> dict[str, Any]:
    """Return the versions of the software, and the device."""
    import torch

    versions = {name: importlib.metadata.version(name) for name in ("torchvision", "timm", "einx", "numpy")}
    return {
        "vision_attn": va.__version__, "torch": torch.__version__, **versions, "python": platform.python_version(),
        "os": platform.platform(), "cpu": platform.processor() or platform.machine(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None, "threads": torch.get_num_threads(),
    }  # fmt: skip

"""Files and folders that are written whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Write a file so that at every moment it is either the old one or the new one, on disk and whole.

    Args:
        path: the file.
        content: all of it.

    Raises:
        OSError: the folder cannot be written; the old file, if any, is untouched.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "results.json"
    >>> write_atomically(file, b"{}")
    >>> [entry.name for entry in file.parent.iterdir()]
    ['results.json']
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def written_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into, which takes the place of ``folder`` once the block ends without an error.

    It begins as a copy of what is in ``folder``. At every moment the old folder or the new one is there as a whole: for
    an instant under the name that :func:`finished_folder` knows.

    Raises:
        ValueError: the folder cannot be replaced, since it is the current one, above it, or a mounted one.
        OSError: it cannot be written; the old folder, if any, is untouched.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp()) / "net"
    >>> with written_folder(folder) as new:
    ...     write_atomically(new / "config.json", b"{}")
    >>> [entry.name for entry in folder.iterdir()]
    ['config.json']
    """
    folder = folder.resolve()
    if os.path.ismount(folder) or Path.cwd().is_relative_to(folder):
        needed = "folder must be one that can be replaced, not the current or a mounted one"
        raise ValueError(f"{needed}; got {str(folder)!r}: name a new folder inside it")
    new, old = (folder.with_name(f".{folder.name}.{part}") for part in ("new", "old"))
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(new, ignore_errors=True)  # of a process that was killed
    if old.exists() and not folder.exists():
        os.replace(old, folder)
    shutil.rmtree(old, ignore_errors=True)
    try:
        if folder.exists():
            shutil.copytree(folder, new, symlinks=True)
        new.mkdir(exist_ok=True)
        yield new
        for path in new.rglob("*"):
            if path.is_file():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
        if folder.exists():
            os.replace(folder, old)
        os.replace(new, folder)
    finally:
        if old.exists() and not folder.exists():
            os.replace(old, folder)
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def finished_folder(folder: Path) -> Path:
    """Where such a folder is to be read: if the process that replaced it was killed right then, the old one."""
    old = folder.with_name(f".{folder.name}.old")
    return old if old.is_dir() and not folder.exists() else folder


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a ``.safetensors`` file. The same content with one entry of metadata is the same file."""
    # Each in a storage of its own, since safetensors takes no two names of one storage.
    copies = {key: value.detach().cpu().clone(memory_format=torch.contiguous_format) for key, value in tensors.items()}
    write_atomically(path, save(copies, dict(metadata)))

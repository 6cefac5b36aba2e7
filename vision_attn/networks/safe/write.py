"""Write files and folders completely or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save
from torch import Tensor

#: Beginning of the name of a hidden folder for files that are not complete yet. It does not depend on their names.
TEMPORARY = ".vision_attn-"


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Write a file so that at every moment it is either the old one or the new one, on disk and complete.

    A symbolic link stays, and the file that it points to is written; an existing file keeps its mode. Pipes, devices
    and standard streams such as ``/dev/stdout`` are written through.

    Args:
        path: the file.
        content: all of it.

    Raises:
        OSError: the file cannot be written; the old file, if any, is untouched.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "results.json"
    >>> write_atomically(file, b"{}")
    >>> [entry.name for entry in file.parent.iterdir()]
    ['results.json']
    """
    check_writable(path)
    with name_errors(path):
        if (stream := find_stream(path)) is not None:
            with open(stream, "wb", closefd=stream is path) as opened:
                opened.write(content)
            return
        target = Path(os.path.realpath(path))
        with TemporaryDirectory(prefix=TEMPORARY, dir=target.parent) as folder:
            partial = Path(folder) / target.name
            partial.write_bytes(content)  # with the mode of a new file, which a file of tempfile would not have
            sync(partial)
            if target.exists():
                partial.chmod(target.stat().st_mode)
            os.replace(partial, target)


def check_writable(path: Path) -> None:
    """Raise unless a file can be written here; call it before the work whose result the file will hold.

    Raises:
        OSError: the folder is missing or cannot be written to, or the path is a folder or a write-protected file.
    """
    with name_errors(path):
        if path.is_file() or path.is_dir():
            os.close(os.open(path, os.O_WRONLY))
        if find_stream(path) is None:
            TemporaryDirectory(prefix=TEMPORARY, dir=os.path.dirname(os.path.realpath(path))).cleanup()


def find_stream(path: Path) -> Path | int | None:
    """Return a pipe or device, or the descriptor of a standard stream, to write through; None for a file or nothing.

    The file that a shell redirects a standard stream to must not be replaced: later output would be lost.
    """
    for descriptor in (1, 2):
        with suppress(OSError):  # the file is missing, or the stream is closed
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return descriptor
    return path if path.exists() and not path.is_file() else None


@contextmanager
def name_errors(path: Path) -> Iterator[None]:
    """Make errors of the operating system name this path instead of a temporary file, or of no file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def sync(path: Path) -> None:
    """Wait until the content of a file is on disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def rename_folder(complete: Path, folder: Path) -> None:
    """Give a complete folder its final name, under which there is nothing yet, once its files are on disk."""
    for path in filter(Path.is_file, complete.rglob("*")):
        sync(path)
    os.replace(complete, folder)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a ``.safetensors`` file. The same content with one entry of metadata is the same file."""
    # Each in a storage of its own, since safetensors takes no two names of one storage.
    copies = {key: value.detach().cpu().clone(memory_format=torch.contiguous_format) for key, value in tensors.items()}
    write_atomically(path, save(copies, dict(metadata)))

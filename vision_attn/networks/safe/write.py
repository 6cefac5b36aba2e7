"""Write files and folders atomically."""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save
from torch import Tensor

#: Folder with an entry for each running process, on Linux.
PROCESSES = Path("/proc")


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Write a file atomically: at any time, either the complete old file or the complete new file is on disk.

    Symbolic links are followed, and an existing file keeps its permissions. Pipes, devices and standard streams such as
    ``/dev/stdout`` are written to directly.

    Args:
        path: path of the file.
        content: content of the file.

    Raises:
        OSError: the file cannot be written; an existing file is unchanged.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "results.json"
    >>> write_atomically(file, b"{}")
    >>> [entry.name for entry in file.parent.iterdir()]
    ['results.json']
    """
    check_writable(path)
    with name_errors(path):
        if is_stream(path):
            with open(path, "ab") as stream:
                stream.write(content)
            return
        target = Path(os.path.realpath(path))
        with temporary_folder(target.parent) as folder:
            partial = folder / target.name
            with open(partial, "wb") as file:  # with default permissions, unlike a file of tempfile
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # wait until the content is on disk
            if target.exists():
                partial.chmod(target.stat().st_mode)
            os.replace(partial, target)


def check_writable(path: Path) -> None:
    """Raise an error unless a file can be written to a path; call this before a long computation.

    Raises:
        OSError: the folder does not exist or is not writable, or the path is a folder or a write-protected file.
    """
    with name_errors(path):
        if path.is_file() or path.is_dir():
            os.close(os.open(path, os.O_WRONLY))
        if not is_stream(path):
            with temporary_folder(Path(os.path.realpath(path)).parent):
                pass


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Create a hidden folder for incomplete files, and remove those of processes of this machine that were killed."""
    start = f".vision_attn-{socket.gethostname()}-"
    for left in parent.glob(f"{start}*-*") if PROCESSES.is_dir() else ():
        if not (PROCESSES / left.name.removeprefix(start).partition("-")[0]).exists():
            rmtree(left, ignore_errors=True)
    with TemporaryDirectory(prefix=f"{start}{os.getpid()}-", dir=parent) as name:
        yield Path(name)


def is_stream(path: Path) -> bool:
    """Return True for a pipe or device, and for a standard stream, whose file must not be replaced."""
    return path.parts[:2] == ("/", "dev") or (path.exists() and not path.is_file())


@contextmanager
def name_errors(path: Path) -> Iterator[None]:
    """Replace the path in errors of the operating system, which can be missing or the path of a temporary file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a ``.safetensors`` file; with one metadata entry, equal content gives identical files."""
    # Tensors are copied to separate storages, because safetensors does not support shared storages.
    copies = {key: value.detach().cpu().clone(memory_format=torch.contiguous_format) for key, value in tensors.items()}
    write_atomically(path, save(copies, dict(metadata)))

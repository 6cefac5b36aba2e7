"""Checkpoint files, read without running any code from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from vision_attn.checkpoints.archive import LONGEST_LIST, read_archive
from vision_attn.checkpoints.locate import check_hash, find_file
from vision_attn.checkpoints.pickled import NotAllowedError
from vision_attn.errors import CheckpointError

__all__ = ["content_of", "open_safetensors", "read_checkpoint", "read_safetensors"]


def read_checkpoint(path: str | Path) -> dict[str, object]:
    """The content of a checkpoint file, on the CPU, without running any code from it.

    Numbers of NumPy come as Python's. What a file makes the machine do is bounded by its size: it is refused if it
    claims to hold more.

    Args:
        path: the file, or a folder with ``model.safetensors`` or ``pytorch_model.bin``.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is damaged, is not the one whose hash its name holds, or is a pickle that asks for
            more than tensors and plain values.

    >>> import tempfile, torch
    >>> file = Path(tempfile.mkdtemp()) / "net.pth"
    >>> torch.save({"epoch": 3, "state_dict": {}}, file)
    >>> read_checkpoint(file)
    {'epoch': 3, 'state_dict': {}}
    """
    content, _ = content_of(find_file(path))
    return content


def content_of(file: Path) -> tuple[dict[str, object], str]:
    """What is in a file that is there, and the beginning of its SHA-256 if its name holds that."""
    if file.suffix == ".safetensors":
        content: object = read_safetensors(file)[0]
    else:
        try:
            content = read_archive(file)
        except PermissionError:
            raise
        except Exception as error:  # a damaged file can make the reader fail in any way
            raise CheckpointError(refusal(file, error)) from error
    # Only now: a hash over all of what may be no checkpoint at all can take minutes.
    verified = check_hash(file)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{file} holds a {type(content).__name__}, expected a dictionary of tensors")
    return dict(content), verified


def read_safetensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a ``.safetensors`` file, and what it says of them."""
    try:
        with open_safetensors(file) as opened:
            return {key: opened.get_tensor(key) for key in opened.keys()}, opened.metadata() or {}  # noqa: SIM118
    except PermissionError:
        raise
    except Exception as error:  # a damaged file can make the reader fail in any way
        raise CheckpointError(refusal(file, error)) from error


def open_safetensors(file: Path) -> safe_open:
    """A ``.safetensors`` file whose list of tensors is not too long to be read."""
    with open(file, "rb") as begin:
        if int.from_bytes(begin.read(8), "little") > LONGEST_LIST:
            raise NotAllowedError("for too many tensors")
    return safe_open(file, framework="pt")


def refusal(path: Path, error: Exception) -> str:
    """Why a file was not loaded, with a remedy."""
    if isinstance(error, NotAllowedError):
        return (
            f"{path} asks {error} on loading, and was not loaded: a checkpoint needs tensors and plain values "
            "only. If you trust its source, load it there and save the state dict alone, best as .safetensors"
        )
    return (
        f"{path} is truncated or no checkpoint: fetch or save it again, and compare its size and checksum with "
        "the source's"
    )

"""Checkpoint files, read without running any code from them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from vision_attn.checkpoints.errors import CheckpointError, shorten
from vision_attn.checkpoints.locate import check_hash, find_file

__all__ = ["content_of", "read_checkpoint", "refusal", "shorten"]

#: How NumPy pickles one number.
NUMPY_SCALAR: Any = np.float64(0).__reduce__()[0]

#: What pickled checkpoints hold beside tensors, none of which runs code: settings of argparse, scores of NumPy.
HARMLESS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    argparse.Namespace,
    np.dtype,
    np.dtypes.Float64DType,
    np.dtypes.Float32DType,
    np.dtypes.Int64DType,
    (NUMPY_SCALAR, "numpy.core.multiarray.scalar"),
    (NUMPY_SCALAR, "numpy._core.multiarray.scalar"),
]


def read_checkpoint(path: str | Path) -> dict[str, object]:
    """The content of a checkpoint file, on the CPU, without running any code from it.

    Args:
        path: the file, or a folder with ``model.safetensors`` or ``pytorch_model.bin``.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is damaged, is not the one whose hash its name holds, or is a pickle that asks for
            more than tensors and plain values.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "net.pth"
    >>> torch.save({"epoch": 3, "state_dict": {}}, file)
    >>> read_checkpoint(file)
    {'epoch': 3, 'state_dict': {}}
    """
    file = find_file(path)
    check_hash(file)
    return content_of(file)


def content_of(file: Path) -> dict[str, object]:
    """What is in a file that is there and was checked.

    Args:
        file: the file.

    Raises:
        CheckpointError: it is damaged, would run code, or holds no dictionary.
    """
    try:
        if file.suffix == ".safetensors":
            return dict(load_file(file))
        with torch.serialization.safe_globals(HARMLESS):
            content = torch.load(file, map_location="cpu", weights_only=True)
    except PermissionError:
        raise
    except Exception as error:  # a damaged file can make the readers fail in any way
        raise CheckpointError(refusal(file, str(error))) from error
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{file} holds a {type(content).__name__}, expected a dictionary of tensors")
    return dict(content)


def refusal(path: Path, message: str) -> str:
    """Why a file was not loaded, from what its reader said.

    Args:
        path: of the file.
        message: of the reader's error.

    Returns:
        A sentence with a remedy.
    """
    wanted = re.search(r"GLOBAL ([\w.]+)", message)
    if wanted:
        return (
            f"{path} asks to run {wanted[1]!r} on loading, and was not loaded: a checkpoint needs tensors and plain "
            "values only. If you trust its source, load it there and save the state dict alone, best as .safetensors"
        )
    if "TorchScript" in message:
        return f"{path} is a TorchScript archive, a program: load it with torch.jit.load and save its state dict"
    return (
        f"{path} is truncated or no checkpoint: fetch or save it again, and compare its size and checksum with the "
        "source's"
    )

"""Checkpoint files, read without running any code from them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

__all__ = ["CheckpointError", "read_checkpoint", "read_weights", "shorten"]

#: Entries under which training scripts keep a network's weights, and those of its moving average.
WEIGHTS = ("state_dict", "model", "model_state_dict", "net")
AVERAGED = ("model_ema", "state_dict_ema", "ema")

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


class CheckpointError(RuntimeError):
    """A file cannot be read as a checkpoint, or does not fit the model; the model is as it was."""


def read_weights(path: str | Path, *, ema: bool = False, own: Collection[str] = ()) -> tuple[str, dict[str, Tensor]]:
    """The weights of a checkpoint file, and the entry they were found under; prefixes of wrappers are taken off.

    Args:
        path: the file.
        ema: take the moving average of the weights that the file holds.
        own: names that the model uses itself, and which are no prefix then.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is damaged, would run code, or holds no weights.
    """
    content = read_checkpoint(path)
    order = AVERAGED if ema else WEIGHTS + AVERAGED
    for entry in order:
        if is_state_dict(content.get(entry)):
            return entry, without_prefixes(content[entry], own)
    if ema:
        raise CheckpointError(
            f"{path}: ema=True asks for averaged weights under one of {', '.join(AVERAGED)}; "
            f"the file has {shorten(tuple(map(str, content)))}"
        )
    if is_state_dict(content):
        return "", without_prefixes(content, own)
    raise CheckpointError(
        f"{path} holds no weights: expected tensors by name, at the top or under one of "
        f"{', '.join(WEIGHTS + AVERAGED)}; the file has {shorten(tuple(map(str, content)))}"
    )


def read_checkpoint(path: str | Path) -> dict[str, object]:
    """The content of a checkpoint file, on the CPU, without running any code from it.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is damaged, or it is a pickle that asks for more than tensors and plain values.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such checkpoint file")
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        with torch.serialization.safe_globals(HARMLESS):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError:
        raise
    except Exception as error:  # a damaged file can make the readers fail in any way
        raise CheckpointError(refusal(path, str(error))) from error
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, expected a dictionary of tensors")
    return dict(content)


def refusal(path: Path, message: str) -> str:
    """Why a file was not loaded, from what its reader said."""
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


def is_state_dict(value: object) -> bool:
    """Names to tensors, some of which may be counters of other types."""
    return (
        isinstance(value, Mapping)
        and any(isinstance(item, Tensor) for item in value.values())
        and all(isinstance(key, str) for key in value)
    )


def without_prefixes(weights: object, own: Collection[str]) -> dict[str, Tensor]:
    assert isinstance(weights, Mapping)
    named = {key.replace("_orig_mod.", ""): value for key, value in weights.items() if isinstance(value, Tensor)}
    while not any(key in own for key in named):
        # torch's AveragedModel counts its updates beside the module that it wraps.
        inner = [key for key in named if key != "n_averaged"]
        if not inner or not all(key.startswith("module.") for key in inner):
            break
        named = {key.removeprefix("module."): named[key] for key in inner}
    return named


def shorten(keys: tuple[str, ...], limit: int = 6) -> str:
    shown = ", ".join(keys[:limit])
    return f"{shown}, … ({len(keys) - limit} more)" if len(keys) > limit else shown

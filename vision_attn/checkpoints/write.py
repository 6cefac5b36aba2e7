"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors.torch import save
from torch import nn

__all__ = ["save_weights", "unwrap", "write_atomically"]


def save_weights(model: nn.Module, path: str | Path) -> None:
    """Write a model's weights as ``.safetensors``: names and tensors, nothing that could run.

    Raises:
        ValueError: the path has another ending.
        OSError: the file cannot be written; an old one is untouched.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"path must end in .safetensors; got {path.name!r}")
    tensors = {key: value.detach().cpu().contiguous() for key, value in unwrap(model).state_dict().items()}
    write_atomically(path, save(tensors))


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that at every moment it is either the old one or the new one, on disk and whole.

    Raises:
        OSError: the folder cannot be written; the old file, if any, is untouched.
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


def unwrap(model: nn.Module) -> nn.Module:
    """The network inside torch.compile's and the parallel wrappers."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner

"""Files that are written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from vision_attn.networks.checkpoints.specification import BLOCKS, blocks_of
from vision_attn.networks.insertion import plain_network
from vision_attn.text import shorten


def save_weights(model: nn.Module, path: str | Path, about: Mapping[str, str] | None = None) -> None:
    """Write a model's weights as ``.safetensors``, and what its blocks are, and ``about``: nothing that runs.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "net.safetensors"
    >>> save_weights(nn.Linear(2, 3), file)
    >>> file.stat().st_size > 9 * 4  # bytes of nine numbers, and their names
    True
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"path must end in .safetensors; got {path.name!r}")
    state = plain_network(model).state_dict()
    if others := [key for key, value in state.items() if not isinstance(value, Tensor)]:
        raise ValueError(
            "model must have nothing but tensors in its state dict, as .safetensors holds nothing else; got "
            f"{shorten(others)}: torch.save the state dict"
        )
    said = {**({BLOCKS: json.dumps(blocks)} if (blocks := blocks_of(state)) else {}), **(about or {})} or None
    write_atomically(path, ordered(save({key: copy_to_write(value) for key, value in state.items()}, said)))


def ordered(content: bytes) -> bytes:
    """A ``.safetensors`` file whose metadata are in order, so that the same network is the same file."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    if "__metadata__" in header:
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # the numbers begin at a multiple of eight bytes
    return len(text).to_bytes(8, "little") + text + content[end:]


def copy_to_write(tensor: Tensor) -> Tensor:
    """A copy of a tensor in a storage of its own, since safetensors takes no two names of one storage."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


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


def put_in_place(path: Path, output: Path) -> None:
    """A file, or the files of a folder, each whole or not at all."""
    if path.is_dir():
        output.mkdir(exist_ok=True)
        for file in path.iterdir():
            write_atomically(output / file.name, file.read_bytes())
    else:
        write_atomically(output, path.read_bytes())

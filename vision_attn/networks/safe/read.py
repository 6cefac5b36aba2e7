"""Read checkpoint files without running code from them.

The sizes that a ``torch.save`` file declares are compared with the size of the file before memory is allocated.
"""

from __future__ import annotations

import io
import json
import os
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from safetensors import safe_open
from torch import Tensor

from vision_attn.errors import CheckpointError
from vision_attn.networks.safe.pickled import NotAllowedError, PickleReader, Placeholder, check
from vision_attn.text import escape_control_characters, shorten

#: File names in folders of transformers, accelerate, timm, diffusers and training runs, with safer formats first.
FILE_NAMES = (
    "model.safetensors", "diffusion_pytorch_model.safetensors", "pytorch_model.bin", "model/model.safetensors",
    "adapter.safetensors",
)  # fmt: skip
#: Suffix of an index of shards.
INDEX = ".index.json"

#: First bytes of files that are no checkpoints -> what they are, and a remedy.
OTHER_FILES = {
    (b"version https://git-lfs",): "a Git LFS pointer instead of the file. Run git lfs pull in its repository",
    (b"<!doctype", b"<html", b"<?xml"): "an HTML or XML page. Its link may have expired or require a login",
}
#: End of the name of an archive entry -> what the archive is, and a remedy.
OTHER_ARCHIVES = {
    ".npy": "a NumPy archive, such as the ViT weights of Google. timm.models.load_checkpoint(model, path) reads these",
    "/constants.pkl": "a TorchScript program. Save torch.jit.load(path).state_dict() with torch.save",
}

#: Remedy for files that contain objects instead of tensors.
SAVE_STATE_DICT = "If you trust its source, load it with torch.load(weights_only=False), and save only the state dict"

#: Largest number of bytes of a list of tensors or archive entries, enough for about 80,000 tensors.
MAX_LIST = 2**23
#: Largest number of bytes of an index of shards, enough for about 20,000 tensors. Parsed JSON can be 50 times larger.
MAX_INDEX = 2**21
#: Largest number of bytes of a pickle.
MAX_PICKLE = 2**26
#: Number of bytes per read.
CHUNK = 2**20
#: Pickle of the first number in a file in the format before torch 1.6, and the number that follows.
MAGIC, VERSION = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", 1001


@dataclass(frozen=True)
class CheckpointFile:
    """Content of a checkpoint file."""

    path: Path
    #: tensors by key, or entries of a training script
    content: Mapping[str, object]
    #: metadata of a ``.safetensors`` file
    metadata: Mapping[str, str]


def read_file(path: str | Path) -> CheckpointFile:
    """Read a checkpoint file on the CPU, without running code from it.

    Objects other than tensors and plain values become placeholders. Memory and time are limited by the size of the
    file. A file that declares larger tensors is rejected.

    Args:
        path: a file, an index of shards, or a folder with ``model.safetensors`` or ``pytorch_model.bin``.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointError: the file is damaged, has another format, or names a function of the operating system.

    >>> import tempfile, torch
    >>> file = Path(tempfile.mkdtemp()) / "net.pth"
    >>> torch.save({"epoch": 3, "state_dict": {}}, file)
    >>> read_file(file).content
    {'epoch': 3, 'state_dict': {}}
    """
    path = find_file(Path(path))
    if not path.name.endswith(INDEX):
        return read_one(path)
    content: dict[str, object] = {}
    shards: dict[str, set[str]] = {}
    try:
        with ShortReads(path) as file:
            for key, name in json.loads(file.read(MAX_INDEX).decode())["weight_map"].items():
                shards.setdefault(name, set()).add(key)
        for name, keys in shards.items():
            if name != os.path.basename(name) or not os.path.isfile(path.with_name(name)):
                raise ValueError(f"expected shards in the same folder, got {name!r}")
            shard = read_one(path.with_name(name)).content
            if other := keys ^ shard.keys():
                raise ValueError(f"{name!r} and the index differ in {shorten(sorted(other))}")
            content |= shard
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} lists no complete checkpoint: {error}. Download all files again") from error
    return CheckpointFile(path, content, {})


def read_one(path: Path) -> CheckpointFile:
    """Read a file that is not sharded."""
    with ShortReads(path) as file:
        try:
            start = file.read(64).lower()
            if kind := next((what for first, what in OTHER_FILES.items() if start.lstrip().startswith(first)), ""):
                raise CheckpointError(f"{path} is {kind}")
            file.seek(0)
            if path.suffix == ".safetensors":
                content, metadata = read_safetensors(file)
            else:
                content, metadata = (read_zip if start.startswith(b"pk\x03\x04") else read_legacy)(file), {}
        except CheckpointError:
            raise
        except NotAllowedError as error:
            remedy = "If you trust its source, load it with torch and save only the state dict, as .safetensors"
            raise CheckpointError(f"{path} was not loaded, because it contains {error}. {remedy}") from error
        except Exception as error:  # a damaged file can cause any exception
            raise CheckpointError(f"{path} is truncated or not a checkpoint. Download or save it again") from error
    if not isinstance(content, Mapping):
        kind = type(content).__name__
        got = f"the object {content.name}. {SAVE_STATE_DICT}" if isinstance(content, Placeholder) else kind
        raise CheckpointError(f"{path} must contain a dictionary of tensors, got {got}")
    return CheckpointFile(path, content, metadata)


def find_file(path: Path) -> Path:
    """Return the path of a checkpoint file, given the file or a folder in the layout of Hugging Face or timm."""
    if path.is_file():
        return path
    for name in (name + ending for name in FILE_NAMES for ending in ("", INDEX)):
        if (path / name).is_file():
            return path / name
    if (path / ".metadata").is_file():
        call = "torch.distributed.checkpoint.format_utils.dcp_to_torch_save(folder, file)"
        raise CheckpointError(f"{path} was written by torch.distributed.checkpoint. Convert it with {call}")
    where = f" in the folder; expected {' or '.join(FILE_NAMES)}" if path.is_dir() else ""
    raise FileNotFoundError(f"{escape_control_characters(path)}: checkpoint file not found{where}")


def read_safetensors(file: ShortReads) -> tuple[object, dict[str, str]]:
    if int.from_bytes(file.read(8), "little") > MAX_LIST:
        raise NotAllowedError("too many tensors")
    with safe_open(file.name, framework="pt") as mapped:
        return {key: mapped.get_tensor(key) for key in mapped.keys()}, mapped.metadata() or {}  # noqa: SIM118


# --- files of torch.save ----------------------------------------------------------------------------------------------


class ShortReads(io.FileIO):
    """A file with a limit for the size of one read, because zipfile reads a list of entries of any length."""

    @property
    def size(self) -> int:
        return os.fstat(self.fileno()).st_size

    def read(self, size: int | None = -1, /) -> bytes:
        left = self.size - self.tell()
        size = left if size is None or size < 0 else min(size, left)
        if size > MAX_LIST:
            raise NotAllowedError("too many archive entries")
        return super().read(size)


def read_zip(file: ShortReads) -> object:
    with zipfile.ZipFile(file) as archive:
        listed = archive.infolist()
        for ending, kind in OTHER_ARCHIVES.items():
            if any(entry.filename.endswith(ending) for entry in listed):
                raise CheckpointError(f"{file.name} is {kind}")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in listed):
            raise NotAllowedError("compressed data, which torch does not write")
        if sum(entry.file_size for entry in listed) > file.size:
            raise ValueError("the archive entries are larger than the file")
        for entry in listed:
            if not entry.CRC:  # torch.serialization.set_crc32_options(False)
                entry.CRC = None  # type: ignore[assignment]
        entries = {entry.filename: entry for entry in listed}
        folder = listed[0].filename.partition("/")[0]
        order = entries.get(f"{folder}/byteorder")
        if order is not None and archive.read(order) != sys.byteorder.encode():
            raise NotAllowedError(f"numbers that are not in {sys.byteorder}-endian byte order")

        def read_storage(key: str, length: int) -> Tensor:
            entry = entries[f"{folder}/data/{key}"]
            storage = torch.empty(entry.file_size, dtype=torch.uint8)
            with archive.open(entry) as content:
                fill(storage, content)
            return storage

        with archive.open(f"{folder}/data.pkl") as content:
            return PickleReader(read_pickle(content), file.size, read_storage).load()


def read_legacy(file: ShortReads) -> object:
    left = file.size

    def allocate_storage(key: str, length: int) -> Tensor:
        nonlocal left
        left -= length
        if left < 0:
            raise ValueError("the storages are larger than the file")
        return torch.empty(length, dtype=torch.uint8)

    pickles = read_pickle(file)
    reader = PickleReader(pickles, file.size, allocate_storage)
    start = pickles.read(32)  # the protocol, the frame of protocols 4 and 5, and the magic number
    pickles.seek(0)
    if MAGIC not in start or (reader.load(), reader.load())[1] != VERSION:
        raise ValueError("the file was not written by torch.save")
    if reader.load()["little_endian"] is not (sys.byteorder == "little"):
        raise NotAllowedError(f"numbers that are not in {sys.byteorder}-endian byte order")
    result, keys = reader.load(), reader.load()
    if len(keys) != len(reader.storages):
        raise ValueError("a storage has no content")  # the tensor would expose uninitialized memory
    file.seek(pickles.tell())
    for key in keys:
        content, numbers = reader.storages.pop(check(key, str)), int.from_bytes(file.read(8), "little")
        if len(content) % max(numbers, 1) or numbers > len(content):
            raise ValueError("a storage does not have the declared length")
        fill(content, file)
    return result


def read_pickle(file: IO[bytes] | ShortReads) -> io.BytesIO:
    """Read from the current position of a file, up to the maximum size of a pickle."""
    return io.BytesIO(b"".join(iter(lambda: file.read(CHUNK) if file.tell() < MAX_PICKLE else b"", b"")))


def fill(storage: Tensor, file: IO[bytes] | ShortReads) -> None:
    for start in range(0, len(storage), CHUNK):
        chunk = storage[start : start + CHUNK].numpy().data
        chunk[:] = file.read(len(chunk))  # raises ValueError if the file is too short

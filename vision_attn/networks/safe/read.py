"""Checkpoint files: which file a path means and what is in it, read without running any code of it.

What a file of ``torch.save``, old or new, claims to hold is compared with its size before it is read.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
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
from vision_attn.networks.safe.pickled import NotAllowedError, PickleReader, as_key
from vision_attn.text import escaped, shorten

#: Files with the weights in a folder as transformers, accelerate, timm and diffusers write it, the safer ones first.
IN_FOLDERS = ("model.safetensors", "diffusion_pytorch_model.safetensors", "pytorch_model.bin")
#: Ending of the list of a file's shards.
INDEX = ".index.json"

#: torch.hub puts the beginning of a file's SHA-256 before its ending: resnet18-f37072fd.pth, resnet20-12fca82f.th.
NAMED_HASH = re.compile(r"-([0-9a-f]{8,64})(?:\.[A-Za-z]\w*)+$")

#: Bytes of the longest list of what a file holds: that of 80,000 tensors or so.
LONGEST_LIST = 2**23
#: Bytes of the longest index of shards, of 20,000 tensors or so: values of JSON take up to fifty times as many.
LONGEST_INDEX = 2**21
#: Bytes of the longest pickle.
LONGEST_PICKLE = 2**26
#: Bytes that are read at once.
PIECE = 2**20
#: What torch writes before an archive that is no zip.
MAGIC, VERSION = 0x1950A86A20F9469CFC6C, 1001


@dataclass(frozen=True)
class CheckpointFile:
    """What is in a file."""

    path: Path
    #: tensors by name, or what a training script saved
    content: Mapping[str, object]
    #: what a ``.safetensors`` file says of its tensors
    metadata: Mapping[str, str]


def read_checkpoint(path: str | Path) -> dict[str, object]:
    """The content of a checkpoint file, on the CPU, without running any code from it.

    Numbers of NumPy come as Python's. What a file makes the machine do is bounded by its size: it is refused if it
    claims to hold more.

    Args:
        path: the file, the index of its shards, or a folder with ``model.safetensors`` or ``pytorch_model.bin``.

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
    return dict(read_file(path).content)


def read_file(path: str | Path, *, by_name: bool = True) -> CheckpointFile:
    """Read a file, or all shards that an index lists; ``by_name`` verifies the hash that a file's name may hold."""
    path = find_file(Path(path))
    if not path.name.endswith(INDEX):
        return read_one(path, by_name)
    content: dict[str, object] = {}
    shards: dict[str, set[str]] = {}
    try:
        with ShortReads(path) as file:
            for key, name in json.loads(file.read(LONGEST_INDEX).decode())["weight_map"].items():
                shards.setdefault(name, set()).add(key)
        for name, keys in shards.items():
            if name != os.path.basename(name) or not os.path.isfile(path.with_name(name)):
                raise ValueError(f"expected shards in the same folder, got {name!r}")
            shard = read_one(path.with_name(name), by_name).content
            if other := keys ^ shard.keys():
                raise ValueError(f"{name!r} and the index differ in {shorten(sorted(other))}")
            content |= shard
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} lists no complete checkpoint: {error}. Fetch all of its files again") from error
    return CheckpointFile(path, content, {})


def read_one(path: Path, by_name: bool) -> CheckpointFile:
    with ShortReads(path) as file:
        try:
            read = read_safetensors if path.suffix == ".safetensors" else read_archive
            content, metadata = read(file, path)
        except NotAllowedError as error:
            needs = "a checkpoint needs tensors and plain values"
            remedy = "If you trust its source, load it there and save the state dict alone, best as .safetensors"
            raise CheckpointError(f"{path} asks {error} on loading, and was not loaded: {needs}. {remedy}") from error
        except Exception as error:  # a damaged file can make the reader fail in any way
            what = f"{path} is truncated or no checkpoint"
            raise CheckpointError(f"{what}: fetch or save it again, and compare its checksum") from error
        # Only now: a hash over all of what may be no checkpoint at all can take minutes.
        if by_name:
            verify_hash(file, path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, expected a dictionary of tensors")
    return CheckpointFile(path, content, metadata)


def find_file(path: Path) -> Path:
    """The checkpoint file itself, or the one in a folder as Hugging Face and timm write them."""
    if path.is_file():
        return path
    for name in (name + ending for name in IN_FOLDERS for ending in ("", INDEX)):
        if (path / name).is_file():
            return path / name
    where = f", nor {' or '.join(IN_FOLDERS)} in it" if path.is_dir() else ""
    raise FileNotFoundError(f"{escaped(path)}: there is no such checkpoint file{where}")


def read_safetensors(file: ShortReads, path: Path) -> tuple[object, dict[str, str]]:
    if int.from_bytes(file.read(8), "little") > LONGEST_LIST:
        raise NotAllowedError("for too many tensors")
    with safe_open(path, framework="pt") as mapped:
        return {key: mapped.get_tensor(key) for key in mapped.keys()}, mapped.metadata() or {}  # noqa: SIM118


def verify_hash(file: ShortReads, path: Path) -> None:
    """Refuse a file whose name holds the beginning of another SHA-256; digits alone are a date or a number of steps."""
    found = NAMED_HASH.search(path.name)
    if found is None or found[1].isdecimal():
        return
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    if not digest.startswith(found[1]):
        what = f"{path}: its name says that its SHA-256 begins with {found[1]}, and it begins with {digest[:8]}"
        remedy = f"Fetch it again, or rename it if -{found[1]} is no hash"
        raise CheckpointError(f"{what}: the file is damaged or another one. {remedy}")


# --- what torch.save writes ------------------------------------------------------------------------------------------


class ShortReads(io.FileIO):
    """A file of which little is read at once: zipfile reads its list of entries whole, however long it may be."""

    @property
    def size(self) -> int:
        return os.fstat(self.fileno()).st_size

    def read(self, size: int | None = -1, /) -> bytes:
        left = self.size - self.tell()
        size = left if size is None or size < 0 else min(size, left)
        if size > LONGEST_LIST:
            raise NotAllowedError("for too many parts")
        return super().read(size)


def read_archive(file: ShortReads, path: Path) -> tuple[object, dict[str, str]]:
    """What is in such a file: tensors on the CPU, in their own memory, and plain values."""
    head = file.read(4)
    file.seek(0)
    return read_zip(file) if head == b"PK\x03\x04" else read_legacy(file), {}


def read_zip(file: ShortReads) -> object:
    with zipfile.ZipFile(file) as archive:
        listed = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in listed):
            raise NotAllowedError("for compressed parts, of which torch writes none,")
        if sum(entry.file_size for entry in listed) > file.size:
            raise ValueError("its parts are longer than the file")
        entries = {entry.filename: entry for entry in listed}
        folder = listed[0].filename.partition("/")[0]
        order = entries.get(f"{folder}/byteorder")
        if order is not None and archive.read(order) != sys.byteorder.encode():
            raise NotAllowedError("for numbers in the order of bytes of other machines")
        storages: dict[object, Tensor] = {}

        def storage(key: object, length: int) -> Tensor:
            if key not in storages:
                entry = entries[f"{folder}/data/{key}"]
                storages[key] = torch.empty(entry.file_size, dtype=torch.uint8)
                with archive.open(entry) as content:
                    fill(storages[key], content)
            return storages[key]

        with archive.open(f"{folder}/data.pkl") as content:
            return PickleReader(file.size, storage).load(beginning(content))


def read_legacy(file: ShortReads) -> object:
    storages: dict[object, Tensor] = {}
    left = file.size

    def storage(key: object, length: int) -> Tensor:
        nonlocal left
        if key not in storages:
            left -= length
            if left < 0:
                raise ValueError("its storages are longer than the file")
            storages[key] = torch.empty(length, dtype=torch.uint8)
        return storages[key]

    reader, pickles = PickleReader(file.size, storage), beginning(file)
    if (reader.load(pickles), reader.load(pickles)) != (MAGIC, VERSION):
        raise ValueError("it begins with something else")
    if reader.load(pickles)["little_endian"] is not (sys.byteorder == "little"):
        raise NotAllowedError("for numbers in the order of bytes of other machines")
    result, keys = reader.load(pickles), reader.load(pickles)
    if len(keys) != len(storages):
        raise ValueError("not every storage has its numbers")  # and would have what was in the memory before
    file.seek(pickles.tell())
    for key in keys:
        content, numbers = storages.pop(as_key(key)), int.from_bytes(file.read(8), "little")
        if len(content) % max(numbers, 1) or numbers > len(content):
            raise ValueError("a storage is not as long as it says")
        fill(content, file)
    return result


def beginning(file: IO[bytes] | ShortReads) -> io.BytesIO:
    """All of a pickle, or as much as one may be long."""
    return io.BytesIO(b"".join(iter(lambda: file.read(PIECE) if file.tell() < LONGEST_PICKLE else b"", b"")))


def fill(storage: Tensor, file: IO[bytes] | ShortReads) -> None:
    for place in range(0, len(storage), PIECE):
        piece = storage[place : place + PIECE].numpy().data
        piece[:] = file.read(len(piece))  # which fails if the file ends before

"""The files that ``torch.save`` writes, old and new: what one claims is compared with its size before it is read."""

from __future__ import annotations

import io
import os
import sys
import zipfile
from typing import IO

import torch
from torch import Tensor

from vision_attn.networks.safe.pickled import NotAllowedError, PickleReader, as_key

#: Bytes of the longest list of what a file holds: that of 80,000 tensors or so.
LONGEST_LIST = 2**23
#: Bytes of the longest pickle.
LONGEST_PICKLE = 2**26
#: Bytes that are read at once.
PIECE = 2**20
#: What torch writes before an archive that is no zip.
MAGIC, VERSION = 0x1950A86A20F9469CFC6C, 1001


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


def read_archive(file: ShortReads) -> object:
    """What is in such a file: tensors on the CPU, in their own memory, and plain values."""
    head = file.read(512)
    file.seek(0)
    if head.startswith(b"PK\x03\x04"):
        return read_zip(file)
    if head[257:262] == b"ustar":
        raise NotAllowedError("for the form of archive that torch wrote before version 0.2")
    return read_legacy(file)


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

"""The form of an adapter file: a ``.safetensors`` file whose metadata say where its blocks go and on what network.

Its metadata have one entry, ``vision_attn_adapter``, a text of JSON, so that the same adapter is the same file:

=========  ==============================================================================================
format     version of this form
library    version of the library that wrote it
blocks     ``[{site, at, block, options: {name: code}, input_shape}, …]``
also       names of its tensors that replace the network's own
base       fingerprint of the network: ``{name: [shape, type, hash]}``
base_hash  one hash over it
file_hash  one hash over all of the above and the fingerprint of the file's own tensors
=========  ==============================================================================================
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from vision_attn.checkpoints.fingerprint import Fingerprint, fingerprint, hash_of
from vision_attn.checkpoints.read import open_safetensors, read_safetensors
from vision_attn.checkpoints.specification import from_code, to_code
from vision_attn.checkpoints.write import write_atomically
from vision_attn.errors import CheckpointError
from vision_attn.text import escaped

__all__ = ["LARGEST_IMAGES", "Adapter", "Placement", "is_adapter", "read_adapter", "write_adapter"]

ENTRY = "vision_attn_adapter"
FORMAT = 1

#: Numbers in the images of a dry run, which is what a file can make a network work on: 100 images of 3×224×224.
LARGEST_IMAGES = 2**24


@dataclass(frozen=True)
class Placement:
    """One block: where it goes and what it is."""

    #: path of its module
    site: str
    #: "after", "before", "branch" or "instead"
    at: str
    #: name of its class
    block: str
    #: what it was made with
    options: Mapping[str, Any]
    #: the images that its site was looked at with: batch, channels, rows, columns
    input_shape: tuple[int, ...]


@dataclass(frozen=True)
class Adapter:
    """What an adapter file holds."""

    #: version of the library that wrote it
    library: str
    #: where its blocks go, and what they are
    placements: tuple[Placement, ...]
    #: keys of its tensors that replace the network's own
    also: tuple[str, ...]
    #: of the network that it was trained on
    base: Fingerprint
    #: of the blocks, and of ``also``, by key
    tensors: Mapping[str, Tensor]


def write_adapter(path: Path, adapter: Adapter) -> None:
    """Write an adapter file, whole or not at all."""
    blocks = [
        {
            "site": placement.site,
            "at": placement.at,
            "block": placement.block,
            "options": {name: to_code(name, value) for name, value in placement.options.items()},
            "input_shape": placement.input_shape,
        }
        for placement in adapter.placements
    ]
    said = {
        "format": FORMAT,
        "library": adapter.library,
        "blocks": blocks,
        "also": adapter.also,
        "base": adapter.base,
        "base_hash": hash_of(adapter.base),
    }
    said["file_hash"] = hash_of([said, fingerprint(adapter.tensors)])
    write_atomically(path, save(dict(adapter.tensors), {ENTRY: json.dumps(said)}))


def read_adapter(path: str | Path) -> Adapter:
    """The content of an adapter file, read without running any code from it."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{escaped(path)}: there is no such adapter file")
    tensors, metadata = read_safetensors(path)
    if ENTRY not in metadata:
        raise CheckpointError(
            f"{path} is no adapter, it does not say where its tensors go: load_checkpoint reads checkpoints, and "
            "save_adapter writes adapters"
        )
    try:
        said = dict(json.loads(metadata[ENTRY]))
        newer, library, written = said["format"] > FORMAT, str(said["library"]), said.pop("file_hash", None)
        # A newer form may have its hash over other things.
        whole = newer or written == hash_of([said, fingerprint(tensors)])
    except (ValueError, TypeError, LookupError, RecursionError):
        whole = False
    if not whole:
        raise CheckpointError(f"{path} is a damaged adapter, its hash is not the one written in it: fetch it again")
    if newer:
        raise CheckpointError(
            f"{path} was written by vision_attn {library} as an adapter of form {said['format']}, and this one reads "
            f"up to form {FORMAT}: upgrade vision_attn"
        )
    try:
        return parse(library, said, tensors)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is an adapter of another form ({error}), written by vision_attn {library}: save it again"
        ) from error


def parse(library: str, said: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Adapter:
    placements = [
        Placement(
            site=str(block["site"]),
            at=str(block["at"]),
            block=str(block["block"]),
            options={str(name): from_code(code) for name, code in block["options"].items()},
            input_shape=tuple(map(int, block["input_shape"])),
        )
        for block in said["blocks"]
    ]
    if any(math.prod(placement.input_shape) > LARGEST_IMAGES for placement in placements):
        raise ValueError(f"the network was looked at with images of more than {LARGEST_IMAGES:,} numbers")
    base: Fingerprint = {
        str(name): (tuple(map(int, shape)), str(kind), str(digest))
        for name, (shape, kind, digest) in said["base"].items()
    }
    also = tuple(map(str, said["also"]))
    if not tensors.keys() >= set(also):
        raise ValueError("it has not all the tensors that it says it has")
    return Adapter(library, tuple(placements), also, base, tensors)


def is_adapter(file: Path) -> bool:
    """Whether a file that is there is an adapter; false for one that cannot be read."""
    if file.suffix != ".safetensors":
        return False
    try:
        with open_safetensors(file) as opened:
            return ENTRY in (opened.metadata() or {})
    except Exception:  # its reader says more of it
        return False

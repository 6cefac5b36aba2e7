"""The form of an adapter file: a ``.safetensors`` file whose metadata say where its blocks go and on what network.

Its metadata have one entry, ``vision_attn_adapter``, a text of JSON, so that the same adapter is the same file:

=========  ==============================================================================================
format     version of this form
library    version of the library that wrote it
blocks     ``[{site, at, block, options: {name: code}, input_shape}, …]``
also       names of its tensors that replace the network's own
about      what else its writer said, as plain values, if anything
base       fingerprint of the network: ``{name: [shape, type, hash]}``
file_hash  one hash over all of the above and the fingerprint of the file's own tensors
=========  ==============================================================================================
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from vision_attn.errors import CheckpointError
from vision_attn.networks.checkpoints.placements import Placement, placements_in, said_of
from vision_attn.networks.safe import read_file
from vision_attn.networks.safe import write_atomically

#: What in a file's metadata makes it an adapter.
ENTRY = "vision_attn_adapter"
FORMAT = 1

#: name -> (shape, type, beginning of the SHA-256 of its bytes)
Fingerprint = dict[str, tuple[tuple[int, ...], str, str]]


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
    #: what else its writer said
    about: Mapping[str, Any] = field(default_factory=dict)


def fingerprint(tensors: Mapping[str, Tensor]) -> Fingerprint:
    """What tensors are, in a few characters each, whatever device and memory layout they are in.

    >>> fingerprint({"bias": torch.zeros(2)})
    {'bias': ((2,), 'float32', 'af5570f5a1810b7a')}
    """
    found = {}
    for name, value in tensors.items():
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        found[name] = tuple(value.shape), str(value.dtype).removeprefix("torch."), digest(content)
    return found


def hash_of(said: object) -> str:
    """One hash over fingerprints and the like, whatever the order of their names."""
    return digest(json.dumps(said, sort_keys=True).encode())


def digest(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def write_adapter(path: Path, adapter: Adapter) -> None:
    """Write an adapter file, whole or not at all."""
    said = {
        "format": FORMAT,
        "library": adapter.library,
        "blocks": said_of(adapter.placements),
        "also": adapter.also,
        "base": adapter.base,
        **({"about": adapter.about} if adapter.about else {}),
    }
    said["file_hash"] = hash_of([said, fingerprint(adapter.tensors)])
    write_atomically(path, save(dict(adapter.tensors), {ENTRY: json.dumps(said)}))


def read_adapter(path: str | Path) -> Adapter:
    """The content of an adapter file, read without running any code from it."""
    file = read_file(path, by_name=False)  # it has a hash of its own
    if ENTRY not in file.metadata:
        raise CheckpointError(
            f"{path} is no adapter, it does not say where its tensors go: load_checkpoint reads checkpoints, and "
            "save_adapter writes adapters"
        )
    tensors = {name: value for name, value in file.content.items() if isinstance(value, Tensor)}
    try:
        said = dict(json.loads(file.metadata[ENTRY]))
        if said["format"] > FORMAT:  # whose hash may be over other things
            raise CheckpointError(
                f"{path} was written by vision_attn {said['library']} as an adapter of form {said['format']}, and this "
                f"one reads up to form {FORMAT}: upgrade vision_attn"
            )
        if said.pop("file_hash") != hash_of([said, fingerprint(tensors)]):
            raise ValueError("its hash is not the one written in it")
        return parse(said, tensors)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(f"{path} is a damaged adapter ({error}): fetch it or save it again") from error


def parse(said: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Adapter:
    base: Fingerprint = {
        str(name): (tuple(map(int, shape)), str(kind), str(digest))
        for name, (shape, kind, digest) in said["base"].items()
    }
    also = tuple(map(str, said["also"]))
    if not tensors.keys() >= set(also):
        raise ValueError("it has not all the tensors that it says it has")
    return Adapter(
        str(said["library"]), placements_in(said["blocks"]), also, base, tensors, dict(said.get("about", {}))
    )

"""The form of what this library writes: blocks with the network around them, or without it as an adapter.

Both are one ``.safetensors`` file whose metadata have one entry, ``vision_attn``, a text of JSON:

=========  ==============================================================================================
format     version of this form
library    version of the library that wrote it
blocks     a record of each inserted block: where it goes and what it is, its options as code
arguments  what all blocks of a network say that they are, inserted or not: ``{path: {argument: code}}``
base       of an adapter the fingerprint of its network: ``{name: [shape, type, hash]}``; of a network null
also       names of an adapter's tensors that take the place of the network's own
about      what else its writer said, as plain values
file_hash  one hash over all of the above and the fingerprint of the file's own tensors
=========  ==============================================================================================

A file of an older or newer format is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.attention.blocks import use_impl
from vision_attn.errors import CheckpointError
from vision_attn.networks import insertion
from vision_attn.networks.checkpoints.specification import Arguments, arguments_in, from_code, to_code
from vision_attn.networks.insertion import InsertedBlock
from vision_attn.networks.insertion.attach import path_of_block, replacement_options
from vision_attn.networks.insertion.exact import bare
from vision_attn.networks.insertion.hooks import REPLACED
from vision_attn.networks.insertion.makers import BLOCKS, OF_TIMM, make_block, maker_of
from vision_attn.networks.safe import CheckpointFile
from vision_attn.networks.safe.write import write_tensors
from vision_attn.text import shorten
from vision_attn.version import __version__

#: Entry of a file's metadata that holds the table above.
ENTRY = "vision_attn"
#: The only version of the format that is read and written.
FORMAT = 3

#: Blocks that ``vision-attn compare`` inserts, and the module that defines them.
CONTROLS = dict.fromkeys(
    ("ConvBlock2d", "NormBlock2d", "SqueezeExciteBlock2d"), "vision_attn.tools.comparison.controls"
)

#: Parts of a path that torch.compile, activation checkpointing and FSDP add, wherever they wrap a layer.
WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
#: name -> (shape, type, beginning of the SHA-256 of its bytes)
Fingerprint = dict[str, tuple[tuple[int, ...], str, str]]


@dataclass(frozen=True)
class Saved:
    """What a file of this form holds; the table above says more."""

    tensors: Mapping[str, Tensor]
    blocks: tuple[InsertedBlock, ...]
    #: None if the file holds the whole network
    base: Fingerprint | None = None
    also: tuple[str, ...] = ()
    arguments: Arguments = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Take complete tensors, under the names of a network without compiled or wrapped layers."""
        vars(self).update(
            tensors={plain_key(key): gathered(value) for key, value in self.tensors.items()},
            blocks=tuple(relocated(one, plain_key) for one in self.blocks),
            base=self.base and {plain_key(key): value for key, value in self.base.items()},
            also=tuple(map(plain_key, self.also)),
        )


def plain_key(key: str, wrappers: Collection[str] = WRAPPERS) -> str:
    """The path of a module or a tensor in a network without wrappers.

    >>> plain_key("layer3._orig_mod.0.conv1.weight")
    'layer3.0.conv1.weight'
    """
    return ".".join(part for part in key.split(".") if part not in wrappers)


def fingerprint(tensors: Mapping[str, Tensor]) -> Fingerprint:
    """What tensors are, in a few characters each, whatever device and memory layout they are in.

    >>> fingerprint({"bias": torch.zeros(2)})
    {'bias': ((2,), 'float32', 'af5570f5a1810b7a')}
    """
    found = {}
    for name, value in tensors.items():
        content = gathered(value).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        found[name] = tuple(value.shape), str(value.dtype).removeprefix("torch."), digest(content)
    return found


def gathered(value: Any) -> Tensor:
    """The complete tensor, of which FSDP2 may have given a part to each process."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def hash_of(said: object) -> str:
    """One hash over fingerprints and the like, whatever the order of their names."""
    return digest(json.dumps(said, sort_keys=True).encode())


def digest(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


# --- writing and reading ----------------------------------------------------------------------------------------------


def write_saved(path: Path, saved: Saved) -> None:
    """Write such a file, whole or not at all."""
    if path.suffix != ".safetensors":
        raise ValueError(f"path must end in .safetensors; got {path.name!r}")
    said = vars(saved) | {"format": FORMAT, "library": __version__}
    del said["tensors"]
    said["blocks"] = [dict(vars(block)) for block in saved.blocks]
    for block in said["blocks"]:
        del block["compared"]
        block["options"] = {name: to_code(name, value) for name, value in block["options"].items()}
    said["file_hash"] = hash_of([said, fingerprint(saved.tensors)])
    write_tensors(path, saved.tensors, {ENTRY: json.dumps(said)})


def saved_in(file: CheckpointFile) -> Saved | None:
    """What a file of this form holds; None of any other file."""
    if ENTRY not in file.metadata:
        return None
    tensors = {name: value for name, value in file.content.items() if isinstance(value, Tensor)}
    try:
        said = dict(json.loads(file.metadata[ENTRY]))
        check_format(file.path, said)  # first: the hash of another format may be computed differently
        if said.pop("file_hash") != hash_of([said, fingerprint(tensors)]):
            raise ValueError("its hash is not the one written in it")
        base: Fingerprint | None = said["base"] and {
            str(name): (tuple(map(int, shape)), str(kind), str(digest))
            for name, (shape, kind, digest) in said["base"].items()
        }
        also = tuple(map(str, said["also"]))
        if not tensors.keys() >= set(also):
            raise ValueError("it has not all the tensors that it says it has")
        arguments, about = arguments_in(said["arguments"]), dict(said["about"])
        return Saved(tensors, tuple(map(block_in, said["blocks"])), base, also, arguments, about)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(f"{file.path} is damaged ({error}): fetch it or save it again") from error


def check_format(path: Path, metadata: Mapping[str, Any]) -> None:
    """Raise unless a file is of the format that this version reads."""
    found, library = metadata["format"], metadata["library"]
    if found != FORMAT:
        remedy = f"Read it with vision_attn {library}, or save it again with this version."
        raise CheckpointError(f"{path} has another format: expected {FORMAT}, got {found!r}. {remedy}")


def block_in(said: Mapping[str, Any]) -> InsertedBlock:
    """Return the record of a block in a file's metadata."""
    values = dict(said)
    values["options"] = {str(name): from_code(code) for name, code in said["options"].items()}
    for name in ("map_size", "input_shape"):
        values[name] = tuple(map(int, values[name]))
    for name in ("channels", "parameters", "multiply_adds"):
        values[name] = int(values[name])
    block = InsertedBlock(**values)
    texts = (block.site, block.at, block.block, block.layout, block.held)
    if not all(isinstance(text, str) for text in texts) or not isinstance(block.element, int | str | None):
        raise ValueError("what it says of the place of a block is no text")
    return block


# --- blocks of a network, and back into it ----------------------------------------------------------------------------


def blocks_to_save(model: nn.Module) -> tuple[InsertedBlock, ...]:
    """The records of a model's blocks, each of which its class makes again of the options in the record."""
    held, found = insertion.inserted_blocks(model), insertion.records(model)
    for record in found:
        if record.block in (*BLOCKS, *OF_TIMM) and (why := difference(record, held[record.site])):
            raise ValueError(f"the {record.block} at {record.site!r} cannot be saved: it {why}")
    return found


def difference(record: InsertedBlock, block: nn.Module) -> str:
    """How a block differs from what its class makes of its options, and what to do; empty if it does not."""
    own = replacement_options(vars(block).get(REPLACED, block))
    block = bare(block)
    # by torch.nn.utils.parametrizations, by its older spectral_norm and weight_norm, or by pruning
    if added := [key for key in block.state_dict() if re.search(r"\bparametrizations\.|_(orig|g|v)$", key)]:
        remedy = "remove it first, by torch.nn.utils.parametrize.remove_parametrizations or remove_spectral_norm"
        return f"has a parametrization, such as spectral_norm or weight_norm ({shorten(added)}): {remedy}"
    try:
        again = make_block(maker_of(record.block), record.channels, device="meta", **own, **record.options)
    except (TypeError, ValueError):
        again = nn.Identity()
    same = described(block) == described(again)
    return "" if same else "was made by a function or changed since: give insert_ the class and its options"


def described(block: nn.Module) -> dict[str, tuple[str, str]]:
    """The modules of a block, whatever implementation they run in, compiled or sharded or not."""
    with use_impl(block, "bmm"):
        parts = {plain_key(path): part for path, part in block.named_modules()}
        return {path: (part._get_name().removeprefix("FSDP"), part.extra_repr()) for path, part in parts.items()}


def put_in(model: nn.Module, saved: Saved, makers: Mapping[str, Callable[..., nn.Module]]) -> None:
    """Make the blocks of a file and put them where they belong; their values are still those of new blocks.

    Args:
        model: a network with nothing inserted.
        saved: what the file holds.
        makers: what makes the blocks, by the name of their class.
    """
    # A compiled layer is under its own path and that of its wrapper, which runs no hooks.
    paths = {plain_key(path): path for path, _ in model.named_modules(remove_duplicate=False)}
    insertion.attach_records_(
        model, [relocated(one, lambda path: paths.get(path, path)) for one in saved.blocks], makers
    )


def relocated(record: InsertedBlock, rename: Callable[[str], str]) -> InsertedBlock:
    """Return the record of a block for a network whose modules have other paths, with or without wrappers."""
    owner, child = path_of_block(record)
    site, owner = rename(record.site), rename(owner)
    held = f"{owner}.{child}".removeprefix(f"{site}.")
    if record.held.startswith("."):
        held = "." * (len(site.split(".")) - len(owner.split("."))) + child
    return replace(record, site=site, held=held)


def makers_of(saved: Saved, path: Path, make: Callable[..., nn.Module] | None) -> dict[str, Callable[..., nn.Module]]:
    """What makes the blocks of a file, by the name of their class."""
    names = sorted({block.block for block in saved.blocks})
    foreign = [name for name in names if name not in (*BLOCKS, *OF_TIMM)]
    if foreign and make is None:
        places = "".join(f", which is in {CONTROLS[name]}" for name in foreign[:1] if name in CONTROLS)
        what = f"{', '.join(foreign)}, which is no block of this library"
        raise CheckpointError(f"{path} holds {what}: give its class, block={foreign[0]}{places}")
    parts = [(key.split("."), value.shape) for key, value in saved.tensors.items()]
    shapes = {(".".join(names[first:]), shape) for names, shape in parts for first in range(len(names))}
    return {name: only_as_saved(maker_of(make if name in foreign else name), shapes) for name in names}


def only_as_saved(
    make: Callable[..., nn.Module], saved: Collection[tuple[str, tuple[int, ...]]]
) -> Callable[..., nn.Module]:
    """Makes a block only if the file holds tensors of its names and shapes: options can ask for any size."""

    @wraps(make)
    def made(channels: int, **given: Any) -> nn.Module:
        state = make_block(make, channels, **{**given, "device": "meta"}).state_dict()
        if other := [f"{key} {(*value.shape,)}" for key, value in state.items() if (key, value.shape) not in saved]:
            raise CheckpointError(f"the block made here and the saved ones differ in {shorten(other)}")
        return make_block(make, channels, **given)

    return made

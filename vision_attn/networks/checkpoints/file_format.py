"""The file format of saved networks and adapters: inserted blocks with or without the network.

A network or adapter is one ``.safetensors`` file. Its metadata has one entry, ``vision_attn``, with this JSON object:

=========  =========================================================================================================
format     version of the format
library    version of the library that wrote the file
blocks     a record of each inserted block: its site, its class, and its options as code
arguments  the arguments of all attention blocks of the network, inserted or not: ``{path: {argument: code}}``
base       for an adapter, the fingerprint of its network: ``{name: [shape, dtype, hash]}``; for a network, null
also       for an adapter, the names of tensors that replace tensors of the network
metadata   additional plain values
file_hash  a hash of all entries above and the fingerprint of the tensors in the file
=========  =========================================================================================================

Files with another format version are rejected.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.errors import CheckpointError
from vision_attn.networks.block_factories import BLOCKS, TIMM_BLOCKS, BlockFactory, get_block_factory, make_block
from vision_attn.networks.checkpoints import option_code
from vision_attn.networks.checkpoints.option_code import CONFIG_CLASSES, Arguments, Classes, get_arguments
from vision_attn.networks.impl_choice import blocks_with_impl, use_impl
from vision_attn.networks.insertion import registry
from vision_attn.networks.insertion.attributes import original_module
from vision_attn.networks.insertion.build import replacement_options
from vision_attn.networks.insertion.exact import ExactBlock
from vision_attn.networks.insertion.hooks import context_path
from vision_attn.networks.insertion.record import InsertedBlock, SecondMap, Site
from vision_attn.networks.inspection.costs import BlockCost
from vision_attn.networks.inspection.wrappers import unwrap_key
from vision_attn.networks.safe import CheckpointFile
from vision_attn.networks.safe.write import write_tensors
from vision_attn.text import shorten
from vision_attn.version import __version__

#: Name of the metadata entry with the JSON object above.
ENTRY = "vision_attn"
#: The supported version of the format.
FORMAT = 5

#: A class or function, several of them, or classes by name.
BlockClasses = Callable[..., Any] | Sequence[Callable[..., Any]] | Mapping[str, Callable[..., Any]]
#: name -> (shape, dtype, first digits of the SHA-256 hash of the values)
Fingerprint = dict[str, tuple[tuple[int, ...], str, str]]


#: A record with the default value of each entry that a file may lack.
EMPTY = InsertedBlock(Site("", "", 0, (), ()), "", {}, "", None, ("", {}))
#: Entries that every file has.
REQUIRED = {"site", "at", "channels", "block", "options", "block_path", "parameters", "macs"}
#: Type of the default value of an entry -> its types in JSON, or if it is missing; by default, the same type.
ENTRY_TYPES: dict[type, Any] = {tuple: list | tuple, type(None): int | str | None}


@dataclass(frozen=True)
class Saved:
    """Content of a file of this format; the module docstring describes the fields."""

    tensors: Mapping[str, Tensor]
    #: records of the blocks; in a file that was read, their options are code
    blocks: tuple[InsertedBlock, ...]
    #: None if the file contains the complete network
    base: Fingerprint | None = None
    also: tuple[str, ...] = ()
    arguments: Arguments = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)


def fingerprint(tensors: Mapping[str, Tensor]) -> Fingerprint:
    """Return shape, dtype and hash of tensors, which are independent of device and memory format.

    >>> fingerprint({"bias": torch.zeros(2)})
    {'bias': ((2,), 'float32', 'af5570f5a1810b7a')}
    """
    result = {}
    for name, value in tensors.items():
        value = gather(value)
        value = value.dequantize() if is_quantized(value) else value
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        result[name] = tuple(value.shape), str(value.dtype).removeprefix("torch."), digest(content)
    return result


def gather(value: Any) -> Tensor:
    """Return the complete tensor, also of a tensor that is sharded by FSDP2."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def is_quantized(value: Tensor) -> bool:
    """Return True for a quantized tensor of torch or of another library, such as torchao."""
    return value.is_quantized or type(value).dequantize is not Tensor.dequantize


def compute_hash(value: object) -> str:
    """Return a hash of plain values that does not depend on the order of dictionary keys."""
    return digest(json.dumps(value, sort_keys=True).encode())


def digest(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


# --- writing and reading ----------------------------------------------------------------------------------------------


def write_saved(path: Path, saved: Saved) -> None:
    """Write a file of this format atomically."""
    if path.suffix != ".safetensors":
        raise ValueError(f"file must end in .safetensors, got {path.name!r}")
    if odd := [name for name, value in saved.tensors.items() if not isinstance(value, Tensor) or is_quantized(value)]:
        what = f"{shorten(odd)} cannot be saved: quantized, or not a tensor"
        raise ValueError(f"{what}. Save the network before quantizing it")
    entry = {**vars(saved), "format": FORMAT, "library": __version__, "blocks": list(map(encode_block, saved.blocks))}
    del entry["tensors"]
    entry["file_hash"] = compute_hash([entry, fingerprint(saved.tensors)])
    write_tensors(path, saved.tensors, {ENTRY: json.dumps(entry)})


def read_saved(file: CheckpointFile) -> Saved | None:
    """Return the content of a file of this format; None for any other file."""
    if ENTRY not in file.metadata:
        return None
    tensors = {name: value for name, value in file.content.items() if isinstance(value, Tensor)}
    try:
        entry = dict(json.loads(file.metadata[ENTRY]))
        version, library = entry["format"], entry["library"]
        if version != FORMAT:  # checked before the hash, which other versions may compute differently
            remedy = f"Read it with vision_attn {library}, or save it again with this version."
            what = f"{file.path} has another format version: expected {FORMAT}, got {version!r}"
            raise CheckpointError(f"{what}. {remedy}")
        if entry.pop("file_hash") != compute_hash([entry, fingerprint(tensors)]):
            raise ValueError("its content does not match its hash")
        base: Fingerprint | None = entry["base"] and {
            str(name): (tuple(map(int, shape)), str(kind), str(digest))
            for name, (shape, kind, digest) in entry["base"].items()
        }
        also = tuple(map(str, entry["also"]))
        if not tensors.keys() >= set(also):
            raise ValueError("listed tensors are missing")
        arguments, metadata = option_code.check_saved_arguments(entry["arguments"]), dict(entry["metadata"])
        return Saved(tensors, tuple(map(decode_block, entry["blocks"])), base, also, arguments, metadata)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(f"{file.path} is damaged ({error}). Download or save it again") from error


def encode_block(block: InsertedBlock) -> dict[str, Any]:
    """Return the record of a block as plain values."""
    site, second = vars(block.target), block.second or SecondMap("", "b c h w", None, ())
    return {
        "site": block.site,
        **{name: site[name] for name in ("at", "channels", "input_shape", "layout", "element", "used")},
        "map_size": block.map_size,
        "block": block.block,
        "options": {name: option_code.to_code(name, value) for name, value in block.options.items()},
        "block_path": block.block_path,
        "context": second.path,
        **{f"context_{name}": getattr(second, name) for name in ("layout", "element", "size")},
        **dict(zip(("identity_init", "wrapper_options"), block.identity, strict=True)),
        "parameters": block.cost.parameters,
        "macs": block.cost.macs,
    }


def decode_block(values: Mapping[str, Any]) -> InsertedBlock:
    """Return the record of a block from plain values, with the code of its options.

    Earlier versions of the library did not write all entries.
    """
    defaults = encode_block(EMPTY)
    v = {**defaults, **values}
    kinds = {name: ENTRY_TYPES.get(type(default), type(default)) for name, default in defaults.items()}
    wrong = {name for name in v if not isinstance(v[name], kinds.get(name, ()))} | (REQUIRED - values.keys())
    if wrong:
        raise ValueError(f"the record of a block has invalid, unknown or missing entries: {shorten(sorted(wrong))}")
    size, images, second_size = (tuple(map(int, v[name])) for name in ("map_size", "input_shape", "context_size"))
    site = Site(v["site"], v["at"], v["channels"], size, images, v["layout"], v["element"], v["used"])
    second = SecondMap(v["context"], v["context_layout"], v["context_element"], second_size) if v["context"] else None
    option_code.check_saved_arguments({v["block_path"]: v["options"]})
    identity, cost = (v["identity_init"], v["wrapper_options"]), BlockCost(v["parameters"], v["macs"])
    return InsertedBlock(site, v["block"], v["options"], v["block_path"], second, identity, cost)


# --- blocks of a network ----------------------------------------------------------------------------------------------


def blocks_to_save(model: nn.Module) -> tuple[InsertedBlock, ...]:
    """Return the records of the blocks of a model, with paths in the network without wrappers.

    Raises:
        ValueError: a block differs from a block that is built from its class and options.
    """
    blocks, records = registry.inserted_blocks(model), registry.records(model)
    built = dict[object, Arguments]()  # arguments of attention in custom blocks, by the arguments of their class
    for record in records:
        block = blocks[record.site]
        given = record.block, record.channels, repr([record.options, replacement_options(original_module(block))])
        arguments = get_arguments(unwrap_block(block).state_dict())
        same = built.setdefault(given, arguments) == arguments
        reason = "" if same else "is configured differently from another block of this class with these options"
        reason = explain_change(record, block) if record.block in (*BLOCKS, *TIMM_BLOCKS) else reason
        if record.second and context_path(model, record.site) is None:
            reason = "reads a module outside this part of the network. Save the network that contains both"
        if reason:
            raise ValueError(f"the {record.block} at {record.site!r} cannot be saved: it {reason}")
    return tuple(relocate(record, unwrap_key) for record in records)


def explain_change(record: InsertedBlock, block: nn.Module) -> str:
    """Return how a block differs from a block built from its options, and a remedy; empty if there is no difference."""
    sizes = replacement_options(original_module(block))
    block = unwrap_block(block)
    try:
        rebuilt = make_block(get_block_factory(record.block), record.channels, device="meta", **sizes, **record.options)
    except (TypeError, ValueError):
        rebuilt = nn.Identity()
    # The keys differ if the block has a parametrization, such as spectral_norm, or is pruned.
    added = sorted(set(map(unwrap_key, block.state_dict())) ^ rebuilt.state_dict().keys())
    if not added and describe_modules(block) == describe_modules(rebuilt):
        return ""
    keys = f" (keys: {shorten(added)})" if added else ""
    remedy = "Pass the class of the block and its options to va.insert_, and remove parametrizations and adapters first"
    return f"was built by a function or another class of this name, or changed after it was built{keys}. {remedy}"


def unwrap_block(block: nn.Module) -> nn.Module:
    """Return a block without the wrappers of compilation, activation checkpointing and insertion."""
    *_, inner = (module for path, module in block.named_modules() if not unwrap_key(path))
    return inner.block if isinstance(inner, ExactBlock) else inner


def describe_modules(block: nn.Module) -> dict[str, tuple[type, str]]:
    """Return class and options of each module of a block, independent of compilation and sharding."""
    with use_impl(block, "bmm") if blocks_with_impl(block) else nullcontext():
        modules = [(unwrap_key(path), module) for path, module in block.named_modules()]
        kinds = [next(kind for kind in type(x).__mro__ if not kind.__name__.startswith("FSDP")) for _, x in modules]
        return {path: (kind, x.extra_repr()) for kind, (path, x) in zip(kinds, modules, strict=True)}


def foreign_classes(model: nn.Module) -> dict[str, Callable[..., Any]]:
    """Return the classes of the blocks of a model, and of their options, that are not of this library, by name."""
    blocks, classes = registry.inserted_blocks(model), dict[str, Callable[..., Any]]()
    for record in registry.records(model):
        if record.block not in (*BLOCKS, *TIMM_BLOCKS):
            classes[record.block] = type(unwrap_block(blocks[record.site]))
        classes |= {type(value).__name__: type(value) for value in record.options.values() if is_dataclass(value)}
    return {name: kind for name, kind in classes.items() if name not in CONFIG_CLASSES}


def match_classes(saved: Saved, path: Path, block: Any) -> Classes:
    """Return the classes that a file requires and that are not of this library, by name.

    Args:
        saved: content of the file.
        path: path of the file, for errors.
        block: a class, several classes, or classes by name. A function is accepted if the file has one such name.
    """
    codes = [code for record in saved.blocks for code in record.options.values()]
    names = {record.block for record in saved.blocks}.union(*map(option_code.class_names, codes))
    foreign = sorted(names - {*BLOCKS, *TIMM_BLOCKS, *CONFIG_CLASSES})
    passed = block if isinstance(block, list | tuple) else [] if block is None else [block]
    if isinstance(block, Mapping):
        classes = dict(block)
    elif len(passed) == len(foreign) == 1 and not isinstance(passed[0], type):
        classes = {foreign[0]: passed[0]}
    else:
        classes = {getattr(kind, "__name__", repr(kind)): kind for kind in passed}
    if classes and not foreign:
        raise CheckpointError(f"block must be None for {path}, which contains only classes of this library")
    if classes.keys() != {*foreign}:
        what = f"{path} contains the custom classes {', '.join(foreign)}, got {', '.join(classes) or 'none'}"
        flags = " ".join(f"--block MODULE:{name}" for name in foreign)
        remedy = f"Pass block=[{', '.join(foreign)}], or {flags} on the command line"
        raise CheckpointError(f"{what}. {remedy}; or block={{name: class}} if a name has changed")
    return classes


def insert_saved_(model: nn.Module, saved: Saved, classes: Classes) -> None:
    """Insert blocks with the classes and options in a file, without their weights.

    Args:
        model: a network without inserted blocks.
        saved: content of the file.
        classes: the classes of :func:`match_classes`.
    """
    # A compiled layer has two paths, with and without its wrapper. The wrapper does not run hooks.
    paths = {unwrap_key(path): path for path, _ in model.named_modules(remove_duplicate=False)}
    known, records = {**CONFIG_CLASSES, **classes}, []
    for record in saved.blocks:
        options = {name: option_code.from_code(code, known) for name, code in record.options.items()}
        records.append(replace(relocate(record, lambda path: paths.get(path, path)), options=options))
    parts = [(key.split("."), value.shape) for key, value in saved.tensors.items()]
    shapes = {(".".join(names[first:]), shape) for names, shape in parts for first in range(len(names))}
    makers = {record.block: get_block_factory(classes.get(record.block, record.block)) for record in records}
    registry.attach_records_(model, records, {name: limit_shapes(make, shapes) for name, make in makers.items()})


def relocate(record: InsertedBlock, rename: Callable[[str], str]) -> InsertedBlock:
    """Return the record of a block for a network with other module paths, because of added or removed wrappers."""
    owner, _, child = record.block_path.rpartition(".")
    path = rename(record.site) if record.target.at == "replace" else ".".join(filter(None, (rename(owner), child)))
    return record.moved(rename(record.site), path, rename(record.second.path) if record.second else None)


def limit_shapes(make: BlockFactory, shapes: Collection[tuple[str, tuple[int, ...]]]) -> BlockFactory:
    """Return a ``make`` that builds a block only if the file has tensors of its names and shapes.

    Otherwise the options in a file could cause allocations of any size.
    """

    @wraps(make)
    def make_limited(channels: int, **options: Any) -> nn.Module:
        state = make_block(make, channels, **{**options, "device": "meta"}).state_dict()
        if other := [f"{key} {(*value.shape,)}" for key, value in state.items() if (key, value.shape) not in shapes]:
            raise CheckpointError(f"created and saved blocks differ in {shorten(other)}")
        return make_block(make, channels, **options)

    return make_limited

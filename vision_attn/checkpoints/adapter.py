"""Adapters: what was inserted into a network and trained, without the network, in a small file of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import wraps
from pathlib import Path
from typing import Any

from torch import nn

from vision_attn import blocks
from vision_attn.blocks import use_impl
from vision_attn.checkpoints.adapter_base import network_of, verify_network
from vision_attn.checkpoints.adapter_file import Adapter, Placement, read_adapter, write_adapter
from vision_attn.checkpoints.fingerprint import fingerprint
from vision_attn.checkpoints.load import kind, refuse_meta
from vision_attn.checkpoints.write import copy_to_write
from vision_attn.errors import CheckpointError
from vision_attn.insertion import (
    REPLACED,
    InsertedBlock,
    InsertionReport,
    changeable,
    insert_,
    inserted,
    inserted_keys,
    plain_network,
    records,
    remove_,
    replace_,
)
from vision_attn.text import escaped, shorten
from vision_attn.version import __version__

__all__ = ["AdapterReport", "load_adapter", "save_adapter"]

#: The blocks that a file may name by themselves.
BLOCKS: dict[str, Callable[..., nn.Module]] = {
    name: made
    for name, made in vars(blocks).items()
    if name in blocks.__all__ and isinstance(made, type) and issubclass(made, nn.Module)
}


@dataclass(frozen=True)
class AdapterReport:
    """What an adapter put into a model; prints as a summary.

    >>> report = AdapterReport("a.safetensors", InsertionReport(()), ("0.inserted.gate",), compared=2, differing=())
    >>> str(report).splitlines()[1]
    'the network is the one it was trained on, in all 2 tensors'
    """

    #: the file
    path: str
    #: what was inserted
    insertion: InsertionReport
    #: keys of the tensors that were loaded
    loaded: tuple[str, ...]
    #: tensors of the network that were compared with those the adapter was trained on
    compared: int
    #: those of them with other values or of another type, which only ``strict=False`` lets pass
    differing: tuple[str, ...]

    def __str__(self) -> str:
        network = (
            f"{len(self.differing)} of {self.compared} tensors of the network are not those it was trained on: "
            f"{shorten(self.differing)}"
            if self.differing
            else f"the network is the one it was trained on, in all {self.compared} tensors"
        )
        return f"{len(self.loaded)} tensors loaded from {escaped(self.path)}\n{network}\n{self.insertion}"


def save_adapter(model: nn.Module, path: str | Path, *, also: str | Iterable[str] = ()) -> Path:
    """Write what was inserted into a network, where and how, and nothing of the network but its fingerprint.

    The network must be as its checkpoint has it, as ``freeze_backbone_`` keeps it in training: what else was trained,
    running statistics of batch norms included, belongs in ``also``, or the adapter fits no checkpoint.

    Args:
        model: a model that blocks are inserted in.
        path: the file, ``.safetensors``.
        also: globs on further keys to save: ``["fc.*"]`` for a new head.

    Returns:
        The path.

    Raises:
        ValueError: nothing is inserted; ``also`` matches no key; a block or an option cannot be written down; the path
            has another ending.
        OSError: the file cannot be written; an old one is untouched.

    >>> import tempfile
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1))
    >>> report = insert_(model, names="0", example_input=(1, 3, 8, 8))
    >>> file = save_adapter(model, Path(tempfile.mkdtemp()) / "adapter.safetensors")
    >>> removed = remove_(model)
    >>> len(load_adapter(model, file).loaded)
    7
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"path must end in .safetensors; got {path.name!r}")
    model = plain_network(model)
    refuse_meta(model)
    placed = records(model)
    if not placed:
        raise ValueError("model has no inserted block to save: insert_ one, or save the whole model")
    made = inserted(model)
    for record in placed:
        refuse_unknown_make(record, made[record.site])
    state, of_blocks = model.state_dict(), inserted_keys(model)
    further = matching(also, [key for key in state if key not in of_blocks])
    tensors = {key: copy_to_write(state[key]) for key in state if key in of_blocks or key in further}
    placements = tuple(Placement(r.site, r.at, r.block, r.options, r.input_shape) for r in placed)
    base = fingerprint(network_of(state, without=of_blocks | further))
    write_adapter(path, Adapter(__version__, placements, tuple(sorted(further)), base, tensors))
    return path


def load_adapter(
    model: nn.Module, path: str | Path, *, strict: bool = True, block: Callable[..., nn.Module] | None = None
) -> AdapterReport:
    """Insert what an adapter file holds into the network that it was trained on.

    The network is compared with the adapter's fingerprint before anything is done to it.

    Args:
        model: the network, with its own weights and nothing inserted.
        path: the file that :func:`save_adapter` wrote.
        strict: refuse a network with other values or of another type; its names and shapes must fit in any case.
        block: the class of the inserted blocks, where it is none of this library's.

    Returns:
        A report of what was inserted and loaded.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the model has inserted blocks, is on the meta device or in a wrapper that it cannot be changed in;
            or ``block`` is not needed.
        CheckpointError: the file is damaged or no adapter, or is for another network; the model is as it was.

    >>> import tempfile
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1))
    >>> report = insert_(model, names="0", example_input=(1, 3, 8, 8))
    >>> file = save_adapter(model, Path(tempfile.mkdtemp()) / "adapter.safetensors")
    >>> removed = remove_(model)
    >>> report = load_adapter(model, file)
    >>> report.insertion.blocks[0].site, report.compared
    ('0', 2)
    """
    model = changeable(model)
    refuse_meta(model)
    if inserted(model):
        raise ValueError(
            f"model must have nothing inserted; it has blocks at {shorten(map(repr, inserted(model)))}: remove_(model) "
            "first"
        )
    adapter = read_adapter(path)
    makers = makers_of(adapter, path, block)
    differing = verify_network(model, adapter, path, strict=strict)
    own = model.state_dict()
    before = {key: own[key].clone() for key in adapter.also}
    makers = {name: only_as_saved(make, adapter) for name, make in makers.items()}
    try:
        place(model, adapter, makers)
        refuse_other_blocks(model, adapter)
        model.load_state_dict(dict(adapter.tensors), strict=False)
        placed = InsertionReport(records(model))
    except BaseException as error:
        if inserted(model):
            remove_(model)
        model.load_state_dict(before, strict=False)
        if isinstance(error, Exception):
            raise CheckpointError(f"{path}: its blocks cannot be put into the model ({error})") from error
        raise
    return AdapterReport(str(path), placed, tuple(adapter.tensors), len(adapter.base), differing)


def place(model: nn.Module, adapter: Adapter, makers: dict[str, Callable[..., nn.Module]]) -> None:
    """Replace and insert, those together that are alike but for their site."""
    groups: list[list[Placement]] = []
    # Replaced first: no block is held by a module that goes.
    for placement in sorted(adapter.placements, key=lambda placement: placement.at != "instead"):
        alike = [group for group in groups if likeness(group[0]) == likeness(placement)]
        alike[0].append(placement) if alike else groups.append([placement])
    for group in groups:
        first, sites = group[0], [placement.site for placement in group]
        make, shape = makers[first.block], first.input_shape
        if first.at == "instead":
            replace_(model, make, names=sites, example_input=shape, **first.options)
        else:
            insert_(model, make, names=sites, at=first.at, example_input=shape, **first.options)


def likeness(placement: Placement) -> tuple[object, ...]:
    return placement.at, placement.block, dict(placement.options), placement.input_shape


def only_as_saved(make: Callable[..., nn.Module], adapter: Adapter) -> Callable[..., nn.Module]:
    """Makes a block only if the file holds tensors of its names and shapes: options can ask for any size."""
    parts = [(key.split("."), value.shape) for key, value in adapter.tensors.items()]
    saved = {(".".join(names[first:]), shape) for names, shape in parts for first in range(len(names))}

    @wraps(make)
    def made(channels: int, **given: Any) -> nn.Module:
        state = make(channels, **{**given, "device": "meta"}).state_dict()
        other = [f"{key} {tuple(value.shape)}" for key, value in state.items() if (key, value.shape) not in saved]
        if other:
            raise CheckpointError(f"the block made here and the saved ones differ in {shorten(other)}")
        return make(channels, **given)

    return made


def refuse_other_blocks(model: nn.Module, adapter: Adapter) -> None:
    own = model.state_dict()
    made = {key: own[key] for key in inserted_keys(model)}
    given = {key: value for key, value in adapter.tensors.items() if key not in adapter.also}
    wrong = sorted(made.keys() ^ given.keys()) or [
        f"{key} (made {tuple(made[key].shape)}, saved {tuple(given[key].shape)})"
        for key in given
        if made[key].shape != given[key].shape or kind(made[key]) != kind(given[key])
    ]
    if wrong:
        raise CheckpointError(f"the blocks made here and the saved ones differ in {shorten(wrong)}")


def makers_of(
    adapter: Adapter, path: str | Path, block: Callable[..., nn.Module] | None
) -> dict[str, Callable[..., nn.Module]]:
    """What makes the blocks of an adapter, by the name of their class."""
    names = {placement.block for placement in adapter.placements}
    foreign = sorted(names - BLOCKS.keys())
    if not foreign and block is not None:
        raise ValueError(f"block: {path} holds blocks of this library only ({', '.join(sorted(names))}): leave it out")
    if foreign and block is None:
        raise CheckpointError(
            f"{path} holds {', '.join(foreign)}, which is no block of this library: give its class, "
            f"load_adapter(model, path, block={foreign[0]})"
        )
    if len(foreign) > 1:
        raise CheckpointError(
            f"{path} holds blocks of several classes that are none of this library: {', '.join(foreign)}; "
            "one can be given as block: save an adapter for each"
        )
    return {**BLOCKS, **{name: block for name in foreign if block is not None}}


def refuse_unknown_make(record: InsertedBlock, block: nn.Module) -> None:
    """A block of ours that a function made may be other than its options say, and would come back as another."""
    if record.block not in BLOCKS:
        return
    old = vars(block).get(REPLACED)
    given = {"stride": old.stride[0], "out_channels": old.out_channels} if isinstance(old, nn.Conv2d) else {}
    try:
        again = BLOCKS[record.block](record.channels, device="meta", **given, **record.options)
        with use_impl(block, "bmm"), use_impl(again, "bmm"):
            same = type(block) is type(again) and str(block) == str(again)
    except (TypeError, ValueError):
        same = False
    if not same:
        options = ", ".join(f"{name}={value!r}" for name, value in record.options.items()) or "no options"
        raise ValueError(
            f"the {record.block} at {record.site!r} is not what its class makes of {options}: give insert_ the class "
            "and its options, not a function that makes it"
        )


def matching(globs: str | Iterable[str], keys: Iterable[str]) -> set[str]:
    keys, found = list(keys), set()
    for pattern in (globs,) if isinstance(globs, str) else tuple(globs):
        matches = [key for key in keys if fnmatchcase(key, pattern)]
        if not matches:
            raise ValueError(f"also: {pattern!r} matches no key of the network; it has {shorten(keys)}")
        found.update(matches)
    return found

"""Adapters: what was inserted into a network and trained, without the network, in a small file of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.errors import CheckpointError
from vision_attn.networks import insertion
from vision_attn.networks.checkpoints import form
from vision_attn.networks.checkpoints.form import Saved, fingerprint, plain_key
from vision_attn.networks.checkpoints.load import copy_all_, refuse_without_values
from vision_attn.networks.insertion import InsertionReport, changeable, inserted_blocks, plain_network, records, remove_
from vision_attn.networks.safe import read_file
from vision_attn.text import Report, Table, escaped, shorten


@dataclass(frozen=True, repr=False)
class AdapterReport(Report):
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

    def parts(self) -> list[str | Table]:
        network = f"the network is the one it was trained on, in all {self.compared} tensors"
        if self.differing:
            other = f"{len(self.differing)} of {self.compared} tensors of the network"
            network = f"{other} are not those it was trained on: {shorten(self.differing)}"
        return [f"{len(self.loaded)} tensors loaded from {escaped(self.path)}", network, *self.insertion.parts()]


def save_adapter(
    model: nn.Module, path: str | Path, *, also: str | Iterable[str] = (), about: Mapping[str, Any] | None = None
) -> Path:
    """Write what was inserted into a network, where and how, and nothing of the network but its fingerprint.

    The network must be as its checkpoint has it, as ``freeze_backbone_`` keeps it in training: what else was trained,
    running statistics of batch norms included, belongs in ``also``, or the adapter fits no checkpoint.

    Args:
        model: a model that blocks are inserted in.
        path: the file, ``.safetensors``.
        also: globs on further keys to save: ``["fc.*"]`` for a new head.
        about: what else to write down, as plain values; a run writes its settings and classes.

    Returns:
        The path.

    Raises:
        ValueError: nothing is inserted; ``also`` matches no key; a block or an option cannot be written down; the path
            has another ending.
        OSError: the file cannot be written; an old one is untouched.

    >>> import tempfile
    >>> from vision_attn.networks.insertion import insert_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1))
    >>> report = insert_(model, names="0", example_input=(1, 3, 8, 8))
    >>> file = save_adapter(model, Path(tempfile.mkdtemp()) / "adapter.safetensors")
    >>> removed = remove_(model)
    >>> len(load_adapter_(model, file).loaded)
    7
    """
    model = plain_network(model)
    refuse_without_values(model)
    blocks = form.blocks_to_save(model)
    if not blocks:
        raise ValueError("model has no inserted block to save: insert_ one, or save the whole model")
    state, of_blocks = plain_state(model), set(map(plain_key, insertion.inserted_keys(model)))
    further = insertion.matching("also", also, [key for key in state if key not in of_blocks])
    tensors = {key: state[key] for key in state if key in of_blocks or key in further}
    base = fingerprint(network_of(state, without=of_blocks | further))
    form.write_saved(Path(path), Saved(tensors, blocks, base, tuple(sorted(further)), about=dict(about or {})))
    return Path(path)


def load_adapter_(
    model: nn.Module,
    path: str | Path,
    *,
    strict: bool = True,
    block: Callable[..., nn.Module] | None = None,
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
        ValueError: the model has inserted blocks, is on the meta device or in a wrapper that it cannot be changed in.
        CheckpointError: the file is damaged or no adapter, or is for another network; the model is as it was.

    >>> import tempfile
    >>> from vision_attn.networks.insertion import insert_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1))
    >>> report = insert_(model, names="0", example_input=(1, 3, 8, 8))
    >>> file = save_adapter(model, Path(tempfile.mkdtemp()) / "adapter.safetensors")
    >>> removed = remove_(model)
    >>> report = load_adapter_(model, file)
    >>> report.insertion.blocks[0].site, report.compared
    ('0', 2)
    """
    model = changeable(model)
    refuse_without_values(model)
    if blocks := inserted_blocks(model):
        sites = shorten(map(repr, blocks))
        raise ValueError(f"model must have nothing inserted; it has blocks at {sites}: remove_(model) first")
    path = Path(path)
    adapter = read_adapter(path)
    makers = form.makers_of(adapter, path, block)
    own = plain_state(model)
    differing = other_tensors(own, adapter, path, strict=strict)
    before = {key: own[key].clone() for key in adapter.also}
    try:
        with torch.random.fork_rng(devices=[]):  # the values that blocks begin with are nobody's
            form.put_in(model, adapter, makers)
        own = plain_state(model)
        here = {(plain_key(key), own[plain_key(key)].shape) for key in insertion.inserted_keys(model)}
        if wrong := here ^ {(key, value.shape) for key, value in adapter.tensors.items() if key not in adapter.also}:
            raise CheckpointError(f"the blocks made here and the saved ones differ in {shorten(sorted(dict(wrong)))}")
        copy_all_([(own[key], value) for key, value in adapter.tensors.items()])
        loaded, compared = tuple(adapter.tensors), len(adapter.base or ())
        report = AdapterReport(str(path), InsertionReport(records(model)), loaded, compared, differing)
    except BaseException as error:
        if inserted_blocks(model):
            remove_(model)
        copy_all_([(own[key], value) for key, value in before.items()])
        if isinstance(error, Exception):
            raise CheckpointError(f"{path}: its blocks cannot be put into the model ({error})") from error
        raise
    return report


def read_adapter(path: str | Path) -> Saved:
    """The content of an adapter file, read without running any code from it."""
    file = read_file(path, by_name=False)  # it has a hash of its own
    saved = form.saved_in(file)
    if saved is None or saved.base is None:
        raise CheckpointError(f"{file.path} is no adapter: load_checkpoint reads checkpoints, load_model networks")
    return saved


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a model by the names that it has without compiled or wrapped layers."""
    return {plain_key(key): value for key, value in model.state_dict().items()}


def network_of(state: Mapping[str, Tensor], without: Collection[str]) -> dict[str, Tensor]:
    """The tensors that make a network what it is: counters of batches do not."""
    kept = [key for key in state if key not in without and not key.endswith("num_batches_tracked")]
    return {key: state[key] for key in kept if isinstance(state[key], Tensor)}


def other_tensors(state: Mapping[str, Tensor], adapter: Saved, path: Path, *, strict: bool) -> tuple[str, ...]:
    """The names of a network's tensors that are not those the adapter was trained on; refused if ``strict``."""
    replaced = tuple(f"{block.site}." for block in adapter.blocks if block.at == "instead")
    without = {key for key in state if key.startswith(replaced)}.union(adapter.also)
    base = adapter.base or {}
    own = fingerprint(network_of(state, without))
    here = {name: shape for name, (shape, *_) in own.items()}
    here |= {key: tuple(state[key].shape) for key in adapter.also if key in state}
    there = {name: shape for name, (shape, *_) in base.items()}
    there |= {key: tuple(adapter.tensors[key].shape) for key in adapter.also}
    if other := [name for name in there | here if here.get(name) != there.get(name)]:
        shapes = [f"{name} (model {here.get(name, 'none')}, adapter {there.get(name, 'none')})" for name in other]
        raise CheckpointError(f"{path} is for another network: {shorten(shapes)}. Make the one that it was trained on")
    changed = tuple(name for name in base if own.get(name, base[name]) != base[name])
    if strict and changed:
        types = [", ".join(sorted({side[name][1] for name in changed})) for side in (own, base)]
        raise CheckpointError(
            f"{path} is for other weights of this network: {len(changed)} of {len(base)} tensors have other values, "
            f"{shorten(changed)} ({types[0]} in the model, {types[1]} in the adapter). Load the checkpoint that it was "
            "trained on first. If the network was trained along with the blocks, none fits: freeze_backbone_ it, save "
            "what changed with also=, or save the whole model. strict=False loads the adapter all the same"
        )
    return changed

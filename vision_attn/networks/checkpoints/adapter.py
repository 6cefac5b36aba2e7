"""Adapters: inserted blocks and other trained parts of a network in a small file, without the network."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.errors import CheckpointError
from vision_attn.networks import insertion
from vision_attn.networks.checkpoints import file_format
from vision_attn.networks.checkpoints.file_format import Saved, fingerprint, gather, plain_key
from vision_attn.networks.checkpoints.load import copy_all_, refuse_without_values
from vision_attn.networks.insertion import InsertionReport, changeable, inserted_blocks, plain_network, records, remove_
from vision_attn.networks.safe import read_file
from vision_attn.text import Report, Table, escaped, shorten


@dataclass(frozen=True, repr=False)
class AdapterReport(Report):
    """Report of the blocks and tensors that an adapter added to a model; prints as a summary.

    >>> report = AdapterReport("a.safetensors", InsertionReport(()), ("0.inserted.gate",), compared=2, differing=())
    >>> str(report).splitlines()[1]
    'the network is the one it was trained on, in all 2 tensors'
    """

    #: the file
    path: str
    #: the inserted blocks
    insertion: InsertionReport
    #: keys of the tensors that were loaded
    loaded: tuple[str, ...]
    #: number of tensors of the network that were compared with those the adapter was trained on
    compared: int
    #: keys of those with other values or another type, which only ``strict=False`` accepts
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
    """Write the inserted blocks of a network, and of the network itself only a fingerprint.

    The network must have the values of its checkpoint, as ``freeze_backbone_`` keeps them in training: name all else
    that was trained in ``also``, running statistics of batch norms included, or the adapter fits no checkpoint.

    Args:
        model: a model with inserted blocks.
        path: the file, ``.safetensors``.
        also: globs on further keys to save: ``["fc.*"]`` for a new head.
        about: further plain values to write; a run writes its settings and classes.

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
    blocks = file_format.blocks_to_save(model)
    if not blocks:
        raise ValueError("model has no inserted block to save: insert_ one, or save the whole model")
    state, block_keys = plain_state(model), set(map(plain_key, insertion.inserted_keys(model)))
    extra = insertion.match_keys("also", also, [key for key in state if key not in block_keys])
    tensors = {key: gather(state[key]) for key in state if key in block_keys or key in extra}
    base = fingerprint_network(state, exclude=block_keys | extra)
    file_format.write_saved(Path(path), Saved(tensors, blocks, base, tuple(sorted(extra)), about=dict(about or {})))
    return Path(path)


def load_adapter_(
    model: nn.Module, path: str | Path, *, strict: bool = True, block: Callable[..., nn.Module] | None = None
) -> AdapterReport:
    """Insert the blocks of an adapter file into the network that it was trained on.

    The network is compared with the adapter's fingerprint before anything is changed.

    Args:
        model: the network, with the values of its checkpoint and nothing inserted.
        path: the file that :func:`save_adapter` wrote.
        strict: refuse a network with other values or of another type; its names and shapes must fit in any case.
        block: the class of the inserted blocks if it is not one of this library's.

    Returns:
        A report of what was inserted and loaded.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the model has inserted blocks, is on the meta device or in a wrapper that it cannot be changed in.
        CheckpointError: the file is damaged or no adapter, or is for another network; the model is unchanged.

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
    makers = file_format.find_makers(adapter, path, block)
    state = plain_state(model)
    differing = compare_network(state, adapter, path, strict=strict)
    try:
        with torch.random.fork_rng(devices=[]):  # the random values of new blocks are replaced
            file_format.insert_saved_(model, adapter, makers)
        state = plain_state(model)
        shapes = {(plain_key(key), state[plain_key(key)].shape) for key in insertion.inserted_keys(model)}
        if wrong := shapes ^ {(key, value.shape) for key, value in adapter.tensors.items() if key not in adapter.also}:
            raise CheckpointError(f"the blocks made here and the saved ones differ in {shorten(sorted(dict(wrong)))}")
        report = InsertionReport(records(model))
        copy_all_([(state[key], value) for key, value in adapter.tensors.items()])
    except BaseException as error:
        if inserted_blocks(model):
            remove_(model)
        if isinstance(error, Exception):
            raise CheckpointError(f"{path}: its blocks cannot be put into the model ({error})") from error
        raise
    return AdapterReport(str(path), report, tuple(adapter.tensors), len(adapter.base or ()), differing)


def read_adapter(path: str | Path) -> Saved:
    """Read an adapter file without running any code from it."""
    file = read_file(path, by_name=False)  # the format has a hash of its own
    saved = file_format.read_saved(file)
    if saved is None or saved.base is None:
        raise CheckpointError(f"{file.path} is no adapter: load_checkpoint reads checkpoints, load_model networks")
    return saved


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a model by the names in the network without wrappers."""
    return {plain_key(key): value for key, value in model.state_dict().items()}


def fingerprint_network(state: Mapping[str, Tensor], exclude: Collection[str]) -> file_format.Fingerprint:
    """Identify the tensors of a network, without counters of batches, which do not change its output."""
    names = [key for key in state if key not in exclude and not key.endswith("num_batches_tracked")]
    return fingerprint({key: state[key] for key in names if isinstance(state[key], Tensor)})


def compare_network(state: Mapping[str, Tensor], adapter: Saved, path: Path, *, strict: bool) -> tuple[str, ...]:
    """Return the names of tensors that differ from the network the adapter was trained on; raise if ``strict``."""
    sites = tuple(f"{block.site}." for block in adapter.blocks if block.at == "instead")
    base, own = adapter.base or {}, fingerprint_network(state, {key for key in state if key.startswith(sites)})
    saved = base | fingerprint_network(adapter.tensors, adapter.tensors.keys() - set(adapter.also))
    here, there = ({name: shape for name, (shape, *_) in tensors.items()} for tensors in (own, saved))
    if other := [name for name in there | here if here.get(name) != there.get(name)]:
        shapes = [f"{name} (model {here.get(name, 'none')}, adapter {there.get(name, 'none')})" for name in other]
        raise CheckpointError(f"{path} is for another network: {shorten(shapes)}. Make the one that it was trained on")
    changed = tuple(name for name in base if own.get(name, base[name]) != base[name])
    if strict and changed:
        types = [", ".join(sorted({tensors[name][1] for name in changed})) for tensors in (own, base)]
        raise CheckpointError(
            f"{path} is for other weights of this network: {len(changed)} of {len(base)} tensors have other values, "
            f"{shorten(changed)} ({types[0]} in the model, {types[1]} in the adapter). Load the checkpoint that it was "
            "trained on first. If the network was trained along with the blocks, none fits: freeze_backbone_ it, save "
            "what changed with also=, or save the whole model. strict=False loads the adapter all the same"
        )
    return changed

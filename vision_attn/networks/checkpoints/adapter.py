"""Adapters: what was inserted into a network and trained, without the network, in a small file of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vision_attn.checks import check_flags, check_type
from vision_attn.errors import CheckpointError
from vision_attn.networks.checkpoints.adapter_file import Adapter, fingerprint, read_adapter, write_adapter
from vision_attn.networks.checkpoints.adapters import ADAPTERS, named_adapters, set_adapter
from vision_attn.networks.checkpoints.load import matching, refuse_without_values
from vision_attn.networks.checkpoints.placements import makers_of, place, placements_of
from vision_attn.networks.safe import copy_to_write
from vision_attn.networks.insertion import (
    InsertionReport,
    changeable,
    inserted,
    inserted_keys,
    plain_network,
    records,
    remove_,
)
from vision_attn.networks.insertion.backbone import all_or_nothing
from vision_attn.text import Report, Table, escaped, shorten
from vision_attn.version import __version__


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
        network = (
            f"{len(self.differing)} of {self.compared} tensors of the network are not those it was trained on: "
            f"{shorten(self.differing)}"
            if self.differing
            else f"the network is the one it was trained on, in all {self.compared} tensors"
        )
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
    path = Path(path)
    check_type("about", {} if about is None else about, Mapping, "a mapping of names to plain values")
    if path.suffix != ".safetensors":
        raise ValueError(f"path must end in .safetensors; got {path.name!r}")
    model = plain_network(model)
    refuse_without_values(model)
    placements = placements_of(model)
    if not placements:
        raise ValueError("model has no inserted block to save: insert_ one, or save the whole model")
    state, of_blocks = model.state_dict(), inserted_keys(model)
    further = matching("also", also, [key for key in state if key not in of_blocks])
    tensors = {key: copy_to_write(state[key]) for key in state if key in of_blocks or key in further}
    base = fingerprint(network_of(state, without=of_blocks | further))
    write_adapter(path, Adapter(__version__, placements, tuple(sorted(further)), base, tensors, about or {}))
    return path


@all_or_nothing
def load_adapter_(
    model: nn.Module,
    path: str | Path,
    *,
    strict: bool = True,
    block: Callable[..., nn.Module] | None = None,
    name: str | None = None,
    example_input: Any = None,
) -> AdapterReport:
    """Insert what an adapter file holds into the network that it was trained on.

    The network is compared with the adapter's fingerprint before anything is done to it.

    Args:
        model: the network, with its own weights and nothing inserted.
        path: the file that :func:`save_adapter` wrote.
        strict: refuse a network with other values or of another type; its names and shapes must fit in any case.
        block: the class of the inserted blocks, where it is none of this library's.
        name: of this adapter, where a network has several: another one that is in it is put aside, and
            :func:`vision_attn.set_adapter` brings it back.
        example_input: as in :func:`vision_attn.insert_`, for a network that takes more than a batch of images; empty
            ones of the shape in the file when None.

    Returns:
        A report of what was inserted and loaded.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the model has inserted blocks, is on the meta device or in a wrapper that it cannot be changed in;
            ``block`` is not needed; or another adapter has this ``name``, or others have names and this one has none.
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
    named = named_adapters(model)
    check_type("name", name, (str, type(None)), "a text, or None")
    if name in named.blocks or (name is None and named.blocks):
        raise ValueError(
            f"name must be one that none of the model's adapters has ({', '.join(named.blocks)}); got {name!r}"
        )
    active = named.active
    if active is not None:
        set_adapter(model, None)
        named = named_adapters(model)
    try:
        report, before = load(model, path, strict=strict, block=block, example_input=example_input)
    except BaseException:
        set_adapter(model, active)
        raise
    if name is not None:
        named.active, named.blocks[name], named.also[name] = name, [], before
        vars(model)[ADAPTERS] = named
    return report


def load(
    model: nn.Module, path: str | Path, *, strict: bool, block: Callable[..., nn.Module] | None, example_input: Any
) -> tuple[AdapterReport, dict[str, Tensor]]:
    """:func:`load_adapter_` into a network without others; with the report come the values that it took the place of."""
    if blocks := inserted(model):
        sites = shorten(map(repr, blocks))
        raise ValueError(f"model must have nothing inserted; it has blocks at {sites}: remove_(model) first")
    check_flags(strict=strict)
    adapter = read_adapter(path)
    makers = makers_of(adapter.placements, adapter.tensors, path, block)
    own = model.state_dict()
    differing = verify_network(own, adapter, path, strict=strict)
    before = {key: own[key].clone() for key in adapter.also}
    try:
        place(model, adapter.placements, makers, example_input)
        wrong = inserted_keys(model) ^ (adapter.tensors.keys() - set(adapter.also))
        if wrong:
            raise CheckpointError(f"the blocks made here and the saved ones differ in {shorten(sorted(wrong))}")
        model.load_state_dict(dict(adapter.tensors), strict=False)
        placed = InsertionReport(records(model))
    except BaseException as error:
        if inserted(model):
            remove_(model)
        model.load_state_dict(before, strict=False)
        if isinstance(error, Exception):
            raise CheckpointError(f"{path}: its blocks cannot be put into the model ({error})") from error
        raise
    return AdapterReport(str(path), placed, tuple(adapter.tensors), len(adapter.base), differing), before


def network_of(state: Mapping[str, Tensor], without: Collection[str]) -> dict[str, Tensor]:
    """The tensors that make a network what it is: counters of batches do not."""
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and key not in without and not key.endswith("num_batches_tracked")
    }


def verify_network(state: Mapping[str, Tensor], adapter: Adapter, path: str | Path, *, strict: bool) -> tuple[str, ...]:
    """The names of the network's tensors that are not those the adapter was trained on."""
    replaced = tuple(f"{placement.site}." for placement in adapter.placements if placement.at == "instead")
    gone = {key for key in state if key.startswith(replaced)}
    ours, theirs = fingerprint(network_of(state, without={*adapter.also, *gone})), adapter.base
    shapes, saved = ({name: shape for name, (shape, _, _) in side.items()} for side in (ours, theirs))
    shapes |= {key: tuple(state[key].shape) for key in adapter.also if key in state}
    saved |= {key: tuple(adapter.tensors[key].shape) for key in adapter.also}
    other = [
        f"{name} (model {shapes.get(name, 'has none')}, adapter {saved.get(name, 'has none')})"
        for name in saved | shapes
        if shapes.get(name) != saved.get(name)
    ]
    if other:
        raise CheckpointError(
            f"{path} is for another network: {shorten(other)}. Make the network that it was trained on, with as many "
            "classes"
        )
    changed = [name for name in theirs if ours[name] != theirs[name]]
    if strict and changed:
        here, there = (", ".join(sorted({side[name][1] for name in changed})) for side in (ours, theirs))
        raise CheckpointError(
            f"{path} is for other weights of this network: {len(changed)} of {len(theirs)} tensors have other values, "
            f"{shorten(changed)} ({here} in the model, {there} in the adapter). Load the checkpoint that it was "
            "trained on first, and convert the model to another type last. If the network was trained along with the "
            "blocks, in its running statistics too, no checkpoint fits: freeze_backbone_ it in training, save what "
            "changed with also=, or save the whole model. strict=False loads the adapter all the same"
        )
    return tuple(changed)

"""Save inserted blocks and other trained parameters in a small adapter file, and load them."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vision_attn.errors import CheckpointError
from vision_attn.networks.checkpoints import file_format
from vision_attn.networks.checkpoints.file_format import BlockClasses, Saved, fingerprint, gather
from vision_attn.networks.checkpoints.hub import resolve_source
from vision_attn.networks.checkpoints.load import copy_all_, pair_values, refuse_without_values
from vision_attn.networks.checkpoints.option_code import compare_arguments, get_arguments
from vision_attn.networks.insertion import InsertionReport, remove_
from vision_attn.networks.insertion.registry import inserted_blocks, inserted_keys, records
from vision_attn.networks.inspection.example import tree_leaves
from vision_attn.networks.inspection.selection import select_keys
from vision_attn.networks.inspection.wrappers import require_modifiable, unwrap_average, unwrap_key
from vision_attn.networks.safe import read_file
from vision_attn.text import Report, Table, escape_control_characters, shorten


@dataclass(frozen=True, repr=False)
class AdapterReport(Report):
    """Report of the blocks and tensors that were loaded from an adapter; prints as a summary.

    >>> report = AdapterReport("a.safetensors", InsertionReport(()), ("0.inserted.gate",), 2, changed_tensors=())
    >>> str(report).splitlines()[1]
    'all 2 tensors of the network match the network that the adapter was trained on'
    """

    #: path of the file
    file: str
    #: report of the inserted blocks
    insertion: InsertionReport
    #: keys of the loaded tensors
    loaded: tuple[str, ...]
    #: number of tensors of the network that were compared with the fingerprint in the adapter
    num_compared: int
    #: keys of tensors with other values or another dtype, which are accepted only with ``strict=False``
    changed_tensors: tuple[str, ...]

    def parts(self) -> list[str | Table]:
        source, changed = escape_control_characters(self.file), self.changed_tensors
        network = f"all {self.num_compared} tensors of the network match the network that the adapter was trained on"
        if changed:
            network = f"{len(changed)} of {self.num_compared} tensors of the network have changed: {shorten(changed)}"
        return [f"{len(self.loaded)} tensors loaded from {source}", network, *self.insertion.parts()]


def save_adapter(
    model: nn.Module, file: str | Path, *, also: str | Iterable[str] = (), metadata: Mapping[str, Any] | None = None
) -> Path:
    """Save the inserted blocks of a network and a fingerprint of the other tensors.

    Tensors that are not saved must keep the values of the original checkpoint, or the adapter does not match it. Train
    with :func:`vision_attn.freeze_backbone_`, or pass ``also`` to save all other tensors that training changed,
    including the running statistics of batch norms.

    Args:
        model: a model with inserted blocks.
        file: path of the file, which must end in ``.safetensors``.
        also: globs on additional keys to save, as in :func:`vision_attn.freeze_backbone_`: ``"head"`` for a
            new classifier.
        metadata: additional metadata of plain values; training runs save the input size and the classes.

    Returns:
        The path.

    Raises:
        ValueError: the model has no inserted blocks, ``also`` matches no key, a block or an option cannot be saved, or
            the name does not end in ``.safetensors``.
        OSError: the file cannot be written; an existing file is unchanged.

    >>> import tempfile
    >>> from vision_attn.networks.insertion import insert_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1))
    >>> report = insert_(model, names="0", example_input=(1, 3, 8, 8))
    >>> file = save_adapter(model, Path(tempfile.mkdtemp()) / "adapter.safetensors")
    >>> removed = remove_(model)
    >>> len(load_adapter_(model, file).loaded)
    7
    """
    model = unwrap_average(model)
    refuse_without_values(model)
    if not (blocks := file_format.blocks_to_save(model)):
        remedy = "Call va.insert_ first, save before tracing with torch.fx, or use va.save_model"
        raise ValueError(f"model has no inserted blocks to save. {remedy}")
    state, block_keys = unwrap_state(model), inserted_keys(model)
    extra = select_keys("also", also, model, [key for key in state if key not in block_keys])
    names = {unwrap_key(key): id(parameter) for key, parameter in model.named_parameters(remove_duplicate=False)}
    shared = {names.get(key) for key in extra}
    extra |= {key for key in names.keys() - block_keys if names[key] in shared}  # all names of a shared parameter
    tensors = {key: gather(state[key]) for key in state if key in block_keys or key in extra}
    base = fingerprint_network(state, exclude=block_keys | extra)
    arguments = get_arguments(model.state_dict())
    saved = Saved(tensors, blocks, base, tuple(sorted(extra)), arguments, metadata=dict(metadata or {}))
    file_format.write_saved(Path(file), saved)
    return Path(file)


@torch.inference_mode(False)  # Tensors created in inference mode cannot be trained.
def load_adapter_(
    model: nn.Module, file: str | Path, *, strict: bool = True, block: BlockClasses | None = None
) -> AdapterReport:
    """Insert the blocks of an adapter file into the network that the adapter was trained on.

    The network is compared with the fingerprint in the adapter before it is changed.

    Args:
        model: the network, with the weights of its original checkpoint and without inserted blocks.
        file: a file that was written by :func:`save_adapter`, a folder with ``adapter.safetensors``, or a file or
            repository of the Hugging Face Hub, ``"hf-hub:owner/name[@revision][/file]"``.
        strict: raise an error if values or dtypes of the network differ. Names and shapes must always match.
        block: the class of the inserted blocks, if they are not blocks of this library; several classes in a list, or
            in a dictionary by their names in the file. Custom patterns and position encodings are passed the same way.

    Returns:
        A report of the inserted blocks and loaded tensors.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the model has inserted blocks, is on the meta device, or is in a wrapper that prevents changes.
        CheckpointError: the file is damaged, is not an adapter, or is for another network. The model is unchanged.

    >>> import tempfile
    >>> from vision_attn.networks.insertion import insert_
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1))
    >>> report = insert_(model, names="0", example_input=(1, 3, 8, 8))
    >>> file = save_adapter(model, Path(tempfile.mkdtemp()) / "adapter.safetensors")
    >>> removed = remove_(model)
    >>> report = load_adapter_(model, file)
    >>> report.insertion.blocks[0].site, report.num_compared
    ('0', 2)
    """
    model = require_modifiable(model, "va.load_adapter_")
    refuse_without_values(model)
    if blocks := inserted_blocks(model):
        sites = shorten(map(repr, blocks))
        raise ValueError(f"model must have no inserted blocks, got blocks at {sites}. Call va.remove_(model) first")
    path = resolve_source(file)
    adapter = read_adapter(path)
    classes = file_format.match_classes(adapter, path, block)
    state = unwrap_state(model)
    changed_tensors = compare_network(state, adapter, path, strict=strict)
    try:
        with torch.random.fork_rng(devices=[]):  # random initial values are replaced, so they must not advance the RNG
            file_format.insert_saved_(model, adapter, classes)
        state = unwrap_state(model)
        shapes = {(key, state[key].shape) for key in inserted_keys(model)}
        if wrong := shapes ^ {(key, value.shape) for key, value in adapter.tensors.items() if key not in adapter.also}:
            raise CheckpointError(f"created and saved blocks differ in {shorten(sorted(dict(wrong)))}")
        if different := compare_arguments(get_arguments(model.state_dict()), adapter.arguments):
            remedy = "Pass the class or function that built custom blocks as block="
            raise CheckpointError(f"blocks are configured differently: {'; '.join(different)}. {remedy}")
        for name, x in (*model.named_parameters(), *model.named_buffers()) if not changed_tensors else ():
            value = adapter.tensors.get(unwrap_key(name), x)
            if x.is_floating_point() and value.is_floating_point():  # blocks may have another dtype than the network
                x.data = x.data.to(value.dtype)
        values = pair_values(unwrap_state(model), adapter.tensors)
        report = InsertionReport(records(model), "loaded")
    except BaseException as error:
        if inserted_blocks(model):
            remove_(model)
        if isinstance(error, Exception):
            raise CheckpointError(f"{path}: the blocks cannot be inserted into the model ({error})") from error
        raise
    copy_all_(values)
    return AdapterReport(str(path), report, tuple(adapter.tensors), len(adapter.base or ()), changed_tensors)


def read_adapter(path: str | Path) -> Saved:
    """Read an adapter file without running any code from it."""
    inner = Path(path, "adapter.safetensors")  # a folder may contain the network as well
    file = read_file(inner if inner.is_file() else path)
    saved = file_format.read_saved(file)
    if saved is None or saved.base is None:
        remedy = "Use va.load_checkpoint_ for a checkpoint, and va.load_model for a saved network"
        raise CheckpointError(f"{file.path} is not an adapter. {remedy}")
    return saved


def unwrap_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a model with keys of the network without wrappers."""
    return {unwrap_key(key): value for key, value in model.state_dict().items()}


def fingerprint_network(state: Mapping[str, Tensor], exclude: Collection[str]) -> file_format.Fingerprint:
    """Return the fingerprint of a network, without batch counters, which do not affect its output."""
    tensors: dict[str, Tensor] = {}
    for key in (key for key in state if key not in exclude and not key.endswith("num_batches_tracked")):
        leaves = [x for x in tree_leaves(state[key]) if isinstance(x, Tensor)]  # quantized layers store tuples
        tensors |= {f"{key}.{index}" if index else key: x for index, x in enumerate(leaves)}
    return fingerprint(tensors)


def compare_network(state: Mapping[str, Tensor], adapter: Saved, path: Path, *, strict: bool) -> tuple[str, ...]:
    """Return the keys of tensors that differ from the fingerprint of an adapter; raise an error if ``strict``."""
    sites = tuple(f"{block.site}." for block in adapter.blocks if block.target.at == "replace")
    base, ours = adapter.base or {}, fingerprint_network(state, {key for key in state if key.startswith(sites)})
    saved = base | fingerprint_network(adapter.tensors, adapter.tensors.keys() - set(adapter.also))
    model_shapes, adapter_shapes = ({name: shape for name, (shape, *_) in tensors.items()} for tensors in (ours, saved))
    pairs = {name: (model_shapes.get(name), adapter_shapes.get(name)) for name in adapter_shapes | model_shapes}
    if other := {name: shapes for name, shapes in pairs.items() if shapes[0] != shapes[1]}:
        shown = shorten(f"{name} (model {mine}, adapter {theirs})" for name, (mine, theirs) in other.items())
        raise CheckpointError(f"{path} is for another network: {shown}. Use the network of the adapter")
    changed = tuple(name for name in base if ours.get(name, base[name]) != base[name])
    if strict and changed:
        types = [", ".join(sorted({tensors[name][1] for name in changed})) for tensors in (ours, base)]
        what = f"{path} is for different weights of this network: {len(changed)} of {len(base)} tensors differ"
        which = f"{shorten(changed)} ({types[0]} in the model, {types[1]} in the adapter)"
        remedy = "Load the original checkpoint of the network first"
        trained = "If the network was trained together with the blocks, save all trained parameters with also="
        save = f"{remedy}. {trained}, or use va.save_model"
        raise CheckpointError(f"{what}, {which}. {save}. strict=False loads the adapter without this check")
    return changed

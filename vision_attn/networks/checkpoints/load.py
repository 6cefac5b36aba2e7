"""Load checkpoints into a model, after a complete comparison of both."""

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from vision_attn.attention.position import PositionEncoding
from vision_attn.checks import as_list
from vision_attn.errors import CheckpointError
from vision_attn.networks.checkpoints.hub import resolve_source
from vision_attn.networks.checkpoints.load_report import LoadReport, Shapes, find_input_conv, remedies
from vision_attn.networks.checkpoints.option_code import Arguments, compare_arguments, get_arguments
from vision_attn.networks.checkpoints.weights import Rename, Tensors, find_weights, rename_hint
from vision_attn.networks.insertion.attributes import RANDOM
from vision_attn.networks.insertion.hooks import checked_network
from vision_attn.networks.insertion.registry import keys_by_site, replaced_modules
from vision_attn.networks.inspection.dry_run import equal_tensors
from vision_attn.networks.inspection.selection import match_keys
from vision_attn.networks.inspection.wrappers import unwrap_key, unwrap_model
from vision_attn.networks.safe import CheckpointFile, read_file
from vision_attn.text import shorten

#: Glob on the keys of the extra state of modules.
EXTRA_STATE = "*_extra_state"


def load_checkpoint_(
    model: nn.Module,
    file: str | Path,
    *,
    strict: bool = True,
    ema: bool = False,
    skip: str | Iterable[str] = (),
    prefix: str = "",
    rename: Rename = (),
    adapt_input_conv: bool = False,
) -> LoadReport:
    r"""Load a checkpoint file into a model, before or after blocks are inserted.

    Tables of relative positions are resized to the feature maps of the model. Tensors of a module that was replaced by
    :func:`vision_attn.replace_` are loaded into the original module, which ``remove_`` restores, except for keys that
    the new module has, too.

    ``.safetensors`` files and ``torch.save`` files (``.pt``, ``.pth``, ``.th``, …) are read without running code.
    Weights are found at the top level of the file or under any entry, such as ``state_dict`` or ``checkpoint.model``.
    Parts that wrappers add to the keys (``module.``, ``_orig_mod.``, …) are ignored. A prefix is removed if the
    checkpoint contains at least half of the tensors of the model under it. If the keys or shapes do not fit a network
    of timm, timm's ``checkpoint_filter_fn`` for its family converts them: keys of the authors or of an earlier timm,
    and position tables for another image size. The report names it.

    If the model is sharded by FSDP2 (``fully_shard``), call this function on every process. Hooks of
    ``load_state_dict`` do not run.

    Args:
        model: the network; it changes only if the checkpoint fits.
        file: a checkpoint file, or a folder in the layout of Hugging Face or timm, with or without shards; or a file or
            repository of the Hugging Face Hub, ``"hf-hub:owner/name[@revision][/file]"``.
        strict: raise an error if keys are missing or unexpected, shapes differ, or blocks are configured differently.
            Keys of inserted blocks and keys that match ``skip`` may be missing. If False, load the keys that fit and
            report all others.
        ema: load the moving average of the weights.
        skip: globs on keys that are not loaded: ``["fc.*"]`` for a new classifier.
        prefix: load only keys with this prefix, such as ``"backbone."``, or the entry of this name, such as
            ``"teacher."``. By default, entry and prefix are detected, and an error is raised if several fit.
        rename: pairs of a regular expression and its replacement, applied in order to the keys (without ``prefix``), as
            in ``[(r"^head\.fc\.", "fc.")]``, or the name of a preset. ``"efficientnet-pytorch"`` converts the keys of
            that package to keys of timm.
        adapt_input_conv: convert the weight of the first convolution to the input channels of the model, as in timm.
            Channels are repeated or omitted, and scaled by the ratio of their numbers.

    Returns:
        A report of the keys, of the source of the weights in the file, and of blocks that are configured differently or
        whose configuration is not in the file.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a tensor of the model is on the meta device, lazy, expanded or sparse, a module has the method
            ``set_extra_state``, ``skip`` matches no key, or ``rename`` is invalid.
        CheckpointError: the file is damaged, requires code, contains no weights, or does not fit the model, or the Hub
            cannot be read. The message lists the keys and a remedy.

    >>> import tempfile, torch
    >>> file = Path(tempfile.mkdtemp()) / "linear.pth"
    >>> torch.save({"state_dict": {"module.weight": torch.ones(3, 2)}}, file)
    >>> load_checkpoint_(nn.Linear(2, 3, bias=False), file).loaded
    ('weight',)
    """
    model = unwrap_model(model)
    refuse_without_values(model)
    target = Target(model, skip)
    return load_file_(
        target, read_file(resolve_source(file)), strict, adapt_input_conv, ema=ema, prefix=prefix, rename=rename
    )


def load_file_(
    target: "Target", file: CheckpointFile, strict: bool = True, adapt_input_conv: bool = False, **source_options: Any
) -> LoadReport:
    """Load the content of a file into a model, with the arguments of :func:`load_checkpoint_`."""
    tensors, arguments, source = find_weights(file, target.required, **source_options)

    def prepare(loaded: Tensors, timm_filter: str = "") -> tuple[LoadReport, Tensors, Tensors]:
        saved = {key: value for key, value in loaded.items() if not any(fnmatchcase(key, glob) for glob in target.skip)}
        converted = convert_tensors(target, saved, adapt_input_conv)
        return compare(target, saved, converted, arguments, {**source, "timm_filter": timm_filter}), saved, converted

    attempts = [prepare(tensors)]
    if count_differences(attempts[0][0]):
        filter_name = f"{type(target.model).__module__}.checkpoint_filter_fn"
        attempts += [prepare(x, filter_name) for x in filter_by_timm(target.model, tensors, source["prefix"])]
    report, saved, converted = min(attempts, key=lambda attempt: count_differences(attempt[0]))
    if report.timm_filter:
        renamed = set(map(id, tensors.values()))
        resized = compare_shapes({key: x for key, x in saved.items() if id(x) not in renamed}, tensors)
        report = replace(report, converted={**resized, **report.converted})
    fitting = (*report.loaded, *report.replaced)
    if not fitting or (strict and (count_differences(report) or report.config_mismatches)):
        raise explain_refusal(report, target, tensors)
    new = {key: converted.get(key, saved[key]) for key in fitting}
    check_shared(target, new)
    values = pair_values(target.tensors, new)
    # The only references to the tensors of the file are in the list.
    del file, tensors, saved, converted, attempts, new
    copy_all_(values)
    for old in replaced_modules(target.model).values() if report.replaced else ():
        vars(old).pop(RANDOM, None)
    return report


def count_differences(report: LoadReport) -> int:
    """Return the number of keys that do not fit."""
    return len(report.missing) + len(report.unexpected) + len(report.mismatched)


def check_shared(target: "Target", values: Tensors) -> None:
    """Raise if a checkpoint has different values for two names of a shared parameter."""
    first: dict[int, str] = {}
    for key in (key for key in values if key in target.identities):
        name = first.setdefault(target.identities[key], key)
        if name != key and not equal_tensors(values[name], values[key]):
            what = f"{name} and {key} are one parameter of the model, and have different values in the checkpoint"
            raise CheckpointError(f'{what}. Pass skip="{key}", or skip="{name}"')


def filter_by_timm(model: nn.Module, tensors: Tensors, prefix: str) -> Iterator[dict[str, Tensor]]:
    """Convert the keys and shapes of a checkpoint by the function that timm has for a family of networks.

    These functions convert the keys of the authors and of earlier versions of timm, and resize position tables. The
    tensors are converted without and with the prefix of their keys, because the function for SAM requires it. Nothing
    is yielded for another network, and where the function fails.
    """
    family = sys.modules[type(model).__module__]
    if not family.__name__.startswith("timm.models.") or not hasattr(family, "checkpoint_filter_fn"):
        return
    # DeiT III has the filter of other ViTs, with an option for its keys.
    names = signature(family.checkpoint_filter_fn).parameters.keys() & {"adapt_layer_scale"}
    for start in dict.fromkeys(("", prefix)):
        saved = {f"{start}{key}": x for key, x in tensors.items()}
        with suppress(Exception):  # the tensors of another network can cause any exception
            filtered = family.checkpoint_filter_fn(saved, model, **dict.fromkeys(names, True))
            yield {key: value for key, value in filtered.items() if isinstance(value, Tensor)}


class Target:
    """The tensors of a model that a checkpoint can contain, by their keys in the network without wrappers.

    Args:
        model: the network.
        skip: globs on keys that are not loaded.
    """

    def __init__(self, model: nn.Module, skip: str | Iterable[str] = ()) -> None:
        model = self.model = checked_network(model)
        state_dict, removed = model.state_dict(), replaced_tensors(model)
        self.arguments: Arguments = get_arguments(state_dict)
        #: tensors of the model
        self.state: dict[str, Any] = {unwrap_key(key): value for key, value in state_dict.items()}
        #: tensors of the model, and of the modules that were replaced by ``replace_``
        parts = (self.state, *removed, self.state)
        self.tensors: dict[str, Any] = {key: x for part in parts for key, x in part.items()}
        #: the same number for each name of a shared parameter
        names = model.named_parameters(remove_duplicate=False)
        self.identities: dict[str, int] = {unwrap_key(key): id(parameter) for key, parameter in names}
        blocks = keys_by_site(model).values()
        self.block_keys: set[str] = set[str]().union(*blocks)
        # Checkpoints from torch before 0.4.1 have no batch counters.
        counters = [{key} for key in self.tensors if key.endswith("num_batches_tracked")]
        #: groups of keys; a checkpoint must contain all keys of a group or none
        self.groups: list[set[str]] = [*blocks, *(part.keys() - self.state.keys() for part in removed), *counters]
        self.skip: list[str] = [unwrap_key(glob) for glob in as_list("skip", skip, "globs on keys", single=str)]
        self.skipped: set[str] = match_keys("skip", self.skip, self.tensors)
        if extra := [key for key in self.state.keys() - self.skipped if fnmatchcase(key, EXTRA_STATE)]:
            what = f"model: {shorten(sorted(extra))} cannot be loaded, because set_extra_state is not called"
            raise ValueError(f'{what}. Pass skip="{EXTRA_STATE}", and load it with load_state_dict(…, strict=False)')
        optional = self.skipped.union(*self.groups)
        #: tensors that every checkpoint of the network must contain
        self.required: dict[str, Any] = {key: value for key, value in self.tensors.items() if key not in optional}


def replaced_tensors(model: nn.Module) -> list[dict[str, Tensor]]:
    """Return the tensors of each module that was replaced by ``replace_``, by all of their original keys."""
    kept = {model.get_submodule(site): old.state_dict() for site, old in replaced_modules(model).items()}
    paths = [(path, kept[x]) for path, x in model.named_modules(remove_duplicate=False) if x in kept]
    return [{unwrap_key(f"{path}.{key}"): value for key, value in old.items()} for path, old in paths]


def refuse_without_values(model: nn.Module) -> None:
    """Raise an error for a model on the meta device or with lazy parameters."""
    if any(isinstance(value, Tensor) and (is_lazy(value) or value.is_meta) for value in model.state_dict().values()):
        remedy = "For a new network, call model.to_empty(device=…), or run a forward pass to initialize lazy modules. "
        remedy += "For a network on which accelerate's cpu_offload was called, remove its hooks"
        raise ValueError(f"model has tensors without values. {remedy}")


def convert_tensors(target: Target, saved: Tensors, adapt_input_conv: bool) -> dict[str, Tensor]:
    """Resize position tables to the feature maps of the model, and convert the first convolution if requested."""
    converted = {}
    for path, module in target.model.named_modules(remove_duplicate=False):
        for name, table in module.named_parameters(recurse=False) if isinstance(module, PositionEncoding) else ():
            key = unwrap_key(f"{path}.{name}").removeprefix(".")
            value = saved.get(key, table)
            fits = value.shape == table.shape or get_kind(value) != get_kind(table)
            if not fits and (resized := module.resize_pos_embed(name, value)) is not None:
                converted[key] = resized
    # As timm's adapt_input_conv, for any number of channels in the checkpoint.
    if adapt_input_conv and (key := find_input_conv(compare_shapes(target.tensors, saved))):
        weight, channels, count = saved[key], saved[key].shape[1], target.tensors[key].shape[1]
        repeated = torch.cat([weight] * math.ceil(count / channels), 1)[:, :count] * (channels / count)
        converted[key] = weight.sum(1, keepdim=True) if count == 1 else repeated
    return converted


def compare(
    target: Target, saved: Tensors, converted: Tensors, arguments: Arguments, source: Mapping[str, Any]
) -> LoadReport:
    """Compare the tensors of a checkpoint, including converted tensors, with the model."""
    own = target.tensors
    for key in own.keys() & saved.keys():
        if (theirs := get_kind(saved[key])) != (ours := get_kind(own[key])):
            kinds = f"{key} is {theirs} in the checkpoint and {ours} in the model"
            raise CheckpointError(f"{source['file']} has tensors of another dtype: {kinds}")
    mismatched = compare_shapes(own, {**saved, **converted})
    fitting = [key for key in saved if key in own and key not in mismatched]
    absent = set[str]().union(*(keys for keys in target.groups if keys.isdisjoint(saved)))
    new = target.skipped | (absent & target.block_keys)
    loaded = tuple(key for key in fitting if key in target.state)
    # A file may contain a shared parameter under one of its names only.
    written = {target.identities.get(key) for key in loaded}
    absent |= {key for key, identity in target.identities.items() if identity in written} - saved.keys()
    blocks = [path for path in target.arguments if any(key.startswith(f"{path}." if path else "") for key in loaded)]
    return LoadReport(
        **source,
        loaded=loaded,
        newly_initialized=tuple(key for key in own if key in new),
        missing=tuple(key for key in own if key not in saved.keys() | new | absent),
        unexpected=tuple(key for key in saved if key not in own),
        mismatched=mismatched,
        converted=compare_shapes(converted, saved),
        replaced=tuple(key for key in fitting if key not in target.state),
        config_mismatches=compare_arguments({path: target.arguments[path] for path in blocks}, arguments),
        unchecked=tuple(path or "the model" for path in blocks if path not in arguments),
    )


def compare_shapes(ours_by_key: Tensors, saved: Tensors) -> Shapes:
    """Return the shapes of tensors whose shapes in the model and in the checkpoint differ."""
    shapes = {key: (tuple(ours_by_key[key].shape), tuple(saved[key].shape)) for key in ours_by_key if key in saved}
    return {key: (ours, theirs) for key, (ours, theirs) in shapes.items() if ours != theirs}


def get_kind(tensor: Tensor) -> str:
    return "complex" if tensor.is_complex() else "floating-point" if tensor.is_floating_point() else "integer"


def explain_refusal(report: LoadReport, target: Target, saved: Tensors) -> CheckpointError:
    """Return the error for a checkpoint that does not fit the model, with remedies."""
    hint = rename_hint(saved, target.required) if report.missing else ""
    if not (report.loaded or report.replaced):
        keys = f"the model has the keys {shorten(target.tensors)}; the checkpoint has {shorten(saved)}"
        hint = hint or 'If the checkpoint contains the network under a prefix, pass it, as in prefix="backbone."'
        return CheckpointError(f"{report.file} is for another architecture: {keys}. {hint}")
    what = f"{report.file} does not fit the model {type(target.model).__name__}. Nothing was loaded."
    return CheckpointError(what, *str(report).split("\n")[1:], *([hint] if hint else remedies(report)))


# --- copies -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def copy_all_(values: list[tuple[Any, Tensor]]) -> None:
    """Copy values into writable tensors, and remove both from the list."""
    while values:  # a shard is released after its last tensor
        tensor, value = values.pop()
        if hasattr(tensor, "device_mesh"):  # sharded by FSDP2; each process has read the complete file
            from torch.distributed.tensor import distribute_tensor

            value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor.copy_(value)


def pair_values(tensors: Mapping[str, Any], values: Tensors) -> list[tuple[Any, Tensor]]:
    """Return the tensors of a model with their new values; raise if a tensor is read-only or cannot represent them."""
    for key, value in values.items():
        x = tensors[key]
        constant = x.is_inference() and not torch.is_inference_mode_enabled()
        refused = constant or x.is_nested or x.layout != torch.strided
        if refused or any(n > 1 and not step for n, step in zip(x.shape, x.stride(), strict=True)):
            kinds = "expanded, sparse, nested, or was created in inference mode"
            raise ValueError(f"model: {key} cannot be written, because it is {kinds}. Replace it by a dense copy")
        if value.dtype != x.dtype and 1 < value.dtype.itemsize >= x.dtype.itemsize:
            copied, integer = value.to(x.dtype).to(value.dtype), get_kind(value) == "integer"
            if not (copied == value if integer else copied.isfinite() == value.isfinite()).all():
                what = f"{key} has values that {x.dtype} cannot represent, in the checkpoint as {value.dtype}"
                raise CheckpointError(f"{what}. Load it into a model of that dtype")
    return [(tensors[key], value) for key, value in values.items()]

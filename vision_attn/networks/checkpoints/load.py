"""Checkpoints into a model: compared in full first, and loaded only if they fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from vision_attn.attention.position import PositionEncoding
from vision_attn.checks import as_list, check_flags
from vision_attn.errors import CheckpointError
from vision_attn.networks.checkpoints.form import plain_key
from vision_attn.networks.checkpoints.load_report import LoadReport, Shapes, inputs_differ, remedies
from vision_attn.networks.checkpoints.specification import Arguments, arguments_of, other_arguments
from vision_attn.networks.checkpoints.weights import Rename, Tensors, find_weights, rename_hint
from vision_attn.networks.insertion import keys_of_blocks, matching, plain_network, replaced
from vision_attn.networks.safe import read_file
from vision_attn.text import shorten


def load_checkpoint(
    model: nn.Module,
    path: str | Path,
    *,
    strict: bool = True,
    ema: bool = False,
    skip: str | Iterable[str] = (),
    prefix: str = "",
    rename: Rename = (),
    adapt_input_conv: bool = False,
) -> LoadReport:
    r"""Load a checkpoint file into a model, before or after blocks are inserted.

    Tables of relative positions that were saved for a map of another size are stretched to the model's. What belongs to
    a module that :func:`vision_attn.replace_` took out goes into that module, for when it comes back.

    Reads ``.safetensors``, and what ``torch.save`` writes (``.pt``, ``.pth``, ``.th``, …) without running any code from
    it. Weights are found at the top of the file or under ``state_dict``, ``model`` and the like. The parts of names
    that parallel, compiled, sharded and checkpointed layers add (``module.``, ``_orig_mod.``, …) are ignored, and a
    prefix under which all of the model's tensors are found is removed. A name that ends in a hash, as torch.hub's
    ``resnet18-f37072fd.pth``, must be that of the file.

    The parameters of the model may be sharded by FSDP2 (``fully_shard``): call it on every process.

    Args:
        model: the network; it changes only if the checkpoint fits.
        path: the file, or a folder as Hugging Face and timm write them, in shards or not.
        strict: refuse a checkpoint unless nothing but whole inserted blocks (and ``skip``) is missing, nothing is left
            over, every shape fits, and no block is said to have had other heads, another pattern, position or scale.
            Otherwise load what fits and report the rest.
        ema: take the moving average of the weights that the file holds.
        skip: globs on keys that keep the model's values whatever the checkpoint holds: ``["fc.*"]`` for a new head.
        prefix: load only keys that begin with this prefix, ``"backbone."``, and ignore all others. By default it is
            found, and a checkpoint in which several prefixes fit is refused.
        rename: for a checkpoint of the same network with other names: pairs of a regular expression and its
            replacement, applied in order to the keys (without ``prefix``), as in ``[(r"^head\.fc\.", "fc.")]``; or the
            name of a preset: ``"efficientnet-pytorch"`` converts the names of that package to timm's.
        adapt_input_conv: convert the weight of the first convolution to the model's number of input channels, as timm
            does: from 3 channels to any number, or from 1.

    Returns:
        A report of ``loaded``, ``new``, ``missing``, ``unexpected``, ``mismatched``, ``resampled``, ``adapted``,
        ``replaced`` and ``aside`` keys, of where in the file the weights were, and of blocks that are other ones
        (``differing``) or of which the file does not say what they were (``unchecked``).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the model is on the meta device or lazy, ``skip`` matches none of its keys, or ``rename`` is wrong.
        CheckpointError: the file is damaged, would run code, holds no weights, or does not fit; the message says which
            keys and what to do.

    >>> import tempfile, torch
    >>> file = Path(tempfile.mkdtemp()) / "linear.pth"
    >>> torch.save({"state_dict": {"module.weight": torch.ones(3, 2)}}, file)
    >>> load_checkpoint(nn.Linear(2, 3, bias=False), file).loaded
    ('weight',)
    """
    check_flags(strict=strict, ema=ema, adapt_input_conv=adapt_input_conv)
    model = plain_network(model)
    refuse_without_values(model)
    target = Target(model, skip)
    file = read_file(path)
    saved, arguments, found = find_weights(file, target.needed, ema=ema, prefix=prefix, rename=rename)
    resampled = resampled_tensors(model, saved, target.own if adapt_input_conv else {})
    report = target.compare(saved, resampled, arguments, path=str(file.path), **found)
    fitting = (*report.loaded, *report.replaced)
    if not fitting or (strict and (report.missing or report.unexpected or report.mismatched or report.differing)):
        raise refusal(report, model, target, saved)
    copy_all_([(target.own[key], resampled.get(key, saved[key])) for key in fitting])
    return report


class Target:
    """The tensors of a model that a checkpoint can have values for, by their names without the parts of wrappers.

    Args:
        model: the network.
        skip: globs on keys that keep the model's values.
    """

    def __init__(self, model: nn.Module, skip: str | Iterable[str]) -> None:
        state, replaced = model.state_dict(), replaced_tensors(model)
        self.arguments = {plain_key(path): arguments for path, arguments in arguments_of(state).items()}
        self.state = {plain_key(key): value for key, value in state.items()}
        #: the state dict, and the tensors of the modules that ``replace_`` took out
        self.own = self.state | {key: value for part in replaced for key, value in part.items()} | self.state
        blocks = [set(map(plain_key, keys)) for keys in keys_of_blocks(model).values()]
        self.of_blocks = set[str]().union(*blocks)
        # torch counted no batches before 0.4.1, and such checkpoints are as whole as those that came after.
        counters = [{key} for key in self.own if key.endswith("num_batches_tracked")]
        #: tensors of which a checkpoint has all or none: those of a block, or of a module that a block replaced
        self.groups = [*blocks, *(part.keys() - self.state.keys() for part in replaced), *counters]
        self.skip = [plain_key(glob) for glob in as_list("skip", skip, "globs on keys", single=str)]
        self.kept = matching("skip", self.skip, self.own)
        optional = self.kept.union(*self.groups)
        #: what every checkpoint of the network has
        self.needed = {key: value for key, value in self.own.items() if key not in optional}

    def compare(self, saved: Tensors, resampled: Tensors, arguments: Arguments, **found: Any) -> LoadReport:
        """Compare the tensors of a checkpoint, some of them resampled, with those of the model."""
        own, state = self.own, self.state
        given = {key: value for key, value in saved.items() if not any(fnmatchcase(key, glob) for glob in self.skip)}
        for key in own.keys() & given.keys():
            if (theirs := kind(given[key])) != (ours := kind(own[key])):
                raise CheckpointError(f"{found['path']} has other numbers: {key} is {theirs} there and {ours} here")
        mismatched = shapes_of(own, {**given, **resampled})
        fitting = [key for key in given if key in own and key not in mismatched]
        absent = set[str]().union(*(keys for keys in self.groups if keys.isdisjoint(given)))
        new = self.kept.union(absent & self.of_blocks) - given.keys()
        loaded = tuple(key for key in fitting if key in state)
        blocks = [path for path in self.arguments if any(key.startswith(f"{path}." if path else "") for key in loaded)]
        return LoadReport(
            loaded=loaded,
            new=tuple(key for key in own if key in new),
            missing=tuple(key for key in own if key not in given.keys() | new | absent),
            unexpected=tuple(key for key in given if key not in own),
            mismatched=mismatched,
            resampled=shapes_of(resampled, given),
            replaced=tuple(key for key in fitting if key not in state),
            differing=other_arguments({path: self.arguments[path] for path in blocks}, arguments),
            unchecked=tuple(path or "the block" for path in blocks if path not in arguments),
            **found,
        )


def refusal(report: LoadReport, model: nn.Module, target: Target, saved: Tensors) -> CheckpointError:
    """The error about a checkpoint that does not fit, with what to do."""
    hint = rename_hint(saved, target.needed) if report.missing else ""
    if not (report.loaded or report.replaced):
        what = f"is of another architecture; the model has {shorten(target.own)}; the checkpoint has {shorten(saved)}"
        hint = hint or 'If the network is a part of it, name the part: prefix="backbone."'
        return CheckpointError(f"{report.path} {what}. {hint}")
    what = f"{report.path} does not fit the model {type(model).__name__}, nothing was loaded."
    remedy = [hint] if hint else remedies(report, [plain_key(path) for path, _ in model.named_modules()])
    return CheckpointError(what, *str(report).split("\n")[1:], *remedy)


@torch.no_grad()
def copy_all_(values: Sequence[tuple[Any, Tensor]]) -> None:
    """Give tensors other values, all of them or none."""
    before = [tensor.clone() for tensor, _ in values]
    try:
        for tensor, value in values:
            if hasattr(tensor, "device_mesh"):  # sharded by FSDP2, from what each process has read
                from torch.distributed.tensor import distribute_tensor

                value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.copy_(value)
    except BaseException:  # a tensor that cannot be written, or Ctrl-C between two
        for (tensor, _), value in zip(values, before, strict=True):
            tensor.copy_(value)
        raise


def refuse_without_values(model: nn.Module) -> None:
    """Refuse a model on the meta device, or one that a first forward has still to make."""
    if any(isinstance(value, Tensor) and (is_lazy(value) or value.is_meta) for value in model.state_dict().values()):
        raise ValueError("model has tensors without values: use model.to_empty(device=…), or a first forward if lazy")


def replaced_tensors(model: nn.Module) -> list[dict[str, Tensor]]:
    """The tensors of each module that was replaced, under every name that it had and will have again."""
    kept = {id(model.get_submodule(site)): old.state_dict() for site, old in replaced(model).items()}
    paths = [(path, kept.get(id(module))) for path, module in model.named_modules(remove_duplicate=False)]
    return [{plain_key(f"{path}.{key}"): value for key, value in old.items()} for path, old in paths if old is not None]


def resampled_tensors(model: nn.Module, saved: Tensors, own: Tensors) -> dict[str, Tensor]:
    """Tables of positions for the model's size of map; of ``own`` the first convolution for its input channels, too."""
    found = {}
    for path, term in model.named_modules(remove_duplicate=False):
        for name, here in term.named_parameters(recurse=False) if isinstance(term, PositionEncoding) else ():
            key = plain_key(f"{path}.{name}").removeprefix(".")
            there = saved.get(key, here)
            fits = there.shape == here.shape or kind(there) != kind(here)
            if not fits and (table := term.resize_pos_embed(name, there)) is not None:
                found[key] = table
    convolutions = [key for key, shapes in shapes_of(own, saved).items() if inputs_differ(*shapes)]
    for key in convolutions[:1]:  # as timm's adapt_input_conv
        weight, channels, count = saved[key], saved[key].shape[1], own[key].shape[1]
        repeated = torch.cat([weight] * math.ceil(count / channels), 1)[:, :count] * (channels / count)
        found[key] = weight.sum(1, keepdim=True) if count == 1 else repeated
    return found


def shapes_of(own: Tensors, others: Tensors) -> Shapes:
    """The shapes of tensors in the model and in the checkpoint, where they are not the same."""
    shapes = {key: (tuple(own[key].shape), tuple(others[key].shape)) for key in own if key in others}
    return {key: (ours, theirs) for key, (ours, theirs) in shapes.items() if ours != theirs}


def kind(tensor: Tensor) -> str:
    return "complex" if tensor.is_complex() else "floating-point" if tensor.is_floating_point() else "whole-number"

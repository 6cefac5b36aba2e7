"""Checkpoints into a model: compared in full first, and loaded only if they fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from vision_attn.attention.position import PositionEncoding
from vision_attn.checks import as_list, check_flags
from vision_attn.errors import CheckpointError
from vision_attn.networks.checkpoints.load_report import LoadReport, Shapes, remedies
from vision_attn.networks.checkpoints.specification import arguments_of, other_arguments
from vision_attn.networks.checkpoints.weights import find_weights
from vision_attn.networks.insertion import keys_of_blocks, matching, plain_network, replaced
from vision_attn.networks.safe import read_file
from vision_attn.text import shorten


def load_checkpoint(
    model: nn.Module,
    path: str | Path,
    *,
    strict: bool = True,
    ema: bool = False,
    fresh: str | Iterable[str] = (),
    prefix: str = "",
) -> LoadReport:
    """Load a checkpoint file into a model, before or after blocks are inserted.

    Tables of relative positions that were saved for a map of another size are stretched to the model's. What belongs to
    a module that :func:`vision_attn.replace_` took out goes into that module, for when it comes back.

    Reads ``.safetensors``, and what ``torch.save`` writes (``.pt``, ``.pth``, ``.th``, …) without running any code from
    it. Weights are found at the top of the file or under ``state_dict``, ``model`` and the like, with or without the
    prefixes ``module.`` and ``_orig_mod.`` of parallel and compiled models, or any other that all of them share. A name
    that ends in a hash, as torch.hub's ``resnet18-f37072fd.pth``, must be that of the file.

    Args:
        model: the network; it changes only if the checkpoint fits.
        path: the file, or a folder as Hugging Face and timm write them.
        strict: refuse a checkpoint unless nothing but whole inserted blocks (and ``fresh``) is missing, nothing is left
            over, every shape fits, and no block is said to have had other heads, another pattern, position or scale.
            Otherwise load what fits and report the rest.
        ema: take the moving average of the weights that the file holds.
        fresh: globs on keys that keep the model's values whatever the checkpoint holds: ``["fc.*"]`` for a new head.
        prefix: where the network is only a part of what was saved, the part: with ``"backbone."`` only keys that begin
            with it are read, without it, and all others are left aside.

    Returns:
        A report of ``loaded``, ``new``, ``missing``, ``unexpected``, ``mismatched``, ``resampled``, ``replaced`` and
        ``aside`` keys, of where in the file the weights were, and of blocks that are other ones (``differing``) or of
        which the file does not say what they were (``unchecked``).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the model is on the meta device or lazy, or ``fresh`` matches none of its keys.
        CheckpointError: the file is damaged, would run code, holds no weights, or does not fit; the message says which
            keys and what to do.

    >>> import tempfile, torch
    >>> file = Path(tempfile.mkdtemp()) / "linear.pth"
    >>> torch.save({"state_dict": {"module.weight": torch.ones(3, 2)}}, file)
    >>> load_checkpoint(nn.Linear(2, 3, bias=False), file).loaded
    ('weight',)
    """
    check_flags(strict=strict, ema=ema)
    fresh = tuple(as_list("fresh", fresh, "globs on keys", single=str))
    model = plain_network(model)
    refuse_without_values(model)
    state, kept = model.state_dict(), kept_modules(model)
    # What a checkpoint can hold for the model: its state dict, and what is in the modules that it keeps besides.
    of_kept = {f"{site}.{key}": value for site, module in kept.items() for key, value in module.state_dict().items()}
    own, arguments = state | of_kept | state, arguments_of(state)
    asked = matching("fresh", fresh, own)

    file = read_file(path)
    saved, saved_arguments, found = find_weights(file, own=own, ema=ema, prefix=prefix)
    stretched = stretched_tables(model, saved)
    weights = {**saved, **stretched}
    for key in own.keys() & weights.keys():
        if kind(weights[key]) != kind(own[key]):
            kinds = f"{key} is {kind(weights[key])} there and {kind(own[key])} here"
            raise CheckpointError(f"{file.path} has numbers of another kind than the model: {kinds}")

    given = {key: value for key, value in weights.items() if not any(fnmatchcase(key, glob) for glob in fresh)}
    mismatched = shapes_of(own, {key: value for key, value in given.items() if key in own})
    fitting = [key for key in given if key in own and key not in mismatched]
    # torch counted no batches before 0.4.1, and such checkpoints are as whole as those that came after.
    counters = {key for key in own if key.endswith("num_batches_tracked")}
    # Of a block, or of a module that one replaced, a checkpoint knows nothing or has it whole.
    of_sites = [{key for key in own.keys() - state.keys() if key.startswith(f"{site}.")} for site in kept]
    new = asked.union(*(keys for keys in keys_of_blocks(model).values() if keys.isdisjoint(given))) - counters
    expected = set(given).union(new, counters, *(keys for keys in of_sites if keys.isdisjoint(given)))
    loaded = tuple(key for key in fitting if key in state)
    of_blocks = {path for path in arguments if any(key.startswith(f"{path}." if path else "") for key in loaded)}
    report = LoadReport(
        path=str(file.path),
        loaded=loaded,
        new=tuple(key for key in own if key in new and key not in given),
        missing=tuple(key for key in own if key not in expected),
        unexpected=tuple(key for key in given if key not in own),
        mismatched=mismatched,
        resampled=shapes_of(stretched, {key: saved[key] for key in stretched if key in given}),
        replaced=tuple(key for key in fitting if key not in state),
        differing=other_arguments({path: arguments[path] for path in of_blocks}, saved_arguments),
        unchecked=tuple(path or "the block" for path in arguments if path in of_blocks - saved_arguments.keys()),
        **found,
    )
    if not fitting:
        what = f"is of another architecture; the model has {shorten(own)}; the checkpoint has {shorten(weights)}"
        raise CheckpointError(f'{file.path} {what}. If the network is a part of it, name the part: prefix="backbone."')
    if strict and (report.missing or report.unexpected or report.mismatched or report.differing):
        raise CheckpointError(
            f"{file.path} does not fit the model {type(model).__name__}, nothing was loaded.",
            *str(report).split("\n")[1:],
            *remedies(report, dict(model.named_modules())),
        )
    copy_all_([(own[key], weights[key]) for key in fitting])
    return report


@torch.no_grad()
def copy_all_(values: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Give tensors other values, all of them or none."""
    before = [tensor.clone() for tensor, _ in values]
    try:
        for tensor, value in values:
            tensor.copy_(value)
    except BaseException:  # a tensor that cannot be written, or Ctrl-C between two
        for (tensor, _), value in zip(values, before, strict=True):
            tensor.copy_(value)
        raise


def refuse_without_values(model: nn.Module) -> None:
    """Refuse a model on the meta device, or one that a first forward has still to make."""
    if any(isinstance(value, Tensor) and (is_lazy(value) or value.is_meta) for value in model.state_dict().values()):
        raise ValueError("model has tensors without values: use model.to_empty(device=…), or a first forward if lazy")


def kept_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that were replaced, under every name that they had and will have again."""
    kept = {id(model.get_submodule(site)): module for site, module in replaced(model).items()}
    paths = model.named_modules(remove_duplicate=False)
    return {path: kept[id(module)] for path, module in paths if id(module) in kept}


def stretched_tables(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tables of positions that were saved for another size of map, for the size that the model has them for."""
    tables = {}
    for path, term in model.named_modules(remove_duplicate=False):
        for name, here in term.named_parameters(recurse=False) if isinstance(term, PositionEncoding) else ():
            key = f"{path}.{name}".removeprefix(".")
            saved = weights.get(key, here)
            fits = saved.shape == here.shape or kind(saved) != kind(here)
            if not fits and (table := term.resize_pos_embed(name, saved)) is not None:
                tables[key] = table
    return tables


def shapes_of(own: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> Shapes:
    """The shapes of tensors in the model and in the checkpoint, where they are not the same."""
    shapes = {key: (tuple(own[key].shape), tuple(value.shape)) for key, value in others.items()}
    return {key: (ours, theirs) for key, (ours, theirs) in shapes.items() if ours != theirs}


def kind(tensor: Tensor) -> str:
    return "complex" if tensor.is_complex() else "floating-point" if tensor.is_floating_point() else "whole-number"

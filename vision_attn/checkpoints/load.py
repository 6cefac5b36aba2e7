"""Checkpoints into a model: compared in full first, and loaded only if they fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor, nn

from vision_attn.checkpoints.adapter_file import is_adapter
from vision_attn.checkpoints.locate import find_file
from vision_attn.checkpoints.read import content_of
from vision_attn.checkpoints.report import LoadReport, Shapes, advise
from vision_attn.checkpoints.weights import Weights, find_weights, fitting_prefix
from vision_attn.errors import CheckpointError
from vision_attn.insertion import keys_of_blocks, plain_network, replaced
from vision_attn.position import PositionTerm
from vision_attn.text import shorten

__all__ = ["kind", "load_checkpoint", "refuse_meta"]


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
            over, and every shape fits. Otherwise load what fits and report the rest.
        ema: take the moving average of the weights that the file holds.
        fresh: globs on keys that keep the model's values whatever the checkpoint holds: ``["fc.*"]`` for a new head.
        prefix: where the network is only a part of what was saved, the part: with ``"backbone."`` only keys that begin
            with it are read, without it, and all others are left aside.

    Returns:
        A report of ``loaded``, ``new``, ``missing``, ``unexpected``, ``mismatched``, ``resampled``, ``replaced`` and
        ``aside`` keys, and of where in the file the weights were.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the model is on the meta device, or ``fresh`` matches none of its keys.
        CheckpointError: the file is damaged, would run code, holds no weights, or does not fit; the message says which
            keys and what to do.

    >>> import tempfile, torch
    >>> file = Path(tempfile.mkdtemp()) / "linear.pth"
    >>> torch.save({"state_dict": {"module.weight": torch.ones(3, 2)}}, file)
    >>> load_checkpoint(nn.Linear(2, 3, bias=False), file).loaded
    ('weight',)
    """
    model = plain_network(model)
    refuse_meta(model)
    kept = kept_modules(model)
    own = own_and_kept(model, kept)
    file = find_file(path)
    if is_adapter(file):
        raise CheckpointError(
            f"{file} is an adapter, blocks without their network: load the network's own checkpoint, then "
            "load_adapter(model, path)"
        )
    content, verified = content_of(file)
    found = find_weights(content, str(file), ema=ema, own=own, prefix=prefix)
    fresh = (fresh,) if isinstance(fresh, str) else tuple(fresh)
    stretched = stretched_tables(model, found.tensors)
    resampled = {key: (tuple(value.shape), tuple(found.tensors[key].shape)) for key, value in stretched.items()}
    weights = {**found.tensors, **stretched}
    report = compare(model, found, weights, path=file, fresh=fresh, resampled=resampled, verified=verified)
    if not report.loaded and not report.replaced:
        part, number = fitting_prefix(weights, own)
        remedy = (
            f'; without "{found.prefix}{part}" before them {number} of its names are the model\'s: '
            f'prefix="{found.prefix}{part}" reads these'
        )
        raise CheckpointError(
            f"{file}: no tensor of it fits the model {type(model).__name__}, so it is of another architecture; "
            f"the model has {shorten(own)}; the checkpoint has {shorten(weights)}{remedy if part else ''}"
        )
    if strict and (report.missing or report.unexpected or report.mismatched):
        raise CheckpointError(
            f"{file} does not fit the model {type(model).__name__}, nothing was loaded.",
            *advise(report, dict(model.named_modules())).split("\n"),
        )
    model.load_state_dict({key: weights[key] for key in report.loaded}, strict=False)
    for path, module in kept.items():
        begin = f"{path}."
        module.load_state_dict(
            {key.removeprefix(begin): weights[key] for key in report.replaced if key.startswith(begin)}, strict=False
        )
    return report


def refuse_meta(model: nn.Module) -> None:
    """Refuse a model that has no values."""
    if any(isinstance(value, Tensor) and value.is_meta for value in model.state_dict().values()):
        raise ValueError("model is on the meta device, where nothing can be loaded: model.to_empty(device=…) first")


def kept_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that were replaced, under every name that they had and will have again."""
    kept = {id(model.get_submodule(site)): module for site, module in replaced(model).items()}
    return {
        path: kept[id(module)] for path, module in model.named_modules(remove_duplicate=False) if id(module) in kept
    }


def own_and_kept(model: nn.Module, kept: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """What a checkpoint can hold for a model: its state dict, and what is in the modules that it keeps besides."""
    state = model.state_dict()
    of_kept = {f"{path}.{key}": value for path, module in kept.items() for key, value in module.state_dict().items()}
    return state | {key: value for key, value in of_kept.items() if key not in state}


def compare(
    model: nn.Module,
    found: Weights,
    weights: Mapping[str, Tensor],
    *,
    path: Path,
    fresh: tuple[str, ...],
    resampled: Shapes,
    verified: str,
) -> LoadReport:
    state, kept = model.state_dict(), kept_modules(model)
    own = own_and_kept(model, kept)
    for key, value in weights.items():
        if key in own and kind(value) != kind(own[key]):
            raise CheckpointError(
                f"{path}: {key} is {kind(value)} and the model's is {kind(own[key])}, nothing was loaded: save it as "
                "the model's kind"
            )
    for pattern in fresh:
        if not any(fnmatchcase(key, pattern) for key in own):
            raise ValueError(f"fresh: {pattern!r} matches no key of the model; it has {shorten(own)}")
    asked = {key for key in own if any(fnmatchcase(key, pattern) for pattern in fresh)}
    given = {key: value for key, value in weights.items() if not any(fnmatchcase(key, pattern) for pattern in fresh)}
    # torch counted no batches before 0.4.1, and such checkpoints are as whole as those that came after.
    counters = {key for key in own if key.endswith("num_batches_tracked")}
    # Of a block, or of a module that one replaced, a checkpoint knows nothing or has it whole.
    new = asked.union(*(keys for keys in keys_of_blocks(model).values() if keys.isdisjoint(given))) - counters
    of_kept = [{key for key in own.keys() - state.keys() if key.startswith(f"{path}.")} for path in kept]
    gone = set[str]().union(*(keys for keys in of_kept if keys.isdisjoint(given)))
    shapes = {
        key: (tuple(own[key].shape), tuple(value.shape))
        for key, value in given.items()
        if key in own and own[key].shape != value.shape
    }
    fitting = [key for key in given if key in own and key not in shapes]
    return LoadReport(
        path=str(path),
        entry=found.entry,
        loaded=tuple(key for key in fitting if key in state),
        new=tuple(key for key in own if key not in given and key in new),
        missing=tuple(key for key in own if key not in given and key not in new | counters | gone),
        unexpected=tuple(key for key in given if key not in own),
        mismatched=shapes,
        resampled={key: shapes for key, shapes in resampled.items() if key in given},
        replaced=tuple(key for key in fitting if key not in state),
        others=found.others,
        prefix=found.prefix,
        aside=found.aside,
        verified=verified,
    )


def stretched_tables(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tables of positions that were saved for another size of map, for the size that the model has them for."""
    tables = {}
    for path, term in model.named_modules():
        if not isinstance(term, PositionTerm):
            continue
        for name, here in term.named_parameters(recurse=False):
            key = f"{path}.{name}" if path else name
            saved = weights.get(key)
            if saved is None or saved.shape == here.shape or kind(saved) != kind(here):
                continue
            table = term.resampled(name, saved)
            if table is not None:
                tables[key] = table
    return tables


def kind(tensor: Tensor) -> str:
    """What a tensor must have in common with another to be copied into it without loss of meaning."""
    numbers = "complex" if tensor.is_complex() else "floating-point" if tensor.is_floating_point() else "whole-number"
    form = "quantised" if tensor.is_quantized else "dense" if tensor.layout == torch.strided else "sparse"
    return f"a {form} {numbers} tensor"

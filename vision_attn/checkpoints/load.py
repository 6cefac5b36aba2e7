"""Checkpoints into a model: compared in full first, and loaded only if they fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor, nn

from vision_attn.checkpoints.read import CheckpointError, read_weights, shorten
from vision_attn.checkpoints.write import unwrap
from vision_attn.insertion import CHILD, inserted_keys
from vision_attn.position import PositionTerm

__all__ = ["LoadReport", "load_checkpoint"]


@dataclass(frozen=True)
class LoadReport:
    """What of a checkpoint went into a model, key by key; prints as a summary.

    ``new`` are the model's keys that the checkpoint cannot know, of inserted blocks and of what was left out on
    purpose; ``missing`` are those it should know.
    """

    path: str
    #: which part of the file held the weights; "" when the file is nothing but weights
    entry: str
    loaded: tuple[str, ...]
    new: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    #: key -> (shape in the model, shape in the checkpoint)
    mismatched: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    #: tables of positions that were saved for a map of another size and are loaded stretched to the model's, as above
    resampled: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    def __str__(self) -> str:
        source = f"{self.path} [{self.entry}]" if self.entry else self.path
        lines = [f"{len(self.loaded)} tensors loaded from {source}"]
        for title, keys in (
            ("new by design", self.new),
            ("missing in the checkpoint", self.missing),
            ("unexpected in the checkpoint", self.unexpected),
            ("resampled for the model's size of map", tuple(shapes_of(self.resampled))),
            ("of another shape", tuple(shapes_of(self.mismatched))),
        ):
            if keys:
                lines.append(f"{len(keys)} {title}: {shorten(keys)}")
        return "\n".join(lines)


def shapes_of(keys: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> Iterable[str]:
    for key, (model, checkpoint) in keys.items():
        yield f"{key} (model {model}, checkpoint {checkpoint})"


def load_checkpoint(
    model: nn.Module,
    path: str | Path,
    *,
    strict: bool = True,
    ema: bool = False,
    fresh: str | Iterable[str] = (),
) -> LoadReport:
    """Load a checkpoint file into a model, before or after blocks are inserted.

    Tables of relative positions that were saved for a map of another size are stretched to the model's.

    Reads ``.safetensors``, and what ``torch.save`` writes (``.pt``, ``.pth``, ``.th``, …) without running any code from
    it. Weights are found at the top of the file or under ``state_dict``, ``model`` and the like, with or without the
    prefixes ``module.`` and ``_orig_mod.`` of parallel and compiled models.

    Args:
        model: the network; it changes only if the checkpoint fits.
        path: the file.
        strict: refuse a checkpoint unless nothing but inserted blocks (and ``fresh``) is missing, nothing is left over,
            and every shape fits. Otherwise load what fits and report the rest.
        ema: take the moving average of the weights that the file holds.
        fresh: globs on keys that keep the model's values whatever the checkpoint holds: ``["fc.*"]`` for a new head.

    Returns:
        A report of ``loaded``, ``new``, ``missing``, ``unexpected``, ``mismatched`` and ``resampled`` keys.

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
    path = Path(path)
    model = unwrap(model)
    own = model.state_dict()
    if any(value.is_meta for value in own.values()):
        raise ValueError("model is on the meta device, where nothing can be loaded: model.to_empty(device=…) first")
    entry, weights = read_weights(path, ema=ema, own=own)
    fresh = (fresh,) if isinstance(fresh, str) else tuple(fresh)
    stretched = stretched_tables(model, weights)
    resampled = {key: (tuple(value.shape), tuple(weights[key].shape)) for key, value in stretched.items()}
    weights = {**weights, **stretched}
    report = compare(model, weights, path=path, entry=entry, fresh=fresh, resampled=resampled)
    if not report.loaded:
        raise CheckpointError(
            f"{path}: no tensor of it fits the model {type(model).__name__}, so it is of another architecture; "
            f"the model has {shorten(tuple(model.state_dict()))}; the checkpoint has {shorten(tuple(weights))}"
        )
    if strict and (report.missing or report.unexpected or report.mismatched):
        raise CheckpointError(
            f"{path} does not fit the model {type(model).__name__}, nothing was loaded.\n{advise(report)}"
        )
    model.load_state_dict({key: weights[key] for key in report.loaded}, strict=False)
    return report


def compare(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    *,
    path: Path,
    entry: str,
    fresh: tuple[str, ...],
    resampled: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
) -> LoadReport:
    own = model.state_dict()
    for key, value in weights.items():
        if key in own and kind(value) != kind(own[key]):
            raise CheckpointError(
                f"{path}: {key} is {kind(value)} and the model's is {kind(own[key])}, nothing was loaded: save it as "
                "the model's kind"
            )
    kept = {key for key in own if any(fnmatchcase(key, pattern) for pattern in fresh)}
    for pattern in fresh:
        if not any(fnmatchcase(key, pattern) for key in own):
            raise ValueError(f"fresh: {pattern!r} matches no key of the model; it has {shorten(tuple(own))}")
    given = {key: value for key, value in weights.items() if not any(fnmatchcase(key, pattern) for pattern in fresh)}
    # torch counted no batches before 0.4.1, and such checkpoints are as whole as those that came after.
    counters = {key for key in own if key.endswith("num_batches_tracked")}
    by_design = inserted_keys(model) | kept | counters
    shapes = {
        key: (tuple(own[key].shape), tuple(value.shape))
        for key, value in given.items()
        if key in own and own[key].shape != value.shape
    }
    return LoadReport(
        path=str(path),
        entry=entry,
        loaded=tuple(key for key in given if key in own and key not in shapes),
        new=tuple(key for key in own if key not in given and key in by_design and key not in counters),
        missing=tuple(key for key in own if key not in given and key not in by_design),
        unexpected=tuple(key for key in given if key not in own),
        mismatched=shapes,
        resampled={key: shapes for key, shapes in resampled.items() if key in given},
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


def advise(report: LoadReport) -> str:
    """The report of a checkpoint that does not fit, and what to do about it."""
    lines = str(report).splitlines()[1:]
    sites = dict.fromkeys(key.partition(f".{CHILD}.")[0] for key in report.unexpected if f".{CHILD}." in key)
    heads = {key.rpartition(".")[0] for key, (own, other) in report.mismatched.items() if own[1:] == other[1:]}
    if sites:
        where = ", ".join(map(repr, sites))
        lines.append(f"It was saved with blocks inserted at {where}: insert_(model, names=[{where}]) first.")
    elif any(".position." in f".{key}" for key in report.mismatched):
        lines.append(
            "Its tables of positions are for groups of other proportions or heads of another width: give the block the "
            'feat_size and pattern that it was trained with, or keep new tables with fresh=["*position.*"].'
        )
    elif len(heads) == 1 and len(report.mismatched) <= 2 and not report.missing and not report.unexpected:
        (own, other), *_ = report.mismatched.values()
        head = heads.pop()
        lines.append(
            f"It was trained for {other[0]} classes and the model has {own[0]}: make a model of {other[0]} classes, or "
            f'keep a new head with fresh=["{head}.*"] (on the command line: --reset-head).'
        )
    else:
        lines.append("If it is the right file for this model, load_checkpoint with strict=False loads what fits.")
    return "\n".join(lines)

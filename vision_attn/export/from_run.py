"""The classifier that a run of training made, from a checkpoint of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vision_attn.checkpoints.adapter_file import LARGEST_IMAGES
from vision_attn.checkpoints.read import read_file
from vision_attn.errors import CheckpointError
from vision_attn.export.formats import Classifier
from vision_attn.training.data import Source
from vision_attn.training.network import build_network
from vision_attn.training.settings import Settings
from vision_attn.version import __version__

__all__ = ["open_run"]


def open_run(path: str | Path) -> Classifier:
    """The network of a run of ``vision-attn train``, made again from a checkpoint of it.

    A checkpoint with a moving average of the weights, ``last.pth`` of a run with ``--model-ema``, gives the average,
    as that is what the run evaluated.
    """
    path = Path(path)
    read = read_file(path / "best.pth" if path.is_dir() else path)
    file: Path = read.path
    content: Mapping[str, Any] = read.content
    missing = {"model", "settings", "classes", "input_size", "mean", "std"} - content.keys()
    if missing:
        raise CheckpointError(
            f"{file} is no checkpoint of a run of vision-attn train (it lacks {', '.join(sorted(missing))}): give its "
            "best.pth or last.pth; in Python, export_classifier takes any network"
        )
    try:
        settings = Settings(**Settings.values_in(content["settings"]))
    except ValueError as error:
        raise CheckpointError(
            f"{file} is damaged, or was written by another version of vision_attn than this one, {__version__}, and is "
            f"to be exported with that: {error}"
        ) from error
    again = replace(
        settings,
        weights=str(file),
        weights_ema="model_ema" in content,
        pretrained=False,
        reset_head=False,
        freeze_backbone=False,
        freeze_epochs=0,
        sync_bn=False,
        resume=None,
    )
    classes, (channels, *size) = tuple(content["classes"]), content["input_size"]
    source = Source(str(file), classes, channels, (size[0], size[1]), count=0)
    refuse_larger(replace(again, weights=None, weights_ema=False), source, content, file)
    network = build_network(again, source, lambda line: None, read)
    return Classifier(
        network.model,
        classes,
        (channels, *network.size),
        mean=tuple(content["mean"]),
        std=tuple(content["std"]),
        architecture=settings.model.partition(".")[0],
    )


def refuse_larger(settings: Settings, source: Source, content: Mapping[str, Any], file: Path) -> None:
    """Refuse a file whose settings ask for more than its tensors: the network is made without memory first."""
    with torch.device("meta"):
        named = build_network(settings, source, lambda line: None)
    asked, held = (
        sum(value.numel() for value in state.values()) for state in (named.model.state_dict(), content["model"])
    )
    if asked > 2 * held or math.prod((source.channels, *named.size)) > LARGEST_IMAGES:
        raise CheckpointError(
            f"{file} names a network of {asked:,} numbers on images of {named.size}, and holds {held:,}: it is damaged"
        )

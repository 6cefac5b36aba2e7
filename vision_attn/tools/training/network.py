"""The network that settings describe: made, with its blocks inserted, its weights loaded and its backbone frozen."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import timm
import torch
from timm.layers import convert_sync_batchnorm
from torch import nn

from vision_attn.errors import TrainingError
from vision_attn.networks.checkpoints import load_checkpoint
from vision_attn.networks.checkpoints.specification import from_word
from vision_attn.networks.insertion import freeze_backbone_, insert_, parse_sites, quiet_eval
from vision_attn.networks.models.registry import create_model, get_model_cfg
from vision_attn.tools.training.data import Source, crop_of
from vision_attn.tools.training.settings import Settings

#: Told each line of the log.
Say = Callable[[str], None]


@dataclass(frozen=True)
class Network:
    """A network, and what it was made with."""

    model: nn.Module
    #: timm's configuration of it, with the size, statistics and crop of its images; also ``model.pretrained_cfg``
    config: dict[str, Any] = field(default_factory=dict)
    #: what was inserted where, as a table; empty where nothing was
    report: str = ""
    #: globs on the keys of the classifier where it is a new one, which a frozen backbone has trained too
    new_head: tuple[str, ...] = ()
    #: names of what it tells apart
    classes: tuple[str, ...] = ()


def build_network(settings: Settings, source: Source, say: Say, *, resumed: bool = False) -> Network:
    """Make a network, insert blocks, load weights, freeze.

    A run that is ``resumed`` has its weights from its own state: none are loaded.
    """
    options: dict[str, Any] = {"drop_path_rate": settings.drop_path} if settings.drop_path else {}
    channels, classes = 3 if source.pixels is None else source.pixels.shape[3], len(source.classes)
    options |= {"num_classes": classes, "in_chans": channels, "pretrained": settings.pretrained and not resumed}
    model = create_model(settings.model, **options)
    if settings.sync_bn:  # before blocks hold on to modules, and freezing to norms
        model = convert_sync_batchnorm(model)
    head: tuple[str, ...] = ()
    if settings.reset_head or (settings.pretrained and get_model_cfg(model)["num_classes"] != classes):
        classifier = get_model_cfg(model)["classifier"]
        head = tuple(f"{name}.*" for name in ([classifier] if isinstance(classifier, str) else classifier))
    report = insert_sites(model, settings, configured(model, settings, source)) if settings.insert else ""
    if report:
        say(report)
    if settings.weights and not resumed:
        # After the insertion, so that the file may be one of the plain network or one that holds the blocks.
        say(str(load_checkpoint(model, settings.weights.expanduser(), skip=head)))
    return prepare_network(Network(model, report=report, new_head=head), settings, source, say)


def prepare_network(network: Network, settings: Settings, source: Source, say: Say) -> Network:
    """Ready a network for its images: what they are like is noted in its configuration, one is tried, then freeze."""
    model, classes = network.model, len(source.classes)
    name = (getattr(model, "pretrained_cfg", None) or {}).get("architecture", "")
    if not timm.is_model(name) or model.num_classes != classes:
        raise ValueError(
            f"model must be one that timm makes by name, for the {classes} classes of {source.name}; "
            f"got a {type(model).__name__} for {getattr(model, 'num_classes', '?')}"
        )
    config = vars(model)["pretrained_cfg"] = configured(model, settings, source)
    try:
        with quiet_eval(model):
            model(torch.zeros(1, *config["input_size"], device=next(model.parameters()).device))
    except Exception as error:
        size = "×".join(map(str, config["input_size"][1:]))
        raise ValueError(f"model: {name!r} does not run on images of {size} ({error}): see --img-size") from error
    if settings.freeze_backbone:
        count = freeze_backbone_(model, also_train=network.new_head)
        say(f"the backbone is frozen: {count:,} parameters are trained")
    return replace(network, config=config, classes=source.classes)


def configured(model: nn.Module, settings: Settings, source: Source) -> dict[str, Any]:
    """timm's configuration of a network, with what the settings and the data say of its images."""
    config = {"interpolation": "bilinear", **get_model_cfg(model)}
    pixels, side = source.pixels, settings.img_size
    size, channels = (config["input_size"][1:], 3) if pixels is None else (pixels.shape[1:3], pixels.shape[3])
    config["input_size"] = (channels, *((side, side) if side else size))
    for name in ("mean", "std"):
        values = getattr(settings, name) or config[name]
        if len(values) not in (channels, 3):
            raise ValueError(f"{name} must have a value for each of {channels} channels; got {values}")
        config[name] = tuple(values) if len(values) == channels else (sum(values) / len(values),) * channels
    if crop_of(settings, config) == "pad":  # a small image has nothing around it that a crop could leave out
        config |= {"crop_pct": 1.0, "crop_mode": "center"}
    return config


def block_class(name: str) -> str | Callable[..., nn.Module]:
    """The block that settings name: as ``insert_`` knows it, or any class by ``MODULE:CLASS``."""
    if ":" not in name:
        return name
    module, _, attribute = name.partition(":")
    sys.path.append(os.getcwd())  # as with python -m, but at the end, where it hides nothing
    try:
        found: Callable[..., nn.Module] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"block must be a name or a class, MODULE:CLASS ({error}); got {name!r}") from error
    return found


def refuse_block(error: Exception, name: str) -> None:
    """Say that a block of the user's raised an error, and where, if its code is what did."""
    path = getattr(sys.modules.get(name.partition(":")[0]), "__file__", "")
    if lines := [line for line in traceback.extract_tb(error.__traceback__) if line.filename == path]:
        where = f"line {lines[-1].lineno} of {lines[-1].filename}"
        raise TrainingError(f"block {name} raised {type(error).__name__} ({error}) in {where}") from error


def insert_sites(model: nn.Module, settings: Settings, config: dict[str, Any]) -> str:
    """Insert the block that the settings name, at the sites that they name; the report without its word on loops."""
    options: dict[str, Any] = {}
    for text in settings.block_options:
        name, sign, word = text.partition("=")
        if not (name.isidentifier() and sign) or name in options:
            raise ValueError(f"block_options must be NAME=VALUE, each name once, as position=Rope2d(); got {text!r}")
        options[name] = from_word(word)
    where = {"example_input": (1, *config["input_size"]), "at": settings.at, **parse_sites(settings.insert)}
    try:
        report = insert_(model, block_class(settings.block), **where, **options)
    except TypeError as error:  # of a block that knows no such argument
        raise ValueError(f"block_options do not suit {settings.block}: {error}") from error
    return "\n".join(line for line in str(report).splitlines() if not line.startswith("Create optimizers"))

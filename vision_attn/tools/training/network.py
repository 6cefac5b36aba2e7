"""The network that settings describe: made, with its blocks inserted, its weights loaded and its backbone frozen."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import timm
import torch
from timm.layers import convert_sync_batchnorm
from torch import nn

from vision_attn.attention.blocks import AttentionBlock2d
from vision_attn.networks.checkpoints import load_checkpoint
from vision_attn.networks.checkpoints.specification import from_word
from vision_attn.networks.insertion import freeze_backbone_, insert_, parse_sites, quiet_eval
from vision_attn.networks.models.registry import config_of, create_model
from vision_attn.tools.training.data import Source, crop_of
from vision_attn.tools.training.settings import Settings

__all__ = ["Network", "block_class", "build_network", "prepare_network"]


@dataclass(frozen=True)
class Network:
    """A network, and what it was made with."""

    model: nn.Module
    #: timm's configuration of it, with the size, statistics and crop of its images; also ``model.pretrained_cfg``
    config: dict[str, Any]
    #: what was inserted where, as a table; empty where nothing was
    report: str
    #: globs on the keys of the classifier where it is a new one, which a frozen backbone has trained too
    new_head: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """That of one image in a batch."""
        return (1, *self.config["input_size"])


def build_network(settings: Settings, source: Source, say: Callable[[str], None], *, resumed: bool = False) -> Network:
    """Make a network, insert blocks, load weights, freeze.

    A run that is ``resumed`` has its weights from its own state: none are loaded.
    """
    options = {"drop_path_rate": settings.drop_path} if settings.drop_path else {}
    pretrained = settings.pretrained and not resumed
    classes = len(source.classes)
    model = create_model(
        settings.model, num_classes=classes, in_chans=source.channels, pretrained=pretrained, **options
    )
    if settings.drop_path and not any(getattr(module, "drop_prob", 0) for module in model.modules()):
        raise ValueError(f"drop_path: {settings.model!r} has no branches that timm can drop: leave it out")
    if settings.sync_bn:  # before blocks hold on to modules, and freezing to norms
        model = convert_sync_batchnorm(model)
    head: tuple[str, ...] = ()
    if settings.reset_head or (settings.pretrained and config_of(model)["num_classes"] != classes):
        head = head_keys(model)
    report = ""
    if settings.insert:
        shape = (1, *configured(model, settings, source)["input_size"])
        report = insert_sites(model, settings, shape)
        say(report)
    if settings.weights and not resumed:
        # After the insertion, so that the file may be one of the plain network or one that holds the blocks.
        say(str(load_checkpoint(model, settings.weights.expanduser(), fresh=head)))
    return prepare_network(model, settings, source, say, report=report, head=head)


def prepare_network(
    model: nn.Module,
    settings: Settings,
    source: Source,
    say: Callable[[str], None],
    *,
    report: str = "",
    head: tuple[str, ...] = (),
) -> Network:
    """Ready a network for its images: what they are like is noted in its configuration, one is tried, then freeze."""
    architecture = (getattr(model, "pretrained_cfg", None) or {}).get("architecture", "")
    if not timm.is_model(architecture):
        raise ValueError(
            f"model must be one that timm makes by name, so that what is trained can be saved and loaded; got a "
            f"{type(model).__name__}: register it with timm, or train it in a loop of your own"
        )
    if model.num_classes != len(source.classes):
        raise ValueError(
            f"model has {model.num_classes} classes and {source.name} has {len(source.classes)}: make it with "
            f"num_classes={len(source.classes)}"
        )
    config = configured(model, settings, source)
    model.pretrained_cfg = config
    shape = (1, *config["input_size"])
    try:
        with quiet_eval(model):
            model(torch.zeros(shape, device=next(model.parameters()).device))
    except Exception as error:
        size = "×".join(map(str, shape[2:]))
        raise ValueError(
            f"model: {architecture!r} does not run on images of {size} ({error}): see --img-size"
        ) from error
    if settings.freeze_backbone:
        count = freeze_backbone_(model, also_train=head)
        say(f"the backbone is frozen: {count:,} parameters are trained")
    return Network(model, config, report, head)


def configured(model: nn.Module, settings: Settings, source: Source) -> dict[str, Any]:
    """timm's configuration of a network, with what the settings and the data say of its images."""
    config = dict(config_of(model))
    size = (settings.img_size, settings.img_size) if settings.img_size else source.size or config["input_size"][1:]
    config["input_size"] = (source.channels, *size)
    for name in ("mean", "std"):
        values = getattr(settings, name) or config[name]
        if len(values) != source.channels and source.channels == 1:
            values = (sum(values) / len(values),)
        if len(values) != source.channels:
            raise ValueError(f"{name} must have a value for each of {source.channels} channels; got {values}")
        config[name] = tuple(values)
    if crop_of(settings, config) == "pad":  # a small image has nothing around it that a crop could leave out
        config |= {"crop_pct": 1.0, "crop_mode": "center"}
    config.setdefault("interpolation", "bilinear")
    return config


def head_keys(model: nn.Module) -> tuple[str, ...]:
    """Globs on the keys of the classifier."""
    classifier = config_of(model).get("classifier")
    if not classifier:
        raise ValueError(
            "model: its configuration does not say which module its classifier is, so that it cannot begin anew; "
            "register the model with timm with classifier='…' in its default_cfgs"
        )
    return tuple(f"{head}.*" for head in ([classifier] if isinstance(classifier, str) else classifier))


def block_class(name: str) -> Callable[..., nn.Module]:
    """The block that settings name: ``attention``, or any class by ``MODULE:CLASS``."""
    if name == "attention":
        return AttentionBlock2d
    module, sign, attribute = name.partition(":")
    if not sign:
        raise ValueError(f"block must be attention or a class, MODULE:CLASS; got {name!r}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # as with python -m, but at the end, where it hides nothing
    try:
        found: Callable[..., nn.Module] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"block must be a class that can be imported, MODULE:CLASS ({error}); got {name!r}") from error
    return found


def insert_sites(model: nn.Module, settings: Settings, shape: tuple[int, ...]) -> str:
    """Insert the block that the settings name, at the sites that they name; the report without its word on loops."""
    block, options, sites = block_class(settings.block), block_options(settings), parse_sites(settings.insert)
    try:
        report = insert_(model, block, example_input=shape, at=settings.at, **sites, **options)
    except TypeError as error:  # of a block that knows no such argument
        if not options:
            raise
        raise ValueError(f"block_options do not suit {settings.block}: {error}") from error
    return "\n".join(line for line in str(report).splitlines() if not line.startswith("Make optimizers"))


def block_options(settings: Settings) -> dict[str, Any]:
    """The arguments of the block."""
    options: dict[str, Any] = {}
    for text in settings.block_options:
        name, sign, word = text.partition("=")
        if not (name.isidentifier() and sign) or name in options:
            raise ValueError(f"block_options must be NAME=VALUE, each name once, as position=Rope2d(); got {text!r}")
        try:
            options[name] = from_word(word)
        except ValueError as error:
            raise ValueError(f"block_options: {name}: {error}") from error
    return options

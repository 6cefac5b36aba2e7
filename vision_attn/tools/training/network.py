"""Construction of the network of a run: model, inserted blocks, weights and frozen backbone."""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import timm
import torch
from torch import nn

from vision_attn.errors import CheckpointError
from vision_attn.networks.checkpoints import load_checkpoint_
from vision_attn.networks.checkpoints.folder import load_model
from vision_attn.networks.checkpoints.hub import SCHEME
from vision_attn.networks.checkpoints.option_code import parse_option
from vision_attn.networks.finetuning import freeze_backbone_
from vision_attn.networks.insertion import InsertionReport, insert_
from vision_attn.networks.inspection.network import quiet_eval
from vision_attn.networks.models.registry import create_model, get_model_cfg
from vision_attn.text import Table
from vision_attn.tools.training.data import DataSplit, choose_crop
from vision_attn.tools.training.settings import Settings

Log = Callable[[str], None]


@dataclass(frozen=True)
class NetworkSetup:
    """A network with its configuration and classes; prints as a summary."""

    model: nn.Module
    #: timm's configuration, with the size, statistics and crop of the images; also ``model.pretrained_cfg``
    config: dict[str, Any]
    classes: tuple[str, ...]
    #: report on the inserted blocks
    report: InsertionReport | None = None
    #: patterns of the parameters of a new classifier, which is trained even if the backbone is frozen
    new_head: tuple[str, ...] = ()

    def __str__(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        name, size = self.config["architecture"], "×".join(map(str, self.config["input_size"]))
        lines = [f"{name}: {parameters:,} parameters, input {size}, {len(self.classes)} classes"]
        if self.report is not None:
            lines += [f"{len(self.report.blocks)} inserted block{'s' * (len(self.report.blocks) > 1)}:"]
            lines += [str(part) for part in self.report.parts() if isinstance(part, Table)]
        return "\n".join(lines)


def build_network(
    settings: Settings, source: DataSplit, log: Log, *, model: nn.Module | None = None, resumed: bool = False
) -> NetworkSetup:
    """Create a network, insert blocks and load weights, or use a given network; then freeze the backbone.

    Weights are not loaded for a ``resumed`` run, whose state contains them.
    """
    classes, given = len(source.classes), model is not None
    if model is None:
        name = settings.require_model()
        if settings.pretrained and not resumed:
            log(f"loading the pretrained weights of {name}")
        model = create_network(name, classes, settings, pretrained=settings.pretrained and not resumed)
    name = (getattr(model, "pretrained_cfg", None) or {}).get("architecture", "")
    if not timm.is_model(name) or model.num_classes != classes:
        expected = f"a network of timm.create_model for the {classes} classes of {source.name}"
        got = f"{type(model).__name__} with {getattr(model, 'num_classes', 'unknown')} classes"
        raise ValueError(f"model must be {expected}, got {got}")
    config, report = configure_(model, settings, source), None
    new_head: tuple[str, ...] = ()
    if not given:
        if settings.reset_head or (settings.pretrained and config["num_classes"] != classes):
            classifier = config["classifier"]
            new_head = tuple(f"{name}.*" for name in ([classifier] if isinstance(classifier, str) else classifier))
        if settings.has_blocks:
            report = insert_blocks_(model, settings, config)
        if settings.weights and not resumed:
            # After the insertion, because the file may contain weights of the blocks.
            weights = settings.weights.expanduser()
            log(str(load_checkpoint_(model, weights, skip=new_head, rename=settings.rename or ())))
        for pattern in new_head:
            zero_classifier_(model.get_submodule(pattern.removesuffix(".*")))
    size = config["input_size"]
    try:
        with quiet_eval(model):
            model(torch.zeros(1, *size, device=next(model.parameters()).device))
    except Exception as error:
        sides = "×".join(map(str, size[1:]))
        raise ValueError(f"model {name!r} cannot process images of {sides} ({error}). Use --img-size") from error
    if settings.freeze_backbone:
        count = freeze_backbone_(model, also_train=new_head)
        log(f"frozen backbone: {count:,} parameters are trained")
    return NetworkSetup(model, config, source.classes, report, new_head)


def create_network(name: str, classes: int, settings: Settings, *, pretrained: bool) -> nn.Module:
    """Create a network of timm, or load one of the Hub; name the alternative if weights cannot be downloaded."""
    if name.startswith(SCHEME):
        if not settings.pretrained or settings.drop_path:
            raise ValueError(f"model={name} requires pretrained=True and no drop_path: it is loaded with its weights")
        model: Any = load_model(name).train()
        if model.num_classes != classes:
            model.reset_classifier(classes)
        return model
    options: dict[str, Any] = {"drop_path_rate": settings.drop_path} if settings.drop_path else {}
    try:
        return create_model(name, num_classes=classes, pretrained=pretrained, **options)
    except ValueError as error:
        if not pretrained or not isinstance(error.__cause__, FileNotFoundError):
            raise
        remedy = "Check the connection, or download the file elsewhere and pass it as --weights instead of --pretrained"
        raise CheckpointError(f"the pretrained weights of {name} cannot be downloaded. {remedy}") from error


def configure_(model: nn.Module, settings: Settings, source: DataSplit) -> dict[str, Any]:
    """Set the image size, statistics and crop of the run in the timm configuration of a network, and return it."""
    config = {"interpolation": "bilinear", **get_model_cfg(model)}
    size = config["input_size"][1:] if source.pixels is None else source.pixels.shape[1:3]
    config["input_size"] = (3, *([settings.img_size] * 2 if settings.img_size else size))
    if settings.mean:
        config |= {"mean": settings.mean, "std": settings.std}
    if choose_crop(settings, config) == "pad":  # small images are not cropped for validation
        config |= {"crop_pct": 1.0, "crop_mode": "center"}
    vars(model)["pretrained_cfg"] = config
    return config


def zero_classifier_(classifier: nn.Module) -> None:
    """Set a linear classifier to zero, so that all classes are equally probable before training.

    timm's initialization depends on the network, and the initial loss can be several times that of equal probabilities.

    Source: Dosovitskiy et al., *An Image is Worth 16x16 Words*, 2021, section 3.2, https://arxiv.org/abs/2010.11929
    """
    if isinstance(classifier, nn.Linear | nn.Conv2d):  # layers in front of it would not be trained if all were zero
        for parameter in classifier.parameters():
            nn.init.zeros_(parameter)


def insert_blocks_(model: nn.Module, settings: Settings, config: dict[str, Any]) -> InsertionReport:
    """Insert the block of the settings at their stages or names."""
    options: dict[str, Any] = {"pattern": parse_option(settings.pattern)} if settings.pattern else {}
    for text in settings.block_options:
        name, sign, word = text.partition("=")
        if not (name.isidentifier() and sign) or name in options:
            raise ValueError(f"block_options must be distinct NAME=VALUE pairs such as num_heads=4, got {text!r}")
        options[name] = parse_option(word)
    where: dict[str, Any] = {"stages": settings.stages or None, "names": settings.names or None, "at": settings.at}
    try:
        return insert_(model, block_class(settings.block), example_input=(1, *config["input_size"]), **where, **options)
    except TypeError as error:  # an argument that the block does not accept
        raise ValueError(f"block_options do not match block={settings.block}: {error}") from error


def block_class(name: str) -> str | Callable[..., nn.Module]:
    """Import the class ``MODULE:CLASS``; return any other name unchanged, for ``insert_``."""
    if ":" not in name:
        return name
    sys.path.append(os.getcwd())  # as with python -m, but last, so that no other module is hidden
    try:
        found: Callable[..., nn.Module] = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"block must be a name or a class MODULE:CLASS, got {name!r} ({error})") from error
    return found

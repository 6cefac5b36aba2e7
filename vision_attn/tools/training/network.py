"""The network that the settings of a run describe: made, with its blocks inserted, and loaded."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import SqueezeExcite, convert_sync_batchnorm
from torch import nn

from vision_attn.attention.blocks import AttentionBlock2d
from vision_attn.errors import CheckpointError
from vision_attn.networks.checkpoints import load_checkpoint
from vision_attn.networks.checkpoints.specification import from_word
from vision_attn.networks.insertion import InsertionReport, freeze_backbone_, insert_, parse_sites, quiet_eval
from vision_attn.networks.models.registry import config_of, create_model
from vision_attn.networks.safe import CheckpointFile, read_file
from vision_attn.text import shorten
from vision_attn.tools.comparison.controls import ConvBlock2d, NormBlock2d, SqueezeExciteBlock2d
from vision_attn.tools.training.data import Source
from vision_attn.tools.training.settings import CHOICES, FIELDS, Settings

__all__ = ["BLOCKS", "NOTES", "Network", "add_block", "build_network", "lines_of", "refuse_other_classes"]


#: What a checkpoint of one of our runs says of itself.
NOTES = ("settings", "classes", "input_size", "mean", "std")
#: What is inserted, by the name that settings have for it.
BLOCKS: dict[str, type[nn.Module]] = {
    "attention": AttentionBlock2d,
    "conv": ConvBlock2d,
    "se": SqueezeExciteBlock2d,
    "excite": SqueezeExcite,
    "norm": NormBlock2d,
}


@dataclass(frozen=True)
class Network:
    """A network and what it is fed with."""

    #: with its blocks and weights
    model: nn.Module
    #: rows and columns of its images, in pixels
    size: tuple[int, int]
    #: mean of each channel of its images, of pixels in 0…1
    mean: tuple[float, ...]
    #: standard deviation of each channel
    std: tuple[float, ...]
    #: what was inserted; None where nothing was
    inserted: InsertionReport | None
    #: globs on the keys of the classifier where it is a new one, which a frozen backbone has trained too
    new_head: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """How many there are."""
        return sum(p.numel() for p in self.model.parameters())


def add_block(name: str) -> None:
    """Let settings name a block of one's own, ``MODULE:CLASS``.

    Settings out of files cannot do that by themselves: a file imports nothing.
    """
    if ":" not in name or name in BLOCKS:
        return
    module, _, attribute = name.partition(":")
    sys.path.append(os.getcwd())  # as with python -m, but at the end, where it hides nothing
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"block must be a class that can be imported, MODULE:CLASS ({error}); got {name!r}") from error
    BLOCKS[name] = found
    CHOICES["block"] = (*CHOICES["block"], name)


def build_network(
    settings: Settings,
    source: Source,
    say: Callable[[str], None],
    file: CheckpointFile | None = None,
    resumed: Mapping[str, Any] | None = None,
) -> Network:
    """Make, insert, load, freeze.

    ``file`` is what is read of ``settings.weights``, where it is read already. A run that is ``resumed`` has its
    weights from its checkpoint, and begins from no other.
    """
    if file is None and settings.weights and resumed is None:
        file = read_file(settings.weights)
    pretrained = settings.pretrained and resumed is None
    model = create_model(
        settings.model,
        num_classes=len(source.classes),
        in_chans=source.channels,
        pretrained=pretrained,
        **({"drop_path_rate": settings.drop_path} if settings.drop_path else {}),
    )
    if settings.drop_path and not any(getattr(module, "drop_prob", 0) for module in model.modules()):
        raise ValueError(f"drop_path: {settings.model!r} has no branches that timm can drop: leave it out")
    if settings.sync_bn:  # before blocks hold on to modules, and freezing to norms
        model = convert_sync_batchnorm(model)
    notes = {**config_of(model), **(notes_of(file, settings, source) if file else resumed or {})}
    size = (settings.img_size, settings.img_size) if settings.img_size else source.size
    size = size or tuple(notes["input_size"][1:])
    inserted = None
    if settings.insert:
        inserted = insert_sites(model, settings, (1, source.channels, *size))
        say(lines_of(inserted))
    if file:
        # After the insertion, so that the file may be one of the plain network or one that holds the blocks.
        fresh = head_keys(model) if settings.reset_head else ()
        say(str(load_checkpoint(model, file.path, ema=settings.weights_ema, fresh=fresh)))
    try_out(model, settings.model, (1, source.channels, *size))
    head = new_head(model, settings, len(source.classes))
    if settings.freeze_backbone:
        count = freeze_backbone_(model, also_train=head)
        say(f"the backbone is frozen: {count:,} parameters are trained")
    return Network(
        model,
        size,
        mean=settings.mean or tuple(notes["mean"]),
        std=settings.std or tuple(notes["std"]),
        inserted=inserted,
        new_head=head,
    )


def lines_of(inserted: InsertionReport) -> str:
    """The report, without its word on optimisers: a run makes its own afterwards."""
    return "\n".join(line for line in str(inserted).splitlines() if not line.startswith("Make optimizers"))


def head_keys(model: nn.Module) -> tuple[str, ...]:
    """Globs on the keys of the classifier."""
    classifier = config_of(model)["classifier"]
    if not classifier:
        raise ValueError(
            "model: its configuration does not say which module its classifier is, so that it cannot begin anew; "
            "register the model with timm with classifier='…' in its default_cfgs"
        )
    return tuple(f"{head}.*" for head in ([classifier] if isinstance(classifier, str) else classifier))


def new_head(model: nn.Module, settings: Settings, classes: int) -> tuple[str, ...]:
    """The classifier's keys where it begins anew: on request, or with pretrained weights for other classes."""
    made_anew = settings.pretrained and config_of(model)["num_classes"] != classes
    return head_keys(model) if settings.reset_head or made_anew else ()


def notes_of(file: CheckpointFile, settings: Settings, source: Source) -> dict[str, Any]:
    """What a checkpoint of one of our runs says of its images, if the file is one.

    Its classes must be the data's, and its blocks, which are not in the shapes of its weights, the same as here.
    """
    if not all(key in file.content for key in NOTES):
        return {}
    notes: dict[str, Any] = {key: file.content[key] for key in NOTES}
    try:
        others = settings.values_in(notes["settings"], known_alone=True)
        differing = settings.differences(notes["settings"])
    except ValueError as error:
        raise CheckpointError(f"{file.path}: {error}: it is damaged, or of another version") from error
    for name in ("at", "block", "num_heads", "block_options"):
        if settings.insert and others.get("insert") and name in differing:
            given, word = others.get(name), f"--{name.replace('_', '-')}"
            words = " ".join(map(shlex.quote, given)) if isinstance(given, tuple) else given
            raise CheckpointError(
                f"{file.path} has other blocks than are to be inserted: they were made with "
                + (f"{word} {words}" if words else f"no {word}")
            )
    if not settings.reset_head:
        refuse_other_classes(str(file.path), notes["classes"], source)
    return notes


def refuse_other_classes(path: str, classes: Sequence[str], source: Source) -> None:
    """Refuse data with other classes than a network was trained for."""
    if list(classes) != list(source.classes):
        raise CheckpointError(
            f"{path} was trained for the classes {shorten(classes)}; the data has {shorten(source.classes)}: name the "
            "folders alike, or begin a new classifier with --reset-head"
        )


def try_out(model: nn.Module, name: str, shape: tuple[int, ...]) -> None:
    """One image through the network, before anything long begins."""
    try:
        with quiet_eval(model):
            model(torch.zeros(shape))
    except Exception as error:
        size = "×".join(map(str, shape[2:]))
        raise ValueError(f"model: {name!r} does not run on images of {size} ({error}): see --img-size") from error


def insert_sites(model: nn.Module, settings: Settings, shape: tuple[int, ...]) -> InsertionReport:
    """The block that the settings name, at the sites that they name."""
    options = block_options(settings)
    try:
        return insert_(
            model,
            BLOCKS[settings.block],
            example_input=shape,
            at=settings.at,
            **parse_sites(settings.insert),
            **options,
        )
    except TypeError as error:  # of a block that knows no such argument
        if not settings.block_options:
            raise
        raise ValueError(f"block_options do not suit {BLOCKS[settings.block].__name__}: {error}") from error


def block_options(settings: Settings) -> dict[str, Any]:
    """The arguments of the block."""
    options: dict[str, Any] = {}
    if settings.block == "attention":
        options = {"num_heads": settings.num_heads, "impl": settings.impl}
    for text in settings.block_options:
        name, sign, word = text.partition("=")
        if not (name.isidentifier() and sign):
            raise ValueError(f"block_options must be NAME=VALUE, such as position=Rope2d(); got {text!r}")
        if name in options:
            raise ValueError(f"block_options: {name} is given twice, or by a setting of its own; got {text!r}")
        try:
            options[name] = from_word(word)
        except ValueError as error:
            raise ValueError(f"block_options: {name}: {error}") from error
    if settings.num_heads == FIELDS["num_heads"].default:  # left out, they are fitted to the channels
        options.pop("num_heads", None)
    return options

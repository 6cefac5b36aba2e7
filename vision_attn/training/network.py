"""The network that the settings of a run describe: made, with its blocks inserted, and loaded."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from vision_attn.blocks import AttentionBlock2d, ConvBlock2d
from vision_attn.checkpoints import load_checkpoint
from vision_attn.insertion import InsertionReport, insert_
from vision_attn.models.registry import config_of, create_model
from vision_attn.training.data import Source
from vision_attn.training.settings import Settings

__all__ = ["Network", "build_network"]


@dataclass(frozen=True)
class Network:
    """A network and what it is fed with."""

    model: nn.Module
    #: rows and columns of its images, in pixels
    size: tuple[int, int]
    #: what was inserted; None where nothing was
    inserted: InsertionReport | None

    @property
    def parameters(self) -> int:
        """How many there are."""
        return sum(p.numel() for p in self.model.parameters())


def build_network(settings: Settings, source: Source, say: Callable[[str], None]) -> Network:
    """Make, insert, load.

    Args:
        settings: ``model``, ``pretrained``, ``img_size``, ``insert`` and ``weights`` with their options are used.
        source: the data it is for.
        say: told what was done.

    Raises:
        ValueError: the model, a site or a block option does not exist.
        CheckpointError: the weights cannot be read or do not fit.
    """
    model = create_model(
        settings.model, num_classes=len(source.classes), in_chans=source.channels, pretrained=settings.pretrained
    )
    size = (settings.img_size, settings.img_size) if settings.img_size else source.size
    size = size or tuple(config_of(model)["input_size"][1:])
    inserted = None
    if settings.insert:
        inserted = insert_sites(model, settings, (1, source.channels, *size))
        say(str(inserted))
    if settings.weights:
        # After the insertion, so that the file may be one of the plain network or one that holds the blocks.
        classifier = config_of(model)["classifier"]
        heads = [classifier] if isinstance(classifier, str) else list(classifier)
        fresh = [f"{head}.*" for head in heads] if settings.reset_head else []
        say(str(load_checkpoint(model, settings.weights, ema=settings.weights_ema, fresh=fresh)))
    return Network(model, size, inserted)


def insert_sites(model: nn.Module, settings: Settings, shape: tuple[int, ...]) -> InsertionReport:
    """Sites as they are named on the command line: whole numbers are stages, anything else globs on module paths."""
    stages = [int(site) for site in settings.insert if re.fullmatch(r"-?\d+", site)]
    names = [site for site in settings.insert if not re.fullmatch(r"-?\d+", site)]
    if stages and names:
        raise ValueError(f"insert takes stages by index or modules by name, not both; got {' '.join(settings.insert)}")
    attention: dict[str, Any] = {"num_heads": settings.num_heads, "impl": settings.impl}
    return insert_(
        model,
        ConvBlock2d if settings.block == "conv" else AttentionBlock2d,
        stages=stages or None,
        names=names or None,
        example_input=shape,
        **({} if settings.block == "conv" else attention),
    )

"""Models by name, and where the weights that come with this library lie."""

from __future__ import annotations

import difflib
from pathlib import Path

import timm
from timm.models import get_arch_pretrained_cfgs
from torch import nn

import vision_attn

__all__ = ["create_model", "weights_folder"]


def weights_folder() -> Path:
    """The folder of the library's own checkpoints: inside an installed package, beside it in a checkout."""
    package = Path(vision_attn.__file__).parent
    installed = package / "weights"
    return installed if installed.is_dir() else package.parent / "weights"


def create_model(name: str, *, num_classes: int, in_chans: int = 3, pretrained: bool = False) -> nn.Module:
    """A network by a name that timm knows, ours among them.

    A name without a tag, ``resnet20``, that has a configuration for this number of classes, ``resnet20.cifar100``,
    takes that one, and with it the mean and standard deviation that such checkpoints were trained with.

    Args:
        name: ``"resnet20"``, ``"resnet20.cifar100"``, ``"resnet50"``, …
        num_classes: classes.
        in_chans: channels of the images.
        pretrained: load the weights that come with the name.

    Raises:
        ValueError: no such model, or no weights come with it.

    >>> create_model("resnet20", num_classes=100).pretrained_cfg["tag"]
    'cifar100'
    """
    base, _, tag = name.partition(".")
    if not timm.is_model(base):
        close = difflib.get_close_matches(base, timm.list_models(), n=5)
        hint = f"close to it: {', '.join(close)}" if close else "timm.list_models() names them all"
        raise ValueError(f"model: there is no {name!r}; {hint}")
    configurations = get_arch_pretrained_cfgs(base)
    if not tag:
        name = next((full for full, cfg in configurations.items() if cfg.num_classes == num_classes), name)
    elif name not in configurations:
        raise ValueError(f"model: {base!r} has no tag {tag!r}; it has {', '.join(configurations) or 'none'}")
    try:
        model = timm.create_model(name, pretrained=pretrained, num_classes=num_classes, in_chans=in_chans)
    except RuntimeError as error:
        raise ValueError(f"model: {name!r} cannot be made ({error})") from error
    assert isinstance(model, nn.Module)
    return model

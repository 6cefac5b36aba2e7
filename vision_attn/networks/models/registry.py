"""Models by name, as timm knows them: made with errors that help, and registered."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import timm
from timm.models import build_model_with_cfg, get_arch_pretrained_cfgs, register_model
from torch import nn

__all__ = ["config_of", "create_model", "registered", "weights_file", "weights_folder"]

Model = TypeVar("Model", bound=nn.Module)


def create_model(
    name: str, *, num_classes: int, in_chans: int = 3, pretrained: bool = False, **options: Any
) -> nn.Module:
    """A network by a name that timm knows, ours among them.

    A name without a tag, ``resnet20``, that has a configuration for this number of classes, ``resnet20.cifar100``,
    takes that one, and with it the mean and standard deviation that such checkpoints were trained with.

    Args:
        name: ``"resnet20"``, ``"resnet20.cifar100"``, ``"resnet50"``, …
        num_classes: classes.
        in_chans: channels of the images.
        pretrained: whether the weights that come with the name are loaded.
        **options: further arguments of the network, such as ``drop_path_rate=0.1``.

    Raises:
        ValueError: there is no such model or tag, no weights come with it, or it cannot be made.

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
        model = timm.create_model(name, pretrained=pretrained, num_classes=num_classes, in_chans=in_chans, **options)
    except TypeError as error:
        if not any(option in str(error) for option in options):
            raise
        raise ValueError(f"model: {name!r} takes no {' or '.join(options)} ({error})") from error
    except (RuntimeError, FileNotFoundError) as error:
        reason = str(error) or "its weights are not where they belong"
        raise ValueError(f"model: {name!r} cannot be made ({reason})") from error
    assert isinstance(model, nn.Module)
    return model


def registered(
    room: str, name: str, about: str, network: Callable[..., Model], features: Mapping[str, Any] | None, **options: Any
) -> Callable[..., Model]:
    """A function that makes a network, known to timm by its name; its configurations are ``default_cfgs`` of its room.

    Args:
        room: ``__name__`` of the file that the function is in.
        name: of the function and the network.
        about: its docstring.
        network: makes the network.
        features: how timm takes features from it; None if ``network`` takes ``features_only`` itself.
        **options: for ``network``, or for timm, which loads what is ``pretrained``.
    """

    def create(pretrained: bool = False, **kwargs: Any) -> Model:
        if pretrained and not (kwargs.get("pretrained_cfg") or kwargs.get("pretrained_cfg_overlay")):
            # Weights are asked for and no tag: the first that has some, be it the default one or not.
            configurations = get_arch_pretrained_cfgs(name).values()
            kwargs["pretrained_cfg"] = next((cfg.tag for cfg in configurations if cfg.has_weights), None)
        make, how = network, {**options, "feature_cfg": dict(features or {}), **kwargs}
        if features is None and how.pop("features_only", False):  # as timm makes its EfficientNets
            make = partial(network, features_only=True)
            how |= {"pretrained_strict": False, "kwargs_filter": ("num_classes", "global_pool")}
        model: Model = build_model_with_cfg(make, name, pretrained, **how)
        return model

    create.__module__, create.__name__, create.__qualname__, create.__doc__ = room, name, name, about
    return register_model(create)


def weights_folder() -> Path:
    """The folder of the library's own checkpoints: inside an installed package, beside it in a checkout."""
    package = Path(__file__).parents[2]
    installed = package / "weights"
    return installed if installed.is_dir() else package.parent / "weights"


def weights_file(name: str) -> str:
    """The path of a network's weights, as timm's configurations have it."""
    return str(weights_folder() / name / "model.safetensors")


def config_of(model: nn.Module) -> dict[str, Any]:
    """The configuration that timm has of a model: ``input_size``, ``mean``, ``std``, ``classifier`` and so on."""
    return vars(model)["pretrained_cfg"]

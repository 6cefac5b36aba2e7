"""Models by name, as timm knows them: made with errors that help, registered, and saved as folders that it reads."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import timm
import torch
from timm.models import build_model_with_cfg, get_arch_pretrained_cfgs, register_model
from torch import nn

from vision_attn.checkpoints import save_weights, write_atomically
from vision_attn.insertion import inserted, plain_network
from vision_attn.text import shorten

__all__ = ["config_of", "create_model", "registered", "save_model", "weights_file", "weights_folder"]

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
    package = Path(__file__).parents[1]
    installed = package / "weights"
    return installed if installed.is_dir() else package.parent / "weights"


def weights_file(name: str) -> str:
    """The path of a network's weights, as timm's configurations have it."""
    return str(weights_folder() / name / "model.safetensors")


def config_of(model: nn.Module) -> dict[str, Any]:
    """The configuration that timm has of a model: ``input_size``, ``mean``, ``std``, ``classifier`` and so on."""
    return vars(model)["pretrained_cfg"]


def save_model(
    model: nn.Module, folder: str | Path, *, architecture: str, model_args: Mapping[str, Any] | None = None
) -> Path:
    """Write a network as a folder that ``timm.create_model("local-dir:FOLDER", pretrained=True)`` reads."""
    if not timm.is_model(architecture):
        raise ValueError(f"architecture must be a name that timm knows; got {architecture!r}")
    model = plain_network(model)
    refuse_another(model, architecture, model_args or {})
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    kept = ("input_size", "mean", "std", "num_classes", "first_conv", "classifier", "interpolation", "crop_pct")
    config = {
        "architecture": architecture,
        "num_classes": model.num_classes,
        "num_features": model.num_features,
        "pretrained_cfg": {key: value for key, value in config_of(model).items() if key in kept},
    }
    if model_args:
        config["model_args"] = dict(model_args)
    save_weights(model, folder / "model.safetensors")
    write_atomically(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())
    return folder


def refuse_another(model: nn.Module, architecture: str, model_args: Mapping[str, Any]) -> None:
    differing = differences(model, architecture, model_args)
    if not differing:
        return
    attention = f"{architecture}_attention"
    if not inserted(model):
        remedy = "give the architecture that it is, and in model_args what it was made with"
    elif timm.is_model(attention) and not differences(model, attention, model_args):
        remedy = f"blocks are inserted in it: save_model(…, architecture={attention!r})"
    else:
        remedy = "blocks are inserted in it: save_adapter(model, path) writes its blocks, without the network"
    raise ValueError(f"architecture: {architecture!r} makes another network: {shorten(differing)}; {remedy}")


def differences(model: nn.Module, architecture: str, model_args: Mapping[str, Any]) -> list[str]:
    """Names and shapes of a model that are not those of the network that timm makes."""
    with torch.device("meta"):
        other = timm.create_model(architecture, **{"num_classes": model.num_classes, **model_args})
    ours, theirs = (
        {key: tuple(value.shape) for key, value in network.state_dict().items()} for network in (model, other)
    )
    return [
        f"{key} {ours[key]}, made {theirs[key]}" if key in ours and key in theirs else key
        for key in {**ours, **theirs}
        if ours.get(key) != theirs.get(key)
    ]

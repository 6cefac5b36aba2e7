"""What our networks share: stages and a head as timm has them, and the names under which timm knows the networks."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import timm
from timm.layers import create_classifier
from timm.models import build_model_with_cfg, checkpoint_seq, get_arch_pretrained_cfgs, register_model
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


class StagedNetwork(nn.Module):
    """Stages, pooled over the map and read out linearly, as timm's networks are.

    A network makes its stages, which ``feature_info`` names, then its head by :meth:`add_head`. What comes before the
    stages is its :meth:`stem`, what comes after them its :meth:`norm_features`.
    """

    #: the name of the classifier, which differs between families of checkpoints
    classifier_name = "fc"
    global_pool: nn.Module

    def __init__(self, widths: Sequence[int], reductions: Sequence[int], stage: str) -> None:
        super().__init__()
        self.num_features: int = widths[-1]
        self.grad_checkpointing: bool = False
        self.feature_info: list[dict[str, Any]] = [
            {"num_chs": width, "reduction": reduction, "module": f"{stage}{number}"}
            for number, (width, reduction) in enumerate(zip(widths, reductions, strict=True), start=1)
        ]

    def add_head(self, num_classes: int, drop_rate: float = 0.0, global_pool: str = "avg") -> None:
        """Pooling, dropout and a classifier.

        Args:
            num_classes: classes; 0 leaves the pooled features.
            drop_rate: probability of dropping a feature before the classifier, in training.
            global_pool: ``"avg"``, ``"max"``, ``"avgmax"``, ``"catavgmax"``, or ``""`` to classify every position of
                the map.
        """
        self.drop_rate = drop_rate
        self.head_drop: nn.Dropout = nn.Dropout(drop_rate)
        self.reset_classifier(num_classes, global_pool)

    def stem(self, x: Tensor) -> Tensor:
        """What comes before the stages."""
        return x

    def norm_features(self, x: Tensor) -> Tensor:
        """What comes after the stages: ``(b, num_features, h, w)``."""
        return x

    def get_classifier(self) -> nn.Module:
        """The classifier; an identity where there is none."""
        return self.get_submodule(self.classifier_name)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Begin with a new classifier, and with other pooling: ``"avg"``, ``"max"``, ``"avgmax"``, … as timm has it."""
        if global_pool is None:
            global_pool = str(self.global_pool.pool_type)
        weight = next(self.parameters())
        self.num_classes = num_classes
        pool, classifier = create_classifier(
            self.num_features, num_classes, pool_type=global_pool, use_conv=not global_pool
        )
        self.global_pool = pool.train(self.training)
        self.add_module(self.classifier_name, classifier.to(weight).train(self.training))
        self.head_hidden_size: int = self.num_features * pool.feat_mult()

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute what is inside of the stages anew in the backward pass, instead of keeping it."""
        self.grad_checkpointing = enable

    def forward_features(self, x: Tensor) -> Tensor:
        """The map that the head is given, ``(b, num_features, h, w)``, of images ``(b, in_chans, h, w)``."""
        x = self.stem(x)
        for entry in self.feature_info:
            stage = self.get_submodule(entry["module"])
            x = checkpoint_seq([stage], x) if self.grad_checkpointing else stage(x)
        return self.norm_features(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """What the network gives for the map of :meth:`forward_features`; ``pre_logits`` leaves out the classifier."""
        x = self.head_drop(self.global_pool(x))
        return x if pre_logits else self.get_classifier()(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def own_cfg(
    num_classes: int, input_size: tuple[int, int, int], reduction: int, first_conv: str, **other: Any
) -> dict[str, object]:
    """The configuration of a network of ours as timm has it: for images of one size, seen as a whole."""
    _, height, width = input_size
    sizes = {"input_size": input_size, "pool_size": (height // reduction, width // reduction), "crop_pct": 1.0}
    names = {"interpolation": "bilinear", "first_conv": first_conv, "classifier": "fc"}
    return {"num_classes": num_classes, **sizes, **names, **other}


def no_such_model(name: str, base: str, known: Sequence[str]) -> ValueError:
    close = ", ".join(difflib.get_close_matches(base, known, n=5))
    return ValueError(f"model: there is no {name!r}; close to it: {close or 'none'}")


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
        raise no_such_model(name, base, timm.list_models())
    configurations = get_arch_pretrained_cfgs(base)
    if not tag:
        name = next((full for full, cfg in configurations.items() if cfg.num_classes == num_classes), name)
    elif name not in configurations:
        raise ValueError(f"model: {base!r} has no tag {tag!r}; it has {', '.join(configurations) or 'none'}")
    try:
        return timm.create_model(name, pretrained=pretrained, num_classes=num_classes, in_chans=in_chans, **options)
    except TypeError as error:
        if not any(option in str(error) for option in options):
            raise
        raise ValueError(f"model: {name!r} takes no {' or '.join(options)} ({error})") from error
    except (RuntimeError, FileNotFoundError) as error:
        raise ValueError(f"model: {name!r} cannot be made ({str(error) or 'its weights are not there'})") from error


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

    The function takes ``device`` and ``dtype``, to which the finished network is brought.
    """

    def create(pretrained: bool = False, **kwargs: Any) -> Model:
        if pretrained and not (kwargs.get("pretrained_cfg") or kwargs.get("pretrained_cfg_overlay")):
            # Weights are asked for and no tag: the first that has some, be it the default one or not.
            configurations = get_arch_pretrained_cfgs(name).values()
            kwargs["pretrained_cfg"] = next((cfg.tag for cfg in configurations if cfg.has_weights), None)
        place = {key: kwargs.pop(key) for key in ("device", "dtype") if key in kwargs}
        make, how = network, {**options, "feature_cfg": dict(features or {}), **kwargs}
        if features is None and how.pop("features_only", False):  # as timm makes its EfficientNets
            make = partial(network, features_only=True)
            how |= {"pretrained_strict": False, "kwargs_filter": ("num_classes", "global_pool")}
        model: Model = build_model_with_cfg(make, name, pretrained, **how)
        return model.to(**place)

    create.__module__, create.__name__, create.__qualname__, create.__doc__ = room, name, name, about
    return register_model(create)


def weights_folder() -> Path:
    """The folder of the library's own checkpoints: inside an installed package, beside it in a checkout."""
    package = Path(__file__).parents[2]
    return (package if (package / "weights").is_dir() else package.parent) / "weights"


def weights_file(name: str) -> str:
    """The path of a network's weights, as timm's configurations have it."""
    return str(weights_folder() / name / "model.safetensors")


def config_of(model: nn.Module) -> dict[str, Any]:
    """The configuration that timm has of a model: ``input_size``, ``mean``, ``std``, ``classifier`` and so on."""
    return vars(model)["pretrained_cfg"]

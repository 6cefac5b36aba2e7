"""Base class of the networks of this library, and their registration with timm."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import timm
from huggingface_hub.errors import LocalEntryNotFoundError
from timm.layers import create_classifier
from timm.models import build_model_with_cfg, checkpoint_seq, get_arch_pretrained_cfgs, register_model
from torch import Tensor, nn

from vision_attn.errors import CheckpointError
from vision_attn.text import did_you_mean

Model = TypeVar("Model", bound=nn.Module)


class StagedNetwork(nn.Module):
    """Stages, global pooling and a linear classifier, with the interface of timm's networks.

    A subclass creates the stages that ``feature_info`` names, and then the head with :meth:`add_head`. It overrides
    :meth:`forward_features` if it has layers before the stages.
    """

    #: name of the classifier, which must match the checkpoints of the network
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
        """Add pooling, dropout and a classifier.

        Args:
            num_classes: number of classes; 0 returns the pooled features.
            drop_rate: dropout rate before the classifier.
            global_pool: ``"avg"``, ``"max"``, ``"avgmax"``, ``"catavgmax"``, or ``""`` to classify every position of
                the feature map.
        """
        self.drop_rate = drop_rate
        self.head_drop: nn.Dropout = nn.Dropout(drop_rate)
        self.reset_classifier(num_classes, global_pool)

    def get_classifier(self) -> nn.Module:
        """Return the classifier; an identity if there is none."""
        return self.get_submodule(self.classifier_name)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Create a new classifier, and new pooling if ``global_pool`` is not None."""
        if global_pool is None:
            global_pool = str(self.global_pool.pool_type)
        weight = next(self.parameters())
        self.num_classes = num_classes
        pool, classifier = create_classifier(self.num_features, num_classes, global_pool, use_conv=not global_pool)
        self.global_pool = pool.train(self.training)
        self.add_module(self.classifier_name, classifier.to(weight).train(self.training))
        self.head_hidden_size: int = self.num_features * pool.feat_mult()

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations inside the stages in the backward pass instead of storing them."""
        self.grad_checkpointing = enable

    def forward_features(self, x: Tensor) -> Tensor:
        """Return features ``(b, num_features, h, w)`` of images ``(b, in_chans, h, w)``."""
        for entry in self.feature_info:
            stage = self.get_submodule(entry["module"])
            x = checkpoint_seq([stage], x) if self.grad_checkpointing else stage(x)
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return logits of features; ``pre_logits=True`` omits the classifier."""
        x = self.head_drop(self.global_pool(x))
        return x if pre_logits else self.get_classifier()(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def create_model(
    name: str, *, num_classes: int | None = None, in_chans: int = 3, pretrained: bool = False, **options: Any
) -> nn.Module:
    """Create a network by its name in timm.

    For a name without a tag, such as ``resnet20``, the configuration with the same number of classes is used if it
    exists (``resnet20.cifar100``). It contains the mean and standard deviation for checkpoints of that data set.

    Args:
        name: name of the network, such as ``"resnet20"``, ``"resnet20.cifar100"`` or ``"resnet50"``.
        num_classes: number of classes; by default, from the configuration.
        in_chans: number of image channels.
        pretrained: load pretrained weights.
        **options: further arguments of the network, such as ``drop_path_rate=0.1``.

    Raises:
        ValueError: the model, tag or weights do not exist, or the network cannot be created.
        CheckpointError: the weights cannot be downloaded.

    >>> model = create_model("resnet20", num_classes=100, in_chans=1)
    >>> model.pretrained_cfg["tag"], model.conv1.in_channels
    ('cifar100', 1)
    """
    base, _, tag = name.partition(".")
    if not timm.is_model(base):
        raise ValueError(f"model: {name!r} does not exist.{did_you_mean(base, timm.list_models())}")
    configurations = get_arch_pretrained_cfgs(base)
    if not tag:
        name = next((full for full, cfg in configurations.items() if cfg.num_classes == num_classes), name)
    try:
        return timm.create_model(name, pretrained=pretrained, num_classes=num_classes, in_chans=in_chans, **options)
    except LocalEntryNotFoundError as error:
        remedy = "Check the connection, or load a downloaded file (--weights on the command line)"
        raise CheckpointError(f"the pretrained weights of {name} cannot be downloaded. {remedy}") from error
    except (FileNotFoundError, RuntimeError, TypeError) as error:
        raise ValueError(f"model: {name!r} cannot be created ({str(error) or 'its weights are missing'})") from error


def register_network(
    name: str, doc: str, network: type[Model], out_indices: Sequence[int] = (0, 1, 2), **options: Any
) -> Callable[..., Model]:
    """Register a network with timm, and return the function that creates it.

    The function accepts ``device`` and ``dtype``, and moves the created network to them.

    Args:
        name: name of the network and of the function.
        doc: docstring of the function.
        network: class of the network, in a module whose ``default_cfgs`` contains the configurations of the network.
        out_indices: the stages that ``features_only=True`` returns.
        **options: arguments of ``network`` or of timm's ``build_model_with_cfg``.
    """

    def create(pretrained: bool = False, **kwargs: Any) -> Model:
        target = {key: kwargs.pop(key) for key in ("device", "dtype") if key in kwargs}
        merged = {"feature_cfg": {"out_indices": out_indices}, **options, **kwargs}
        model: Model = build_model_with_cfg(network, name, pretrained, **merged)
        return model.to(**target)

    create.__module__, create.__name__, create.__qualname__, create.__doc__ = network.__module__, name, name, doc
    return register_model(create)


def weights_folder() -> Path:
    """Return the folder of the pretrained weights, inside the installed package or next to it in a checkout."""
    package = Path(__file__).parents[2]
    return (package if (package / "weights").is_dir() else package.parent) / "weights"

"""What the networks for CIFAR's 32×32 images share: three stages, the head, and how timm handles them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["CifarNetwork", "cifar_cfg"]


class CifarNetwork(nn.Module):
    """Three stages ``layer1``, ``layer2`` and ``layer3``, averaged over the map and read out linearly.

    A network says what comes before its stages in :meth:`stem`, and what comes after them in :meth:`norm_features`.
    """

    #: the name of the classifier, which differs between families of checkpoints
    classifier_name = "fc"
    layer1: nn.Module
    layer2: nn.Module
    layer3: nn.Module

    def __init__(self, widths: tuple[int, int, int], in_chans: int, drop_rate: float, global_pool: str) -> None:
        super().__init__()
        self.num_features = self.head_hidden_size = widths[-1]
        self.global_pool = global_pool
        self.grad_checkpointing = False
        self.conv1 = nn.Conv2d(in_chans, 16, 3, padding=1, bias=False)
        self.head_drop = nn.Dropout(drop_rate)
        self.feature_info = [
            {"num_chs": width, "reduction": 2**stage, "module": f"layer{stage + 1}"}
            for stage, width in enumerate(widths)
        ]

    def initialize(self) -> None:
        """Draw the weights of all convolutions from normal distributions by their fan-out, as He et al. do."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def stem(self, x: Tensor) -> Tensor:
        """What comes before the stages: ``(b, 16, h, w)``."""
        return self.conv1(x)

    def norm_features(self, x: Tensor) -> Tensor:
        """What comes after the stages: ``(b, num_features, h, w)``."""
        return x

    def get_classifier(self) -> nn.Module:
        """The classifier; an identity where there is none."""
        return self.get_submodule(self.classifier_name)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Begin with a new classifier."""
        global_pool = self.global_pool if global_pool is None else global_pool
        if global_pool != "avg" and (global_pool or num_classes):
            raise ValueError(
                f"global_pool must be 'avg', or '' with num_classes=0 for the map; got {global_pool!r} with "
                f"num_classes={num_classes}"
            )
        self.num_classes = num_classes
        self.global_pool = global_pool
        weight = self.conv1.weight
        head: nn.Module = nn.Identity()
        if num_classes:
            head = nn.Linear(self.num_features, num_classes, device=weight.device, dtype=weight.dtype)
        self.add_module(self.classifier_name, head)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute what is inside of the stages anew in the backward pass of training, in the place of keeping it."""
        self.grad_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        """The regular expressions on parameters' names that timm tells layers apart by."""
        return {"stem": r"^conv1|bn1", "blocks": r"^layer(\d+)" if coarse else r"^layer(\d+)\.(\d+)"}

    def forward_features(self, x: Tensor) -> Tensor:
        """The map that the head is given, ``(b, num_features, ⌈h / 4⌉, ⌈w / 4⌉)``."""
        x = self.stem(x)
        for stage in (self.layer1, self.layer2, self.layer3):
            if self.grad_checkpointing and self.training:
                x = torch.utils.checkpoint.checkpoint(stage, x, use_reentrant=False)
            else:
                x = stage(x)
        return self.norm_features(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """What the network gives for the map of :meth:`forward_features`."""
        if self.global_pool == "avg":
            x = self.head_drop(x.mean(dim=(2, 3)))
        return x if pre_logits else self.get_classifier()(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def cifar_cfg(
    num_classes: int,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    classifier: str = "fc",
) -> dict[str, object]:
    """The configuration of a network for CIFAR-10 or CIFAR-100 as timm has it.

    >>> cifar_cfg(7)
    Traceback (most recent call last):
    ValueError: num_classes must be 10 or 100, or mean and std be given; got 7
    """
    if num_classes not in (10, 100) and (mean is None or std is None):
        raise ValueError(f"num_classes must be 10 or 100, or mean and std be given; got {num_classes!r}")
    means = {10: (0.4914, 0.4822, 0.4465), 100: (0.5070, 0.4865, 0.4409)}
    deviations = {10: (0.2023, 0.1994, 0.2010), 100: (0.2673, 0.2564, 0.2761)}
    return {
        "num_classes": num_classes,
        "input_size": (3, 32, 32),
        "pool_size": (8, 8),
        "crop_pct": 1.0,
        "interpolation": "bilinear",
        "mean": means[num_classes] if mean is None else mean,
        "std": deviations[num_classes] if std is None else std,
        "first_conv": "conv1",
        "classifier": classifier,
    }

"""The CIFAR ResNets of He et al., *Deep Residual Learning*, 2015, section 4.2, https://arxiv.org/abs/1512.03385.

Three stages of 16, 32 and 64 channels on maps of 32, 16 and 8 cells a side; depth 6n + 2. The paper's two ways across a
change of width are the two families of checkpoints that circulate:

=========  ===========================================  ==========================  ============
option     shortcut where the width changes             keys                        models
=========  ===========================================  ==========================  ============
A          every second cell, channels padded by zeros  ``linear.*``                ``resnet20_a``, …
B          1×1 convolution and batch norm               ``downsample.*``, ``fc.*``  ``resnet20``, …
=========  ===========================================  ==========================  ============

Checkpoints of family A (akamaster/pytorch_resnet_cifar10) expect ImageNet's mean and standard deviation, those of
family B (chenyaofo/pytorch-cifar-models) the ones of their data set: ``resnet20.cifar10``, ``resnet20.cifar100``.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

__all__ = [
    "CifarResNet",
    "resnet20",
    "resnet20_a",
    "resnet32",
    "resnet32_a",
    "resnet44",
    "resnet44_a",
    "resnet56",
    "resnet56_a",
]


class PadShortcut(nn.Module):
    """Option A: every second cell, and zeros for the channels that are new, half of them on either side."""

    def __init__(self, new_channels: int) -> None:
        super().__init__()
        self.before = new_channels // 2
        self.after = new_channels - self.before

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.before, self.after))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    def __init__(self, in_channels: int, channels: int, stride: int, option: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or in_channels != channels:
            self.downsample = (
                PadShortcut(channels - in_channels)
                if option == "A"
                else nn.Sequential(nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class CifarResNet(nn.Module):
    """A ResNet for 32×32 images.

    Args:
        depth: 20, 32, 44, 56, … (6n + 2).
        option: shortcut ``"A"`` (padding, classifier ``linear``) or ``"B"`` (projection, classifier ``fc``).
        num_classes: classes; 0 leaves the pooled features.
        in_chans: channels of the image.
        drop_rate: dropout before the classifier.
        global_pool: ``"avg"``, or ``""`` with ``num_classes=0`` for the map of the last stage.

    Raises:
        ValueError: an argument is out of range.

    >>> CifarResNet(20, num_classes=100)(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 100])
    """

    def __init__(
        self,
        depth: int,
        option: str = "B",
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        drop_rate: float = 0.0,
        global_pool: str = "avg",
    ) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"depth must be 6n + 2: 20, 32, 44, 56, …; got {depth}")
        if option not in ("A", "B"):
            raise ValueError(f"option must be 'A' (padded shortcuts) or 'B' (projected shortcuts); got {option!r}")
        self.num_classes = num_classes
        self.num_features = self.head_hidden_size = 64
        self.global_pool = global_pool
        self.grad_checkpointing = False
        self.classifier_name = "linear" if option == "A" else "fc"
        self.conv1 = nn.Conv2d(in_chans, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        blocks = (depth - 2) // 6
        self.layer1 = self._stage(16, 16, 1, blocks, option)
        self.layer2 = self._stage(16, 32, 2, blocks, option)
        self.layer3 = self._stage(32, 64, 2, blocks, option)
        self.feature_info = [
            {"num_chs": 16, "reduction": 1, "module": "layer1"},
            {"num_chs": 32, "reduction": 2, "module": "layer2"},
            {"num_chs": 64, "reduction": 4, "module": "layer3"},
        ]
        self.head_drop = nn.Dropout(drop_rate)
        self.reset_classifier(num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @staticmethod
    def _stage(in_channels: int, channels: int, stride: int, blocks: int, option: str) -> nn.Sequential:
        first = BasicBlock(in_channels, channels, stride, option)
        return nn.Sequential(first, *(BasicBlock(channels, channels, 1, option) for _ in range(blocks - 1)))

    def get_classifier(self) -> nn.Module:
        return self.get_submodule(self.classifier_name)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
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
        self.grad_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        return {"stem": r"^conv1|bn1", "blocks": r"^layer(\d+)" if coarse else r"^layer(\d+)\.(\d+)"}

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        for stage in (self.layer1, self.layer2, self.layer3):
            if self.grad_checkpointing and self.training:
                x = torch.utils.checkpoint.checkpoint(stage, x, use_reentrant=False)
            else:
                x = stage(x)
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        if self.global_pool == "avg":
            x = self.head_drop(x.mean(dim=(2, 3)))
        return x if pre_logits else self.get_classifier()(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def _cfg(num_classes: int, mean: tuple[float, ...], std: tuple[float, ...], classifier: str) -> dict[str, object]:
    return {
        "num_classes": num_classes,
        "input_size": (3, 32, 32),
        "pool_size": (8, 8),
        "crop_pct": 1.0,
        "interpolation": "bilinear",
        "mean": mean,
        "std": std,
        "first_conv": "conv1",
        "classifier": classifier,
    }


_CIFAR10 = partial(_cfg, 10, (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), "fc")
_CIFAR100 = partial(_cfg, 100, (0.5070, 0.4865, 0.4409), (0.2673, 0.2564, 0.2761), "fc")
_CIFAR10_A = partial(_cfg, 10, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, "linear")

default_cfgs = generate_default_cfgs(
    {f"resnet{depth}.cifar10": _CIFAR10() for depth in (20, 32, 44, 56)}
    | {f"resnet{depth}.cifar100": _CIFAR100() for depth in (20, 32, 44, 56)}
    | {f"resnet{depth}_a.cifar10": _CIFAR10_A() for depth in (20, 32, 44, 56)}
)


def _create(variant: str, depth: int, option: str, pretrained: bool, **kwargs: object) -> CifarResNet:
    return build_model_with_cfg(
        CifarResNet, variant, pretrained, depth=depth, option=option, feature_cfg={"out_indices": (0, 1, 2)}, **kwargs
    )


@register_model
def resnet20(pretrained: bool = False, **kwargs: object) -> CifarResNet:
    """CIFAR ResNet-20, option B, 0.28 M parameters."""
    return _create("resnet20", 20, "B", pretrained, **kwargs)


@register_model
def resnet32(pretrained: bool = False, **kwargs: object) -> CifarResNet:
    """CIFAR ResNet-32, option B, 0.47 M parameters."""
    return _create("resnet32", 32, "B", pretrained, **kwargs)


@register_model
def resnet44(pretrained: bool = False, **kwargs: object) -> CifarResNet:
    """CIFAR ResNet-44, option B, 0.67 M parameters."""
    return _create("resnet44", 44, "B", pretrained, **kwargs)


@register_model
def resnet56(pretrained: bool = False, **kwargs: object) -> CifarResNet:
    """CIFAR ResNet-56, option B, 0.86 M parameters."""
    return _create("resnet56", 56, "B", pretrained, **kwargs)


@register_model
def resnet20_a(pretrained: bool = False, **kwargs: object) -> CifarResNet:
    """CIFAR ResNet-20, option A, 0.27 M parameters."""
    return _create("resnet20_a", 20, "A", pretrained, **kwargs)


@register_model
def resnet32_a(pretrained: bool = False, **kwargs: object) -> CifarResNet:
    """CIFAR ResNet-32, option A, 0.46 M parameters."""
    return _create("resnet32_a", 32, "A", pretrained, **kwargs)


@register_model
def resnet44_a(pretrained: bool = False, **kwargs: object) -> CifarResNet:
    """CIFAR ResNet-44, option A, 0.66 M parameters."""
    return _create("resnet44_a", 44, "A", pretrained, **kwargs)


@register_model
def resnet56_a(pretrained: bool = False, **kwargs: object) -> CifarResNet:
    """CIFAR ResNet-56, option A, 0.85 M parameters."""
    return _create("resnet56_a", 56, "A", pretrained, **kwargs)

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

import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

from vision_attn.models.cifar import CifarNetwork, cifar_cfg

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


class CifarResNet(CifarNetwork):
    """A ResNet for 32×32 images.

    Args:
        depth: 20, 32, 44, 56, … (6n + 2).
        option: shortcut ``"A"`` (padding, classifier ``linear``) or ``"B"`` (projection, classifier ``fc``).
        num_classes: classes; 0 leaves the pooled features.
        in_chans: channels of the image.
        drop_rate: probability of dropping a feature before the classifier, in training.
        global_pool: ``"avg"``, or ``""`` with ``num_classes=0`` for the map of the last stage.

    Raises:
        ValueError: an argument is out of range.

    Source: He et al., *Deep Residual Learning for Image Recognition*, 2015, section 4.2,
    https://arxiv.org/abs/1512.03385

    >>> import torch
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
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"depth must be 6n + 2: 20, 32, 44, 56, …; got {depth}")
        if option not in ("A", "B"):
            raise ValueError(f"option must be 'A' (padded shortcuts) or 'B' (projected shortcuts); got {option!r}")
        super().__init__((16, 32, 64), in_chans, drop_rate, global_pool)
        self.classifier_name = "linear" if option == "A" else "fc"
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        blocks = (depth - 2) // 6
        self.layer1 = self._stage(16, 16, 1, blocks, option)
        self.layer2 = self._stage(16, 32, 2, blocks, option)
        self.layer3 = self._stage(32, 64, 2, blocks, option)
        self.reset_classifier(num_classes)
        self.initialize()

    @staticmethod
    def _stage(in_channels: int, channels: int, stride: int, blocks: int, option: str) -> nn.Sequential:
        first = BasicBlock(in_channels, channels, stride, option)
        return nn.Sequential(first, *(BasicBlock(channels, channels, 1, option) for _ in range(blocks - 1)))

    def stem(self, x: Tensor) -> Tensor:
        return self.relu(self.bn1(self.conv1(x)))


default_cfgs = generate_default_cfgs(
    {f"resnet{depth}.cifar10": cifar_cfg(10) for depth in (20, 32, 44, 56)}
    | {f"resnet{depth}.cifar100": cifar_cfg(100) for depth in (20, 32, 44, 56)}
    | {
        f"resnet{depth}_a.cifar10": cifar_cfg(10, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, "linear")
        for depth in (20, 32, 44, 56)
    }
)


def _create(variant: str, depth: int, option: str, pretrained: bool, **kwargs: object) -> CifarResNet:
    return build_model_with_cfg(
        CifarResNet, variant, pretrained, depth=depth, option=option, feature_cfg={"out_indices": (0, 1, 2)}, **kwargs
    )


@register_model
def resnet20(pretrained: bool = False, **kwargs: object) -> CifarResNet:
    """CIFAR ResNet-20, option B, 0.27 M parameters."""
    return _create("resnet20", 20, "B", pretrained, **kwargs)


@register_model
def resnet32(pretrained: bool = False, **kwargs: object) -> CifarResNet:
    """CIFAR ResNet-32, option B, 0.47 M parameters."""
    return _create("resnet32", 32, "B", pretrained, **kwargs)


@register_model
def resnet44(pretrained: bool = False, **kwargs: object) -> CifarResNet:
    """CIFAR ResNet-44, option B, 0.66 M parameters."""
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

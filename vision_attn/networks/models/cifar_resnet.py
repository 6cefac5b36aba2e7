"""ResNets for the 32×32 images of CIFAR: three stages (32×32, 16×16 and 8×8), average pooling and a linear classifier.

The ResNets of He et al. have 16, 32 and 64 channels and depth 6n + 2. The paper has two options for the shortcut where
the width changes. Checkpoints exist for both options:

=========  ===========================================  ==========================  =================
option     shortcut where the width changes             keys                        models
=========  ===========================================  ==========================  =================
A          stride 2, channels padded with zeros         ``linear.*``                ``resnet20_a``, …
B          1×1 convolution and batch norm               ``downsample.*``, ``fc.*``  ``resnet20``, …
=========  ===========================================  ==========================  =================

Checkpoints for option A (akamaster/pytorch_resnet_cifar10) require the mean and standard deviation of ImageNet.
Checkpoints for option B (chenyaofo/pytorch-cifar-models) require the mean and standard deviation of their data set
(``resnet20.cifar10``, ``resnet20.cifar100``).

The Wide ResNets of Zagoruyko and Komodakis have k times as many channels and depth 6n + 4. Norm and activation precede
each convolution, and a norm follows the last stage.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch.nn.functional as F
from timm.layers import DropPath, calculate_drop_path_rates
from timm.models import generate_default_cfgs
from timm.models.resnet import BasicBlock
from torch import Tensor, nn

from vision_attn.networks.models.registry import StagedNetwork, make_cfg, register_network

__all__ = ["CifarResNet", "WideResNet"]  # timm adds the names of the networks


class CifarNetwork(StagedNetwork):
    """A 3×3 convolution and three stages ``layer1``, ``layer2`` and ``layer3``.

    Args:
        widths: number of channels of each stage.
        blocks: number of residual blocks in each stage.
        block: function that builds a block, given input channels, output channels, stride and drop path.
        norm_first: norm and activation precede the convolutions of a block, and a norm follows the last stage.
        num_classes: number of classes; 0 returns the pooled features.
        in_chans: number of image channels.
        drop_path_rate: drop path rate of the last block; it increases linearly from 0 at the first block.
        **head: arguments of :meth:`StagedNetwork.add_head`.
    """

    def __init__(
        self,
        widths: tuple[int, int, int],
        blocks: int,
        block: Callable[..., nn.Module],
        *,
        norm_first: bool,
        num_classes: int = 10,
        in_chans: int = 3,
        drop_path_rate: float = 0.0,
        **head: Any,
    ) -> None:
        super().__init__(widths, (1, 2, 4), "layer")
        self.conv1: nn.Conv2d = nn.Conv2d(in_chans, 16, 3, padding=1, bias=False)
        if not norm_first:
            self.bn1: nn.BatchNorm2d = nn.BatchNorm2d(16)
        self.relu: nn.ReLU = nn.ReLU(inplace=True)
        rates = iter(calculate_drop_path_rates(drop_path_rate, len(widths) * blocks))
        for stage, (before, after) in enumerate(pairwise((16, *widths)), start=1):
            shapes = [(before, after, 1 if stage == 1 else 2), *[(after, after, 1)] * (blocks - 1)]
            drops = (DropPath(rate) if rate else None for rate in rates)
            layers = [block(*shape, drop_path=drop) for shape, drop in zip(shapes, drops, strict=False)]
            self.add_module(f"layer{stage}", nn.Sequential(*layers))
        if norm_first:
            self.bn: nn.BatchNorm2d = nn.BatchNorm2d(widths[-1])
        self.add_head(num_classes, **head)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        """Return regular expressions on parameter names, which timm uses to group layers."""
        return {"stem": r"^conv1|bn1", "blocks": r"^layer(\d+)" if coarse else r"^layer(\d+)\.(\d+)"}


# --- He et al., *Deep Residual Learning*, 2015, section 4.2 -----------------------------------------------------------


class PadShortcut(nn.Module):
    """Shortcut of option A: stride 2, with half of the new channels padded with zeros on each side."""

    def __init__(self, new_channels: int) -> None:
        super().__init__()
        self.padding = (0, 0, 0, 0, new_channels // 2, new_channels - new_channels // 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], self.padding)


def basic_block(in_channels: int, channels: int, stride: int, option: str, drop_path: nn.Module | None) -> nn.Module:
    """Build a residual block of two 3×3 convolutions and a shortcut."""
    shortcut: nn.Module | None = None
    if stride != 1 and option == "A":
        shortcut = PadShortcut(channels - in_channels)
    elif stride != 1:
        conv = nn.Conv2d(in_channels, channels, 1, stride, bias=False)
        shortcut = nn.Sequential(conv, nn.BatchNorm2d(channels))
    block: nn.Module = BasicBlock(in_channels, channels, stride, shortcut, drop_path=drop_path)
    return block


class CifarResNet(CifarNetwork):
    """A ResNet for 32×32 images.

    Args:
        depth: number of layers: 20, 32, 44, 56, … (6n + 2).
        option: shortcut ``"A"`` (padding, classifier ``linear``) or ``"B"`` (projection, classifier ``fc``).
        **options: arguments as in timm: ``num_classes`` (10; 0 returns the pooled features), ``in_chans`` (3),
            ``global_pool``, ``drop_rate`` and ``drop_path_rate``.

    Raises:
        ValueError: an argument is out of range.

    Source: He et al., *Deep Residual Learning for Image Recognition*, 2015, section 4.2,
    https://arxiv.org/abs/1512.03385

    >>> import torch
    >>> CifarResNet(20, num_classes=100)(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 100])
    """

    def __init__(self, depth: int, option: str = "B", **options: Any) -> None:
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"depth must be 6n + 2: 20, 32, 44, 56, …, got {depth}")
        if option not in ("A", "B"):
            raise ValueError(f"option must be 'A' (padded shortcuts) or 'B' (projected shortcuts), got {option!r}")
        self.classifier_name = "linear" if option == "A" else "fc"
        block = partial(basic_block, option=option)
        super().__init__((16, 32, 64), (depth - 2) // 6, block, norm_first=False, **options)

    def stem(self, x: Tensor) -> Tensor:
        return self.relu(self.bn1(self.conv1(x)))


# --- Zagoruyko and Komodakis, *Wide Residual Networks*, 2016 ----------------------------------------------------------


class WideBlock(nn.Module):
    """Residual block of two 3×3 convolutions, each after a norm and an activation."""

    def __init__(
        self, in_channels: int, channels: int, stride: int, drop_rate: float, drop_path: nn.Module | None
    ) -> None:
        super().__init__()
        self.bn1: nn.BatchNorm2d = nn.BatchNorm2d(in_channels)
        self.relu: nn.ReLU = nn.ReLU(inplace=True)
        self.conv1: nn.Conv2d = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn2: nn.BatchNorm2d = nn.BatchNorm2d(channels)
        self.drop: nn.Dropout = nn.Dropout(drop_rate)
        self.conv2: nn.Conv2d = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.drop_path = drop_path
        self.downsample: nn.Module | None = None
        if stride != 1 or in_channels != channels:
            self.downsample = nn.Conv2d(in_channels, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(x))
        shortcut = x if self.downsample is None else self.downsample(y)
        y = self.conv1(y)
        y = self.conv2(self.drop(self.relu(self.bn2(y))))
        return shortcut + (y if self.drop_path is None else self.drop_path(y))


class WideResNet(CifarNetwork):
    """A Wide ResNet for 32×32 images.

    Args:
        depth: number of layers: 16, 22, 28, 40, … (6n + 4).
        width: factor for the widths of 16, 32 and 64 channels.
        block_drop_rate: dropout rate between the two convolutions of a block; the paper uses 0.3.
        **options: arguments of :class:`CifarResNet`.

    Raises:
        ValueError: an argument is out of range.

    Source: Zagoruyko and Komodakis, *Wide Residual Networks*, 2016, https://arxiv.org/abs/1605.07146

    >>> import torch
    >>> WideResNet(10, 1, num_classes=100)(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 100])
    """

    def __init__(self, depth: int, width: int, *, block_drop_rate: float = 0.0, **options: Any) -> None:
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"depth must be 6n + 4: 16, 22, 28, 40, …, got {depth}")
        widths, block = (16 * width, 32 * width, 64 * width), partial(WideBlock, drop_rate=block_drop_rate)
        super().__init__(widths, (depth - 4) // 6, block, norm_first=True, **options)

    def stem(self, x: Tensor) -> Tensor:
        return self.conv1(x)

    def norm_features(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(x))


# --- registration with timm -------------------------------------------------------------------------------------------


#: timm's ``feature_cfg`` with the feature maps of all three stages.
FEATURES = {"out_indices": (0, 1, 2)}
#: timm's configuration of a network for CIFAR; by default, with the ``mean`` and ``std`` of ImageNet.
cifar_cfg = partial(make_cfg, input_size=(3, 32, 32), reduction=4, first_conv="conv1")
CIFAR10 = cifar_cfg(10, mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010))
CIFAR100 = cifar_cfg(100, mean=(0.5070, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2761))
CIFAR10_A = cifar_cfg(10, classifier="linear")

default_cfgs: dict[str, Any] = generate_default_cfgs(
    {f"{name}.cifar10": CIFAR10_A for name in ("resnet20_a", "resnet32_a", "resnet44_a", "resnet56_a")}
    | {
        f"{name}.{tag}": cfg
        for name in ("resnet20", "resnet32", "resnet44", "resnet56", "wrn16_4", "wrn28_10", "wrn40_2")
        for tag, cfg in (("cifar10", CIFAR10), ("cifar100", CIFAR100))
    }
)


def register_resnet(depth: int, option: str, millions: str) -> Callable[..., CifarResNet]:
    name = f"resnet{depth}{'_a' * (option == 'A')}"
    doc = f"ResNet-{depth} for CIFAR with shortcuts of option {option}, {millions} M parameters."
    return register_network(__name__, name, doc, CifarResNet, FEATURES, depth=depth, option=option)


def register_wide(depth: int, width: int, millions: str) -> Callable[..., WideResNet]:
    doc = f"Wide ResNet-{depth} for CIFAR with width factor {width}, {millions} M parameters."
    return register_network(__name__, f"wrn{depth}_{width}", doc, WideResNet, FEATURES, depth=depth, width=width)


resnet20: Callable[..., CifarResNet] = register_resnet(20, "B", "0.27")
resnet32: Callable[..., CifarResNet] = register_resnet(32, "B", "0.47")
resnet44: Callable[..., CifarResNet] = register_resnet(44, "B", "0.66")
resnet56: Callable[..., CifarResNet] = register_resnet(56, "B", "0.86")
resnet20_a: Callable[..., CifarResNet] = register_resnet(20, "A", "0.27")
resnet32_a: Callable[..., CifarResNet] = register_resnet(32, "A", "0.46")
resnet44_a: Callable[..., CifarResNet] = register_resnet(44, "A", "0.66")
resnet56_a: Callable[..., CifarResNet] = register_resnet(56, "A", "0.85")
wrn16_4: Callable[..., WideResNet] = register_wide(16, 4, "2.7")
wrn28_10: Callable[..., WideResNet] = register_wide(28, 10, "36.5")
wrn40_2: Callable[..., WideResNet] = register_wide(40, 2, "2.2")

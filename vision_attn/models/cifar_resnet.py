"""ResNets for CIFAR's 32×32 images: three stages on maps of 32, 16 and 8 cells a side, averaged and read out linearly.

Those of He et al. have 16, 32 and 64 channels and depth 6n + 2. The paper's two ways across a change of width are
the two families of checkpoints that circulate:

=========  ===========================================  ==========================  ============
option     shortcut where the width changes             keys                        models
=========  ===========================================  ==========================  ============
A          every second cell, channels padded by zeros  ``linear.*``                ``resnet20_a``, …
B          1×1 convolution and batch norm               ``downsample.*``, ``fc.*``  ``resnet20``, …
=========  ===========================================  ==========================  ============

Checkpoints of family A (akamaster/pytorch_resnet_cifar10) expect ImageNet's mean and standard deviation, those of
family B (chenyaofo/pytorch-cifar-models) the ones of their data set: ``resnet20.cifar10``, ``resnet20.cifar100``.

Those of Zagoruyko and Komodakis have k times as many channels and depth 6n + 4. Norm and activation come before each
convolution, and the map that the stages hand on is normalised once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import generate_default_cfgs
from torch import Tensor, nn

from vision_attn.models.registry import registered

__all__ = ["CifarResNet", "WideResNet"]  # timm adds the names of the networks


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

    def add_stages(self, blocks: int, block: Callable[[int, int, int], nn.Module]) -> None:
        """Three stages of so many blocks each; the first block of a stage changes the width, and strides."""
        widths = [16, *(entry["num_chs"] for entry in self.feature_info)]
        for stage, (in_channels, channels) in enumerate(pairwise(widths), start=1):
            first = block(in_channels, channels, 1 if stage == 1 else 2)
            others = (block(channels, channels, 1) for _ in range(blocks - 1))
            self.add_module(f"layer{stage}", nn.Sequential(first, *others))

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


# --- He et al., *Deep Residual Learning*, 2015, section 4.2 -----------------------------------------------------------


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

    def __init__(self, in_channels: int, channels: int, stride: int, *, option: str) -> None:
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
        self.add_stages((depth - 2) // 6, partial(BasicBlock, option=option))
        self.reset_classifier(num_classes)
        self.initialize()

    def stem(self, x: Tensor) -> Tensor:
        return self.relu(self.bn1(self.conv1(x)))


# --- Zagoruyko and Komodakis, *Wide Residual Networks*, 2016 ----------------------------------------------------------


class WideBlock(nn.Module):
    """Norm, activation and 3×3 convolution, twice, and a shortcut."""

    def __init__(self, in_channels: int, channels: int, stride: int, *, drop_rate: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.drop = nn.Dropout(drop_rate)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.downsample: nn.Module | None = None
        if stride != 1 or in_channels != channels:
            self.downsample = nn.Conv2d(in_channels, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(x))
        shortcut = x if self.downsample is None else self.downsample(y)
        y = self.conv1(y)
        y = self.conv2(self.drop(self.relu(self.bn2(y))))
        return y + shortcut


class WideResNet(CifarNetwork):
    """A Wide ResNet for 32×32 images.

    Args:
        depth: 16, 22, 28, 40, … (6n + 4).
        width: how many times wider the stages are than 16, 32 and 64 channels.
        num_classes: classes; 0 leaves the pooled features.
        in_chans: channels of the image.
        drop_rate: probability of dropping a feature before the classifier, in training.
        block_drop_rate: probability of dropping an element between the two convolutions of a block; the paper has 0.3
            where it has any.
        global_pool: ``"avg"``, or ``""`` with ``num_classes=0`` for the map of the last stage.

    Raises:
        ValueError: an argument is out of range.

    Source: Zagoruyko and Komodakis, *Wide Residual Networks*, 2016, https://arxiv.org/abs/1605.07146

    >>> import torch
    >>> WideResNet(10, 1, num_classes=100)(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 100])
    """

    def __init__(
        self,
        depth: int,
        width: int,
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        drop_rate: float = 0.0,
        block_drop_rate: float = 0.0,
        global_pool: str = "avg",
    ) -> None:
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"depth must be 6n + 4: 16, 22, 28, 40, …; got {depth}")
        if width < 1:
            raise ValueError(f"width must be a whole number of at least 1; got {width}")
        widths = (16 * width, 32 * width, 64 * width)
        super().__init__(widths, in_chans, drop_rate, global_pool)
        self.add_stages((depth - 4) // 6, partial(WideBlock, drop_rate=block_drop_rate))
        self.bn = nn.BatchNorm2d(widths[-1])
        self.relu = nn.ReLU(inplace=True)
        self.reset_classifier(num_classes)
        self.initialize()

    def norm_features(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(x))


# --- as timm knows them -----------------------------------------------------------------------------------------------


def cifar_cfg(
    num_classes: int, mean: tuple[float, ...], std: tuple[float, ...], classifier: str = "fc"
) -> dict[str, object]:
    """The configuration of a network for CIFAR-10 or CIFAR-100 as timm has it."""
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


#: How timm takes features from them.
FEATURES = {"out_indices": (0, 1, 2)}
CIFAR10 = cifar_cfg(10, (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
CIFAR100 = cifar_cfg(100, (0.5070, 0.4865, 0.4409), (0.2673, 0.2564, 0.2761))
CIFAR10_OF_A = cifar_cfg(10, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, "linear")

default_cfgs = generate_default_cfgs(
    {f"{name}.cifar10": CIFAR10_OF_A for name in ("resnet20_a", "resnet32_a", "resnet44_a", "resnet56_a")}
    | {
        f"{name}.{tag}": cfg
        for name in ("resnet20", "resnet32", "resnet44", "resnet56", "wrn16_4", "wrn28_10", "wrn40_2")
        for tag, cfg in (("cifar10", CIFAR10), ("cifar100", CIFAR100))
    }
)


def resnet(depth: int, option: str, millions: str) -> Callable[..., CifarResNet]:
    name = f"resnet{depth}{'_a' * (option == 'A')}"
    about = f"CIFAR ResNet-{depth}, option {option}, {millions} M parameters."
    return registered(__name__, name, about, CifarResNet, FEATURES, depth=depth, option=option)


def wide(depth: int, width: int, about: str) -> Callable[..., WideResNet]:
    return registered(__name__, f"wrn{depth}_{width}", about, WideResNet, FEATURES, depth=depth, width=width)


resnet20 = resnet(20, "B", "0.27")
resnet32 = resnet(32, "B", "0.47")
resnet44 = resnet(44, "B", "0.66")
resnet56 = resnet(56, "B", "0.86")
resnet20_a = resnet(20, "A", "0.27")
resnet32_a = resnet(32, "A", "0.46")
resnet44_a = resnet(44, "A", "0.66")
resnet56_a = resnet(56, "A", "0.85")
wrn16_4 = wide(16, 4, "Wide ResNet-16, four times as wide, 2.7 M parameters.")
wrn28_10 = wide(28, 10, "Wide ResNet-28, ten times as wide, 36.5 M parameters.")
wrn40_2 = wide(40, 2, "Wide ResNet-40, twice as wide, 2.2 M parameters.")

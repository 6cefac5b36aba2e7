"""The Wide ResNets of Zagoruyko and Komodakis, *Wide Residual Networks*, 2016, https://arxiv.org/abs/1605.07146.

Three stages of 16k, 32k and 64k channels on maps of 32, 16 and 8 cells a side; depth 6n + 4. Norm and activation come
before each convolution, and the map that the stages hand on is normalised once, at the end.
"""

from __future__ import annotations

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

from vision_attn.models.cifar import CifarNetwork, cifar_cfg

__all__ = ["WideResNet", "wrn16_4", "wrn28_10", "wrn40_2"]


class WideBlock(nn.Module):
    """Norm, activation and 3×3 convolution, twice, and a shortcut."""

    def __init__(self, in_channels: int, channels: int, stride: int, drop_rate: float) -> None:
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
        blocks = (depth - 4) // 6
        for stage, (in_channels, channels) in enumerate(zip((16, *widths), widths, strict=False), start=1):
            first = WideBlock(in_channels, channels, 1 if stage == 1 else 2, block_drop_rate)
            others = (WideBlock(channels, channels, 1, block_drop_rate) for _ in range(blocks - 1))
            self.add_module(f"layer{stage}", nn.Sequential(first, *others))
        self.bn = nn.BatchNorm2d(widths[-1])
        self.relu = nn.ReLU(inplace=True)
        self.reset_classifier(num_classes)
        self.initialize()

    def norm_features(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(x))


default_cfgs = generate_default_cfgs(
    {
        f"{name}.cifar{num_classes}": cifar_cfg(num_classes)
        for name in ("wrn16_4", "wrn28_10", "wrn40_2")
        for num_classes in (10, 100)
    }
)


def _create(variant: str, depth: int, width: int, pretrained: bool, **kwargs: object) -> WideResNet:
    return build_model_with_cfg(
        WideResNet, variant, pretrained, depth=depth, width=width, feature_cfg={"out_indices": (0, 1, 2)}, **kwargs
    )


@register_model
def wrn16_4(pretrained: bool = False, **kwargs: object) -> WideResNet:
    """Wide ResNet-16, four times as wide, 2.7 M parameters."""
    return _create("wrn16_4", 16, 4, pretrained, **kwargs)


@register_model
def wrn28_10(pretrained: bool = False, **kwargs: object) -> WideResNet:
    """Wide ResNet-28, ten times as wide, 36.5 M parameters."""
    return _create("wrn28_10", 28, 10, pretrained, **kwargs)


@register_model
def wrn40_2(pretrained: bool = False, **kwargs: object) -> WideResNet:
    """Wide ResNet-40, twice as wide, 2.2 M parameters."""
    return _create("wrn40_2", 40, 2, pretrained, **kwargs)

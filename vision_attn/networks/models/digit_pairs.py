"""A small network for the embedded data set, two digits on one canvas: what it sees at a place never holds both.

One unit of ``stage3`` sees 17 pixels of the canvas, and the two digits are at least 26 apart. What follows it works on
each position alone, then everything is averaged and read out linearly: without a block that moves information between
distant positions the network adds up what it finds at each, and cannot tell whether two digits are the same.
"""

from __future__ import annotations

from typing import Any

from timm.models import generate_default_cfgs
from torch import nn

from vision_attn.networks.models.registry import StagedNetwork, own_cfg, registered

__all__ = ["DigitPairsNet"]  # timm adds the names of the networks


def convolution(in_channels: int, channels: int, kernel: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(in_channels, channels, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(channels), nn.ReLU(inplace=True))


class DigitPairsNet(StagedNetwork):
    """Four 3×3 convolutions, two 1×1 convolutions, global average pooling, a linear head.

    Args:
        num_classes: classes; 0 leaves the pooled features.
        in_chans: channels of the image.
        width: channels of the maps.
        **head: what :meth:`StagedNetwork.add_head` takes.

    >>> import torch
    >>> DigitPairsNet()(torch.randn(4, 1, 8, 44)).shape
    torch.Size([4, 2])
    """

    def __init__(self, num_classes: int = 2, in_chans: int = 1, width: int = 32, **head: Any) -> None:
        super().__init__((width // 2, width, width, width), (1, 2, 4, 4), "stage")
        self.stage1: nn.Sequential = convolution(in_chans, width // 2, 3)
        self.stage2: nn.Sequential = convolution(width // 2, width, 3, stride=2)
        self.stage3: nn.Sequential = nn.Sequential(convolution(width, width, 3, stride=2), convolution(width, width, 3))
        self.stage4: nn.Sequential = nn.Sequential(convolution(width, width, 1), convolution(width, width, 1))
        self.add_head(num_classes, **head)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """The regular expressions on parameters' names that timm tells layers apart by."""
        two_convolutions = (r"^stage([34])\.(\d+)", None)
        return {"stem": r"^stage1", "blocks": [*[two_convolutions] * (not coarse), (r"^stage(\d+)", None)]}


#: What timm's ``features_only=True`` gives: the map after each of the four stages.
FEATURES = {"out_indices": (0, 1, 2, 3)}

_CFG = own_cfg(2, (1, 8, 44), 4, "stage1.0", mean=(0.0,), std=(1.0,))

default_cfgs = generate_default_cfgs({"digit_pairs.untrained": _CFG})

PLAIN = "The plain network: near chance, whatever it is trained with."
digit_pairs = registered(__name__, "digit_pairs", PLAIN, DigitPairsNet, FEATURES)

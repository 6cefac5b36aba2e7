"""A small network for the embedded data set, two digits on one canvas: what it sees at a place never holds both.

One unit of ``stage3`` sees 17 pixels of the canvas, and the two digits are at least 26 apart. What follows it works on
each position alone, then everything is averaged and read out linearly: without a block that moves information between
distant positions the network adds up what it finds at each, and cannot tell whether two digits are the same.
"""

from __future__ import annotations

from timm.models import generate_default_cfgs
from torch import Tensor, nn

from vision_attn.insertion import insert_
from vision_attn.models.registry import registered, weights_file

__all__ = ["DigitPairsNet", "digit_pairs", "digit_pairs_attention"]


def convolution(in_channels: int, channels: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
    )


class DigitPairsNet(nn.Module):
    """Four 3×3 convolutions, two 1×1 convolutions, global average pooling, a linear head.

    Args:
        num_classes: classes.
        in_chans: channels of the image.
        width: channels of the maps.

    >>> import torch
    >>> DigitPairsNet()(torch.randn(4, 1, 8, 44)).shape
    torch.Size([4, 2])
    """

    def __init__(self, num_classes: int = 2, in_chans: int = 1, width: int = 32) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.num_features = width
        self.stage1 = convolution(in_chans, width // 2, 3)
        self.stage2 = convolution(width // 2, width, 3, stride=2)
        self.stage3 = nn.Sequential(convolution(width, width, 3, stride=2), convolution(width, width, 3))
        self.stage4 = nn.Sequential(convolution(width, width, 1), convolution(width, width, 1))
        self.feature_info = [
            {"num_chs": width // 2, "reduction": 1, "module": "stage1"},
            {"num_chs": width, "reduction": 2, "module": "stage2"},
            {"num_chs": width, "reduction": 4, "module": "stage3"},
            {"num_chs": width, "reduction": 4, "module": "stage4"},
        ]
        self.fc = nn.Linear(width, num_classes)

    def forward_features(self, x: Tensor) -> Tensor:
        """The map of the last stage, ``(b, width, ⌈h / 4⌉, ⌈w / 4⌉)``.

        Args:
            x: images, ``(b, in_chans, h, w)``.
        """
        return self.stage4(self.stage3(self.stage2(self.stage1(x))))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """What the network gives for the map of :meth:`forward_features`, ``(b, num_classes)``.

        Args:
            x: that map, ``(b, width, h, w)``.
            pre_logits: whether to leave out the classifier, and give ``(b, width)``.
        """
        x = x.mean(dim=(2, 3))
        return x if pre_logits else self.fc(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


#: What timm's ``features_only=True`` gives: the map after each of the four stages.
FEATURES = {"out_indices": (0, 1, 2, 3)}

_CFG = {
    "num_classes": 2,
    "input_size": (1, 8, 44),
    "crop_pct": 1.0,
    "interpolation": "bilinear",
    "mean": (0.0,),
    "std": (1.0,),
    "first_conv": "stage1.0",
    "classifier": "fc",
}

default_cfgs = generate_default_cfgs(
    {
        "digit_pairs.untrained": _CFG,
        "digit_pairs_attention.seed0": _CFG | {"file": weights_file("digit_pairs_attention")},
    }
)


class DigitPairsAttentionNet(DigitPairsNet):
    """:class:`DigitPairsNet` with an attention block inserted after ``stage3``, as the demo trains it."""

    def __init__(self, num_classes: int = 2, in_chans: int = 1, width: int = 32) -> None:
        super().__init__(num_classes, in_chans, width)
        insert_(self, stages="stage3", num_heads=4, example_input=(1, in_chans, 8, 44))


digit_pairs = registered(
    __name__, "digit_pairs", "The plain network: near chance, whatever it is trained with.", DigitPairsNet, FEATURES
)
digit_pairs_attention = registered(
    __name__,
    "digit_pairs_attention",
    "The network with attention inserted; ``pretrained=True`` loads the weights that come with the library.",
    DigitPairsAttentionNet,
    FEATURES,
)

"""Networks of our own, registered with timm: importing this room makes ``timm.create_model`` know them.

>>> import timm
>>> timm.create_model("resnet20", num_classes=100).num_features
64
"""

from vision_attn.models.cifar_resnet import (
    CifarResNet,
    resnet20,
    resnet20_a,
    resnet32,
    resnet32_a,
    resnet44,
    resnet44_a,
    resnet56,
    resnet56_a,
)
from vision_attn.models.digit_pairs import DigitPairsNet, digit_pairs, digit_pairs_attention
from vision_attn.models.registry import create_model

__all__ = [
    "CifarResNet",
    "DigitPairsNet",
    "create_model",
    "digit_pairs",
    "digit_pairs_attention",
    "resnet20",
    "resnet20_a",
    "resnet32",
    "resnet32_a",
    "resnet44",
    "resnet44_a",
    "resnet56",
    "resnet56_a",
]

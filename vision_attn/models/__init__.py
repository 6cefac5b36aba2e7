"""Networks of our own, registered with timm: importing this room makes ``timm.create_model`` know them.

Each is a function of ``pretrained``, whether the weights that come with the name are loaded, and of further keyword
arguments: those of the network, ``num_classes`` and ``in_chans`` among them, and those that timm takes for any, such as
``pretrained_cfg``.

>>> import timm
>>> timm.create_model("resnet20", num_classes=100).num_features
64
"""

from vision_attn.models.attention_resnet50 import aa_resnet50, botnet50
from vision_attn.models.cifar_resnet import (
    CifarResNet,
    WideResNet,
    resnet20,
    resnet20_a,
    resnet32,
    resnet32_a,
    resnet44,
    resnet44_a,
    resnet56,
    resnet56_a,
    wrn16_4,
    wrn28_10,
    wrn40_2,
)
from vision_attn.models.digit_pairs import DigitPairsNet, digit_pairs, digit_pairs_attention
from vision_attn.models.inserted import (
    convnext_atto_attention,
    convnext_tiny_attention,
    efficientnet_b0_attention,
    resnet18_attention,
    resnet20_attention,
    resnet32_attention,
    resnet44_attention,
    resnet50_attention,
    resnet56_attention,
    wrn16_4_attention,
    wrn28_10_attention,
    wrn40_2_attention,
)
from vision_attn.models.registry import create_model

__all__ = [
    "CifarResNet",
    "DigitPairsNet",
    "WideResNet",
    "aa_resnet50",
    "botnet50",
    "convnext_atto_attention",
    "convnext_tiny_attention",
    "create_model",
    "digit_pairs",
    "digit_pairs_attention",
    "efficientnet_b0_attention",
    "resnet18_attention",
    "resnet20",
    "resnet20_a",
    "resnet20_attention",
    "resnet32",
    "resnet32_a",
    "resnet32_attention",
    "resnet44",
    "resnet44_a",
    "resnet44_attention",
    "resnet50_attention",
    "resnet56",
    "resnet56_a",
    "resnet56_attention",
    "wrn16_4",
    "wrn16_4_attention",
    "wrn28_10",
    "wrn28_10_attention",
    "wrn40_2",
    "wrn40_2_attention",
]

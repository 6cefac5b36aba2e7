"""ResNet-50 with attention in the place of its 3×3 convolutions, or beside them, as two papers have it.

=================  ========================  ===============================  ======================================
model              stages                    their 3×3 convolutions become    paper
=================  ========================  ===============================  ======================================
``botnet50``       the last                  :class:`StridedAttention2d`      https://arxiv.org/abs/2101.11605
``aa_resnet50``    the last three            :class:`AugmentedConv2d`         https://arxiv.org/abs/1904.09925
=================  ========================  ===============================  ======================================

Both know relative positions by tables for the maps of an image of ``img_size``, which are stretched for others. They
are timm's ResNet-50 otherwise, and take its arguments. There are no weights for them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import timm
from timm.models import ResNet, build_model_with_cfg, generate_default_cfgs, register_model
from torch import nn

from vision_attn.attention.blocks import AugmentedConv2d, StridedAttention2d
from vision_attn.attention.position import RelPosDecomposed

__all__ = ["aa_resnet50", "botnet50"]

#: Takes a 3×3 convolution and the size of the map that it is given, in cells.
Exchange = Callable[[nn.Conv2d, tuple[int, int]], nn.Module]


def attention_for(conv: nn.Conv2d, size: tuple[int, int]) -> nn.Module:
    """BoTNet's: four heads, averaged where the convolution strides."""
    return StridedAttention2d(
        conv.in_channels,
        num_heads=4,
        stride=conv.stride[0],
        feat_size=size,
        qkv_bias=False,
        proj_bias=False,
        device=conv.weight.device,
        dtype=conv.weight.dtype,
    )


def augmented(conv: nn.Conv2d, size: tuple[int, int]) -> nn.Module:
    """Bello's: of a width ``c``, ``c / 5`` channels of keys but at least 20 a head, and ``c / 10`` of values."""
    if conv.dilation != (1, 1) or conv.groups != 1:
        raise ValueError(
            "aa_resnet50: output_stride must be 32 and cardinality 1, since an augmented convolution has no dilation "
            f"and no groups; got a convolution with dilation {conv.dilation} and {conv.groups} groups"
        )
    heads, width, stride = 8, conv.out_channels, conv.stride[0]
    new = AugmentedConv2d(
        conv.in_channels,
        width,
        stride=stride,
        num_heads=heads,
        key_channels=heads * max(20, round(width / 5 / heads)),
        value_channels=heads * max(1, round(width / 10 / heads)),
        bias=False,
        position=RelPosDecomposed(fewer_cells(size, stride)),
        device=conv.weight.device,
        dtype=conv.weight.dtype,
    )
    nn.init.kaiming_normal_(new.conv.weight, mode="fan_out", nonlinearity="relu")  # as timm's ResNets begin
    return new


def resnet50_with(
    exchange: Exchange, stages: tuple[str, ...], img_size: int | tuple[int, int] = 224, **kwargs: Any
) -> ResNet:
    """timm's ResNet-50 with the 3×3 convolutions of some stages exchanged."""
    model: ResNet = timm.model_entrypoint("resnet50")(**kwargs)
    height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
    reductions = {entry["module"]: entry["reduction"] for entry in model.feature_info}
    before = dict(zip(list(reductions)[1:], reductions.values(), strict=False))
    for stage in stages:
        size = fewer_cells((height, width), before[stage])
        for block in model.get_submodule(stage).children():
            assert isinstance(block.conv2, nn.Conv2d)
            stride = block.conv2.stride[0]
            block.conv2 = exchange(block.conv2, size)
            size = fewer_cells(size, stride)
    return model


def fewer_cells(size: tuple[int, int], stride: int) -> tuple[int, int]:
    return -(-size[0] // stride), -(-size[1] // stride)


#: All else, the size and the statistics of the images among it, is what timm's configurations say by themselves.
_CFG = {"pool_size": (7, 7), "first_conv": "conv1", "classifier": "fc"}

default_cfgs = generate_default_cfgs({"botnet50.untrained": _CFG, "aa_resnet50.untrained": _CFG})


@register_model
def botnet50(pretrained: bool = False, **kwargs: object) -> ResNet:
    """BoTNet-50: 20.8 M parameters as in the paper, and 0.8 M of projections after attention, which it has not.

    Args:
        pretrained: there are no weights to load.
        **kwargs: ``img_size``, side of the images or their height and width, in pixels, 224 where it is not given; and
            what timm's ResNet-50 takes.

    Returns:
        timm's ``ResNet`` with :class:`vision_attn.StridedAttention2d` for the 3×3 convolutions of its last stage.

    Raises:
        RuntimeError: ``pretrained`` is True.

    Source: Srinivas et al., *Bottleneck Transformers*, 2021, https://arxiv.org/abs/2101.11605

    >>> botnet50(img_size=64).layer4[0].conv2.attn.position.specification
    RelPosDecomposed(feat_size=(4, 4))
    """
    network = partial(resnet50_with, attention_for, ("layer4",))
    return build_model_with_cfg(network, "botnet50", pretrained, **kwargs)


@register_model
def aa_resnet50(pretrained: bool = False, **kwargs: object) -> ResNet:
    """Attention-augmented ResNet-50, 25.8 M parameters.

    Args:
        pretrained: there are no weights to load.
        **kwargs: ``img_size``, side of the images or their height and width, in pixels, 224 where it is not given; and
            what timm's ResNet-50 takes.

    Returns:
        timm's ``ResNet`` with :class:`vision_attn.AugmentedConv2d` for the 3×3 convolutions of its last three stages.

    Raises:
        RuntimeError: ``pretrained`` is True.
        ValueError: arguments that make a 3×3 convolution dilated or grouped, such as ``output_stride=16``.

    Source: Bello et al., *Attention Augmented Convolutional Networks*, 2019, https://arxiv.org/abs/1904.09925

    >>> aa_resnet50(img_size=64).layer4[0].conv2.attn.position.specification
    RelPosDecomposed(feat_size=(2, 2))
    """
    network = partial(resnet50_with, augmented, ("layer2", "layer3", "layer4"))
    return build_model_with_cfg(network, "aa_resnet50", pretrained, **kwargs)

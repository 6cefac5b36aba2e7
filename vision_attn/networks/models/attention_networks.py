"""Networks with attention: a ResNet-20 for CIFAR with inserted blocks, and two variants of ResNet-50.

``resnet20_attention`` has an attention block after each residual block of its last stage, and weights for CIFAR-100.
The variants of ResNet-50 replace or augment 3×3 convolutions with attention. They have no pretrained weights:

=================  ========================  ===============================  ======================================
model              stages                    replacement of 3×3 convolutions  paper
=================  ========================  ===============================  ======================================
``botnet50``       the last                  :class:`StridedAttention2d`      https://arxiv.org/abs/2101.11605
``aa_resnet50``    the last three            :class:`AugmentedConv2d`         https://arxiv.org/abs/1904.09925
=================  ========================  ===============================  ======================================

Both have tables of relative positions for images of size ``img_size``. The tables are resized for other images. All
other layers and arguments are the same as for timm's ResNet-50.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import timm
from timm.layers import to_2tuple
from timm.models import ResNet, build_model_with_cfg, generate_default_cfgs, register_model
from torch import nn

from vision_attn.attention.blocks import AugmentedConv2d, StridedAttention2d
from vision_attn.attention.position import RelPosDecomposed
from vision_attn.networks.insertion import insert_
from vision_attn.networks.models.cifar_resnet import CIFAR10, CIFAR100, CifarResNet
from vision_attn.networks.models.registry import register_network, weights_folder

__all__: list[str] = []  # timm adds the names of the networks

_CFG = {"pool_size": (7, 7), "first_conv": "conv1", "classifier": "fc"}  # other entries are timm's defaults

_TRAINED = CIFAR100 | {"file": str(weights_folder() / "resnet20_attention_cifar100" / "model.safetensors")}

default_cfgs = generate_default_cfgs(
    {"resnet20_attention.cifar100": _TRAINED, "resnet20_attention.cifar10": CIFAR10}
    | {"botnet50.untrained": _CFG, "aa_resnet50.untrained": _CFG}
)


class CifarAttentionNet(CifarResNet):
    """:class:`CifarResNet` with an attention block after each residual block of the last stage."""

    def __init__(self, depth: int, in_chans: int = 3, **options: Any) -> None:
        super().__init__(depth, in_chans=in_chans, **options)
        insert_(self, names="layer3.*", num_heads=4, example_input=(1, in_chans, 32, 32))


_DOC = "ResNet-20 for CIFAR with three attention blocks; ``pretrained=True`` loads weights for CIFAR-100."
resnet20_attention: Callable[..., CifarAttentionNet] = register_network(
    "resnet20_attention", _DOC, CifarAttentionNet, depth=20
)

#: Function of a 3×3 convolution and the (height, width) of its input.
MakeLayer = Callable[[nn.Conv2d, tuple[int, int]], nn.Module]


def botnet_layer(conv: nn.Conv2d, size: tuple[int, int]) -> nn.Module:
    """Build the attention of BoTNet: four heads, with average pooling if the convolution has a stride."""
    options: dict[str, Any] = {"stride": conv.stride[0], "qkv_bias": False, "proj_bias": False}
    return StridedAttention2d(conv.in_channels, 4, feat_size=size, **options).to(conv.weight)


def augmented_layer(conv: nn.Conv2d, size: tuple[int, int]) -> nn.Module:
    """Build an attention-augmented convolution: of ``c`` channels, ``c / 5`` are keys and ``c / 10`` are values.

    There are at least 20 keys per head.
    """
    if conv.dilation != (1, 1) or conv.groups != 1:
        raise ValueError("aa_resnet50: output_stride must be 32 and cardinality must be 1")
    heads, width, stride = 8, conv.out_channels, conv.stride[0]
    keys, values = heads * max(20, round(width / 5 / heads)), heads * max(1, round(width / 10 / heads))
    options: dict[str, Any] = {"num_heads": heads, "key_channels": keys, "value_channels": values, "stride": stride}
    position = RelPosDecomposed(divide_size(size, stride))
    layer = AugmentedConv2d(conv.in_channels, width, bias=False, position=position, **options).to(conv.weight)
    nn.init.kaiming_normal_(layer.conv.weight, mode="fan_out", nonlinearity="relu")  # as in timm's ResNets
    return layer


def build_resnet50(
    make_layer: MakeLayer, stages: tuple[str, ...], img_size: int | tuple[int, int] = 224, **kwargs: Any
) -> ResNet:
    """Build timm's ResNet-50, and replace the 3×3 convolutions of some stages."""
    model: ResNet = timm.model_entrypoint("resnet50")(**kwargs)
    size = divide_size(to_2tuple(img_size), 4)
    for stage in ("layer1", "layer2", "layer3", "layer4"):
        for block in model.get_submodule(stage).children():
            stride: Any = block.stride
            if stage in stages:
                block.conv2 = make_layer(block.conv2, size)
            size = divide_size(size, stride)
    return model


def divide_size(size: tuple[int, int], stride: int) -> tuple[int, int]:
    return -(-size[0] // stride), -(-size[1] // stride)


@register_model
def botnet50(pretrained: bool = False, **kwargs: object) -> ResNet:
    """BoTNet-50: 20.8 M parameters as in the paper, plus 0.8 M parameters of output projections.

    Args:
        pretrained: must be False, because there are no pretrained weights.
        **kwargs: ``img_size``, the image size in pixels as an integer or (height, width), 224 by default, and the
            arguments of timm's ResNet-50.

    Returns:
        timm's ``ResNet`` with :class:`StridedAttention2d` instead of 3×3 convolutions in the last stage.

    Raises:
        RuntimeError: ``pretrained`` is True.

    Source: Srinivas et al., *Bottleneck Transformers*, 2021, https://arxiv.org/abs/2101.11605

    >>> botnet50(img_size=64).layer4[0].conv2.attn.position.config
    RelPosDecomposed(feat_size=(4, 4))
    """
    return build_model_with_cfg(partial(build_resnet50, botnet_layer, ("layer4",)), "botnet50", pretrained, **kwargs)


@register_model
def aa_resnet50(pretrained: bool = False, **kwargs: object) -> ResNet:
    """Attention-augmented ResNet-50, 25.8 M parameters.

    Args:
        pretrained: must be False, because there are no pretrained weights.
        **kwargs: ``img_size``, the image size in pixels as an integer or (height, width), 224 by default, and the
            arguments of timm's ResNet-50.

    Returns:
        timm's ``ResNet`` with :class:`AugmentedConv2d` instead of 3×3 convolutions in the last three
        stages.

    Raises:
        RuntimeError: ``pretrained`` is True.
        ValueError: an argument such as ``output_stride=16`` causes dilated or grouped 3×3 convolutions.

    Source: Bello et al., *Attention Augmented Convolutional Networks*, 2019, https://arxiv.org/abs/1904.09925

    >>> aa_resnet50(img_size=64).layer4[0].conv2.attn.position.config
    RelPosDecomposed(feat_size=(2, 2))
    """
    network = partial(build_resnet50, augmented_layer, ("layer2", "layer3", "layer4"))
    return build_model_with_cfg(network, "aa_resnet50", pretrained, **kwargs)

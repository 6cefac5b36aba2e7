"""Networks with attention: those of timm and of ours with blocks inserted, and two ResNet-50 of papers.

``resnet50_attention`` and the like have blocks inserted near their end. Before training such a network computes what
the one it is made from computes, and ``pretrained=True`` loads the weights of that one, under the tags that timm has
for them: ``resnet50_attention.a1_in1k`` begins as ``resnet50.a1_in1k``. ``resnet20_attention.cifar100`` has weights of
our own training, blocks and all; ``pretrained=True`` without a tag takes them, and with them 100 classes.

The ResNet-50 of papers have attention in the place of 3×3 convolutions, or beside them:

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

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import timm
from timm.models import DefaultCfg, ResNet, build_model_with_cfg, convnext, register_model
from timm.models._manipulate import MATCH_PREV_GROUP
from torch import Tensor, nn

from vision_attn.attention.blocks import AugmentedConv2d, StridedAttention2d
from vision_attn.attention.position import RelPosDecomposed
from vision_attn.networks.insertion import insert_, inserted_keys
from vision_attn.networks.models import cifar_resnet  # noqa: F401  (registers them)
from vision_attn.networks.models.registry import registered, weights_file

__all__: list[str] = []  # timm adds the names of the networks

#: A state dict.
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Insertion:
    """Where blocks go in a family of networks, what they are, and what timm has to know of the family."""

    #: arguments of ``insert_``
    blocks: Mapping[str, Any]
    #: rows and columns of the image that the maps are found with: small, for it is only the channels that count
    example: tuple[int, int]
    #: how timm takes features from the family; None where it has networks of their own for that
    features: Mapping[str, Any] | None
    #: what timm does to the family's checkpoints before it loads them
    convert: Callable[[Weights, nn.Module], Weights] | None = None
    #: what tells timm of which layer a block is, where it is not seen from the family's own expressions
    layer: str | None = None


#: After the last two stages, whose maps are 14×14 and 7×7 for an image of 224×224: eight heads of 32 channels.
RESNET = Insertion({"stages": (-2, -1), "num_heads": 8, "key_dim": 32, "value_dim": 32}, (64, 96), {})
EFFICIENTNET = replace(RESNET, features=None)
CONVNEXT = replace(
    RESNET,
    features={"flatten_sequential": True, "out_indices": (0, 1, 2, 3)},
    convert=convnext.checkpoint_filter_fn,
    layer=r"^stages\.(\d+)\.inserted",
)
#: After each residual block of the last stage, whose maps are 8×8: four heads.
CIFAR = Insertion({"names": "layer3.*", "num_heads": 4}, (32, 32), {"out_indices": (0, 1, 2)})

default_cfgs: dict[str, DefaultCfg] = {}


def beside_the_layer_before(matcher: Callable[..., dict[str, Any]], layer: str, coarse: bool = False) -> dict[str, Any]:
    """A family's expressions, and one for blocks in the group of what comes before them."""
    groups = matcher(coarse)
    return groups if coarse else {**groups, "blocks": [*groups["blocks"], (layer, MATCH_PREV_GROUP)]}


def with_attention(base: str, insertion: Insertion, trained: tuple[str, ...] = ()) -> Callable[..., nn.Module]:
    """Register ``<base>_attention`` with timm; there are weights of our own for the tags that are ``trained``."""
    name = f"{base}_attention"

    def network(**kwargs: Any) -> Any:
        model: Any = timm.model_entrypoint(base)(**kwargs)
        example = (1, kwargs.get("in_chans", 3), *insertion.example)
        insert_(model, example_input=example, **insertion.blocks)
        if insertion.layer:
            vars(model)["group_matcher"] = partial(beside_the_layer_before, model.group_matcher, insertion.layer)
        return model

    def with_new_blocks(weights: Weights, model: nn.Module) -> Weights:
        """A checkpoint of the base has nothing of the blocks: they stay as they are. Any other must have them whole."""
        if insertion.convert is not None:
            weights = insertion.convert(weights, model)
        new = inserted_keys(model)
        if new.isdisjoint(weights):
            weights = weights | {key: value for key, value in model.state_dict().items() if key in new}
        return weights

    # In the order of the base, whose default comes first, so that ours is not the default for having weights.
    cfgs = {
        cfg.tag: replace(cfg, file=weights_file(f"{name}_{cfg.tag}")) if cfg.tag in trained else cfg
        for cfg in timm.models.get_arch_pretrained_cfgs(base).values()
    }
    default_cfgs[name] = DefaultCfg(deque(cfgs), cfgs, is_pretrained=any(cfg.has_weights for cfg in cfgs.values()))
    about = f"``{base}`` with attention inserted near its end."
    return registered(__name__, name, about, network, insertion.features, pretrained_filter_fn=with_new_blocks)


resnet18_attention: Callable[..., nn.Module] = with_attention("resnet18", RESNET)
resnet50_attention: Callable[..., nn.Module] = with_attention("resnet50", RESNET)
convnext_atto_attention: Callable[..., nn.Module] = with_attention("convnext_atto", CONVNEXT)
convnext_tiny_attention: Callable[..., nn.Module] = with_attention("convnext_tiny", CONVNEXT)
efficientnet_b0_attention: Callable[..., nn.Module] = with_attention("efficientnet_b0", EFFICIENTNET)
resnet20_attention: Callable[..., nn.Module] = with_attention("resnet20", CIFAR, trained=("cifar100",))
resnet32_attention: Callable[..., nn.Module] = with_attention("resnet32", CIFAR)
resnet44_attention: Callable[..., nn.Module] = with_attention("resnet44", CIFAR)
resnet56_attention: Callable[..., nn.Module] = with_attention("resnet56", CIFAR)
wrn16_4_attention: Callable[..., nn.Module] = with_attention("wrn16_4", CIFAR)
wrn28_10_attention: Callable[..., nn.Module] = with_attention("wrn28_10", CIFAR)
wrn40_2_attention: Callable[..., nn.Module] = with_attention("wrn40_2", CIFAR)


# --- of papers --------------------------------------------------------------------------------------------------------

#: Takes a 3×3 convolution and the size of the map that it is given, in cells.
Exchange = Callable[[nn.Conv2d, tuple[int, int]], nn.Module]


def attention_for(conv: nn.Conv2d, size: tuple[int, int]) -> nn.Module:
    """BoTNet's: four heads, averaged where the convolution strides."""
    how: dict[str, Any] = {"feat_size": size, "stride": conv.stride[0], "qkv_bias": False, "proj_bias": False}
    return StridedAttention2d(conv.in_channels, 4, **how).to(conv.weight)


def augmented(conv: nn.Conv2d, size: tuple[int, int]) -> nn.Module:
    """Bello's: of a width ``c``, ``c / 5`` channels of keys but at least 20 a head, and ``c / 10`` of values."""
    if conv.dilation != (1, 1) or conv.groups != 1:
        raise ValueError("aa_resnet50: output_stride must be 32 and cardinality 1, without dilation and groups")
    heads, width, stride = 8, conv.out_channels, conv.stride[0]
    keys, values = heads * max(20, round(width / 5 / heads)), heads * max(1, round(width / 10 / heads))
    how: dict[str, Any] = {"num_heads": heads, "key_channels": keys, "value_channels": values, "stride": stride}
    how |= {"bias": False, "position": RelPosDecomposed(fewer_cells(size, stride))}
    new = AugmentedConv2d(conv.in_channels, width, **how).to(conv.weight)
    nn.init.kaiming_normal_(new.conv.weight, mode="fan_out", nonlinearity="relu")  # as timm's ResNets begin
    return new


def resnet50_with(
    exchange: Exchange, stages: tuple[str, ...], img_size: int | tuple[int, int] = 224, **kwargs: Any
) -> ResNet:
    """timm's ResNet-50 with the 3×3 convolutions of some stages replaced."""
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

default_cfgs |= timm.models.generate_default_cfgs({"botnet50.untrained": _CFG, "aa_resnet50.untrained": _CFG})


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

    >>> botnet50(img_size=64).layer4[0].conv2.attn.position.config
    RelPosDecomposed(feat_size=(4, 4))
    """
    return build_model_with_cfg(partial(resnet50_with, attention_for, ("layer4",)), "botnet50", pretrained, **kwargs)


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

    >>> aa_resnet50(img_size=64).layer4[0].conv2.attn.position.config
    RelPosDecomposed(feat_size=(2, 2))
    """
    network = partial(resnet50_with, augmented, ("layer2", "layer3", "layer4"))
    return build_model_with_cfg(network, "aa_resnet50", pretrained, **kwargs)

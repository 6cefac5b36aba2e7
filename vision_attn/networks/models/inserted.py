"""Networks of timm and of ours with attention inserted near their end: ``resnet50_attention`` and the like.

Before training such a network computes what the one it is made from computes, and ``pretrained=True`` loads the weights
of that one, under the tags that timm has for them: ``resnet50_attention.a1_in1k`` begins as ``resnet50.a1_in1k``.
``resnet20_attention.cifar100`` has weights of our own training, blocks and all; ``pretrained=True`` without a tag takes
them, and with them 100 classes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import timm
from timm.models import DefaultCfg, PretrainedCfg, convnext, get_arch_pretrained_cfgs
from timm.models._manipulate import MATCH_PREV_GROUP
from torch import Tensor, nn

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


def with_attention(
    base: str, insertion: Insertion, about: str, trained: tuple[str, ...] = ()
) -> Callable[..., nn.Module]:
    """Register ``<base>_attention`` with timm."""
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

    configurations = get_arch_pretrained_cfgs(base).values()  # the default one first

    def with_own_weights(cfg: PretrainedCfg) -> PretrainedCfg:
        return replace(cfg, file=weights_file(f"{name}_{cfg.tag}")) if cfg.tag in trained else cfg

    # In the order of the base, so that ours is no more the default one for having weights.
    cfgs = {cfg.tag: with_own_weights(cfg) for cfg in configurations}
    default_cfgs[name] = DefaultCfg(deque(cfgs), cfgs, is_pretrained=any(cfg.has_weights for cfg in cfgs.values()))
    return registered(__name__, name, about, network, insertion.features, pretrained_filter_fn=with_new_blocks)


resnet18_attention = with_attention("resnet18", RESNET, "timm's ResNet-18 with two attention blocks.")
resnet50_attention = with_attention("resnet50", RESNET, "timm's ResNet-50 with two attention blocks.")
convnext_atto_attention = with_attention("convnext_atto", CONVNEXT, "timm's ConvNeXt-Atto with two attention blocks.")
convnext_tiny_attention = with_attention("convnext_tiny", CONVNEXT, "timm's ConvNeXt-Tiny with two attention blocks.")
efficientnet_b0_attention = with_attention(
    "efficientnet_b0", EFFICIENTNET, "timm's EfficientNet-B0 with two attention blocks."
)
resnet20_attention = with_attention(
    "resnet20",
    CIFAR,
    "CIFAR ResNet-20, option B, with attention in its last stage.",
    trained=("cifar100",),
)
resnet32_attention = with_attention("resnet32", CIFAR, "CIFAR ResNet-32, option B, with attention in its last stage.")
resnet44_attention = with_attention("resnet44", CIFAR, "CIFAR ResNet-44, option B, with attention in its last stage.")
resnet56_attention = with_attention("resnet56", CIFAR, "CIFAR ResNet-56, option B, with attention in its last stage.")
wrn16_4_attention = with_attention("wrn16_4", CIFAR, "Wide ResNet-16-4 with attention in its last stage.")
wrn28_10_attention = with_attention("wrn28_10", CIFAR, "Wide ResNet-28-10 with attention in its last stage.")
wrn40_2_attention = with_attention("wrn40_2", CIFAR, "Wide ResNet-40-2 with attention in its last stage.")

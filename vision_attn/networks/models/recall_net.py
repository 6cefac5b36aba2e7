"""A small network that sees each cell of a canvas by itself, and names a colour for each: it recalls nothing alone."""

from __future__ import annotations

from typing import Any

from timm.models import generate_default_cfgs
from torch import nn

from vision_attn.networks.insertion import insert_
from vision_attn.networks.models.registry import StagedNetwork, make_cfg, register_network, weights_folder

__all__ = ["RecallNet"]  # timm adds the names of the networks


def convolution(in_channels: int, channels: int, kernel: int) -> nn.Sequential:
    """Of squares that do not overlap."""
    conv = nn.Conv2d(in_channels, channels, kernel, kernel, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(channels), nn.ReLU(inplace=True))


class RecallNet(StagedNetwork):
    """Convolutions over the 8×8 pixels of a cell, two 1×1 convolutions, and a linear classifier of every cell.

    Args:
        num_classes: classes; 0 leaves the features of the cells.
        in_chans: channels of the image.
        width: channels of the maps.
        drop_rate: as in :meth:`StagedNetwork.add_head`.
        global_pool: as in :meth:`StagedNetwork.add_head`.

    >>> import torch
    >>> RecallNet()(torch.randn(4, 3, 96, 96)).shape
    torch.Size([4, 8, 12, 12])
    """

    def __init__(
        self, num_classes: int = 8, in_chans: int = 3, width: int = 64, drop_rate: float = 0.0, global_pool: str = ""
    ) -> None:
        super().__init__((width // 2, width, width), (4, 8, 8), "stage")
        self.stage1: nn.Sequential = convolution(in_chans, width // 2, 4)
        self.stage2: nn.Sequential = nn.Sequential(convolution(width // 2, width, 2), convolution(width, width, 1))
        self.stage3: nn.Sequential = convolution(width, width, 1)
        self.add_head(num_classes, drop_rate, global_pool)


#: What timm's ``features_only=True`` gives: the map after each of the three stages.
FEATURES = {"out_indices": (0, 1, 2)}

_CFG = make_cfg(8, (3, 96, 96), 8, "stage1.0", mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))

_TRAINED = _CFG | {"file": str(weights_folder() / "recall_attention" / "model.safetensors")}

default_cfgs = generate_default_cfgs({"recall.untrained": _CFG, "recall_attention.seed0": _TRAINED})


class RecallAttentionNet(RecallNet):
    """:class:`RecallNet` with an attention block inserted after ``stage2``, as the demo trains it."""

    def __init__(self, num_classes: int = 8, in_chans: int = 3, width: int = 64, **head: Any) -> None:
        super().__init__(num_classes, in_chans, width, **head)
        insert_(self, stages="stage2", num_heads=4, qk_norm="match", example_input=(1, in_chans, 96, 96))


PLAIN = "The plain network: at chance, whatever it is trained with."
ATTENTION = "The network with attention inserted; ``pretrained=True`` loads the weights that come with the library."
recall = register_network(__name__, "recall", PLAIN, RecallNet, FEATURES)
recall_attention = register_network(__name__, "recall_attention", ATTENTION, RecallAttentionNet, FEATURES)

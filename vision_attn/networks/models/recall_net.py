"""A small network for the recall task, which predicts a color for each cell of a canvas.

Without attention, the network processes each cell independently and stays at chance.
"""

from __future__ import annotations

from typing import Any

from timm.models import generate_default_cfgs
from torch import nn

from vision_attn.networks.insertion import insert_
from vision_attn.networks.models.registry import StagedNetwork, make_cfg, register_network, weights_folder

__all__ = ["RecallNet"]  # timm adds the names of the networks


def convolution(in_channels: int, channels: int, kernel: int) -> nn.Sequential:
    """Build a convolution whose stride equals its kernel size, with batch norm and ReLU."""
    conv = nn.Conv2d(in_channels, channels, kernel, kernel, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(channels), nn.ReLU(inplace=True))


class RecallNet(StagedNetwork):
    """Convolutions over the 8×8 pixels of a cell, two 1×1 convolutions, and a linear classifier for every cell.

    Args:
        num_classes: number of classes; 0 returns the features of the cells.
        in_chans: number of image channels.
        width: number of channels of the feature maps.
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


_CFG = make_cfg(8, (3, 96, 96), 8, "stage1.0", mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))

_TRAINED = _CFG | {"file": str(weights_folder() / "recall_attention" / "model.safetensors")}

default_cfgs = generate_default_cfgs({"recall.untrained": _CFG, "recall_attention.seed0": _TRAINED})


class RecallAttentionNet(RecallNet):
    """:class:`RecallNet` with an attention block after ``stage2``; the demo trains this network."""

    def __init__(self, num_classes: int = 8, in_chans: int = 3, width: int = 64, **head: Any) -> None:
        super().__init__(num_classes, in_chans, width, **head)
        insert_(self, stages="stage2", num_heads=4, qk_norm="match", example_input=(1, in_chans, 96, 96))


PLAIN = "Network for the recall task without attention, which stays at chance."
ATTENTION = "Network for the recall task with an attention block; ``pretrained=True`` loads weights of the library."
recall = register_network(__name__, "recall", PLAIN, RecallNet)
recall_attention = register_network(__name__, "recall_attention", ATTENTION, RecallAttentionNet)

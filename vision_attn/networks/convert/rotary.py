"""Rotation of queries and keys by sines and cosines that a network passes in each call, as in EVA and DINOv3."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vision_attn.attention.kind import AttentionConfig
from vision_attn.attention.patterns import Grouping
from vision_attn.attention.position import PositionEncoding
from vision_attn.attention.position.encoding import Encoded

#: Buffers of :class:`CallRotationEncoding` in a block.
SIN_COS = ("position.sin", "position.cos")
IN_CALLS = "its position encoding is an argument of its calls"


@dataclass(frozen=True)
class CallRotation:
    """Rotation of queries and keys by the sines and cosines that a network passes in each call."""

    #: True: channel k is paired with k + d/2; False: with its neighbor
    halves: bool

    def build(self, block: AttentionConfig, device: object = None, dtype: object = None) -> PositionEncoding:
        return CallRotationEncoding(self)


class CallRotationEncoding(PositionEncoding):
    config: CallRotation
    sin: Tensor
    cos: Tensor

    def __init__(self, config: CallRotation) -> None:
        super().__init__(config)
        for name in ("sin", "cos"):  # ([b or n,] i, d), different in each call; empty without a rotation
            self.register_buffer(name, torch.empty(0), persistent=False)

    def forward(self, q: Tensor, k: Tensor, grouping: Grouping) -> Encoded:
        return (self.rotate(q), self.rotate(k), None) if self.cos.numel() else (q, k, None)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate pairs of channels of ``(b, n, i, d)``, except for class and register tokens, which come first."""
        first, x = x.split([x.shape[2] - self.cos.shape[-2], self.cos.shape[-2]], dim=2)
        halves = self.config.halves
        a, b = x.unflatten(-1, (2, -1) if halves else (-1, 2)).unbind(-2 if halves else -1)
        partner = torch.cat([-b, a], dim=-1) if halves else torch.stack([-b, a], dim=-1).flatten(-2)
        return torch.cat([first, (x * self.cos + partner * self.sin).to(x.dtype)], dim=2)

"""Attention in the place of a convolution: it gives as many positions and channels as the convolution did."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_attn.attention.blocks.attention import Attention2d
from vision_attn.attention.blocks.specified import Specified
from vision_attn.attention.position import RelPosDecomposed
from vision_attn.checks import check_count

__all__ = ["StridedAttention2d"]


class StridedAttention2d(Specified):
    """``average(attention(x))``: attention in the place of ``Conv2d(channels, out_channels, 3, stride, padding=1)``.

    Attention sees the whole map; with a stride, what it gives is averaged over squares of that side. A square that
    reaches over the border is averaged over the positions that there are. The state dict is ``attn.*``.

    Args:
        channels: channels of the map.
        num_heads: number of heads.
        stride: positions from one output to the next.
        out_channels: channels of the result; ``channels`` when None.
        feat_size: size of the map, in positions before the stride: ``position`` is ``RelPosDecomposed(feat_size)``
            where it is not given.
        device: where the parameters live.
        dtype: type of the parameters.
        **attention: further arguments of :class:`Attention2d`.

    Raises:
        ValueError: an argument is out of range; the message says which, what was expected and what came.

    Source: Srinivas et al., *Bottleneck Transformers*, 2021, section 3, https://arxiv.org/abs/2101.11605

    >>> StridedAttention2d(64, 4, stride=2, feat_size=(14, 10))(torch.randn(2, 64, 14, 10)).shape
    torch.Size([2, 64, 7, 5])
    """

    def __init__(
        self,
        channels: int,
        num_heads: int = 8,
        *,
        stride: int = 1,
        out_channels: int | None = None,
        feat_size: int | tuple[int, int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **attention: Any,
    ) -> None:
        super().__init__()
        check_count("stride", stride)
        if feat_size is not None and attention.get("position") is None:
            attention["position"] = RelPosDecomposed(feat_size)
        self.stride = stride
        self.attn = Attention2d(channels, num_heads, out_channels=out_channels, device=device, dtype=dtype, **attention)

    def forward(self, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        """Attend, then average.

        Args:
            x: maps, ``(b, c, h, w)``.
            mask: as in :meth:`Attention2d.forward`, for the map before the stride.
            context: as in :meth:`Attention2d.forward`.

        Returns:
            ``(b, out_channels, ⌈h / stride⌉, ⌈w / stride⌉)``.

        Raises:
            ValueError: as :meth:`Attention2d.forward`.
        """
        y = self.attn(x, mask, context)
        return y if self.stride == 1 else F.avg_pool2d(y, self.stride, ceil_mode=True)

    def specification(self) -> dict[str, object]:
        return {"stride": self.stride}

    def extra_repr(self) -> str:
        return f"stride={self.stride}"

"""A transformer encoder layer on the positions of a feature map."""

from collections.abc import Callable, Collection
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention.blocks.attention import Attention2d
from vision_attn.attention.blocks.config import Configurable
from vision_attn.attention.blocks.gated_residual import check_same_channels
from vision_attn.attention.blocks.projection import ChannelNorm, Pointwise2d, accepts_unbatched, to_memory_format_of
from vision_attn.checks import check_above, check_bool, check_choice

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu}


class TransformerBlock2d(Configurable):
    """``x + attn(norm1(x))``, then ``x + fc2(act(fc1(norm2(x))))``; with post-norm, each sum is normalized instead.

    This is ``torch.nn.TransformerEncoderLayer`` with the positions of a feature map as tokens.

    Args:
        channels: input and output channels.
        num_heads: number of heads.
        mlp_ratio: ratio of the hidden channels of the MLP to ``channels``.
        norm_first: normalize the input of each branch (pre-norm) instead of each sum (post-norm, as in the original).
        activation: ``"gelu"`` (exact, with the error function) or ``"relu"``.
        mlp_drop: dropout probability after the activation and after the second layer of the MLP.
        bias: add biases in norms, convolutions and projections.
        eps: constant that the norms add to the variance.
        device: device of the parameters.
        dtype: dtype of the parameters.
        **attention: further arguments of :class:`Attention2d`, such as ``attn_drop`` and ``proj_drop``.

    Raises:
        ValueError: an argument is out of range; the message names it and states the expected and the given value.

    Source: Vaswani et al., *Attention Is All You Need*, 2017, section 3, https://arxiv.org/abs/1706.03762; pre-norm:
    Xiong et al., *On Layer Normalization in the Transformer Architecture*, 2020, https://arxiv.org/abs/2002.04745

    >>> TransformerBlock2d(64, num_heads=4, activation="relu")(torch.randn(2, 64, 7, 5)).shape
    torch.Size([2, 64, 7, 5])
    """

    rank = 2
    fixed: ClassVar[Collection[str]] = ("channels", "norm_first", "activation")

    def __init__(
        self,
        channels: int,
        num_heads: int = 8,
        *,
        mlp_ratio: float = 4.0,
        norm_first: bool = True,
        activation: str = "gelu",
        mlp_drop: float = 0.0,
        bias: bool = True,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **attention: Any,
    ) -> None:
        super().__init__()
        check_choice("activation", activation, ACTIVATIONS)
        check_same_channels(channels, **attention)
        check_above(0, mlp_ratio=mlp_ratio)
        check_bool(norm_first=norm_first, bias=bias)
        hidden = round(channels * mlp_ratio)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        attention = {"qkv_bias": bias, "proj_bias": bias, **attention}
        self.channels = channels
        self.norm_first = norm_first
        self.activation = activation
        self.norm1: ChannelNorm = ChannelNorm(channels, eps=eps, bias=bias, **factory)
        self.attn: Attention2d = Attention2d(channels, num_heads, **factory, **attention)
        self.norm2: ChannelNorm = ChannelNorm(channels, eps=eps, bias=bias, **factory)
        self.fc1: Pointwise2d = Pointwise2d(channels, hidden, 1, bias=bias, **factory)
        self.fc2: Pointwise2d = Pointwise2d(hidden, channels, 1, bias=bias, **factory)
        self.mlp_drop: nn.Dropout = nn.Dropout(mlp_drop)

    @accepts_unbatched
    def forward(self, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        """Apply attention, then the MLP, each with a residual connection.

        Args:
            x: feature maps, ``(b, c, h, w)``, or a single feature map, ``(c, h, w)``.
            mask: as in :meth:`Attention2d.forward`.
            context: as in :meth:`Attention2d.forward`.

        Returns:
            ``(b, c, h, w)`` in the dtype and memory format of ``x``.

        Raises:
            ValueError: as in :meth:`Attention2d.forward`.
        """
        if self.norm_first:
            y = x + self.attn(self.norm1(x), mask, context).to(x.dtype)
            y = y + self.mlp(self.norm2(y)).to(x.dtype)
        else:
            y = self.norm1(x + self.attn(x, mask, context)).to(x.dtype)
            y = self.norm2(y + self.mlp(y)).to(x.dtype)
        return to_memory_format_of(x, y)

    def mlp(self, x: Tensor) -> Tensor:
        """Apply the two 1×1 convolutions to a feature map ``(b, c, h, w)``."""
        return self.mlp_drop(self.fc2(self.mlp_drop(ACTIVATIONS[self.activation](self.fc1(x)))))

    def get_config(self) -> dict[str, object]:
        return {"norm_first": self.norm_first, "activation": self.activation}

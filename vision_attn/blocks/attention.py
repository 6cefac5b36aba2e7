"""Attention as a module: 1×1 projections around an implementation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vision_attn.attend import attend, attention_weights, check_impl
from vision_attn.patterns import resolve_pattern

__all__ = ["Attention2d", "check_count"]

# Calls that look at sizes and formats: torch.fx traces the block as one graph with these as nodes of it.
torch.fx.wrap("attend")
torch.fx.wrap("check_map")
torch.fx.wrap("in_format_of")


class Attention2d(nn.Module):
    """Multi-head attention between the positions of a feature map, projected by 1×1 convolutions.

    ::

        qkv     = Conv2d(c, 3c, 1)(x)               rows ordered (qkv, heads, head_dim)
        q, k, v : (b, heads, tokens, head_dim)      tokens row-major over (h, w)
        y       = softmax(scale q kᵀ + mask) v
        out     = Conv2d(c, c, 1)(y)

    The state dict is ``qkv.weight (3c, c, 1, 1)``, ``qkv.bias (3c)``, ``proj.weight (c, c, 1, 1)``, ``proj.bias (c)``
    whatever the implementation, which may be changed at any time with :func:`set_impl` or :func:`use_impl`.

    Args:
        channels: channels of the map, in and out; divisible by ``num_heads``.
        num_heads: number of heads.
        impl: the implementation, one of :data:`vision_attn.IMPLS`. They give the same result; ``"sdpa"`` is the fastest
            and needs memory for the tokens only, the others hold every attention weight.
        pattern: which positions attend to each other; ``"full"`` is all of them.
        scale: factor on the logits; ``head_dim ** -0.5`` when None.
        qkv_bias: whether queries, keys and values have a bias.
        attn_drop: probability of dropping an attention weight, in training.
        proj_drop: probability of dropping an element of the output, in training.
        device: where the parameters live.
        dtype: type of the parameters.

    Raises:
        ValueError: an argument is out of range; the message says which, what was expected and what came.

    Source: Vaswani et al., *Attention Is All You Need*, 2017, section 3.2, https://arxiv.org/abs/1706.03762;
    on feature maps: Bello et al., *Attention Augmented Convolutional Networks*, 2019, https://arxiv.org/abs/1904.09925

    >>> Attention2d(64, num_heads=4)(torch.randn(2, 64, 14, 10)).shape
    torch.Size([2, 64, 14, 10])
    """

    def __init__(
        self,
        channels: int,
        num_heads: int = 8,
        *,
        impl: str = "sdpa",
        pattern: str = "full",
        scale: float | None = None,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_count("channels", channels)
        check_count("num_heads", num_heads)
        if channels % num_heads:
            divisors = [n for n in range(1, channels + 1) if channels % n == 0]
            raise ValueError(
                f"num_heads must divide channels; got channels={channels} and num_heads={num_heads}: "
                f"choose num_heads from {', '.join(map(str, divisors))}"
            )
        check_impl(impl)
        for name, probability in (("attn_drop", attn_drop), ("proj_drop", proj_drop)):
            if not 0.0 <= probability <= 1.0:
                raise ValueError(f"{name} must be a probability between 0 and 1; got {probability!r}")
        self.channels = channels
        self.num_heads = num_heads
        self.impl = impl
        self.pattern = pattern
        self.scale = (channels // num_heads) ** -0.5 if scale is None else scale
        self.attn_drop = attn_drop
        self.tokens = resolve_pattern(pattern)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1, bias=qkv_bias, device=device, dtype=dtype)
        self.proj = nn.Conv2d(channels, channels, 1, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            x: maps, ``(b, c, h, w)``.
            mask: bool (True = may attend) or additive float, broadcastable to ``(b, heads, h·w, h·w)``: its last two
                axes are the query and the key token.

        Returns:
            ``(b, c, h, w)`` in the memory format of ``x``. A position that may attend to nothing gets ``proj(0)``.

        Raises:
            ValueError: ``x`` is no batch of maps of ``channels`` channels, or ``mask`` does not fit.
        """
        check_map(x, self.channels)
        size = (x.shape[2], x.shape[3])
        dropout = self.attn_drop if self.training else 0.0

        if self.impl == "einx":
            q, k, v = self.tokens.split_einx(self.qkv(x), self.num_heads)
            y = attend(q, k, v, impl=self.impl, scale=self.scale, mask=mask, dropout=dropout)
            y = self.tokens.merge_einx(y, size)
        else:
            # In channels-last a 1×1 convolution is a linear layer on tokens, and q, k and v are views of what it
            # writes: the fused kernel then reads contiguous heads, which makes it several times faster.
            tokens_last = x.contiguous(memory_format=torch.channels_last) if self.impl == "sdpa" else x
            q, k, v = self.tokens.split_bmm(self.qkv(tokens_last), self.num_heads)
            y = attend(q, k, v, impl=self.impl, scale=self.scale, mask=mask, dropout=dropout)
            y = self.tokens.merge_bmm(y, size)
        return in_format_of(x, self.proj_drop(self.proj(y)))

    def attention_weights(self, x: Tensor, mask: Tensor | None = None, queries: Tensor | None = None) -> Tensor:
        """How much every query attends to every key, for the map that :meth:`forward` would be given.

        Args:
            x: maps, ``(b, c, h, w)``.
            mask: as in :meth:`forward`.
            queries: indices of the tokens to look from, ``(i,)``; all when None.

        Returns:
            ``(b, heads, i, h·w)``, float32 or float64, without dropout.

        >>> Attention2d(8, 2).attention_weights(torch.randn(1, 8, 3, 4)).shape
        torch.Size([1, 2, 12, 12])
        """
        check_map(x, self.channels)
        q, k, _ = self.tokens.split_bmm(self.qkv(x), self.num_heads)
        if queries is not None:
            q = q[:, :, queries]
            if mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
                mask = mask[..., queries, :]
        return attention_weights(q, k, scale=self.scale, mask=mask)

    def extra_repr(self) -> str:
        return f"{self.channels}, num_heads={self.num_heads}, impl={self.impl!r}, pattern={self.pattern!r}"


def check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1; got {value!r}")


def check_map(x: Tensor, channels: int) -> None:
    if x.dim() != 4 or x.shape[1] != channels:
        raise ValueError(f"x must be maps of shape (batch, {channels}, height, width); got {tuple(x.shape)}")


def in_format_of(x: Tensor, y: Tensor) -> Tensor:
    """``y`` in the memory format of ``x``; where ``x`` is in both, as with a single channel, in the default one."""
    channels_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return y.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)

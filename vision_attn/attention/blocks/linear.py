"""Linear attention as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vision_attn.attention.attend.linear import LINEAR_IMPLS, attend_linear, check_feature_map, check_linear_impl
from vision_attn.attention.blocks.attention import check_map
from vision_attn.attention.blocks.projection import Pointwise2d, in_format_of
from vision_attn.attention.blocks.specified import Specified
from vision_attn.checks import check_divides, check_flags, check_new, check_probability, product

__all__ = ["LinearAttention2d"]


class LinearAttention2d(Specified):
    """Attention at a cost that grows with the positions of a map, not with their square.

    ::

        qkv     = Conv2d(c, 3c, 1)(x)               rows ordered (qkv, heads, head_dim)
        y       = softmax_d(q) (softmax_j(k)ᵀ v)    by default; q (kᵀ v) without a feature map
        out     = Conv2d(c, c, 1)(y)

    It is another function than :class:`Attention2d`, with a state dict of the same names and shapes: weights trained
    for one mean something else to the other. Its forms are ``"einx"`` and ``"bmm"``.

    Args:
        channels: channels of the map, in and out; divisible by ``num_heads``.
        num_heads: number of heads.
        impl: ``"bmm"`` or ``"einx"``; they give the same result.
        feature_map: ``"softmax"``; ``"elu"`` for ``elu + 1`` of queries and keys, with weights divided by their sum;
            ``"none"``.
        qkv_bias: whether queries, keys and values have a bias.
        proj_drop: probability of dropping an element of the output, in training.
        device: where the parameters live.
        dtype: type of the parameters.

    Raises:
        ValueError: an argument is out of range; the message says which, what was expected and what came.

    Source: Shen et al., *Efficient Attention: Attention with Linear Complexities*, 2021,
    https://arxiv.org/abs/1812.01243; with ``elu + 1``: Katharopoulos et al., *Transformers are RNNs*, 2020,
    https://arxiv.org/abs/2006.16236

    >>> LinearAttention2d(64, num_heads=4)(torch.randn(2, 64, 14, 10)).shape
    torch.Size([2, 64, 14, 10])
    """

    check_impl = staticmethod(check_linear_impl)

    def __init__(
        self,
        channels: int,
        num_heads: int = 8,
        *,
        impl: str = "bmm",
        feature_map: str = "softmax",
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_new(device, dtype, channels=channels, num_heads=num_heads)
        check_divides("num_heads", num_heads, "channels", channels)
        check_flags(qkv_bias=qkv_bias)
        check_probability("proj_drop", proj_drop)
        check_linear_impl(impl)
        check_feature_map(feature_map)
        self.channels = channels
        self.num_heads = num_heads
        self.impl = impl
        self.feature_map = feature_map
        self.qkv = Pointwise2d(channels, 3 * channels, 1, bias=qkv_bias, device=device, dtype=dtype)
        self.proj = Pointwise2d(channels, channels, 1, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            x: maps, ``(b, c, h, w)``, or one map, ``(c, h, w)``.
            mask: bool (True = may be attended to), broadcastable to ``(b, heads, 1, h·w)``: a key that is masked is so
                for every query.

        Returns:
            ``(b, c, h, w)`` in the memory format of ``x``.

        Raises:
            ValueError: ``x`` is no batch of maps of ``channels`` channels, or ``mask`` is not bool, tells queries apart
                or does not fit.
        """
        if isinstance(x, torch.fx.Proxy):  # one node of the graph: what happens inside depends on the size of the map
            return x.tracer.create_proxy("call_module", x.tracer.path_of_module(self), (x, mask), {})
        if x.dim() == 3:
            return self.forward(x[None], mask)[0]
        check_map("x", x, self.channels, rank=2)
        if 0 in x.shape:  # einx cannot tell the sizes of nothing
            return self.proj(torch.zeros_like(x))
        impl = LINEAR_IMPLS[self.impl]
        q, k, v = impl.heads_apart(self.qkv(x), 3, self.num_heads)
        if mask is not None:
            mask = key_mask(mask, (x.shape[0], self.num_heads, 1, product(x.shape[2:])))
        y = impl.heads_together(
            attend_linear(q, k, v, impl=self.impl, mask=mask, feature_map=self.feature_map), tuple(x.shape[2:])
        )
        return in_format_of(x, self.proj_drop(self.proj(y)))

    def specification(self) -> dict[str, object]:
        other = {} if self.feature_map == "softmax" else {"feature_map": self.feature_map}
        return {"attention": "linear", "num_heads": self.num_heads, **other}

    def extra_repr(self) -> str:
        other = "" if self.feature_map == "softmax" else f", feature_map={self.feature_map!r}"
        return f"{self.channels}, num_heads={self.num_heads}, impl={self.impl!r}{other}"


def key_mask(mask: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """The mask as linear attention takes it, ``(b or 1, n or 1, keys or 1, 1)``."""
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool (True = may be attended to) for linear attention; got {mask.dtype}")
    full = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if len(full) != 4 or any(size not in (1, most) for size, most in zip(full, shape, strict=True)):
        raise ValueError(
            f"mask must broadcast to (batch, heads, 1, keys) = {shape} for linear attention, which cannot mask a key "
            f"for one query alone; got {tuple(mask.shape)}"
        )
    return mask.view(full).mT

"""Linear (efficient) attention in einx and in torch, ``φ(q) (ψ(k)ᵀ v)``, which multiplies keys and values first.

``φ`` and ``ψ`` are the kernel's feature maps: softmax over the width of queries and over the keys, ``elu + 1`` or
``relu`` of both, or the identity.

The matrix of queries by keys is never computed: the product of keys and values is ``(d, e)`` per head for any number of
tokens. The rows of ``φ(q) ψ(k)ᵀ`` are positive and sum to one, as attention weights do, except with the identity.

    q (b, n, i, d)    k (b, n, j, d)    v (b, n, j, e)    ->    (b, n, i, e)

``mask`` is None or bool, ``(b or 1, n or 1, j, 1)``, and True for the keys that queries may attend to.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention.blocks.config import ConfigurableImpl
from vision_attn.attention.blocks.projection import Pointwise2d, accepts_unbatched, to_memory_format_of
from vision_attn.attention.dispatch import without_autocast
from vision_attn.attention.graphs import in_graph
from vision_attn.attention.kernels import BMM, EINX, TO_FIRST, TO_LAST
from vision_attn.attention.masks import broadcast_mask, check_mask, unmask_empty_rows, upcast
from vision_attn.attention.padding import latest_pixels, valid_positions
from vision_attn.attention.scopes import scoped_values
from vision_attn.checks import check_bool, check_choice, check_divides

#: Names of the kernel's feature maps.
FEATURE_MAPS = ("softmax", "elu", "relu", "none")
#: Added to the sum of the weights of a query with ``feature_map="relu"``, which may be zero; the value of timm.
EPS = 1e-5


def linear_einx(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    import einx

    summary = einx.dot("b n j d, b n j e -> b n d e", k, v)
    return einx.dot("b n i d, b n d e -> b n i e", q, summary)


def linear_bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q @ (k.mT @ v)


def features(q: Tensor, k: Tensor, feature_map: str) -> tuple[Tensor, Tensor]:
    """Return ``φ(q)`` and ``ψ(k)``; the features of a key of -inf are 0."""
    if feature_map == "none":
        return q, k
    if feature_map == "softmax":
        return torch.softmax(q, dim=-1), torch.softmax(k, dim=-2)
    # Queries are divided by the sum of their weights.
    # The exponential is exact where elu + 1 is rounded to zero.
    q, k = (F.relu(x) if feature_map == "relu" else F.relu(x) + x.clamp(max=0).exp() for x in (q, k))
    total = k.sum(dim=-2, keepdim=True)
    # A common factor of all keys does not change the weights and keeps sums over many keys in the range of float16.
    level = total.mean(dim=-1, keepdim=True).clamp(min=EPS)
    return q / (q @ (total / level).mT + (EPS / level if feature_map == "relu" else 0.0)), k / level


#: The implementations of linear attention by name.
LINEAR_IMPLS = {"einx": replace(EINX, attend=linear_einx), "bmm": replace(BMM, attend=linear_bmm)}
LINEAR_IMPLS["auto"] = LINEAR_IMPLS["bmm"]  # without the overhead of einx


def attend_linear(
    q: Tensor, k: Tensor, v: Tensor, *, impl: str = "bmm", mask: Tensor | None = None, feature_map: str = "softmax"
) -> Tensor:
    """Compute linear attention, ``φ(q) (ψ(k)ᵀ v)``, with a named implementation.

    Args:
        q: queries, ``(b, n, i, d)``.
        k: keys, ``(b, n, j, d)``.
        v: values, ``(b, n, j, e)``.
        impl: one of :data:`LINEAR_IMPLS`.
        mask: bool (True = queries may attend to this key), broadcastable to ``(b, n, j, 1)``.
        feature_map: ``"softmax"`` over the width of queries and over the keys; ``"elu"`` for ``elu + 1`` and ``"relu"``
            for ``relu`` of both, with weights divided by their sum; ``"none"`` for ``q (kᵀ v)``.

    Returns:
        ``(b, n, i, e)`` in the dtype of ``v``; zeros where all keys are masked.

    >>> q = k = v = torch.randn(2, 4, 49, 8)
    >>> attend_linear(q, k, v).shape
    torch.Size([2, 4, 49, 8])
    """
    q, k, row_has_key = upcast(q), upcast(k), None
    if mask is not None:
        rows, row_has_key = unmask_empty_rows(mask.mT)  # all queries share one row of keys
        k = k.masked_fill(~rows.mT, 0.0 if feature_map == "none" else -torch.inf)
    with without_autocast(q):
        q, k = features(q, k, feature_map)
        if feature_map in ("softmax", "none"):
            y = LINEAR_IMPLS[impl].attend(q.to(v.dtype), k.to(v.dtype), v)
        else:  # a query that is nearly orthogonal to all keys has features outside the range of float16
            y = LINEAR_IMPLS[impl].attend(q, k, upcast(v)).to(v.dtype)
    return y if row_has_key is None else torch.where(row_has_key, y, torch.zeros((), dtype=y.dtype, device=y.device))


class LinearAttention2d(ConfigurableImpl):
    """Linear attention: its cost is linear, not quadratic, in the number of positions.

    ::

        qkv     = Conv2d(c, 3c, 1)(x)               rows ordered (qkv, heads, head_dim)
        y       = softmax_d(q) (softmax_j(k)ᵀ v)    by default; q (kᵀ v) without a feature map
        out     = Conv2d(c, c, 1)(y)

    The names and shapes in the state dict equal those of :class:`Attention2d`, but the function differs: weights
    trained for one of the two layers are not suitable for the other.

    Args:
        channels: input and output channels; divisible by ``num_heads``.
        num_heads: number of heads.
        impl: the implementation, ``"bmm"`` or ``"einx"``, which return the same result; ``"auto"`` is ``"bmm"``.
        feature_map: ``"softmax"``; ``"elu"`` for ``elu + 1`` and ``"relu"`` for ``relu`` of queries and keys, with
            weights divided by their sum; ``"none"``.
        qkv_bias: add a bias to queries, keys and values.
        proj_drop: dropout probability of the output.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Raises:
        ValueError: an argument is out of range; the message names it and states the expected and the given value.

    Source: Shen et al., *Efficient Attention: Attention with Linear Complexities*, 2021,
    https://arxiv.org/abs/1812.01243; with ``elu + 1``: Katharopoulos et al., *Transformers are RNNs*, 2020,
    https://arxiv.org/abs/2006.16236; with ``relu``: Cai et al., *EfficientViT*, 2023, https://arxiv.org/abs/2205.14756

    >>> LinearAttention2d(64, num_heads=4)(torch.randn(2, 64, 14, 10)).shape
    torch.Size([2, 64, 14, 10])
    """

    rank = 2
    fixed: ClassVar[Collection[str]] = ("channels", "num_heads", "feature_map")
    impls: ClassVar[Collection[str]] = LINEAR_IMPLS

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
        check_divides("num_heads", num_heads, "channels", channels)
        check_bool(qkv_bias=qkv_bias)
        check_choice("feature_map", feature_map, FEATURE_MAPS)
        self.channels = channels
        self.num_heads = num_heads
        self.impl = impl
        self.feature_map = feature_map
        self.qkv: Pointwise2d = Pointwise2d(channels, 3 * channels, 1, bias=qkv_bias, device=device, dtype=dtype)
        self.proj: Pointwise2d = Pointwise2d(channels, channels, 1, device=device, dtype=dtype)
        self.proj_drop: nn.Dropout = nn.Dropout(proj_drop)

    @accepts_unbatched
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute linear attention on feature maps.

        Args:
            x: feature maps, ``(b, c, h, w)``, or a single feature map, ``(c, h, w)``.
            mask: bool (True = queries may attend to this key), broadcastable to ``(b, heads, 1, h·w)``. A key is masked
                for all queries.

        Returns:
            ``(b, c, h, w)`` in the memory format of ``x``.

        Raises:
            ValueError: ``x`` does not have ``channels`` channels, or ``mask`` is not bool, differs between queries or
                does not broadcast.
        """
        if mask is not None:
            check_mask(mask.shape, mask.dtype, x.shape[0], self.num_heads, (1,), x.shape[2:])
            if mask.dtype != torch.bool:
                raise ValueError(f"mask must be bool (True = may attend) for linear attention, got {mask.dtype}")
            mask = broadcast_mask(mask).mT
        if 0 in x.shape:  # einx does not support empty tensors
            return self.proj(self.qkv(x)[:, : self.channels])
        impls, padded = scoped_values(self, "impl", "valid")
        impl = [self._impl, *impls][-1]
        if (pixels := latest_pixels(padded, in_graph(x))) is not None:
            valid = valid_positions(pixels, x)
            x = x.masked_fill(valid.logical_not(), 0.0)
            keys = valid.flatten(1)[:, None, :, None]
            mask = keys if mask is None else torch.logical_and(mask, keys)
        q, k, v = LINEAR_IMPLS[impl].split_heads(self.qkv(x).permute(*TO_LAST[4]), *[self.num_heads] * 3)
        y = attend_linear(q, k, v, impl=impl, mask=mask, feature_map=self.feature_map)
        y = y.transpose(1, 2).reshape(x.shape[0], *x.shape[2:], self.channels).permute(*TO_FIRST[4])
        return to_memory_format_of(x, self.proj_drop(self.proj(y)))

    def get_config(self) -> dict[str, object]:
        config: dict[str, object] = {"attention": "linear", "num_heads": self.num_heads}
        return config if self.feature_map == "softmax" else {**config, "feature_map": self.feature_map}

    def extra_repr(self) -> str:
        return f"{self.channels}, num_heads={self.num_heads}, impl={self.impl!r}, feature_map={self.feature_map!r}"

"""Linear (efficient) attention, in two forms: ``φ(q) (ψ(k)ᵀ v)``, keys and values first.

``φ`` and ``ψ`` are a feature map: softmax over the width and over the keys, ``elu + 1`` of both, or nothing.

No matrix of queries by keys exists: the product of keys and values is ``(d, e)`` in each head, whatever the number of
tokens. The rows of ``φ(q) ψ(k)ᵀ`` are weights, but without a feature map: they are positive and sum to one.

    q (b, n, i, d)    k (b, n, j, d)    v (b, n, j, e)    ->    (b, n, i, e)

``mask`` is None or bool, ``(b or 1, n or 1, j, 1)``: the keys that may be attended to at all.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_attn.attention.attend.implementations import BMM, EINX
from vision_attn.attention.attend.masks import open_rows, upcast
from vision_attn.attention.attend.registry import without_autocast

__all__ = ["LINEAR_IMPLS", "attend_linear", "check_feature_map", "check_linear_impl"]


#: By name.
FEATURE_MAPS = ("softmax", "elu", "none")


def linear_einx(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, feature_map: str) -> Tensor:
    import einx

    if feature_map == "softmax":
        q, k = einx.softmax("b n i [d]", upcast(q)), einx.softmax("b n [j] d", masked_keys(k, mask))
    else:
        q, k = features(q, k, mask, feature_map)
    context = einx.dot("b n j d, b n j e -> b n d e", k.to(v.dtype), v)
    return einx.dot("b n i d, b n d e -> b n i e", q.to(v.dtype), context)


def linear_bmm(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, feature_map: str) -> Tensor:
    b, n, i, d = q.shape
    j, e = v.shape[2:]
    if feature_map == "softmax":
        q, k = torch.softmax(upcast(q), dim=-1), torch.softmax(masked_keys(k, mask), dim=-2)
    else:
        q, k = features(q, k, mask, feature_map)
    q, k = q.to(v.dtype), k.to(v.dtype)
    context = torch.bmm(k.reshape(b * n, j, d).transpose(1, 2), v.reshape(b * n, j, e))
    return torch.bmm(q.reshape(b * n, i, d), context).view(b, n, i, e)


def masked_keys(k: Tensor, mask: Tensor | None) -> Tensor:
    return upcast(k) if mask is None else upcast(k).masked_fill(~mask, -torch.inf)


def features(q: Tensor, k: Tensor, mask: Tensor | None, feature_map: str) -> tuple[Tensor, Tensor]:
    """Queries and keys as ``elu + 1``, queries divided by what their weights sum to; or as they are."""
    q, k = upcast(q), upcast(k)
    if feature_map == "elu":
        q, k = F.elu(q) + 1, F.elu(k) + 1
    if mask is not None:
        k = k.masked_fill(~mask, 0.0)
    if feature_map == "elu":
        total = k.sum(dim=-2, keepdim=True)
        # One factor for all keys leaves the weights as they are, and sums over a large map fit into half precision.
        level = total.mean(dim=-1, keepdim=True)
        q, k = q / (q @ (total / level).mT), k / level
    return q, k


#: The forms of linear attention.
LINEAR_IMPLS = {"einx": replace(EINX, attend=linear_einx), "bmm": replace(BMM, attend=linear_bmm)}


def attend_linear(
    q: Tensor, k: Tensor, v: Tensor, *, impl: str = "bmm", mask: Tensor | None = None, feature_map: str = "softmax"
) -> Tensor:
    """Linear attention ``φ(q) (ψ(k)ᵀ v)`` by the form of a name.

    Args:
        q: queries, ``(b, n, i, d)``.
        k: keys, ``(b, n, j, d)``.
        v: values, ``(b, n, j, e)``.
        impl: one of :data:`LINEAR_IMPLS`.
        mask: bool (True = may be attended to), broadcastable to ``(b, n, j, 1)``.
        feature_map: ``"softmax"`` over the width of queries and over the keys; ``"elu"`` for ``elu + 1`` of both, with
            weights divided by their sum; ``"none"`` for ``q (kᵀ v)``.

    Returns:
        ``(b, n, i, e)`` in the dtype of ``v``; zeros where nothing may be attended to.

    Raises:
        ValueError: unknown ``impl`` or ``feature_map``.

    Source: Shen et al., *Efficient Attention: Attention with Linear Complexities*, 2021,
    https://arxiv.org/abs/1812.01243; with ``elu + 1``: Katharopoulos et al., *Transformers are RNNs*, 2020,
    https://arxiv.org/abs/2006.16236

    >>> q = k = v = torch.randn(2, 4, 49, 8)
    >>> attend_linear(q, k, v).shape
    torch.Size([2, 4, 49, 8])
    """
    check_linear_impl(impl)
    check_feature_map(feature_map)
    reachable = None
    if mask is not None:
        rows, reachable = open_rows(mask.mT)  # of keys: there is one row for all queries
        mask = rows.mT
    with without_autocast(q):
        y = LINEAR_IMPLS[impl].attend(q, k, v, mask, feature_map)
    return y if reachable is None else torch.where(reachable, y, torch.zeros((), dtype=y.dtype, device=y.device))


def check_linear_impl(impl: str) -> None:
    """Refuse what is no form of linear attention."""
    if not isinstance(impl, str) or impl not in LINEAR_IMPLS:
        raise ValueError(f"impl must be one of {', '.join(map(repr, LINEAR_IMPLS))} for linear attention; got {impl!r}")


def check_feature_map(feature_map: str) -> None:
    """Refuse what is no feature map."""
    if feature_map not in FEATURE_MAPS:
        raise ValueError(f"feature_map must be one of {', '.join(map(repr, FEATURE_MAPS))}; got {feature_map!r}")

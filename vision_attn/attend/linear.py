"""Linear attention, in two forms: ``softmax_d(q) (softmax_j(k)ᵀ v)``, keys and values first.

No matrix of queries by keys exists: the product of keys and values is ``(d, e)`` in each head, whatever the number of
tokens. The rows of ``softmax_d(q) softmax_j(k)ᵀ`` are weights: they are positive and sum to one.

    q (b, n, i, d)    k (b, n, j, d)    v (b, n, j, e)    ->    (b, n, i, e)

``mask`` is None or bool, ``(b or 1, n or 1, j, 1)``: the keys that may be attended to at all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vision_attn.attend.masks import apply_mask, at_least_float32, without_autocast, zero_unreachable

__all__ = ["LINEAR_IMPLS", "attend_linear", "check_linear_impl", "linear_bmm", "linear_einx"]


def linear_einx(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Linear attention with every axis by its name.

    Args:
        q: queries, ``(b, n, i, d)``.
        k: keys, ``(b, n, j, d)``.
        v: values, ``(b, n, j, e)``.
        mask: bool (True = may be attended to), broadcastable to ``(b, n, j, 1)``, or None.

    Returns:
        ``(b, n, i, e)`` in the dtype of ``v``.
    """
    import einx

    q = einx.softmax("b n i [d]", at_least_float32(q)).to(v.dtype)
    k, reachable = apply_mask(at_least_float32(k).mT, None if mask is None else mask.mT)
    k = zero_unreachable(einx.softmax("b n d [j]", k), reachable).to(v.dtype)
    context = einx.dot("b n d j, b n j e -> b n d e", k, v)
    return einx.dot("b n i d, b n d e -> b n i e", q, context)


def linear_bmm(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Linear attention with axes by their place.

    Arguments and result are those of :func:`linear_einx`.
    """
    b, n, i, d = q.shape
    j, e = v.shape[2:]
    q = torch.softmax(at_least_float32(q), dim=-1).to(v.dtype)
    k, reachable = apply_mask(at_least_float32(k).mT, None if mask is None else mask.mT)
    k = zero_unreachable(torch.softmax(k, dim=-1), reachable).to(v.dtype)
    context = torch.bmm(k.reshape(b * n, d, j), v.reshape(b * n, j, e))
    return torch.bmm(q.reshape(b * n, i, d), context).view(b, n, i, e)


#: The forms of linear attention.
LINEAR_IMPLS = {"einx": linear_einx, "bmm": linear_bmm}


def attend_linear(q: Tensor, k: Tensor, v: Tensor, *, impl: str = "bmm", mask: Tensor | None = None) -> Tensor:
    """Linear attention ``softmax_d(q) (softmax_j(k)ᵀ v)`` by the form of a name.

    Args:
        q: queries, ``(b, n, i, d)``.
        k: keys, ``(b, n, j, d)``.
        v: values, ``(b, n, j, e)``.
        impl: one of :data:`LINEAR_IMPLS`.
        mask: bool (True = may be attended to), broadcastable to ``(b, n, j, 1)``.

    Returns:
        ``(b, n, i, e)`` in the dtype of ``v``; zeros where nothing may be attended to.

    Raises:
        ValueError: unknown ``impl``.

    Source: Shen et al., *Efficient Attention: Attention with Linear Complexities*, 2021,
    https://arxiv.org/abs/1812.01243

    >>> q = k = v = torch.randn(2, 4, 49, 8)
    >>> attend_linear(q, k, v).shape
    torch.Size([2, 4, 49, 8])
    """
    check_linear_impl(impl)
    with without_autocast(q):
        return LINEAR_IMPLS[impl](q, k, v, mask)


def check_linear_impl(impl: str) -> None:
    """Refuse what is no form of linear attention.

    Args:
        impl: a name.

    Raises:
        ValueError: it is none of :data:`LINEAR_IMPLS`.
    """
    if not isinstance(impl, str) or impl not in LINEAR_IMPLS:
        raise ValueError(f"impl must be one of {', '.join(map(repr, LINEAR_IMPLS))} for linear attention; got {impl!r}")

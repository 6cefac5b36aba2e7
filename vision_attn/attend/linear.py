"""Linear (efficient) attention, in two forms: ``softmax_d(q) (softmax_j(k)ᵀ v)``, keys and values first.

No matrix of queries by keys exists: the product of keys and values is ``(d, e)`` in each head, whatever the number of
tokens. The rows of ``softmax_d(q) softmax_j(k)ᵀ`` are weights: they are positive and sum to one.

    q (b, n, i, d)    k (b, n, j, d)    v (b, n, j, e)    ->    (b, n, i, e)

``mask`` is None or bool, ``(b or 1, n or 1, j, 1)``: the keys that may be attended to at all.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vision_attn.attend.implementations import BMM, EINX
from vision_attn.attend.masks import open_rows, upcast
from vision_attn.attend.registry import without_autocast

__all__ = ["LINEAR_IMPLS", "attend_linear", "check_linear_impl"]


def linear_einx(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    import einx

    q = einx.softmax("b n i [d]", upcast(q)).to(v.dtype)
    k = einx.softmax("b n [j] d", masked_keys(k, mask)).to(v.dtype)
    context = einx.dot("b n j d, b n j e -> b n d e", k, v)
    return einx.dot("b n i d, b n d e -> b n i e", q, context)


def linear_bmm(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    b, n, i, d = q.shape
    j, e = v.shape[2:]
    q = torch.softmax(upcast(q), dim=-1).to(v.dtype)
    k = torch.softmax(masked_keys(k, mask), dim=-2).to(v.dtype)
    context = torch.bmm(k.reshape(b * n, j, d).transpose(1, 2), v.reshape(b * n, j, e))
    return torch.bmm(q.reshape(b * n, i, d), context).view(b, n, i, e)


def masked_keys(k: Tensor, mask: Tensor | None) -> Tensor:
    return upcast(k) if mask is None else upcast(k).masked_fill(~mask, -torch.inf)


#: The forms of linear attention.
LINEAR_IMPLS = {"einx": replace(EINX, attend=linear_einx), "bmm": replace(BMM, attend=linear_bmm)}


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
    reachable = None
    if mask is not None:
        rows, reachable = open_rows(mask.mT)  # of keys: there is one row for all queries
        mask = rows.mT
    with without_autocast(q):
        y = LINEAR_IMPLS[impl].attend(q, k, v, mask)
    return y if reachable is None else torch.where(reachable, y, torch.zeros((), dtype=y.dtype, device=y.device))


def check_linear_impl(impl: str) -> None:
    """Refuse what is no form of linear attention."""
    if not isinstance(impl, str) or impl not in LINEAR_IMPLS:
        raise ValueError(f"impl must be one of {', '.join(map(repr, LINEAR_IMPLS))} for linear attention; got {impl!r}")

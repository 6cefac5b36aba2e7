"""Implementations by name, and the two functions that blocks call."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from vision_attn.attend.implementations import attend_bmm, attend_einsum, attend_einx, attend_flex, attend_sdpa
from vision_attn.attend.masks import (
    apply_mask,
    at_least_float32,
    check_mask,
    for_every_head,
    without_autocast,
    zero_unreachable,
)

__all__ = ["IMPLS", "attend", "attention_weights", "check_impl", "register_impl"]

_ATTEND: dict[str, Callable[..., Tensor]] = {
    "einx": attend_einx,
    "bmm": attend_bmm,
    "einsum": attend_einsum,
    "sdpa": attend_sdpa,
    "flex": attend_flex,
}

#: Names of the implementations that come with the package.
IMPLS = tuple(_ATTEND)


def register_impl(name: str, function: Callable[..., Tensor]) -> None:
    """Make a further implementation available to every block, under a name of its own.

    Args:
        name: what ``impl=`` will call it.
        function: ``function(q, k, v, *, scale, mask, causal, dropout)``, all as in :func:`attend`, on queries, keys and
            values of as many heads. They may be strided views. ``mask`` has four axes, or is None; where a query may
            attend to nothing the result is to be zero.

    Raises:
        ValueError: the name is taken, or the function does not take these arguments.

    >>> from vision_attn.attend.implementations import attend_bmm
    >>> register_impl("mine", lambda q, k, v, **options: attend_bmm(q, k, v, **options))
    >>> q = torch.randn(2, 4, 49, 8)
    >>> attend(q, q, q, impl="mine").shape
    torch.Size([2, 4, 49, 8])
    """
    if not isinstance(name, str) or not name or name in _ATTEND:
        raise ValueError(f"name must be a new one, none of {', '.join(map(repr, _ATTEND))}; got {name!r}")
    try:
        inspect.signature(function).bind(None, None, None, scale=1.0, mask=None, causal=False, dropout=0.0)
    except TypeError as error:
        raise ValueError(
            f"function must take (q, k, v, *, scale, mask, causal, dropout); got {function!r}: {error}"
        ) from None
    _ATTEND[name] = function


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    impl: str = "sdpa",
    scale: float | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """Multi-head attention ``softmax(scale q kᵀ + mask) v`` by the implementation of a name.

    Args:
        q: queries, ``(b, n, i, d)``.
        k: keys, ``(b, m, j, d)``, where each of ``m`` heads serves ``n/m`` heads of the queries in a row.
        v: values, ``(b, m, j, e)``.
        impl: one of :data:`IMPLS`, or one that was registered.
        scale: factor on the logits; ``d ** -0.5`` when None.
        mask: bool (True = may attend) or additive float, broadcastable to ``(b, n, i, j)``.
        causal: whether a query attends to no later key than itself.
        dropout: probability with which an attention weight is dropped, applied always (the caller knows its mode).

    Returns:
        ``(b, n, i, e)`` in the dtype of ``v``; zeros for a query that may attend to nothing.

    Raises:
        ValueError: unknown ``impl``, heads that are no multiple, or a mask of another dtype or of a shape that does not
            broadcast; with ``"flex"``, dropout.
        NotImplementedError: gradients are asked of ``"flex"`` on the CPU.

    Source: Vaswani et al., *Attention Is All You Need*, 2017, section 3.2, https://arxiv.org/abs/1706.03762

    >>> q = k = v = torch.randn(2, 4, 49, 8)
    >>> attend(q, k, v, impl="bmm").shape
    torch.Size([2, 4, 49, 8])
    """
    check_impl(impl)
    check_mask(mask, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
    k, v = for_every_head(q, k), for_every_head(q, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with without_autocast(q):
        return _ATTEND[impl](q, k, v, scale=scale, mask=mask, causal=causal, dropout=dropout)


def attention_weights(
    q: Tensor, k: Tensor, *, scale: float | None = None, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """The weights themselves, ``softmax(scale q kᵀ + mask)``, whatever implementation the block runs.

    Args:
        q: queries, ``(b, n, i, d)``.
        k: keys, ``(b, m, j, d)``, shared as in :func:`attend`.
        scale: factor on the logits; ``d ** -0.5`` when None.
        mask: as in :func:`attend`.
        causal: as in :func:`attend`.

    Returns:
        ``(b, n, i, j)``, float32 or float64; every row sums to one, or to zero if its query may attend to nothing.

    Raises:
        ValueError: heads that are no multiple, or a mask of another dtype or of a shape that does not broadcast.

    >>> attention_weights(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)).shape
    torch.Size([1, 2, 3, 5])
    """
    check_mask(mask, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with without_autocast(q):
        logits = scale * at_least_float32(q) @ at_least_float32(for_every_head(q, k)).mT
        logits, reachable = apply_mask(logits, mask, causal)
        return zero_unreachable(torch.softmax(logits, dim=-1), reachable)


def check_impl(impl: str) -> None:
    """Refuse what is no implementation.

    Args:
        impl: a name.

    Raises:
        ValueError: it is neither one of :data:`IMPLS` nor was it registered.

    >>> check_impl("cudnn")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: impl must be one of 'einx', 'bmm', 'einsum', 'sdpa', 'flex'...; got 'cudnn'
    """
    if not isinstance(impl, str) or impl not in _ATTEND:
        raise ValueError(f"impl must be one of {', '.join(map(repr, _ATTEND))}; got {impl!r}")

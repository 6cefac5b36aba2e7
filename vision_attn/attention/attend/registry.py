"""Implementations by name, and attention between tokens by the implementation of a name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from vision_attn.attention.attend.implementations import BMM, EINSUM, EINX, SDPA, Implementation, groups_as_heads
from vision_attn.attention.attend.masks import add_mask, check_mask, open_rows, upcast, with_causal_mask, zero_rows
from vision_attn.checks import check_flags, check_number, check_probability, check_type

__all__ = [
    "IMPLEMENTATIONS",
    "IMPLS",
    "attend",
    "attend_groups",
    "attention_weights",
    "check_impl",
    "register_impl",
    "repeat_kv",
    "without_autocast",
]

IMPLEMENTATIONS: dict[str, Implementation] = {"einx": EINX, "bmm": BMM, "einsum": EINSUM, "sdpa": SDPA}

#: Names of the implementations that come with the package.
IMPLS = tuple(IMPLEMENTATIONS)


def register_impl(name: str, function: Callable[..., Tensor]) -> None:
    """Make a further implementation available to every block, under a name of its own.

    Args:
        name: what ``impl=`` will call it.
        function: ``function(q, k, v, *, scale, mask, causal, dropout)``, all as in :func:`attend`, on queries, keys and
            values of as many heads. They may be strided views. ``mask`` has four axes, or is None; every row of it has
            a key to attend to.

    Raises:
        ValueError: the name is taken, or the function does not take these arguments.

    >>> from vision_attn.attention.attend import attend
    >>> register_impl("mine", lambda q, k, v, **options: attend(q, k, v, impl="bmm", **options))
    >>> q = torch.randn(2, 4, 49, 8)
    >>> attend(q, q, q, impl="mine").shape
    torch.Size([2, 4, 49, 8])
    """
    if not isinstance(name, str) or not name or name in IMPLEMENTATIONS:
        raise ValueError(f"name must be a new one, none of {', '.join(map(repr, IMPLEMENTATIONS))}; got {name!r}")
    try:
        inspect.signature(function).bind(None, None, None, scale=1.0, mask=None, causal=False, dropout=0.0)
    except TypeError as error:
        raise ValueError(
            f"function must take (q, k, v, *, scale, mask, causal, dropout); got {function!r}: {error}"
        ) from None

    def with_groups(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, **options: float) -> Tensor:
        if mask is None:
            return function(q, k, v, mask=None, **options)
        *heads, mask = groups_as_heads(q, k, v, mask)
        return function(*heads, mask=mask, **options).reshape(*q.shape[:3], v.shape[3])

    IMPLEMENTATIONS[name] = replace(SDPA, attend=with_groups)


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
            broadcast.

    Source: Vaswani et al., *Attention Is All You Need*, 2017, section 3.2, https://arxiv.org/abs/1706.03762

    >>> q = k = v = torch.randn(2, 4, 49, 8)
    >>> attend(q, k, v, impl="bmm").shape
    torch.Size([2, 4, 49, 8])
    """
    check_impl(impl)
    check_flags(causal=causal)
    check_probability("dropout", dropout)
    if scale is not None:
        check_number("scale", scale)
    for name, x, like in (("q", q, q), ("k", k, q), ("v", v, k)):
        check_type(name, x, Tensor, "a tensor (batch, heads, tokens, width)")
        same = {"k": (0, 3), "v": (0, 1, 2)}.get(name, ())
        if x.dim() != 4 or not x.is_floating_point() or any(x.shape[axis] != like.shape[axis] for axis in same):
            raise ValueError(
                f"{name} must be of floating point and (batch, heads, tokens, width), with the batch of q, k of its "
                f"width and v of k's heads and tokens; got {x.dtype} {tuple(x.shape)} beside {tuple(like.shape)}"
            )
    reachable = None
    if 0 in (q.shape[0], q.shape[2], k.shape[2]):  # of which not every implementation can tell the sizes
        return (q @ repeat_kv(q, k).mT).to(v.dtype) @ repeat_kv(q, v)
    if mask is not None:
        mask = check_mask(mask, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]))[:, None]
        if causal:
            mask, causal = with_causal_mask(mask, q.shape[2], k.shape[2], q.device), False
        mask, reachable = open_rows(mask)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    options = {"scale": scale, "mask": mask, "causal": causal, "dropout": dropout}
    return attend_groups(IMPLEMENTATIONS[impl], q, k, v, reachable, **options)


def attend_groups(
    impl: Implementation, q: Tensor, k: Tensor, v: Tensor, reachable: Tensor | None, **options: object
) -> Tensor:
    """Attention in the groups of a pattern, ``(b·groups, n, i, e)``.

    ``options`` are those of the implementations. Rows that are not ``reachable``, ``(b or 1, groups or 1, n or 1, i,
    1)``, give zeros.
    """
    if k.shape[1] != q.shape[1]:
        k, v = repeat_kv(q, k), repeat_kv(q, v)
    with without_autocast(q):
        return zero_rows(impl.attend(q, k, v, **options), reachable)


def attention_weights(
    q: Tensor, k: Tensor, *, scale: float, mask: Tensor | None, reachable: Tensor | None, causal: bool
) -> Tensor:
    """The weights ``softmax(scale q kᵀ + mask)`` that every implementation stands for, ``(b·groups, n, i, j)``."""
    with without_autocast(q):
        logits = scale * upcast(q) @ upcast(repeat_kv(q, k)).mT
        weights = torch.softmax(add_mask(logits, mask, causal), dim=-1)
    return zero_rows(weights, reachable)


def repeat_kv(q: Tensor, k: Tensor) -> Tensor:
    """Keys or values ``(b, m, j, d)`` repeated for the heads of the queries that share them, ``(b, n, j, d)``."""
    n, m = q.shape[1], k.shape[1]
    if n == m:
        return k
    if n % m:
        raise ValueError(f"q must have a multiple of the heads of k and v; got {n} and {m}")
    return k.unsqueeze(2).expand(-1, -1, n // m, -1, -1).flatten(1, 2)


def check_impl(impl: str) -> None:
    """Refuse what is no implementation.

    >>> check_impl("cudnn")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: impl must be one of 'einx', 'bmm', 'einsum', 'sdpa'...; got 'cudnn'
    """
    if not isinstance(impl, str) or impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(map(repr, IMPLEMENTATIONS))}; got {impl!r}")


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context without autocast, which would take the logits back to half precision."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):  # there is no autocast of tensors without values
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)

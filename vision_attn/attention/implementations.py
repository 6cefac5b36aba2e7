"""Implementations by name, and attention between tokens by one of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from vision_attn.attention import masks
from vision_attn.attention.dispatch import attend_auto, repeat_kv, without_autocast
from vision_attn.attention.flex import attend_flex, attend_inputs_flex
from vision_attn.attention.kernels import BMM, EINX, Kernel, attend_einsum, attend_sdpa, with_four_axes
from vision_attn.checks import check_choice, check_flags, check_number, check_probability, check_type

IMPLEMENTATIONS: dict[str, Kernel] = {
    "einx": EINX,
    "bmm": BMM,
    "einsum": replace(BMM, attend=attend_einsum),
    "sdpa": replace(BMM, attend=attend_sdpa),
    "flex": replace(BMM, attend=attend_flex, attend_inputs=attend_inputs_flex),
    "auto": replace(BMM, attend=attend_auto),
}

#: Names of the implementations that come with the package; ``"auto"`` selects among them.
IMPLS = tuple(name for name in IMPLEMENTATIONS if name != "auto")


def register_impl(name: str, function: Callable[..., Tensor]) -> None:
    """Make another implementation available to every block, by name.

    Args:
        name: the name for ``impl=``.
        function: ``function(q, k, v, *, scale, mask, causal, dropout)``, all as in :func:`attend`, on queries, keys and
            values with the same number of heads. They may be strided views. ``mask`` has four axes, or is None; every
            row of it has a key to attend to.

    Raises:
        ValueError: the name is taken, or the function does not take these arguments.

    >>> import torch
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
        raise ValueError(f"function must take (q, k, v, *, scale, mask, causal, dropout); got {function!r}") from error

    def with_groups(q: Tensor, k: Tensor, v: Tensor, *, mask: masks.Mask, **options: float) -> Tensor:
        if mask is None:
            return function(q, k, v, mask=None, **options)
        *heads, mask = with_four_axes(q, k, v, mask)
        return function(*heads, mask=mask, **options).reshape(*q.shape[:3], v.shape[3])

    IMPLEMENTATIONS[name] = replace(BMM, attend=with_groups)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    impl: str = "auto",
    scale: float | None = None,
    mask: masks.Mask = None,
    causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """Multi-head attention ``softmax(scale q kᵀ + mask) v`` by a named implementation.

    Args:
        q: queries, ``(b, n, i, d)``.
        k: keys, ``(b, m, j, d)``, where each of ``m`` heads serves ``n/m`` consecutive heads of the queries.
        v: values, ``(b, m, j, e)``.
        impl: one of :data:`IMPLS`, ``"auto"``, or one that was registered.
        scale: factor on the logits; ``d ** -0.5`` when None.
        mask: bool (True = may attend) or additive float, broadcastable to ``(b, n, i, j)``.
        causal: whether a query attends to no later key than itself.
        dropout: probability of dropping an attention weight, in training or not.

    Returns:
        ``(b, n, i, e)`` in the dtype of ``v``; zeros for a query that may attend to nothing.

    Raises:
        ValueError: unknown ``impl``, heads that are not a multiple, or a mask of another dtype or of a shape that does
            not broadcast.

    Source: Vaswani et al., *Attention Is All You Need*, 2017, section 3.2, https://arxiv.org/abs/1706.03762

    >>> import torch
    >>> q = k = v = torch.randn(2, 4, 49, 8)
    >>> attend(q, k, v, impl="bmm").shape
    torch.Size([2, 4, 49, 8])
    """
    check_choice("impl", impl, IMPLEMENTATIONS)
    check_flags(causal=causal)
    check_probability("dropout", dropout)
    if scale is not None:
        check_number("scale", scale)
    for name, x, like in (("q", q, q), ("k", k, q), ("v", v, k)):
        check_type(name, x, Tensor, "a tensor (batch, heads, tokens, width)")
        same = {"k": (0, 3), "v": (0, 1, 2)}.get(name, ())
        if x.dim() != 4 or not x.is_floating_point() or any(x.shape[axis] != like.shape[axis] for axis in same):
            expected = "(batch, heads, tokens, width), k with q's batch and width, v with k's heads and tokens"
            raise ValueError(f"{name} must be of floating point and {expected}; got {x.dtype} {tuple(x.shape)}")
    if mask is not None:
        masks.check_mask(mask, q.shape[0], q.shape[1], q.shape[2:3], k.shape[2:3])
    if 0 in (q.shape[0], q.shape[2], k.shape[2]):  # not every implementation supports them
        return (q @ repeat_kv(q, k).mT).to(v.dtype) @ repeat_kv(q, v)
    row_has_key = None
    if mask is not None:
        later = masks.causal_mask(q.shape[2], k.shape[2], q.device) if causal else None
        mask, row_has_key = masks.unmask_empty_rows(masks.combine_masks(masks.broadcast_mask(mask)[:, None], later))
        causal = False
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with without_autocast(q):
        k, v = repeat_kv(q, k), repeat_kv(q, v)
        y = IMPLEMENTATIONS[impl].attend(q, k, v, scale=scale, mask=mask, causal=causal, dropout=dropout)
        return masks.zero_fully_masked_rows(y, row_has_key)

"""The implementations of attention, side by side: ``softmax(scale q kᵀ + mask) v``.

All have one signature, no parameters, and one result. Letters: ``b`` batch, ``n`` heads, ``i`` query token, ``j`` key
token, ``d`` width of queries and keys, ``e`` width of values.

    q (b, n, i, d)    k (b, n, j, d)    v (b, n, j, e)    ->    (b, n, i, e)

``mask`` is None, bool (True = may attend) or an additive float, broadcastable to ``(b, n, i, j)``. A query that may
attend to nothing gives zeros. Logits and softmax are computed in float32 at least, whatever the inputs are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["IMPLS", "attend", "attention_weights"]


# --- the implementations, to be read against each other ---------------------------------------------------------------


def attend_einx(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    import einx

    logits = scale * einx.dot("b n i d, b n j d -> b n i j", at_least_float32(q), at_least_float32(k))
    logits, reachable = apply_mask(logits, mask)
    weights = einx.softmax("b n i [j]", logits)
    weights = F.dropout(zero_unreachable(weights, reachable), dropout).to(v.dtype)
    return einx.dot("b n i j, b n j e -> b n i e", weights, v)


def attend_bmm(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    b, n, i, d = q.shape
    j, e = v.shape[2:]
    q = at_least_float32(q).reshape(b * n, i, d)
    k = at_least_float32(k).reshape(b * n, j, d)
    logits = scale * torch.bmm(q, k.transpose(1, 2)).view(b, n, i, j)
    logits, reachable = apply_mask(logits, mask)
    weights = torch.softmax(logits, dim=-1)
    weights = F.dropout(zero_unreachable(weights, reachable), dropout).to(v.dtype)
    return torch.bmm(weights.view(b * n, i, j), v.reshape(b * n, j, e)).view(b, n, i, e)


def attend_einsum(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    logits = scale * torch.einsum("bnid,bnjd->bnij", at_least_float32(q), at_least_float32(k))
    logits, reachable = apply_mask(logits, mask)
    weights = torch.softmax(logits, dim=-1)
    weights = F.dropout(zero_unreachable(weights, reachable), dropout).to(v.dtype)
    return torch.einsum("bnij,bnje->bnie", weights, v)


def attend_sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scale)
    # The kernels differ in what they make of a row with nothing to attend to, so such a row is opened for the kernel
    # and its result is set to zero afterwards.
    allowed = mask if mask.dtype == torch.bool else mask != -torch.inf
    reachable = allowed.any(dim=-1, keepdim=True)
    mask = mask | ~reachable if mask.dtype == torch.bool else in_range_of(q.dtype, mask.masked_fill(~reachable, 0.0))
    with kernels_for_masks(q):
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
    return torch.where(reachable, y, torch.zeros((), dtype=y.dtype, device=y.device))


# --- what they share --------------------------------------------------------------------------------------------------


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision holds neither large logits nor small differences between them."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def apply_mask(logits: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Masked logits, finite in every row, and which queries ``(…, i, 1)`` have a key to attend to (None: all)."""
    if mask is None:
        return logits, None
    logits = torch.where(mask, logits, -torch.inf) if mask.dtype == torch.bool else logits + mask
    # Compared with -inf rather than tested for finiteness, so that a NaN stays a NaN and is seen.
    reachable = (logits != -torch.inf).any(dim=-1, keepdim=True)
    return logits.masked_fill(~reachable, 0.0), reachable


def zero_unreachable(weights: Tensor, reachable: Tensor | None) -> Tensor:
    return weights if reachable is None else weights.masked_fill(~reachable, 0.0)


def in_range_of(dtype: torch.dtype, mask: Tensor) -> Tensor:
    """An additive mask in another type, in which a large finite value stays finite: it is no ``-inf``."""
    limits = torch.finfo(dtype)
    return torch.where(mask.isinf(), mask, mask.clamp(limits.min, limits.max)).to(dtype)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Autocast would take the logits back to half precision."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):  # there is no autocast of tensors without values
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def kernels_for_masks(q: Tensor) -> AbstractContextManager[None]:
    """On CUDA all fused kernels but cuDNN's, whose gradients with a mask can be NaN (pytorch/pytorch#196678)."""
    if not q.is_cuda:
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


_ATTEND: dict[str, Callable[..., Tensor]] = {
    "einx": attend_einx,
    "bmm": attend_bmm,
    "einsum": attend_einsum,
    "sdpa": attend_sdpa,
}

#: Names of the implementations.
IMPLS = tuple(_ATTEND)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    impl: str = "sdpa",
    scale: float | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Multi-head attention ``softmax(scale q kᵀ + mask) v`` by the implementation of a name.

    Args:
        q: queries, ``(b, n, i, d)``.
        k: keys, ``(b, n, j, d)``.
        v: values, ``(b, n, j, e)``.
        impl: one of :data:`IMPLS`.
        scale: factor on the logits; ``d ** -0.5`` when None.
        mask: bool (True = may attend) or additive float, broadcastable to ``(b, n, i, j)``.
        dropout: probability with which an attention weight is dropped, applied always (the caller knows its mode).

    Returns:
        ``(b, n, i, e)`` in the dtype of ``v``; zeros for a query that may attend to nothing.

    Raises:
        ValueError: unknown ``impl``, or a mask of another dtype or of a shape that does not broadcast.

    Source: Vaswani et al., *Attention Is All You Need*, 2017, section 3.2, https://arxiv.org/abs/1706.03762

    >>> q = k = v = torch.randn(2, 4, 49, 8)
    >>> attend(q, k, v, impl="bmm").shape
    torch.Size([2, 4, 49, 8])
    """
    check_impl(impl)
    check_mask(mask, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with without_autocast(q):
        return _ATTEND[impl](q, k, v, scale=scale, mask=mask, dropout=dropout)


def attention_weights(q: Tensor, k: Tensor, *, scale: float | None = None, mask: Tensor | None = None) -> Tensor:
    """The weights themselves, ``softmax(scale q kᵀ + mask)``, whatever implementation the block runs.

    Args:
        q: queries, ``(b, n, i, d)``.
        k: keys, ``(b, n, j, d)``.
        scale: factor on the logits; ``d ** -0.5`` when None.
        mask: as in :func:`attend`.

    Returns:
        ``(b, n, i, j)``, float32 or float64; every row sums to one, or to zero if its query may attend to nothing.

    >>> attention_weights(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)).shape
    torch.Size([1, 2, 3, 5])
    """
    check_mask(mask, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with without_autocast(q):
        logits = scale * at_least_float32(q) @ at_least_float32(k).mT
        logits, reachable = apply_mask(logits, mask)
        return zero_unreachable(torch.softmax(logits, dim=-1), reachable)


def check_impl(impl: str) -> None:
    if impl not in _ATTEND:
        raise ValueError(f"impl must be one of {', '.join(map(repr, IMPLS))}; got {impl!r}")


def check_mask(mask: Tensor | None, shape: tuple[int, int, int, int]) -> None:
    if mask is None:
        return
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"mask must be bool (True = may attend) or an additive float; got {mask.dtype}: convert it with mask.bool()"
        )
    fits = len(mask.shape) <= 4 and all(
        size in (1, full) for size, full in zip(reversed(mask.shape), reversed(shape), strict=False)
    )
    if not fits or not mask.shape:
        raise ValueError(
            f"mask must broadcast to (batch, heads, query tokens, key tokens) = {shape}; got {tuple(mask.shape)}"
        )

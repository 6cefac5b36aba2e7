"""The implementations of attention, side by side: ``softmax(scale q kᵀ + mask) v``.

All have one signature, no parameters, and one result. Letters: ``b`` batch, ``n`` heads, ``i`` query token, ``j`` key
token, ``d`` width of queries and keys, ``e`` width of values.

    q (b, n, i, d)    k (b, n, j, d)    v (b, n, j, e)    ->    (b, n, i, e)

``mask`` is None, bool (True = may attend) or an additive float, broadcastable to ``(b, n, i, j)``. A query that may
attend to nothing gives zeros. Logits and softmax are computed in float32 at least, whatever the inputs are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vision_attn.attend.masks import (
    apply_mask,
    at_least_float32,
    in_range_of,
    without_later_keys,
    zero_unreachable,
)
from vision_attn.equations import attention_equations

__all__ = ["attend_bmm", "attend_einsum", "attend_einx", "attend_flex", "attend_sdpa"]


def attend_einx(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    """Attention with every axis by its name; it holds the weights.

    Args:
        q: queries, ``(b, n, i, d)``.
        k: keys, ``(b, n, j, d)``.
        v: values, ``(b, n, j, e)``.
        scale: factor on the logits.
        mask: bool (True = may attend) or additive float, broadcastable to ``(b, n, i, j)``, or None.
        causal: whether a query attends to no later key than itself.
        dropout: probability with which a weight is dropped.

    Returns:
        ``(b, n, i, e)`` in the dtype of ``v``.

    >>> q = torch.randn(2, 4, 49, 8)
    >>> attend_einx(q, q, q, scale=8**-0.5, mask=None, causal=False, dropout=0.0).shape
    torch.Size([2, 4, 49, 8])
    """
    import einx

    logits = scale * einx.dot("b n i d, b n j d -> b n i j", at_least_float32(q), at_least_float32(k))
    logits, reachable = apply_mask(logits, mask, causal)
    weights = einx.softmax("b n i [j]", logits)
    weights = F.dropout(zero_unreachable(weights, reachable), dropout).to(v.dtype)
    return einx.dot("b n i j, b n j e -> b n i e", weights, v)


def attend_bmm(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    """Attention with axes by their place: views, and two batched products of matrices; it holds the weights.

    Arguments and result are those of :func:`attend_einx`.
    """
    b, n, i, d = q.shape
    j, e = v.shape[2:]
    q = at_least_float32(q).reshape(b * n, i, d)
    k = at_least_float32(k).reshape(b * n, j, d)
    logits = scale * torch.bmm(q, k.transpose(1, 2)).view(b, n, i, j)
    logits, reachable = apply_mask(logits, mask, causal)
    weights = torch.softmax(logits, dim=-1)
    weights = F.dropout(zero_unreachable(weights, reachable), dropout).to(v.dtype)
    return torch.bmm(weights.view(b * n, i, j), v.reshape(b * n, j, e)).view(b, n, i, e)


def attend_einsum(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    """Attention by the two einsum equations of Keras; it holds the weights.

    Arguments and result are those of :func:`attend_einx`.
    """
    # In the axes of Keras, (batch, tokens, heads, width): key, query -> (batch, heads, query tokens, key tokens).
    dot, combine, _ = attention_equations(rank=4, attention_axes=(1,))  # "aecd,abcd->acbe", "acbe,aecd->abcd"
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    logits = scale * torch.einsum(dot, at_least_float32(k), at_least_float32(q))
    logits, reachable = apply_mask(logits, mask, causal)
    weights = torch.softmax(logits, dim=-1)
    weights = F.dropout(zero_unreachable(weights, reachable), dropout).to(v.dtype)
    return torch.einsum(combine, weights, v).transpose(1, 2)


def attend_sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    """Attention by the kernel that torch chooses, which holds no weights where it is a fused one.

    Arguments and result are those of :func:`attend_einx`.
    """
    # Fused kernels want keys and values of one width: zeros fill up the narrower ones and change nothing.
    e = v.shape[3]
    width = max(q.shape[3], e)
    q, k, v = (widened(x, width) for x in (q, k, v))
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scale, is_causal=causal)[..., :e]
    if causal:
        mask = without_later_keys(mask, q.shape[2], k.shape[2], q.device)
    # The kernels differ in what they make of a row with nothing to attend to, so such a row is opened for the kernel
    # and its result is set to zero afterwards.
    allowed = mask if mask.dtype == torch.bool else mask != -torch.inf
    reachable = allowed.any(dim=-1, keepdim=True)
    mask = mask | ~reachable if mask.dtype == torch.bool else in_range_of(q.dtype, mask.masked_fill(~reachable, 0.0))
    with kernels_for_masks(q):
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
    return torch.where(reachable, y[..., :e], torch.zeros((), dtype=y.dtype, device=y.device))


def attend_flex(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    """Attention by FlexAttention, compiled to one kernel on CUDA.

    Arguments and result are those of :func:`attend_einx`.

    Raises:
        ValueError: ``dropout`` is not zero.
        NotImplementedError: gradients are asked for on the CPU.
    """
    if dropout:
        raise ValueError(
            f"attn_drop must be 0 with impl='flex', whose kernels drop nothing; got {dropout}: use impl='sdpa'"
        )
    if q.is_meta:  # where there are shapes and no values, and FlexAttention does not go
        return attend_sdpa(q, k, v, scale=scale, mask=mask, causal=causal, dropout=dropout)
    if q.device.type == "cpu":
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            raise NotImplementedError(
                "impl='flex' has no backward pass on the CPU: use impl='sdpa' there, or torch.no_grad() to evaluate"
            )
        q, k, v = q.detach(), k.detach(), v.detach()  # its kernel looks at requires_grad alone
    if causal:
        mask = without_later_keys(mask, q.shape[2], k.shape[2], q.device)
    if mask is None:
        return flex_kernel(q)(q, k, v, scale=scale)
    shape = (*q.shape[:3], k.shape[2])
    allowed_or_added = mask.expand(shape)

    def masked(score: Tensor, b: Tensor, n: Tensor, i: Tensor, j: Tensor) -> Tensor:
        here = allowed_or_added[b, n, i, j]
        return torch.where(here, score, -torch.inf) if here.dtype == torch.bool else score + here

    return flex_kernel(q)(q, k, v, score_mod=masked, scale=scale)


# --- the kernels that they call ---------------------------------------------------------------------------------------


def widened(x: Tensor, width: int) -> Tensor:
    """``(b, n, i, d)`` with zeros up to a width."""
    return x if x.shape[3] == width else F.pad(x, (0, width - x.shape[3]))


def kernels_for_masks(q: Tensor) -> AbstractContextManager[None]:
    """On CUDA all fused kernels but cuDNN's, whose gradients with a mask can be NaN (pytorch/pytorch#196678)."""
    if not q.is_cuda:
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def flex_kernel(q: Tensor) -> Callable[..., Tensor]:
    """FlexAttention compiled to one kernel; on the CPU in torch's own unfused form, which holds every weight."""
    from torch.nn.attention.flex_attention import flex_attention

    kernel: Callable[..., Tensor] = flex_attention
    if torch.compiler.is_compiling():
        return kernel
    if q.is_cuda:
        return compiled_flex()

    def unfused(*arguments: Tensor, **options: Any) -> Tensor:
        with warnings.catch_warnings():  # which says so
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            return kernel(*arguments, **options)

    return unfused


@cache
def compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)

"""Multi-head attention ``softmax(scale q kᵀ + mask) v`` by einx, torch.bmm, einsum and torch's fused kernels.

An implementation takes three steps, side by side here: heads apart, attend, heads together. Letters: ``b`` batch, ``n``
heads, ``i`` query token, ``j`` key token, ``d`` width of queries and keys, ``e`` width of values.

    heads apart      (b, qkv·n·d, h, w)                            ->  (qkv, b, n, i, d)
    attend           q (b, n, i, d)   k (b, n, j, d)   v (b, n, j, e)  ->  (b, n, i, e)
    heads together   (b, n, i, e)                                  ->  (b, n·e, h, w)

A pattern has cut the map into groups before, which are maps of a batch here, ``b·groups``, and puts them back after.

``mask`` is None, bool (True = may attend) or an additive float, ``(b or 1, groups or 1, n or 1, i, j)``; each row has a
key to attend to. Logits and softmax are computed in float32 at least, whatever the inputs are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vision_attn.attention.attend.masks import add_mask, upcast, with_causal_mask
from vision_attn.attention.equations import attention_equations
from vision_attn.attention.patterns import Cut
from vision_attn.checks import product

__all__ = ["BMM", "EINSUM", "EINX", "SDPA", "Implementation"]


@dataclass(frozen=True)
class Implementation:
    """The three steps of an implementation, and how it reads the line of a pattern."""

    heads_apart: Callable[[Tensor, int, int], Tensor]
    attend: Callable[..., Tensor]
    heads_together: Callable[[Tensor, tuple[int, ...]], Tensor]
    split: Callable[[Cut, Tensor], Tensor]
    merge: Callable[[Cut, Tensor], Tensor]


# --- einx: every axis by its name -------------------------------------------------------------------------------------


def heads_apart_einx(x: Tensor, qkv: int, n: int) -> Tensor:
    import einx

    return einx.id("b map... (qkv n d) -> qkv b n (map...) d", x.movedim(1, -1), qkv=qkv, n=n)


def attend_einx(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    import einx

    logits = einx.dot("... i d, ... j d -> ... i j", scale * upcast(q), upcast(k))
    logits = add_mask(logits, mask, causal)
    weights = einx.softmax("... i [j]", logits)
    weights = F.dropout(weights, dropout).to(v.dtype)
    return einx.dot("... i j, ... j e -> ... i e", weights, v)


def heads_together_einx(y: Tensor, window: tuple[int, ...]) -> Tensor:
    import einx

    return einx.id("b n (map...) e -> b map... (n e)", y, map=window).movedim(-1, 1)


# --- torch.bmm: every axis by its place -------------------------------------------------------------------------------


def heads_apart_torch(x: Tensor, qkv: int, n: int) -> Tensor:
    b, channels, *size = x.shape
    x = x.movedim(1, -1).reshape(b, product(size), qkv, n, channels // (qkv * n))
    return x.permute(2, 0, 3, 1, 4)


def attend_bmm(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    b, n, i, d = q.shape
    j, e = v.shape[2:]
    q, k = upcast(q).reshape(b * n, i, d), upcast(k).reshape(b * n, j, d)
    logits = torch.bmm(scale * q, k.transpose(1, 2)).view(b, n, i, j)
    logits = add_mask(logits, mask, causal)
    weights = torch.softmax(logits, dim=-1)
    weights = F.dropout(weights, dropout).to(v.dtype)
    return torch.bmm(weights.view(b * n, i, j), v.reshape(b * n, j, e)).view(b, n, i, e)


def heads_together_torch(y: Tensor, window: tuple[int, ...]) -> Tensor:
    b, n, _, e = y.shape
    return y.transpose(1, 2).reshape(b, *window, n * e).movedim(-1, 1)


# --- einsum: the equations of Keras, in its axes (batch, tokens, heads, width) ----------------------------------------


def attend_einsum(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    dot, combine, _ = attention_equations(rank=4, attention_axes=(1,))  # "aecd,abcd->acbe", "acbe,aecd->abcd"
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    logits = torch.einsum(dot, upcast(k), scale * upcast(q))
    logits = add_mask(logits, mask, causal)
    weights = torch.softmax(logits, dim=-1)
    weights = F.dropout(weights, dropout).to(v.dtype)
    return torch.einsum(combine, weights, v).transpose(1, 2)


# --- scaled_dot_product_attention: the kernel that torch chooses, which holds no weights where it is a fused one ------


def attend_sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    with_gradient = mask is not None and mask.requires_grad and torch.is_grad_enabled()
    if q.device.type == "cpu" and (dropout or with_gradient):
        # torch has no fused kernel for these on the CPU, and takes more steps than bmm where it writes them out.
        return attend_bmm(q, k, v, scale=scale, mask=mask, causal=causal, dropout=dropout)
    b, n, i, d = q.shape
    e = v.shape[3]
    if q.device.type == "cpu" and not torch.compiler.is_compiling() and far_apart(k):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    if d != e:  # fused kernels want one width: zeros fill up the narrower ones and change nothing
        q, k, v = (F.pad(x, (0, max(d, e) - x.shape[3])) for x in (q, k, v))
    if mask is None:
        if causal and scale <= 0:  # the kernel multiplies its -inf by the scale
            q, scale = scale * q, 1.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scale, is_causal=causal)
    else:
        if causal:
            mask = with_causal_mask(mask, q.shape[2], k.shape[2], q.device)
        q, k, v, mask = groups_as_heads(q, k, v, mask)
        if mask.dtype not in (torch.bool, q.dtype):
            mask = narrowed(mask, q.dtype)
        with kernels_for_masks(q):
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
        y = y.reshape(b, n, i, y.shape[3])
    return y if y.shape[3] == e else y[..., :e]


EINX = Implementation(heads_apart_einx, attend_einx, heads_together_einx, Cut.split_einx, Cut.merge_einx)
BMM = Implementation(heads_apart_torch, attend_bmm, heads_together_torch, Cut.split_torch, Cut.merge_torch)
EINSUM = replace(BMM, attend=attend_einsum)
SDPA = replace(BMM, attend=attend_sdpa)


# --- what they share --------------------------------------------------------------------------------------------------


def groups_as_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same attention with a mask of four axes that is never repeated over the batch.

    Groups stay in the batch where they have one mask; where each has its own they become heads, and the batch
    broadcasts.
    """
    batch, groups = mask.shape[:2]
    if batch == groups == 1:
        return q, k, v, mask[0]
    if batch == 1:
        q, k, v = (x.reshape(-1, groups * x.shape[1], *x.shape[2:]) for x in (q, k, v))
        return q, k, v, mask.expand(-1, -1, q.shape[1] // groups, -1, -1).flatten(1, 2)
    return q, k, v, mask.expand(-1, q.shape[0] // batch, -1, -1, -1).flatten(0, 1)


def far_apart(k: Tensor) -> bool:
    """Whether keys are so many and so far apart in memory that the CPU's caches lose what a copy costs.

    The kernel reads all keys once for each block of queries: a tenth of its time at 56×56 and 256 channels.
    """
    return k.shape[2] > 1024 and k.stride(2) * k.element_size() >= 1024


def narrowed(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """An additive mask in the type of the queries: half precision holds a row less its largest value."""
    if torch.finfo(dtype).bits < torch.finfo(mask.dtype).bits:
        mask = mask - mask.detach().amax(dim=-1, keepdim=True)
    return mask.to(dtype)


def kernels_for_masks(q: Tensor) -> AbstractContextManager[None]:
    """On CUDA all fused kernels but cuDNN's, whose gradients with a mask can be NaN (pytorch/pytorch#196678)."""
    if not q.is_cuda:
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])

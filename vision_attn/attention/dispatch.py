"""The selection of ``impl="auto"``, and attention in chunks that fit into the caches of a CPU.

Each threshold was measured on at least two processors. ``docs/performance.md`` has the tables, and ``python
benchmarks/speed.py --rows choices`` measures the alternatives on your machine.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vision_attn.attention.graphs import active_transform, in_graph
from vision_attn.attention.kernels import attend_bmm, attend_einx, attend_sdpa
from vision_attn.attention.masks import Mask, combine_masks, split_mask

#: Types of devices on which attention runs in chunks.
CHUNKED_DEVICES = ("cpu",)
#: Number of logits in a chunk on a CPU, which fit into its caches.
CHUNK_LOGITS = 2**19
#: Minimum number of queries in a chunk; matrix products with fewer rows are slow.
MIN_CHUNK_QUERIES = 192
#: Number of logits above which training recomputes the weights in the backward pass instead of storing them.
RECOMPUTE_ABOVE = 2**25


def repeat_kv(q: Tensor, k: Tensor) -> Tensor:
    """Repeat keys or values ``(b, m, j, d)`` for the query heads that share them, ``(b, n, j, d)``."""
    n, m = q.shape[1], k.shape[1]
    if n == m:
        return k
    if n % m:
        raise ValueError(f"the heads of q must be a multiple of the heads of k and v, got {n} and {m}")
    return k.unsqueeze(2).expand(-1, -1, n // m, -1, -1).flatten(1, 2)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a ``with`` block without autocast, which would compute the logits in half precision."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):  # the meta device has no autocast
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


# --- selection of the fastest implementation --------------------------------------------------------------------------


def attend_auto(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, dropout: float, **options: Any) -> Tensor:
    """Compute attention with the implementation that :func:`select_auto` selects."""
    return select_auto(q, k, mask, dropout)(q, k, v, mask=mask, dropout=dropout, **options)


def select_auto(q: Tensor, k: Tensor, mask: Mask, dropout: float) -> Callable[..., Tensor]:
    """Select torch's fused kernel, or ``torch.bmm`` in chunks that fit into caches, whichever is faster.

    The fused kernel is faster on a GPU, and graphs always contain it, because they run at any batch and size. On a CPU,
    it is faster with many tokens, and slower with few tokens in bfloat16 and in training with many groups of few tokens
    and narrow heads. torch has no fused CPU kernel for dropout or for a mask that requires gradients, such as the bias
    from a table: its fallback takes more steps than bmm. Where the fused kernel has no derivative, bmm runs instead.

    The selection depends on the shapes, the dtype and whether gradients are required, and not on values.

    >>> few, many = (torch.zeros(1, 1, keys, 8, dtype=torch.bfloat16) for keys in (64, 65))
    >>> [select_auto(x, x, None, 0.0).__name__ for x in (few, many)]
    ['attend_bmm', 'attend_fused']
    >>> select_auto(many.requires_grad_(), many, None, 0.0).__name__
    'attend_bmm'
    """
    if not q.is_cpu:
        return attend_fused
    is_unfused = dropout > 0 or (mask is not None and mask.requires_grad)
    if not can_chunk(q):
        return attend_bmm if is_unfused else attend_fused
    (keys, width), trained = k.shape[2:], torch.is_grad_enabled() and q.requires_grad
    bmm = attend_bmm if q.shape[:3].numel() * keys <= CHUNK_LOGITS else attend_bmm_chunked
    if is_unfused:
        return bmm
    if q.dtype == torch.bfloat16:
        return attend_fused if keys > (196 if trained else 64) else bmm
    is_small = keys <= 49 and keys * width <= 2048 and q.shape[0] * q.shape[2] >= 2048
    return bmm if is_small and trained and q.dtype != torch.float16 else attend_fused


def attend_fused(q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Mask, causal: bool, dropout: float) -> Tensor:
    """Call torch's fused kernel, or bmm for inputs that it cannot differentiate.

    The fused kernel has no derivative in forward mode and, in a transform of ``torch.func`` on a CPU, none for a mask
    from outside of the transform.
    """
    try:
        return attend_sdpa(q, k, v, scale=scale, mask=mask, causal=causal, dropout=dropout)
    except RuntimeError as error:
        if not isinstance(error, NotImplementedError) and (mask is None or active_transform() is None):
            raise
        return attend_bmm(q, k, v, scale=scale, mask=mask, causal=causal, dropout=dropout)


def can_chunk(q: Tensor) -> bool:
    """Return True if attention may run in chunks that fit into a CPU's caches. Graphs would store the chunks."""
    return q.device.type in CHUNKED_DEVICES and not in_graph(q) and active_transform() is None


def attend_bmm_chunked(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, **options: Any) -> Tensor:
    """Compute attention with bmm, for as many images at a time as fit into the caches of a CPU."""
    return attend_image_chunks(partial(attend_bmm, **options), 1 if mask is None else mask.shape[1], mask, q, k, v)


def attend_image_chunks(compute: Callable[..., Tensor], groups: int, mask: Mask, *tensors: Tensor) -> Tensor:
    """Call ``compute(q, k, v, …, mask=mask)`` for as many images at a time as fit into the caches of a CPU."""
    q, k, *_ = tensors
    images = max(1, CHUNK_LOGITS // (groups * q.shape[1] * q.shape[2] * k.shape[2]))
    if images * groups >= q.shape[0]:
        return compute(*tensors, mask=mask)
    chunks: Any = zip(split_mask(mask, images, axis=0), *(x.split(images * groups) for x in tensors), strict=False)
    return torch.cat([compute(*chunk, mask=part) for part, *chunk in chunks])


def attend_chunked(
    attend: Any, q: Tensor, k: Tensor, v: Tensor, mask: Mask, terms: list[Tensor], groups: int
) -> Tensor:
    """Compute attention on a CPU with a bias that is computed for one chunk of queries at a time.

    With many queries, the backward pass computes the bias again instead of storing it.

    Args:
        attend: ``partial(kernel.attend, scale=…, dropout=…)``.
        q: queries, ``(b·groups, n, i, d)``.
        k: keys, ``(b·groups, n, j, d)``.
        v: values, ``(b·groups, n, j, e)``.
        mask: the combined mask, ``(b or 1, groups or 1, n or 1, i, j)``.
        terms: the terms of the bias, as returned by :meth:`.PositionBias.rel_logits`.
        groups: number of groups of an image.
    """
    keys = k.shape[2]
    rows = max(MIN_CHUNK_QUERIES, CHUNK_LOGITS // (groups * q.shape[1] * keys))  # queries of each group in a chunk

    def attend_chunk(q: Tensor, k: Tensor, v: Tensor, *logits: Tensor, mask: Mask) -> Tensor:
        added = sum(logits[1:], logits[0]).reshape(-1, groups, *q.shape[1:3], keys)
        return attend(q, k, v, mask=added if mask is None else combine_masks(added, mask), causal=False)

    compute: Callable[..., Tensor] = attend_chunk
    if torch.is_grad_enabled() and q.shape[:3].numel() * keys > RECOMPUTE_ABOVE:
        early_stop = attend.func is not attend_einx  # einx wraps the exception with which torch stops early
        compute = partial(checkpoint, attend_chunk, use_reentrant=False, early_stop=early_stop)

    def attend_query_chunks(q: Tensor, k: Tensor, v: Tensor, *logits: Tensor, mask: Mask) -> Tensor:
        if rows >= q.shape[2]:
            return compute(q, k, v, *logits, mask=mask)
        chunks: Any = zip(split_mask(mask, rows, axis=3), *(x.split(rows, dim=2) for x in (q, *logits)), strict=False)
        return torch.cat([compute(chunk, k, v, *added, mask=part) for part, chunk, *added in chunks], dim=2)

    return attend_image_chunks(attend_query_chunks, groups, mask, q, k, v, *terms)

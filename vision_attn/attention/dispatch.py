"""Attention in the groups of a pattern: the selection of ``impl="auto"``, position biases, and chunks on a CPU.

Each threshold was measured on at least two processors. ``docs/performance.md`` has the tables, and ``python
benchmarks/speed.py --rows choices`` measures the alternatives on your machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vision_attn.attention.kernels import EINX, Kernel, attend_bmm, attend_sdpa
from vision_attn.attention.masks import Mask, combine_masks, split_mask, zero_fully_masked_rows
from vision_attn.attention.patterns.grouping import Grouping

#: Number of logits in a chunk on a CPU, which fit into its caches.
CHUNK_LOGITS = 2**19
#: Minimum number of queries in a chunk; matrix products with fewer rows are slow.
MIN_CHUNK_QUERIES = 192
#: Number of logits above which training recomputes the weights in the backward pass instead of storing them.
RECOMPUTE_ABOVE = 2**25


class PositionBias:
    """The bias that a position encoding adds to the logits."""

    def apply(self, q: Tensor, k: Tensor, scale: float, mask: Mask) -> tuple[Tensor, Tensor, float, Mask]:
        """Include the bias in queries, keys, scale and mask, and return them."""
        raise NotImplementedError

    def rel_logits(self, q: Tensor) -> list[Tensor] | None:
        """Return one term per axis, ``(b·groups, n, i, <keys along this axis, 1 along the others>)``, or None.

        The bias is the sum of the terms.
        """
        return None

    def scores(self, q: Tensor) -> Callable[..., Tensor]:
        """Return the bias for FlexAttention: a function of batch, head, query, and coordinates of query and key."""
        raise ValueError(f"impl='flex' does not support {type(self).__name__}. Use another implementation: impl='sdpa'")


class AttentionInputs(NamedTuple):
    """The inputs of a kernel: attention in the groups of a pattern."""

    q: Tensor  # (b·groups, n, i, d)
    k: Tensor  # (b·groups, m, j, d)
    v: Tensor  # (b·groups, m, j, e)
    scale: float
    grouping: Grouping
    bias: PositionBias | None = None
    mask: Mask = None  # the mask passed by the user, broadcastable to (b, n, tokens, key tokens)
    causal: bool = False


def attend_in_groups(kernel: Kernel, inputs: AttentionInputs, dropout: float) -> Tensor:
    """Compute attention in the groups of a pattern, ``(b·groups, n, i, e)``; fully masked rows are zero."""
    q, k, v, scale, grouping, bias = inputs[:6]
    with without_autocast(q):
        if kernel.attend_inputs is not None:
            return kernel.attend_inputs(inputs, dropout)
        if k.shape[1] != q.shape[1]:
            k, v = repeat_kv(q, k), repeat_kv(q, v)
            inputs = inputs._replace(k=k, v=v)
        mask, row_has_key, causal = grouping.build_attn_mask(inputs.mask, inputs.causal, bias is not None)
        logits = bias.rel_logits(q) if bias is not None and can_chunk(q) else None
        if logits is not None:
            y = attend_chunked(kernel, inputs, logits, mask, dropout)
        else:
            if bias is not None:
                q, k, scale, mask = bias.apply(q, k, scale, mask)
            y = kernel.attend(q, k, v, scale=scale, mask=mask, causal=causal, dropout=dropout)
        return y if row_has_key is None else zero_fully_masked_rows(y, row_has_key)


def repeat_kv(q: Tensor, k: Tensor) -> Tensor:
    """Repeat keys or values ``(b, m, j, d)`` for the query heads that share them, ``(b, n, j, d)``."""
    n, m = q.shape[1], k.shape[1]
    if n == m:
        return k
    if n % m:
        raise ValueError(f"the heads of q must be a multiple of the heads of k and v, got {n} and {m}")
    return k.unsqueeze(2).expand(-1, -1, n // m, -1, -1).flatten(1, 2)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context without autocast, which would compute the logits in half precision."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):  # the meta device has no autocast
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


# --- selection of the fastest implementation --------------------------------------------------------------------------


def attend_auto(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, dropout: float, **options: Any) -> Tensor:
    """Compute attention with the fused kernel or bmm, whichever is faster; bmm runs in chunks that fit into caches."""
    if fused_is_faster(q, k, mask, dropout):
        return attend_sdpa(q, k, v, mask=mask, dropout=dropout, **options)
    groups = 1 if mask is None else mask.shape[1]
    size = groups * batch_chunk(q, k.shape[2], groups) if can_chunk(q) else q.shape[0]
    if size >= q.shape[0]:
        return attend_bmm(q, k, v, mask=mask, dropout=dropout, **options)
    masks = split_mask(mask, size // groups, axis=0)
    chunks: Any = zip(masks, q.split(size), k.split(size), v.split(size), strict=False)
    return torch.cat([attend_bmm(*chunk, mask=part, dropout=dropout, **options) for part, *chunk in chunks])


def fused_is_faster(q: Tensor, k: Tensor, mask: Mask, dropout: float) -> bool:
    """Return True if torch's fused kernel is faster than ``torch.bmm``.

    The fused kernel is faster on a GPU, and graphs always contain it, because they run at any batch and size. On a CPU
    it is faster with many tokens, and slower with few tokens in bfloat16 and in training with many groups of few tokens
    and narrow heads. torch has no fused CPU kernel for dropout or for a mask that requires gradients, such as
    the bias from a table: its fallback takes more steps than bmm.
    """
    if q.device.type != "cpu":
        return True
    trained_mask = mask is not None and mask.requires_grad
    if dropout or (trained_mask and torch.is_grad_enabled()):
        return False
    if not can_chunk(q):
        return True
    trained = torch.is_grad_enabled() and q.requires_grad
    keys = k.shape[2]
    if q.dtype == torch.bfloat16:
        return keys > (196 if trained else 64)
    if q.dtype == torch.float16 or not trained:
        return True
    return keys > 49 or keys * q.shape[3] > 2048 or q.shape[0] * q.shape[2] < 2048


def can_chunk(q: Tensor) -> bool:
    """Return True if attention may run in chunks that fit into a CPU's caches. Graphs would store the chunks."""
    if torch.compiler.is_compiling() or torch._C._is_tracing() or type(q) is not Tensor or q.device.type != "cpu":
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(q)


def batch_chunk(q: Tensor, keys: int, groups: int) -> int:
    """Return the number of images in a chunk."""
    return max(1, CHUNK_LOGITS // (groups * q.shape[1] * q.shape[2] * keys))


def attend_chunked(kernel: Kernel, inputs: AttentionInputs, terms: list[Tensor], mask: Mask, dropout: float) -> Tensor:
    """Compute attention on a CPU with a bias that is computed for one chunk of queries at a time.

    With many queries, the backward pass computes the bias again instead of storing it.
    """
    q, k, v, scale, grouping = inputs[:5]
    keys, groups = k.shape[2], grouping.groups
    images = batch_chunk(q, keys, groups)
    rows = max(MIN_CHUNK_QUERIES, CHUNK_LOGITS // (groups * q.shape[1] * keys))  # queries of each group in a chunk

    def attend_chunk(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *logits: Tensor) -> Tensor:
        added = sum(logits[1:], logits[0]).flatten(3).unflatten(0, (-1, groups))
        mask = added if mask is None else combine_masks(added, mask)
        return kernel.attend(q, k, v, scale=scale, mask=mask, causal=False, dropout=dropout)

    run: Callable[..., Tensor] = attend_chunk
    if torch.is_grad_enabled() and q.shape[:3].numel() * keys > RECOMPUTE_ABOVE:
        run = partial(checkpoint, attend_chunk, use_reentrant=False, preserve_rng_state=dropout > 0)
        if kernel is EINX:  # einx wraps every exception, including the one with which torch stops early
            run = partial(run, early_stop=False)
    by_image: Any = [x.split(images * groups) for x in (q, k, v, *terms)]
    outputs = []
    for image_mask, queries, keys_, values, *logits in zip(split_mask(mask, images, axis=0), *by_image, strict=False):
        by_row: Any = [x.split(rows, dim=2) for x in (queries, *logits)]
        chunks = zip(split_mask(image_mask, rows, axis=3), *by_row, strict=False)
        outputs.append(concat([run(chunk, keys_, values, part, *added) for part, chunk, *added in chunks], dim=2))
    return concat(outputs, dim=0)


def concat(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)

"""Attention in the groups of a pattern: what ``impl="auto"`` selects, how a bias is added, and chunks on a CPU.

The choices were measured on two processors at least; docs/performance.md has the tables, and ``python benchmarks/speed.py
--rows choices`` measures the alternatives on your machine.
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

#: Logits that are computed at once on a CPU: they stay in its caches.
CHUNK_LOGITS = 2**19
#: The fewest queries in a chunk: products of fewer rows are slow.
MIN_CHUNK_QUERIES = 192
#: Logits up to which training stores all weights; above, they are recomputed for the gradients.
RECOMPUTE_ABOVE = 2**25


class PositionBias:
    """The bias that a position encoding adds to the logits."""

    def apply(self, q: Tensor, k: Tensor, scale: float, mask: Mask) -> tuple[Tensor, Tensor, float, Mask]:
        """Return queries, keys, scale and mask of the attention that includes the bias."""
        raise NotImplementedError

    def rel_logits(self, q: Tensor) -> list[Tensor] | None:
        """Return the terms of a sum over axes, ``(b·groups, n, i, <keys along the axis; 1 along the others>)``."""
        return None

    def scores(self, q: Tensor) -> Callable[..., Tensor]:
        """Return the bias as a function of batch, head, query, and the coordinates of query and key, for flex."""
        raise ValueError(f"impl='flex' does not support {type(self).__name__}. Use another implementation: impl='sdpa'")


class AttentionInputs(NamedTuple):
    """The inputs of a kernel: attention in the groups of a pattern."""

    q: Tensor  # (b·groups, n, i, d)
    k: Tensor  # (b·groups, m, j, d)
    v: Tensor  # (b·groups, m, j, e)
    scale: float
    grouping: Grouping
    bias: PositionBias | None = None
    mask: Mask = None  # the user's, on the map: broadcastable to (b, n, tokens, key tokens)
    causal: bool = False


def attend_in_groups(kernel: Kernel, inputs: AttentionInputs, dropout: float) -> Tensor:
    """Attend in the groups of a pattern, ``(b·groups, n, i, e)``; zeros for rows that may attend to nothing."""
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
    """Repeat keys or values ``(b, m, j, d)`` for the heads of the queries that share them, ``(b, n, j, d)``."""
    n, m = q.shape[1], k.shape[1]
    if n == m:
        return k
    if n % m:
        raise ValueError(f"q must have a multiple of the heads of k and v; got {n} and {m}")
    return k.unsqueeze(2).expand(-1, -1, n // m, -1, -1).flatten(1, 2)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context without autocast, which would compute the logits in half precision."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):  # the meta device has no autocast
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


# --- what is fastest where --------------------------------------------------------------------------------------------


def attend_auto(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, dropout: float, **options: Any) -> Tensor:
    """Attend by the faster of the fused kernel and bmm; by bmm, for as many images at once as fit into the caches."""
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
    """Return True if torch's fused kernel is faster than products of matrices.

    On a GPU it is, and a graph always has it, for any batch and size. On a CPU it is with many tokens; not with few in
    bfloat16, for which that kernel is slow, nor with gradients in many groups of few tokens and narrow heads. With
    dropout, or a mask that needs gradients as the bias of a table does, torch has no fused kernel for a CPU: it would
    write attention out, in more steps than bmm.
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
    """Return True if attention is computed in chunks that fit into a CPU's caches; a graph would keep the chunks."""
    if torch.compiler.is_compiling() or torch._C._is_tracing() or type(q) is not Tensor or q.device.type != "cpu":
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(q)


def batch_chunk(q: Tensor, keys: int, groups: int) -> int:
    """Return how many images, of so many groups, are in a chunk."""
    return max(1, CHUNK_LOGITS // (groups * q.shape[1] * q.shape[2] * keys))


def attend_chunked(kernel: Kernel, inputs: AttentionInputs, terms: list[Tensor], mask: Mask, dropout: float) -> Tensor:
    """Attend on a CPU, whose kernels read any mask, with a bias that is made for a chunk of queries at a time.

    Of many queries it is made again for the gradients.
    """
    q, k, v, scale, grouping = inputs[:5]
    keys, groups = k.shape[2], grouping.groups
    images = batch_chunk(q, keys, groups)
    rows = max(MIN_CHUNK_QUERIES, CHUNK_LOGITS // (groups * q.shape[1] * keys))  # of each group of an image

    def attend_chunk(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *logits: Tensor) -> Tensor:
        added = sum(logits[1:], logits[0]).flatten(3).unflatten(0, (-1, groups))
        mask = added if mask is None else combine_masks(added, mask)
        return kernel.attend(q, k, v, scale=scale, mask=mask, causal=False, dropout=dropout)

    run: Callable[..., Tensor] = attend_chunk
    if torch.is_grad_enabled() and q.shape[:3].numel() * keys > RECOMPUTE_ABOVE:
        run = partial(checkpoint, attend_chunk, use_reentrant=False, preserve_rng_state=dropout > 0)
        if kernel is EINX:  # it converts every exception, among them that by which torch stops early
            run = partial(run, early_stop=False)
    by_image: Any = [x.split(images * groups) for x in (q, k, v, *terms)]
    done = []
    for image_mask, queries, keys_, values, *logits in zip(split_mask(mask, images, axis=0), *by_image, strict=False):
        by_row: Any = [x.split(rows, dim=2) for x in (queries, *logits)]
        chunks = zip(split_mask(image_mask, rows, axis=3), *by_row, strict=False)
        done.append(concat([run(chunk, keys_, values, part, *added) for part, chunk, *added in chunks], dim=2))
    return concat(done, dim=0)


def concat(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)

"""What is fastest where: the choices of ``impl="auto"``, and how relative positions by axis are added to the logits.

Each was measured on two processors at least; docs/speed.md has the tables, and ``vision-attn bench --rows choices``
measures the alternatives on yours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vision_attn.checks import product

#: Logits that are made at once on the CPU: what is made of them stays in its caches.
AT_ONCE = 2**19
#: The fewest queries that are taken at once: products of fewer rows are slow.
FEWEST_QUERIES = 192
#: Logits up to which training keeps all weights; of more they are made again for the gradients.
KEPT = 2**25
#: Keys in a group up to which a GPU is given a mask for all queries.
FEW_KEYS = 256


def fused_is_faster(q: Tensor, keys: int, mask: Tensor | None, dropout: float) -> bool:
    """Whether torch's fused kernel is faster than products of matrices.

    On a GPU it is. On the CPU it is with many tokens, and not with few in bfloat16, for which that kernel is slow, nor
    with gradients in many groups of few tokens and narrow heads. With dropout, or a mask that needs gradients as a table's bias does, torch
    has no such kernel: it would write attention out, in more steps than bmm.
    """
    if q.device.type != "cpu":
        return True
    of_mask = mask is not None and mask.requires_grad
    trained = torch.is_grad_enabled() and (q.requires_grad or of_mask)
    if dropout or (trained and of_mask):
        return False
    if q.dtype == torch.bfloat16:
        return keys > (196 if trained else 64)
    if q.dtype == torch.float16 or not trained:
        return True
    return keys > 49 or keys * q.shape[3] > 2048 or q.shape[0] * q.shape[2] < 2048


def how_to_add(q: Tensor, keys_shape: Sequence[int], watched: bool) -> str:
    """How what queries add to their logits by axis is added: in ``"blocks"``, as a ``"mask"``, or ``"folded"``.

    On the CPU, where kernels read any mask, one is made for a block of queries at a time. On a GPU a mask of many keys
    takes memory for every pair of tokens: what is added is folded into queries and keys, which are wider then, so that
    any fused kernel runs it. So it is in what is compiled, exported or transformed, which runs no blocks, and in what
    is watched, to which queries and keys are all there is.
    """
    if runs_in_parts(q) and not watched:
        return "blocks"
    return "mask" if set(map(type, keys_shape)) == {int} and product(keys_shape) <= FEW_KEYS else "folded"


def runs_in_parts(q: Tensor) -> bool:
    """Whether attention is cut into parts that fit into a processor's caches, which a trace would keep as they are."""
    if torch.compiler.is_compiling() or torch._C._is_tracing() or type(q) is not Tensor or q.device.type != "cpu":
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(q)


def maps_at_once(q: Tensor, keys: int, groups: int) -> int:
    """How many maps of so many groups there are in a part."""
    return max(1, AT_ONCE // (groups * q.shape[1] * q.shape[2] * keys))


def queries_at_once(q: Tensor, keys: int, groups: int) -> int:
    """How many queries of each group of a map there are in a part."""
    return max(FEWEST_QUERIES, AT_ONCE // (groups * q.shape[1] * keys))

"""``impl="flex"``: a pattern and a position encoding, compiled into one fused sparse kernel by FlexAttention.

No tensor of size queries × keys is stored. A pattern is one small bool table per axis,
``allowed_h[y_q, y_k] & allowed_w[x_q, x_k]``, from which FlexAttention derives the blocks of keys to skip
(``BlockMask``). The table of a position encoding is a function of the score (``score_mod``); decomposed positions are
folded into queries and keys. A pattern that is a plain reshape runs in groups, as in the other implementations; any
other pattern runs on the complete feature map without copying tokens.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_attn.attention.graphs import active_transform, in_graph, outside_graph
from vision_attn.attention.masks import Mask, broadcast_mask
from vision_attn.attention.patterns import Grouping, resolve_pattern
from vision_attn.attention.plan import AttentionInputs
from vision_attn.attention.scopes import outside_scopes

#: Devices that FlexAttention supports.
DEVICES = ("cpu", "cuda", "hpu", "xpu")

#: A function ``(score, b, h, q, kv) -> score`` of a score and its indices.
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def attend_pattern_flex(inputs: AttentionInputs, dropout: float, causal: bool = False) -> Tensor:
    """Compute attention in the groups of a pattern, ``(b·groups, n, i, e)``; with ``causal``, between tokens."""
    # The import is deferred because it is slow, a third of the time that importing torch takes.
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v, scale, grouping, bias, mask = inputs
    score_mods = []
    query_size, key_size = grouping.query_layout.group_size, grouping.key_layout.group_size
    if bias is not None:
        add = bias.scores()
        q, k, scale = bias.fold(q, k, scale)
        if add is not None:
            score_mods.append(lambda s, b, h, i, j: s + add(h, unravel(i, query_size), unravel(j, key_size)))
    is_masked = grouping.pattern_as_mask or grouping.causal
    check_flex(q, v, dropout, [q, k, v, mask, getattr(bias, "table", None)], is_masked)
    block_mask = grouping.cached("block_mask", lambda: pattern_mask(grouping)) if is_masked else None
    if mask is not None:
        score_mods.append(mask_score_mod(broadcast_mask(mask), grouping.key_layout.index()[0]))
    if causal:
        score_mods.append(lambda score, b, h, i, j: torch.where(j <= i, score, -torch.inf))

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        for modify in score_mods:
            score = modify(score, b, h, i, j)
        return score

    e = v.shape[3]
    if q.device.type == "cpu":
        # With heads of width 8 or 16 and 8, 24, 40, … keys, torch 2.14's CPU kernel returns wrong values or NaN.
        q, k, v = (F.pad(x, (0, -x.shape[3] % 32)) for x in (q, k, v))
    kernel = flex_attention if torch.compiler.is_compiling() else compiled(q.shape, k.shape, query_size, key_size)
    options = {"block_mask": block_mask, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    return kernel(q, k, v, score_mod=score_mod if score_mods else None, **options)[..., :e]


def attend_flex(q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Mask, causal: bool, dropout: float) -> Tensor:
    """Compute attention between tokens, the positions of a feature map with one axis; the mask has one group."""
    full, size, keys_size = resolve_pattern("full").expand_to_rank(1), q.shape[2:3], k.shape[2:3]
    grouping = outside_graph((*size, *keys_size), partial(Grouping, full, size, keys_size, q.device))
    inputs = AttentionInputs(q, k, v, scale, grouping, mask=None if mask is None else mask[:, 0])
    return attend_pattern_flex(inputs, dropout, causal)


@cache
def compiled(*shapes: Sequence[int]) -> Any:
    """Compile FlexAttention for these shapes and sizes on first use, so that it never runs unfused.

    Shapes are static, because torch 2.14 generates invalid C++ for a symbolic batch size.
    """
    from torch.nn.attention.flex_attention import flex_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return flex_attention(q, k, v, **options)

    attend.__code__ = attend.__code__.replace()  # torch limits the number of compilations per code object
    return partial(outside_scopes, torch.compile(attend, fullgraph=True, dynamic=False))


def check_flex(q: Tensor, v: Tensor, dropout: float, trained: Sequence[Tensor | None], is_masked: bool) -> None:
    """Raise if FlexAttention does not support the inputs, and recommend another implementation.

    ``trained`` contains the tensors that may require gradients; ``is_masked`` is True if there is a ``BlockMask``.
    """
    device, width = q.device.type, min(q.shape[3], v.shape[3])
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in trained)
    transformed = not torch.compiler.is_compiling() and (in_graph(q) or active_transform() is not None)
    is_exported = is_masked and torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
    for is_refused, what in (
        (dropout > 0, f"does not support dropout: attn_drop must be 0 in training, got {dropout}"),
        (device not in DEVICES, f"requires a device of {', '.join(DEVICES)}, got a tensor on {device}"),
        (q.dtype == torch.float64, "requires float32, float16 or bfloat16, got float64"),
        (device == "cpu" and needs_grad, "does not support gradients on a CPU"),
        (device == "cuda" and width < 16, f"requires heads of width 16 or more on CUDA, got {width}"),
        (is_exported, "exports patterns and causal=True only with torch.export.export(…, strict=True)"),
        (transformed, "does not support torch.jit.trace and transforms of torch.func"),
    ):
        if is_refused:
            raise ValueError(f"impl='flex' {what}. Use another implementation, for example impl='sdpa'")


def unravel(index: Tensor, size: Sequence[int]) -> list[Tensor]:
    """Return the coordinates of a row-major index."""
    coords = []
    for length in reversed(size):
        coords.append(index % length)
        index = index // length
    return coords[::-1]


def pattern_mask(grouping: Grouping) -> Any:
    """Build the ``BlockMask`` of a pattern on a feature map: the non-empty blocks of 128 queries by 128 keys."""
    from torch.nn.attention.flex_attention import create_block_mask

    tables = [None if axis.allowed is None else axis.allowed[0] for axis in grouping.axes]
    queries, keys = grouping.query_layout, grouping.key_layout
    positions = keys.index()[0]

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        allowed = positions[j] <= i if grouping.causal else j >= 0
        at = zip(tables, unravel(i, queries.group_size), unravel(j, keys.group_size), strict=True)
        for table, query, key in at:
            if table is not None:
                allowed = torch.logical_and(allowed, table[query, key])
        return allowed

    return create_block_mask(mask_mod, None, None, queries.tokens, keys.tokens, device=str(positions.device))


def mask_score_mod(mask: Tensor, positions: Tensor) -> ScoreMod:
    """Return a ``score_mod`` for a mask ``(b or 1, n or 1, i or 1, j or 1)``; keys at position -1 are not masked."""
    batch, heads, queries, keys = (int(length > 1) for length in mask.shape)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        at = positions[j]
        value = mask[b * batch, h * heads, i * queries, at.clamp(min=0) * keys]
        masked = torch.where(value, score, -torch.inf) if mask.dtype == torch.bool else score + value
        return torch.where(at < 0, score, masked)

    return score_mod

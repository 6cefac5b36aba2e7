"""From a map to tokens: projected, cut into heads and into the groups of the pattern, with their positions and mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_attn.attend.masks import check_mask
from vision_attn.blocks.grouping import mask_of_groups
from vision_attn.blocks.maps import channels_innermost, check_map
from vision_attn.patterns import heads_apart_bmm, heads_apart_einx, heads_bmm, heads_einx
from vision_attn.patterns.line import product

if TYPE_CHECKING:
    from vision_attn.blocks.spatial import Attention

__all__ = ["tokens_of"]

#: By how many axes a map has: the functions that go with its convolution.
CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def tokens_of(
    block: Attention, x: Tensor, mask: Tensor | None, context: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, float, Tensor | None]:
    """The queries, keys and values in the groups of the pattern, the scale, and the mask that goes with them.

    Args:
        block: whose tokens they are.
        x: maps, ``(b, c, *size)``.
        mask: as in :meth:`vision_attn.Attention2d.forward`.
        context: as in :meth:`vision_attn.Attention2d.forward`.

    Returns:
        Queries ``(b·groups, n, i, d)``, keys ``(b·groups, m, j, d)``, values ``(b·groups, m, j, e)``, the factor on the
        logits, and a mask that broadcasts to ``(b·groups, n, i, j)`` or None. A position term may make queries and keys
        wider.

    Raises:
        ValueError: ``x`` or ``context`` is no batch of such maps, or ``mask`` does not fit.
    """
    einx = block.impl == "einx"
    check_inputs(block, x, context)
    q, k, v = heads_of(block, x, context)
    if block.q_norm is not None and block.k_norm is not None:
        # Under autocast the normalisation gives float32: the values' type is the one that the kernel gets.
        q, k = (norm(y.movedim(2, -1)).movedim(-1, 2).to(v.dtype) for norm, y in ((block.q_norm, q), (block.k_norm, k)))
    position = block.position
    if position is not None:
        q, k = position.turn(q, k)

    batch, size, tokens, keys = q.shape[0], q.shape[3:], product(q.shape[3:]), product(k.shape[3:])
    check_mask(mask, (batch, block.num_heads, tokens, keys))
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
    q = block.tiling.split(q, einx=einx)
    k, v = (block.tiling.split(y, einx=einx, keys=True) for y in (k, v))

    scale, bias = block.scale, None
    if position is not None and position.compares_places:
        offsets = block.tiling.offsets(size, x.device)
        bias = position.bias(offsets)
        q, k, scale = position.extend(q, k, scale, offsets, einx=einx)
    mask = mask_of_groups(block.tiling, size, batch, mask=mask, bias=bias, causal=block.causal, device=x.device)
    return q, k, v, scale, mask


def heads_of(block: Attention, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``(b, n, d, *size)``, keys and values ``(b, m, …)`` of the map, or of the map and its context."""
    sizes = (block.num_heads, block.num_kv_heads, block.key_dim, block.value_dim)
    einx = block.impl == "einx"
    x = prepared(block, x)
    if context is None and block.kv_stride == 1:
        return (heads_einx if einx else heads_bmm)(laid_out(block, block.qkv(times(3, block, x))), *sizes)
    source = x if context is None else prepared(block, context)
    if block.kv_stride > 1:
        squares = tuple(min(block.kv_stride, length) for length in source.shape[2:])
        source = AVERAGE[block.rank](source, squares, ceil_mode=True)
    if block.context_channels is not None:
        q, kv = block.q(x), block.kv(source)
    else:  # one projection, its first rows for one map and the others for the other
        rows = block.num_heads * block.key_dim
        weight, bias = block.qkv.weight, block.qkv.bias
        convolve = CONVOLVE[block.rank]
        q = convolve(x, weight[:rows], None if bias is None else bias[:rows], groups=block.groups)
        kv = convolve(
            times(2, block, source),
            weight[rows:],
            None if bias is None else bias[rows:],
            groups=1 if block.groups == 1 else 2 * block.groups,
        )
    return (heads_apart_einx if einx else heads_apart_bmm)(laid_out(block, q), laid_out(block, kv), *sizes)


def times(count: int, block: Attention, x: Tensor) -> Tensor:
    """The map as often as grouped projections have it: each of queries, keys and values has all groups."""
    return x if block.groups == 1 else torch.cat([x] * count, dim=1)


def prepared(block: Attention, x: Tensor) -> Tensor:
    """The map with its positions, laid out for the implementation."""
    return laid_out(block, x if block.position is None else block.position.add_to_map(x))


def laid_out(block: Attention, x: Tensor) -> Tensor:
    """A map in the memory layout that the implementation is fastest with.

    With the channels of a place beside each other a 1×1 convolution is a linear layer on tokens, and q, k and v are
    views of what it writes: a fused kernel then reads contiguous heads, without which torch falls back to one that
    holds every weight. Convolutions of one and three axes do not keep this layout: it is asked of what they write too.
    """
    return x if block.impl in ("einx", "bmm", "einsum") else channels_innermost(x)


def check_inputs(block: Attention, x: Tensor, context: Tensor | None) -> None:
    check_map("x", x, block.channels, block.rank)
    if context is None:
        if block.context_channels is not None:
            raise ValueError(f"context must be given to a block with context_channels={block.context_channels}")
        return
    check_map("context", context, block.context_channels or block.channels, block.rank)
    if context.shape[0] != x.shape[0]:
        raise ValueError(f"context must hold as many maps as x, {x.shape[0]}; got {context.shape[0]}")
    if context.shape[2:] == x.shape[2:]:
        return
    if not block.tiling.whole or block.causal or (block.position is not None and block.position.compares_places):
        raise ValueError(
            f"context must have the size of x, {tuple(x.shape[2:])}, with a pattern other than 'full', with a causal "
            f"mask or with relative positions; got {tuple(context.shape[2:])}"
        )

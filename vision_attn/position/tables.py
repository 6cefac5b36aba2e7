"""Tables of relative positions: how long they are, and stretched to another size of map."""

from __future__ import annotations

import torch
from torch import Tensor

from vision_attn.position.term import BlockShape

__all__ = ["check_feat_size", "resample", "table_lengths"]


def check_feat_size(owner: str, feat_size: object) -> None:
    """Refuse what is neither a size of a map in positions, one for all axes or one for each, nor None."""
    lengths = feat_size if isinstance(feat_size, tuple) else (feat_size,)
    if any(n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1) for n in lengths):
        raise ValueError(
            f"{owner}: feat_size must be a whole number of at least 1, or a tuple (…, …) of them; got {feat_size!r}"
        )


def table_lengths(owner: str, feat_size: int | tuple[int, ...] | None, shape: BlockShape) -> tuple[int, ...]:
    """The tokens along each axis that a table is for: one along an axis without attention."""
    partitioner, rank = shape.partitioner, shape.rank
    given = feat_size if isinstance(feat_size, tuple) else (feat_size,) * rank
    if len(given) != rank:
        raise ValueError(
            f"{owner}: feat_size must be a whole number of at least 1, or a tuple of one for each of {rank} axes; "
            f"got {feat_size!r}"
        )
    lengths = []
    for length, fixed, attended in zip(given, partitioner.window_shape, partitioner.attended, strict=True):
        if not attended:
            lengths.append(1)
        elif fixed is None:
            if length is None:
                raise ValueError(
                    f"{owner}: feat_size must be given with a pattern whose groups grow with the map: the size of the "
                    f"map that the tables are learned on, as in {owner}(feat_size=(14, 14))"
                )
            lengths.append(length)
        else:
            if length not in (None, fixed):
                raise ValueError(
                    f"{owner}: feat_size must be that of the pattern's groups, {partitioner.window_shape}; "
                    f"got {feat_size!r}: leave it out"
                )
            lengths.append(fixed)
    return tuple(lengths)


def resample(table: Tensor, length: int, axis: int = 0) -> Tensor:
    """A table by offset, ``2s - 1`` long along an axis, stretched linearly to another length.

    The first, the middle and the last offset stay the first, the middle and the last: a map of another size is looked
    at as the same picture, finer or coarser.

    >>> resample(torch.tensor([[0.0], [2.0], [4.0]]), 5).flatten()
    tensor([0., 1., 2., 3., 4.])
    """
    old = table.shape[axis]
    if not torch.compiler.is_compiling() and old == length:  # what is compiled may be for any length
        return table
    dtype = torch.float64 if table.dtype == torch.float64 else torch.float32
    ratio = (old - 1) / max(length - 1, 1)
    index = (torch.arange(length, device=table.device, dtype=dtype) - (length - 1) / 2) * ratio + (old - 1) / 2
    below = index.floor().clamp(0, max(old - 2, 0))
    share = (index - below).to(table.dtype).view([-1 if i == axis else 1 for i in range(table.dim())])
    low, high = (table.index_select(axis, at.long()) for at in (below, (below + 1).clamp(max=old - 1)))
    return low * (1 - share) + high * share

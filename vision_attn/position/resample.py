"""Tables of relative positions for another size of map."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["resample"]


def resample(table: Tensor, length: int, axis: int = 0) -> Tensor:
    """A table by offset, ``2s - 1`` long along an axis, stretched linearly to another length.

    The first, the middle and the last offset stay the first, the middle and the last: a map of another size is looked
    at as the same picture, finer or coarser. At the same length the table is unchanged.

    Args:
        table: values by offset along ``axis``.
        length: how long that axis is to be.
        axis: which axis.

    Returns:
        The table, ``length`` long along ``axis``.

    >>> resample(torch.tensor([[0.0], [2.0], [4.0]]), 5).flatten()
    tensor([0., 1., 2., 3., 4.])
    """
    old = table.shape[axis]
    dtype = torch.float64 if table.dtype == torch.float64 else torch.float32
    ratio = (old - 1) / max(length - 1, 1)
    place = (torch.arange(length, device=table.device, dtype=dtype) - (length - 1) / 2) * ratio + (old - 1) / 2
    below = place.floor().clamp(0, max(old - 2, 0))
    share = (place - below).to(table.dtype).view([-1 if i == axis else 1 for i in range(table.dim())])
    low, high = (table.index_select(axis, at.long()) for at in (below, (below + 1).clamp(max=old - 1)))
    return low * (1 - share) + high * share

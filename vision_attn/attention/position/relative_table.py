"""Shapes and interpolation of the tables of :class:`RelPosTable` and :class:`RelPosDecomposed`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vision_attn.attention.graphs import is_fixed
from vision_attn.attention.kind import AttentionConfig
from vision_attn.attention.patterns.pattern import check_lengths, to_ntuple


@dataclass(frozen=True)
class RelativePosition:
    """Base class of configurations with ``feat_size``, the size that tables are created for; None for fixed windows."""

    feat_size: int | tuple[int | None, ...] | None = None


def table_lengths(config: RelativePosition, block: AttentionConfig) -> tuple[int, ...]:
    """Return the number of positions along each axis that a table covers; 1 for an axis without attention."""
    owner, pattern, lengths = type(config).__name__, block.resolved_pattern, []
    check_lengths(owner, "feat_size", config.feat_size, optional=True)
    feat_size = to_ntuple(owner, "feat_size", config.feat_size, block.rank)
    for length, fixed, attends in zip(feat_size, pattern.window_shape, pattern.attention_axes, strict=True):
        if attends and fixed is None and length is None:
            raise ValueError(f"{owner}: feat_size must be given, because the groups of the pattern have no fixed size")
        if attends and fixed is not None and length not in (None, fixed):
            expected = f"None or {pattern.window_shape} for this pattern"
            raise ValueError(f"{owner}: feat_size must be {expected}, got {feat_size}")
        lengths.append((fixed or length or 1) if attends else 1)
    return tuple(lengths)


def resize_by_offset(table: Tensor, length: int, axis: int = 0) -> Tensor:
    """Interpolate a table of relative positions linearly to another length along an axis.

    The table has ``2s - 1`` entries along the axis, for the offsets from ``1 - s`` to ``s - 1``. The first, the middle
    and the last entry are kept: a feature map of another size is the same image at another resolution. In a graph with
    dynamic sizes, the table is always interpolated, even to its own length.

    >>> resize_by_offset(torch.tensor([[0.0], [2.0], [4.0]]), 5).flatten()
    tensor([0., 1., 2., 3., 4.])
    """
    old = table.shape[axis]
    if is_fixed([length]) and old == length:
        return table
    dtype = torch.float64 if table.dtype == torch.float64 else torch.float32
    ratio = (old - 1) / max(length - 1, 1)
    index = (torch.arange(length, device=table.device, dtype=dtype) - (length - 1) / 2) * ratio + (old - 1) / 2
    below = index.floor().clamp(0, max(old - 2, 0))
    fraction = (index - below).to(table.dtype).view([-1 if i == axis else 1 for i in range(table.dim())])
    low, high = (table.index_select(axis, at.long()) for at in (below, (below + 1).clamp(max=old - 1)))
    return low * (1 - fraction) + high * fraction

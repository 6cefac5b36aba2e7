"""Attention of every position to its neighborhood, as in NATTEN.

Consecutive queries form a tile. The keys of a tile are the keys of all its queries, with a mask for each query.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vision_attn.attention.patterns.pattern import AnyPattern, AxisLayout, AxisTiles, check_lengths, same_length
from vision_attn.checks import check_bool


@dataclass(frozen=True)
class Neighborhood(AnyPattern):
    """Attention of every position to the ``kernel_size`` positions around it along each axis, as in NATTEN.

    ::

        query i attends to keys i + dilation · (o - kernel_size // 2)        o = 0, …, kernel_size - 1

    Every query has the same number of keys: at a border, the neighborhood is shifted into the feature map instead of
    being truncated. With an even ``kernel_size``, the additional key comes before the query. Along an axis that is too
    short for the neighborhood, a query attends to all positions whose distance is a multiple of ``dilation``.

    With a stride, groups of ``stride`` consecutive queries share the keys of the query in the middle of their group, or
    of the last query along a causal axis. Along a causal axis, a query attends to itself and to the ``kernel_size - 1``
    positions before it; a query near the start of the axis has fewer keys.

    Each argument is a single value for all axes, or a tuple with one value per axis.

    Args:
        kernel_size: number of keys along an axis.
        dilation: distance between consecutive keys, in positions.
        stride: number of consecutive queries that share their keys; at most ``kernel_size``.
        causal: prevent positions from attending to later positions along the axis.

    Raises:
        ValueError: ``kernel_size``, ``dilation`` or ``stride`` is smaller than 1, or ``stride`` is larger than
            ``kernel_size``.

    Source: Hassani et al., *Neighborhood Attention Transformer*, 2022, https://arxiv.org/abs/2204.07143; with
    dilation: Hassani and Shi, 2022, https://arxiv.org/abs/2209.15001; with a stride: Hassani et al., *Generalized
    Neighborhood Attention*, 2025, https://arxiv.org/abs/2504.16922

    >>> Neighborhood(7, dilation=2)
    Neighborhood(kernel_size=7, dilation=2, stride=1, causal=False)
    """

    kernel_size: int | tuple[int, ...]
    dilation: int | tuple[int, ...] = 1
    stride: int | tuple[int, ...] = 1
    causal: bool | tuple[bool, ...] = False

    def __post_init__(self) -> None:
        for name in ("kernel_size", "dilation", "stride"):
            check_lengths("Neighborhood", name, getattr(self, name))
        for causal in same_length(self.causal)[0]:
            check_bool(causal=causal)
        kernels, strides = same_length(self.kernel_size, self.stride)
        if any(stride > kernel for kernel, stride in zip(kernels, strides, strict=False)):
            raise ValueError(f"Neighborhood: stride must be at most kernel_size={self.kernel_size}, got {self.stride}")

    @property
    def window_shape(self) -> tuple[int | None, ...]:
        return same_length(self.kernel_size)[0]

    def axis_tiles(self, axis: int, length: int, device: torch.device) -> AxisTiles:
        settings = same_length(self.kernel_size, self.dilation, self.stride, self.causal)
        kernel, dilation, stride, causal = (values[axis] for values in settings)
        if isinstance(length, int):  # keys outside a feature map of known length need not be copied
            dilation = min(dilation, length)
            kernel = min(kernel, -(-length // dilation))
        tile = kernel  # longer tiles compute more masked logits, shorter tiles copy more keys
        tiles = (length + dilation * tile - 1) // (dilation * tile)  # ONNX would truncate -(-a // b)
        # Only positions with the same remainder modulo the dilation attend to each other. They form a class, and tiles
        # are sorted by class.
        first = torch.arange(dilation, device=device)[:, None, None]
        members = (length - first + dilation - 1) // dilation  # number of positions in each class
        width = members.clamp(max=kernel)

        def first_key(query: Tensor) -> Tensor:
            center = query // stride * stride + (stride - 1 if causal else stride // 2)
            before = kernel - 1 if causal else kernel // 2
            return torch.minimum((torch.minimum(center, members - 1) - before).clamp(min=0), members - width)

        in_class = torch.arange(tiles, device=device)[:, None] * tile + torch.arange(tile, device=device)
        query = torch.minimum(in_class, (members - 1).clamp(min=0))  # (dilation, tiles, tile)
        key = first_key(query[:, :, :1]) + torch.arange(tile + kernel + stride - 2, device=device)
        start, candidate = first_key(query)[..., None], key[:, :, None, :]
        allowed = torch.logical_and(candidate >= start, candidate < start + width[..., None])
        if causal:
            allowed = torch.logical_and(allowed, candidate <= query[..., None])

        def layout(at: Tensor, on_map: Tensor) -> AxisLayout:
            return AxisLayout((first + dilation * at).masked_fill(~on_map, -1).flatten(0, 1), at.flatten(0, 1))

        queries, keys = layout(query, in_class.expand_as(query) < members), layout(key, key < members)
        return AxisTiles(queries, keys, kernel, allowed.flatten(0, 1))

"""Every position attends to its neighbors, as in NATTEN: tiles of queries with the keys of all of them, and a mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vision_attn.attention.patterns.pattern import AnyPattern, AxisLayout, AxisTiles, check_lengths, same_length


@dataclass(frozen=True)
class Neighborhood(AnyPattern):
    """Every position attends to the ``kernel_size`` positions around it along each axis, as in NATTEN.

    At a border the neighborhood is shifted, never shrunk: every query has the same number of keys. With an even kernel,
    the additional key is before the query. With a dilation, the keys are that many positions apart. Along an axis that
    is too short for the kernel, a query attends to all positions that are a multiple of the dilation away.

    With a stride, that many consecutive queries attend to the keys of the query in their middle. Along a causal axis a
    query attends to itself and the ``kernel_size - 1`` positions before it, fewer at the border.

    Args:
        kernel_size: keys along an axis; one for all axes or one for each.
        dilation: positions from one key to the next; one for all axes or one for each.
        stride: queries that share their keys; one for all axes or one for each; at most the kernel.
        causal: whether no position attends to a later one; one for all axes or one for each.

    Raises:
        ValueError: a kernel, dilation or stride below one, a stride above the kernel, or a ``causal`` that is not bool.

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
        kernels, strides = same_length(self.kernel_size, self.stride)
        if any(stride > kernel for kernel, stride in zip(kernels, strides, strict=False)):
            raise ValueError(f"Neighborhood: stride must be at most kernel_size, {self.kernel_size}; got {self.stride}")
        if {*map(type, self.causal if isinstance(self.causal, tuple) else (self.causal,))} != {bool}:
            raise ValueError(f"Neighborhood: causal must be True, False or a tuple of them; got {self.causal!r}")

    @property
    def window_shape(self) -> tuple[int | None, ...]:
        return same_length(self.kernel_size)[0]

    def axis_tiles(self, axis: int, length: int, device: torch.device) -> AxisTiles:
        settings = zip(*same_length(self.kernel_size, self.dilation, self.stride, self.causal), strict=True)
        kernel, dilation, stride, causal = list(settings)[axis]
        if isinstance(length, int):  # not symbolic: keys that would all lie beyond the map need no copy
            dilation = min(dilation, length)
            kernel = min(kernel, -(-length // dilation))
        tile = kernel  # longer tiles hold more keys than a query needs, shorter ones copy more keys
        tiles = (length + dilation * tile - 1) // (dilation * tile)  # not -(-a // b), which ONNX truncates
        # Positions with the same remainder by the dilation attend to each other. Tiles of the first class come first.
        first = torch.arange(dilation, device=device)[:, None, None]
        members = (length - first + dilation - 1) // dilation  # positions in each class
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
        on_map = in_class.expand_as(query) < members, key < members
        queries, keys = (
            AxisLayout((first + dilation * at).masked_fill(~real, -1).flatten(0, 1), at.flatten(0, 1))
            for at, real in zip((query, key), on_map, strict=True)
        )
        return AxisTiles(queries, keys, kernel, allowed.flatten(0, 1))

"""Blocks of queries that attend to the keys in them and in a halo around them, as in HaloNet."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vision_attn.attention.patterns.pattern import AnyPattern, AxisLayout, AxisTiles, check_lengths, same_length


@dataclass(frozen=True)
class Halo(AnyPattern):
    """Attention of blocks, as windows, to the keys in them and in a halo around them, as in HaloNet.

    ``b n d (gh h) (gw w) -> (b gh gw) n (h w) d`` with ``h`` and ``w`` the sides of a block for queries, and those of a
    block and its halos for keys. Keys and values beyond the map are zeros and are not masked, as in timm's
    ``HaloAttn``: near a border, the weights of the keys on the map sum to less than one. They are zeros for the kernel,
    after queries and keys were normalized (``qk_norm``) and rotated.

    Args:
        block_size: side of a block, in positions; one for all axes or one for each.
        halo_size: how far a block attends beyond each of its sides, in positions; likewise.

    Raises:
        ValueError: a side below one, or a halo below zero.

    Source: Vaswani et al., *Scaling Local Self-Attention for Parameter Efficient Visual Backbones*, 2021,
    https://arxiv.org/abs/2103.12731

    >>> Halo(8, halo_size=3)
    Halo(block_size=8, halo_size=3)
    """

    block_size: int | tuple[int, ...]
    halo_size: int | tuple[int, ...]

    zero_padded = True

    def __post_init__(self) -> None:
        check_lengths("Halo", "block_size", self.block_size)
        check_lengths("Halo", "halo_size", self.halo_size, least=0)

    @property
    def sides(self) -> list[tuple[int, int]]:
        """The block and its halo, for each axis."""
        return list(zip(*same_length(self.block_size, self.halo_size), strict=True))

    @property
    def window_shape(self) -> tuple[int | None, ...]:
        return tuple([block + halo for block, halo in self.sides])

    def axis_tiles(self, axis: int, length: int, device: torch.device) -> AxisTiles:
        block, halo = self.sides[axis]
        start = torch.arange((length + block - 1) // block, device=device)[:, None] * block
        query, key = torch.arange(block, device=device), torch.arange(block + 2 * halo, device=device) - halo
        queries, keys = ((start + at).masked_fill(start + at >= length, -1).clamp(min=-1) for at in (query, key))
        return AxisTiles(AxisLayout(queries, query[None]), AxisLayout(keys, key[None]), block + halo)

    def axis_as_one_tile(self, axis: int, length: int, device: torch.device) -> AxisTiles:
        block, halo = self.sides[axis]
        query = torch.arange(length, device=device)
        key = torch.arange(-halo, length + -length % block + halo, device=device)
        start = query[:, None] // block * block
        allowed = torch.logical_and(key >= start - halo, key < start + block + halo)
        positions = key.masked_fill(key >= length, -1).clamp(min=-1)
        queries = AxisLayout(query[None], query[None], (length,))
        return AxisTiles(queries, AxisLayout(positions[None], key[None]), block + halo, allowed[None])

"""Attention of blocks of queries to the keys in and around each block, as in HaloNet."""

from dataclasses import dataclass

import torch

from vision_attn.attention.patterns.pattern import AnyPattern, AxisLayout, AxisTiles, check_lengths, same_length


@dataclass(frozen=True)
class Halo(AnyPattern):
    """Attention of non-overlapping blocks of queries to the keys in and around each block, as in HaloNet.

    ::

        queries    b n d (gh h) (gw w) -> (b gh gw) n (h w) d    h, w: block_size
        keys       overlapping blocks in the same order          h, w: block_size + 2 · halo_size

    Keys and values outside the feature map are zeros and are not masked, as in timm's ``HaloAttn``. Near a border, the
    weights of the keys inside the feature map therefore sum to less than one. The zeros are inserted after the
    normalization (``qk_norm``) and the rotation of keys.

    Args:
        block_size: size of a block, in positions: an integer for all axes, or a tuple with one integer per axis.
        halo_size: number of positions by which the keys extend beyond each side of a block: an integer for all axes, or
            a tuple with one integer per axis.

    Raises:
        ValueError: ``block_size`` is smaller than 1, or ``halo_size`` is negative.

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
    def window_shape(self) -> tuple[int | None, ...]:
        return tuple(map(sum, zip(*same_length(self.block_size, self.halo_size), strict=True)))

    def axis_tiles(self, axis: int, length: int, device: torch.device) -> AxisTiles:
        block, halo = (sizes[axis] for sizes in same_length(self.block_size, self.halo_size))
        start = torch.arange((length + block - 1) // block, device=device)[:, None] * block
        query, key = torch.arange(block, device=device), torch.arange(block + 2 * halo, device=device) - halo
        queries, keys = ((start + at).masked_fill(start + at >= length, -1).clamp(min=-1) for at in (query, key))
        return AxisTiles(AxisLayout(queries, query[None]), AxisLayout(keys, key[None]), block + halo)

    def axis_as_one_tile(self, axis: int, length: int, device: torch.device) -> AxisTiles:
        block, halo = (sizes[axis] for sizes in same_length(self.block_size, self.halo_size))
        query = torch.arange(length, device=device)
        key = torch.arange(-halo, length + -length % block + halo, device=device)
        start = query[:, None] // block * block
        allowed = torch.logical_and(key >= start - halo, key < start + block + halo)
        positions = key.masked_fill(key >= length, -1).clamp(min=-1)
        queries = AxisLayout(query[None], query[None], (length,))
        return AxisTiles(queries, AxisLayout(positions[None], key[None]), block + halo, allowed[None])

"""What a position term may do: change the map, turn queries and keys, extend them, or add to the logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from vision_attn.patterns import Tiling

__all__ = ["AXIS_NAMES", "BlockShape", "PositionTerm", "Specification"]

#: Names of a map's axes in state dicts, the last ones first to be there.
AXIS_NAMES = ("depth", "height", "width")


@dataclass(frozen=True)
class BlockShape:
    """What a term has to know of the block that it is built for.

    >>> from vision_attn.patterns import Window
    >>> BlockShape(channels=64, num_heads=4, key_dim=16, tiling=Window(7).tiling(2)).rank
    2
    """

    #: of the map
    channels: int
    #: of queries
    num_heads: int
    #: width of queries and keys in a head
    key_dim: int
    #: how the block's pattern cuts its maps
    tiling: Tiling

    @property
    def rank(self) -> int:
        """How many axes its maps have."""
        return self.tiling.rank


class Specification(Protocol):
    """A position term as it is asked for: small, frozen, printed as the code that makes it.

    >>> from vision_attn.patterns import Window
    >>> from vision_attn.position import RelPosTable
    >>> shape = BlockShape(channels=64, num_heads=4, key_dim=16, tiling=Window(7).tiling(2))
    >>> RelPosTable().build(shape).relative_position_bias_table.shape
    torch.Size([169, 4])
    """

    def build(
        self, shape: BlockShape, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> PositionTerm:
        """The term for one block, with its parameters if it has any.

        Args:
            shape: what it has to know of the block.
            device: where the parameters live.
            dtype: type of the parameters.

        Raises:
            ValueError: the term cannot be for such a block.
        """


class PositionTerm(nn.Module):
    """A term that does nothing; terms override the one method that they act through.

    Args:
        specification: what the term was asked for by.

    >>> from vision_attn.position import SinCos
    >>> x = torch.randn(1, 8, 3, 5)
    >>> torch.equal(PositionTerm(SinCos()).add_to_map(x), x)
    True
    """

    #: Whether keys must be places of the same map as queries are, so that places can be compared.
    compares_places = False
    #: Whether it is added to the map, and so is for one number of channels.
    needs_channels = False

    def __init__(self, specification: Specification) -> None:
        super().__init__()
        self.specification = specification

    def add_to_map(self, x: Tensor) -> Tensor:
        """The map ``(b, c, *size)`` with its positions in it.

        Args:
            x: a map, ``(b, c, *size)``.
        """
        return x

    def turn(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The queries ``(b, n, d, *size)`` and keys ``(b, m, d, …)`` as they are cut into tokens.

        Args:
            q: queries, ``(b, n, d, *size)``.
            k: keys, ``(b, m, d, …)``, of a map that may be of another size.
        """
        return q, k

    def extend(
        self, q: Tensor, k: Tensor, scale: float, offsets: Sequence[Tensor], *, einx: bool
    ) -> tuple[Tensor, Tensor, float]:
        """The queries and keys made wider, so that their dot product holds the term, and the scale that goes with them.

        Args:
            q: queries, ``(b·groups, n, queries, d)``.
            k: keys, ``(b·groups, m, keys, d)``.
            scale: factor on the logits.
            offsets: for each axis key's place less query's place, as a tiling gives them.
            einx: whether it is done by einx or by torch.

        Returns:
            Queries ``(b·groups, n, queries, d + further)``, keys as wide, and the factor on their logits.
        """
        return q, k, scale

    def bias(self, offsets: Sequence[Tensor]) -> Tensor | None:
        """What is added to the logits, ``(groups or 1, n, queries, keys)``; None for nothing.

        Args:
            offsets: for each axis key's place less query's place, as a tiling gives them.
        """
        return None

    def resampled(self, name: str, saved: Tensor) -> Tensor | None:
        """A saved parameter of this term for another size of map, resampled to the size here; None if it is not.

        Args:
            name: of the parameter.
            saved: what a checkpoint has for it.

        Returns:
            The parameter in the shape that it has here.
        """
        return None

    def extra_repr(self) -> str:
        return repr(self.specification)

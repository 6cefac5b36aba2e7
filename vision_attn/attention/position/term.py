"""What a position term may do: add to the map, rotate or widen queries and keys, or add to the logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from vision_attn.attention.masks import AxisBias
from vision_attn.attention.patterns import Partition, Partitioner

#: Queries and keys with their positions in them, the factor on their logits, and what is added to the logits,
#: ``(b or 1, groups or 1, n, i, j)``, by axis, or None.
Placed = tuple[Tensor, Tensor, float, Tensor | AxisBias | None]

#: Names of a map's axes in state dicts; a map with fewer axes has the last ones.
AXIS_NAMES = ("depth", "height", "width")


@dataclass(frozen=True)
class BlockShape:
    """What a term has to know of the block that it is built for."""

    channels: int
    num_heads: int
    key_dim: int
    partitioner: Partitioner
    #: whether keys are not of the queries' map: they are averaged, or of another map
    keys_elsewhere: bool = False
    context_channels: int | None = None

    @property
    def rank(self) -> int:
        """How many axes its maps have."""
        return self.partitioner.rank


class AnyPosition(Protocol):
    """The specification of a position term: small, frozen, printed as the code that makes it."""

    def build(self, shape: BlockShape, device: object = None, dtype: object = None) -> PositionTerm:
        """The term for one block, with its parameters if it has any.

        Raises:
            ValueError: the term cannot be for such a block.
        """


class PositionTerm(nn.Module):
    """A term that does nothing; each term overrides the one method that it acts through."""

    #: Whether queries and keys must be of one map, since their positions are subtracted.
    is_relative = False
    #: Whether it is added to the map, and so is for one number of channels.
    needs_channels = False

    def __init__(self, specification: AnyPosition) -> None:
        super().__init__()
        self.specification = specification

    def add_to_map(self, x: Tensor) -> Tensor:
        """The map ``(b, c, *size)`` with its positions in it."""
        return x

    def forward(self, q: Tensor, k: Tensor, scale: float, part: Partition) -> Placed:
        """Queries ``(b·groups, n, i, d)`` and keys ``(b·groups, m, j, d)`` with their positions in them.

        With them come the factor on their logits, and what is added to the logits, ``(b or 1, groups or 1, n, i, j)``,
        by axis, or None.
        """
        return q, k, scale, None

    def resampled(self, name: str, saved: Tensor) -> Tensor | None:
        """A saved parameter of this term for another size of map, resampled to the size here; None if it is none."""
        return None

    def extra_repr(self) -> str:
        return repr(self.specification)


def new_term(position: AnyPosition, shape: BlockShape, **factory: Any) -> PositionTerm:
    """The position term of a block; refused where it does not go with the block's other arguments."""
    if isinstance(position, type) or not hasattr(position, "build"):
        raise ValueError(
            "position must be None or a RelPosDecomposed(…), RelPosTable(…), Rope2d(), AbsPos(…), ConditionalPos() or "
            f"SinCos(); got {position!r}"
        )
    term = position.build(shape, **factory)
    if term.is_relative and shape.keys_elsewhere:
        raise ValueError(
            f"position must not be {position!r} with kv_stride or context_channels, whose keys are not of the queries' "
            "map: use Rope2d()"
        )
    if term.needs_channels and shape.context_channels not in (None, shape.channels):
        raise ValueError(
            f"position must not be {position!r}, which is added to maps of {shape.channels} channels, with "
            f"context_channels={shape.context_channels}: use Rope2d()"
        )
    return term

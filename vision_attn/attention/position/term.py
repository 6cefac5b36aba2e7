"""What a position term may do: add to the map, rotate or widen queries and keys, or add to the logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from vision_attn.attention.patterns import Partition, Partitioner
from vision_attn.checks import MOST

__all__ = ["AXIS_NAMES", "AnyPosition", "BlockShape", "PositionTerm", "check_feat_size"]

#: Names of a map's axes in state dicts, the last ones first to be there.
AXIS_NAMES = ("depth", "height", "width")


@dataclass(frozen=True)
class BlockShape:
    """What a term has to know of the block that it is built for."""

    #: of the map
    channels: int
    #: of queries
    num_heads: int
    #: width of queries and keys in a head
    key_dim: int
    #: how the block's pattern cuts its maps
    partitioner: Partitioner

    @property
    def rank(self) -> int:
        """How many axes its maps have."""
        return self.partitioner.rank


class AnyPosition(Protocol):
    """A position term as it is asked for: small, frozen, printed as the code that makes it."""

    def build(self, shape: BlockShape, device: object = None, dtype: object = None) -> PositionTerm:
        """The term for one block, with its parameters if it has any; refused where it cannot be for such a block."""


class PositionTerm(nn.Module):
    """A term that does nothing; terms override the one method that they act through."""

    #: Whether keys must be positions of the same map as queries are, so that one can be taken from the other.
    is_relative = False
    #: Whether it is added to the map, and so is for one number of channels.
    needs_channels = False

    def __init__(self, specification: AnyPosition) -> None:
        super().__init__()
        self.specification = specification

    def add_to_map(self, x: Tensor) -> Tensor:
        """The map ``(b, c, *size)`` with its positions in it."""
        return x

    def forward(
        self, q: Tensor, k: Tensor, scale: float, part: Partition, keys: Partition
    ) -> tuple[Tensor, Tensor, float, Tensor | None]:
        """Queries ``(b·groups, n, i, d)`` and keys ``(b·groups, m, j, d)`` with their positions in them.

        ``part`` is the partition of the queries' map, ``keys`` that of the keys'. With them come the factor on their
        logits, and what is added to the logits, ``(b or 1, groups or 1, n, i, j)`` or None.
        """
        return q, k, scale, None

    def resampled(self, name: str, saved: Tensor) -> Tensor | None:
        """A saved parameter of this term for another size of map, resampled to the size here; None if it is not."""
        return None

    def extra_repr(self) -> str:
        return repr(self.specification)


def check_feat_size(owner: str, feat_size: object) -> None:
    """Refuse what is neither a size of a map in positions, one for all axes or one for each, nor None."""
    lengths = feat_size if isinstance(feat_size, tuple) else (feat_size,)
    if any(n is not None and (isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MOST) for n in lengths):
        raise ValueError(
            f"{owner}: feat_size must be a whole number of at least 1, or a tuple (…, …) of them; got {feat_size!r}"
        )

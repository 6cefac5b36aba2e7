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
    """What a term has to know of the block that it is built for."""

    channels: int
    num_heads: int
    key_dim: int
    tiling: Tiling

    @property
    def rank(self) -> int:
        return self.tiling.rank


class Specification(Protocol):
    """A position term as it is asked for: small, frozen, printed as the code that makes it."""

    def build(
        self, shape: BlockShape, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> PositionTerm: ...


class PositionTerm(nn.Module):
    """A term that does nothing; terms override the one method that they act through."""

    #: Whether keys must be places of the same map as queries are, so that places can be compared.
    compares_places = False
    #: Whether it is added to the map, and so is for one number of channels.
    needs_channels = False

    def __init__(self, specification: Specification) -> None:
        super().__init__()
        self.specification = specification

    def add_to_map(self, x: Tensor) -> Tensor:
        """The map ``(b, c, *size)`` with its positions in it."""
        return x

    def turn(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys ``(b, n, d, *size)``, before they are cut into tokens."""
        return q, k

    def extend(
        self, q: Tensor, k: Tensor, scale: float, offsets: Sequence[Tensor], *, einx: bool
    ) -> tuple[Tensor, Tensor, float]:
        """Tokens ``(b·groups, n, tokens, d)`` made wider, so that their dot product holds the term; and the scale."""
        return q, k, scale

    def bias(self, offsets: Sequence[Tensor]) -> Tensor | None:
        """What is added to the logits, ``(groups or 1, n, queries, keys)``."""
        return None

    def resampled(self, name: str, saved: Tensor) -> Tensor | None:
        """A saved parameter of this term for another size of map, resampled to the size here; None if it is not."""
        return None

    def extra_repr(self) -> str:
        return repr(self.specification)

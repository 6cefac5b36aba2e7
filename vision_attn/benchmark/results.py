"""What was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vision_attn.benchmark.contestants import FLOOR, OURS
from vision_attn.benchmark.settings import Shape

__all__ = ["Cost", "Group", "Row"]


@dataclass(frozen=True)
class Cost:
    """What one pass costs.

    Args:
        seconds: one number for each round.
        memory: peak in bytes; None where it is not one call, as for the floor.

    >>> Cost((0.3, 0.1, 0.2), memory=None).median
    0.2
    """

    seconds: tuple[float, ...]
    memory: int | None

    @property
    def median(self) -> float:
        """The median of the rounds, in seconds."""
        return float(np.median(self.seconds))

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third quartile of the rounds, in seconds."""
        low, high = np.quantile(self.seconds, (0.25, 0.75))
        return float(low), float(high)

    def times(self, other: Cost | None) -> float | None:
        """How many times as long as another it takes; None where there is no other.

        Args:
            other: that one.
        """
        return None if other is None else self.median / other.median


@dataclass(frozen=True)
class Row:
    """A contestant at a shape.

    Args:
        name: of the contestant.
        difference: of its output from ours, in parts of ours' largest value.
        forward: without gradients.
        both: forward and backward, to the input and the parameters; None where it has no backward pass.
    """

    name: str
    difference: float
    forward: Cost
    both: Cost | None


@dataclass(frozen=True)
class Group:
    """The contestants at a shape.

    Args:
        shape: batch, channels, height and width of the maps.
        heads: of every contestant.
        relative: whether with relative positions.
        rows: one for each contestant.
    """

    shape: Shape
    heads: int
    relative: bool
    rows: Sequence[Row]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the maps, in positions."""
        return self.shape[2], self.shape[3]

    @property
    def tokens(self) -> int:
        """Positions of a map, each a token."""
        return self.shape[2] * self.shape[3]

    @property
    def floor(self) -> Row | None:
        """The floor; None with relative positions, which no fused kernel takes as they are."""
        return self.find(FLOOR)

    @property
    def ours(self) -> Row:
        """Ours, by the implementation that the others are compared with."""
        return next(row for row in self.rows if row.name == OURS)

    def baselines(self, what: str) -> tuple[Cost | None, Cost | None]:
        """What the floor and ours cost, ``forward`` or ``both``.

        Args:
            what: which of the two.
        """
        return None if self.floor is None else getattr(self.floor, what), getattr(self.ours, what)

    def find(self, name: str) -> Row | None:
        """The contestant of a name; None where there is none.

        Args:
            name: of the contestant.
        """
        return next((row for row in self.rows if row.name == name), None)

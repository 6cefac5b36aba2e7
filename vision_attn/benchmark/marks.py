"""The marks that the library has set itself, and whether what was measured holds them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from vision_attn.benchmark.results import Cost, Group, Row

__all__ = ["Mark", "judge"]

MEBI = 2**20


@dataclass(frozen=True)
class Mark:
    """One mark at one shape.

    Args:
        what: what is asked.
        measured: the number that it is judged by, with its unit.
        holds: whether it does.
    """

    what: str
    measured: str
    holds: bool


def judge(groups: Iterable[Group], dtype: str) -> list[Mark]:
    """The marks that can be judged by these measurements.

    Args:
        groups: what was measured.
        dtype: type of the numbers.
    """
    found: list[Mark] = []
    for group in groups:
        where = "×".join(map(str, group.size))
        if group.floor is not None and group.tokens >= 196:
            found.append(near_floor(group, group.floor, where))
        notebook, bottleneck = group.find("notebook bmm"), group.find("timm BottleneckAttn")
        if notebook is not None and group.size == (64, 64):
            found.append(faster("forward", where, group.ours.forward, notebook.name, notebook.forward, 3.0))
        if bottleneck is not None and group.size == (56, 56):
            found += against_bottleneck(group, bottleneck, where)
            found += without_weights(group, where, getattr(torch, dtype).itemsize)
    return found


def near_floor(group: Group, floor: Row, where: str) -> Mark:
    ratio = group.ours.forward.median / floor.forward.median
    return Mark(f"{where}: forward at most 1.3 times the floor", f"{ratio:.2f} ×", ratio <= 1.3)


def faster(what: str, where: str, ours: Cost, name: str, other: Cost, asked: float) -> Mark:
    ratio = other.median / ours.median
    return Mark(f"{where}: {what} at least {asked:g} times as fast as {name}", f"{ratio:.2f} ×", ratio >= asked)


def against_bottleneck(group: Group, other: Row, where: str) -> Iterator[Mark]:
    where = f"{where}, relative positions"
    yield faster("forward", where, group.ours.forward, other.name, other.forward, 1.5)
    if group.ours.both is not None and other.both is not None:
        yield faster("forward + backward", where, group.ours.both, other.name, other.both, 1.5)


def without_weights(group: Group, where: str, itemsize: int) -> Iterator[Mark]:
    """All memory together is less than the attention weights would take: so they are never held."""
    weights = group.shape[0] * group.heads * group.tokens**2 * itemsize
    for what, cost in (("forward", group.ours.forward), ("forward + backward", group.ours.both)):
        if cost is not None and cost.memory is not None:
            yield Mark(
                f"{where}, relative positions: {what} takes less than attention weights, {weights / MEBI:.0f} MiB",
                f"{cost.memory / MEBI:.0f} MiB",
                cost.memory < weights,
            )

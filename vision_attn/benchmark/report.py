"""The measurements as a person reads them, and as a program does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from vision_attn.benchmark.machine import Machine
from vision_attn.benchmark.marks import MEBI, Mark
from vision_attn.benchmark.results import Cost, Group, Row
from vision_attn.benchmark.settings import DTYPES, Settings

__all__ = ["as_json", "checklist", "header", "table"]

NONE = "–"


def header(machine: Machine, settings: Settings) -> str:
    """What was measured on, and how to read the tables.

    Args:
        machine: what was measured on.
        settings: of the benchmark.
    """
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    maps = "channels-last" if settings.channels_last else "channels-first"
    return (
        f"device {machine.device}, threads {machine.threads}, dtype {settings.dtype}, {maps} maps\n"
        f"{versions}\n\n"
        f"Median and quartiles of {settings.rounds} rounds in which the contestants take turns; peak memory beyond "
        "what was held before.\n"
        "floor: projection, fused kernel, projection, each on contiguous inputs, measured apart and summed.\n"
        "× floor, × ours: how many times as long as the floor, and as ours sdpa."
    )


def table(group: Group, dtype: str) -> str:
    """One line for each contestant.

    Args:
        group: what was measured at a shape.
        dtype: type of the numbers.
    """
    batch, channels, height, width = group.shape
    worst = max(row.difference for row in group.rows)
    columns = f"  {'ms':>7}{'quartiles':>14}{'× floor':>8}{'× ours':>7}"
    lines = [
        f"--- {'with relative positions, ' if group.relative else ''}batch {batch}, {channels} channels, "
        f"{height}×{width} = {group.tokens:,} tokens, {group.heads} heads",
        f"{'':<24}  {'forward':^36}  {'forward + backward':^36}  {'peak MiB':>15}",
        f"{'contestant':<24}{columns}{columns}  {'fwd':>7}{'fwd+bwd':>8}",
    ]
    for row in group.rows:
        forward = times(row.forward, *group.baselines("forward"))
        both = times(row.both, *group.baselines("both"))
        lines.append(f"{row.name:<24}{forward}{both}  {memory(row.forward):>7}{memory(row.both):>8}")
    lines.append(f"Outputs agree to {worst:.0e} of the largest value ({DTYPES[dtype]:.0e} is allowed).")
    return "\n".join(lines)


def times(cost: Cost | None, floor: Cost | None, ours: Cost | None) -> str:
    if cost is None:
        return f"  {NONE:>7}{NONE:>14}{NONE:>8}{NONE:>7}"
    spread = "–".join(three_digits(1000 * quartile) for quartile in cost.quartiles)
    to_floor, to_ours = (NONE if ratio is None else f"{ratio:.2f}" for ratio in (cost.times(floor), cost.times(ours)))
    return f"  {three_digits(1000 * cost.median):>7}{spread:>14}{to_floor:>8}{to_ours:>7}"


def memory(cost: Cost | None) -> str:
    return NONE if cost is None or cost.memory is None else three_digits(cost.memory / MEBI)


def three_digits(value: float) -> str:
    """Behind the point as many of the three as are not needed before it.

    >>> [three_digits(value) for value in (0.0123, 1.23456, 12.3456, 1234.56)]
    ['0.012', '1.23', '12.3', '1235']
    """
    places = next((places for places, limit in ((3, 1), (2, 10), (1, 100)) if value < limit), 0)
    return f"{value:.{places}f}"


def checklist(marks: Sequence[Mark]) -> str:
    """The marks of the library, what was measured for each, and whether it holds, as lines.

    Args:
        marks: those that could be judged.
    """
    if not marks:
        return "First marks: none of them is about these shapes."
    lines = [f"  {'holds' if mark.holds else 'does not hold':<13}{mark.measured:>10}  {mark.what}" for mark in marks]
    return "\n".join(["First marks, of ours by sdpa:", *lines])


def as_json(machine: Machine, settings: Settings, groups: Sequence[Group], marks: Sequence[Mark]) -> str:
    """A document of all that was measured, each time in seconds and each peak in bytes.

    Args:
        machine: what was measured on.
        settings: of the benchmark.
        groups: what was measured, at each shape.
        marks: those that could be judged.
    """
    document = {
        "machine": asdict(machine),
        "settings": settings.as_dict(),
        "groups": [
            {
                "shape": group.shape,
                "heads": group.heads,
                "relative_positions": group.relative,
                "contestants": {row.name: contestant(row, group) for row in group.rows},
            }
            for group in groups
        ],
        "marks": [asdict(mark) for mark in marks],
    }
    return json.dumps(document, indent=2)


def contestant(row: Row, group: Group) -> dict[str, object]:
    return {
        "difference": row.difference,
        "forward": plain(row.forward, *group.baselines("forward")),
        "forward_backward": plain(row.both, *group.baselines("both")),
    }


def plain(cost: Cost | None, floor: Cost | None, ours: Cost | None) -> dict[str, object] | None:
    if cost is None:
        return None
    return {
        "seconds": cost.seconds,
        "median_seconds": cost.median,
        "quartiles_seconds": cost.quartiles,
        "times_floor": cost.times(floor),
        "times_ours": cost.times(ours),
        "peak_bytes": cost.memory,
    }

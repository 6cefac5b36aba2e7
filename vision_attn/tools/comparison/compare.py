"""Arms by seeds: from settings to a table with intervals, and to words that follow from its numbers alone."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vision_attn.errors import Interrupted
from vision_attn.networks.checkpoints import write_atomically
from vision_attn.networks.figures import Figure, save_figure
from vision_attn.text import markdown
from vision_attn.tools.comparison.runs import Outcome, carry_out
from vision_attn.tools.comparison.statistics import Difference, compare_scores, detectable, pooled_spread
from vision_attn.tools.training.settings import Settings
from vision_attn.version import __version__

__all__ = ["Comparison", "compare", "said_of"]

#: The columns of both tables that hold words.
WORDS = (0, 6)
LEGEND = """\
The verdict follows from the 95 % interval: Student's, with the spread pooled over all arms. Welch's takes that of each
arm by itself, the bootstrap no distribution for given. All are corrected for the number of comparisons (Bonferroni)."""


@dataclass(frozen=True)
class Comparison:
    """What came of a comparison."""

    #: by arm and seed
    outcomes: Mapping[str, Mapping[int, Outcome]]
    differences: Sequence[Difference]
    #: the tables and what follows from them, as ``comparison.md`` has it
    text: str

    @property
    def best(self) -> str:
        """The arm with the highest mean."""
        means = {arm: np.mean([one.top1 for one in found.values()]) for arm, found in self.outcomes.items()}
        return max(means, key=lambda arm: means[arm])


def compare(
    arms: Mapping[str, Mapping[str, Any]],
    *,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    output: str = "runs/compare",
    jobs: int | None = None,
    pairs: str = "last",
    command: str = "",
) -> Comparison:
    """Train each arm with each seed, and compare top-1 after the last epoch.

    Every run is one of ``vision-attn train``, in a folder of its own in ``output``. What is complete is not trained
    again, and what was interrupted goes on from where it was: the same call again, at any moment, ends with the same
    table, and with more seeds or arms adds them to those that are there.

    Args:
        arms: the settings of each, by its name.
        seeds: of each arm.
        output: folder of the runs and of ``comparison.md``, ``comparison.json`` and ``comparison.png``.
        jobs: runs side by side, each in a process of its own with its share of the cores, or on the next GPU; by
            default as many as there are GPUs, or cores. One is made in this process.
        pairs: ``"last"`` compares the last arm with each of the others, ``"all"`` each with each.
        command: what made it, for ``comparison.md``.

    Returns:
        What came of it.

    Raises:
        ValueError: settings that are not what they may be, or a folder that holds runs of others.
        TrainingError: a run failed; its own message says why.
        Interrupted: Ctrl-C or SIGTERM came; what was under way is saved.
    """
    if len(arms) < 2 or not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"arms must be two or more, and seeds one or more that differ; got {[*arms]}, {[*seeds]}")
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1; got {jobs}")
    # Seed by seed: cut short, there are as many of each arm.
    folders = {Path(output) / f"{arm}-{seed}": (arm, seed) for seed in seeds for arm in arms}
    runs = [
        Settings(**{**arms[arm], "seed": seed, "output": str(folder), "resume": "auto"})
        for folder, (arm, seed) in folders.items()
    ]
    outcomes: dict[str, dict[int, Outcome]] = {arm: {} for arm in arms}
    found = None

    def done(settings: Settings, outcome: Outcome) -> None:
        nonlocal found
        arm, seed = folders[settings.folder]
        outcomes[arm] = dict(sorted([*outcomes[arm].items(), (seed, outcome)]))
        count = sum(map(len, outcomes.values()))
        print(f"{arm}, seed {seed}: top-1 {outcome.top1:.2f} % ({count} of {len(runs)} runs)", flush=True)
        if count % len(arms) == 0 and all(outcomes.values()):
            found = summary(outcomes, pairs, command, runs[-1])
            write(found, arms, Path(output))

    Path(output).mkdir(parents=True, exist_ok=True)
    try:
        carry_out(runs, jobs, done)
    except KeyboardInterrupt as stop:
        number = getattr(stop, "signal", signal.SIGINT)
        raise Interrupted(number, "interrupted and saved; the same command goes on from here") from None
    assert found is not None
    print(f"\n{found.text}\nIn {output}: comparison.md, comparison.json, comparison.png, and a folder for each run.")
    return found


def summary(outcomes: Mapping[str, Mapping[int, Outcome]], pairs: str, command: str, settings: Settings) -> Comparison:
    scores = {arm: [one.top1 for one in by_seed.values()] for arm, by_seed in outcomes.items()}
    rows = [("arm", "parameters", "multiply-adds", "ms a step", "changed when closed %", "top-1 %", "by seed")]
    for arm, by_seed in outcomes.items():
        first, *_ = found = list(by_seed.values())
        time = f"{np.median([one.milliseconds for one in found]):.0f}"
        changed = "—" if first.changed is None else f"{np.mean([one.changed for one in found]):.1f}"
        spread = f" ± {np.std(scores[arm], ddof=1):.2f}" if len(found) > 1 else ""
        seeds = ", ".join(f"{seed}: {one.top1:.2f}" for seed, one in by_seed.items())
        cost = f"{first.parameters:,}", f"{first.multiply_adds:,}", time
        rows.append((arm, *cost, changed, f"{np.mean(scores[arm]):.2f}{spread}", seeds))
    machine = torch.cuda.get_device_name() if settings.device != "cpu" and torch.cuda.is_available() else "a CPU"
    held_out = " on held-out training images" if settings.hold_out is not None else ""
    note = (
        f"Top-1 after the last epoch{held_out}, mean ± standard deviation; {machine}, torch {torch.__version__}, "
        f"vision_attn {__version__}."
    )
    note = f"{note} `{command}`" if command else note
    differences = compare_scores(scores, pairs)
    text = "\n\n".join([markdown(rows, WORDS), note, said_of(scores, differences)])
    return Comparison(outcomes, differences, f"{text}\n")


def said_of(scores: Mapping[str, Sequence[float]], differences: Sequence[Difference]) -> str:
    """The table of differences, what follows from it, and what so many seeds and more could show."""

    def between(interval: Sequence[float | None] | None, p: str = "") -> str:
        return " to ".join(f"{end:+.2f}" for end in interval or () if end is not None) + p or "—"

    def chance(p: float) -> str:
        return "< 0.001" if p < 0.0005 else f"{p:.3f}"

    spread, freedom = pooled_spread(scores)
    if not freedom:
        return "One seed shows no spread to measure differences by, so nothing is told apart: give more seeds."
    rows = [("difference", "mean", "95 % interval", "p", "Welch's interval, p", "bootstrap", "verdict")]
    for one in differences:
        student = "—" if one.p is None else chance(one.p)
        welch = between(one.welch[:2], f", {chance(one.welch[2])}") if one.welch else "—"
        cells = f"{one.mean:+.2f}", between((one.low, one.high)), student, welch, between(one.bootstrap)
        rows.append((" − ".join(one.arms), *cells, one.verdict))
    alike = [" and ".join(one.arms) for one in differences if one.verdict == "not told apart"]
    lines = [f"{one.arms[0]} is {one.verdict} {one.arms[1]}." for one in differences if one.verdict != "not told apart"]
    lines += [f"Not told apart: {'; '.join(alike)}."] if alike else []
    fewest = min(map(len, scores.values()))
    if spread > 1e-9:
        counts = [count for count in sorted({fewest, 3, 5, 8, 16}) if count >= max(fewest, 2)]
        shown = (f"{count} seeds {detectable(spread, count, len(scores), len(rows) - 1):.2g}" for count in counts)
        lines.append(
            f"The spread over seeds is {spread:.2g}. What can be shown here, four times in five, is a difference of: "
            f"{', '.join(shown)}. What is not told apart may differ by less."
        )
    else:
        lines.append("There is no spread over seeds to measure differences by: give more seeds.")
    return "\n\n".join([markdown(rows, WORDS), LEGEND, "\n".join(f"- {line}" for line in lines)])


def write(found: Comparison, arms: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Leave it as Markdown, JSON and PNG."""
    of_arms = {}
    for arm, by_seed in found.outcomes.items():
        scores = {seed: one.top1 for seed, one in by_seed.items()}
        by_run = {seed: asdict(one) for seed, one in by_seed.items()}
        of_arms[arm] = {"scores": scores, "runs": by_run, "settings": arms[arm]}
    differences = [{**asdict(one), "verdict": one.verdict} for one in found.differences]
    content = {"arms": of_arms, "differences": differences}
    write_atomically(folder / "comparison.md", found.text.encode())
    write_atomically(folder / "comparison.json", json.dumps(content, indent=1).encode())
    save_figure(figure(found.differences), folder / "comparison.png")


def figure(differences: Sequence[Difference]) -> Figure:
    """The differences with their intervals, one above the other."""
    picture = Figure(figsize=(7, 1.2 + 0.35 * len(differences)), layout="constrained")
    axis = picture.subplots()
    for row, one in enumerate(differences):
        color = "tab:gray" if one.verdict == "not told apart" else "tab:blue"
        axis.plot([one.mean if end is None else end for end in (one.low, one.high)], [row, row], color=color)
        axis.plot(one.mean, row, "o", color=color)
    axis.axvline(0, color="black", linewidth=0.7)
    axis.set_yticks(range(len(differences)), [" − ".join(one.arms) for one in differences])
    axis.set_xlabel("difference of top-1 %, 95 % interval")
    axis.set_ylim(len(differences) - 0.5, -0.5)
    return picture

"""Statistics of scores over seeds: the difference of every two arms (variants), with one rule for its verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
from scipy import stats

from vision_attn.networks.figures import Figure
from vision_attn.text import markdown

#: scores by arm, one for each seed
Scores: TypeAlias = Mapping[str, Sequence[float]]
CONFIDENCE = 0.95
LEGEND = """\
The verdict follows from the 95 % interval, by Games and Howell: each variant has its own spread over seeds, and the
intervals of all pairs hold together. If all variants are equal, about one table in twenty has a wrong verdict. An
interval also shows how large the difference may be."""

UNKNOWN = "A variant with one seed, or equal scores, has no spread to measure differences by: give more seeds."


@dataclass(frozen=True)
class Difference:
    """The mean of one arm minus that of another, with Games and Howell's interval of 95 % over all pairs of arms.

    ``low``, ``high`` and ``p`` are None where scores do not vary or an arm has one score alone.
    """

    arms: tuple[str, str]
    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    #: True if less is better, as for errors
    less: bool = False

    @property
    def verdict(self) -> str:
        """Verdict on the first arm, compared with the second.

        >>> Difference(("attention", "plain"), 2.0, 0.5, 3.5).verdict, Difference(("a", "b"), 2.0, -1.0, 5.0).verdict
        ('better', 'no significant difference')
        """
        if self.low is None or self.high is None:
            return "no verdict"
        if self.low <= 0 <= self.high:
            return "no significant difference"
        return "better" if (self.low > 0) is not self.less else "worse"

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        return {**asdict(self), "verdict": self.verdict}


def compare_scores(scores: Scores, *, less: bool = False) -> list[Difference]:
    """Return every arm minus every earlier one, the pairs of the last arm first; ``less``: less is better.

    Source: Games and Howell, *Pairwise Multiple Comparison Procedures with Unequal N's and/or Variances*, 1976,
    https://doi.org/10.3102/10769986001002113, as ``scipy.stats.tukey_hsd(..., equal_var=False)``.

    >>> found, = compare_scores({"plain": [43.1, 44.6, 42.8], "attention": [46.0, 45.4, 45.2]})
    >>> print(f"{found.mean:.2f} ({found.low:.2f} to {found.high:.2f}), p = {found.p:.3f}: {found.verdict}")
    2.03 (-0.01 to 4.08), p = 0.051: no significant difference
    """
    arms = list(scores)
    pairs = [(later, earlier) for later in reversed(range(len(arms))) for earlier in range(later)]
    means = [float(np.mean(values)) for values in scores.values()]
    if min(map(len, scores.values())) < 2:
        return [Difference((arms[one], arms[other]), means[one] - means[other], less=less) for one, other in pairs]
    with np.errstate(divide="ignore", invalid="ignore"):  # two arms without spread
        result = stats.tukey_hsd(*scores.values(), equal_var=False)
        interval = result.confidence_interval(CONFIDENCE)
    found = []
    for one, other in pairs:
        numbers = (interval.low[one, other], interval.high[one, other], result.pvalue[one, other])
        low, high, p = map(float, numbers) if all(map(math.isfinite, numbers)) else (None, None, None)
        found.append(Difference((arms[one], arms[other]), means[one] - means[other], low, high, p, less))
    return found


def difference_table(differences: Sequence[Difference]) -> str:
    """Format the differences as a table in Markdown, with the rule for the verdicts below."""
    rows = [("difference", "mean", "95 % interval", "p", "verdict")]
    for one in differences:
        interval = "—" if one.low is None else f"{one.low:+.2f} to {one.high:+.2f}"
        chance = "—" if one.p is None else "< 0.001" if one.p < 0.0005 else f"{one.p:.3f}"
        rows.append((" − ".join(one.arms), f"{one.mean:+.2f}", interval, chance, one.verdict))
    known = [one.low is not None for one in differences]
    notes = [LEGEND] if all(known) else [LEGEND, UNKNOWN]
    return "\n\n".join([markdown(rows, left=(0, 4)), *notes]) if any(known) else UNKNOWN


def difference_figure(differences: Mapping[str, Sequence[Difference]]) -> Figure:
    """Draw the differences with their intervals, a panel for each measurement."""
    rows = sum(map(len, differences.values()))
    picture = Figure(figsize=(7, 1.2 * len(differences) + 0.35 * rows), layout="constrained")
    panels = picture.subplots(len(differences), squeeze=False)[:, 0]
    for axis, (name, found) in zip(panels, differences.items(), strict=True):
        for row, one in enumerate(found):
            color = "tab:blue" if one.verdict in ("better", "worse") else "tab:gray"
            axis.plot([one.mean if end is None else end for end in (one.low, one.high)], [row, row], color=color)
            axis.plot(one.mean, row, "o", color=color)
        axis.axvline(0, color="black", linewidth=0.7)
        axis.set_yticks(range(len(found)), [" − ".join(one.arms) for one in found])
        axis.set_xlabel(f"difference of {name}, 95 % interval")
        axis.set_ylim(len(found) - 0.5, -0.5)
    return picture

"""Statistics of scores over seeds: differences between variants, with confidence intervals and verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
from scipy import stats

from vision_attn.networks.figures import Figure
from vision_attn.text import Table, markdown

#: scores by variant, with one score per seed
Scores: TypeAlias = Mapping[str, Sequence[float]]
CONFIDENCE = 0.95
LEGEND = """\
The 95 % intervals are simultaneous intervals of all pairs (Games-Howell) and do not assume equal variances. A verdict
is better or worse if the interval does not contain zero. If all variants are equal, about one table in 20 has a wrong
verdict."""

UNKNOWN = "Intervals require at least two seeds per variant and scores that vary. Use more seeds."


@dataclass(frozen=True)
class Difference:
    """Difference between the means of two variants, with a 95 % interval that is simultaneous for all pairs.

    ``low``, ``high`` and ``p`` are None if scores do not vary or a variant has only one score.
    """

    variants: tuple[str, str]
    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    #: True if lower is better, as for errors
    lower_is_better: bool = False

    @property
    def verdict(self) -> str:
        """Verdict on the first variant, compared with the second.

        >>> Difference(("attention", "plain"), 2.0, 0.5, 3.5).verdict, Difference(("a", "b"), 2.0, -1.0, 5.0).verdict
        ('better', 'no significant difference')
        """
        if self.low is None or self.high is None:
            return "no verdict"
        if self.low <= 0 <= self.high:
            return "no significant difference"
        return "better" if (self.low > 0) is not self.lower_is_better else "worse"

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        return {**asdict(self), "verdict": self.verdict}


def compare_scores(scores: Scores, *, lower_is_better: bool = False) -> list[Difference]:
    """Return the differences between each variant and the earlier variants, starting with the last variant.

    If ``lower_is_better`` is true, lower scores are better.

    Source: Games and Howell, *Pairwise Multiple Comparison Procedures with Unequal N's and/or Variances*, 1976,
    https://doi.org/10.3102/10769986001002113, as ``scipy.stats.tukey_hsd(..., equal_var=False)``.

    >>> found, = compare_scores({"plain": [43.1, 44.6, 42.8], "attention": [46.0, 45.4, 45.2]})
    >>> print(f"{found.mean:.2f} ({found.low:.2f} to {found.high:.2f}), p = {found.p:.3f}: {found.verdict}")
    2.03 (-0.01 to 4.08), p = 0.051: no significant difference
    """
    names = list(scores)
    pairs = [(later, earlier) for later in reversed(range(len(names))) for earlier in range(later)]
    means = [float(np.mean(values)) for values in scores.values()]
    if min(map(len, scores.values())) < 2:
        return [
            Difference((names[one], names[other]), means[one] - means[other], lower_is_better=lower_is_better)
            for one, other in pairs
        ]
    with np.errstate(divide="ignore", invalid="ignore"):  # two variants with constant scores
        result = stats.tukey_hsd(*scores.values(), equal_var=False)
        interval = result.confidence_interval(CONFIDENCE)
    found = []
    for one, other in pairs:
        numbers = (interval.low[one, other], interval.high[one, other], result.pvalue[one, other])
        low, high, p = map(float, numbers) if all(map(math.isfinite, numbers)) else (None, None, None)
        found.append(Difference((names[one], names[other]), means[one] - means[other], low, high, p, lower_is_better))
    return found


def difference_table(differences: Sequence[Difference]) -> str:
    """Format the differences as a Markdown table with an explanation."""
    return "\n\n".join(markdown(*part) if isinstance(part, Table) else part for part in difference_parts(differences))


def difference_parts(differences: Sequence[Difference]) -> list[str | Table]:
    """Return a table of the differences and its explanation."""
    rows = [("difference", "mean", "95 % interval", "p", "verdict")]
    for one in differences:
        interval = "—" if one.low is None else f"{one.low:+.2f} to {one.high:+.2f}"
        chance = "—" if one.p is None else "< 0.001" if one.p < 0.0005 else f"{one.p:.3f}"
        rows.append((" − ".join(one.variants), f"{one.mean:+.2f}", interval, chance, one.verdict))
    known = [one.low is not None for one in differences]
    notes = [LEGEND] if all(known) else [LEGEND, UNKNOWN]
    return [Table(rows, left=(0, 4)), *notes] if any(known) else [UNKNOWN]


def difference_figure(differences: Mapping[str, Sequence[Difference]]) -> Figure:
    """Plot the differences and their intervals, with one panel per measurement."""
    rows = sum(map(len, differences.values()))
    picture = Figure(figsize=(7, 1.2 * len(differences) + 0.35 * rows), layout="constrained")
    panels = picture.subplots(len(differences), squeeze=False)[:, 0]
    for axis, (name, found) in zip(panels, differences.items(), strict=True):
        for row, one in enumerate(found):
            color = "tab:blue" if one.verdict in ("better", "worse") else "tab:gray"
            axis.plot([one.mean if end is None else end for end in (one.low, one.high)], [row, row], color=color)
            axis.plot(one.mean, row, "o", color=color)
        axis.axvline(0, color="black", linewidth=0.7)
        axis.set_yticks(range(len(found)), [" − ".join(one.variants) for one in found])
        axis.set_xlabel(f"difference in {name}, 95 % interval")
        axis.set_ylim(len(found) - 0.5, -0.5)
    return picture

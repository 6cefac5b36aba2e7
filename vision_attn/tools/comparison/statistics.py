"""Statistics of scores over seeds: differences between variants, with confidence intervals and verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
from scipy import stats

from vision_attn.networks.capture.figures import Figure
from vision_attn.text import Table, markdown

#: scores by variant and seed
Scores: TypeAlias = Mapping[str, Mapping[str, float]]
CONFIDENCE = 0.95
LEGEND = """\
The 95 % intervals are paired t intervals over seeds, because all variants of a seed are trained and evaluated on the
same data, and are corrected for the number of differences in the table (Bonferroni), as is p. A verdict is better or
worse if the interval does not contain zero. If all variants are equal, at most one table in 20 has a wrong verdict."""

UNKNOWN = "Intervals require at least two seeds per variant and differences that vary. Use more seeds."


@dataclass(frozen=True)
class Difference:
    """Difference between the means of two variants, with a 95 % interval that is simultaneous for its table.

    ``low``, ``high`` and ``p`` are None if the difference does not vary or there is only one seed.
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
    """Return the differences between the last variant and each of the other variants.

    Variants with the same seeds are compared by a paired t interval, and variants with other seeds by Welch's interval
    for independent samples. With ``m`` differences, the confidence of each interval is ``1 - 0.05 / m``, and p values
    are multiplied by ``m`` (Bonferroni), so that all intervals contain the true differences with a probability of at
    least 95 %. If ``lower_is_better`` is true, lower scores are better.

    Source: Dunn, *Multiple Comparisons Among Means*, 1961, https://doi.org/10.1080/01621459.1961.10482090, with
    ``scipy.stats.ttest_rel`` and ``scipy.stats.ttest_ind(..., equal_var=False)``.

    >>> plain, attention = {"0": 43.1, "1": 44.6, "2": 42.8}, {"0": 45.4, "1": 46.2, "2": 45.2}
    >>> found, = compare_scores({"plain": plain, "attention": attention})
    >>> print(f"{found.mean:.2f} ({found.low:.2f} to {found.high:.2f}), p = {found.p:.3f}: {found.verdict}")
    2.10 (1.02 to 3.18), p = 0.014: better
    """
    *others, last = scores
    samples = {other: compare_samples(scores[last], scores[other], len(others)) for other in others}
    return [Difference((last, other), *found, lower_is_better) for other, found in samples.items()]


def compare_samples(
    one: Mapping[str, float], other: Mapping[str, float], differences: int
) -> tuple[float, float | None, float | None, float | None]:
    """Return the difference of two means, the limits of its interval and p, corrected for several differences."""
    mean = float(np.mean([*one.values()]) - np.mean([*other.values()]))
    paired = one.keys() == other.keys()
    first, second = [*one.values()], [other[seed] for seed in one] if paired else [*other.values()]
    samples = [np.subtract(first, second)] if paired else [np.array(first), np.array(second)]
    # Intervals are not defined if nothing varies, up to the rounding of scores such as 60.1 - 50.1.
    if min(map(len, samples)) < 2 or all(np.allclose(sample, sample[0]) for sample in samples):
        return mean, None, None, None
    result = stats.ttest_rel(first, second) if paired else stats.ttest_ind(first, second, equal_var=False)
    interval = result.confidence_interval(1 - (1 - CONFIDENCE) / differences)
    return mean, float(interval.low), float(interval.high), min(1.0, differences * float(result.pvalue))


def as_markdown(parts: Iterable[str | Table]) -> str:
    """Format texts and tables as Markdown."""
    return "\n\n".join(markdown(*part) if isinstance(part, Table) else part for part in parts)


def difference_parts(differences: Sequence[Difference]) -> list[str | Table]:
    """Return a table of the differences and its explanation."""
    rows = [("difference", "mean", "95 % interval", "p", "verdict")]
    for one in differences:
        interval = "—" if one.low is None else f"{one.low:+.2f} to {one.high:+.2f}"
        chance = "—" if one.p is None else "< 0.001" if one.p < 0.0005 else f"{one.p:.3f}"
        rows.append((" − ".join(one.variants), f"{one.mean:+.2f}", interval, chance, one.verdict))
    known = [one.low is not None for one in differences]
    parts: list[str | Table] = [Table(rows, left=(0, 4)), LEGEND] if any(known) else []
    return parts if all(known) else [*parts, UNKNOWN]


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

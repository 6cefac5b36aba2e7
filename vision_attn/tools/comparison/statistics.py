"""What scores over seeds allow to say: differences with their intervals, and what so many seeds can show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeAlias

import numpy as np
from scipy import optimize, stats

__all__ = ["Difference", "Scores", "compare_scores", "detectable", "pooled_spread"]

#: by arm, one of each seed
Scores: TypeAlias = Mapping[str, Sequence[float]]
#: How often two arms that are alike may be told apart, over all comparisons together.
ALPHA = 0.05
#: How often a difference that can be shown is shown.
POWER = 0.8
#: Fewer scores than these have too few resamples for a bootstrap: of three there are ten.
FEWEST = 5


@dataclass(frozen=True)
class Difference:
    """The mean of one arm minus that of another, with intervals of 95 % over all comparisons together (Bonferroni).

    The verdict follows from ``low`` and ``high``: Student's interval, with the spread pooled over all arms, as three
    seeds say little of the spread of one. Welch's takes every arm's own; the bootstrap takes no distribution for given.
    None is what the scores are too few for.
    """

    arms: tuple[str, str]
    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    #: low, high and p
    welch: tuple[float, float, float] | None = None
    #: low and high
    bootstrap: tuple[float, float] | None = None

    @property
    def verdict(self) -> str:
        """What the first arm is to the second.

        >>> Difference(("attention", "plain"), 2.0, 0.5, 3.5).verdict, Difference(("a", "b"), 2.0, -1.0, 5.0).verdict
        ('above', 'not told apart')
        """
        if self.low is None or self.high is None or self.low <= 0 <= self.high:
            return "not told apart"
        return "above" if self.low > 0 else "below"


def compare_scores(scores: Scores, pairs: str = "last") -> list[Difference]:
    """The last arm minus each of the others, or with ``pairs="all"`` every later arm minus every earlier one.

    >>> found, = compare_scores({"plain": [43.1, 44.6, 42.8], "attention": [46.0, 45.4, 45.2]})
    >>> print(f"{found.mean:.2f} ({found.low:.2f} to {found.high:.2f}), p = {found.p:.3f}: {found.verdict}")
    2.03 (0.35 to 3.72), p = 0.028: above
    """
    *others, last = scores
    chosen = [(last, other) for other in others] if pairs == "last" else [two[::-1] for two in combinations(scores, 2)]
    spread, freedom = pooled_spread(scores)
    arrays = {arm: np.asarray(values, dtype=float) for arm, values in scores.items()}
    return [difference(two, arrays[two[0]], arrays[two[1]], spread, freedom, len(chosen)) for two in chosen]


def pooled_spread(scores: Scores) -> tuple[float, int]:
    """The standard deviation of an arm over seeds, pooled over all arms, and its degrees of freedom."""
    freedom = sum(len(values) - 1 for values in scores.values())
    squares = sum(float(np.var(values)) * len(values) for values in scores.values())
    return (squares / freedom) ** 0.5 if freedom else float("nan"), freedom


def difference(
    arms: tuple[str, str], one: np.ndarray, other: np.ndarray, spread: float, freedom: int, comparisons: int
) -> Difference:
    mean, level = float(one.mean() - other.mean()), 1 - ALPHA / comparisons
    error = spread * (1 / len(one) + 1 / len(other)) ** 0.5
    if not freedom:
        return Difference(arms, mean)
    if spread < 1e-9:  # scores that are the same for all seeds: t has no meaning
        return Difference(arms, mean, mean, mean, float(abs(mean) < 1e-9))
    low, high = stats.t.interval(level, freedom, mean, error)
    p = min(1.0, 2 * comparisons * float(stats.t.sf(abs(mean) / error, freedom)))
    welch = bootstrap = None
    fewest = min(len(one), len(other))
    if fewest > 1 and one.std() + other.std() > 1e-9:
        found = stats.ttest_ind(one, other, equal_var=False)
        between = found.confidence_interval(level)
        welch = (float(between.low), float(between.high), min(1.0, comparisons * float(found.pvalue)))
        if fewest >= FEWEST:
            how: Any = {"confidence_level": level, "method": "percentile", "rng": np.random.default_rng(0)}
            found = stats.bootstrap((one, other), lambda a, b, axis: a.mean(axis) - b.mean(axis), **how)
            bootstrap = (float(found.confidence_interval.low), float(found.confidence_interval.high))
    return Difference(arms, mean, float(low), float(high), p, welch, bootstrap)


def detectable(spread: float, seeds: int, arms: int = 2, comparisons: int = 1) -> float:
    """The least difference of two means that so many seeds of each arm show, four times in five.

    Args:
        spread: standard deviation of an arm over seeds.
        seeds: of each arm, two or more.
        arms: over which the spread is pooled.
        comparisons: for which the intervals are corrected.

    >>> round(detectable(0.69, seeds=3), 1), round(detectable(0.25, seeds=10), 2)
    (2.1, 0.33)
    """
    freedom = arms * (seeds - 1)
    beyond = float(stats.t.ppf(1 - ALPHA / (2 * comparisons), freedom))
    errors = optimize.brentq(lambda shift: stats.nct.sf(beyond, freedom, shift) - POWER, 0, 3 * beyond + 10)
    return float(errors) * spread * (2 / seeds) ** 0.5

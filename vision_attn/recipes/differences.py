"""Differences between variants over several seeds: paired confidence intervals, their tables, and their plot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

#: Number of decimals by the unit at the end of the name of a measurement. Others are integers and are not compared.
DECIMALS = {"%": 1, "dB": 2, "px": 2, "steps": 0}
LEGEND = """\
The 95 % intervals are paired t intervals over seeds, because all variants of a seed are trained and evaluated on the
same data, and are corrected for the number of differences in the table (Bonferroni), as is p. A verdict is better or
worse if the interval does not contain zero. If all variants are equal, at most one table in 20 has a wrong verdict.
Intervals and verdicts require at least two seeds, and differences that vary."""

Metrics = dict[str, float]


@dataclass(frozen=True)
class Difference:
    """Difference between the means of two variants, with a 95 % interval that is simultaneous for its table."""

    variants: tuple[str, str]
    mean: float
    low: float | None
    high: float | None
    p: float | None
    lower_is_better: bool
    #: verdict on the first variant, compared with the second
    verdict: str


def compare_scores(scores: Mapping[str, Mapping[str, float]], *, lower_is_better: bool = False) -> list[Difference]:
    """Return the differences between the last variant and each of the other variants, from scores by seed.

    Variants with the same seeds are compared by a paired t interval, others by Welch's. With ``m`` differences, the
    confidence of each interval is ``1 - 0.05 / m``, and p values are multiplied by ``m`` (Bonferroni).

    Source: Dunn, *Multiple Comparisons Among Means*, 1961, https://doi.org/10.1080/01621459.1961.10482090

    >>> plain, attention = {"0": 43.1, "1": 44.6, "2": 42.8}, {"0": 45.4, "1": 46.2, "2": 45.2}
    >>> found, = compare_scores({"plain": plain, "attention": attention})
    >>> print(f"{found.mean:.2f} ({found.low:.2f} to {found.high:.2f}), p = {found.p:.3f}: {found.verdict}")
    2.10 (1.02 to 3.18), p = 0.014: better
    >>> compare_scores({"plain": {"0": 43.1}, "attention": {"1": 45.4, "2": 46.2}})[0].verdict
    'no verdict'
    """
    *others, last = scores
    found = []
    for other in others:
        paired = scores[last].keys() == scores[other].keys()
        first = [*scores[last].values()]
        second = [scores[other][seed] for seed in scores[last if paired else other]]
        mean, low, high, p, verdict = float(np.mean(first) - np.mean(second)), None, None, None, "no verdict"
        # Intervals are not defined if nothing varies, up to the rounding of scores such as 60.1 - 50.1.
        samples = [np.subtract(first, second)] if paired else [np.array(first), np.array(second)]
        if min(map(len, samples)) > 1 and not all(np.allclose(sample, sample[0]) for sample in samples):
            result = stats.ttest_rel(first, second) if paired else stats.ttest_ind(first, second, equal_var=False)
            low, high = map(float, result.confidence_interval(1 - 0.05 / len(others)))
            p = min(1.0, len(others) * float(result.pvalue))
            better = "better" if (low > 0) is not lower_is_better else "worse"
            verdict = "no significant difference" if low <= 0 <= high else better
        found.append(Difference((last, other), mean, low, high, p, lower_is_better, verdict))
    return found


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of cells, the header first, as a Markdown table with aligned columns.

    >>> print(table([["variant", "top-1 %"], ["plain", "61.0"], ["attention", "63.5"]]))
    | variant   | top-1 % |
    | --------- | ------: |
    | plain     |    61.0 |
    | attention |    63.5 |
    """
    widths = [max(2, *map(len, column)) for column in zip(*rows, strict=True)]  # Markdown requires a dash in each
    align = [f"{'>' if column else '<'}{width}" for column, width in enumerate(widths)]
    line = ["-" * (width - 1) + (":" if column else "-") for column, width in enumerate(widths)]
    lines = [" | ".join(map(format, row, align)) for row in (rows[0], line, *rows[1:])]
    return "\n".join(f"| {line} |" for line in lines)


def format_values(name: str, values: Sequence[float]) -> str:
    """Format the mean of a measurement, and its standard deviation if it varies.

    >>> format_values("top-1 %", [60, 62]), format_values("steps", [1200.4])
    ('61.0 ± 1.4', '1,200')
    >>> format_values("error px", [2.346]), format_values("PSNR dB", [31.256])
    ('2.35', '31.26')
    """
    digits = next((digits for unit, digits in DECIMALS.items() if name.endswith(unit)), 0)
    spread = f" ± {np.std(values, ddof=1):.{digits}f}" if len(set(values)) > 1 else ""
    return f"{np.mean(values):,.{digits}f}{spread}" if values else "—"


def difference_table(found: Sequence[Difference]) -> str:
    """Format differences as a Markdown table."""
    rows = [["difference", "mean", "95 % interval", "p", "verdict"]]
    for one in found:
        interval = "—" if one.low is None else f"{one.low:+.2f} to {one.high:+.2f}"
        p = "—" if one.p is None else "< 0.001" if one.p < 0.0005 else f"{one.p:.3f}"
        rows.append([" − ".join(one.variants), f"{one.mean:+.2f}", interval, p, one.verdict])
    return table(rows)


def report(measured: Mapping[str, Mapping[str, Metrics]], note: str = "") -> tuple[str, dict[str, list[Difference]]]:
    """Return tables of the measurements and of the differences between the last variant and the others."""
    names = list(dict.fromkeys(name for by_seed in measured.values() for one in by_seed.values() for name in one))
    scores = {name: {v: {seed: one[name] for seed, one in by_seed.items() if name in one}
                     for v, by_seed in measured.items()} for name in names}  # fmt: skip
    rows = [["variant", *names, "runs"]]
    for variant, by_seed in measured.items():
        cells = [format_values(name, [*scores[name][variant].values()]) for name in names]
        rows.append([variant, *cells, str(len(by_seed))])
    parts, differences = [table(rows), *([note] if note else [])], {}
    for name in names:
        values = {x for of in scores[name].values() for x in of.values()}
        if name.endswith(tuple(DECIMALS)) and len(measured) > 1 and len(values) > 1 and all(scores[name].values()):
            lower_is_better = not name.endswith(("%", "dB"))
            found = differences[name] = compare_scores(scores[name], lower_is_better=lower_is_better)
            parts += [f"Differences in {name}:", difference_table(found)]
    return "\n\n".join([*parts, LEGEND]), differences


def plot(differences: Mapping[str, Sequence[Difference]], file: Path) -> None:
    """Plot the differences and their intervals, with one panel per measurement."""
    from matplotlib.figure import Figure

    size = (7, 1.2 * len(differences) + 0.35 * sum(map(len, differences.values())))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(differences), squeeze=False)[:, 0]
    for axis, (name, found) in zip(panels, differences.items(), strict=True):
        widths = [0 if one.high is None else one.high - one.mean for one in found]
        axis.errorbar([one.mean for one in found], range(len(found)), xerr=widths, fmt="o")
        axis.axvline(0, color="black", linewidth=0.7)
        axis.set_yticks(range(len(found)), [" − ".join(one.variants) for one in found])
        axis.set(xlabel=f"difference in {name}, 95 % interval", ylim=(len(found) - 0.5, -0.5))
    figure.savefig(file, dpi=150)

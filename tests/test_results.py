"""The tables of results are those of the runs they link, and the README claims no other numbers."""

import json
import re
from pathlib import Path
from statistics import mean, stdev, variance

import pytest
from scipy.stats import studentized_range

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "examples/results").glob("*.json"))
RESULTS = (ROOT / "docs/results.md").read_text()
SECTIONS = {text.partition("\n")[0]: text for text in RESULTS.split("\n## ") if "/results/" in text}
MEAN, INTERVAL = r"\d+\.\d+ ± \d+\.\d+", r"−?\d+\.\d+ to −?\d+\.\d+"


def comparisons(file):
    """Of each comparison in a file the scores by arm, its differences, and the decimals by which the page says them."""
    found = json.loads(file.read_text())
    if "arms" in found:
        yield {arm: [*one["scores"].values()] for arm, one in found["arms"].items()}, found["differences"], 1
        return
    for title, differences in found["differences"].items():
        if "options" in found:  # of trials; what is counted has no decimals
            scores = {arm: [one[title] for one in runs.values()] for arm, runs in found["runs"].items()}
            yield scores, differences, 1 if title.endswith("%") else 2 if title[-2:] in ("px", "dB") else 0
            continue
        sigma, where = title.split(", ")
        scores = {}
        for name, run in found["runs"].items():
            if f", {sigma}," in name:
                scores.setdefault(name.partition(",")[0], []).append(run[where])
        yield scores, differences, 2


def tail_probability(one, other, difference, arms):
    """Games and Howell's probability of a larger difference of two arms, of so many, if both were equal.

    Equations of https://doi.org/10.3102/10769986001002113, without the search for quantiles that intervals need.
    """
    squares = [variance(one) / len(one), variance(other) / len(other)]
    freedom = sum(squares) ** 2 / (squares[0] ** 2 / (len(one) - 1) + squares[1] ** 2 / (len(other) - 1))
    return studentized_range.sf(abs(difference) / (sum(squares) / 2) ** 0.5, arms, freedom)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_differences_in_a_file_are_those_of_its_scores(file):
    for scores, differences, _ in comparisons(file):
        assert len(differences) == len(scores) * (len(scores) - 1) // 2
        for found in differences:
            one, other = (scores[arm] for arm in found["arms"])
            assert found["mean"] == pytest.approx(mean(one) - mean(other))
            if found["p"] is None:  # scores that do not vary
                assert variance(one) + variance(other) == pytest.approx(0)
                continue
            low, high = found["low"], found["high"]
            assert (low + high) / 2 == pytest.approx(found["mean"])
            p, at_limits = (tail_probability(one, other, x, len(scores)) for x in (found["mean"], (high - low) / 2))
            assert (p, at_limits) == (pytest.approx(found["p"], rel=1e-3, abs=1e-6), pytest.approx(0.05, rel=1e-3))
            better = "worse" if found.get("less", False) else "better"
            worse = {"worse": "better", "better": "worse"}[better]
            assert found["verdict"] == (better if low > 0 else worse if high < 0 else "no significant difference")


def interval(low, high, decimals):
    return f"{low:.{decimals}f} to {high:.{decimals}f}".replace("-", "−")


def from_file(file, last_alone):
    means, seeds, intervals, significant = set(), set(), set(), set()
    for scores, differences, decimals in comparisons(file):
        if not decimals:
            continue
        means |= {f"{mean(of):.{decimals}f} ± {stdev(of):.{decimals}f}" for of in scores.values()}
        seeds |= {", ".join(f"{one:.{decimals}f}" for one in of) for of in scores.values()}
        for one in differences[: len(scores) - 1] if last_alone else differences:
            said = interval(one["low"], one["high"], decimals)
            intervals |= {said} if last_alone else {said, interval(-one["high"], -one["low"], decimals)}
            significant |= {said} if one["verdict"] != "no significant difference" else set()
    return means, seeds, intervals, significant


@pytest.mark.parametrize("title", SECTIONS)
def test_a_table_is_that_of_its_runs(title):
    """In a table the intervals are of attention minus the other arms; in the text below of any two, either way."""
    section = SECTIONS[title]
    table = "\n".join(line for line in section.splitlines() if line.startswith("|"))
    text = " ".join(line for line in section.splitlines() if not line.startswith("|"))
    files = [ROOT / name for name in re.findall(r"examples/results/[\w-]+\.json", section)]
    parts = zip(*(from_file(file, last_alone=True) for file in files), strict=True)
    means, seeds, signed, significant = (set().union(*part) for part in parts)
    either = set().union(*(from_file(file, last_alone=False)[2] for file in files))
    assert set(re.findall(MEAN, table)) == means
    assert set(re.findall(r"\d+\.\d+(?:, \d+\.\d+)+", table)) <= seeds
    assert set(re.findall(INTERVAL, table)) <= signed
    assert set(re.findall(INTERVAL, text)) - WIDTHS <= either
    bold = set(re.findall(INTERVAL, table)) & significant if "In bold attention is better" in section else set()
    assert set(re.findall(rf"\*\*({INTERVAL})\*\*", table)) == bold


#: How far intervals reach to either side, which is no interval.
WIDTHS = {"2.6 to 6.3", "0.003 to 0.019"}


def test_the_readme_claims_what_the_results_carry():
    claims = (ROOT / "README.md").read_text().partition("## When attention helps")[2].partition("\n## ")[0]
    claims = " ".join(claims.split())
    assert set() != set(re.findall(MEAN, claims)) <= set(re.findall(MEAN, RESULTS))
    assert set(re.findall(INTERVAL, claims)) <= set(re.findall(INTERVAL, RESULTS)), "with its sign"

"""The tables of results are those of the runs they link, and the README claims no other numbers."""

import json
import re
from pathlib import Path
from statistics import mean, stdev

import pytest

from vision_attn.tools.comparison.statistics import compare_scores

ROOT = Path(__file__).resolve().parents[1]
RESULTS = (ROOT / "docs/results.md").read_text()
SECTIONS = {text.partition("\n")[0]: text for text in RESULTS.split("\n## ") if "/results/" in text}
MEAN, INTERVAL = r"\d+\.\d+ ± \d+\.\d+", r"−?\d+\.\d+ to −?\d+\.\d+"


def comparisons(file):
    """The scores of each arm by seed, for each comparison of a file, and with how many decimals the page tells them."""
    runs = json.loads(file.read_text())
    if "arms" in runs:
        yield {arm: [*one["scores"].values()] for arm, one in runs["arms"].items()}, 1
        return
    for sigma in ("σ 25", "σ 50"):
        for where in ("textured", "others"):
            scores = {}
            for name, run in runs.items():
                if f", {sigma}," in name:
                    scores.setdefault(name.partition(",")[0], []).append(run[where])
            yield scores, 2


def interval(low, high, decimals):
    return f"{low:.{decimals}f} to {high:.{decimals}f}".replace("-", "−")


@pytest.mark.parametrize("title", SECTIONS)
def test_a_table_is_that_of_its_runs(title):
    section = SECTIONS[title]
    table = "\n".join(line for line in section.splitlines() if line.startswith("|"))
    means, seeds, student, welch, told_apart = set(), set(), set(), set(), set()
    for file in re.findall(r"examples/results/[\w-]+\.json", section):
        for scores, decimals in comparisons(ROOT / file):
            means |= {f"{mean(of):.{decimals}f} ± {stdev(of):.{decimals}f}" for of in scores.values()}
            seeds |= {", ".join(f"{one:.{decimals}f}" for one in of) for of in scores.values()}
            for found in compare_scores(scores):
                student.add(interval(found.low, found.high, decimals))
                welch.add(interval(*found.welch[:2], decimals))
                if found.verdict != "not told apart":
                    told_apart.add(interval(found.low, found.high, decimals))
    assert set(re.findall(MEAN, table)) == means
    assert set(re.findall(r"\d+\.\d+(?:, \d+\.\d+)+", table)) <= seeds
    shown, bold = set(re.findall(INTERVAL, table)), set(re.findall(rf"\*\*({INTERVAL})\*\*", table))
    assert shown <= student or shown <= welch
    assert bold == (shown & told_apart if "Bold here is told apart" in section else set())


def test_the_readme_claims_what_the_results_carry():
    claims = (ROOT / "README.md").read_text().partition("## What it buys")[2].partition("\n## ")[0]
    means, intervals = set(re.findall(MEAN, claims)), set(re.findall(INTERVAL, " ".join(claims.split())))
    assert len(means) >= 20
    assert len(intervals) >= 9
    carried = {*re.findall(MEAN, RESULTS), *re.findall(INTERVAL, " ".join(RESULTS.split()))}
    assert means <= carried
    assert {one for one in intervals if not carried & {one, turned(one)}} == set()


def turned(text):
    """The interval of the other arm minus the one."""
    low, high = (float(end.replace("−", "-")) for end in text.split(" to "))
    return interval(-high, -low, 1)

"""Compare the tables of all results with recorded runs, and numbers of other pages with these tables."""

import importlib
import json
import re
import runpy
import shutil
from pathlib import Path
from statistics import mean, stdev

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLES = runpy.run_path(str(ROOT / "docs/result_tables.py"))
FOLDER = ROOT / "examples/experiments/results"
FILES = sorted(FOLDER.glob("*.json"))
RESULTS, OVERVIEW = (FOLDER / "README.md").read_text(), (ROOT / "docs/results.md").read_text()
SECTIONS = {section.partition("\n")[0]: section for section in RESULTS.split("\n## ")[1:]}
RECORDED = [title for title, section in SECTIONS.items() if ".json)" in section]
MEAN, INTERVAL = r"\d+\.\d+ ± \d+\.\d+", r"−?\d+\.\d+ to −?\d+\.\d+"


def comparisons(file):
    """Yield the scores by variant and seed, the differences, and the measurement of each comparison."""
    recorded = json.loads(file.read_text())
    scores, differences = TABLES["read_scores"](recorded), recorded["differences"]
    for title in scores if isinstance(differences, list) else differences:
        yield scores[title], differences if isinstance(differences, list) else differences[title], title


def format_mean(scores, title):
    decimals = next((digits for unit, digits in TABLES["DECIMALS"].items() if title.endswith(unit)), 2)
    return f"{mean(scores):.{decimals}f} ± {stdev(scores):.{decimals}f}"


class Numbers:
    """Numbers of recorded runs as the page prints them; intervals are of all differences, in both directions."""

    def __init__(self, files):
        self.means, self.seeds, self.intervals = set(), set(), set()
        for file in files:
            for comparison in comparisons(file):
                if comparison[2] != "steps":  # the page has no numbers of steps
                    self._add(*comparison)

    def _add(self, scores, differences, title):
        for values in map(dict.values, scores.values()):
            self.means.add(format_mean([*values], title))
            digits = len(format_mean([*values], title).rpartition(".")[2])
            self.seeds.add(", ".join(f"{score:.{digits}f}" for score in values))
        for difference in differences:
            for low, high in ((difference["low"], difference["high"]), (-difference["high"], -difference["low"])):
                self.intervals.add(TABLES["format_interval"]({"low": low, "high": high}, title))


def rows_and_text(section):
    lines = section.splitlines()
    rows = [line for line in lines if line.startswith("|")]
    return rows, " ".join(line for line in lines if not line.startswith("|"))


def linked_files(section):
    return [FOLDER / name for name in re.findall(r"\(([\w-]+\.json)\)", section)]


@pytest.mark.parametrize("title", RECORDED)
def test_tables_and_text_equal_the_recorded_runs(title):
    """The last test of this file compares the intervals in the tables."""
    section = SECTIONS[title]
    rows, text = rows_and_text(section)
    table, recorded = "\n".join(rows), Numbers(linked_files(section))
    assert set(re.findall(MEAN, table)) == recorded.means
    assert set(re.findall(r"\d+\.\d+(?:, \d+\.\d+)+", table)) <= recorded.seeds
    assert set(re.findall(INTERVAL, text)) <= recorded.intervals


def test_every_file_is_linked():
    assert [file.name for file in FILES if f"]({file.name})" not in RESULTS] == []


def verdicts(files, one, other):
    """Yield the recorded verdicts on two variants, which are given by their means on the page."""
    for file in files:
        for scores, differences, title in comparisons(file):
            shown = {name: format_mean([*found.values()], title) for name, found in scores.items()}
            for difference in differences:
                if [shown[name] for name in difference["variants"]] == [one, other]:
                    yield difference["verdict"]


def test_the_overview_repeats_means_of_all_results_and_bold_scores_are_better():
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-"): title for title in SECTIONS}
    anchors["cifar-100"] = "CIFAR-100, 30 epochs"
    rows = [row for row in rows_and_text(OVERVIEW)[0] if "](#" in row]
    assert len(rows) > 10
    for row in rows:
        (anchor,) = re.findall(r"\]\(#([\w-]+)\)", row)
        section = SECTIONS[anchors[anchor]]
        *others, attention = re.findall(MEAN, row)
        assert {*others, attention} <= set(re.findall(MEAN, "\n".join(rows_and_text(section)[0]))), row
        bold = re.findall(rf"\*\*({MEAN})\*\*", row)
        for other in others:  # files have the differences of attention from each other variant
            found = set(verdicts(linked_files(section), attention, other))
            assert (found == {"better"}) if bold == [attention] else other not in bold or "worse" in found, row


def test_the_readme_repeats_numbers_of_the_results():
    claims = (ROOT / "README.md").read_text().partition("## When attention helps")[2].partition("\n## ")[0]
    claims = " ".join(claims.split())
    assert set() != set(re.findall(MEAN, claims)) <= set(re.findall(MEAN, RESULTS))
    assert set(re.findall(INTERVAL, claims)) <= set(re.findall(INTERVAL, RESULTS)), "with its sign"


@pytest.mark.slow
def test_one_command_reproduces_files_and_page(tmp_path, monkeypatch):
    """``test_compare.py`` tests the intervals, p-values and verdicts against SciPy."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    tables = importlib.import_module("result_tables")
    monkeypatch.setattr(tables, "FOLDER", shutil.copytree(tables.FOLDER, tmp_path / "results"))
    monkeypatch.setattr(tables, "PAGE", tmp_path / "README.md")
    page = RESULTS
    for title in RECORDED:  # all intervals of tables
        page = page.replace(SECTIONS[title], re.sub(rf"\| {INTERVAL} (?=\|)", "| 0.0 to 0.0 ", SECTIONS[title]))
    assert page.count("| 0.0 to 0.0 ") > 200
    tables.PAGE.write_text(page)
    for file in (tmp_path / "results").glob("*.json"):  # all differences
        content = file.read_text()
        file.write_text(re.sub(r'"(low|high|mean|p)": [-\d.e]+', r'"\1": 0.0', content))
        assert file.read_text() != content
    tables.main()
    assert tables.PAGE.read_text() == RESULTS
    assert all((tmp_path / "results" / file.name).read_text() == file.read_text() for file in FILES)

"""The compatibility table of `insert_` contains the results of its script."""

import re

import page_sections
import pytest
import reach
import timm

SECTION = page_sections.read_section(page_sections.PERFORMANCE, "reach")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in SECTION.splitlines() if line.startswith("| ")]
START = ROWS.index(list(reach.HEADER))
HEADER, BODY = ROWS[START], ROWS[START + 2 :]
RESULTS = slice(HEADER.index("layout"), HEADER.index("seconds"))

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.skipif(f"| timm {timm.__version__} |" not in SECTION, reason="the table is for another version of timm")
@pytest.mark.parametrize("family", ["mambaout", "efficientvim"])  # channels last, several feature maps at a stage
@pytest.mark.slow
def test_a_row_contains_the_measured_results(family):
    expected = next(row for row in BODY if row[:2] == ["timm", family])
    row = reach.measure("timm", family, [expected[HEADER.index("model")].strip("`")])
    assert row.passed
    assert row.cells()[RESULTS] == expected[RESULTS]


def test_the_summary_counts_the_rows():
    for library in ("timm", "torchvision"):
        of_library = [row for row in BODY if row[0] == library]
        passed = [row for row in of_library if not {"no", "**no**"} & {*row[RESULTS]}]
        stages = [row[HEADER.index("stages")].split(" of ") for row in passed]
        supported = sum(with_block == count != "0" for with_block, count in stages)
        counts = re.search(rf"^\| {library} \S+ \| (\d+) \| (\d+) \|", SECTION, re.MULTILINE).groups()
        assert [int(count) for count in counts] == [len(of_library), supported]

"""The table of backbones that take attention says what is so."""

import re

import pytest
import reach
import timm

TABLE = reach.TABLE.read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.splitlines() if line.startswith("| ")]
HEADER, BODY = ROWS[0], ROWS[2:]
RESULTS = slice(HEADER.index("layout"), HEADER.index("seconds"))

#: One of each kind: channels last, several maps at a stage.
SAMPLE = ("mambaout", "efficientvim")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def row_of(library, family):
    return next(row for row in BODY if row[:2] == [library, family])


@pytest.mark.parametrize("family", SAMPLE)
def test_a_row_is_what_is_measured(family):
    if f"timm {timm.__version__} " not in TABLE:
        pytest.skip("the table is of another version of timm")
    model = row_of("timm", family)[HEADER.index("model")].strip("`")
    row = reach.measure("timm", family, [model])
    assert row.unharmed or not row.sites
    assert row.cells()[RESULTS] == row_of("timm", family)[RESULTS]


def test_the_summary_is_that_of_the_rows():
    for library in ("timm", "torchvision"):
        own = [row for row in BODY if row[0] == library]
        everywhere = [row for row in own if "no" not in row[RESULTS] and "**no**" not in row[RESULTS] and complete(row)]
        found = re.search(rf"{library}: (\d+) of (\d+) families", TABLE)
        assert [int(count) for count in found.groups()] == [len(everywhere), len(own)]


def complete(row):
    sites, stages = row[HEADER.index("sites")].split(" of ")
    return sites == stages != "0"

"""The compatibility table contains the results of its script."""

import re

import pytest
import reach
import timm

TABLE = reach.TABLE.read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.splitlines() if line.startswith("| ")]
HEADER, BODY = ROWS[0], ROWS[2:]
RESULTS = slice(HEADER.index("layout"), HEADER.index("seconds"))

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.skipif(f"timm {timm.__version__} " not in TABLE, reason="the table is of another version of timm")
# Channels are last, and a stage has several feature maps.
@pytest.mark.parametrize("family", ["mambaout", "efficientvim"])
def test_a_row_is_what_is_measured(family):
    expected = next(row for row in BODY if row[:2] == ["timm", family])
    row = reach.measure("timm", family, [expected[HEADER.index("model")].strip("`")])
    assert row.unharmed
    assert row.cells()[RESULTS] == expected[RESULTS]


def test_the_summary_is_that_of_the_rows():
    for library in ("timm", "torchvision"):
        own = [row for row in BODY if row[0] == library]
        sites = [row[HEADER.index("sites")].split(" of ") for row in own if not {"no", "**no**"} & {*row[RESULTS]}]
        everywhere = sum(found == stages != "0" for found, stages in sites)
        counts = re.search(rf"{library}: (\d+) of (\d+) families", TABLE).groups()
        assert [int(count) for count in counts] == [everywhere, len(own)]

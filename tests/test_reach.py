"""The table of backbones that take attention says what is so."""

import re
from pathlib import Path

import pytest
import reach
import timm

TABLE = Path(__file__).with_name("reach.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.splitlines() if line.startswith("| ")]
HEADER, BODY = ROWS[0], ROWS[2:]
RESULTS = slice(HEADER.index("layout"), HEADER.index("seconds"))

#: One of each kind: channels last, several maps at a stage.
SAMPLE = ("mambaout", "efficientvim")
#: Looping over children, plain, of tokens, and refused: they take longer, or show less.
FURTHER = ("regnet", "ghostnet", "hiera", "crossvit")

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


def test_the_families_are_those_of_the_libraries_whatever_else_is_registered():
    import vision_attn.networks.models  # noqa: F401

    assert not {module for _, module, _ in reach.families()} & {"inserted", "cifar_resnet", "wide_resnet"}


def test_the_summary_is_that_of_the_rows():
    for library in ("timm", "torchvision"):
        own = [row for row in BODY if row[0] == library]
        everywhere = [row for row in own if "no" not in row[RESULTS] and "**no**" not in row[RESULTS] and complete(row)]
        found = re.search(rf"{library}: (\d+) of (\d+) families", TABLE)
        assert [int(count) for count in found.groups()] == [len(everywhere), len(own)]


def complete(row):
    sites, stages = row[HEADER.index("sites")].split(" of ")
    return sites == stages != "0"


def test_what_is_not_reached_is_refused_by_name():
    for row in BODY:
        assert complete(row) or row[HEADER.index("refused")], row


@pytest.mark.thorough
def test_no_family_is_harmed():
    # The largest, vision transformers all of them, take longer than the others together.
    rows = []
    for library, family, names in reach.families():
        sizes = {name: reach.parameters(library, name) for name in names}
        smallest = min(sizes, key=sizes.get)
        if sizes[smallest] < reach.LARGE:
            rows.append(reach.measure(library, family, [smallest]))
    assert [row.cells() for row in rows if row.sites and not row.unharmed] == []
    assert [row.cells() for row in rows if not row.reached and not row.refusals] == []
    assert sum(row.reached for row in rows if row.library == "timm" and "w) c" not in row.layout) >= 65
    if f"timm {timm.__version__} " in TABLE:
        for row in rows:
            if row.library == "timm" and row.family in FURTHER:
                assert row.cells()[RESULTS] == row_of("timm", row.family)[RESULTS]

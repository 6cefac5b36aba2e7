"""Notebooks: reports show as tables there."""

from html.parser import HTMLParser

import pytest
import timm
import torch
from torch import nn

import vision_attn as va
import vision_attn.models


class Reader(HTMLParser):
    """The text of a page outside of its tables, and the cells of these, row by row."""

    def __init__(self, page):
        super().__init__()
        self.text, self.rows, self.tags = "", [], []
        self.feed(page)
        assert self.tags == [], "every tag is closed"

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "div" and self.text:
            self.text += "\n"

    def handle_endtag(self, tag):
        assert self.tags.pop() == tag

    def handle_data(self, data):
        if "table" in self.tags:
            self.rows[-1][-1] += data
        else:
            self.text += data


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = timm.create_model("resnet20", num_classes=3)
    va.insert_(model, stages=[-2, -1], num_heads=4, example_input=(1, 3, 32, 32))
    return model


def test_reports_show_in_a_notebook_what_they_print(model, tmp_path):
    images = torch.randn(2, 3, 32, 32)
    torch.save(model.state_dict(), tmp_path / "net.pth")
    file = va.save_adapter(model, tmp_path / "adapter.safetensors")
    reports = [
        va.inspect_model(model, input_size=32),
        va.gates(model),
        va.contribution(model, images),
        va.load_checkpoint(model, tmp_path / "net.pth"),
        va.remove_(model),
        va.load_adapter(model, file),
        va.remove_(model),
        va.insert_(model, stages=-1, num_heads=4, example_input=(1, 3, 32, 32)),
    ]
    for report in reports:
        shown, printed = Reader(report._repr_html_()), str(report)
        # Every line of the text and every row of the tables, and nothing else.
        lines = [line.split() for line in (*shown.text.splitlines(), *map(" ".join, shown.rows))]
        assert sorted(filter(None, lines)) == sorted(filter(None, map(str.split, printed.splitlines())))
        assert bool(shown.rows) == (not isinstance(report, va.LoadReport))
        assert len({len(row) for row in shown.rows}) <= 2  # the inspection has two tables


def test_what_a_file_is_called_is_no_markup():
    name = "<b onclick=alert(1)>&amp;"
    report = va.LoadReport(name, "", (), new=(), missing=(name,), unexpected=(), mismatched={})
    page = report._repr_html_()
    assert "<b" not in page
    assert Reader(page).text == str(report)
    block = nn.Sequential()
    block.add_module(name, nn.Conv2d(3, 8, 1))
    page = va.insert_(block, names=name, num_heads=2, example_input=(1, 3, 8, 8))._repr_html_()
    assert "<b" not in page
    assert Reader(page).rows[1][0] == name

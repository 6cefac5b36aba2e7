"""Notebooks: reports show as tables there, and those of the walkthroughs are in step with them."""

import json
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest
import timm
import torch
from torch import nn

import vision_attn as va
import vision_attn.networks.models
from vision_attn.networks.checkpoints import LoadReport

ROOT = Path(__file__).resolve().parents[1]
MADE = sorted((ROOT / "examples" / "notebooks").iterdir())
REMEDY = "python docs/notebooks.py makes those anew whose walkthrough has changed"


def shown(report):
    """The page that a report is in a notebook, in which every tag is closed, and its words."""
    page = ElementTree.fromstring(f"<div>{report._repr_html_()}</div>")
    return page, sorted(" ".join(page.itertext()).split())


def test_reports_show_in_a_notebook_what_they_print(tmp_path):
    model, images = timm.create_model("resnet20", num_classes=3), torch.randn(2, 3, 32, 32)
    va.insert_(model, stages=[-2, -1], num_heads=4, example_input=images)
    torch.save(model.state_dict(), tmp_path / "net.pth")
    file = va.save_adapter(model, tmp_path / "adapter.safetensors")
    reports = [
        va.inspect_model(model, input_size=32),
        va.gates(model),
        va.contribution(model, images),
        va.load_checkpoint(model, tmp_path / "net.pth"),
        va.remove_(model),
        va.load_adapter_(model, file),
        va.remove_(model),
        va.insert_(model, stages=-1, num_heads=4, example_input=images),
    ]
    for report in reports:
        page, words = shown(report)
        assert words == sorted(str(report).split())
        assert bool(page.findall(".//table")) == (not isinstance(report, LoadReport))


def test_what_a_file_is_called_is_no_markup():
    name = "<b onclick=alert(1)>&amp;"
    block = nn.Sequential()
    block.add_module(name, nn.Conv2d(3, 8, 1))
    for report in (
        LoadReport(name, "", (), new=(), missing=(name,), unexpected=(), mismatched={}),
        va.insert_(block, names=name, num_heads=2, example_input=(1, 3, 8, 8)),
    ):
        page, words = shown(report)
        assert words == sorted(str(report).split())
        assert page.findall(".//b") == []


@pytest.fixture(scope="module")
def notebooks():
    """What makes them."""
    for package in ("jupytext", "nbclient", "ipykernel"):
        pytest.importorskip(package)
    return runpy.run_path(str(ROOT / "docs" / "notebooks.py"))


def test_every_walkthrough_has_its_notebook_and_is_in_step_with_it(notebooks, tmp_path, monkeypatch):
    walkthroughs = notebooks["WALKTHROUGHS"]
    assert [path.stem for path in MADE] == sorted(walkthroughs), REMEDY
    behind = [name for name, path in walkthroughs.items() if not notebooks["in_step"](path)]
    assert behind == [], REMEDY
    changed = tmp_path / "first_steps.py"
    changed.write_text(walkthroughs["first_steps"].read_text().replace("stages=-1", "stages=-2"))
    assert not notebooks["in_step"](changed)


@pytest.mark.parametrize("path", MADE, ids=lambda path: path.stem)
def test_a_notebook_was_run_from_top_to_bottom_and_shows_its_pictures(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, 1 + len(cells)))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "execute_result"}
    shown = [output["data"] for output in outputs if "data" in output]
    saved = sum("".join(cell["source"]).count("save_figure(") for cell in cells)
    assert sum("image/png" in data for data in shown) == saved
    if path.stem == "first_steps":
        assert sum("text/html" in data for data in shown) == 5
    assert not any(place in path.read_text() for place in (str(ROOT), str(Path.home()), "/tmp/"))

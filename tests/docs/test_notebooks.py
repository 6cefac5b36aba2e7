"""Reports are displayed as tables in notebooks, and the notebooks of the walkthroughs are current."""

import json
import runpy
from collections import OrderedDict
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import vision_attn as va
from vision_attn.networks.checkpoints import LoadReport
from vision_attn.networks.models import create_model

ROOT = Path(__file__).resolve().parents[2]
MADE = sorted((ROOT / "examples" / "notebooks").iterdir())
REMEDY = "python docs/notebooks.py updates the notebooks"


def test_reports_display_their_text_in_a_notebook(tmp_path):
    model, images, name = create_model("resnet20", num_classes=3), torch.randn(2, 3, 32, 32), "<b>&amp;"
    va.insert_(model, stages=[-2, -1], num_heads=4, example_input=images)
    torch.save(model.state_dict(), tmp_path / "net.pth")
    file = va.save_adapter(model, tmp_path / "adapter.safetensors")
    reports = [
        va.insert_(model, dry_run=True, example_input=images),
        va.contribution(model, images),
        va.load_checkpoint_(model, tmp_path / "net.pth"),
        va.remove_(model),
        va.load_adapter_(model, file),
        LoadReport(name, "", (), newly_initialized=(), missing=(name,), unexpected=(), mismatched={}),
        va.insert_(nn.Sequential(OrderedDict({name: nn.Conv2d(3, 8, 1)})), names=name, example_input=(1, 3, 8, 8)),
    ]
    for report in reports:
        page = ElementTree.fromstring(f"<div>{report._repr_html_()}</div>")  # every tag is closed
        assert sorted(" ".join(page.itertext()).split()) == sorted(str(report).split())
        assert (bool(page.findall(".//table")), page.findall(".//b")) == (not isinstance(report, LoadReport), [])


def test_every_walkthrough_has_a_current_notebook(tmp_path):
    for package in ("jupytext", "nbclient", "ipykernel"):
        pytest.importorskip(package)
    notebooks = runpy.run_path(str(ROOT / "docs" / "notebooks.py"))
    walkthroughs = notebooks["WALKTHROUGHS"]
    assert [path.stem for path in MADE] == sorted(walkthroughs), REMEDY
    assert [name for name, path in walkthroughs.items() if not notebooks["is_current"](path)] == [], REMEDY
    changed = tmp_path / "quickstart.py"
    changed.write_text(walkthroughs["quickstart"].read_text().replace("stages=-2", "stages=-1"))
    assert not notebooks["is_current"](changed)


@pytest.mark.parametrize("path", MADE, ids=lambda path: path.stem)
def test_a_notebook_was_run_from_top_to_bottom_and_contains_its_figures(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, 1 + len(cells)))
    shown = [output["data"] for cell in cells for output in cell["outputs"] if "data" in output]
    saved = sum("".join(cell["source"]).count("save_figure(") for cell in cells)
    assert sum("image/png" in data for data in shown) == saved
    assert not any(folder in path.read_text() for folder in (str(ROOT), str(Path.home()), "/tmp/"))

"""The demo, as a user runs it: it shows its point, and leaves what it promises."""

import json
import re

import pytest
import timm
import torch
from PIL import Image

from vision_attn import IMPLS
from vision_attn.tools import cli
from vision_attn.tools.comparison import demo
from vision_attn.tools.training import digits, run_folder


def run(tmp_path, *arguments):
    """What the demo leaves."""
    assert cli.main(["demo", *arguments, "--output", str(tmp_path / "demo")]) == 0
    return json.loads((tmp_path / "demo" / "results.json").read_text())


def test_the_demo_leaves_what_it_promises(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(digits, "TRAIN_CANVASES", 256)
    monkeypatch.setattr(digits, "EVAL_CANVASES", 64)
    monkeypatch.setattr(demo, "ARMS", (demo.ARMS[-3], demo.ARMS[-1]))
    monkeypatch.setattr(run_folder, "save_figure", lambda figure, path: path.write_bytes(b""))
    results = run(tmp_path, "--epochs", "1", "--jobs", "1")
    out = capsys.readouterr().out
    arms, agreement = results["arms"], results["implementations"]
    assert list(arms) == ["pooled-mlp", "attention"]
    for arm, found in arms.items():
        assert f"| {arm} | {found['parameters']:,} |" in out
        assert re.search(
            rf"{'B' if found['top1'] > 50 + 196 / 16 else 'Not b'}etter: .*{arm} \({found['top1']:.1f}\)", out
        )
    assert abs(arms["attention"]["parameters"] - arms["pooled-mlp"]["parameters"]) < 40
    assert list(agreement) == list(IMPLS)
    assert all(found["largest_logit_difference"] < 1e-4 for found in agreement.values())
    assert {found["top1"] for found in agreement.values()} == {arms["attention"]["top1"]}

    with Image.open(tmp_path / "demo" / "attention.png") as picture:
        assert picture.width > 1000
    assert "the network says" in (tmp_path / "demo" / "explorer.html").read_text()
    names = {
        "network",
        "attention.png",
        "explorer.html",
        "results.json",
        *(f"comparison.{kind}" for kind in ("md", "json", "png")),
    }
    assert {path.name for path in (tmp_path / "demo").iterdir()} == names | {f"{arm}-0" for arm in arms}
    network = timm.create_model(f"local-dir:{tmp_path / 'demo' / 'network'}", pretrained=True)
    best = torch.load(tmp_path / "demo" / "attention-0" / "last.pth", weights_only=True)["model"]
    assert all(torch.equal(value, best[key]) for key, value in network.state_dict().items())


@pytest.mark.thorough
def test_attention_solves_what_convolution_cannot(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "ARMS", ("plain", "convolution", "attention"))
    arms = run(tmp_path, "--epochs", "2")["arms"]
    assert arms["attention"]["top1"] > 85
    assert 40 < arms["plain"]["top1"] < 60
    assert 40 < arms["convolution"]["top1"] < 60


@pytest.mark.parametrize("epochs", ["0", "-1"])
def test_bad_usage_exits_with_2(capsys, tmp_path, epochs):
    assert cli.main(["demo", "--epochs", epochs, "--output", str(tmp_path / "demo")]) == 2
    assert "epochs must be a whole number from 1" in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()


def test_an_output_that_cannot_be_written_exits_with_1(capsys, tmp_path):
    (tmp_path / "demo").write_text("in the way")
    assert cli.main(["demo", "--output", str(tmp_path / "demo")]) == 1
    assert "error" in capsys.readouterr().err

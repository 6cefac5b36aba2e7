"""The demo, as a user runs it: it shows its point, and leaves what it promises."""

import json
import re

import pytest
from PIL import Image

import vision_attn as va
from vision_attn import IMPLS
from vision_attn.tools.comparison import demo
from vision_attn.tools.comparison.demo import run_demo
from vision_attn.tools.training import digits, folder


def test_the_demo_leaves_what_it_promises(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(digits, "TRAIN_CANVASES", 256)
    monkeypatch.setattr(digits, "EVAL_CANVASES", 64)
    monkeypatch.setattr(demo, "ARMS", ("pooled-mlp", "attention"))
    monkeypatch.setattr(folder, "save_figure", lambda figure, path: path.write_bytes(b""))
    run_demo(tmp_path / "demo", epochs=1, jobs=1)
    results, out = json.loads((tmp_path / "demo" / "results.json").read_text()), capsys.readouterr().out
    arms, agreement = results["arms"], results["implementations"]
    assert list(arms) == ["pooled-mlp", "attention"]
    for arm, found in arms.items():
        assert f"| {arm} | {found['parameters']:,} |" in out
        better = "Better" if found["top1"] > 50 + 196 / 16 else "Not better"
        assert re.search(rf"{better}: .*{arm} \({found['top1']:.1f}\)", out)
    assert list(agreement) == list(IMPLS)
    assert all(found["largest_logit_difference"] < 1e-4 for found in agreement.values())
    assert {found["top1"] for found in agreement.values()} == {arms["attention"]["top1"]}  # of the only epoch
    with Image.open(tmp_path / "demo" / "attention.png") as picture:
        assert picture.width > 1000
    assert "the network says" in (tmp_path / "demo" / "explorer.html").read_text()
    files = {"attention.png", "explorer.html", "results.json", "comparison.md", "comparison.json", "comparison.png"}
    assert {path.name for path in (tmp_path / "demo").iterdir()} == files | {f"{arm}-0" for arm in arms}
    assert list(va.inserted(va.load_model(tmp_path / "demo" / "attention-0"))) == ["stage3.1.2"]


@pytest.mark.thorough
def test_attention_solves_what_convolution_cannot(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "ARMS", ("plain", "convolution", "attention"))
    run_demo(tmp_path, epochs=2)
    arms = json.loads((tmp_path / "results.json").read_text())["arms"]
    assert arms["attention"]["top1"] > 85
    assert 40 < arms["plain"]["top1"] < 60
    assert 40 < arms["convolution"]["top1"] < 60

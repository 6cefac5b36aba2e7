"""The demo: accuracies, output files and canvases."""

import json
import re

import pytest
import torch
from vision_attn.tools.comparison import demo
from vision_attn.tools.comparison.demo import run_demo
from vision_attn.tools.comparison.recall import COLORS, NOTHING, canvases, glyphs

import vision_attn as va


@pytest.mark.slow
def test_the_demo_writes_its_files(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "VARIANTS", {name: demo.VARIANTS[name] for name in ("plain", "attention")})
    run_demo(tmp_path, steps=10, jobs=1)
    found, out = json.loads((tmp_path / "runs.json").read_text())["runs"], capsys.readouterr().out
    assert list(found) == ["plain", "attention"]
    for variant, runs in found.items():
        assert re.search(rf"^{variant} +[\d,]+ +{runs['0']['4 pairs %']:.1f} ", out, re.MULTILINE)
    assert "What color is the cell of the matching glyph?" in (tmp_path / "explorer.html").read_text()
    files = {"attention.png", "explorer.html", "runs.json", "comparison.md", "plain-0", "attention-0"}
    assert {path.name for path in tmp_path.iterdir()} == files
    assert list(va.inserted_blocks(va.load_model(tmp_path / "attention-0"))) == ["stage2.1.2"]


@pytest.mark.thorough
def test_attention_solves_recall_and_a_large_kernel_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "VARIANTS", {name: demo.VARIANTS[name] for name in ("large-kernel", "attention")})
    run_demo(tmp_path)
    found = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert found["attention"]["0"]["32 pairs %"] > 90
    assert found["large-kernel"]["0"]["32 pairs %"] < 20


@pytest.mark.parametrize("train", [True, False])
def test_each_black_cell_has_one_match_with_the_color_of_its_label(train):
    images, labels = canvases(20, 16, train=train, generator=torch.Generator().manual_seed(0))
    cells = images.unflatten(3, (12, 8)).unflatten(2, (12, 8)).permute(0, 2, 4, 3, 5, 1)  # (b, h, w, 8, 8, 3)
    parts = ({tuple(one) for one in part.flatten(1).tolist()} for part in (glyphs()[:1400], glyphs()[1400:]))
    known, other = parts if train else reversed([*parts])
    assert not known & other
    for canvas, asked in zip(cells, labels, strict=True):
        for y, x in (asked != NOTHING).nonzero().tolist():
            glyph = canvas[y, x]
            assert tuple(glyph[..., 0].flatten().tolist()) in known
            colored_glyphs = [glyph + (1 - glyph) * torch.tensor(color) for color in COLORS.values()]
            matches = [(canvas - one).abs().amax((2, 3, 4)).lt(1e-6).sum().item() for one in colored_glyphs]
            assert matches == [int(color == asked[y, x]) for color in range(8)]

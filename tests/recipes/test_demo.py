"""The demo: its task, its scores and its files."""

import json
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from unittest import mock

import pytest
import torch

import vision_attn as va
from vision_attn import cli
from vision_attn.networks.capture.maps import AttentionMap
from vision_attn.recipes import demo
from vision_attn.recipes.settings import Demo


def test_each_glyph_on_black_has_the_color_of_the_same_glyph():
    images, labels = demo.draw(8, torch.Generator().manual_seed(0))
    assert (images.shape, labels.shape) == ((8, 3, 96, 96), (8, 12, 12))
    assert (labels >= 0).sum((1, 2)).tolist() == [demo.PAIRS] * 8
    side, colors = demo.PIXELS, torch.tensor([*demo.COLORS.values()])
    for image, row, column in (labels >= 0).nonzero().tolist()[:20]:
        cell = images[image, :, row * side : (row + 1) * side, column * side : (column + 1) * side]
        match = cell + (1 - cell) * colors[labels[image, row, column]][:, None, None]
        windows = images[image].unfold(1, side, side).unfold(2, side, side).permute(1, 2, 0, 3, 4)
        assert ((windows - match).abs().amax((2, 3, 4)) < 1e-6).sum() == 1
    assert not torch.equal(demo.draw(8, torch.Generator().manual_seed(1))[0], images)


def test_the_demo_writes_its_results_and_no_other_folder(tmp_path, capsys, image_folder, monkeypatch):
    made, build, output = [], demo.build, tmp_path / "new" / "out"
    demo.demo(Demo(output=output, steps=1))
    monkeypatch.setattr(demo, "build", lambda options: made.append((one := build(options), deepcopy(one))) or one)
    monkeypatch.setattr(va, "capture", capture := mock.Mock(wraps=va.capture))
    with mock.patch.object(AttentionMap, "figure", autospec=True, side_effect=AttentionMap.figure) as figure:
        assert demo.demo(Demo(output=output, steps=2)) == json.loads((output / "demo.json").read_text())
    (_, shown), colors = figure.call_args.args, [*demo.COLORS]
    predicted = [colors[label] for label in made[-1][0](shown).argmax(1)[:, 4, 2]]
    assert figure.call_args.kwargs["titles"] == [f"prediction for the framed glyph: {color}" for color in predicted]
    assert {path.name for path in output.iterdir()} == {"demo.json", "attention.png", "explorer.html"}
    assert capture.call_args_list[0].kwargs["queries"] == [(4.5 * 8, 2.5 * 8)]  # the center of a cell
    for trained, initial in made:
        assert not all(map(torch.equal, trained.parameters(), initial.parameters()))
    out = capsys.readouterr().out
    hits = [score / 100 * 128 * demo.PAIRS for score in json.loads((output / "demo.json").read_text()).values()]
    assert hits == pytest.approx([*map(round, hits)]), "percent of the cells"
    assert out.startswith("Each image has 12×12 cells.")
    assert all(f"{name:<16}" in out for name in demo.VARIANTS)
    for folder in (image_folder, image_folder / "train", image_folder / "train" / "red"):
        assert cli.main(["demo", "-o", str(folder)]) == 2
        assert f"--output: {folder} is a folder of images" in capsys.readouterr().err


@pytest.mark.slow
def test_attention_solves_the_task_and_averaging_does_not():
    scores = {}
    for name, options in demo.VARIANTS.items():
        torch.manual_seed(0)
        scores[name] = demo.train(name, demo.build(options), 400, seed=0)
    assert scores["without a block"] < 20
    assert scores["averaging"] < 40
    assert scores["attention"] > 95


@pytest.mark.slow
def test_the_first_line_of_the_demo_comes_within_ten_seconds(tmp_path):
    line = [sys.executable, "-m", "vision_attn", "demo", "-o", str(tmp_path / "out")]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline().startswith("Each image has 12×12 cells.")
        ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        assert sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK") < 10, "seconds of CPU"
    finally:
        process.kill()
        process.communicate()

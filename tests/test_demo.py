"""The demo, as a user runs it: it shows its point, and leaves what it promises."""

import json

import pytest
import timm
import torch
from PIL import Image

from vision_attn import IMPLS, cli


def test_the_demo_shows_its_point_and_leaves_what_it_promises(capsys, tmp_path):
    assert cli.main(["demo", "--epochs", "2", "--output", str(tmp_path / "demo")]) == 0
    out = capsys.readouterr().out
    results = json.loads((tmp_path / "demo" / "results.json").read_text())
    arms = results["arms"]
    assert list(arms) == ["plain", "convolution", "attention"]
    assert arms["attention"]["top1"] > 85
    for control in ("plain", "convolution"):
        assert 40 < arms[control]["top1"] < 60
        assert f"{control:<14}{arms[control]['parameters']:>11,}{arms[control]['top1']:>10.2f}" in out
    assert abs(arms["attention"]["parameters"] - arms["convolution"]["parameters"]) < 40
    agreement = results["implementations"]
    assert list(agreement) == list(IMPLS)
    assert all(found["largest_logit_difference"] < 1e-4 for found in agreement.values())
    assert {found["top1"] for found in agreement.values()} == {arms["attention"]["top1"]}

    with Image.open(tmp_path / "demo" / "attention.png") as picture:
        assert picture.width > 1000
    assert {path.name for path in (tmp_path / "demo").iterdir()} == {
        "plain",
        "convolution",
        "attention",
        "network",
        "attention.png",
        "results.json",
    }
    network = timm.create_model(f"local-dir:{tmp_path / 'demo' / 'network'}", pretrained=True)
    best = torch.load(tmp_path / "demo" / "attention" / "last.pth", weights_only=True)["model"]
    assert all(torch.equal(value, best[key]) for key, value in network.state_dict().items())


@pytest.mark.parametrize("arguments", [["--epochs", "0"], ["--epochs", "-1"]])
def test_bad_usage_exits_with_2(capsys, tmp_path, arguments):
    assert cli.main(["demo", *arguments, "--output", str(tmp_path / "demo")]) == 2
    assert "epochs must be a whole number from 1" in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()


def test_an_output_that_cannot_be_written_exits_with_1(capsys, tmp_path):
    (tmp_path / "demo").write_text("in the way")
    assert cli.main(["demo", "--output", str(tmp_path / "demo")]) == 1
    assert "error" in capsys.readouterr().err

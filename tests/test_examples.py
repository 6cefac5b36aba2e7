"""Every script that trains runs, as its header says, on small data."""

import importlib
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import timm
import torch
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, Normalize, ToTensor

import vision_attn as va
from vision_attn.networks.models import create_model
from vision_attn.tools import cli

ROOT = Path(__file__).resolve().parents[1]

#: Arguments that make an example small.
EXAMPLES = {
    "train_cifar.py": ["--epochs", "2", "--batch-size", "16", "--device", "cpu"],
    "finetune_folder.py": ["--model", "resnet20", "--epochs", "1", "3", "--batch-size", "12", "--workers", "0"],
    "classify.py": [],
    "evidence.py": ["--epochs", "1", "--seeds", "0", "--jobs", "1"],
    "denoise.py": ["--sigmas", "50", "--seeds", "0", "1", "--steps", "1"],
}


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Runs an example as a program, but in this process: its exit code and what it says."""

    def run_here(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, (*EXAMPLES[name], *arguments))])
        capsys.readouterr()
        code = 0
        try:
            runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        except SystemExit as end:
            code = end.code
            if isinstance(code, str):  # as Python ends
                code, _ = 1, print(code, file=sys.stderr)
        return code, *capsys.readouterr()

    return run_here


def test_every_example_is_tested():
    scripts = {path.name for path in (ROOT / "examples").glob("*.py") if not path.read_text().startswith("# %%")}
    assert scripts == set(EXAMPLES)  # the others are walkthroughs


@pytest.mark.parametrize("name", ["resnet20", "resnet56_a", "digit_pairs_attention"])
def test_torch_hub_finds_the_networks(name):
    model = torch.hub.load(str(ROOT), name, source="local", trust_repo=True)
    assert sum(p.numel() for p in model.parameters()) > 20_000


# --- finetune_folder.py -----------------------------------------------------------------------------------------------


@pytest.fixture
def zoo(tmp_path):
    """A checkpoint for other classes."""
    torch.manual_seed(0)
    torch.save(create_model("resnet20", num_classes=10).state_dict(), tmp_path / "zoo.pth")
    return tmp_path / "zoo.pth"


@pytest.fixture
def finetune(run_here, monkeypatch, zoo):
    """Runs the example beside the checkpoint: what it says, and its score."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.chdir(zoo.parent)

    def finetune(folder, *flags):
        code, out, err = run_here("finetune_folder.py", "--data", folder, "--weights", zoo, "--output", "tuned", *flags)
        assert (code, err) == (0, "")
        return out, score_of(out)

    return finetune


def score_of(out):
    assert "2 new by design: fc.weight, fc.bias" in out
    (score,) = re.findall(r"^top-1 (.*) %, in tuned\.(?:pth|safetensors)$", out, re.MULTILINE)
    return float(score)


@torch.no_grad()
def accuracy(model, folder):
    statistics = create_model("resnet20", num_classes=3).pretrained_cfg
    transform = Compose([ToTensor(), Normalize(statistics["mean"], statistics["std"])])
    images = ImageFolder(folder, transform)
    right = [int(model(image[None]).argmax()) == label for image, label in images]
    return 100 * sum(right) / len(right)


def with_attention():
    model = create_model("resnet20", num_classes=3).eval()
    va.insert_(model, stages=-1, example_input=(1, 3, 32, 32))
    return model


def test_finetune_folder_trains_what_is_new_and_then_all(image_folder, zoo, finetune):
    out, score = finetune(image_folder)
    assert out.count("  epoch ") == 4
    assert score > 90
    model = with_attention()
    va.load_checkpoint(model, zoo.parent / "tuned.pth")
    assert accuracy(model, image_folder / "val") == pytest.approx(score, abs=0.01)
    assert va.inserted(model)["layer3.2"].attn.proj.weight.abs().max() > 0
    # All of it was trained, not only what is new.
    assert not torch.equal(model.conv1.weight, torch.load(zoo, weights_only=True)["conv1.weight"])


def test_finetune_folder_leaves_an_adapter_for_the_backbone_that_it_was_given(image_folder, zoo, finetune):
    out, score = finetune(image_folder, "--adapter-only")
    assert out.count("  epoch ") == 1
    model = create_model("resnet20", num_classes=3).eval()
    va.load_checkpoint(model, zoo, fresh="fc.*")
    report = va.load_adapter_(model, zoo.parent / "tuned.safetensors")
    assert {"fc.weight", "layer3.2.inserted.gate"} <= set(report.loaded)
    assert accuracy(model, image_folder / "val") == pytest.approx(score, abs=0.01)


@pytest.mark.slow
def test_finetune_folder_runs_on_two_processes(image_folder, zoo):
    # 25 images to evaluate on, which neither processes nor batches divide, and the last one of them not in its class.
    folder = shutil.copytree(image_folder, zoo.parent / "images")
    shutil.copy(folder / "val" / "blue" / "0.png", folder / "val" / "red" / "z.png")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = [*EXAMPLES["finetune_folder.py"], "--data", folder, "--weights", zoo, "--output", "tuned"]
    command = [*launcher, ROOT / "examples/finetune_folder.py", *arguments, "--batch-size", "6", "--epochs", "1", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=zoo.parent)
    assert done.returncode == 0, done.stderr
    score = score_of(done.stdout)
    assert "2 process(es) on cpu" in done.stdout
    assert done.stdout.count("  epoch ") == 3  # each said once
    model = with_attention()
    va.load_checkpoint(model, zoo.parent / "tuned.pth")
    assert accuracy(model, folder / "val") == pytest.approx(score, abs=0.01)
    assert score < 100


def test_finetune_folder_says_what_it_cannot_train_on(image_folder, zoo, run_here, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    arguments = ["finetune_folder.py", "--weights", zoo, "--output", tmp_path / "tuned", "--data"]
    said = "--batch-size must be at most 72, so that the 72 training images fill one in each process\n"
    code, _, err = run_here(*arguments, image_folder, "--batch-size", "73")
    assert (code, err) == (1, said)
    folder = shutil.copytree(image_folder, tmp_path / "images")
    (folder / "val" / "blue").rename(folder / "val" / "violet")
    code, _, err = run_here(*arguments, folder)
    assert (code, err) == (1, "val must have the classes of train, blue, green, red; it has green, red, violet\n")


# --- denoise.py -------------------------------------------------------------------------------------------------------


def test_denoising_is_noted_run_by_run(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    denoise = importlib.import_module("denoise")
    monkeypatch.setattr(denoise, "photograph", lambda name: torch.rand(1, 1, 51, 50))
    arms = {arm: denoise.network(arm, 0) for arm in denoise.ARMS}
    x, level = torch.rand(1, 1, 48, 48), torch.full((1, 1, 1, 1), 0.2)
    assert {tuple(model(x, level).shape) for model in arms.values()} == {(1, 1, 48, 48)}
    sizes = {arm: sum(p.numel() for p in model.parameters()) for arm, model in arms.items()}
    assert all(abs(size - sizes["attention"]) < 150 for arm, size in sizes.items() if arm != "plain")
    arguments = [*EXAMPLES["denoise.py"], "--arms", "plain", "convolution", "--output", str(tmp_path)]
    denoise.main(arguments)
    text = (tmp_path / "denoise.md").read_text()
    assert "| convolution − plain |" in text
    monkeypatch.setattr(denoise, "run", None)  # all is noted already
    denoise.main(arguments)
    assert (tmp_path / "denoise.md").read_text() == text

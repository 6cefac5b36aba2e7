"""Every script that trains runs, as its header says, on small data."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]

#: Arguments that make an example small.
EXAMPLES = {
    "train_cifar.py": ["--dataset", "folder", "--epochs", "6", "--batch-size", "16", "--device", "cpu"],
}


def run(name, *arguments):
    command = [sys.executable, "-W", "error", ROOT / "examples" / name, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_every_example_is_tested():
    scripts = {path.name for path in (ROOT / "examples").glob("*.py") if not path.read_text().startswith("# %%")}
    assert scripts == set(EXAMPLES)  # the others are walkthroughs


def test_train_cifar(image_folder, tmp_path):
    arguments = EXAMPLES["train_cifar.py"]
    done = run("train_cifar.py", *arguments, "--data", image_folder, "--output", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "epoch 6/6" in done.stdout
    last = torch.load(tmp_path / "run" / "last.pth", weights_only=True)
    assert last["settings"]["label_smoothing"] == 0.1
    assert "model_ema" in last


def test_train_cifar_says_what_is_missing(tmp_path):
    done = run("train_cifar.py", "--data", tmp_path, "--output", tmp_path / "run")
    assert done.returncode == 1
    assert "cifar100 is not in" in done.stderr
    assert "--dataset-download" in done.stderr


@pytest.mark.parametrize("name", ["resnet20", "resnet56_a", "digit_pairs_attention"])
def test_torch_hub_finds_the_networks(name):
    model = torch.hub.load(str(ROOT), name, source="local", trust_repo=True)
    assert sum(p.numel() for p in model.parameters()) > 20_000


@pytest.mark.gpu
@pytest.mark.parametrize("options", [[], ["--compile"]])
def test_train_cifar_on_a_gpu(image_folder, tmp_path, options):
    arguments = [value for value in EXAMPLES["train_cifar.py"] if value not in ("--device", "cpu")]
    done = run("train_cifar.py", *arguments, *options, "--data", image_folder, "--output", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "on cuda" in done.stdout

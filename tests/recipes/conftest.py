"""Several runs in one process: Accelerate keeps the device and the precision of the first one."""

import shutil
import sys
from pathlib import Path

import pytest


@pytest.fixture
def base(image_folder, tmp_path):
    """Return settings for a short run of a small network with four steps per epoch."""
    from vision_attn.recipes.settings import Settings

    return Settings(
        data=image_folder, model="tiny", img_size=16, names=("layer1",), epochs=3, batch_size=16, lr=0.05,
        clip_grad=5.0, device="cpu", workers=0, output=tmp_path / "run",
    )  # fmt: skip


@pytest.fixture
def photos(image_folder, tmp_path):
    """Return a copy of the training images, which a test may change."""
    return Path(shutil.copytree(image_folder / "train", tmp_path / "photos"))


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """Forget the device and the precision after each test, as a new process does."""
    yield
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)

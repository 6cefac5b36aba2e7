"""Where the weights of our own training lie."""

from __future__ import annotations

from pathlib import Path

__all__ = ["weights_file", "weights_folder"]


def weights_folder() -> Path:
    """The folder of the library's own checkpoints: inside an installed package, beside it in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "weights"
    return installed if installed.is_dir() else package.parent / "weights"


def weights_file(name: str) -> str:
    """The path of a network's weights, as timm's configurations have it."""
    return str(weights_folder() / name / "model.safetensors")

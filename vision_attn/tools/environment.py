"""Versions of the software, and the hardware: for bug reports, and in the record of each run of a comparison."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch

from vision_attn.version import __version__


def describe_environment() -> dict[str, str | int | None]:
    """Return versions, commit, device and number of threads for JSON. The GPU is None without CUDA."""
    cpuinfo = Path("/proc/cpuinfo")  # contains the name of the processor on Linux
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "vision_attn": __version__,
        "commit": get_commit(),
        "torch": torch.__version__,  # with the CUDA version of the build
        **{name: importlib.metadata.version(name) for name in ("torchvision", "timm", "einx", "numpy")},
        "python": platform.python_version(),
        "os": platform.platform(),
        "cpu": next(names, platform.processor() or platform.machine()),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
    }


def get_commit() -> str | None:
    """Return the commit of a checkout, followed by ``-dirty`` if files differ from it.

    Outside of a checkout, return the environment variable ``GIT_COMMIT``, or None.
    """
    root = Path(__file__).parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return os.environ.get("GIT_COMMIT")
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None

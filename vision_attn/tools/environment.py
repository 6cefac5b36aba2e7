"""Versions of the software, and the hardware: for bug reports, and in the record of each run of a comparison."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import torch

from vision_attn.version import __version__


def describe_environment() -> dict[str, str | int | None]:
    """Return versions, device and number of threads for JSON, with the commit in the variable ``GIT_COMMIT``."""
    cpuinfo = Path("/proc/cpuinfo")  # contains the name of the processor on Linux
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "vision_attn": __version__,
        "commit": os.environ.get("GIT_COMMIT"),
        "torch": torch.__version__,  # with the CUDA version of the build
        **{name: importlib.metadata.version(name) for name in ("torchvision", "timm", "einx", "numpy")},
        "python": platform.python_version(),
        "os": platform.platform(),
        "cpu": next(names, platform.processor() or platform.machine()),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
    }

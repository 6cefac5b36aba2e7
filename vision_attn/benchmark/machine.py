"""The machine: what it is, and set up so that all contestants meet the same one."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

import vision_attn
from vision_attn.benchmark.settings import Settings

__all__ = ["Machine", "choose_device", "describe", "prepared"]


@dataclass(frozen=True)
class Machine:
    """What was measured on.

    Args:
        device: its kind and name.
        threads: that torch uses on the CPU.
        cores: that the CPU has.
        platform: the operating system.
        python: its version.
        versions: of the packages that were measured.
    """

    device: str
    threads: int
    cores: int | None
    platform: str
    python: str
    versions: dict[str, str]


def choose_device(name: str | None) -> torch.device:
    """The device of a name, or the best there is.

    Args:
        name: ``"cpu"``, ``"cuda"`` or None.

    Raises:
        ValueError: CUDA is asked for and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for and there is no CUDA device: leave --device out, or give cpu")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


@contextmanager
def prepared(settings: Settings, device: torch.device) -> Iterator[None]:
    """The threads and the seed of the settings, and float32 that is float32; as it was before when it ends.

    Args:
        settings: ``threads`` is used.
        device: what is measured on.
    """
    threads = torch.get_num_threads()
    # On CUDA convolutions take shorter numbers (TF32) by default and linear layers do not: that would compare types.
    convolutions, products = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    try:
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if device.type == "cuda" else []):
            torch.manual_seed(0)
            yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = convolutions, products


def describe(device: torch.device) -> Machine:
    """What a benchmark is run on.

    Args:
        device: of the maps.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    packages = {"torch": str(torch.__version__), "timm": version("timm"), "einx": version("einx")}
    return Machine(
        device=f"{device.type} ({name})",
        threads=torch.get_num_threads(),
        cores=os.cpu_count(),
        platform=platform.platform(),
        python=platform.python_version(),
        versions={"vision_attn": vision_attn.__version__, **packages},
    )


def cpu_name() -> str:
    """The processor as Linux calls it; elsewhere as Python does."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or platform.machine())

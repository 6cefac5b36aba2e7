"""What an error means to a person at a terminal: what is said of it, and the exit code."""

from __future__ import annotations

from vision_attn.benchmark.errors import BenchmarkError
from vision_attn.checkpoints import CheckpointError
from vision_attn.export.errors import ExportError
from vision_attn.training.errors import DataError, TrainingError

__all__ = ["FAILURE", "INTERRUPTED", "exit_code", "explain"]

#: Exit codes: what was asked for cannot be done as asked; it was tried and failed; it was interrupted.
BAD_USAGE, FAILURE, INTERRUPTED = 2, 1, 130

#: Packages that commands need beyond what the library itself does, by the extra that brings them.
EXTRAS = {
    "train": ("accelerate", "matplotlib", "psutil", "sklearn", "tensorboard", "tqdm", "yaml"),
    "export": ("onnx", "onnxruntime", "onnxscript"),
}


def exit_code(error: Exception) -> int | None:
    """The exit code of an error; None where it is a fault of the program's own.

    Args:
        error: that a command ended with.

    >>> exit_code(ValueError("lr must be positive")), exit_code(OSError("disk full")), exit_code(KeyError("x"))
    (2, 1, None)
    """
    if isinstance(error, ValueError):
        return BAD_USAGE
    if isinstance(
        error, (BenchmarkError, CheckpointError, DataError, ExportError, TrainingError, OSError)
    ) or missing_extra(error):
        return FAILURE
    return None


def missing_extra(error: Exception) -> str | None:
    """The extra that a package which is not installed belongs to."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return next((extra for extra, packages in EXTRAS.items() if package in packages), None)


def explain(error: Exception) -> str:
    """What is said of an error on standard error: its message, and which packages to install where one is missing.

    Args:
        error: that a command ended with.

    >>> explain(ModuleNotFoundError("No module named 'onnx'", name="onnx"))
    "No module named 'onnx': this command needs pip install 'vision-attn[export]'"
    """
    extra = missing_extra(error)
    return f"{error}: this command needs pip install 'vision-attn[{extra}]'" if extra else str(error)

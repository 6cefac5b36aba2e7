"""How a program ends: what is said of an error to a person at a terminal, and the exit code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

from vision_attn.errors import Interrupted, VisionAttnError

__all__ = ["run_program"]

#: Exit codes: what was asked for cannot be done as asked; it was tried and failed; it was interrupted.
BAD_USAGE, FAILURE, INTERRUPTED = 2, 1, 130

#: Packages that commands need beyond what the library itself does, by the extra that brings them.
EXTRAS = {
    "train": ("accelerate", "matplotlib", "sklearn", "tensorboard", "tqdm", "yaml"),
    "export": ("onnx", "onnxruntime", "onnxscript"),
}


def run_program(
    name: str, run: Callable[[], None], *, interrupted: str = "interrupted", show_traceback: bool = False
) -> int:
    """Run a program of this library; an error that is not the program's own fault is said in a line.

    >>> run_program("count", lambda: print(1 + 1))
    2
    0
    """
    try:
        run()
    except Interrupted as stop:
        if str(stop):  # several processes leave it to one of them
            print(f"{name}: {stop}", file=sys.stderr)
        return 128 + stop.signal
    except KeyboardInterrupt:
        print(f"{name}: {interrupted}", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        code = exit_code(error)
        if code is None or show_traceback:
            traceback.print_exc()
            return code or FAILURE
        print(f"{name}: error: {explain(error)}", file=sys.stderr)
        return code
    return 0


def exit_code(error: Exception) -> int | None:
    """What an error means; None where it is a fault of the program's own."""
    if isinstance(error, ValueError):
        return BAD_USAGE
    if isinstance(error, (VisionAttnError, OSError)) or missing_extra(error):
        return FAILURE
    return None


def missing_extra(error: Exception) -> str | None:
    """The extra that a package which is not installed belongs to."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return next((extra for extra, packages in EXTRAS.items() if package in packages), None)


def explain(error: Exception) -> str:
    extra = missing_extra(error)
    return f"{error}: this command needs pip install 'vision-attn[{extra}]'" if extra else str(error)

"""The program ``vision-attn``: each command is one function of the library, each flag one of its settings.

It ends with 0; 1 for what was tried and failed; 2 for what cannot be done as asked; 128 and the signal where it was
interrupted. What is a user's to mend is said in a line; only a fault of the program's own has a traceback.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence

from vision_attn.cli.commands import COMMANDS, given, run_train
from vision_attn.errors import Interrupted, VisionAttnError
from vision_attn.version import __version__

__all__ = ["given", "main", "parser", "run_program"]

FAILURE, BAD_USAGE, INTERRUPTED = 1, 2, 130

#: Packages that commands need beyond what the library itself does, by the extra that brings them.
EXTRAS = {
    "train": ("accelerate", "matplotlib", "sklearn", "tensorboard", "tqdm", "yaml"),
    "export": ("onnx", "onnxruntime", "onnxscript"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of ``vision-attn``; errors are said on standard error.

    >>> main(["inspect", "resnet-that-is-none"])
    2
    """
    options = parser().parse_args(arguments)
    goes_on = "; a run that has saved its last.pth goes on with --resume" if options.command is run_train else ""
    return run_program(
        "vision-attn",
        lambda: options.command(options),
        interrupted=f"interrupted{goes_on}",
        show_traceback=options.traceback,
    )


def parser() -> argparse.ArgumentParser:
    """The commands and their flags.

    >>> parser().parse_args(["train", "--lr", "0.1"]).lr
    0.1
    """
    top = argparse.ArgumentParser(
        prog="vision-attn", description="Attention inside convolutional networks.", allow_abbrev=False
    )
    top.add_argument("--version", action="version", version=f"vision-attn {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--traceback", action="store_true", help="show where an error came from")
    subparsers = top.add_subparsers(required=True, metavar="COMMAND")
    for name, (text, add_arguments) in COMMANDS.items():
        add_arguments(subparsers.add_parser(name, parents=[common], allow_abbrev=False, help=text))
    return top


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
        extra = missing_extra(error)
        lack = type(error).__name__ == "OutOfMemoryError"  # torch's, which is not imported for it
        known = isinstance(error, (ValueError, VisionAttnError, OSError)) or extra or lack
        if not known or show_traceback:
            traceback.print_exc()
        else:
            remedy = f": this command needs pip install 'vision-attn[{extra}]'" if extra else ""
            print(f"{name}: error: {error}{remedy}", file=sys.stderr)
        return BAD_USAGE if isinstance(error, ValueError) else FAILURE
    return 0


def missing_extra(error: Exception) -> str | None:
    """The extra that a package which is not installed belongs to."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return next((extra for extra, packages in EXTRAS.items() if package in packages), None)

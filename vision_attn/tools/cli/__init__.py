"""The program ``vision-attn``, in which each command is a function whose arguments are the flags.

The exit status is 0 for success, 1 for a failure, 2 for wrong usage, and 128 plus the signal number after an
interruption. If the reader of the output closes the pipe, as ``head`` does, the status is 141 without a message.
Errors that a user can fix are printed in one line; only bugs print a traceback. Help and
wrong flags do not import heavy packages.
"""

from __future__ import annotations

import difflib
import io
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tyro

from vision_attn.errors import CheckpointError, Interrupted, VisionAttnError
from vision_attn.text import INSTALL, escape_control_characters
from vision_attn.tools.cli import commands
from vision_attn.tools.cli.commands import compare, demo, evaluate, export, inspect, predict, train
from vision_attn.tools.cli.visualize import explore
from vision_attn.version import __version__

__all__ = ["COMMANDS", "commands", "main", "run_program"]

FAILURE, BAD_USAGE, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141

#: Commands whose arguments are the flags.
PLAIN: dict[str, Callable[..., None]] = {f.__name__: f for f in (inspect, demo, predict, export, explore)}
#: Commands that parse the flags for the settings of a run.
WITH_SETTINGS: dict[str, Callable[[list[str]], None]] = {"train": train, "evaluate": evaluate, "compare": compare}
COMMANDS = {**PLAIN, **WITH_SETTINGS}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of ``vision-attn``, print errors to standard error and return the exit status.

    >>> main(["inspect", "resnet1000"])
    2
    """
    name, *words = [*(sys.argv[1:] if arguments is None else arguments)] or [""]
    return run_program("vision-attn", lambda: run_command(name, words))


def run_command(name: str, words: list[str]) -> int:
    """Run the command of this name, or list all commands; return an exit status."""
    if name in PLAIN:
        tyro.cli(PLAIN[name], args=words, prog=f"vision-attn {name}")
    elif name in WITH_SETTINGS:
        WITH_SETTINGS[name](words)
    elif name == "--version":
        print(f"vision-attn {__version__}")
    else:
        status = 0 if name in ("-h", "--help") else BAD_USAGE
        lines = ["usage: vision-attn COMMAND [--help] …", ""]
        lines += [f"  {one:<10}{(command.__doc__ or '').splitlines()[0]}" for one, command in COMMANDS.items()]
        if name and status:
            close = difflib.get_close_matches(name, COMMANDS, n=1)
            guess = f". Did you mean {close[0]!r}?" if close else ""
            lines += ["", f"vision-attn: error: unknown command {escape_control_characters(name)!r}{guess}"]
        print("\n".join(lines), file=sys.stderr if status else sys.stdout)
        return status
    return 0


def print_warning(program: str, message: Warning | str, *where: Any, **options: Any) -> None:
    """Print a warning to standard error in one line, without the source line that Python adds."""
    print(f"{program}: warning: {escape_control_characters(' '.join(str(message).split()))}", file=sys.stderr)


def run_program(name: str, run: Callable[[], int | None], *, interrupted: str = "interrupted") -> int:
    """Run a program of this library, print expected errors and warnings in one line, and return the exit status.

    >>> run_program("count", lambda: print(1 + 1))
    2
    0
    """
    sys.stderr = sys.stderr or io.StringIO()  # None if standard error is closed
    if sys.stdout is None:
        sys.exit(f"{name}: error: standard output is closed. Redirect it to a file or to /dev/null")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Unsupported characters are escaped. With line buffering, print raises errors of the stream.
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = partial(print_warning, name)
            return run() or 0
    except KeyboardInterrupt as stop:
        message = str(stop) if isinstance(stop, Interrupted) else interrupted
        if message:  # of several processes, only one prints a message
            print(f"{name}: {message}", file=sys.stderr)
        return 128 + stop.signal if isinstance(stop, Interrupted) else INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and error.filename is None:  # the reader closed standard output
            return BROKEN_PIPE
        has_remedy = "pip install" in str(error)
        missing = (
            isinstance(error, ImportError)
            and (has_remedy or isinstance(error, ModuleNotFoundError))
            and not str(error.name).startswith("vision_attn")
        )
        # torch is not imported here, so its error types are compared by name
        memory = type(error).__name__ in ("OutOfMemoryError", "MemoryError") or "allocate memory" in str(error)
        if isinstance(error, (ValueError, VisionAttnError, OSError)) or missing or memory:
            remedy = (
                ""
                if has_remedy or not missing
                else f". Install the required packages: {INSTALL.format('train,export')}"
            )
            # Text from files is escaped. Only checkpoint errors have several lines.
            lines = str(error).split("\n")
            if isinstance(error, OSError) and error.strerror and error.filename:
                lines = [f"{error.strerror}: {error.filename!r}"]  # without the errno
            message = (
                "\n".join(lines)
                if isinstance(error, CheckpointError)
                else " ".join(map(escape_control_characters, lines))
            )
            distributed = sys.modules.get("torch.distributed")
            # All processes of torchrun have the same error until they are connected: one of each machine prints.
            if os.environ.get("LOCAL_RANK", "0") == "0" or (distributed and distributed.is_initialized()):
                print(f"{name}: error: {message or type(error).__name__}{remedy}", file=sys.stderr)
        else:
            traceback.print_exc()
        return BAD_USAGE if isinstance(error, ValueError) else FAILURE
    finally:
        distributed = sys.modules.get("torch.distributed")
        if distributed and distributed.is_initialized():  # its threads may abort the process at exit
            distributed.destroy_process_group()
        try:
            sys.stdout.flush()
        except OSError:  # prevents a second error when Python flushes it at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

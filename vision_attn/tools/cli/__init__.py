"""The program ``vision-attn``, in which each command is a function whose arguments are the flags.

The exit status is 0 for success, 1 for a failure, 2 for wrong usage, and 128 plus the signal number after an
interruption. If the reader of the output closes the pipe, as ``head`` does, the status is 141 without a message.
Errors that a user can fix are printed in one line; only bugs print a traceback. Help and
wrong flags do not import heavy packages.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tyro

from vision_attn.errors import CheckpointError, Interrupted, VisionAttnError
from vision_attn.text import INSTALL, did_you_mean, escape_control_characters
from vision_attn.tools.cli import commands
from vision_attn.tools.cli.commands import compare, demo, env, evaluate, export, inspect, predict, train
from vision_attn.tools.cli.visualize import explore
from vision_attn.version import __version__

__all__ = ["COMMANDS", "commands", "main", "run_program"]

FAILURE, BAD_USAGE, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141

#: Commands whose arguments are the flags.
PLAIN: dict[str, Callable[..., None]] = {f.__name__: f for f in (inspect, demo, predict, export, explore, env)}
#: Commands that parse the flags for the settings of a run.
WITH_SETTINGS: dict[str, Callable[[list[str]], None]] = {"train": train, "evaluate": evaluate, "compare": compare}
COMMANDS = {**PLAIN, **WITH_SETTINGS}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of ``vision-attn``, print errors to standard error and return the exit status.

    >>> main(["inspect", "resnet1000"])
    2
    """
    name, *words = [*(sys.argv[1:] if arguments is None else arguments)] or [""]
    # Each retry of a download is a warning; the error after the last one has the reason.
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)
    return run_program("vision-attn", lambda: run_command(name, words))


def run_command(name: str, words: list[str]) -> int:
    """Run the command of this name, or list all commands; return an exit status."""
    try:
        if name in PLAIN:
            tyro.cli(PLAIN[name], args=words, prog=f"vision-attn {name}")
        elif name in WITH_SETTINGS:
            WITH_SETTINGS[name](words)
        elif name == "--version":
            print(f"vision-attn {__version__}")
        else:
            return list_commands(name)
    except ValueError as error:
        raise ValueError(name_flags(str(error), words)) from error
    return 0


def list_commands(name: str) -> int:
    """Print all commands, and an error for an unknown name; return an exit status."""
    status = 0 if name in ("-h", "--help") else BAD_USAGE
    lines = ["usage: vision-attn COMMAND [--help] …", ""]
    lines += [f"  {one:<10}{(command.__doc__ or '').splitlines()[0]}" for one, command in COMMANDS.items()]
    if name and status:
        unknown = f"unknown command {escape_control_characters(name)!r}.{did_you_mean(name, COMMANDS)}"
        lines += ["", f"vision-attn: error: {unknown}"]
    print("\n".join(lines), file=sys.stderr if status else sys.stdout)
    return status


def name_flags(message: str, words: Sequence[str]) -> str:
    """Replace the names of arguments in a message, at its start and before ``=``, by the flags that were typed.

    >>> name_flags("batch_size must be at most 16, got 500", ["--batch-size", "500"])
    '--batch-size must be at most 16, got 500'
    """
    typed = {word.partition("=")[0] for word in words}

    def name_flag(match: re.Match[str]) -> str:
        flag = f"--{match[0].replace('_', '-')}"
        return flag if flag in typed else match[0]

    return re.sub(r"^\w+|\b\w+(?==)", name_flag, message)


def print_warning(program: str, message: Warning | str, *where: Any, **options: Any) -> None:
    """Print a warning to standard error in one line, without the source line that Python adds."""
    print(f"{program}: warning: {escape_control_characters(' '.join(str(message).split()))}", file=sys.stderr)


def run_program(name: str, run: Callable[[], int | None], *, interrupted: str = "interrupted") -> int:
    """Run a program of this library, print expected errors and warnings in one line, and return the exit status.

    >>> run_program("count", lambda: print(1 + 1))
    2
    0
    """
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
        if (reason := describe_error(error)) is None:
            traceback.print_exc()
        # All processes of torchrun have the same error until they are connected: one of each machine prints.
        elif os.environ.get("LOCAL_RANK", "0") == "0" or is_distributed():
            print(f"{name}: error: {reason}", file=sys.stderr)
        return BAD_USAGE if isinstance(error, ValueError) else FAILURE
    finally:
        if is_distributed():  # its threads may abort the process at exit
            sys.modules["torch.distributed"].destroy_process_group()
        try:
            print(end="", flush=True)
        except OSError:  # prevents a second error when Python flushes it at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_distributed() -> bool:
    """Return True if this process is connected to other processes."""
    return "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized()


def describe_error(error: Exception) -> str | None:
    """Return the message of an error that a user can fix, or None for a bug."""
    lines = str(error).split("\n")
    # Only checkpoint errors have several lines, which are escaped.
    message = str(error) if isinstance(error, CheckpointError) else " ".join(map(escape_control_characters, lines))
    if isinstance(error, OSError) and error.strerror and error.filename:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return f"{error.strerror}: {error.filename!r}{'. Free disk space, or write to another disk' * full}"
    if isinstance(error, ImportError) and "pip install" not in message:
        if not isinstance(error, ModuleNotFoundError) or str(error.name).startswith("vision_attn"):
            return None
        return f"{message}. Install the required packages: {INSTALL.format('train,export')}"
    if message.startswith("DataLoader worker"):  # torch raises it in whichever line of the main process runs
        return f"a worker process ended. Use fewer --workers. Cause: {message}"
    if "by peer" in message and is_distributed():
        return "another process ended, which prints its error"
    # torch is not imported here, so its error types are compared by name
    memory = type(error).__name__ in ("OutOfMemoryError", "MemoryError") or "allocate memory" in message
    expected = isinstance(error, (ValueError, VisionAttnError, OSError, ImportError)) or memory
    return message or type(error).__name__ if expected else None

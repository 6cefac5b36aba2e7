"""The program ``vision-attn``: each command is one function, and its arguments are the flags.

Exit status: 0; 1 for a failure; 2 for wrong usage; 128 plus the signal after an interruption, or, without a message,
after the reader of the output has left, as ``head`` does. An error that a user can fix is one line; only a bug of the
program has a traceback. No heavy package is imported to show help or to refuse a flag.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence

import tyro

from vision_attn.errors import CheckpointError, Interrupted, VisionAttnError
from vision_attn.text import escaped
from vision_attn.tools.cli import commands
from vision_attn.tools.cli.commands import compare, demo, evaluate, export, inspect, predict, train
from vision_attn.tools.cli.visualize import explore
from vision_attn.version import __version__

__all__ = ["COMMANDS", "commands", "main", "run_program"]

FAILURE, BAD_USAGE, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141

#: Commands whose flags are their arguments.
PLAIN: dict[str, Callable[..., None]] = {f.__name__: f for f in (inspect, demo, predict, export, explore)}
#: Commands with flags for the settings of a run, which they parse.
WITH_SETTINGS: dict[str, Callable[[list[str]], None]] = {"train": train, "evaluate": evaluate, "compare": compare}
COMMANDS = {**PLAIN, **WITH_SETTINGS}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of ``vision-attn``; errors are printed to standard error.

    >>> main(["inspect", "resnet-that-is-none"])
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
            lines += [f"vision-attn: error: there is no command {escaped(name)!r}"]
        print("\n".join(lines), file=sys.stderr if status else sys.stdout)
        return status
    return 0


def run_program(name: str, run: Callable[[], int | None], *, interrupted: str = "interrupted") -> int:
    """Run a program of this library; an error that is not a bug of the program is printed in one line.

    >>> run_program("count", lambda: print(1 + 1))
    2
    0
    """
    sys.stderr = sys.stderr or io.StringIO()  # where it is closed
    if sys.stdout is None:
        sys.exit(f"{name}: error: standard output is closed: redirect it to a file or to /dev/null")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Characters that the terminal cannot show are written as numbers. Errors of a stream are raised by print.
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
    try:
        return run() or 0
    except KeyboardInterrupt as stop:
        message = str(stop) if isinstance(stop, Interrupted) else interrupted
        if message:  # one of several processes has it
            print(f"{name}: {message}", file=sys.stderr)
        return 128 + stop.signal if isinstance(stop, Interrupted) else INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and error.filename is None:  # the reader of standard output has left
            return BROKEN_PIPE
        missing = isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("vision_attn")
        # torch's, which is not imported for it, and what it raises on the CPU
        memory = type(error).__name__ in ("OutOfMemoryError", "MemoryError") or "allocate memory" in str(error)
        if isinstance(error, (ValueError, VisionAttnError, OSError)) or missing or memory:
            named = not missing or "pip install" in str(error)
            remedy = "" if named else ": the commands need pip install 'vision-attn[train,export]'"
            # The text may come from a file, or be its name: a checkpoint's error alone has lines.
            lines = str(error).split("\n")
            message = "\n".join(lines) if isinstance(error, CheckpointError) else " ".join(map(escaped, lines))
            print(f"{name}: error: {message or type(error).__name__}{remedy}", file=sys.stderr)
        else:
            traceback.print_exc()
        return BAD_USAGE if isinstance(error, ValueError) else FAILURE
    finally:
        distributed = sys.modules.get("torch.distributed")
        if distributed and distributed.is_initialized():  # its threads may abort a process that ends before they do
            distributed.destroy_process_group()
        try:
            sys.stdout.flush()
        except OSError:  # Python would flush it again when it ends, and show the error
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

"""The program ``vision-attn``: each command is one function, and its arguments are the flags.

It ends with 0; 1 for what was tried and failed; 2 for what cannot be done as asked; 128 and the signal where it was
interrupted, or, without a message, where the reader of its output has left, as ``head`` does. An error that a user can
mend is one line; only a fault of the program's own has a traceback. Nothing heavy is imported to show help or to refuse
a flag.
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
from vision_attn.tools.cli.looking import explore
from vision_attn.version import __version__

__all__ = ["COMMANDS", "commands", "main", "run_program"]

FAILURE, BAD_USAGE, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141

#: Packages that commands need beyond what the library itself does, by the extra that brings them.
EXTRAS = {
    "train": ("accelerate", "filelock", "matplotlib", "pydantic", "scipy", "sklearn", "tensorboard", "tqdm", "yaml"),
    "export": ("onnx", "onnxruntime", "onnxscript"),
}
#: Commands whose flags are their arguments.
PLAIN: dict[str, Callable[..., None]] = {f.__name__: f for f in (inspect, demo, predict, export, explore)}
#: Commands with flags for the settings of a run: they are handed the words of the command line.
OF_RUNS: dict[str, Callable[[list[str]], None]] = {"train": train, "evaluate": evaluate, "compare": compare}
COMMANDS = {**PLAIN, **OF_RUNS}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of ``vision-attn``; errors are said on standard error.

    >>> main(["inspect", "resnet-that-is-none"])
    2
    """
    name, *words = [*(sys.argv[1:] if arguments is None else arguments)] or [""]
    return run_program("vision-attn", lambda: run_command(name, words))


def run_command(name: str, words: list[str]) -> int | None:
    """Run a command of this name, and return an exit status, if it is not 0."""
    if name == "--version":
        print(f"vision-attn {__version__}")
        return 0
    if name not in COMMANDS:
        return refuse_command(name)
    command = OF_RUNS.get(name, lambda words: tyro.cli(PLAIN[name], args=words, prog=f"vision-attn {name}"))
    return command(words)


def refuse_command(name: str) -> int:
    """List the commands, because that was asked for, or since there is no command of this name."""
    asked = name in ("-h", "--help")
    lines = ["usage: vision-attn COMMAND [--help] …", ""]
    lines += [f"  {one:<10}{(what.__doc__ or '').splitlines()[0]}" for one, what in COMMANDS.items()]
    print("\n".join(lines), file=sys.stdout if asked else sys.stderr)
    if name and not asked:
        print(f"vision-attn: error: there is no command {escaped(name)!r}", file=sys.stderr)
    return 0 if asked else BAD_USAGE


def run_program(name: str, run: Callable[[], int | None], *, interrupted: str = "interrupted") -> int:
    """Run a program of this library; an error that is not the program's own fault is said in a line.

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
        if said := str(stop) if isinstance(stop, Interrupted) else interrupted:  # several processes leave it to one
            print(f"{name}: {said}", file=sys.stderr)
        return 128 + stop.signal if isinstance(stop, Interrupted) else INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and error.filename is None:  # the reader of standard output has left
            return BROKEN_PIPE
        extra = missing_extra(error)
        # torch's, which is not imported for it, and what it raises on the CPU
        lack = type(error).__name__ in ("OutOfMemoryError", "MemoryError") or "allocate memory" in str(error)
        known = isinstance(error, (ValueError, VisionAttnError, OSError)) or extra or lack
        if not known:
            traceback.print_exc()
        else:
            remedy = f": this command needs pip install 'vision-attn[{extra}]'" if extra else ""
            # What is said of a file may come from the file, or be its name: a checkpoint's error alone has lines.
            lines = str(error).split("\n")
            said = "\n".join(lines) if isinstance(error, CheckpointError) else " ".join(map(escaped, lines))
            print(f"{name}: error: {said or type(error).__name__}{remedy}", file=sys.stderr)
        return BAD_USAGE if isinstance(error, ValueError) else FAILURE
    finally:
        try:
            sys.stdout.flush()
        except OSError:  # Python would flush it again when it ends, and show the error
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def missing_extra(error: Exception) -> str | None:
    """The extra that a package which is not installed belongs to."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return next((extra for extra, packages in EXTRAS.items() if package in packages), None)

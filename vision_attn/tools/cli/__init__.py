"""The program ``vision-attn``: each command is one function of the library, each flag one of its settings.

It ends with 0; 1 for what was tried and failed; 2 for what cannot be done as asked; 128 and the signal where it was
interrupted. What is a user's to mend is said in a line; only a fault of the program's own has a traceback.
"""

from __future__ import annotations

import argparse
import difflib
import io
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from vision_attn.errors import CheckpointError, Interrupted, VisionAttnError
from vision_attn.text import escaped
from vision_attn.tools.cli import costs, looking, training, using
from vision_attn.tools.cli.flags import given
from vision_attn.version import __version__

__all__ = ["given", "main", "parser", "run_program"]

FAILURE, BAD_USAGE, INTERRUPTED = 1, 2, 130

#: Packages that commands need beyond what the library itself does, by the extra that brings them.
EXTRAS = {
    "train": ("accelerate", "filelock", "matplotlib", "scipy", "sklearn", "tensorboard", "tqdm", "yaml"),
    "export": ("onnx", "onnxruntime", "onnxscript"),
}
#: What each command is for, and what adds its flags.
COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "inspect": ("what attention would cost at each stage of a network, and where to put it", costs.add_inspect),
    "demo": ("what attention is for, in minutes", training.add_demo),
    "train": ("train, fine-tune or evaluate an image classifier, with attention inserted or not", training.add_train),
    "compare": ("does a block help? arms by seeds, with intervals", training.add_compare),
    "predict": ("what a trained network takes images for", using.add_predict),
    "explore": ("where every head of a network looks on images, as a page for a browser", looking.add_explore),
    "maps": ("the same as pictures, with a page on how widely and how far each head looks", looking.add_maps),
    "export": ("a trained network as a file that others run: ONNX, torch.export, timm, safetensors", using.add_export),
    "convert": ("the attention in a file of weights from another library's layout to ours", using.add_convert),
    "bench": ("time and memory of attention beside other libraries'", costs.add_bench),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of ``vision-attn``; errors are said on standard error.

    >>> main(["inspect", "resnet-that-is-none"])
    2
    """
    take_any_encoding()  # also of what --help prints
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        parser().print_help(sys.stderr)
        return BAD_USAGE
    options = parser().parse_args(arguments)
    return run_program("vision-attn", lambda: options.command(options), show_traceback=options.traceback)


def parser() -> argparse.ArgumentParser:
    """The commands and their flags.

    >>> parser().parse_args(["train", "--lr", "0.1"]).lr
    0.1
    """
    top = Parser(prog="vision-attn", description="Attention inside convolutional networks.", allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"vision-attn {__version__}")
    common = Parser(add_help=False)
    common.add_argument("--traceback", action="store_true", help="show where an error came from")
    subparsers = top.add_subparsers(required=True, metavar="COMMAND")
    for name, (text, add_arguments) in COMMANDS.items():
        add_arguments(subparsers.add_parser(name, parents=[common], allow_abbrev=False, help=text))
    return top


class Parser(argparse.ArgumentParser):
    """One that says what a mistyped flag may have been meant to be."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse here what the parser above could say less of."""
        known, rest = super().parse_known_args(args, namespace)
        if rest and self._subparsers is None:
            shown = [
                flag for action in self._actions for flag in action.option_strings if action.help != argparse.SUPPRESS
            ]
            close = [near for word in rest for near in difflib.get_close_matches(word.partition("=")[0], shown, 1)]
            hint = f"; did you mean {' '.join(close)}?" if close else ""
            self.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
        return known, rest


def take_any_encoding() -> None:
    """Signs that the encoding of the output has not end no command: they are written as their numbers."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def run_program(
    name: str, run: Callable[[], None], *, interrupted: str = "interrupted", show_traceback: bool = False
) -> int:
    """Run a program of this library; an error that is not the program's own fault is said in a line.

    >>> run_program("count", lambda: print(1 + 1))
    2
    0
    """
    take_any_encoding()
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
        # torch's, which is not imported for it, and what it raises on the CPU
        lack = type(error).__name__ in ("OutOfMemoryError", "MemoryError") or "allocate memory" in str(error)
        known = isinstance(error, (ValueError, VisionAttnError, OSError)) or extra or lack
        if not known or show_traceback:
            traceback.print_exc()
        else:
            remedy = f": this command needs pip install 'vision-attn[{extra}]'" if extra else ""
            # What is said of a file may come from the file, or be its name: a checkpoint's error alone has lines.
            lines = str(error).split("\n")
            said = "\n".join(lines) if isinstance(error, CheckpointError) else " ".join(map(escaped, lines))
            print(f"{name}: error: {said or type(error).__name__}{remedy}", file=sys.stderr)
        return BAD_USAGE if isinstance(error, ValueError) else FAILURE
    return 0


def missing_extra(error: Exception) -> str | None:
    """The extra that a package which is not installed belongs to."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return next((extra for extra, packages in EXTRAS.items() if package in packages), None)

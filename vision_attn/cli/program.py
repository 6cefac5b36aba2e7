"""The program ``vision-attn``: its commands, and how each ends."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from vision_attn.cli import bench, demo, export, inspect, train
from vision_attn.cli.failures import run_program
from vision_attn.version import __version__

__all__ = ["main", "parser"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of ``vision-attn``; errors are said on standard error.

    >>> main(["inspect", "resnet-that-is-none"])
    2
    """
    options = parser().parse_args(arguments)
    goes_on = "; a run that has saved its last.pth goes on with --resume" if options.command is train.run else ""
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
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    for module in (inspect, demo, train, export, bench):
        name = module.__name__.rpartition(".")[2]
        module.add_arguments(commands.add_parser(name, parents=[common], allow_abbrev=False, help=module.HELP))
    return top

"""``vision-attn demo``: what attention is for, in minutes."""

from __future__ import annotations

import argparse

__all__ = ["HELP", "add_arguments"]

#: What the command is for.
HELP = "what attention is for, in minutes"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The flags of :func:`vision_attn.training.demo.demo`."""
    command.set_defaults(command=run)
    command.add_argument("--output", default="demo-output", help="folder for what it makes (default: %(default)s)")
    command.add_argument("--epochs", type=int, default=5, help="epochs of each arm (default: %(default)s)")
    command.add_argument("--seed", type=int, default=0, help="seed of each arm (default: %(default)s)")


def run(options: argparse.Namespace) -> None:
    from vision_attn.training.demo import demo

    demo(options.output, epochs=options.epochs, seed=options.seed)

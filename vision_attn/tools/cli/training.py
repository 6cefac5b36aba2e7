"""The commands that train: ``train``, ``compare`` and ``demo``. What a command runs is imported when it runs."""

from __future__ import annotations

import argparse
import shlex
import sys
from functools import partial
from typing import Any

from vision_attn.tools.cli.flags import add_config, add_fields, given, say

__all__ = ["add_compare", "add_demo", "add_train"]

#: What ``vision-attn train --help`` begins with.
TRAIN = """\
Train an image classifier, or evaluate one, with attention inserted or not.
Ctrl-C saves the run, and --resume goes on with it.

  vision-attn train --data flowers --model resnet18 --pretrained --insert layer3
  vision-attn train --dataset cifar100 --data data --dataset-download --insert -1
"""
#: What a comparison decides for each of its runs.
DECIDED = ("seed", "output", "resume", "overwrite", "test_only")


def add_train(command: argparse.ArgumentParser) -> None:
    """A flag for each of :class:`vision_attn.tools.training.settings.Settings`."""
    from vision_attn.tools.training.settings import Settings

    command.set_defaults(command=run_train)
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.usage = "vision-attn train --data FOLDER [FLAG ...]"
    command.description = TRAIN
    text = "with --test-only: folder, checkpoint or adapter (which needs --weights) of a run, evaluated on its data"
    command.add_argument("run", nargs="?", metavar="RUN", default=argparse.SUPPRESS, help=text)
    add_config(command)
    add_fields(command, Settings)


def run_train(options: argparse.Namespace) -> None:
    from torch import distributed

    from vision_attn.tools.training.settings import Settings
    from vision_attn.tools.training.train import train
    from vision_attn.tools.training.trained import open_trained, settings_to_evaluate, settings_to_resume

    values, trained = given(Settings, options), None
    if "run" in options:
        if not values.get("test_only"):
            raise ValueError(f"RUN goes with --test-only; to go on with a run, --resume {options.run}/last.pth")
        trained = open_trained(options.run, weights=values.get("weights"))
        settings = settings_to_evaluate(trained, values, options.run)
    elif values.get("resume", "auto") != "auto":
        settings = Settings(**settings_to_resume(values["resume"], values))
    else:
        settings = Settings(**values)
    try:
        train(settings, say, trained=trained)
    finally:
        if distributed.is_initialized():  # its threads may abort a process that ends while they still run
            distributed.destroy_process_group()


def add_compare(command: argparse.ArgumentParser) -> None:
    """The flags of :func:`vision_attn.tools.comparison.compare.compare`, and those of the runs."""
    from vision_attn.tools.comparison.arms import ARMS
    from vision_attn.tools.training.settings import Settings

    # Of the command's own kind, which says what a mistyped flag may have been meant to be.
    of_an_arm = type(command)(prog="vision-attn compare --arms", add_help=False, allow_abbrev=False)
    of_an_arm.usage = "%(prog)s 'NAME=ARM [FLAG ...]' ..."
    add_config(of_an_arm)
    add_fields(of_an_arm, Settings, leave_out=DECIDED)
    command.set_defaults(command=partial(run_compare, of_an_arm))
    command.usage = "vision-attn compare --data FOLDER [--arms ARM ...] [--seeds N ...] [--jobs N] [FLAG ...]"
    command.description = (
        "Train a network with one block and with others, by one recipe, over seeds, and say what the differences are "
        "worth. The same command goes on where it was interrupted. Flags of train are for all arms that they suit."
    )
    add = command.add_argument_group("comparison").add_argument
    text = (
        f"{', '.join(ARMS)}; or one of yours, NAME=ARM FLAGS with flags of train, such as 'rope=attention "
        "--block-options position=Rope2d()'; the last is compared with the others (default: plain convolution se "
        "attention)"
    )
    add("--arms", nargs="+", default=["plain", "convolution", "se", "attention"], metavar="ARM", help=text)
    text = "arms of which the best on images held out from training becomes the last of --arms; see --hold-out"
    add("--candidates", nargs="+", default=[], metavar="ARM", help=text)
    add("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], metavar="N", help="of each arm (default: 0 1 2 3 4)")
    text = "runs side by side (default: as many as GPUs, or as cores)"
    add("--jobs", type=int, metavar="N", help=text)
    text = "compare the last arm with the others, or each with each (default: %(default)s)"
    add("--pairs", choices=("last", "all"), default="last", help=text)
    add("-o", "--output", default="runs/compare", help="folder of the runs and the tables (default: %(default)s)")
    add_config(command)
    add_fields(command, Settings, leave_out=(*DECIDED, "block"))


def run_compare(of_an_arm: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    from vision_attn.tools.comparison.arms import recipe, settings_of_arm
    from vision_attn.tools.comparison.compare import compare
    from vision_attn.tools.training.settings import Settings

    found = given(Settings, options)
    common = recipe({name: value for name, value in found.items() if name not in (*DECIDED, "block")})
    share = common.pop("hold_out", 0.1) if options.candidates else None

    def arms(words: list[str], **further: Any) -> dict[str, dict[str, Any]]:
        found = {}
        for name, sign, text in (word.partition("=") for word in words):
            flags = shlex.split(text)
            base = flags.pop(0) if flags and not flags[0].startswith("-") else "attention" if sign else name
            if not name or "/" in name or name in found:
                raise ValueError(f"arms must have names that differ and are such as folders have; got {name!r}")
            found[name] = {**settings_of_arm(base, given(Settings, of_an_arm.parse_args(flags)), common), **further}
        return found

    chosen = arms([*options.arms, *options.candidates])
    how = {"seeds": options.seeds, "jobs": options.jobs, "command": shlex.join(["vision-attn", *sys.argv[1:]])}
    if options.candidates:
        folder = f"{options.output}/candidates"
        best = compare(arms(options.candidates, hold_out=share), output=folder, pairs="all", **how).best
        print(f"\nThe best of the candidates, on images held out from training: {best}\n")
        chosen = {**arms(options.arms), best: chosen[best]}
    compare(chosen, output=options.output, pairs=options.pairs, **how)


def add_demo(command: argparse.ArgumentParser) -> None:
    """The flags of :func:`vision_attn.tools.comparison.demo.demo`."""
    command.set_defaults(command=run_demo)
    command.add_argument(
        "-o", "--output", default="demo-output", help="folder for what it makes (default: %(default)s)"
    )
    command.add_argument("--epochs", type=int, default=3, help="epochs of each arm (default: %(default)s)")
    command.add_argument("--seed", type=int, default=0, help="seed of each arm (default: %(default)s)")
    command.add_argument("--jobs", type=int, metavar="N", help="arms side by side (default: as many as cores)")


def run_demo(options: argparse.Namespace) -> None:
    from vision_attn.tools.comparison.demo import demo

    demo(options.output, epochs=options.epochs, seed=options.seed, jobs=options.jobs)

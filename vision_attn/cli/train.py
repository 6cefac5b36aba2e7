"""``vision-attn train``: a network trained, fine-tuned or evaluated."""

from __future__ import annotations

import argparse

from vision_attn.cli.commands import adder, given

__all__ = ["HELP", "add_arguments"]

#: What the command is for.
HELP = "train, fine-tune or evaluate an image classifier, with attention inserted or not"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """A flag for each of :class:`vision_attn.training.settings.Settings`; one not given keeps its default there."""
    from vision_attn.training.settings import CHOICES, FIELDS, Settings, type_of

    command.set_defaults(command=run)
    command.argument_default = argparse.SUPPRESS
    command.add_argument(
        "--config",
        metavar="SETTINGS.YAML",
        help="take the settings of another run, all but --output, --overwrite, --resume and --test-only; flags "
        "override them, and --no-amp and the like turn off what is on there",
    )
    add = adder(Settings(data=""))
    group: argparse._ActionsContainer = command
    for name, field in FIELDS.items():
        about, (kind, many), flag = field.metadata, type_of(name), name.replace("_", "-")
        if about["group"]:
            group = command.add_argument_group(about["group"])
        if kind is bool:
            add(group, f"--{flag}", about["text"], action="store_true")
            group.add_argument(f"--no-{flag}", dest=name, action="store_false", help=argparse.SUPPRESS)
        else:
            how = {"nargs": "+" if many else None, "choices": CHOICES.get(name) or None, "metavar": about["metavar"]}
            add(group, f"--{flag}", about["text"], type=kind, **how)


def run(options: argparse.Namespace) -> None:
    from vision_attn.training.settings import Settings
    from vision_attn.training.train import train

    try:
        train(Settings(**given(Settings, options)))
    finally:
        leave_process_group()


def leave_process_group() -> None:
    """A process that ends while its group's threads still run may be aborted by them after its work is done."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()

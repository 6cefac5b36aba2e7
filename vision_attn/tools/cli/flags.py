"""Flags that are made of settings, and what several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import fields
from typing import Any

from vision_attn.text import escaped

__all__ = ["add_fields", "add_trained", "given", "say"]


def say(text: object) -> None:
    """Print lines in which names and what files say of themselves steer no terminal."""
    print("\n".join(map(escaped, str(text).split("\n"))), flush=True)


def add_fields(command: argparse.ArgumentParser, settings: type, leave_out: Collection[str] = ()) -> None:
    """A flag for each field of a dataclass of settings but some; one that is not given sets nothing."""
    from vision_attn.tools.training.settings import type_of

    command.argument_default = argparse.SUPPRESS
    group: argparse._ActionsContainer = command
    for field in fields(settings):
        about, (kind, many), flag = field.metadata, type_of(field), field.name.replace("_", "-")
        if about["group"]:
            group = command.add_argument_group(about["group"])
        if field.name in leave_out:
            continue
        if kind is bool:
            group.add_argument(f"--{flag}", help=about["text"], action="store_true")
            group.add_argument(f"--no-{flag}", dest=field.name, action="store_false", help=argparse.SUPPRESS)
            continue
        default: Any = field.default
        default = " ".join(default) if many and default else default
        text = about["text"] if default in (None, ()) else f"{about['text']} (default: {default})"
        choices = about["allowed"] if kind is str and not about["metavar"] else None
        options = {"nargs": "+" if many else None, "choices": choices or None, "metavar": about["metavar"]}
        names = ["-o"] if flag == "output" else []
        group.add_argument(*names, f"--{flag}", help=text, type=kind, **options)


def add_config(command: argparse.ArgumentParser) -> None:
    """The flag by which a run begins from the settings of another."""
    text = (
        "settings of another run, but for the last group of flags; flags override them, --no-amp turns off --amp there"
    )
    command.add_argument("--config", metavar="SETTINGS.YAML", default=argparse.SUPPRESS, help=text)


def given(settings: type, options: argparse.Namespace) -> dict[str, Any]:
    """The settings that flags were given for, and beside them those of the file that ``--config`` names.

    >>> from vision_attn.tools.training.settings import Settings
    >>> given(Settings, argparse.Namespace(lr=0.1, insert=["layer3"], traceback=False))
    {'insert': ('layer3',), 'lr': 0.1}
    """
    values = {field.name: getattr(options, field.name) for field in fields(settings) if hasattr(options, field.name)}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    if ":" in values.get("block", ""):
        from vision_attn.tools.training.network import add_block

        add_block(values["block"])
    if "config" not in options:
        return values
    from vision_attn.tools.training.run_folder import read_config

    return {**read_config(options.config), **values}


def add_trained(command: argparse.ArgumentParser) -> None:
    """What names a trained network."""
    text = "folder of a run, its best.pth, last.pth or adapter.safetensors, or a folder that was exported"
    command.add_argument("run", metavar="RUN", help=text)
    text = (
        "of an adapter: its network's checkpoint (default: the one its run began from; 'pretrained': fetch the name's)"
    )
    command.add_argument("--weights", metavar="FILE", help=text)

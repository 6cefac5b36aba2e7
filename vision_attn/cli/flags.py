"""Flags from the settings of a command, and settings from its flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from typing import Any

__all__ = ["adder", "given"]


def adder(defaults: object) -> Callable[..., None]:
    """A function that adds a flag for a setting and writes its default, if there is one to speak of, into the help."""

    def add(group: argparse._ActionsContainer, flag: str, text: str, **options: Any) -> None:
        default = getattr(defaults, flag.lstrip("-").replace("-", "_"))
        if default is not None and default is not False and default not in ((), ""):
            text = f"{text} (default: {default})"
        group.add_argument(flag, help=text, **options)

    return add


def given(settings: type, options: argparse.Namespace) -> dict[str, Any]:
    """The settings that flags were given for, and beside them those of the file that ``--config`` names.

    >>> from vision_attn.training.settings import Settings
    >>> given(Settings, argparse.Namespace(lr=0.1, insert=["layer3"], traceback=False))
    {'insert': ('layer3',), 'lr': 0.1}
    """
    values = {field.name: getattr(options, field.name) for field in fields(settings) if hasattr(options, field.name)}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    if "config" not in options:
        return values
    from vision_attn.training.run_folder import read_config

    return {**read_config(options.config), **values}

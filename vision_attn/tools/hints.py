"""Descriptions of the values and defaults of flags, for the help of the command line."""

from typing import Any

from tyro.conf import arg


def hint(metavar: str, unset: str = "default: none", *aliases: str) -> Any:
    """Describe the value of a flag, and its default in words if that is None or empty."""

    def describe_default(default: str) -> str:
        return f"({unset})" if default in ("None", "") else f"(default: {default})"

    return arg(metavar=metavar, help_behavior_hint=describe_default, aliases=aliases)

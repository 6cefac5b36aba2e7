"""A file of settings, ``settings.yaml``, as a run writes it or as anyone does: read without running anything."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from vision_attn.training.settings import FIELDS, Settings

__all__ = ["read_config", "read_yaml"]

#: Bytes of a file of settings; that of a run has about 1,500.
LARGEST = 2**16


class Loader(yaml.SafeLoader):
    """Plain values alone, without the aliases by which a short file stands for a very long one."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.peek_event().anchor is not None:
            raise yaml.YAMLError("it has an anchor or an alias")
        return super().compose_node(parent, index)


# YAML 1.1 takes 1e-3, as people write it, for a text.
Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+e[-+]?\d+$", re.I), list("-+0123456789"))


def read_yaml(path: str | Path) -> Any:
    """What a file of settings holds.

    Raises:
        ValueError: it cannot be read, is no YAML, or is larger than settings are.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(LARGEST + 1)
        if len(text) > LARGEST:
            raise ValueError(f"it has more than {LARGEST:,} bytes")
        return yaml.load(text, Loader)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no file of settings: {' '.join(str(error).split())}") from error


def read_config(path: str | Path) -> dict[str, Any]:
    """The settings of another run, without those that each run has of its own, such as its folder.

    Raises:
        ValueError: the file is not one of settings that this version knows.
    """
    try:
        values = Settings.values_in(read_yaml(path))
    except ValueError as error:
        raise ValueError(f"config: {error}") from error
    return {name: value for name, value in values.items() if FIELDS[name].metadata["concerns"] != "run"}

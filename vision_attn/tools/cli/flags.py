"""Flags of the commands that train networks: settings in groups."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Positional, arg

from vision_attn.tools.cli.visualize import Block
from vision_attn.tools.hints import hint
from vision_attn.tools.training.settings import Blocks, Data, Machine, Model, Output, Settings, Training

Config = Annotated[Path | None, hint("FILE")]


@dataclass(frozen=True)
class Variant:
    """Flags of one variant of a comparison."""

    data: Data = Data()
    model: Model = Model()
    blocks: Blocks = Blocks()
    training: Training = Training()
    machine: Machine = Machine()


@dataclass(frozen=True)
class Train(Variant):
    """Flags of ``vision-attn train``."""

    output: Output = Output()
    # Folder of another run, or its settings.yaml. Flags override its settings.
    config: Config = None


@dataclass(frozen=True)
class Evaluate:
    """Flags of ``vision-attn evaluate``."""

    # Folder of a training run, folder written by va.save_model, or hf-hub:OWNER/NAME.
    run: Annotated[Positional[Path], arg(metavar="RUN")]

    block: Block = None  # Class of the inserted blocks.
    data: Data = Data()
    machine: Machine = Machine()


@dataclass(frozen=True)
class Comparison:
    """Variants, seeds and runs."""

    # Variants to compare: names, or NAME=VARIANT FLAGS such as 'rope=attention --block-options position=Rope()'.
    variants: Annotated[tuple[str, ...], hint("VARIANT [VARIANT ...]")] = ("plain", "convolution", "se", "attention")
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)  # Random seeds of each variant.
    # Number of runs in parallel.
    jobs: Annotated[int | None, hint("INT", "default: number of GPUs, or of cores")] = None
    # Folder for the runs and the tables.
    output: Annotated[Path, hint("FOLDER", "", "-o")] = Path("runs/compare")


@dataclass(frozen=True)
class Compare(Variant):
    """Flags of ``vision-attn compare``."""

    comparison: Comparison = Comparison()
    # Folder of a run to compare, or its settings.yaml. Flags override its settings.
    config: Config = None


def parse(kind: Any, words: list[str], command: str, description: str | None = None) -> tuple[Any, dict[str, Any]]:
    """Parse a command line; return the parsed flags, and the settings that it contains."""
    options: Any = {"prog": f"vision-attn {command}", "description": cleandoc(description or "")}
    found = tyro.cli(kind, args=words, config=(tyro.conf.OmitArgPrefixes,), **options)
    flags = {word.partition("=")[0].replace("-", "_") for word in words}
    passed = {flag.removeprefix("__").removeprefix("no_") for flag in flags}
    groups = [group for group in vars(found).values() if isinstance(group, Settings.__bases__)]
    values = {name: value for group in groups for name, value in vars(group).items()}
    defaults = vars(Settings())
    return found, {name: value for name, value in values.items() if name in passed or value != defaults[name]}

"""What a benchmark measures and how, each said once: flags are made of it. Nothing heavy is imported for help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg


@dataclass(frozen=True)
class Contest:
    """What is measured, and how."""

    rows: tuple[str, ...] = ("implementations",)  # what is compared: implementations, libraries, variants, … or all
    swap: tuple[str, ...] = ()  # in place of rows, networks by name, before and after swap_
    shapes: tuple[str, ...] = ()  # of maps: batch,channels,height,width (default: the row's own)
    heads: int | None = None  # of every contestant (default: the row's own)
    device: Literal["cpu", "cuda"] | None = None  # where it runs (default: cuda, if there is one)
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"  # of maps and weights
    threads: int | None = None  # of the CPU (default: as many as torch has)
    rounds: int = 15  # measurements of each contestant
    output: Annotated[Path | None, arg(aliases=["-o"])] = None  # JSON file for the results, written after each table

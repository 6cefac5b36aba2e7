"""``vision-attn bench``: attention timed beside other libraries'."""

from __future__ import annotations

import argparse

from vision_attn.cli.flags import adder, given

__all__ = ["HELP", "add_arguments"]

#: What the command is for.
HELP = "time and memory of attention beside other libraries' and the floor"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The flags of :class:`vision_attn.benchmark.settings.Settings`; one that is not given keeps its default there.

    Args:
        command: the parser that they are added to.
    """
    from vision_attn.benchmark.settings import DEVICES, DTYPES, RELATIVE_SHAPES, SHAPES, Settings

    command.set_defaults(command=run)
    command.argument_default = argparse.SUPPRESS
    add = adder(Settings())
    plain, relative = (" ".join(",".join(map(str, shape)) for shape in shapes) for shapes in (SHAPES, RELATIVE_SHAPES))

    add(
        command, "--shapes", f"batch,channels,height,width of the maps (default: {plain})", nargs="+", metavar="B,C,H,W"
    )
    add(
        command,
        "--relative-shapes",
        "the same for attention with relative positions; where only one of the two is given, the other is left out "
        f"(default: {relative})",
        nargs="+",
        metavar="B,C,H,W",
    )
    add(command, "--heads", "heads of every contestant", type=int)
    add(command, "--device", "cpu or cuda (default: cuda where there is one)", choices=DEVICES)
    add(command, "--dtype", "type of maps and weights", choices=tuple(DTYPES))
    add(command, "--threads", "threads of the CPU (default: as many as torch has)", type=int)
    add(command, "--rounds", "measurements of each contestant", type=int)
    add(command, "--channels-last", "maps come in the channels-last memory format", action="store_true")
    add(command, "--output", "JSON file for all that was measured", metavar="FILE")


def run(options: argparse.Namespace) -> None:
    from vision_attn.benchmark.run import run_benchmark
    from vision_attn.benchmark.settings import Settings, parse_shape

    values = given(Settings, options)
    for name in ("shapes", "relative_shapes"):
        if name in values:
            values[name] = tuple(parse_shape(name, text) for text in values[name])
    run_benchmark(Settings(**values))

"""``vision-attn bench``: attention measured beside other libraries'."""

from __future__ import annotations

import argparse

from vision_attn.cli.flags import adder, given

__all__ = ["HELP", "add_arguments"]

#: What the command is for.
HELP = "time and memory of attention beside other libraries'"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The flags of :class:`vision_attn.benchmark.plan.Plan`; one that is not given keeps its default there."""
    from vision_attn.benchmark.contestants import COMPARISONS, LAYOUTS
    from vision_attn.benchmark.plan import DEVICES, DTYPES, ROWS, Plan

    command.set_defaults(command=run)
    command.argument_default = argparse.SUPPRESS
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.epilog = "rows:\n" + "\n".join(
        [f"  {name:<16} {comparison.text}" for name, comparison in COMPARISONS.items()]
        + ["  all              all of these but compiled, which takes minutes"]
    )
    add = adder(Plan())
    add(command, "--rows", "what is measured, by name; see below", nargs="+", choices=ROWS, metavar="NAME")
    text = "batch,channels,height,width of the maps; of the images for backbone (default: some for each of the rows)"
    add(command, "--shapes", text, nargs="+", metavar="B,C,H,W")
    add(command, "--heads", "heads of every contestant (default: by the shape; 8 at those given)", type=int)
    text = "memory formats of the maps: nchw, channels-last (default: by the rows)"
    add(command, "--layouts", text, nargs="+", choices=tuple(LAYOUTS), metavar="LAYOUT")
    add(command, "--device", "cpu or cuda (default: cuda where there is one)", choices=DEVICES)
    add(command, "--dtype", "type of maps and weights", choices=tuple(DTYPES))
    add(command, "--threads", "threads of the CPU (default: as many as torch has)", type=int)
    add(command, "--rounds", "measurements of each contestant", type=int)
    add(command, "--output", "JSON file for all that was measured", metavar="FILE")
    add(command, "--chart", "PNG file for time and memory against tokens", metavar="FILE")


def run(options: argparse.Namespace) -> None:
    from vision_attn.benchmark.plan import Plan, parse_shape
    from vision_attn.benchmark.run import run_benchmark

    values = given(Plan, options)
    if "shapes" in values:
        values["shapes"] = tuple(map(parse_shape, values["shapes"]))
    run_benchmark(Plan(**values))

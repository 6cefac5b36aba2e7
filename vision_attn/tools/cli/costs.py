"""The commands that say what attention costs: ``inspect`` before it is there, ``bench`` beside other libraries'."""

from __future__ import annotations

import argparse
from typing import Any

from vision_attn.tools.cli.flags import add_fields, given, say

__all__ = ["add_bench", "add_inspect"]


def add_inspect(command: argparse.ArgumentParser) -> None:
    """The arguments of :func:`vision_attn.networks.inspection.inspect_model`."""
    command.set_defaults(command=run_inspect)
    add = command.add_argument
    add("model", metavar="MODEL", help="a name that timm knows, one of ours, or torchvision:resnet18")
    text = "side of the images in pixels, or height and width (default: the model's, else 224)"
    add("--input-size", type=int, nargs="+", metavar="N", help=text)
    add("--batch-size", type=int, default=128, help="images in a step of training (default: %(default)s)")
    add("--insert", nargs="+", default=[], metavar="SITE", help="insert there: modules (globs) or stages by index")
    add("--at", choices=("after", "before", "branch"), default="after", help="of these sites (default: %(default)s)")
    add("--num-heads", type=int, help="heads of the attention (default: 8, or as many up to 8 as divide the channels)")
    text = "full, rows, columns, 'Window(7)', … or a line of einx (default: %(default)s)"
    add("--pattern", default="full", help=text)
    add("--dtype", choices=("float32", "float16", "bfloat16"), default="float32", help="(default: %(default)s)")
    text = "memory that there is (default: the GPU's, else the machine's)"
    add("--memory-limit", type=float, metavar="GIB", help=text)


def run_inspect(options: argparse.Namespace) -> None:
    import torch

    from vision_attn.networks.checkpoints.specification import from_word
    from vision_attn.networks.insertion import parse_sites
    from vision_attn.networks.inspection import inspect_model

    if options.at != "after" and not options.insert:
        raise ValueError("at applies to what is inserted, and insert is empty")
    size, dtype = options.input_size, getattr(torch, options.dtype)
    how: dict[str, Any] = {name: getattr(options, name) for name in ("batch_size", "at", "num_heads", "memory_limit")}
    if options.pattern != "full":  # of the block only what is not its default is shown
        how["pattern"] = from_word(options.pattern.removeprefix("va."))
    how |= {"input_size": size[0] if size and len(size) == 1 else size, **parse_sites(options.insert)}
    say(inspect_model(options.model, dtype=dtype, **how))


def add_bench(command: argparse.ArgumentParser) -> None:
    """A flag for each part of :class:`vision_attn.tools.benchmark.plan.Plan`."""
    from vision_attn.tools.benchmark.plan import COMPARISONS, ROWS, Plan

    command.set_defaults(command=run_bench)
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    rows = {name: comparison.text for name, comparison in COMPARISONS.items() if name in ROWS}
    rows["all"] = "all of these but compiled, which takes minutes"
    command.epilog = "\n".join(["rows:", *(f"  {name:<16} {text}" for name, text in rows.items())])
    add_fields(command, Plan)


def run_bench(options: argparse.Namespace) -> None:
    from vision_attn.tools.benchmark.plan import Plan, parse_shape
    from vision_attn.tools.benchmark.run import run_benchmark

    values = given(Plan, options)
    if "shapes" in values:
        values["shapes"] = tuple(map(parse_shape, values["shapes"]))
    run_benchmark(Plan(**values))

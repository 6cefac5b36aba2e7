"""The short commands, and flags from settings. What a command runs is imported when it runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from typing import Any

__all__ = ["add_bench", "add_demo", "add_export", "adder", "given"]


def adder(defaults: object) -> Callable[..., None]:
    """A function that adds a flag for a setting and writes its default, if there is one to speak of, into the help."""

    def add(group: argparse._ActionsContainer, flag: str, text: str, **options: Any) -> None:
        default = getattr(defaults, flag.lstrip("-").replace("-", "_"))
        if default is not None and default is not False and default not in ((), ""):
            text = f"{text} (default: {' '.join(default) if isinstance(default, tuple) else default})"
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


def add_demo(command: argparse.ArgumentParser) -> None:
    """The flags of :func:`vision_attn.training.demo.demo`."""
    command.set_defaults(command=run_demo)
    command.add_argument("--output", default="demo-output", help="folder for what it makes (default: %(default)s)")
    command.add_argument("--epochs", type=int, default=5, help="epochs of each arm (default: %(default)s)")
    command.add_argument("--seed", type=int, default=0, help="seed of each arm (default: %(default)s)")


def run_demo(options: argparse.Namespace) -> None:
    from vision_attn.training.demo import demo

    demo(options.output, epochs=options.epochs, seed=options.seed)


def add_export(command: argparse.ArgumentParser) -> None:
    """The arguments of :func:`vision_attn.export.export.export_classifier`."""
    command.set_defaults(command=run_export)
    add = command.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="best.pth or last.pth of a run, or its folder for best.pth")
    add(
        "--output",
        required=True,
        help="file to write; its ending says the format: .onnx, .pt2 (torch.export), .safetensors, none for a folder "
        "of timm's",
    )
    add(
        "--format",
        choices=("onnx", "torch-export", "timm", "safetensors"),
        help="format, where the ending does not say it",
    )
    add(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        help="whether the graph of onnx and torch-export takes pixels in 0…1 and normalises them itself (default: it "
        "does)",
    )


def run_export(options: argparse.Namespace) -> None:
    from vision_attn.export.export import export_classifier
    from vision_attn.export.from_run import open_run

    classifier = open_run(options.checkpoint)
    print(export_classifier(classifier, options.output, format=options.format, normalize=options.normalize))


def add_bench(command: argparse.ArgumentParser) -> None:
    """The flags of :class:`vision_attn.benchmark.plan.Plan`; one that is not given keeps its default there."""
    from vision_attn.benchmark.plan import COMPARISONS, DTYPES, LAYOUTS, ROWS, Plan

    command.set_defaults(command=run_bench)
    command.argument_default = argparse.SUPPRESS
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    rows = {name: comparison.text for name, comparison in COMPARISONS.items()}
    rows["all"] = "all of these but compiled, which takes minutes"
    command.epilog = "\n".join(["rows:", *(f"  {name:<16} {text}" for name, text in rows.items())])
    add = adder(Plan())
    add(command, "--rows", "what is measured, by name; see below", nargs="+", choices=ROWS, metavar="NAME")
    text = "batch,channels,height,width of the maps; of the images for backbone (default: some for each of the rows)"
    add(command, "--shapes", text, nargs="+", metavar="B,C,H,W")
    add(command, "--heads", "heads of every contestant (default: by the shape; 8 at those given)", type=int)
    text = "memory formats of the maps: nchw, channels-last (default: by the rows)"
    add(command, "--layouts", text, nargs="+", choices=tuple(LAYOUTS), metavar="LAYOUT")
    add(command, "--device", "cpu or cuda (default: cuda where there is one)", choices=("cpu", "cuda"))
    add(command, "--dtype", "type of maps and weights", choices=tuple(DTYPES))
    add(command, "--threads", "threads of the CPU (default: as many as torch has)", type=int)
    add(command, "--rounds", "measurements of each contestant", type=int)
    add(command, "--output", "JSON file for all that was measured", metavar="FILE")
    add(command, "--chart", "PNG file for time and memory against tokens", metavar="FILE")


def run_bench(options: argparse.Namespace) -> None:
    from vision_attn.benchmark.plan import Plan, parse_shape
    from vision_attn.benchmark.run import run_benchmark

    values = given(Plan, options)
    if "shapes" in values:
        values["shapes"] = tuple(map(parse_shape, values["shapes"]))
    run_benchmark(Plan(**values))

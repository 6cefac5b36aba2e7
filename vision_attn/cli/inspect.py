"""``vision-attn inspect``: what attention would cost, and where to put it."""

from __future__ import annotations

import argparse

__all__ = ["HELP", "add_arguments"]

#: What the command is for.
HELP = "what attention would cost at each stage of a network, and where to put it"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of :func:`vision_attn.inspection.inspect_model`."""
    command.set_defaults(command=run)
    add = command.add_argument
    add("model", metavar="MODEL", help="a name that timm knows, one of ours, or torchvision:resnet18")
    add(
        "--input-size",
        type=int,
        nargs="+",
        metavar="N",
        help="side of the images in pixels, or height and width (default: the model's, else 224)",
    )
    add("--batch-size", type=int, default=128, help="images in a step of training (default: %(default)s)")
    add("--insert", nargs="+", default=[], metavar="SITE", help="insert there: modules (globs) or stages by index")
    add("--at", choices=("after", "before", "branch"), default="after", help="of these sites (default: %(default)s)")
    add("--num-heads", type=int, default=8, help="heads of the attention (default: %(default)s)")
    add(
        "--pattern", default="full", help="full, rows, columns, 'Window(7)', … or a line of einx (default: %(default)s)"
    )
    add("--dtype", choices=("float32", "float16", "bfloat16"), default="float32", help="(default: %(default)s)")
    add(
        "--memory-limit",
        type=float,
        metavar="GIB",
        help="memory that there is (default: the GPU's, else the machine's)",
    )


def run(options: argparse.Namespace) -> None:
    import torch

    from vision_attn.checkpoints.specification import from_word
    from vision_attn.insertion import parse_sites
    from vision_attn.inspection import inspect_model

    if options.at != "after" and not options.insert:
        raise ValueError("at applies to what is inserted, and insert is empty")
    size, pattern = options.input_size, from_word(options.pattern.removeprefix("va."))
    found = inspect_model(
        options.model,
        input_size=size[0] if size and len(size) == 1 else size,
        batch_size=options.batch_size,
        **parse_sites(options.insert),
        at=options.at,
        num_heads=options.num_heads,
        dtype=getattr(torch, options.dtype),
        memory_limit=options.memory_limit,
        **({} if pattern == "full" else {"pattern": pattern}),
    )
    print(found)

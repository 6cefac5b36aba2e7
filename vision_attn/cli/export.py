"""``vision-attn export``: a trained network as a file that others run."""

from __future__ import annotations

import argparse

__all__ = ["HELP", "add_arguments"]

#: What the command is for.
HELP = "a trained network as a file that others run: ONNX, torch.export, timm, safetensors"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of :func:`vision_attn.export.export.export_classifier`."""
    command.set_defaults(command=run)
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


def run(options: argparse.Namespace) -> None:
    from vision_attn.export.export import export_classifier
    from vision_attn.export.from_run import open_run

    classifier = open_run(options.checkpoint)
    print(export_classifier(classifier, options.output, format=options.format, normalize=options.normalize))

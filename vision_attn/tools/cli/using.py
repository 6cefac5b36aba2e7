"""The commands for what was trained, and for files of weights: ``predict``, ``export`` and ``convert``."""

from __future__ import annotations

import argparse

from vision_attn.checks import check_counts
from vision_attn.tools.cli.flags import add_trained, say

__all__ = ["add_convert", "add_export", "add_predict"]


def add_predict(command: argparse.ArgumentParser) -> None:
    """The arguments of :meth:`vision_attn.tools.export.classifier.Classifier.predict`."""
    command.set_defaults(command=run_predict)
    add_trained(command)
    command.add_argument("images", nargs="+", metavar="IMAGE", help="image files, or folders of them")
    command.add_argument("--top", type=int, default=5, help="classes of each image (default: %(default)s)")
    command.add_argument("-o", "--output", metavar="CSV", help="file for a table of all images")


def run_predict(options: argparse.Namespace) -> None:
    from vision_attn.tools.export.classifier import images_in, load_run, write_predictions

    check_counts(top=options.top)
    run, paths, found = load_run(options.run, weights=options.weights), images_in(options.images), []
    for path, best in zip(paths, run.predict(paths, top=options.top), strict=True):
        found.append((path, best))
        say(f"{path}: {', '.join(f'{name} {100 * share:.1f} %' for name, share in best)}")
    if options.output:
        write_predictions(options.output, found)


def add_export(command: argparse.ArgumentParser) -> None:
    """The arguments of :func:`vision_attn.tools.export.export.export_classifier`."""
    command.set_defaults(command=run_export)
    add_trained(command)
    command.add_argument(
        "-o",
        "--output",
        required=True,
        help="file to write; its ending says the format: .onnx, .pt2 (torch.export), .safetensors, none for a folder "
        "that load_run reads (and timm, where it knows the network with its blocks)",
    )
    formats = ("onnx", "torch-export", "folder", "timm", "safetensors")
    command.add_argument("--format", choices=formats, help="format, where the ending does not say it")
    text = "whether the graph of onnx and torch-export normalises pixels in 0…1 itself (default: it does)"
    command.add_argument("--normalize", action=argparse.BooleanOptionalAction, help=text)


def run_export(options: argparse.Namespace) -> None:
    from vision_attn.tools.export.classifier import load_run
    from vision_attn.tools.export.export import export_classifier

    classifier = load_run(options.run, weights=options.weights)
    say(export_classifier(classifier, options.output, format=options.format, normalize=options.normalize))


def add_convert(command: argparse.ArgumentParser) -> None:
    """The arguments of :func:`vision_attn.networks.convert.convert_file`."""
    from vision_attn.networks.convert.files import LAYOUTS

    command.set_defaults(command=run_convert)
    add = command.add_argument
    add("source", metavar="IN", help="weights or a checkpoint: .safetensors, .pth, or .weights.h5 of Keras")
    add("output", metavar="OUT", help="file to write, .safetensors")
    add("--from", dest="layout", required=True, choices=tuple(LAYOUTS), help="how its attention is saved")
    add("--prefix", default="", help="path of the layers, with globs: 'blocks.*.attn' (default: the file is one layer)")
    add("--num-heads", type=int, help="heads of each layer (a file of Keras says it itself)")
    add("--rank", type=int, default=2, help="axes of the maps that the blocks are for (default: %(default)s)")
    add("--dry-run", action="store_true", help="print the mapping, write nothing")


def run_convert(options: argparse.Namespace) -> None:
    from vision_attn.networks.convert.files import convert_file

    arguments = ("layout", "prefix", "num_heads", "rank", "dry_run")
    say(convert_file(options.source, options.output, **{name: getattr(options, name) for name in arguments}))

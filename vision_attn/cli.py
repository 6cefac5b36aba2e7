"""The command line, ``vision-attn``: each command is one function of the library, each flag one of its settings."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import vision_attn
from vision_attn.attend import IMPLS
from vision_attn.benchmark.errors import BenchmarkError
from vision_attn.checkpoints import CheckpointError
from vision_attn.export.errors import ExportError
from vision_attn.training.errors import DataError, Interrupted, TrainingError

__all__ = ["main"]

#: Exit codes: what was asked for cannot be done as asked; it was tried and failed; it was interrupted.
BAD_USAGE, FAILURE, INTERRUPTED = 2, 1, 130

#: Packages that commands need beyond what the library itself does, by the extra that brings them.
EXTRAS = {
    "train": ("accelerate", "matplotlib", "psutil", "sklearn", "tensorboard", "tqdm", "yaml"),
    "export": ("onnx", "onnxruntime", "onnxscript"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of ``vision-attn``; errors are said on standard error.

    Args:
        arguments: those of the command line; this process's own when None.

    Returns:
        The exit code: 0, 1 for a failure, 2 for bad usage, 130 when interrupted by Ctrl-C and 143 by SIGTERM.

    Raises:
        SystemExit: there is no such command or flag, with code 2; after ``--help`` and ``--version``, with code 0.

    >>> main(["inspect", "resnet-that-is-none"])
    2
    """
    options = parser().parse_args(arguments)
    try:
        options.command(options)
    except Interrupted as stop:
        print(f"vision-attn: {stop}", file=sys.stderr)
        return 128 + stop.signal
    except KeyboardInterrupt:
        goes_on = "; a run that has saved its last.pth goes on with --resume" if options.command is train else ""
        print(f"vision-attn: interrupted{goes_on}", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        code = exit_code(error)
        if code is None or options.traceback:
            traceback.print_exc()
            return code or FAILURE
        print(f"vision-attn: error: {explain(error)}", file=sys.stderr)
        return code
    return 0


def exit_code(error: Exception) -> int | None:
    """What an error means to a person; None where it is a fault of the program's own."""
    if isinstance(error, ValueError):
        return BAD_USAGE
    if isinstance(
        error, (BenchmarkError, CheckpointError, DataError, ExportError, TrainingError, OSError)
    ) or missing_extra(error):
        return FAILURE
    return None


def missing_extra(error: Exception) -> str | None:
    """The extra that a package which is not installed belongs to."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return next((extra for extra, packages in EXTRAS.items() if package in packages), None)


def explain(error: Exception) -> str:
    extra = missing_extra(error)
    return f"{error}: this command needs pip install 'vision-attn[{extra}]'" if extra else str(error)


def train(options: argparse.Namespace) -> None:
    from vision_attn.training.settings import Settings
    from vision_attn.training.train import train

    try:
        train(Settings(**given(Settings, options)))
    finally:
        leave_process_group()


def given(settings: type, options: argparse.Namespace) -> dict[str, Any]:
    """The settings that flags were given for."""
    values = {field.name: getattr(options, field.name) for field in fields(settings) if hasattr(options, field.name)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def leave_process_group() -> None:
    """A process that ends while its group's threads still run may be aborted by them after its work is done."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def export(options: argparse.Namespace) -> None:
    from vision_attn.export.export import export_classifier
    from vision_attn.export.run import open_run

    classifier = open_run(options.checkpoint)
    print(export_classifier(classifier, options.output, format=options.format, normalize=options.normalize))


def demo(options: argparse.Namespace) -> None:
    from vision_attn.training.demo import demo

    demo(options.output, epochs=options.epochs, seed=options.seed)


def bench(options: argparse.Namespace) -> None:
    from vision_attn.benchmark.run import run_benchmark
    from vision_attn.benchmark.settings import Settings, parse_shape

    values = given(Settings, options)
    for name in ("shapes", "relative_shapes"):
        if name in values:
            values[name] = tuple(parse_shape(name, text) for text in values[name])
    run_benchmark(Settings(**values))


def inspect(options: argparse.Namespace) -> None:
    import torch

    from vision_attn.checkpoints.specification import from_code
    from vision_attn.insertion import parse_sites
    from vision_attn.inspection import inspect_model

    if options.at != "after" and not options.insert:
        raise ValueError("at applies to what is inserted, and insert is empty")
    size, pattern = options.input_size, options.pattern.removeprefix("va.")
    found = inspect_model(
        options.model,
        input_size=size[0] if size and len(size) == 1 else size,
        batch_size=options.batch_size,
        **parse_sites(options.insert),
        at=options.at,
        num_heads=options.num_heads,
        dtype=getattr(torch, options.dtype),
        memory_limit=options.memory_limit,
        **({} if pattern == "full" else {"pattern": from_code(pattern) if pattern[:1].isupper() else pattern}),
    )
    print(found)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="vision-attn", description="Attention inside convolutional networks.", allow_abbrev=False
    )
    top.add_argument("--version", action="version", version=f"vision-attn {vision_attn.__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--traceback", action="store_true", help="show where an error came from")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    add_demo(
        commands.add_parser("demo", parents=[common], allow_abbrev=False, help="what attention is for, in minutes")
    )
    add_train(
        commands.add_parser(
            "train",
            parents=[common],
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            help="train, fine-tune or evaluate an image classifier, with attention inserted or not",
        )
    )
    add_export(
        commands.add_parser(
            "export",
            parents=[common],
            allow_abbrev=False,
            help="a trained network as a file that others run: ONNX, torch.export, timm, safetensors",
        )
    )
    add_bench(
        commands.add_parser(
            "bench",
            parents=[common],
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            help="time and memory of attention beside other libraries' and the floor",
        )
    )
    add_inspect(
        commands.add_parser(
            "inspect",
            parents=[common],
            allow_abbrev=False,
            help="what attention would cost at each stage of a network, and where to put it",
        )
    )
    return top


def add_inspect(command: argparse.ArgumentParser) -> None:
    """The arguments of :func:`vision_attn.inspection.inspect_model`."""
    command.set_defaults(command=inspect)
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


def add_demo(command: argparse.ArgumentParser) -> None:
    command.set_defaults(command=demo)
    command.add_argument("--output", default="demo-output", help="folder for what it makes (default: %(default)s)")
    command.add_argument("--epochs", type=int, default=5, help="epochs of each arm (default: %(default)s)")
    command.add_argument("--seed", type=int, default=0, help="seed of each arm (default: %(default)s)")


def adder(defaults: object) -> Callable[..., None]:
    """A function that adds a flag for a setting and writes its default, if there is one to speak of, into the help."""

    def add(group: argparse._ActionsContainer, flag: str, text: str, **options: Any) -> None:
        default = getattr(defaults, flag.lstrip("-").replace("-", "_"))
        if default not in (None, False, (), ""):
            text = f"{text} (default: {default})"
        group.add_argument(flag, help=text, **options)

    return add


def add_train(command: argparse.ArgumentParser) -> None:
    """The flags of :class:`vision_attn.training.settings.Settings`; one that is not given keeps its default there."""
    from vision_attn.training.settings import Settings

    defaults = Settings(data="")
    command.set_defaults(command=train, traceback=False)
    add = adder(defaults)

    group = command.add_argument_group("data")
    add(group, "--data", "folder with train/CLASS/IMAGE and val/CLASS/IMAGE, or the folder that CIFAR is in")
    add(group, "--dataset", "kind of data", choices=("folder", "cifar10", "cifar100", "digit-pairs"))
    add(group, "--dataset-download", "fetch CIFAR into --data if it is not there", action="store_true")
    add(group, "--img-size", "side of the images in pixels", type=int)
    add(group, "--mean", "mean of each channel, of pixels in 0…1", type=float, nargs="+")
    add(group, "--std", "standard deviation of each channel", type=float, nargs="+")
    add(
        group,
        "--train-crop",
        "random crops of the padded image, or of any size, brought to one: for photographs",
        choices=("pad", "resized"),
    )
    add(group, "--crop-padding", "of pad, pixels on each side", type=int)
    add(group, "--crop-scale", "of resized, least share of an image that a crop has", type=float)
    add(group, "--hflip", "probability of a horizontal flip", type=float)
    add(group, "--cutout", "side of a square in each image that is blotted out, in pixels", type=int)
    add(group, "--mixup", "alpha of mixup, such as 0.2: two images laid over each other", type=float)
    add(group, "--cutmix", "alpha of cutmix, such as 1: a box of one image in another", type=float)
    add(group, "--mixup-switch-prob", "probability of cutmix in a batch, where mixup is on too", type=float)

    group = command.add_argument_group("network")
    add(group, "--model", "a name that timm knows, or one of ours: resnet20, resnet20_a, …")
    add(group, "--pretrained", "load the weights that come with the name", action="store_true")
    add(group, "--weights", "checkpoint to begin from: .pth, .pt, .th, .safetensors")
    add(group, "--weights-ema", "take the moving average in that checkpoint", action="store_true")
    add(group, "--reset-head", "begin with a new classifier, for other classes", action="store_true")
    add(group, "--insert", "where blocks go: modules (globs: layer3, 'layer*.1') or stages by index", nargs="+")
    add(group, "--block", "what is inserted", choices=("attention", "conv", "se"))
    add(group, "--num-heads", "heads of the attention", type=int)
    add(group, "--impl", "implementation of the attention", choices=IMPLS)
    add(
        group,
        "--freeze-backbone",
        "train the inserted blocks alone (and a new head), and save them as an adapter",
        action="store_true",
    )
    add(group, "--freeze-epochs", "train the inserted blocks (and a new head) alone in so many epochs first", type=int)

    group = command.add_argument_group("recipe")
    add(group, "--epochs", "passes over the training images", type=int)
    add(group, "--batch-size", "images in a step, over all processes together", type=int)
    add(
        group,
        "--grad-accum-steps",
        "parts of the batch that go through the network one after the other for one step, to need less memory",
        type=int,
    )
    add(group, "--opt", "optimiser: sgd (with Nesterov momentum), adamw or any other that timm knows")
    add(group, "--lr", "learning rate (default: sgd 0.1, adamw 0.001; a tenth of it from --weights)", type=float)
    add(group, "--attention-lr", "rate of the inserted blocks (default: --lr)", type=float)
    add(group, "--layer-decay", "factor on the rate from a layer to the one before it, such as 0.75", type=float)
    add(group, "--momentum", "of sgd", type=float)
    add(group, "--weight-decay", "of all but biases, norms and gates", type=float)
    add(group, "--warmup-epochs", "epochs of linear warm-up before the cosine", type=float)
    add(group, "--min-lr", "rate that the cosine ends at", type=float)
    add(group, "--clip-grad", "norm that gradients are clipped to", type=float)
    add(group, "--label-smoothing", "share of the label spread over all classes", type=float)
    add(group, "--model-ema", "keep a moving average of the weights, evaluate and save it", action="store_true")
    add(group, "--model-ema-decay", "of that average, in each step", type=float)
    add(group, "--seed", "of everything random", type=int)

    group = command.add_argument_group("machine")
    add(group, "--device", "cpu or cuda (default: cuda where there is one)", choices=("cpu", "cuda"))
    add(
        group,
        "--workers",
        "processes that decode a folder's images in every epoch (default: none where all fit into memory, else as many "
        "as cores)",
        type=int,
    )
    add(group, "--amp", "half precision where it is safe", action="store_true")
    add(group, "--amp-dtype", "which; float16 scales the loss, on CUDA only", choices=("bfloat16", "float16"))
    add(group, "--sync-bn", "batch norms see the batch of all processes together (on CUDA)", action="store_true")
    add(
        group,
        "--deterministic",
        "the same bits each time on CUDA too, where it is slower; refuses what has no such kernel",
        action="store_true",
    )
    add(group, "--channels-last", "keep maps in the channels-last memory format", action="store_true")
    add(group, "--compile", "compile the training step", action="store_true")

    group = command.add_argument_group("run")
    add(group, "--output", "folder of the run (default: runs/train)")
    add(group, "--overwrite", "begin anew in a folder that holds a run", action="store_true")
    add(
        group,
        "--resume",
        "go on with an interrupted run from its last.pth; auto: from the one in --output, or begin if there is none",
        metavar="LAST.PTH",
    )
    add(group, "--tensorboard", "write TensorBoard events too", action="store_true")
    add(group, "--test-only", "evaluate, do not train", action="store_true")


def add_export(command: argparse.ArgumentParser) -> None:
    """The arguments of :func:`vision_attn.export.export.export_classifier`."""
    command.set_defaults(command=export)
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


def add_bench(command: argparse.ArgumentParser) -> None:
    """The flags of :class:`vision_attn.benchmark.settings.Settings`; one that is not given keeps its default there."""
    from vision_attn.benchmark.settings import DEVICES, DTYPES, RELATIVE_SHAPES, SHAPES, Settings

    command.set_defaults(command=bench, traceback=False)
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

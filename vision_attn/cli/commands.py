"""The commands, and flags from settings. What a command runs is imported when it runs."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Collection
from dataclasses import fields
from functools import partial
from typing import Any

from vision_attn.cli.looking import add_explore, add_maps
from vision_attn.text import escaped

__all__ = ["COMMANDS", "given", "run_train"]


def say(text: object) -> None:
    """Print lines in which names and what files say of themselves steer no terminal."""
    print("\n".join(map(escaped, str(text).split("\n"))), flush=True)


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
    if ":" in values.get("block", ""):
        from vision_attn.training.network import add_block

        add_block(values["block"])
    if "config" not in options:
        return values
    from vision_attn.training.run_folder import read_config

    return {**read_config(options.config), **values}


def add_inspect(command: argparse.ArgumentParser) -> None:
    """The arguments of :func:`vision_attn.inspection.inspect_model`."""
    command.set_defaults(command=run_inspect)
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
    add("--num-heads", type=int, help="heads of the attention (default: 8, or as many up to 8 as divide the channels)")
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


def run_inspect(options: argparse.Namespace) -> None:
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
    say(found)


def add_demo(command: argparse.ArgumentParser) -> None:
    """The flags of :func:`vision_attn.comparison.demo.demo`."""
    command.set_defaults(command=run_demo)
    command.add_argument("--output", default="demo-output", help="folder for what it makes (default: %(default)s)")
    command.add_argument("--epochs", type=int, default=3, help="epochs of each arm (default: %(default)s)")
    command.add_argument("--seed", type=int, default=0, help="seed of each arm (default: %(default)s)")
    command.add_argument("--jobs", type=int, metavar="N", help="arms side by side (default: as many as cores)")


def run_demo(options: argparse.Namespace) -> None:
    from vision_attn.comparison.demo import demo

    demo(options.output, epochs=options.epochs, seed=options.seed, jobs=options.jobs)


def add_train(command: argparse.ArgumentParser) -> None:
    """A flag for each of :class:`vision_attn.training.settings.Settings`; one not given keeps its default there."""
    command.set_defaults(command=run_train)
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.usage = "vision-attn train --data FOLDER [FLAG ...]"
    command.description = TRAIN
    command.argument_default = argparse.SUPPRESS
    command.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="with --test-only: folder, best.pth, last.pth or adapter of a run, whose network is evaluated, by default "
        "on the data of the run; of an adapter --weights are those of the network that it was trained on",
    )
    add_settings(command)


def add_settings(command: argparse.ArgumentParser, leave_out: Collection[str] = ()) -> None:
    """A flag for each of the settings but some."""
    from vision_attn.training.settings import CHOICES, FIELDS, Settings, type_of

    command.argument_default = argparse.SUPPRESS
    command.add_argument(
        "--config",
        metavar="SETTINGS.YAML",
        help="take the settings of another run, all but --output, --overwrite, --resume and --test-only; flags "
        "override them, and --no-amp and the like turn off what is on there",
    )
    add = adder(Settings(data=""))
    group: argparse._ActionsContainer = command
    for name, field in FIELDS.items():
        about, (kind, many), flag = field.metadata, type_of(name), name.replace("_", "-")
        if about["group"]:
            group = command.add_argument_group(about["group"])
        if name in leave_out:
            continue
        if kind is bool:
            add(group, f"--{flag}", about["text"], action="store_true")
            group.add_argument(f"--no-{flag}", dest=name, action="store_false", help=argparse.SUPPRESS)
        else:
            how = {"nargs": "+" if many else None, "choices": CHOICES.get(name) or None, "metavar": about["metavar"]}
            if name == "block":  # one may name one's own
                how |= {"choices": None, "metavar": "BLOCK"}
            add(group, f"--{flag}", about["text"], type=kind, **how)


#: What ``vision-attn train --help`` begins with.
TRAIN = """\
Train an image classifier, or evaluate one, with attention inserted or not. It
leaves a folder with the weights, the metrics and their curves. Ctrl-C saves the
run, and --resume goes on with it.

  vision-attn train --data flowers --model resnet18 --pretrained --insert layer3
  vision-attn train --dataset cifar100 --data data --dataset-download --insert -1
"""


def run_train(options: argparse.Namespace) -> None:
    from vision_attn.training.settings import Settings
    from vision_attn.training.train import train
    from vision_attn.training.trained import open_trained, settings_to_evaluate, settings_to_resume

    values, trained = given(Settings, options), None
    if "run" in options:
        if not values.get("test_only"):
            raise ValueError(f"RUN goes with --test-only; to go on with a run, --resume {options.run}/last.pth")
        trained = open_trained(options.run, weights=values.get("weights"))
        settings = settings_to_evaluate(trained, values, options.run)
    elif values.get("resume", "auto") != "auto":
        settings = Settings(**settings_to_resume(values["resume"], values))
    else:
        settings = Settings(**values)
    try:
        train(settings, say, trained=trained)
    finally:
        leave_process_group()


def leave_process_group() -> None:
    """A process that ends while its group's threads still run may be aborted by them after its work is done."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


#: What a comparison decides for each of its runs.
DECIDED = ("seed", "output", "resume", "overwrite", "test_only")


def add_compare(command: argparse.ArgumentParser) -> None:
    """The flags of :func:`vision_attn.comparison.compare.compare`, and those of the runs."""
    from vision_attn.comparison.arms import ARMS

    of_an_arm = type(command)(prog="vision-attn compare --arms NAME=…", add_help=False, allow_abbrev=False)
    add_settings(of_an_arm, leave_out=DECIDED)
    command.set_defaults(command=partial(run_compare, of_an_arm))
    command.usage = "vision-attn compare --data FOLDER [--arms ARM ...] [--seeds N ...] [--jobs N] [FLAG ...]"
    command.description = (
        "Train a network with one block and with others, by one recipe, over seeds, and say what the differences are "
        "worth. The same command goes on where it was interrupted. Flags of train are for all arms that they suit."
    )
    add = command.add_argument_group("comparison").add_argument
    text = (
        f"{', '.join(ARMS)}; or one of yours, NAME=ARM FLAGS with flags of train, such as 'rope=attention "
        "--block-options position=Rope2d()'; the last is compared with the others (default: plain convolution se "
        "attention)"
    )
    add("--arms", nargs="+", default=["plain", "convolution", "se", "attention"], metavar="ARM", help=text)
    text = "arms of which the best on images held out from training becomes the last of --arms; see --hold-out"
    add("--candidates", nargs="+", default=[], metavar="ARM", help=text)
    text = "of each arm (default: 0 1 2 3 4)"
    add("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], metavar="N", help=text)
    add("--jobs", type=int, metavar="N", help="runs side by side (default: as many as GPUs, or as cores)")
    text = "compare the last arm with the others, or each with each (default: %(default)s)"
    add("--pairs", choices=("last", "all"), default="last", help=text)
    add("--output", default="runs/compare", help="folder of the runs and the tables (default: %(default)s)")
    add_settings(command, leave_out=(*DECIDED, "block"))


def run_compare(of_an_arm: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    from vision_attn.comparison.arms import recipe, settings_of_arm
    from vision_attn.comparison.compare import compare
    from vision_attn.training.settings import Settings

    common = recipe(
        {name: value for name, value in given(Settings, options).items() if name not in (*DECIDED, "block")}
    )
    share = common.pop("hold_out", 0.1) if options.candidates else None

    def arms(words: list[str], **further: Any) -> dict[str, dict[str, Any]]:
        found = {}
        for name, sign, text in (word.partition("=") for word in words):
            flags = shlex.split(text)
            base = flags.pop(0) if flags and not flags[0].startswith("-") else "attention" if sign else name
            if not name or "/" in name or name in found:
                raise ValueError(f"arms must have names that differ and are such as folders have; got {name!r}")
            found[name] = {**settings_of_arm(base, given(Settings, of_an_arm.parse_args(flags)), common), **further}
        return found

    chosen = arms([*options.arms, *options.candidates])
    how = {"seeds": options.seeds, "jobs": options.jobs, "command": shlex.join(["vision-attn", *sys.argv[1:]])}
    if options.candidates:
        folder = f"{options.output}/candidates"
        best = compare(arms(options.candidates, hold_out=share), output=folder, pairs="all", **how).best
        print(f"\nThe best of the candidates, on images held out from training: {best}\n")
        chosen = {**arms(options.arms), best: chosen[best]}
    compare(chosen, output=options.output, pairs=options.pairs, **how)


def add_export(command: argparse.ArgumentParser) -> None:
    """The arguments of :func:`vision_attn.export.export.export_classifier`."""
    command.set_defaults(command=run_export)
    add = command.add_argument
    add_trained(command)
    add(
        "--output",
        required=True,
        help="file to write; its ending says the format: .onnx, .pt2 (torch.export), .safetensors, none for a folder "
        "that load_run reads (and timm, where it knows the network with its blocks)",
    )
    add(
        "--format",
        choices=("onnx", "torch-export", "folder", "timm", "safetensors"),
        help="format, where the ending does not say it",
    )
    add(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        help="whether the graph of onnx and torch-export takes pixels in 0…1 and normalises them itself (default: it "
        "does)",
    )


def run_export(options: argparse.Namespace) -> None:
    from vision_attn.export.classifier import load_run
    from vision_attn.export.export import export_classifier

    classifier = load_run(options.run, weights=options.weights)
    say(export_classifier(classifier, options.output, format=options.format, normalize=options.normalize))


def add_trained(command: argparse.ArgumentParser) -> None:
    """What names a trained network."""
    command.add_argument(
        "run",
        metavar="RUN",
        help="folder of a run, its best.pth, last.pth or adapter.safetensors, or a folder that was exported",
    )
    command.add_argument(
        "--weights",
        metavar="FILE",
        help="of an adapter: the checkpoint of the network that it was trained on (default: the one the run began "
        "from; 'pretrained' fetches the weights that come with the name)",
    )


def add_predict(command: argparse.ArgumentParser) -> None:
    """The arguments of :meth:`vision_attn.export.classifier.Classifier.predict`."""
    command.set_defaults(command=run_predict)
    add_trained(command)
    command.add_argument("images", nargs="+", metavar="IMAGE", help="image files, or folders of them")
    command.add_argument("--top", type=int, default=5, help="classes of each image (default: %(default)s)")
    command.add_argument("--output", metavar="CSV", help="file for a table of all images")


def run_predict(options: argparse.Namespace) -> None:
    from vision_attn.export.classifier import images_in, load_run, write_predictions

    if options.top < 1:
        raise ValueError(f"top must be at least 1; got {options.top}")
    run, paths, found = load_run(options.run, weights=options.weights), images_in(options.images), []
    for path, best in zip(paths, run.predict(paths, top=options.top), strict=True):
        found.append((path, best))
        print(escaped(f"{path}: {', '.join(f'{name} {100 * share:.1f} %' for name, share in best)}"), flush=True)
    if options.output:
        write_predictions(options.output, found)


def add_bench(command: argparse.ArgumentParser) -> None:
    """The flags of :class:`vision_attn.benchmark.plan.Plan`; one that is not given keeps its default there."""
    from vision_attn.benchmark.plan import COMPARISONS, DTYPES, LAYOUTS, ROWS, Plan

    command.set_defaults(command=run_bench)
    command.argument_default = argparse.SUPPRESS
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    rows = {name: comparison.text for name, comparison in COMPARISONS.items() if name in ROWS}
    rows["all"] = "all of these but compiled, which takes minutes"
    who = [f"  {name:<16} {' | '.join(row.contestants)}" for name, row in COMPARISONS.items()]
    command.epilog = "\n".join(
        ["rows:", *(f"  {name:<16} {text}" for name, text in rows.items()), "", "contestants, for --only:", *who]
    )
    add = adder(Plan())
    add(command, "--rows", "what is measured, by name; see below", nargs="+", choices=ROWS, metavar="NAME")
    text = "networks before and after swap_, in place of rows: names that timm knows, or torchvision:swin_t"
    add(command, "--swap", text, nargs="+", metavar="MODEL")
    text = "contestants, by parts of their names such as sdpa, floor or timm (default: all); see below"
    add(command, "--only", text, nargs="+", metavar="NAME")
    text = "batch,channels,height,width of maps; of images for backbone and --swap (default: some for each of the rows)"
    add(command, "--shapes", text, nargs="+", metavar="B,C,H,W")
    add(command, "--heads", "heads of every contestant (default: by the shape; 8 at those given)", type=int)
    text = "memory formats of the maps: nchw, channels-last (default: by the rows)"
    add(command, "--layouts", text, nargs="+", choices=tuple(LAYOUTS), metavar="LAYOUT")
    add(command, "--device", "cpu or cuda (default: cuda where there is one)", choices=("cpu", "cuda"))
    add(command, "--dtype", "type of maps and weights", choices=tuple(DTYPES))
    add(command, "--threads", "threads of the CPU (default: as many as torch has)", type=int)
    add(command, "--rounds", "measurements of each contestant", type=int)
    add(command, "--output", "JSON file for all that was measured", metavar="FILE")
    add(command, "--markdown", "Markdown file for the tables", metavar="FILE")
    add(command, "--chart", "PNG file for time and memory against tokens", metavar="FILE")


def run_bench(options: argparse.Namespace) -> None:
    from vision_attn.benchmark.plan import Plan, parse_shape
    from vision_attn.benchmark.run import run_benchmark

    values = given(Plan, options)
    if "shapes" in values:
        values["shapes"] = tuple(map(parse_shape, values["shapes"]))
    run_benchmark(Plan(**values))


def add_convert(command: argparse.ArgumentParser) -> None:
    """The arguments of :func:`vision_attn.convert.convert_file`."""
    from vision_attn.convert.files import LAYOUTS

    command.set_defaults(command=run_convert)
    add = command.add_argument
    add("source", metavar="IN", help="weights or a checkpoint: .safetensors, .pth, or .weights.h5 of Keras")
    add("output", metavar="OUT", help="file to write, .safetensors")
    add("--from", dest="layout", required=True, choices=tuple(LAYOUTS), help="how its attention is saved")
    add("--prefix", default="", help="path of the layers, with globs: 'blocks.*.attn' (default: the file is one layer)")
    add("--num-heads", type=int, help="heads of each layer; Keras's files tell it")
    add("--rank", type=int, default=2, help="axes of the maps that the blocks are for (default: %(default)s)")
    add("--dry-run", action="store_true", help="print the mapping, write nothing")


def run_convert(options: argparse.Namespace) -> None:
    from vision_attn.convert.files import convert_file

    given = ("layout", "prefix", "num_heads", "rank", "dry_run")
    say(convert_file(options.source, options.output, **{name: getattr(options, name) for name in given}))


#: What each command is for, and what adds its flags.
COMMANDS = {
    "inspect": ("what attention would cost at each stage of a network, and where to put it", add_inspect),
    "demo": ("what attention is for, in minutes", add_demo),
    "train": ("train, fine-tune or evaluate an image classifier, with attention inserted or not", add_train),
    "compare": ("does a block help? arms by seeds, with intervals", add_compare),
    "predict": ("what a trained network takes images for", add_predict),
    "explore": ("where every head of a network looks on images, as a page to explore in a browser", add_explore),
    "maps": ("the same as pictures, with a page on how widely and how far each head looks", add_maps),
    "export": ("a trained network as a file that others run: ONNX, torch.export, timm, safetensors", add_export),
    "convert": ("the attention in a file of weights from another library's layout to ours", add_convert),
    "bench": ("time and memory of attention beside other libraries'", add_bench),
}

"""The commands and their arguments. Heavy modules are imported when they are used."""

from __future__ import annotations

import difflib
import shlex
import sys
from dataclasses import dataclass, replace
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import Positional, arg

from vision_attn.text import escape_control_characters
from vision_attn.tools.cli.visualize import Images, Output
from vision_attn.tools.hints import hint

#: Argument type shared by several commands.
Run = Annotated[Positional[Path], arg(metavar="RUN")]
Device = Annotated[Literal["cpu", "cuda"] | None, hint("{cpu,cuda}", "default: cuda if available")]

if TYPE_CHECKING:
    from vision_attn.tools.training.settings import Settings


def print_escaped(text: object) -> None:
    """Print lines with escaped control characters, which names and text from files may contain."""
    print("\n".join(map(escape_control_characters, str(text).split("\n"))), flush=True)


def inspect(
    model: Annotated[Positional[str], arg(metavar="MODEL")],
    /,
    input_size: Annotated[tuple[int, ...], hint("SIDE | HEIGHT WIDTH", "default: size of the model, or 224")] = (),
    num_heads: Annotated[int | None, hint("INT", "default: largest divisor of the channels, at most 8")] = None,
    pattern: str = "full",
) -> None:
    """Compare the cost of attention at each stage of a network.

    Args:
        model: Name of a timm model or of a model of this library, or torchvision:NAME.
        input_size: Side, or height and width, of the input images in pixels.
        num_heads: Number of attention heads.
        pattern: Attention pattern: full, rows, columns, 'Window(7)' or another pattern, or an einx expression.
    """
    from vision_attn.networks.checkpoints.option_code import parse_option
    from vision_attn.networks.example import make_example
    from vision_attn.networks.insertion import insert_
    from vision_attn.networks.models.registry import create_network

    options: dict[str, Any] = {} if num_heads is None else {"num_heads": num_heads}
    if pattern != "full":
        options["pattern"] = parse_option(pattern.removeprefix("va."))
    network = create_network(model)
    if input_size:
        sides = input_size * 2 if len(input_size) == 1 else input_size
        options["example_input"] = (*make_example(network).shape[:2], *sides)
    print_escaped(insert_(network, dry_run=True, **options))


def demo(
    output: Output = Path("demo-output"),
    steps: int = 400,
    seed: int = 0,
    jobs: Annotated[int | None, hint("INT", "default: number of cores")] = None,
) -> None:
    """Train networks with and without attention on a small task, in minutes on a CPU.

    Args:
        output: Folder for the results.
        steps: Number of training steps of each network.
        seed: Random seed of each network.
        jobs: Number of networks to train in parallel.
    """
    from vision_attn.tools.comparison.demo import run_demo

    run_demo(output, steps=steps, seed=seed, jobs=jobs)


def load_run(run: Path) -> Any:
    """Load the network of a run; name the expected arguments if the folder contains none."""
    from vision_attn.networks.checkpoints import folder

    try:
        return folder.load_model(run)
    except FileNotFoundError as error:
        expected = "expected RUN first: the folder of a training run or of va.save_model, or hf-hub:OWNER/NAME"
        raise FileNotFoundError(f"{run} contains no network: {expected}") from error


def predict(
    run: Run,
    images: Images,
    /,
    top: int = 5,
    batch_size: int = 32,
    device: Device = None,
    output: Annotated[Path | None, hint("FILE", "default: none", "-o")] = None,
) -> None:
    """Classify images with a trained network.

    Args:
        run: Folder of a training run, folder written by va.save_model, or hf-hub:OWNER/NAME.
        images: Image files, or folders of images. Damaged files are skipped with a warning.
        top: Number of classes to print for each image.
        batch_size: Number of images per forward pass.
        device: Device to run on.
        output: CSV file to write, with the classes and probabilities of all images.
    """
    import torch
    from tqdm import tqdm

    from vision_attn.checks import check_above
    from vision_attn.networks.safe import check_writable
    from vision_attn.tools.images import check_none_skipped, find_images, load_images
    from vision_attn.tools.training.folder import write_table

    check_above(0, top=top, batch_size=batch_size)
    if output:
        check_writable(output)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model, files = load_run(run).to(device), find_images(images)
    names = model.classes or tuple(map(str, range(model.num_classes)))
    top, rows = min(top, len(names)), []
    with tqdm(total=len(files), desc="predict", leave=False, disable=None) as bar, torch.inference_mode():
        for some in (files[start : start + batch_size] for start in range(0, len(files), batch_size)):
            loaded = load_images(some, model.transform)
            if loaded:
                found = model(torch.stack([*loaded.values()]).to(device)).float().softmax(1).topk(top)
                for file, scores, labels in zip(loaded, *(part.tolist() for part in found), strict=True):
                    best = [(names[label], score) for label, score in zip(labels, scores, strict=True)]
                    line = f"{file}: {', '.join(f'{name} {100 * score:.1f} %' for name, score in best)}"
                    bar.write(escape_control_characters(line))
                    rows.append((file, *(cell for name, score in best for cell in (name, f"{score:.6f}"))))
            bar.update(len(some))
    if output:
        columns = (f"{what}_{rank}" for rank in range(1, top + 1) for what in ("class", "probability"))
        write_table(output, [("image", *columns), *rows])
    check_none_skipped(files, len(rows))


def export(
    run: Run,
    /,
    output: Output,
    input_size: Annotated[tuple[int, ...], hint("SIDE | HEIGHT WIDTH", "default: size of the model")] = (),
    dynamic: Annotated[
        tuple[Literal["batch", "size"], ...] | None,
        hint("{batch,size} ...", "default: batch; none for .tflite and .pte"),
    ] = None,
    int8: Annotated[Path | None, hint("FOLDER")] = None,
    normalize: bool = True,
) -> None:
    """Export a trained network for another runtime and check its output.

    Args:
        run: Folder of a training run, folder written by va.save_model, or hf-hub:OWNER/NAME.
        output: File to write: .onnx, .pt2 (torch.export), .aoti.pt2 (AOTInductor), .xml (OpenVINO), .tflite (LiteRT)
            or .pte (ExecuTorch).
        input_size: Side, or height and width, of the input images in pixels.
        dynamic: Dimensions of the input that may vary between calls.
        int8: Folder with train/CLASS/IMAGE and val/CLASS/IMAGE, for quantization to 8 bits.
        normalize: Include the normalization in the file, so that it accepts pixels in 0…1.
    """
    from vision_attn.tools.export.export import export_model

    options: dict[str, Any] = {"dynamic": dynamic, "int8": int8, "normalize": normalize}
    if input_size:
        options["input_size"] = input_size[0] if len(input_size) == 1 else input_size
    print_escaped(export_model(load_run(run), output, **options))


def parse_flag_names(words: list[str]) -> list[str]:
    """Return the names of the settings on a command line."""
    return [word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--")]


def parse_settings(words: list[str], prog: str, default: Any = None, description: str | None = None) -> Settings:
    """Parse settings; flags override the settings of the file of ``--config`` or the run of ``--resume``."""
    from vision_attn.tools.training.settings import PlainErrors, Settings, read_settings

    given = parse_flag_names(words)
    forms = [word.split("=", 1) if word.startswith(("--config=", "--resume=")) else [word] for word in words]
    words = [word for form in forms for word in form]
    for flag in ("--config", "--resume"):
        if flag in words[:-1]:
            index = words.index(flag)
            if words[index + 1] != "auto":
                default = read_settings(Path(words[index + 1]), given)
            if flag == "--config":
                del words[index : index + 2]
    PlainErrors.error = RuntimeError
    try:
        return tyro.cli(Settings, args=words, default=default, prog=prog, description=description)
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    finally:
        PlainErrors.error = ValueError


def train(words: list[str]) -> None:
    """Train an image classifier, with or without inserted attention."""
    settings = parse_settings(words, "vision-attn train")

    from vision_attn.tools.training.run import run_training

    run_training(settings, log=print_escaped)


def evaluate(words: list[str]) -> None:
    """Evaluate a saved run, or a model described by training flags.

    Examples:
        vision-attn evaluate runs/train-1
        vision-attn evaluate --data flowers --model resnet18 --weights flowers.pth
    """
    from vision_attn.tools.training.settings import read_settings

    path, default = None, None
    if words and not words[0].startswith("-"):
        path, words = Path(words[0]), words[1:]
        if not (path / "config.json").is_file():
            default = replace(read_settings(path, parse_flag_names(words)), freeze_backbone=False)
    settings = parse_settings(words, "vision-attn evaluate", default, cleandoc(str(evaluate.__doc__)))

    from vision_attn.tools.training import run

    run.evaluate(settings, path, log=print_escaped)


@dataclass(frozen=True)
class Comparison:
    """Compare blocks over several seeds, with confidence intervals.

    The flags of vision-attn train apply to all variants. Without a data set, the variants are compared on the task of
    vision-attn demo. Run the same command again to resume a comparison.

    Example: vision-attn compare --data flowers --model resnet18 --pretrained --insert layer3
    """

    # Variants to compare: names, or NAME=VARIANT FLAGS such as 'rope=attention --block-options position=Rope2d()'.
    variants: Annotated[tuple[str, ...], hint("VARIANT [VARIANT ...]")] = ("plain", "convolution", "se", "attention")
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)  # Random seeds of each variant.
    # Number of runs in parallel.
    jobs: Annotated[int | None, hint("INT", "default: number of GPUs, or of cores")] = None
    backend: Literal["loky", "ray"] = "loky"  # Where to run: local processes or a Ray cluster.
    output: Output = Path("runs/compare")  # Folder for the runs and the tables.


def compare(words: list[str]) -> None:
    """Compare blocks over several seeds, with confidence intervals."""
    prog = "vision-attn compare"
    how, rest = tyro.cli(Comparison, args=words, prog=prog, return_unknown_args=True)

    from vision_attn.tools.comparison.variants import recipe, settings_for_variant
    from vision_attn.tools.training.settings import Settings, non_default_settings

    for name in parse_flag_names(rest):
        close = difflib.get_close_matches(name, Comparison.__annotations__, n=1)
        if close and name not in Settings.__annotations__:
            raise ValueError(f"unknown flag --{name.replace('_', '-')}. Did you mean --{close[0]}?")
    unset = Settings(insert=("…",))  # distinguishes sites that the user passes from no sites
    common = recipe(non_default_settings(parse_settings(rest, prog, unset), unset))
    variants: dict[str, dict[str, Any]] = {}
    for name, sign, text in (word.partition("=") for word in how.variants):
        flags = shlex.split(text)
        base = flags.pop(0) if flags and not flags[0].startswith("-") else "attention" if sign else name
        if not name or "/" in name or name in variants:
            raise ValueError(f"variants must have distinct names that are valid folder names, got {name!r}")
        custom = non_default_settings(parse_settings(flags, f"{prog} --variants {name}", unset), unset)
        variants[name] = settings_for_variant(base, custom, common)

    options: dict[str, Any] = {name: value for name, value in vars(how).items() if name != "variants"}
    if {"data", "dataset"} & common.keys():
        from vision_attn.tools.comparison.runs import compare as compare_on_images

        compare_on_images(variants, command=shlex.join(["vision-attn", *sys.argv[1:]]), **options)
    else:
        from vision_attn.tools.comparison.demo import compare_on_recall

        compare_on_recall(variants, **options)

"""The commands: their arguments, and the functions that they call. Heavy modules are imported when they are used."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import Positional, arg

from vision_attn.text import escaped
from vision_attn.tools.cli.visualize import Output, find_images, load_images

if TYPE_CHECKING:
    from vision_attn.tools.training.settings import Settings


def print_escaped(text: object) -> None:
    """Print lines; control characters in names and in text from files are written out."""
    print("\n".join(map(escaped, str(text).split("\n"))), flush=True)


def inspect(
    model: Positional[str],
    /,
    input_size: tuple[int, ...] = (),
    batch_size: int = 128,
    num_heads: int | None = None,
    pattern: str = "full",
) -> None:
    """What attention would cost at each stage of a network, and where to put it.

    Args:
        model: name of a network that timm or this library knows, or torchvision:resnet18
        input_size: image side in pixels, or height and width (default: the model's, else 224)
        batch_size: images per training step
        num_heads: heads of the attention (default: 8, or as many up to 8 as divide the channels)
        pattern: full, rows, columns, 'Window(7)', … or a line of einx
    """
    from vision_attn.networks.checkpoints.specification import from_word
    from vision_attn.networks.inspection import inspect_model

    options: dict[str, Any] = {"batch_size": batch_size, "num_heads": num_heads}
    if pattern != "full":  # the table names only the options of a block that are not its defaults
        options["pattern"] = from_word(pattern.removeprefix("va."))
    if input_size:
        options["input_size"] = input_size[0] if len(input_size) == 1 else input_size
    print_escaped(inspect_model(model, **options))


def demo(output: Output = Path("demo-output"), steps: int = 400, seed: int = 0, jobs: int | None = None) -> None:
    """What attention is for, in minutes.

    Args:
        output: folder of the results
        steps: training steps of each arm
        seed: random seed of each arm
        jobs: number of arms trained side by side (default: as many as cores)
    """
    from vision_attn.tools.comparison.demo import run_demo

    run_demo(output, steps=steps, seed=seed, jobs=jobs)


def predict(
    run: Positional[Path],
    images: Positional[tuple[Path, ...]],
    /,
    top: int = 5,
    output: Annotated[Path | None, arg(aliases=["-o"])] = None,
) -> None:
    """Classify images with a trained network.

    Args:
        run: folder of a run, or one that save_model wrote
        images: image files, or folders of them
        top: number of classes for each image
        output: CSV file for a table of all images
    """
    import torch

    from vision_attn.checks import check_count
    from vision_attn.networks.models import folder
    from vision_attn.networks.safe import check_writable
    from vision_attn.tools.training.folder import write_table

    check_count("top", top)
    if output:
        check_writable(output)
    model: Any = folder.load_model(run)
    paths = find_images(images)
    names = model.classes or tuple(map(str, range(model.num_classes)))
    top, rows = min(top, len(names)), []
    for path in paths:
        with torch.no_grad():
            scores, labels = model(load_images([path], model.transform)).float().softmax(1)[0].topk(top)
        best = [(names[label], score) for label, score in zip(labels.tolist(), scores.tolist(), strict=True)]
        print_escaped(f"{path}: {', '.join(f'{name} {100 * score:.1f} %' for name, score in best)}")
        rows.append((path, *(cell for name, score in best for cell in (name, f"{score:.6f}"))))
    if output:
        columns = (f"{what}_{rank}" for rank in range(1, top + 1) for what in ("class", "probability"))
        write_table(output, [("image", *columns), *rows])


def export(
    run: Positional[Path],
    /,
    output: Output,
    input_size: tuple[int, ...] = (),
    dynamic: tuple[Literal["batch", "size"], ...] | None = None,
    int8: Path | None = None,
    normalize: bool = True,
) -> None:
    """Export a trained network for another runtime, and compare the file with the network.

    Args:
        run: folder of a run, or one that save_model wrote
        output: file to write; its suffix is the format: .onnx, .pt2 (torch.export), .aoti.pt2 (AOTInductor), .xml
            (OpenVINO), .tflite (LiteRT), .pte (ExecuTorch)
        input_size: image side in pixels, or height and width (default: the model's)
        dynamic: dimensions that may vary between calls (default: batch; none for .tflite and .pte)
        int8: folder of labeled images, train/CLASS/IMAGE and val/CLASS/IMAGE, to quantize the file to 8 bits
        normalize: let the file normalize pixels in 0…1
    """
    from vision_attn.networks.models import folder
    from vision_attn.tools.export.export import export_model

    options: dict[str, Any] = {"dynamic": dynamic, "int8": int8, "normalize": normalize}
    if input_size:
        options["input_size"] = input_size[0] if len(input_size) == 1 else input_size
    print_escaped(export_model(folder.load_model(run), output, **options))


def flags_in(words: list[str]) -> list[str]:
    """Return the names of the settings that a command line gives."""
    return [word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--")]


def settings_from(words: list[str], prog: str, default: Any = None, description: str | None = None) -> Settings:
    """Parse settings; flags override those of the file or run that ``--config`` or ``--resume`` names."""
    from vision_attn.tools.training.settings import Settings, read_settings

    given = flags_in(words)
    forms = [word.split("=", 1) if word.startswith(("--config=", "--resume=")) else [word] for word in words]
    words = [word for form in forms for word in form]
    for flag in ("--config", "--resume"):
        if flag in words[:-1]:
            index = words.index(flag)
            if words[index + 1] != "auto":
                default = read_settings(Path(words[index + 1]), given)
            if flag == "--config":
                del words[index : index + 2]
    return tyro.cli(Settings, args=words, default=default, prog=prog, description=description)


def train(words: list[str]) -> None:
    """Train an image classifier, with or without inserted attention.

    Ctrl-C saves the run, and --resume continues it. --config FILE reads the settings of another run.
    """
    settings = settings_from(words, "vision-attn train")

    from vision_attn.tools.training.run import run_training

    run_training(settings, log=print_escaped)


def evaluate(words: list[str]) -> None:
    """Evaluate a network: that of RUN, a folder, on its data, or the one that flags of train describe."""
    from vision_attn.tools.training.settings import read_settings

    path, default = None, None
    if words and not words[0].startswith("-"):
        path, words = Path(words[0]), words[1:]
        if not (path / "config.json").is_file():
            default = replace(read_settings(path, flags_in(words)), freeze_backbone=False)
    settings = settings_from(words, "vision-attn evaluate", default, f"{evaluate.__doc__}\n")

    from vision_attn.tools.training import run

    run.evaluate(settings, path, log=print_escaped)


@dataclass(frozen=True)
class Compared:
    """Does a block help? Variants by seeds, with intervals.

    Each variant is trained by one recipe over seeds. The same command resumes. All other flags are those of
    vision-attn train, for all variants that they suit. Without --data the variants are compared on recall, the task of
    vision-attn demo.
    """

    # variants by name, or NAME=VARIANT FLAGS with flags of train: 'rope=attention --block-options position=Rope2d()'
    variants: tuple[str, ...] = ("plain", "convolution", "se", "attention")
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)  # seeds of each variant
    jobs: int | None = None  # runs at a time (default: as many as GPUs, or as cores)
    backend: Literal["loky", "ray"] = "loky"  # where runs are made: processes of this machine, or a Ray cluster
    output: Output = Path("runs/compare")  # folder of the runs and the tables


def compare(words: list[str]) -> None:
    """Does a block help? Variants by seeds, with intervals."""
    prog = "vision-attn compare"
    how, rest = tyro.cli(Compared, args=words, prog=prog, return_unknown_args=True)

    from vision_attn.tools.comparison.variants import recipe, settings_for_variant
    from vision_attn.tools.training.settings import Settings, changed

    unset = Settings(insert=("…",))  # the sites are the recipe's or the variant's, where flags name none
    common = recipe(changed(settings_from(rest, prog, unset), unset))
    variants: dict[str, dict[str, Any]] = {}
    for name, sign, text in (word.partition("=") for word in how.variants):
        flags = shlex.split(text)
        base = flags.pop(0) if flags and not flags[0].startswith("-") else "attention" if sign else name
        if not name or "/" in name or name in variants:
            raise ValueError(f"variants must have distinct names that folders can have; got {name!r}")
        custom = changed(settings_from(flags, f"{prog} --variants {name}", unset), unset)
        variants[name] = settings_for_variant(base, custom, common)

    options: dict[str, Any] = {name: value for name, value in vars(how).items() if name != "variants"}
    if {"data", "dataset"} & common.keys():
        from vision_attn.tools.comparison.runs import compare as compare_on_images

        compare_on_images(variants, command=shlex.join(["vision-attn", *sys.argv[1:]]), **options)
    else:
        from vision_attn.tools.comparison.demo import compare_on_recall

        compare_on_recall(variants, **options)

"""The commands and their arguments. Heavy modules are imported when they are used."""

from __future__ import annotations

import shlex
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from vision_attn.text import escape_control_characters
from vision_attn.tools.cli.visualize import Block, Images, Output, load_run
from vision_attn.tools.hints import hint

#: Argument type shared by several commands.
Run = Annotated[Positional[Path], arg(metavar="RUN")]
ImgSize = Annotated[tuple[int, ...], hint("SIDE | HEIGHT WIDTH", "default: size of the model")]
Device = Annotated[Literal["cpu", "cuda"] | None, hint("{cpu,cuda}", "default: cuda if available")]


def print_escaped(text: object) -> None:
    """Print lines with escaped control characters, which names and text from files may contain."""
    print("\n".join(map(escape_control_characters, str(text).split("\n"))), flush=True)


def input_shape(model: Any, img_size: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape of a batch with one image of a side, or height and width; None for the size of the model."""
    from vision_attn.checks import check_above
    from vision_attn.networks.inspection.example import make_example

    check_above(0, img_size=min(img_size, default=None))
    return (*make_example(model).shape[:2], *(img_size * 2 if len(img_size) == 1 else img_size)) if img_size else None


def inspect(
    model: Annotated[Positional[str], arg(metavar="MODEL")],
    /,
    img_size: ImgSize = (),
    num_heads: Annotated[int | None, hint("INT", "default: largest divisor of the channels, at most 8")] = None,
    pattern: str = "full",
) -> None:
    """Compare the cost of attention at each stage of a network.

    Args:
        model: Name of a timm model or of a model of this library, or torchvision:NAME.
        img_size: Side, or height and width, of the input images in pixels.
        num_heads: Number of attention heads.
        pattern: Attention pattern: full, rows, columns, 'Window(7)' or another pattern, or an einx expression.
    """
    from vision_attn.networks.checkpoints.option_code import parse_option
    from vision_attn.networks.insertion import insert_
    from vision_attn.networks.models.registry import create_network

    options: dict[str, Any] = {} if num_heads is None else {"num_heads": num_heads}
    options["pattern"] = parse_option(pattern)
    network = create_network(model)
    print_escaped(insert_(network, dry_run=True, example_input=input_shape(network, img_size), **options))


def demo(
    output: Output = Path("demo-output"),
    steps: int = 400,
    seed: int = 0,
    jobs: Annotated[int | None, hint("INT", "default: number of cores")] = None,
) -> None:
    """Train networks with and without attention on a small task, in minutes on a CPU.

    For each glyph on a black cell, the networks predict the color of the cell with the same glyph. The cells are at
    random positions, and the glyphs of the test images do not occur in the training images. Chance is 12.5 %. Four
    variants of one network are compared: without a block (plain), with a 13×13 convolution (large-kernel), with the
    mean over all positions (averaging), and with attention.

    Args:
        output: Folder for the results.
        steps: Number of training steps of each network.
        seed: Random seed of each network.
        jobs: Number of networks to train in parallel.
    """
    print_escaped(cleandoc(demo.__doc__ or "").partition("Args:")[0])  # before the imports of torch, which take seconds

    from vision_attn.tools.comparison.demo import run_demo

    run_demo(output, steps=steps, seed=seed, jobs=jobs)


def env() -> None:
    """Print versions, device and number of threads, for a bug report."""
    from vision_attn.tools.environment import describe_environment

    print_escaped("\n".join(f"{name}: {value}" for name, value in describe_environment().items()))


def predict(
    run: Run,
    images: Images,
    /,
    top: int = 5,
    batch_size: int = 32,
    device: Device = None,
    output: Annotated[Path | None, hint("FILE", "default: none", "-o")] = None,
    block: Block = None,
) -> None:
    """Classify images with a trained network.

    Args:
        run: Folder of a training run, folder written by va.save_model, or hf-hub:OWNER/NAME.
        images: Image files, or folders of images. Damaged files are skipped with a warning.
        top: Number of classes to print for each image.
        batch_size: Number of images per forward pass.
        device: Device to run on.
        output: CSV file to write, with the classes and probabilities of all images.
        block: Class of the inserted blocks.
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
    model, files = load_run(run, block).to(device), find_images(images)
    names = model.classes or tuple(map(str, range(model.num_classes)))
    top, rows = min(top, len(names)), []
    with torch.inference_mode():
        for start in tqdm(range(0, len(files), batch_size), "predict", leave=False, disable=None):
            loaded = load_images(files[start : start + batch_size], model.transform)
            if loaded:
                found = model(torch.stack([*loaded.values()]).to(device)).float().softmax(1).topk(top)
                for file, scores, labels in zip(loaded, *(part.tolist() for part in found), strict=True):
                    best = [(names[label], score) for label, score in zip(labels, scores, strict=True)]
                    line = f"{file}: {', '.join(f'{name} {100 * score:.1f} %' for name, score in best)}"
                    tqdm.write(escape_control_characters(line))
                    rows.append((file, *(cell for name, score in best for cell in (name, f"{score:.6f}"))))
    if output:
        columns = (f"{what}_{rank}" for rank in range(1, top + 1) for what in ("class", "probability"))
        write_table(output, [("image", *columns), *rows])
    check_none_skipped(files, len(rows))


def export(
    run: Run,
    /,
    output: Output,
    img_size: ImgSize = (),
    dynamic: Annotated[
        tuple[Literal["batch", "size"], ...] | None,
        hint("{batch,size} ...", "default: batch; none for .tflite and .pte"),
    ] = None,
    int8: Annotated[Path | None, hint("FOLDER")] = None,
    normalize: bool = True,
    block: Block = None,
) -> None:
    """Export a trained network for another runtime and check its output.

    Args:
        run: Folder of a training run, folder written by va.save_model, or hf-hub:OWNER/NAME.
        output: File to write: .onnx, .pt2 (torch.export), .aoti.pt2 (AOTInductor), .tflite (LiteRT) or .pte
            (ExecuTorch).
        img_size: Side, or height and width, of the input images in pixels.
        dynamic: Dimensions of the input that may vary between calls.
        int8: Folder with train/CLASS/IMAGE and val/CLASS/IMAGE, for quantization to 8 bits.
        normalize: Include the normalization in the file, so that it accepts pixels in 0…1.
        block: Class of the inserted blocks.
    """
    from vision_attn.tools.export.export import export_model

    model = load_run(run, block)
    shape = input_shape(model, img_size)
    print_escaped(export_model(model, output, example_input=shape, dynamic=dynamic, int8=int8, normalize=normalize))


def train(words: list[str]) -> None:
    """Train an image classifier, with or without inserted attention.

    Example: vision-attn train --data flowers --model resnet18 --pretrained --stages -2 --freeze-backbone

    Ctrl-C saves the run, and --resume continues it.
    """
    from vision_attn.tools.cli.flags import Train, parse
    from vision_attn.tools.training.settings import merge_settings

    found, given = parse(Train, words, "train", train.__doc__)
    settings = merge_settings(given, found.config)

    from vision_attn.tools.training.run import run_training

    run_training(settings, log=print_escaped)


def evaluate(words: list[str]) -> None:
    """Evaluate the network of a run, on its validation images or on other images.

    Example: vision-attn evaluate runs/train-1 --data other-flowers
    """
    from vision_attn.tools.cli.flags import Evaluate, parse

    found, given = parse(Evaluate, words, "evaluate", evaluate.__doc__)

    from vision_attn.tools.training import run as runs

    runs.evaluate(given | ({"block": found.block} if found.block else {}), found.run, log=print_escaped)


def compare(words: list[str]) -> None:
    """Compare blocks over several seeds, with confidence intervals.

    Without a data set, the variants are compared on the task of vision-attn demo. Run the same command again to resume
    a comparison.

    Example: vision-attn compare --data flowers --model resnet18 --pretrained --stages -2 --freeze-backbone
    """
    from vision_attn.tools.cli.flags import Compare, Variant, parse

    found, given = parse(Compare, words, "compare", compare.__doc__)
    print_escaped(f"comparing {', '.join(found.comparison.variants)} with the seeds {found.comparison.seeds}")

    from vision_attn.tools.comparison.variants import recipe, settings_for_variant

    common = recipe(given, found.config)
    variants: dict[str, dict[str, Any]] = {}
    for name, sign, text in (word.partition("=") for word in found.comparison.variants):
        flags = shlex.split(text)
        base = flags.pop(0) if flags and not flags[0].startswith("-") else "attention" if sign else name
        if not name or "/" in name or name in variants:
            raise ValueError(f"variants must have distinct names that are valid folder names, got {name!r}")
        _, custom = parse(Variant, flags, f"compare --variants {name}")
        variants[name] = settings_for_variant(base, custom, common)

    options: dict[str, Any] = {name: value for name, value in vars(found.comparison).items() if name != "variants"}
    if {"data", "dataset"} & common.keys():
        from vision_attn.tools.comparison.runs import compare as compare_on_images

        compare_on_images(variants, command=shlex.join(["vision-attn", "compare", *words]), **options)
    else:
        from vision_attn.tools.comparison.demo import compare_on_recall

        compare_on_recall(variants, **options)

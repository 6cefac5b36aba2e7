"""Flags of the recipes: names, types, defaults and help. Neither torch nor timm is imported, so that help is fast."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, Suppress, UseAppendAction, arg

import vision_attn as va

Run = Annotated[Positional[str], arg(metavar="RUN")]
Images = Annotated[Positional[tuple[Path, ...]], arg(metavar="IMAGE")]
Output = Annotated[Path, arg(aliases=["-o"])]
Classes = UseAppendAction[tuple[str, ...]]


@dataclass(frozen=True)
class Settings:
    """Settings of a training run: each is a flag, and an entry of ``settings.json``."""

    # Folder with train/CLASS/IMAGE and val/CLASS/IMAGE, folder with CLASS/IMAGE, or folder of the data set.
    data: Path | None = None
    # Data set: folder, cifar10, cifar100, or a timm data set (torch/NAME, hfds/OWNER/NAME).
    dataset: str = "folder"
    download: bool = False  # Download a torchvision data set that is not in --data.
    train_split: str = "train"  # Training split of a timm data set.
    val_split: str = "validation"  # Validation split of a timm data set.
    # Fraction of each class held out for validation; by default 0.1 if there is no validation folder.
    val_fraction: float | None = None
    img_size: int | None = None  # Side of the images in pixels; by default that of a small data set or of the model.
    # Number of images per step, over all processes; by default 128, or less for at least 8 steps per epoch.
    batch_size: int | None = None
    model: str | None = None  # Name of a timm model or of a model of this library. Required.
    pretrained: bool = False  # Load the pretrained weights of the model.
    weights: str | None = None  # Checkpoint to start from: a file, a folder, or hf-hub:OWNER/NAME.
    rename: str | None = None  # Package whose parameter names the --weights file uses: efficientnet-pytorch.
    reset_head: bool = False  # Replace the classifier of --weights or --pretrained with a new one.
    stages: tuple[int | str, ...] = ()  # Stages after which to insert a block: indices such as -2, or names.
    names: tuple[str, ...] = ()  # Modules at which to insert a block: names, or globs such as 'layer*.1'.
    at: str = "after"  # Position of each block relative to its site: after or before.
    block: str = "attention"  # Block to insert: attention, a timm block such as cbam, or a class MODULE:CLASS.
    pattern: str | None = None  # Attention pattern: full, rows, columns, 'Window(7)', or an einx expression.
    block_options: tuple[str, ...] = ()  # Options of the block, such as num_heads=4 'position=Rope()' impl=bmm.
    freeze_backbone: bool = False  # Train only the blocks and a new classifier, and save them as an adapter too.
    epochs: int = 30  # Number of passes over the training images.
    # Optimizer: sgd (with Nesterov momentum), adamw or another timm optimizer; by default adamw for a frozen backbone.
    opt: str | None = None
    # Learning rate; by default 0.1 (sgd) or 0.001 (adamw), and a tenth of it if all pretrained weights are trained.
    lr: float | None = None
    attention_lr: float | None = None  # Learning rate of the inserted blocks; by default --lr.
    layer_decay: float | None = None  # Ratio of the learning rates of a layer and the next layer, such as 0.75.
    weight_decay: float = 5e-4  # Weight decay of all parameters except biases, norms and gates.
    warmup_epochs: float = 0.0  # Number of epochs of linear warm-up before the cosine schedule.
    clip_grad: float | None = None  # Maximum norm of the gradients.
    grad_accum_steps: int = 1  # Number of micro-batches per step, to use less memory.
    crop_scale: float = 0.08  # Smallest fraction of the area in random crops; 1 for no random crops up to 64 pixels.
    hflip: float = 0.5  # Probability of a horizontal flip.
    aa: str | None = None  # timm augmentation policy, such as rand-m9-mstd0.5-inc1 or augmix-m5-w4.
    reprob: float = 0.0  # Probability of random erasing.
    mixup: float = 0.0  # Mixup alpha, such as 0.2.
    cutmix: float = 0.0  # CutMix alpha, such as 1.
    label_smoothing: float = 0.0  # Fraction of each label that is spread over all classes.
    ema: float | None = None  # Decay of a moving average of the weights, which is evaluated and saved, such as 0.999.
    amp: str | None = None  # Mixed precision: bfloat16, float16 or no; by default 16 bits on CUDA.
    channels_last: bool = False  # Use the channels-last memory format.
    compile: bool = False  # Compile the model with torch.compile.
    device: str | None = None  # Device: cpu or cuda; by default cuda if available.
    workers: int | None = None  # Number of processes that decode images; by default at most one per core, and 16.
    log_with: tuple[str, ...] = ()  # Trackers of Accelerate to log to, such as tensorboard or wandb.
    seed: int = 0  # Random seed.
    # Folder for the run; by default the next runs/train-N.
    output: Annotated[Path | None, arg(aliases=["-o"])] = None
    resume: str | None = None  # Folder of a run to resume, or auto to resume or start the run in --output.
    config: Path | None = None  # Folder of another run, or its settings.json. Flags override its settings.


@dataclass(frozen=True)
class Comparison(Settings):
    """Settings of all runs of a comparison, and its variants and seeds."""

    block: Suppress[str] = "attention"
    seed: Suppress[int] = 0
    resume: Suppress[str | None] = None
    # Folder for the comparison; by default runs/compare. The same command continues a comparison.
    output: Annotated[Path | None, arg(aliases=["-o"])] = None
    # Variants: plain, convolution, se, averaging, cost-volume, attention, or NAME=VARIANT FLAGS: 'slow=se --lr 0.01'.
    variants: tuple[str, ...] = ("plain", "convolution", "se", "attention")
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)  # Random seeds of each variant.
    jobs: int | None = None  # Number of runs in parallel; by default one per GPU, or per core.
    backend: str = "loky"  # joblib backend: loky (local processes), ray, or another that is registered.


@dataclass(frozen=True)
class Evaluation:
    """Flags of ``vision-attn evaluate``."""

    run: Run  # Folder of a run, folder written by va.save_model, or hf-hub:OWNER/NAME.
    # Other images: a folder with val/CLASS/IMAGE or CLASS/IMAGE; by default the validation images of the run.
    data: Path | None = None
    dataset: str | None = None  # Data set, as for vision-attn train.
    val_split: str | None = None  # Split of a timm data set.
    batch_size: int | None = None  # Number of images per step.
    block: Classes = ()  # Class MODULE:CLASS of custom blocks. Repeat the flag for several classes.
    device: str | None = None  # Device: cpu or cuda; by default cuda if available.
    workers: int | None = None  # Number of processes that decode images.


@dataclass(frozen=True)
class Prediction:
    """Flags of ``vision-attn predict``."""

    run: Run  # Folder of a run, folder written by va.save_model, or hf-hub:OWNER/NAME.
    images: Images = ()  # Image files, or folders of images.
    top: int = 5  # Number of classes to print for each image.
    batch_size: int = 32  # Number of images per forward pass.
    device: str | None = None  # Device: cpu or cuda; by default cuda if available.
    # CSV file to write, with the classes and probabilities of all images.
    output: Annotated[Path | None, arg(aliases=["-o"])] = None
    block: Classes = ()  # Class MODULE:CLASS of custom blocks. Repeat the flag for several classes.


@dataclass(frozen=True)
class Export:
    """Flags of ``vision-attn export``."""

    run: Run  # Folder of a run, folder written by va.save_model, or hf-hub:OWNER/NAME.
    output: Output  # File to write: .onnx, or .pt2 (torch.export).
    img_size: tuple[int, ...] = ()  # Side, or height and width, of the input images; by default the size of the model.
    dynamic: tuple[str, ...] = ("batch",)  # Dimensions of the input that may vary: batch and size.
    normalize: bool = True  # Include the normalization in the file, so that it accepts pixels in 0…1.
    block: Classes = ()  # Class MODULE:CLASS of custom blocks. Repeat the flag for several classes.


@dataclass(frozen=True)
class Exploration:
    """Flags of ``vision-attn explore``."""

    # Folder of a run, folder written by va.save_model, hf-hub:OWNER/NAME, or a timm model.
    model: Annotated[Positional[str], arg(metavar="MODEL")]
    images: Images = ()  # Image files, or folders of images.
    pretrained: bool = False  # Load the pretrained weights of the timm model.
    names: tuple[str, ...] = ()  # Attention modules to show: names, or globs such as 'layer*.1'. The default is all.
    output: Output = Path("report.html")  # HTML file to write.
    block: Classes = ()  # Class MODULE:CLASS of custom blocks. Repeat the flag for several classes.


@dataclass(frozen=True)
class Demo:
    """Flags of ``vision-attn demo``."""

    output: Output = Path("demo-output")  # Folder for the results.
    steps: int = 400  # Number of training steps of each network.
    seed: int = 0  # Random seed.


@dataclass(frozen=True)
class Inspection:
    """Flags of ``vision-attn inspect``."""

    model: Annotated[Positional[str], arg(metavar="MODEL")]  # Name of a timm model or of a model of this library.
    img_size: tuple[int, ...] = ()  # Side, or height and width, of the input images; by default the size of the model.
    pattern: str = "full"  # Attention pattern: full, rows, columns, 'Window(7)', or an einx expression.


@dataclass(frozen=True)
class Nothing:
    """No flags."""


#: Settings that may change when a run is resumed, and settings that belong to one call.
MACHINE, CALL = {"data", "download", "device", "workers", "compile", "log_with"}, {"output", "resume", "config"}
#: Settings that select the images.
DATA = {"data", "dataset", "train_split", "val_split", "val_fraction"}
#: Smallest and largest values.
LIMITS = ((1, 1_000_000, "epochs batch_size img_size grad_accum_steps jobs top steps"), (0, 2**32 - 1, "seed workers"),
          (1e-12, 1000, "lr attention_lr clip_grad"), (0, 1000, "weight_decay warmup_epochs mixup cutmix"),
          (0, 1, "hflip reprob label_smoothing ema"), (1e-6, 1, "crop_scale"),
          (1e-6, 1 - 1e-6, "val_fraction layer_decay"))  # fmt: skip
CHOICES = {"device": ("cpu", "cuda"), "amp": ("bfloat16", "float16", "no"), "at": ("after", "before"),
           "rename": ("efficientnet-pytorch",)}  # fmt: skip
#: Settings that exclude each other, and settings that require one of others.
CONFLICTS = "weights pretrained", "freeze_backbone layer_decay", "stages names"
REQUIRED = ("rename weights", "reset_head weights pretrained", "freeze_backbone weights pretrained",
            "block_options stages names", "pattern stages names", "attention_lr stages names")  # fmt: skip


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_values(settings: Any) -> None:
    """Raise an error for a value outside of its limits or choices."""
    for name, value in vars(settings).items():
        low, high = next(((low, high) for low, high, names in LIMITS if name in names.split()), (None, None))
        for x in value if isinstance(value, tuple) else (value,):
            if low is not None and high is not None and x is not None and not low <= x <= high:
                limit = f"at most {high}" if x > high else f"at least {low}"
                raise ValueError(f"{flag(name)} must be {limit}, got {x}")
        if name == "img_size" and isinstance(value, tuple) and len(value) > 2:
            raise ValueError(f"{flag(name)} must be one or two numbers, got {' '.join(map(str, value))}")
        if name in CHOICES and value not in (None, *CHOICES[name]):
            raise ValueError(f"{flag(name)} must be {' or '.join(CHOICES[name])}, got {value!r}")


def check(s: Settings) -> Settings:
    """Return the settings of a run with the defaults that follow from others; raise an error for wrong settings."""
    check_values(s)
    if s.model is None:
        raise ValueError("--model is required: the name of a timm model. Example: --model resnet18 --pretrained")
    if s.data is None and not s.dataset.startswith("hfds/"):
        raise ValueError("--data is required: a folder of images. Example: --data flowers")
    for one, other in map(str.split, CONFLICTS):
        if getattr(s, one) and getattr(s, other):
            raise ValueError(f"{flag(one)} cannot be combined with {flag(other)}")
    for one, *others in map(str.split, REQUIRED):
        if getattr(s, one) and not any(getattr(s, other) for other in others):
            raise ValueError(f"{flag(one)} requires {' or '.join(map(flag, others))}")
    if "context_channels" in parse_options(s.block_options):
        raise ValueError("--block-options must not contain context_channels: a training run has no second feature map")
    if s.config and s.resume not in (None, "auto"):
        raise ValueError("--config cannot be combined with --resume RUN, which continues with the settings of that run")
    if s.epochs <= s.warmup_epochs:
        raise ValueError(f"--warmup-epochs must be less than --epochs {s.epochs}, got {s.warmup_epochs:g}")
    opt = s.opt or ("adamw" if s.freeze_backbone else "sgd")  # with sgd, a new block on a frozen backbone trains slowly
    lr = {"sgd": 0.1, "adamw": 1e-3}.get(opt) if s.lr is None else s.lr
    if s.lr is None and lr and (s.weights or s.pretrained) and not s.freeze_backbone:
        lr /= 10
    return replace(s, opt=opt, lr=lr)


def parse_options(words: Iterable[str]) -> dict[str, Any]:
    """Parse options of a block.

    >>> parse_options(["pattern=Window(7)", "qk_norm=match", "causal=false", "qkv_bias=true"])
    {'pattern': Window(size=7, shift=0), 'qk_norm': 'match', 'causal': False, 'qkv_bias': True}
    """
    found: dict[str, Any] = {}
    for word in words:
        name, sign, text = word.partition("=")
        if not (name.isidentifier() and sign) or name in found:
            raise ValueError(f"--block-options must be distinct NAME=VALUE pairs such as num_heads=4, got {word!r}")
        found[name] = parse_option(text)
    return found


def parse_option(text: str, name: str = "--block-options") -> Any:
    """Return a literal, a pattern or position encoding with literal arguments, or the text. No other code is run.

    >>> parse_option("Rope(100.0)").temperature, parse_option("Attention2d(8)")
    (100.0, 'Attention2d(8)')
    """
    try:
        tree = ast.parse(text.removeprefix("va."), mode="eval").body
        kind: Any = getattr(va, ast.unparse(tree.func), None) if isinstance(tree, ast.Call) else None
        if not isinstance(tree, ast.Call) or not hasattr(kind, "__dataclass_fields__"):
            return ast.literal_eval(tree)
        values = [*map(ast.literal_eval, tree.args)]
        named = {str(word.arg): ast.literal_eval(word.value) for word in tree.keywords}
    except (SyntaxError, TypeError, ValueError):
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return kind(*values, **named)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {text}: {error}") from error

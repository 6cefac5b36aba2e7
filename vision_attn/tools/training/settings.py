"""Settings of a training run: names, types, allowed values, defaults and help. Each setting is also a flag.

The names follow the training scripts of timm and torchvision. Neither torch nor timm is imported, so that help is fast.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from vision_attn.tools.hints import hint

#: Default learning rates of the optimizers that have one.
DEFAULT_LR = {"sgd": 0.1, "adamw": 1e-3}
#: Settings that do not change the result, or may change when a run is resumed.
MACHINE_SETTINGS = {"data", "download", "device", "workers", "compile", "log_with", "early_stopping"}
#: Settings that are not read from the settings of another run.
CALL_SETTINGS = {"output", "resume"}


def as_strings(value: Any) -> Any:
    """Convert a name, an index or a list of these to a tuple of strings."""
    return tuple(map(str, value)) if isinstance(value, (list, tuple)) else (str(value),)


Probability = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[float, Field(gt=0, le=1000)]
NonNegative = Annotated[float, Field(ge=0, le=1000)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**32)]
Strings = Annotated[tuple[str, ...], BeforeValidator(as_strings)]
DataSet = Annotated[str, Field(pattern="^(folder|cifar10|cifar100|(torch|hfds)/.+)$")]


class PlainErrors(type):
    """Metaclass that converts errors of pydantic to a ``ValueError`` with one line that names each wrong setting."""

    #: type of the errors; tyro prints each ``ValueError`` in a box with other lines
    error: type[Exception] = ValueError

    def __call__(cls, *args: Any, **values: Any) -> Any:
        try:
            return super().__call__(*args, **values)
        except ValidationError as error:
            lines = []
            for one in error.errors():
                name, message = ".".join(map(str, one["loc"])), one["msg"].removeprefix("Value error, ")
                lines.append(f"{name}: {message}, got {one['input']!r}" if name else message)
            raise cls.error("; ".join(lines)) from None


#: Descriptions of the values of flags whose default is None or empty.
HINTS = {
    "data": hint("FOLDER"),
    "val_fraction": hint("FRACTION", "default: 0.1 if there is no validation folder"),
    "img_size": hint("PIXELS", "default: size of a small data set, or of the model"),
    "mean": hint("R G B", "default: mean of the model"),
    "std": hint("R G B", "default: std of the model"),
    "crop": hint("{pad,resized}", "default: pad for images of at most 64 pixels"),
    "aa": hint("POLICY"),
    "model": hint("NAME", "required"),
    "weights": hint("FILE"),
    "rename": hint("{efficientnet-pytorch}"),
    "drop_path": hint("RATE"),
    "insert": hint("SITE [SITE ...]", "default: no block"),
    "block_options": hint("NAME=VALUE [NAME=VALUE ...]"),
    "lr": hint("RATE", "default: 0.1 for sgd, 0.001 for adamw, divided by 10 for pretrained weights"),
    "attention_lr": hint("RATE", "default: --lr"),
    "layer_decay": hint("FRACTION"),
    "decay_epochs": hint("EPOCH [EPOCH ...]"),
    "clip_grad": hint("NORM"),
    "ema": hint("DECAY"),
    "early_stopping": hint("EPOCHS"),
    "device": hint("{cpu,cuda}", "default: cuda if available"),
    "workers": hint("COUNT", "default: one per core, at most 16"),
    "amp": hint("{bfloat16,float16,no}", "default: bfloat16 or float16 on CUDA, no on the CPU"),
    "output": hint("FOLDER", "default: the next runs/train-N", "-o"),
    "resume": hint("{FOLDER,auto}"),
    "log_with": hint("TRACKER [TRACKER ...]"),
}


@dataclass(frozen=True, config=ConfigDict(extra="forbid", defer_build=True))
class Settings(metaclass=PlainErrors):
    """Train an image classifier, with or without inserted attention.

    Example: vision-attn train --data flowers --model resnet18 --pretrained --insert layer3

    Ctrl-C saves the run, and --resume continues it. --config FILE reads the settings of another run.
    """

    # --- data

    data: Path | None = None  # Folder with train/CLASS/IMAGE and val/CLASS/IMAGE, or the folder of the data set.
    dataset: DataSet = "folder"  # Data set: folder, cifar10, cifar100, or a timm data set (torch/NAME, hfds/NAME).
    download: bool = False  # Download a torchvision data set that is not in --data.
    train_split: str = "train"  # Training split of a timm data set.
    val_split: str = "validation"  # Validation split of a timm data set.
    val_fraction: Fraction | None = None  # Fraction of each class held out for validation.
    img_size: Count | None = None  # Height and width of the input images in pixels.
    mean: tuple[float, float, float] | None = None  # Mean of each channel, for pixels in 0…1.
    std: tuple[Positive, Positive, Positive] | None = None  # Standard deviation of each channel, for pixels in 0…1.
    crop: Literal["pad", "resized"] | None = None  # Random crop of the padded image, or random resized crop.
    crop_padding: NonNegativeInt = 4  # Padding on each side in pixels, for --crop pad.
    crop_scale: Fraction = 0.08  # Smallest fraction of the image area, for --crop resized.
    aa: str | None = None  # timm augmentation policy, such as rand-m9-mstd0.5-inc1 or augmix-m5-w4.
    color_jitter: NonNegative = 0.0  # Strength of brightness, contrast and saturation jitter, such as 0.4.
    hflip: Probability = 0.5  # Probability of a horizontal flip.
    reprob: Probability = 0.0  # Probability of random erasing.
    mixup: NonNegative = 0.0  # Mixup alpha, such as 0.2.
    cutmix: NonNegative = 0.0  # CutMix alpha, such as 1.

    # --- network

    model: str | None = None  # Name of a timm model or of a model of this library, or hf-hub:OWNER/NAME.
    pretrained: bool = False  # Load the pretrained weights of the model.
    weights: Path | None = None  # Checkpoint to start from: .pth, .pt, .th or .safetensors.
    rename: Literal["efficientnet-pytorch"] | None = None  # Package whose parameter names the --weights file uses.
    reset_head: bool = False  # Train a new classifier, initialized with zeros, instead of loading it from --weights.
    drop_path: Fraction | None = None  # Stochastic depth rate of the last residual branch.
    insert: Strings = ()  # Where to insert blocks: module names, stage indices, or globs such as 'layer*.1'.
    at: Literal["after", "before", "branch"] = "after"  # Position of each block relative to its site.
    block: str = "attention"  # Block to insert: attention, a timm block such as cbam, or a class MODULE:CLASS.
    block_options: Strings = ()  # Options of the block: num_heads=4 impl=bmm 'position=Rope2d()' 'pattern=Window(4)'.
    freeze_backbone: bool = False  # Train only the blocks and a new classifier, and save them as an adapter too.

    # --- recipe

    epochs: Count = 30  # Number of passes over the training images.
    batch_size: Count = 128  # Number of images per step, over all processes.
    grad_accum_steps: Count = 1  # Number of micro-batches per step, to use less memory.
    opt: str = "sgd"  # Optimizer: sgd (with Nesterov momentum), adamw or another timm optimizer.
    lr: Positive | None = None  # Learning rate.
    attention_lr: Positive | None = None  # Learning rate of the inserted blocks.
    layer_decay: Fraction | None = None  # Ratio of the learning rates of a layer and the next layer, such as 0.75.
    momentum: Probability = 0.9  # Momentum of sgd and similar optimizers.
    weight_decay: NonNegative = 5e-4  # Weight decay of all parameters except biases, norms and gates.
    sched: Literal["cosine", "tanh", "poly", "step", "multistep", "constant"] = "cosine"  # Learning-rate schedule.
    warmup_epochs: NonNegative = 0.0  # Number of epochs of linear warm-up before the schedule.
    min_lr: NonNegative = 0.0  # Final learning rate of --sched cosine, tanh and poly.
    decay_epochs: tuple[Count, ...] = ()  # Epochs between decays (step), or epochs of the decays (multistep).
    decay_rate: Positive = 0.1  # Decay factor of --sched step and multistep, or power of --sched poly.
    clip_grad: Positive | None = None  # Maximum norm of the gradients.
    label_smoothing: Probability = 0.0  # Fraction of each label that is spread over all classes.
    class_weights: bool = False  # Weight the loss of each class by its inverse frequency.
    ema: Probability | None = None  # Evaluate and save a moving average of the weights with this decay, such as 0.999.
    early_stopping: Count | None = None  # Stop after this many epochs without a higher top-1 accuracy.
    seed: NonNegativeInt = 0  # Random seed.

    # --- machine

    device: Literal["cpu", "cuda"] | None = None  # Device to train on.
    workers: NonNegativeInt | None = None  # Number of processes that decode images.
    amp: Literal["bfloat16", "float16", "no"] | None = None  # Mixed precision.
    deterministic: bool = False  # Make CUDA runs bitwise reproducible. Some kernels are slower or not supported.
    channels_last: bool = False  # Use the channels-last memory format.
    compile: bool = False  # Compile the model with torch.compile.

    # --- run

    output: Path | None = None  # Folder for the run.
    resume: str | None = None  # Folder of a run to resume, or auto to resume or start the run in --output.
    log_with: Strings = ()  # Trackers to log to: tensorboard, wandb or another tracker that Accelerate supports.

    def __post_init__(self) -> None:
        for one, other in (("weights", "pretrained"), ("freeze_backbone", "layer_decay")):
            if getattr(self, one) and getattr(self, other):
                raise ValueError(f"{one} cannot be combined with {other}={getattr(self, other)}")
        needs = {"rename": "weights", "reset_head": "weights", "attention_lr": "insert", "block_options": "insert"}
        for name, other in {**needs, "mean": "std", "std": "mean"}.items():
            if getattr(self, name) and not getattr(self, other):
                raise ValueError(f"{name} requires {other}=…")
        if self.sched in ("step", "multistep") and not self.decay_epochs:
            raise ValueError(f"decay_epochs is required for sched={self.sched}")
        if self.epochs <= self.warmup_epochs:
            raise ValueError(f"warmup_epochs must be less than epochs={self.epochs}, got {self.warmup_epochs}")

    def require_model(self) -> str:
        """Return the name of the model, which has no default."""
        if self.model is None:
            expected = "expected the name of a timm model or of a model of this library"
            raise ValueError(f"model is required: {expected}. Example: --model resnet18 --pretrained")
        return self.model

    @property
    def base_lr(self) -> float:
        """The given learning rate, or the default of the optimizer, which is divided by 10 for pretrained weights."""
        if self.lr is not None:
            return self.lr
        if self.opt not in DEFAULT_LR:
            raise ValueError(f"lr is required for opt={self.opt}: only {' and '.join(DEFAULT_LR)} have a default")
        return DEFAULT_LR[self.opt] / (10 if self.weights or self.pretrained else 1)

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as values for ``settings.yaml``."""
        return TypeAdapter(Settings).dump_python(self, mode="json")


# The class has plain types for its readers; tyro finds the hints here.
for name, text in Settings.__annotations__.items():
    if name in HINTS:
        Settings.__annotations__[name] = f"Annotated[{text}, HINTS[{name!r}]]"


def differences(one: Settings, other: Settings) -> list[str]:
    """Return the names of different settings that can change the result of a run."""
    return [name for name in non_default_settings(one, other) if name not in MACHINE_SETTINGS | CALL_SETTINGS]


def non_default_settings(settings: Settings, default: Settings | None = None) -> dict[str, Any]:
    """Return the settings that differ from the default."""
    defaults = vars(default or Settings())
    return {name: value for name, value in vars(settings).items() if value != defaults.get(name, value)}


def write_settings(settings: Settings) -> bytes:
    """Return the content of ``settings.yaml``."""
    import yaml

    return yaml.safe_dump(settings.as_dict(), sort_keys=False, allow_unicode=True).encode()


def read_settings(path: Path, given: Collection[str]) -> Settings:
    """Read the settings of another run, except :data:`CALL_SETTINGS`.

    Args:
        path: folder of the run, or its ``settings.yaml``.
        given: names of the settings that the user passes. The file is not trusted: it can download data or import a
            class only if the user passes the same setting.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file does not contain settings, or contains an unknown setting or one that the user must pass.
    """
    import yaml

    path = path / "settings.yaml" if path.is_dir() else path
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist. Expected the folder of a run, or its settings.yaml")
    try:
        values = yaml.safe_load(path.read_bytes())
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path} is not a valid YAML file: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must contain a mapping from names to values, got {type(values).__name__}")
    kept = {str(name): value for name, value in values.items() if name not in CALL_SETTINGS | {"download"}}
    for name, mark in (("dataset", "hfds/"), ("block", ":")):
        if mark in str(kept.get(name)) and name not in given:
            remedy = f"pass --{name} {kept[name]} if you trust it"
            raise ValueError(f"{path} contains {name} {kept[name]!r}, which can download or run code: {remedy}")
    try:
        return Settings(**kept)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error

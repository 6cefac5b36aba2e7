"""Settings of a training run: names, types, allowed values, defaults and help. Each setting is also a flag.

The names follow the training scripts of timm and torchvision. Neither torch nor timm is imported, so that help is fast.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated_dataclass

from vision_attn.tools.hints import hint

#: Default learning rates of the optimizers that have one.
DEFAULT_LR = {"sgd": 0.1, "adamw": 1e-3}
#: Default number of images per step, unless the data set is small.
DEFAULT_BATCH = 128
#: Settings that do not change the result, or may change when a run is resumed.
MACHINE_SETTINGS = {"data", "download", "device", "workers", "compile", "log_with"}
#: Settings that are not read from the settings of another run.
CALL_SETTINGS = {"output", "resume"}
#: Value of ``resume`` to resume the run in ``output`` if there is one, and to start it otherwise.
AUTO = Path("auto")


def as_tuple(value: Any) -> Any:
    """Convert a single value or a list to a tuple."""
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def check_dataset(name: str) -> str:
    """Raise an error unless data sets of this name can be read."""
    expected = "folder, cifar10, cifar100, torch/NAME (torchvision) or hfds/OWNER/NAME (Hugging Face)"
    if name not in ("folder", "cifar10", "cifar100") and not name.startswith(("torch/", "hfds/")):
        raise ValueError(f"expected {expected}")
    return name


Probability = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[float, Field(gt=0, le=1000)]
NonNegative = Annotated[float, Field(ge=0, le=1000)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**32)]
Strings = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]
Stages = Annotated[tuple[int | str, ...], BeforeValidator(as_tuple)]
DataSet = Annotated[str, AfterValidator(check_dataset)]


@dataclass(frozen=True)
class Data:
    """Images to read."""

    # Folder with train/CLASS/IMAGE and val/CLASS/IMAGE, or the folder of the data set.
    data: Annotated[Path | None, hint("FOLDER", "required for folders")] = None
    dataset: DataSet = "folder"  # Data set: folder, cifar10, cifar100, or a timm data set (torch/NAME, hfds/NAME).
    download: bool = False  # Download a torchvision data set that is not in --data.
    train_split: str = "train"  # Training split of a timm data set.
    val_split: str = "validation"  # Validation split of a timm data set.
    # Fraction of each class held out for validation.
    val_fraction: Annotated[Fraction | None, hint("FRACTION", "default: 0.1 if there is no validation folder")] = None
    # Height and width of the input images in pixels.
    img_size: Annotated[Count | None, hint("PIXELS", "default: size of a small data set, or of the model")] = None
    # Mean of each channel, for pixels in 0…1.
    mean: Annotated[tuple[float, float, float] | None, hint("R G B", "default: mean of the model")] = None
    # Standard deviation of each channel, for pixels in 0…1.
    std: Annotated[tuple[Positive, Positive, Positive] | None, hint("R G B", "default: std of the model")] = None
    # Random crop of the padded image, or random resized crop. With pad, validation images are not cropped.
    crop: Annotated[Literal["pad", "resized"] | None, hint("{pad,resized}", "default: pad up to 64 pixels")] = None
    # Number of images per step, over all processes.
    batch_size: Annotated[Count | None, hint("COUNT", "default: 128, or less for at least 8 steps per epoch")] = None


@dataclass(frozen=True)
class Model:
    """Network and its initial weights."""

    # Name of a timm model or of a model of this library.
    model: Annotated[str | None, hint("NAME", "required")] = None
    pretrained: bool = False  # Load the pretrained weights of the model.
    # Checkpoint to start from: .pth, .pt, .th or .safetensors.
    weights: Annotated[Path | None, hint("FILE")] = None
    # Package whose parameter names the --weights file uses.
    rename: Annotated[Literal["efficientnet-pytorch"] | None, hint("{efficientnet-pytorch}")] = None
    reset_head: bool = False  # Train a new classifier, initialized with zeros, instead of loading it from --weights.


@dataclass(frozen=True)
class Blocks:
    """Blocks to insert."""

    # Stages after which to insert a block: indices such as -2, or names.
    stages: Annotated[Stages, hint("STAGE [STAGE ...]", "default: no block")] = ()
    # Modules at which to insert a block: names, or globs such as 'layer*.1'.
    names: Annotated[Strings, hint("MODULE [MODULE ...]", "default: no block")] = ()
    at: Literal["after", "before"] = "after"  # Position of each block relative to its site.
    block: str = "attention"  # Block to insert: attention, a timm block such as cbam, or a class MODULE:CLASS.
    # Attention pattern: full, rows, columns, 'Window(7)' or another pattern, or an einx expression.
    pattern: Annotated[str | None, hint("PATTERN", "default: full")] = None
    # Options of the block: num_heads=4 impl=bmm 'position=Rope()'.
    block_options: Annotated[Strings, hint("NAME=VALUE [NAME=VALUE ...]")] = ()


@dataclass(frozen=True)
class Training:
    """Augmentation, optimization and regularization."""

    crop_padding: NonNegativeInt = 4  # Padding on each side in pixels, for --crop pad.
    crop_scale: Fraction = 0.08  # Smallest fraction of the image area, for --crop resized.
    # timm augmentation policy, such as rand-m9-mstd0.5-inc1 or augmix-m5-w4.
    aa: Annotated[str | None, hint("POLICY")] = None
    color_jitter: NonNegative = 0.0  # Strength of brightness, contrast and saturation jitter, such as 0.4.
    hflip: Probability = 0.5  # Probability of a horizontal flip.
    reprob: Probability = 0.0  # Probability of random erasing.
    mixup: NonNegative = 0.0  # Mixup alpha, such as 0.2.
    cutmix: NonNegative = 0.0  # CutMix alpha, such as 1.
    epochs: Count = 30  # Number of passes over the training images.
    freeze_backbone: bool = False  # Train only the blocks and a new classifier, and save them as an adapter too.
    # Optimizer: sgd (with Nesterov momentum), adamw or another timm optimizer.
    opt: Annotated[str | None, hint("NAME", "default: adamw with --freeze-backbone, sgd otherwise")] = None
    # Learning rate.
    lr: Annotated[Positive | None, hint("RATE", "default: 0.1 (sgd), 0.001 (adamw); 1/10 with weights")] = None
    # Learning rate of the inserted blocks.
    attention_lr: Annotated[Positive | None, hint("RATE", "default: --lr")] = None
    # Ratio of the learning rates of a layer and the next layer, such as 0.75.
    layer_decay: Annotated[Fraction | None, hint("FRACTION")] = None
    momentum: Probability = 0.9  # Momentum of sgd and similar optimizers.
    weight_decay: NonNegative = 5e-4  # Weight decay of all parameters except biases, norms and gates.
    sched: Literal["cosine", "constant"] = "cosine"  # Learning-rate schedule.
    warmup_epochs: NonNegative = 0.0  # Number of epochs of linear warm-up before the schedule.
    min_lr: NonNegative = 0.0  # Final learning rate of --sched cosine.
    # Maximum norm of the gradients.
    clip_grad: Annotated[Positive | None, hint("NORM")] = None
    grad_accum_steps: Count = 1  # Number of micro-batches per step, to use less memory.
    label_smoothing: Probability = 0.0  # Fraction of each label that is spread over all classes.
    class_weights: bool = False  # Weight the loss of each class by its inverse frequency.
    # Stochastic depth rate of the last residual branch.
    drop_path: Annotated[Fraction | None, hint("RATE")] = None
    # Evaluate and save a moving average of the weights with this decay, such as 0.999.
    ema: Annotated[Probability | None, hint("DECAY")] = None
    deterministic: bool = False  # Make CUDA runs bitwise reproducible. Some kernels are slower or not supported.
    channels_last: bool = False  # Use the channels-last memory format.
    compile: bool = False  # Compile the model with torch.compile.


@dataclass(frozen=True)
class Machine:
    """Device and processes."""

    # Device to run on.
    device: Annotated[Literal["cpu", "cuda"] | None, hint("{cpu,cuda}", "default: cuda if available")] = None
    # Number of processes that decode images.
    workers: Annotated[NonNegativeInt | None, hint("COUNT", "default: one per core, at most 16")] = None
    # Mixed precision: bfloat16, float16 or no.
    amp: Annotated[Literal["bfloat16", "float16", "no"] | None, hint("PRECISION", "default: 16 bits on CUDA")] = None
    # Trackers to log to: tensorboard, wandb or another tracker that Accelerate supports.
    log_with: Annotated[Strings, hint("TRACKER [TRACKER ...]")] = ()


@dataclass(frozen=True)
class Output:
    """Folder and seed of the run."""

    # Folder for the run.
    output: Annotated[Path | None, hint("FOLDER", "default: the next runs/train-N", "-o")] = None
    # Folder of a run to resume, or auto to resume or start the run in --output.
    resume: Annotated[Path | None, hint("{FOLDER,auto}")] = None
    seed: NonNegativeInt = 0  # Random seed.


@validated_dataclass(frozen=True, config=ConfigDict(extra="forbid", defer_build=True))
class Settings(Output, Machine, Training, Blocks, Model, Data):
    """Settings of ``va.train`` and of the command line, where ``vision-attn train --help`` describes them."""

    def __post_init__(self) -> None:
        for one, other in (("weights", "pretrained"), ("freeze_backbone", "layer_decay")):
            if getattr(self, one) and getattr(self, other):
                raise ValueError(f"{one} cannot be combined with {other}={getattr(self, other)}")
        for name, other in (("rename", "weights"), ("reset_head", "weights"), ("mean", "std"), ("std", "mean")):
            if getattr(self, name) and not getattr(self, other):
                raise ValueError(f"{name} requires {other}")
        # A given network, which has no name, may contain blocks.
        for name in ("block_options", "pattern", *(("attention_lr",) if self.model else ())):
            if getattr(self, name) and not self.has_blocks:
                raise ValueError(f"{name} requires stages or names at which to insert blocks")
        if self.epochs <= self.warmup_epochs:
            raise ValueError(f"warmup_epochs must be less than epochs={self.epochs}, got {self.warmup_epochs}")

    @property
    def batch(self) -> int:
        """Number of images per step."""
        return self.batch_size or DEFAULT_BATCH

    @property
    def has_blocks(self) -> bool:
        """True if blocks are inserted."""
        return bool(self.stages or self.names)

    def require_model(self) -> str:
        """Return the name of the model, which has no default."""
        if self.model is None:
            expected = "expected the name of a timm model or of a model of this library"
            raise ValueError(f"model is required: {expected}. Example: --model resnet18 --pretrained")
        return self.model

    @property
    def optimizer(self) -> str:
        """Name of the optimizer. With sgd, a new block on a frozen backbone trains slowly."""
        return self.opt or ("adamw" if self.freeze_backbone else "sgd")

    @property
    def base_lr(self) -> float:
        """The given learning rate, or the default of the optimizer, divided by 10 if pretrained weights are trained."""
        if self.lr is not None:
            return self.lr
        if self.optimizer not in DEFAULT_LR:
            raise ValueError(f"lr is required for opt={self.opt}: only {' and '.join(DEFAULT_LR)} have a default")
        return DEFAULT_LR[self.optimizer] / (
            10 if (self.weights or self.pretrained) and not self.freeze_backbone else 1
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as values for ``settings.yaml``."""
        return TypeAdapter(Settings).dump_python(self, mode="json")

    def to_yaml(self) -> bytes:
        """Return the content of ``settings.yaml``."""
        import yaml

        return yaml.safe_dump(self.as_dict(), sort_keys=False, allow_unicode=True).encode()


def make_settings(**values: Any) -> Settings:
    """Return validated settings; raise an error with one line for the first wrong setting."""
    try:
        return Settings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{name}: {message}, got {first['input']!r}" if name else message) from None


def refuse_creation(settings: Settings, network: object) -> None:
    """Raise an error for settings that create a network or change it, if a network is given."""
    defaults = {**vars(Model()), **vars(Blocks()), "drop_path": None}
    if given := [name for name, value in defaults.items() if getattr(settings, name) != value]:
        expected = f"expected the name of a model to create, got a {type(network).__name__}"
        raise ValueError(f"{', '.join(given)}: {expected}. Insert blocks and load weights before training")


def merge_settings(given: Mapping[str, Any], other: Path | None = None) -> Settings:
    """Return the given settings, completed with the settings of another run, or of the run to resume.

    Args:
        given: settings by name.
        other: folder of the other run, or its ``settings.yaml``; by default, the run in ``resume``.
    """
    resume = Path(given.get("resume") or AUTO)
    other = other or (None if resume == AUTO else resume)
    base = vars(read_settings(other, given)) if other else {}
    return make_settings(**override(base, given))


def override(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changed settings. Sites given by stages and by names replace each other."""
    sites = {"stages", "names"} if {"stages", "names"} & changes.keys() else set()
    return {**{name: value for name, value in settings.items() if name not in sites}, **changes}


def changes(settings: Settings, other: Settings) -> dict[str, Any]:
    """Return the settings that differ from other settings, except :data:`CALL_SETTINGS`."""
    found = {name: value for name, value in vars(settings).items() if value != getattr(other, name)}
    return {name: value for name, value in found.items() if name not in CALL_SETTINGS}


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
    try:
        values = dict(yaml.safe_load(path.read_bytes()))
    except (yaml.YAMLError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not contain settings ({' '.join(str(error).split())})") from error
    kept = {str(name): value for name, value in values.items() if name not in CALL_SETTINGS | {"download"}}
    for name, mark in (("dataset", "hfds/"), ("block", ":")):
        if mark in str(kept.get(name)) and name not in given:
            remedy = f"pass --{name} {kept[name]} if you trust it"
            raise ValueError(f"{path} contains {name} {kept[name]!r}, which can download or run code: {remedy}")
    try:
        return make_settings(**kept)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error

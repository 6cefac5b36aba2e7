"""Settings of a training run: names, types, allowed values, defaults and help. The command line makes flags of them.

The names are those of timm's and torchvision's scripts. Neither torch nor timm is imported, so that help is fast.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from tyro.conf import arg

#: Default learning rates of the optimizers that have one.
DEFAULT_LR = {"sgd": 0.1, "adamw": 1e-3}
#: Settings that do not change the result, or that may change when a run is resumed.
MACHINE_SETTINGS = {"data", "download", "device", "workers", "compile", "log_with", "early_stopping"}
#: Settings of one call, which are not read from the settings of another run.
CALL_SETTINGS = {"output", "resume"}


def as_strings(value: Any) -> Any:
    """Return a tuple of strings; a single name or index is a list of one."""
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
    """Metaclass that turns pydantic's errors into a ``ValueError`` of one line that names each wrong setting."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        try:
            return super().__call__(*args, **values)
        except ValidationError as error:
            lines = []
            for one in error.errors():
                name, message = ".".join(map(str, one["loc"])), one["msg"].removeprefix("Value error, ")
                lines.append(f"{name}: {message}; got {one['input']!r}" if name else message)
            raise ValueError("; ".join(lines)) from None


@dataclass(frozen=True, config=ConfigDict(extra="forbid", defer_build=True))
class Settings(metaclass=PlainErrors):
    """Train an image classifier, with or without inserted attention. Ctrl-C saves the run, --resume continues it.

    vision-attn train --data flowers --model resnet18 --pretrained --insert layer3

    vision-attn train --dataset cifar100 --data data --download --insert -1
    """

    # --- data

    data: Path | None = None  # folder with train/CLASS/IMAGE and val/CLASS/IMAGE, or folder of the data set
    dataset: DataSet = "folder"  # folder, cifar10, cifar100, or a data set of timm: torch/…, hfds/…
    download: bool = False  # download a data set of torchvision that is not in --data
    train_split: str = "train"  # split of timm's data set to train on
    val_split: str = "validation"  # split of timm's data set to evaluate on
    val_share: Fraction | None = None  # fraction of each class held out for evaluation; None: 0.1 without val/
    img_size: Count | None = None  # image side in pixels; None: that of the data or the model
    mean: tuple[float, float, float] | None = None  # mean of each channel, pixels in 0…1; None: the model's
    std: tuple[Positive, Positive, Positive] | None = None  # standard deviation of each channel; None: the model's
    crop: Literal["pad", "resized"] | None = None  # random crop of the padded image (default up to 64 px), or resized
    crop_padding: NonNegativeInt = 4  # padding on each side in pixels, for --crop pad
    crop_scale: Fraction = 0.08  # smallest fraction of the image area, for --crop resized
    aa: str | None = None  # augmentation policy of timm: rand-m9-mstd0.5-inc1, augmix-m5-w4, …
    color_jitter: NonNegative = 0.0  # strength of brightness, contrast and saturation jitter, such as 0.4
    hflip: Probability = 0.5  # probability of a horizontal flip
    reprob: Probability = 0.0  # probability of random erasing
    mixup: NonNegative = 0.0  # alpha of mixup, such as 0.2
    cutmix: NonNegative = 0.0  # alpha of cutmix, such as 1

    # --- network

    model: str = "resnet20"  # model name known to timm, or a model of this library
    pretrained: bool = False  # load the model's pretrained weights
    weights: Path | None = None  # initial checkpoint: .pth, .pt, .th, .safetensors
    rename: Literal["efficientnet-pytorch"] | None = None  # package whose names of tensors --weights has
    reset_head: bool = False  # initialize a new classifier, for other classes than those of --weights
    drop_path: Fraction | None = None  # stochastic depth rate of the last residual branch
    insert: Strings = ()  # sites of the blocks: modules (globs: layer3, 'layer*.1') or stage indices
    at: Literal["after", "before", "branch"] = "after"  # position of a block relative to its site
    block: str = "attention"  # block to insert: attention, a block of timm such as cbam, or a class MODULE:CLASS
    block_options: Strings = ()  # arguments of the block: num_heads=4 impl=bmm 'position=Rope2d()' 'pattern=Window(4)'
    freeze_backbone: bool = False  # train only the blocks (and a new head), saved as an adapter too

    # --- recipe

    epochs: Count = 30  # passes over the training images
    batch_size: Count = 128  # images per step, over all processes together
    grad_accum_steps: Count = 1  # micro-batches per step, to save memory
    opt: str = "sgd"  # optimizer: sgd (with Nesterov momentum), adamw or any other of timm
    lr: Positive | None = None  # learning rate; None: sgd 0.1, adamw 0.001, a tenth of it for given weights
    attention_lr: Positive | None = None  # learning rate of the inserted blocks; None: --lr
    layer_decay: Fraction | None = None  # ratio of a layer's learning rate to the next layer's, such as 0.75
    momentum: Probability = 0.9  # momentum of sgd and similar optimizers
    weight_decay: NonNegative = 5e-4  # weight decay of all parameters but biases, norms and gates
    sched: Literal["cosine", "tanh", "poly", "step", "multistep", "constant"] = "cosine"  # learning-rate schedule
    warmup_epochs: NonNegative = 0.0  # epochs of linear warm-up before the schedule
    min_lr: NonNegative = 0.0  # final learning rate of cosine, tanh and poly
    decay_epochs: tuple[Count, ...] = ()  # epochs between two decays for step; epochs of the decays for multistep
    decay_rate: Positive = 0.1  # decay factor of step and multistep, power of poly
    clip_grad: Positive | None = None  # maximum norm of the gradients
    label_smoothing: Probability = 0.0  # fraction of the label that is spread over all classes
    class_weights: bool = False  # weight the loss of each class by its inverse frequency
    ema: Probability | None = None  # decay of the moving average of the weights to evaluate and save: 0.999
    early_stopping: Count | None = None  # epochs without a higher top-1 after which training stops
    seed: NonNegativeInt = 0  # random seed of the run

    # --- machine

    device: Literal["cpu", "cuda"] | None = None  # device to train on; None: cuda where available
    workers: NonNegativeInt | None = None  # processes that decode images; None: one per core
    amp: Literal["bfloat16", "float16", "no"] | None = None  # mixed precision; None: on CUDA the best one, else no
    deterministic: bool = False  # bitwise reproducible on CUDA too; slower, unsupported by some kernels
    channels_last: bool = False  # use the channels-last memory format
    compile: bool = False  # compile the model with torch.compile

    # --- run

    output: Annotated[Path | None, arg(aliases=("-o",))] = None  # folder of the run; None: the next runs/train-N
    resume: str | None = None  # folder of the run to resume; auto: resume --output, or start it
    log_with: Strings = ()  # trackers: tensorboard, wandb or any other tracker of accelerate

    def __post_init__(self) -> None:
        for one, other in (("weights", "pretrained"), ("freeze_backbone", "layer_decay")):
            if getattr(self, one) and getattr(self, other):
                raise ValueError(f"{one} and {other} exclude each other: choose one")
        needs = {"rename": "weights", "reset_head": "weights", "attention_lr": "insert", "block_options": "insert"}
        for name, other in {**needs, "mean": "std", "std": "mean"}.items():
            if getattr(self, name) and not getattr(self, other):
                raise ValueError(f"{name} needs {other}: give both")
        if self.sched in ("step", "multistep") and not self.decay_epochs:
            raise ValueError(f"decay_epochs must be given for sched {self.sched}")
        if self.epochs <= self.warmup_epochs:
            raise ValueError(f"warmup_epochs must be fewer than epochs={self.epochs}; got {self.warmup_epochs}")

    @property
    def base_lr(self) -> float:
        """The learning rate: the given one or the optimizer's default, a tenth of it when weights are given."""
        if self.lr is not None:
            return self.lr
        if self.opt not in DEFAULT_LR:
            raise ValueError(f"lr must be given for {self.opt}: only {' and '.join(DEFAULT_LR)} have a default")
        return DEFAULT_LR[self.opt] / (10 if self.weights or self.pretrained else 1)

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain values, as in ``settings.yaml``."""
        return TypeAdapter(Settings).dump_python(self, mode="json")


def differences(one: Settings, other: Settings) -> list[str]:
    """Return the names of the differing settings that can change the result of a run."""
    return [name for name in changed(one, other) if name not in MACHINE_SETTINGS | CALL_SETTINGS]


def changed(settings: Settings, default: Settings | None = None) -> dict[str, Any]:
    """Return the settings that differ from the default."""
    defaults = vars(default or Settings())
    return {name: value for name, value in vars(settings).items() if value != defaults.get(name, value)}


def write_settings(settings: Settings) -> bytes:
    """Return the content of ``settings.yaml``."""
    import yaml

    return yaml.safe_dump(settings.as_dict(), sort_keys=False, allow_unicode=True).encode()


def read_settings(path: Path, given: Collection[str]) -> Settings:
    """Read the settings of another run, without those of a single call.

    Args:
        path: folder of the run, or file of settings.
        given: names of the settings that the caller gives. A file may come from anyone: it fetches no data and imports
            no class unless the caller names them too.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file holds no settings, unknown ones, or some that the caller has to give.
    """
    import yaml

    path = path / "settings.yaml" if path.is_dir() else path
    try:
        values = yaml.safe_load(path.read_bytes())
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path} is not a file of settings: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold settings, each a name with a value; got {type(values).__name__}")
    kept = {str(name): value for name, value in values.items() if name not in CALL_SETTINGS | {"download"}}
    for name, mark in (("dataset", "hfds/"), ("block", ":")):
        if mark in str(kept.get(name)) and name not in given:
            raise ValueError(f"{path} has {name} {kept[name]!r}, which fetches or runs code: give it too to trust it")
    try:
        return Settings(**kept)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error

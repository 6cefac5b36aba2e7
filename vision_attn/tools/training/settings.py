"""The settings of a run, each said once: name, type, what it may be, default, and what it does. Flags are made of them.

Their names are those of timm's and torchvision's scripts. This file imports neither torch nor timm: help comes at once.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from tyro.conf import arg

#: The rates that work for most networks, of the optimizers that have one.
USUAL_RATES = {"sgd": 0.1, "adamw": 1e-3}
#: What may differ between two runs that give the same result, or when a run goes on.
OF_MACHINE = {"data", "download", "device", "workers", "compile", "log_with", "early_stopping", "save_every"}
#: What concerns one call alone, and is not taken from the settings of another run.
OF_CALL = {"output", "resume"}


def as_words(value: Any) -> Any:
    """One name, or one index, stands for a list of it."""
    return tuple(map(str, value)) if isinstance(value, (list, tuple)) else (str(value),)


Share = Annotated[float, Field(ge=0, le=1)]
Part = Annotated[float, Field(gt=0, lt=1)]
Rate = Annotated[float, Field(gt=0, le=1000)]
Amount = Annotated[float, Field(ge=0, le=1000)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Whole = Annotated[int, Field(ge=0, lt=2**32)]
Words = Annotated[tuple[str, ...], BeforeValidator(as_words)]
DataSet = Annotated[str, Field(pattern="^(folder|cifar10|cifar100|(torch|hfds)/.+)$")]
Crop = Literal["pad", "resized"]
Output = Annotated[Path | None, arg(aliases=("-o",))]


class PlainErrors(type):
    """Lets a class of pydantic's raise a ``ValueError`` of one line, which names each setting that is wrong."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        try:
            return super().__call__(*args, **values)
        except ValidationError as error:
            lines = []
            for one in error.errors():
                where, message = ".".join(map(str, one["loc"])), one["msg"].removeprefix("Value error, ")
                lines.append(f"{where}: {message}; got {one['input']!r}" if where else message)
            raise ValueError("; ".join(lines)) from None


@dataclass(frozen=True, config=ConfigDict(extra="forbid", defer_build=True))
class Settings(metaclass=PlainErrors):
    """Train an image classifier, with attention inserted or not. Ctrl-C saves the run, --resume goes on with it.

    vision-attn train --data flowers --model resnet18 --pretrained --insert layer3

    vision-attn train --dataset cifar100 --data data --download --insert -1
    """

    # --- data

    data: Path | None = None  # folder with train/CLASS/IMAGE and val/CLASS/IMAGE, or that of the data set
    dataset: DataSet = "folder"  # folder, cifar10, cifar100, or timm's name: torch/…, hfds/…
    download: bool = False  # fetch a data set of torchvision's that is not in --data
    train_split: str = "train"  # part of a data set of timm's that is trained on
    val_split: str = "validation"  # part of it that is evaluated
    val_share: Part | None = None  # share of each class that is held out of training for it; None: 0.1 without val/
    img_size: Count | None = None  # side in pixels; None: the data's, or the model's
    mean: tuple[float, ...] | None = None  # of each channel, of pixels in 0…1; None: the model's
    std: tuple[Rate, ...] | None = None  # standard deviation of each channel; None: the model's
    crop: Crop | None = None  # random crops of the padded image (by default up to 64 pixels), or of any size
    crop_padding: Whole = 4  # pixels on each side, of crops of the padded image
    crop_scale: Part = 0.08  # least share of an image that a resized crop has
    aa: str | None = None  # augmentation of timm's: rand-m9-mstd0.5-inc1, augmix-m5-w4, …
    color_jitter: Amount = 0.0  # of brightness, contrast and saturation, such as 0.4
    hflip: Share = 0.5  # probability of a horizontal flip
    reprob: Share = 0.0  # probability that a part of an image is erased
    mixup: Amount = 0.0  # alpha of mixup, such as 0.2: two images laid over each other
    cutmix: Amount = 0.0  # alpha of cutmix, such as 1: a box of one image in another

    # --- network

    model: str = "resnet20"  # a name that timm knows, or one of ours
    pretrained: bool = False  # load the weights that come with the name
    weights: Path | None = None  # checkpoint to begin from: .pth, .pt, .th, .safetensors
    reset_head: bool = False  # with --weights: begin with a new classifier, for other classes
    drop_path: Part | None = None  # probability that a residual branch is left out, growing up to this one
    insert: Words = ()  # where blocks go: modules (globs: layer3, 'layer*.1') or stages by index
    at: Literal["after", "before", "branch"] = "after"  # of these sites
    block: str = "attention"  # what goes there: attention, a block of timm's such as cbam, or a class MODULE:CLASS
    block_options: Words = ()  # its arguments, such as num_heads=4 impl=bmm 'position=Rope2d()' 'pattern=Window(4)'
    freeze_backbone: bool = False  # train the blocks (and a new head) alone, saved as an adapter too
    freeze_epochs: Whole = 0  # epochs in which they train alone, before all do

    # --- recipe

    epochs: Count = 30  # passes over the training images
    batch_size: Count = 128  # images in a step, over all processes together
    grad_accum_steps: Count = 1  # parts that the batch is computed in, to save memory
    opt: str = "sgd"  # optimizer: sgd (with Nesterov momentum), adamw or any other of timm's
    lr: Rate | None = None  # learning rate; None: sgd 0.1, adamw 0.001, a tenth of that from given weights
    attention_lr: Rate | None = None  # rate of the inserted blocks; None: --lr
    layer_decay: Part | None = None  # rate of a layer over that of the next, such as 0.75
    momentum: Share = 0.9  # of sgd and others that have one
    weight_decay: Amount = 5e-4  # of all but biases, norms and gates
    sched: Literal["cosine", "tanh", "poly", "step", "multistep", "constant"] = "cosine"  # how the rate falls
    warmup_epochs: Amount = 0.0  # epochs of linear warm-up before that
    min_lr: Amount = 0.0  # rate that cosine, tanh and poly end at
    decay_epochs: tuple[Count, ...] = ()  # of step: from one decay to the next; of multistep: when
    decay_rate: Rate = 0.1  # factor of step and multistep, power of poly
    clip_grad: Rate | None = None  # norm that gradients are clipped to
    label_smoothing: Share = 0.0  # share of the label that is spread over all classes
    class_weights: bool = False  # let rare classes count more in the loss
    ema: Share | None = None  # decay of a moving average of the weights, which is evaluated and saved: 0.999
    early_stopping: Count | None = None  # epochs without a higher top-1 after which the run stops
    seed: Whole = 0  # of everything random

    # --- machine

    device: Literal["cpu", "cuda"] | None = None  # where it runs; None: cuda, if there is one
    workers: Whole | None = None  # processes that decode images; None: as many as cores
    amp: Literal["bfloat16", "float16", "no"] | None = None  # half precision; None: on CUDA what it has, else no
    sync_bn: bool = False  # batch norms see the batch of all processes
    deterministic: bool = False  # the same bits each time on CUDA too; slower, or refused by some kernels
    channels_last: bool = False  # keep maps in the channels-last memory format
    compile: bool = False  # compile the network

    # --- run

    output: Output = None  # folder of the run; None: the next of runs/train-1, …
    resume: str | None = None  # folder of a run to go on with; auto: --output, or begin if there is nothing
    save_every: Whole = 0  # steps after which the state is saved, beside the end of each epoch
    log_with: Words = ()  # trackers: tensorboard, wandb or any other that accelerate knows

    def __post_init__(self) -> None:
        pairs = (("weights", "pretrained"), ("freeze_backbone", "freeze_epochs"), ("freeze_backbone", "layer_decay"))
        for one, other in pairs:
            if getattr(self, one) and getattr(self, other):
                raise ValueError(f"{one} and {other} exclude each other: choose one")
        needs = {"reset_head": "weights", "attention_lr": "insert", "block_options": "insert"}
        for name, other in {**needs, "mean": "std", "std": "mean"}.items():
            if getattr(self, name) and not getattr(self, other):
                raise ValueError(f"{name} needs {other}: give both")
        if self.sched in ("step", "multistep") and not self.decay_epochs:
            raise ValueError(f"decay_epochs must be given for sched {self.sched}")
        for name in ("warmup_epochs", "freeze_epochs"):
            if self.epochs <= getattr(self, name):
                raise ValueError(f"{name} must be fewer than epochs={self.epochs}; got {getattr(self, name)}")

    @property
    def base_lr(self) -> float:
        """The rate given, or the usual one of the optimizer: a tenth of it when training begins from weights."""
        if self.lr is not None:
            return self.lr
        if self.opt not in USUAL_RATES:
            raise ValueError(f"lr must be given for {self.opt}: only {' and '.join(USUAL_RATES)} have a usual rate")
        return USUAL_RATES[self.opt] / (10 if self.weights or self.pretrained else 1)

    def as_dict(self) -> dict[str, Any]:
        """The settings as plain values, as they are written to ``settings.yaml``."""
        return TypeAdapter(Settings).dump_python(self, mode="json")


def differences(one: Settings, other: Settings) -> list[str]:
    """The names of the settings by which two runs may end with other results."""
    return [name for name in changed(one, other) if name not in OF_MACHINE | OF_CALL]


def changed(settings: Settings, default: Settings | None = None) -> dict[str, Any]:
    """The settings that are not as by default."""
    usual = vars(default or Settings())
    return {name: value for name, value in vars(settings).items() if value != usual.get(name, value)}


def write_settings(settings: Settings) -> bytes:
    """What ``settings.yaml`` holds."""
    import yaml

    return yaml.safe_dump(settings.as_dict(), sort_keys=False, allow_unicode=True).encode()


def read_settings(path: Path, given: Collection[str]) -> Settings:
    """The settings of another run, by its folder or file, without those that each call has of its own.

    Args:
        path: of the folder of the run, or of a file of settings.
        given: names of settings that the caller gives. A file may come from anyone: it fetches no data and imports no
            class unless the caller names them too.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not one of settings that this version knows, or names what has to be given.
    """
    import yaml

    path = path / "settings.yaml" if path.is_dir() else path
    try:
        values = yaml.safe_load(path.read_bytes())
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path} is no file of settings: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold settings, each a name with a value; got {type(values).__name__}")
    kept = {str(name): value for name, value in values.items() if name not in OF_CALL | {"download"}}
    for name, mark in (("dataset", "hfds/"), ("block", ":")):
        if mark in str(kept.get(name)) and name not in given:
            raise ValueError(f"{path} has {name} {kept[name]!r}, which fetches or runs code: give it too to trust it")
    try:
        return Settings(**kept)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error

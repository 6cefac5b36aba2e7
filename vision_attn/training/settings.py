"""The settings of a training run: one name for each, in the words of timm's and torchvision's scripts."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

__all__ = ["CHOICES", "Settings"]

#: The values that some settings choose from.
CHOICES = {
    "dataset": ("folder", "cifar10", "cifar100", "digit-pairs"),
    "amp_dtype": ("bfloat16", "float16"),
    "block": ("attention", "conv", "se"),
    "at": ("after", "before", "branch"),
    "train_crop": ("pad", "resized"),
}
#: What is known to work for most networks, of the optimisers for which something is.
USUAL_RATES = {"sgd": 0.1, "adamw": 1e-3}

#: Settings that may differ between a run and the one it resumes, because they do not change its result.
MACHINE_SETTINGS = frozenset(
    {
        "data",
        "dataset_download",
        "device",
        "output",
        "overwrite",
        "resume",
        "tensorboard",
        "compile",
        "test_only",
        "workers",
    }
)


@dataclass(frozen=True)
class Settings:
    """What a run does.

    Raises:
        ValueError: a value is out of range, or two settings exclude each other.

    >>> Settings(model="resnet20", dataset="digit-pairs", lr=0.1).opt
    'sgd'
    """

    #: folder of the data: with ``train`` and ``val`` (or ``validation``, ``test``) inside, or where CIFAR lies
    data: str | None = None
    #: ``folder``, ``cifar10``, ``cifar100`` or ``digit-pairs``
    dataset: str = "folder"
    #: fetch CIFAR if it is not in ``data``
    dataset_download: bool = False
    #: side of the images in pixels; None for the data's own or, where images differ in size, the model's
    img_size: int | None = None

    #: any name that timm knows, ours among them
    model: str = "resnet20"
    #: load the weights that come with the model's name
    pretrained: bool = False
    #: checkpoint file to begin from
    weights: str | None = None
    #: take the moving average of the weights in that file
    weights_ema: bool = False
    #: begin with a new classifier, for other classes than the checkpoint's
    reset_head: bool = False
    #: sites to insert a block at: globs on module paths, or indices of stages
    insert: tuple[str, ...] = ()
    #: ``after`` these sites, ``before`` them, or in the residual ``branch`` that ends there
    at: str = "after"
    #: ``attention``, or a control of as many parameters: ``conv``, or ``se`` for squeeze and excitation
    block: str = "attention"
    #: heads of the attention
    num_heads: int = 8
    #: implementation of the attention
    impl: str = "sdpa"
    #: further arguments of the block, each as ``name=value``: ``position=Rope2d()``, ``pattern=Window(4)``
    block_options: tuple[str, ...] = ()
    #: train the inserted blocks alone, and the new head if there is one; the backbone's statistics stay too
    freeze_backbone: bool = False
    #: train the inserted blocks and the new head alone in so many epochs first, and all after them
    freeze_epochs: int = 0

    #: passes over the training images
    epochs: int = 30
    #: images in one step of the optimiser, over all processes together
    batch_size: int = 128
    #: parts that each process goes through one after the other for one step, to need less memory
    grad_accum_steps: int = 1
    #: ``sgd`` (with Nesterov momentum), ``adamw`` or any other optimiser that timm knows
    opt: str = "sgd"
    #: learning rate; None for the usual one of the optimiser, a tenth of it when training begins from weights
    lr: float | None = None
    #: rate of the inserted blocks; None for that of the backbone
    attention_lr: float | None = None
    #: factor on the rate from one layer of the backbone to the one before it; None for one rate
    layer_decay: float | None = None
    #: of ``sgd`` and others that have one
    momentum: float = 0.9
    #: of all but biases, norms, gates and the like
    weight_decay: float = 5e-4
    #: epochs of linear warm-up from a hundredth of the rate, before the cosine
    warmup_epochs: float = 0.0
    #: rate that the cosine ends at; blocks and layers with a rate of their own end at the same share of it
    min_lr: float = 0.0
    #: norm that gradients are clipped to; None for no clipping
    clip_grad: float | None = None
    #: share of a label that is spread over all classes
    label_smoothing: float = 0.0
    #: ``pad``, crops out of the padded image, or ``resized``, of a folder's images crops of any size brought to one
    train_crop: str = "pad"
    #: of ``pad``, pixels on each side
    crop_padding: int = 4
    #: of ``resized``, least share of an image that a crop has
    crop_scale: float = 0.08
    #: probability of a horizontal flip
    hflip: float = 0.5
    #: side of a square in each image that is blotted out, in pixels; 0 for none
    cutout: int = 0
    #: alpha of mixup, which lays two images over each other; 0 for none, 0.2 is usual
    mixup: float = 0.0
    #: alpha of cutmix, which puts a box of one image into another; 0 for none, 1 is usual
    cutmix: float = 0.0
    #: probability of cutmix in a batch, where mixup is on too
    mixup_switch_prob: float = 0.5
    #: mean of each channel, of pixels in 0…1; None for the model's own
    mean: tuple[float, ...] | None = None
    #: standard deviation of each channel; None for the model's own
    std: tuple[float, ...] | None = None
    #: keep a moving average of the weights, evaluate and save it as the best
    model_ema: bool = False
    #: of that average, in each step
    model_ema_decay: float = 0.999
    #: of everything random
    seed: int = 0

    #: ``cpu``, ``cuda``, or None for the best there is
    device: str | None = None
    #: half precision where it is safe
    amp: bool = False
    #: which: ``bfloat16``, or ``float16`` with a scaled loss on CUDA
    amp_dtype: str = "bfloat16"
    #: batch norms see the batch of all processes together, as one process would
    sync_bn: bool = False
    #: the same bits each time on CUDA too, where kernels that give them are slower or missing
    deterministic: bool = False
    #: processes that decode the images of a folder in every epoch; None for none where all images fit into memory
    #: together, and else for as many as cores
    workers: int | None = None
    #: keep maps in the channels-last memory format
    channels_last: bool = False
    #: compile the network
    compile: bool = False

    #: folder of the run; None for ``runs/train``, or the folder of the run that is resumed
    output: str | None = None
    #: begin anew in a folder that holds a run
    overwrite: bool = False
    #: checkpoint of an interrupted run to go on from; ``auto`` for that in ``output`` where there is one
    resume: str | None = None
    #: write TensorBoard events too
    tensorboard: bool = False
    #: evaluate, do not train
    test_only: bool = False

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}")
        lowest_values = {
            "epochs": 1,
            "batch_size": 2,
            "grad_accum_steps": 1,
            "freeze_epochs": 0,
            "num_heads": 1,
            "crop_padding": 0,
            "cutout": 0,
            "mixup": 0,
            "cutmix": 0,
            "warmup_epochs": 0,
            "weight_decay": 0,
            "min_lr": 0,
        }
        for name, lowest in lowest_values.items():
            if not lowest <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least {lowest}; got {getattr(self, name)}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be at least 0 and less than 2³²; got {self.seed}")
        for name in ("hflip", "label_smoothing", "momentum", "model_ema_decay", "mixup_switch_prob"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must lie between 0 and 1; got {getattr(self, name)}")
        if self.layer_decay is not None and not 0.0 < self.layer_decay <= 1.0:
            raise ValueError(f"layer_decay must be above 0 and at most 1; got {self.layer_decay}")
        for name in ("lr", "attention_lr", "clip_grad", "img_size", "std"):
            value = getattr(self, name)
            for part in value if isinstance(value, tuple) else (value,):
                if part is not None and not 0.0 < part < math.inf:
                    raise ValueError(f"{name} must be positive; got {part}")
        if not 0.0 < self.crop_scale <= 1.0:
            raise ValueError(f"crop_scale must be above 0 and at most 1; got {self.crop_scale}")
        for name, kind in (("crop_padding", "pad"), ("crop_scale", "resized")):
            if getattr(self, name) != getattr(type(self), name) and self.train_crop != kind:
                raise ValueError(f"{name} applies to train_crop {kind!r}, and train_crop is {self.train_crop!r}")
        if self.train_crop == "resized" and self.dataset != "folder":
            raise ValueError(f"train_crop 'resized' decodes the images of a folder; {self.dataset} is held in memory")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers must be at least 1, or left out to hold what fits in memory; got {self.workers}")
        if self.workers is not None and self.dataset != "folder":
            raise ValueError(f"workers decode the images of a folder; {self.dataset} is held in memory")
        if self.mixup_switch_prob != type(self).mixup_switch_prob and not (self.mixup and self.cutmix):
            raise ValueError("mixup_switch_prob chooses between mixup and cutmix: give both")
        if self.dataset != "digit-pairs" and self.data is None:
            raise ValueError(f"data must name the folder of the data set {self.dataset!r}")
        if self.dataset_download and self.dataset not in ("cifar10", "cifar100"):
            raise ValueError(f"dataset_download fetches cifar10 or cifar100; dataset is {self.dataset!r}")
        if self.dataset == "digit-pairs" and self.img_size is not None:
            raise ValueError("img_size does not apply to digit-pairs, whose canvases have a size of their own")
        if self.warmup_epochs >= self.epochs and self.warmup_epochs:
            raise ValueError(f"warmup_epochs must be fewer than epochs={self.epochs}; got {self.warmup_epochs}")
        if self.weights and self.pretrained:
            raise ValueError("weights and pretrained exclude each other: choose where the weights come from")
        for name in ("block", "at", "block_options", "num_heads", "impl"):
            applies = self.insert and (self.block == "attention" or name not in ("num_heads", "impl"))
            if getattr(self, name) != getattr(type(self), name) and not applies:
                what = f"attention, and block is {self.block!r}" if self.insert else "blocks, and insert is empty"
                raise ValueError(f"{name} applies to inserted {what}")
        if self.attention_lr is not None and not self.insert:
            raise ValueError("attention_lr applies to inserted blocks, and insert is empty")
        if self.batch_size % self.grad_accum_steps:
            raise ValueError(
                f"batch_size must be a multiple of grad_accum_steps={self.grad_accum_steps}; got {self.batch_size}"
            )
        if self.opt == "sgd" and not self.momentum:
            raise ValueError("momentum must be above 0 for sgd, which is Nesterov's: for none, choose opt 'momentum'")
        if self.model_ema_decay != type(self).model_ema_decay and not self.model_ema:
            raise ValueError("model_ema_decay applies to a moving average: give model_ema too")
        if self.amp_dtype != type(self).amp_dtype and not self.amp:
            raise ValueError("amp_dtype applies to half precision: give amp too")
        if self.freeze_backbone and self.freeze_epochs:
            raise ValueError(
                "freeze_backbone and freeze_epochs exclude each other: choose whether the backbone ever thaws"
            )
        if self.freeze_epochs >= self.epochs:
            raise ValueError(
                f"freeze_epochs must be fewer than epochs={self.epochs}, or use freeze_backbone; "
                f"got {self.freeze_epochs}"
            )
        for name in ("freeze_backbone", "freeze_epochs"):
            if getattr(self, name):
                self.check_frozen(name)
        for name in ("weights_ema", "reset_head"):
            if getattr(self, name) and not self.weights:
                raise ValueError(f"{name} applies to weights, and none are given")
        if self.resume and self.test_only:
            raise ValueError("resume goes on with training, and test_only trains nothing: evaluate by weights")
        if self.resume and self.overwrite:
            raise ValueError("resume and overwrite exclude each other: choose whether to go on or to begin anew")
        named = self.resume if self.resume != "auto" else None
        if named and self.output and Path(self.output).resolve() != Path(named).resolve().parent:
            raise ValueError(f"output: a run goes on in its own folder, {Path(named).parent}; got {self.output!r}")
        if not all(map(math.isfinite, self.mean or ())):
            raise ValueError(f"mean must be finite; got {self.mean}")
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std go together: give both, or neither for the model's own")

    def check_frozen(self, name: str) -> None:
        """Refuse what a frozen backbone does not go with: no weights worth keeping, or nothing to train beside them.

        Args:
            name: of the setting that freezes it.

        Raises:
            ValueError: so it is.
        """
        if not (self.insert or self.reset_head):
            raise ValueError(f"{name} leaves nothing to train: insert blocks, or begin a new head with reset_head")
        if not (self.weights or self.pretrained):
            raise ValueError(f"{name} keeps weights as they are, and none are given: see weights and pretrained")
        if self.layer_decay is not None and self.freeze_backbone:
            raise ValueError("layer_decay applies to the layers of the backbone, and freeze_backbone freezes them")

    @property
    def folder(self) -> Path:
        """Where the run leaves what it makes."""
        if self.resume and self.resume != "auto":
            return Path(self.resume).parent
        return Path(self.output or "runs/train")

    @property
    def base_lr(self) -> float:
        """The rate given, or the usual one of the optimiser: a tenth of it when training begins from weights.

        Raises:
            ValueError: none is given, and there is no usual one.
        """
        if self.lr is not None:
            return self.lr
        if self.opt not in USUAL_RATES:
            raise ValueError(f"lr must be given for {self.opt}: only {' and '.join(USUAL_RATES)} have a usual rate")
        return USUAL_RATES[self.opt] / (10 if self.weights or self.pretrained else 1)

    def images_at_once(self, processes: int) -> int:
        """How many images go through the network at a time, in each process.

        Args:
            processes: how many there are.
        """
        return max(1, self.batch_size // (processes * self.grad_accum_steps))

    def as_dict(self) -> dict[str, object]:
        """The settings as plain values, as they are written to ``settings.yaml``."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    def differences(self, other: dict[str, object]) -> list[str]:
        """The names of the settings in which another run would give another result.

        Args:
            other: settings of that run, as :meth:`as_dict` gives them.
        """
        own = self.as_dict()
        # A setting that the other was written without had, then, what is its default now.
        others = {**type(self)(data="").as_dict(), **other}
        names = [field.name for field in fields(self) if field.name not in MACHINE_SETTINGS]
        return [name for name in names if own[name] != others[name]]

"""The settings of a training run, each said once: its default, what it does and what it may be.

The flags of ``vision-attn train`` are made from them, and what files say of them is checked by them. Their names are
those of timm's and torchvision's scripts.
"""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from vision_attn.attention.implementations import IMPLEMENTATIONS

__all__ = ["CHOICES", "FIELDS", "Settings", "concerning", "type_of"]

#: What is known to work for most networks, of the optimisers for which something is.
USUAL_RATES = {"sgd": 0.1, "adamw": 1e-3}
#: Least and largest values: beyond them numbers overflow, memory ends or a run never does.
SHARE, OPEN_SHARE, RATE, UP_TO_1000 = (0, 1), (1e-6, 1 - 1e-6), (1e-12, 1000), (0, 1000)
SIZE, COUNT, EPOCHS = (1, 65_536), (1, 1_000_000), (0, 1_000_000)
#: What settings apply to: other settings, as one of these texts, or as anything where there are none.
HUB, STREAMS, TORCH = ("hfds/…",), ("hfids/…", "tfds/…", "wds/…"), ("cifar10", "cifar100", "torch/…")
NAMED = {"dataset": ("torch/…", *HUB, *STREAMS)}
SPLIT = {"dataset": ("folder", *NAMED["dataset"])}
HELD_OUT = {"dataset": ("folder", *TORCH)}
#: All but streams have images that can be kept; all but the embedded data set have images to decode.
KEPT = {"dataset": ("folder", *TORCH, *HUB)}
IMAGES = {"dataset": (*KEPT["dataset"], *STREAMS)}
LABELLED = {"dataset": (*KEPT["dataset"], "digit-pairs")}
#: Schedules that end at a rate of their own.
FALLING = ("cosine", "tanh", "poly", "wsd", "rsqrt")
BLOCKS = ("attention", "conv", "norm", "se", "excite")
INSERTED: dict[str, tuple[str, ...]] = {"insert": ()}
ATTENTION = {**INSERTED, "block": ("attention",)}


def setting(default: Any, text: str, allowed: Collection[Any] = (), **rules: Any) -> Any:
    """A field of :class:`Settings`.

    Args:
        default: its value where none is given.
        text: what it does, for ``--help``.
        allowed: the texts that it may be, or the least and the largest number.
        rules: ``needs``, the settings that it applies to; ``group``, the title of the flags from here on; ``metavar``;
            ``concerns``, where that is not the result of a run but the ``machine``, which may be another when it goes
            on, or this ``run`` alone, so that it is not taken from a file of settings.
    """
    usual: dict[str, Any] = {"needs": {}, "group": None, "metavar": None, "concerns": "result"}
    assert rules.keys() <= usual.keys()
    return field(default=default, metadata={"text": text, "allowed": allowed, **usual, **rules})


of_machine, of_run = partial(setting, concerns="machine"), partial(setting, concerns="run")


@dataclass(frozen=True)
class Settings:
    """What a run does; ``vision-attn train --help`` says what each setting means.

    Raises:
        ValueError: a value is not what it may be, or two settings exclude each other.

    >>> Settings(model="resnet20", dataset="digit-pairs", lr=0.1).opt
    'sgd'
    """

    data: str | None = of_machine(None, "folder of train/CLASS/IMAGE and val/…, or of the data set", group="data")
    dataset: str = setting(
        "folder", "folder, cifar10, cifar100, digit-pairs or timm's name: torch/…, hfds/…, wds/…, tfds/…"
    )
    dataset_download: bool = of_machine(False, "fetch it into --data if it is not there", needs={"dataset": TORCH})
    train_split: str = setting("train", "part of a data set of timm's; of shards 'train-{0..9}.tar|5000'", needs=NAMED)
    val_split: str = setting(
        "validation", "to evaluate on: such a part, or of a folder without val/ a share: 0.1", needs=SPLIT
    )
    hold_out: float | None = setting(
        None, "share of the training images of each class to evaluate on instead", OPEN_SHARE, needs=HELD_OUT
    )
    num_classes: int | None = setting(None, "of data that does not name its classes, as shards", SIZE, needs=NAMED)
    img_size: int | None = setting(None, "side in pixels (default: the data's, or the model's)", SIZE, needs=IMAGES)
    mean: tuple[float, ...] | None = setting(None, "mean of each channel in 0…1 (default: the model's)", (-1000, 1000))
    std: tuple[float, ...] | None = setting(None, "standard deviation of each (default: the model's)", (1e-6, 1000))
    train_crop: str = setting("pad", "of the padded image, or of any size", ("pad", "resized"), needs=IMAGES)
    crop_padding: int = setting(4, "of pad, pixels on each side", (0, 1024), needs={"train_crop": ("pad",)})
    crop_scale: float = setting(
        0.08, "of resized, least share of an image that a crop has", (1e-4, 1), needs={"train_crop": ("resized",)}
    )
    aa: str | None = setting(None, "timm's rand-m9-mstd0.5-inc1, augmix-m5-w4, original or the like", needs=IMAGES)
    color_jitter: float = setting(0.0, "of brightness, contrast, saturation, such as 0.4", (0, 100), needs=IMAGES)
    hflip: float = setting(0.5, "probability of a horizontal flip", SHARE)
    cutout: int = setting(0, "side of a square in each image that is blotted out, in pixels", (0, 65_536))
    reprob: float = setting(0.0, "probability of timm's random erasing of a part of an image", SHARE)
    remode: str = setting("pixel", "noise, one colour or the mean", ("pixel", "rand", "const"), needs={"reprob": ()})
    mixup: float = setting(0.0, "alpha of mixup, such as 0.2: two images laid over each other", UP_TO_1000)
    cutmix: float = setting(0.0, "alpha of cutmix, such as 1: a box of one image in another", UP_TO_1000)
    mixup_switch_prob: float = setting(
        0.5, "probability of cutmix in a batch, where mixup is on too", SHARE, needs={"mixup": (), "cutmix": ()}
    )

    model: str = setting("resnet20", "a name that timm knows, or one of ours: resnet20, resnet20_a, …", group="network")
    pretrained: bool = setting(False, "load the weights that come with the name")
    weights: str | None = setting(None, "checkpoint to begin from: .pth, .pt, .th, .safetensors")
    weights_ema: bool = setting(False, "take the moving average in that checkpoint", needs={"weights": ()})
    reset_head: bool = setting(False, "begin with a new classifier, for other classes", needs={"weights": ()})
    drop_path: float = setting(0.0, "probability that a residual branch is left out, growing up to this one", (0, 0.99))
    insert: tuple[str, ...] = setting((), "where blocks go: modules (globs: layer3, 'layer*.1') or stages by index")
    at: str = setting("after", "of these sites", ("after", "before", "branch"), needs=INSERTED)
    block: str = setting(
        "attention", f"{', '.join(BLOCKS)} (SE proper) or yours, MODULE:CLASS", BLOCKS, metavar="BLOCK", needs=INSERTED
    )
    num_heads: int = setting(8, "heads; fewer where 8 do not divide the channels", SIZE, needs=ATTENTION)
    impl: str = setting("sdpa", "implementation of the attention", IMPLEMENTATIONS, needs=ATTENTION)
    block_options: tuple[str, ...] = setting(
        (), "more of it: 'position=Rope2d()' 'pattern=Window(4)' gate_init=0.1", metavar="NAME=VALUE", needs=INSERTED
    )
    freeze_backbone: bool = setting(False, "train inserted blocks (and a new head) alone, saved as an adapter")
    freeze_epochs: int = setting(0, "epochs in which they train alone, before all do", EPOCHS)

    epochs: int = setting(30, "passes over the training images", COUNT, group="recipe")
    batch_size: int = setting(128, "images in a step, over all processes together", (2, 1_000_000))
    grad_accum_steps: int = setting(1, "parts of the batch that are computed one by one, to save memory", COUNT)
    opt: str = setting("sgd", "optimiser: sgd (with Nesterov momentum), adamw or any other that timm knows")
    lr: float | None = setting(None, "learning rate (default: sgd 0.1, adamw 0.001; a tenth from given weights)", RATE)
    attention_lr: float | None = setting(None, "rate of the inserted blocks (default: --lr)", RATE, needs=INSERTED)
    layer_decay: float | None = setting(None, "rate of a layer over that of the next, such as 0.75", (0.01, 1))
    momentum: float = setting(0.9, "of sgd and others that have one", SHARE)
    weight_decay: float = setting(5e-4, "of all but biases, norms and gates", UP_TO_1000)
    warmup_epochs: float = setting(0.0, "epochs of linear warm-up before that", EPOCHS)
    sched: str = setting("cosine", "how the rate falls, by timm's names", (*FALLING, "step", "multistep", "constant"))
    min_lr: float = setting(0.0, "rate that it ends at", UP_TO_1000, needs={"sched": FALLING})
    decay_epochs: float | None = setting(
        None, "of step, from one decay to the next; of wsd and rsqrt, of decay, or below 1 their share (default: 0.2)",
        (1e-6, 1_000_000), needs={"sched": ("step", "wsd", "rsqrt")},
    )  # fmt: skip
    decay_milestones: tuple[int, ...] = setting(
        (), "epochs at which multistep decays", COUNT, needs={"sched": ("multistep",)}
    )
    decay_rate: float = setting(
        0.1, "factor of step and multistep; power of poly", RATE, needs={"sched": ("step", "multistep", "poly")}
    )
    clip_grad: float | None = setting(None, "norm that gradients are clipped to", (1e-12, 1e12))
    label_smoothing: float = setting(0.0, "share of the label spread over all classes", SHARE)
    class_weights: str | None = setting(None, "balanced: rare classes count more", ("balanced",), needs=LABELLED)
    model_ema: bool = setting(False, "keep a moving average of the weights, evaluate and save it")
    model_ema_decay: float = setting(0.999, "of it in each step, after a warm-up", SHARE, needs={"model_ema": ()})
    early_stopping: int | None = of_machine(None, "stop after so many epochs without a higher top-1", COUNT)
    seed: int = setting(0, "of everything random", (0, 2**32 - 1))

    device: str | None = of_machine(None, "where it runs (default: cuda, if any)", ("cpu", "cuda"), group="machine")
    cache_images: str = of_machine(
        "auto", "keep images in memory; auto: up to 2 GiB, without --workers", ("auto", "ram", "none"), needs=KEPT
    )
    workers: int | None = of_machine(
        None, "processes that decode images not in memory, 0 for none (default: as cores)", (0, 1024), needs=IMAGES
    )
    amp: bool = setting(False, "half precision where it is safe")
    amp_dtype: str = setting("bfloat16", "which; float16 on CUDA only", ("bfloat16", "float16"), needs={"amp": ()})
    sync_bn: bool = setting(False, "batch norms see the batch of all processes together (on CUDA)")
    deterministic: bool = setting(False, "the same bits each time on CUDA too; slower, or refused by some kernels")
    channels_last: bool = setting(False, "keep maps in the channels-last memory format")
    compile: bool = of_machine(False, "compile the network")

    output: str | None = of_run(None, "folder of the run (default: the next of runs/train-1, …)", group="run")
    overwrite: bool = of_run(False, "begin anew in a folder that holds a run")
    resume: str | None = of_run(None, "last.pth to go on from; auto: the one in --output, or begin if there is none")
    test_only: bool = of_run(False, "evaluate, do not train")
    report_classes: bool = of_run(False, "write the accuracy of each class and the confusion matrix into --output")
    log_with: tuple[str, ...] = of_machine((), "trackers: tensorboard, wandb or any other that accelerate knows")

    def __post_init__(self) -> None:
        for name in FIELDS:
            object.__setattr__(self, name, checked(name, getattr(self, name)))
        for name, about in FIELDS.items():
            needs = about.metadata["needs"] if getattr(self, name) != about.default else {}
            for other, wanted in needs.items():
                value = getattr(self, other)
                if not wanted and not value:
                    raise ValueError(f"{name} applies to {other}: give {other} too")
                if wanted and kind_of(value) not in wanted:
                    raise ValueError(f"{name} applies to {other} {' or '.join(wanted)}, and {other} is {value!r}")
        for one, other, choice in (
            ("weights", "pretrained", "where the weights come from"),
            ("freeze_backbone", "freeze_epochs", "whether the backbone ever thaws"),
            ("freeze_backbone", "layer_decay", "whether the layers of the backbone learn"),
            ("resume", "overwrite", "whether to go on or to begin anew"),
            ("resume", "test_only", "whether to go on with training, or to evaluate by weights"),
        ):
            if getattr(self, one) and getattr(self, other):
                raise ValueError(f"{one} and {other} exclude each other: choose {choice}")
        if kind_of(self.dataset) not in (*IMAGES["dataset"], "digit-pairs"):
            raise ValueError(f"dataset must be {', '.join(IMAGES['dataset'])} or digit-pairs; got {self.dataset!r}")
        if self.dataset == "folder" and not 0 < self.val_share < 1:
            raise ValueError(f"val_split of a folder must be a share between 0 and 1; got {self.val_split!r}")
        varied = [name for name in ("train_crop", "aa", "color_jitter") if getattr(self, name) != FIELDS[name].default]
        if self.cache_images == "ram" and varied:
            raise ValueError(
                f"cache_images ram keeps images as they are decoded, and {varied[0]} varies them each time"
            )
        if self.data is None and kind_of(self.dataset) in ("folder", *TORCH, "wds/…"):
            raise ValueError(f"data must name the folder of the data set {self.dataset!r}")
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std go together: give both, or neither for the model's own")
        for sched, name in (("step", "decay_epochs"), ("multistep", "decay_milestones")):
            if self.sched == sched and not getattr(self, name):
                raise ValueError(f"{name} must be given for sched {sched}")
        for name in ("warmup_epochs", "freeze_epochs"):
            if self.epochs <= getattr(self, name):
                raise ValueError(f"{name} must be fewer than epochs={self.epochs}; got {getattr(self, name)}")
        frozen = "freeze_backbone" if self.freeze_backbone else "freeze_epochs" if self.freeze_epochs else None
        if frozen and not (self.insert or self.reset_head):
            raise ValueError(f"{frozen} leaves nothing to train: insert blocks, or begin a new head with reset_head")
        if frozen and not (self.weights or self.pretrained):
            raise ValueError(f"{frozen} keeps weights as they are, and none are given: see weights and pretrained")
        if self.resume not in (None, "auto") and self.output and Path(self.output).resolve() != self.folder.resolve():
            raise ValueError(f"output: a run goes on in its own folder, {self.folder}; got {self.output!r}")
        if self.report_classes and self.test_only and not self.output:
            raise ValueError("output must name a folder for what report_classes writes where test_only trains nothing")

    @property
    def folder(self) -> Path:
        """Where the run leaves what it makes, where it is not :attr:`numbered`."""
        if self.resume and self.resume != "auto":
            return Path(self.resume).parent
        return Path(self.output or "runs/train")

    @property
    def numbered(self) -> bool:
        """Whether the run has a folder with the next number at its end."""
        return self.output is None and self.resume is None and not self.overwrite

    @property
    def val_share(self) -> float:
        """Of a folder without images to evaluate on, the share of those to train on that are held out; NaN is none."""
        if self.val_split == type(self).val_split:
            return 0.1
        try:
            return float(self.val_split)
        except ValueError:
            return math.nan

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
        """How many images go through the network at a time, in each process."""
        return max(1, self.batch_size // (processes * self.grad_accum_steps))

    def as_dict(self) -> dict[str, object]:
        """The settings as plain values, as they are written to ``settings.yaml``."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @staticmethod
    def values_in(saved: object, *, known_alone: bool = False) -> dict[str, Any]:
        """What a file, of anyone's, says of the settings: each checked, those of other versions refused or left out."""
        if not isinstance(saved, Mapping):
            raise ValueError(f"settings must be names with values; got {reprlib.repr(saved)}")
        unknown = [name for name in saved if name not in FIELDS and name not in GONE]
        if unknown and not known_alone:
            raise ValueError(f"there is no setting {', '.join(map(reprlib.repr, unknown[:6]))}")
        return {name: checked(name, saved[name]) for name in FIELDS if name in saved}

    def differences(self, other: object) -> list[str]:
        """The names of the settings in which another run, of these settings, would give another result.

        Raises:
            ValueError: they are not what they may be.
        """
        # A setting that the other was written without had, then, what is its default now.
        others = {name: about.default for name, about in FIELDS.items()} | self.values_in(other, known_alone=True)
        return [name for name in concerning("result") if getattr(self, name) != others[name]]


FIELDS = {about.name: about for about in fields(Settings)}
#: What only older files say.
GONE = ("tensorboard",)
#: The texts that a setting may be, none where it may be any; a script may add to them.
CHOICES = {name: about.metadata["allowed"] for name, about in FIELDS.items() if "str" in str(about.type)}


def concerning(*what: str) -> tuple[str, ...]:
    """The settings that concern the ``"result"`` of a run, the ``"machine"``, or this ``"run"`` alone."""
    return tuple(name for name, about in FIELDS.items() if about.metadata["concerns"] in what)


def kind_of(value: object) -> object:
    """What a setting's value is called where another needs it: of a data set of timm's the kind."""
    return f"{value.partition('/')[0]}/…" if isinstance(value, str) and "/" in value else value


def type_of(about: Field[Any]) -> tuple[type, bool]:
    """What a setting, or each part of it, is on the command line, and whether it has parts: by its annotation."""
    hint = str(about.type)
    return next((kind for kind in (bool, int, float) if kind.__name__ in hint), str), hint.startswith("tuple")


def checked(name: str, value: Any) -> Any:
    """A value as it is kept, lists as tuples and paths as texts; ValueError if it is not what the setting may be."""
    kind, many = type_of(FIELDS[name])
    value = str(value) if name == "val_split" and isinstance(value, float) else value
    if value is None and FIELDS[name].default is None:
        return None
    if not many:
        return checked_part(name, kind, value)
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name} must be a list; got {reprlib.repr(value)}")
    return tuple(checked_part(name, kind, part) for part in value)


def checked_part(name: str, kind: type, value: Any) -> Any:
    allowed = CHOICES.get(name, FIELDS[name].metadata["allowed"])
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    types: dict[type, type] = {int: Integral, float: Real}
    fits = isinstance(value, types.get(kind, kind)) and isinstance(value, bool) == (kind is bool)
    what = "True or False" if kind is bool else "a text"
    if kind in types:
        least, largest = allowed
        fits = fits and least <= value <= largest
        what = f"a {'whole ' if kind is int else ''}number from {least:,} to {largest:,}"
    elif allowed:
        fits = fits and value in allowed
        what = f"one of {', '.join(allowed)}{', or yours after add_block' if name == 'block' else ''}"
    if not fits:
        raise ValueError(f"{name} must be {what}; got {reprlib.repr(value)}")
    return kind(value)

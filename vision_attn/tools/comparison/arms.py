"""The arms of a comparison: which blocks there are, and what of the common settings goes to which of them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from vision_attn.attention.blocks import Attention2d
from vision_attn.tools.training.settings import ATTENTION, FIELDS

__all__ = ["ARMS", "recipe", "settings_of_arm"]

#: What each arm has of its own, by its name; None is the network without a block.
ARMS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "convolution": {"block": "conv"},
    "large-kernel": {"block": "conv", "block_options": ("kernel_size=13",)},
    "norm-shortcut": {"block": "norm"},
    "se": {"block": "excite", "at": "branch", "block_options": ("rd_ratio=2",)},
    "se-residual": {"block": "se"},
    "pooled-mlp": {"block": "conv", "block_options": ("kernel_size=None",)},
    "averaging": {"block_options": ("scale=0",)},
    "attention": {},
}
CIFAR: dict[str, Any] = {
    "model": "resnet20", "insert": ("layer3.*",), "num_heads": 4, "epochs": 200, "lr": 0.1, "warmup_epochs": 5.0,
    "label_smoothing": 0.1,
}  # fmt: skip
DIGITS: dict[str, Any] = {  # at="after", as there are no branches
    "model": "digit_pairs", "insert": ("stage3",), "at": "after", "num_heads": 4, "epochs": 5, "opt": "adamw",
    "lr": 6e-3, "weight_decay": 0.01, "warmup_epochs": 0.5, "crop_padding": 0, "hflip": 0.0, "device": "cpu",
}  # fmt: skip
#: What is known to work for a kind of data: a user's own images have the defaults of ``vision-attn train``.
RECIPES = {"cifar10": CIFAR, "cifar100": CIFAR, "digit-pairs": DIGITS}
#: The settings of blocks, of attention alone, and of what trains alone.
OF_BLOCKS = ("insert", "at", "block", "block_options", "attention_lr")
OF_ATTENTION = tuple(name for name, about in FIELDS.items() if about.metadata["needs"] == ATTENTION)
OF_FREEZING = ("freeze_backbone", "freeze_epochs")


def recipe(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is given, and beside it what is known to work for such data, in half precision where a GPU has it."""
    known = RECIPES.get(given.get("dataset", "folder"), {})
    fast = known is CIFAR and given.get("device") != "cpu" and torch.cuda.is_available()
    return {**known, **({"amp": True, "channels_last": True} if fast else {}), **given}


def settings_of_arm(base: str, own: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an arm: those common to all that suit it, then those of its base, then its own.

    Args:
        base: its name among :data:`ARMS`.
        own: what it has of its own.
        common: what all arms have, with what concerns blocks for those that have some.

    >>> settings_of_arm("large-kernel", {}, {"insert": ("layer3",), "impl": "bmm", "block_options": ("gate_init=1",)})
    {'insert': ('layer3',), 'block': 'conv', 'block_options': ('gate_init=1', 'kernel_size=13')}
    """
    if base not in ARMS:
        raise ValueError(f"arms must be among {', '.join(ARMS)}, or NAME=FLAGS with flags of its own; got {base!r}")
    arm, common = ARMS[base], dict(common)
    if arm is None:
        # With a new head there is something to train alone in all arms.
        foreign = (*OF_BLOCKS, *OF_ATTENTION, *(() if common.get("reset_head") else OF_FREEZING))
        return {**{name: value for name, value in common.items() if name not in foreign}, **own}
    values = {"insert": ("-1",), **arm, **common, **own}  # where all blocks go, that of this arm goes too
    if values.get("block", "attention") != "attention":
        values = {name: value for name, value in values.items() if name not in OF_ATTENTION or name in own}
    options = {
        **{name: word for name, word in split(common) if suits(name, values.get("block", "attention"))},
        **dict((*split(arm), *split(own))),
    }
    values.pop("block_options", None)
    return {**values, **({"block_options": tuple(map("=".join, options.items()))} if options else {})}


def split(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Options of blocks as names and values."""
    return [(text.partition("=")[0], text.partition("=")[2]) for text in settings.get("block_options", ())]


def suits(option: str, block: str) -> bool:
    """Whether a block takes an option; one that no block takes is left to all, which refuse it."""
    from vision_attn.tools.training.network import BLOCKS  # with timm, which the flags of compare do not wait for

    def taken(by: str) -> bool:
        hands_on = inspect.signature(Attention2d).parameters if by == "attention" else ()
        return option in inspect.signature(BLOCKS[by]).parameters or option in hands_on

    return taken(block) or not any(map(taken, BLOCKS))

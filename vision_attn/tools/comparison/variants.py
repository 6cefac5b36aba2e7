"""Variants of a comparison: available blocks, and the common settings that each block accepts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vision_attn.text import did_you_mean
from vision_attn.tools.training.settings import Settings, changes, override, read_settings

#: Settings of each variant, by name; None for the network without a block.
VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "convolution": {"block": "ConvBlock2d"},
    "large-kernel": {"block": "ConvBlock2d", "block_options": ("kernel_size=13",)},
    "norm-shortcut": {"block": "NormBlock2d"},
    "se": {"block": "se", "block_options": ("rd_ratio=2",)},
    "cbam": {"block": "cbam"},  # with the defaults of timm
    "se-residual": {"block": "SqueezeExciteBlock2d"},
    "pooled-mlp": {"block": "ConvBlock2d", "block_options": ("kernel_size=None",)},
    "averaging": {"block_options": ("scale=0",)},
    "attention": {},
}
CIFAR: dict[str, Any] = {
    "model": "resnet20", "names": ("layer3.*",), "block_options": ("num_heads=4",), "epochs": 200, "lr": 0.1,
    "warmup_epochs": 5.0, "label_smoothing": 0.1, "channels_last": True,
}  # fmt: skip
#: Settings of blocks are the only settings of recall.
RECALL: dict[str, Any] = {"names": ("stage2",), "block_options": ("num_heads=4",)}
#: Recipes by data set. Other data sets use the defaults of ``vision-attn train``.
RECIPES = {"cifar10": CIFAR, "cifar100": CIFAR, "recall": RECALL}
#: Settings of blocks, which the plain network does not have.
BLOCK_SETTINGS = ("stages", "names", "at", "block", "pattern", "block_options", "attention_lr")
#: Settings that differ between the runs of a comparison.
RESERVED_SETTINGS = {"block", "resume", "seed"}


def recipe(settings: Mapping[str, Any], run: Path | None = None) -> dict[str, Any]:
    """Return the common settings of all variants: the given settings, and the other settings of a run or a recipe.

    >>> found = recipe({"dataset": "cifar100", "block_options": ("impl=bmm",)})
    >>> found["model"], found["block_options"]
    ('resnet20', ('num_heads=4', 'impl=bmm'))
    """
    if reserved := sorted(RESERVED_SETTINGS & settings.keys()):
        flags = ", ".join(f"--{name}" for name in reserved)
        raise ValueError(f"{flags}: not available in a comparison. Pass a custom block as --variants 'NAME=--block …'")
    if run is None:
        defaults = RECIPES.get(settings.get("dataset", "folder" if "data" in settings else "recall"), {})
    else:  # the block is a variant, so that no code is imported
        defaults = changes(read_settings(run, {*settings, "block"}), Settings())
        defaults = {name: value for name, value in defaults.items() if name not in RESERVED_SETTINGS}
    return set_options(override(defaults, settings), {**parse_options(defaults), **parse_options(settings)})


def settings_for_variant(base: str, custom: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a variant. Custom settings override those of the base, which override common settings.

    Args:
        base: name in :data:`VARIANTS`.
        custom: settings of this variant only.
        common: settings of all variants. Settings that the block of the variant does not accept are ignored.

    >>> common = {"stages": (2,), "block_options": ("gate_init=1", "impl=bmm")}
    >>> found = settings_for_variant("large-kernel", {}, common)
    >>> found["stages"], found["block_options"]
    ((2,), ('gate_init=1', 'kernel_size=13'))
    """
    if base not in VARIANTS:
        expected = f"expected {', '.join(VARIANTS)} or NAME=VARIANT FLAGS"
        raise ValueError(f"variants: {expected}, got {base!r}.{did_you_mean(base, VARIANTS)}")
    defaults = VARIANTS[base]
    if defaults is None:
        # With a new classifier, every variant has trainable parameters if the backbone is frozen.
        foreign = (*BLOCK_SETTINGS, *(() if common.get("reset_head") else ("freeze_backbone",)))
        return {**{name: value for name, value in common.items() if name not in foreign}, **custom}
    values = override(override({"stages": (-1,), **defaults}, common), custom)
    block = values.get("block", "attention")
    accepted = {name: word for name, word in parse_options(common).items() if accepts_option(block, name)}
    return set_options(values, {**accepted, **parse_options(defaults), **parse_options(custom)})


def parse_options(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the pattern and the block options as a dictionary."""
    options = {name: word for name, _, word in (text.partition("=") for text in settings.get("block_options", ()))}
    return {**options, "pattern": settings["pattern"]} if "pattern" in settings else options


def set_options(settings: Mapping[str, Any], options: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings with other block options."""
    found = {name: value for name, value in settings.items() if name not in ("block_options", "pattern")}
    return {**found, **({"block_options": tuple(map("=".join, options.items()))} if options else {})}


def accepts_option(block: str, option: str) -> bool:
    """Return True if the block accepts an option, or if no block does, so that the insertion raises an error."""
    import inspect

    from vision_attn.attention.blocks import Attention2d
    from vision_attn.networks.block_factories import get_arguments, get_block_factory
    from vision_attn.tools.training.network import block_class  # imports timm, which is not needed to parse flags

    def is_argument(name: str) -> bool:
        forwarded = inspect.signature(Attention2d).parameters if name == "attention" else ()
        return option in get_arguments(get_block_factory(block_class(name))) or option in forwarded

    blocks = {settings.get("block", "attention") for settings in VARIANTS.values() if settings is not None}
    return is_argument(block) or not any(map(is_argument, blocks))

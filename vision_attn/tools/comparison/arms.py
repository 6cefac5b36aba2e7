"""The arms of a comparison: which blocks there are, and what of the common settings goes to which of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the flags of compare do not wait for torch
    from torch import nn

    from vision_attn.networks.insertion import InsertionReport

CONTROLS = "vision_attn.tools.comparison.controls:"
#: timm's blocks as they are by default, each where its paper has it: in the branch of a residual block.
OF_TIMM = {"eca": "eca", "cbam": "cbam", "coordinate": "coord", "gc": "gc"}
#: What each arm has of its own, by its name; None for the network without a block.
ARMS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "convolution": {"block": f"{CONTROLS}ConvBlock2d"},
    "large-kernel": {"block": f"{CONTROLS}ConvBlock2d", "block_options": ("kernel_size=13",)},
    "norm-shortcut": {"block": f"{CONTROLS}NormBlock2d"},
    "se": {"block": "se", "at": "branch", "block_options": ("rd_ratio=2",)},
    **{arm: {"block": block, "at": "branch"} for arm, block in OF_TIMM.items()},
    "se-residual": {"block": f"{CONTROLS}SqueezeExciteBlock2d"},
    "pooled-mlp": {"block": f"{CONTROLS}ConvBlock2d", "block_options": ("kernel_size=None",)},
    "gated-convolution": {"block": f"{CONTROLS}GatedConvBlock2d", "block_options": ("kernel_size=13",)},
    "linear": {"block": f"{CONTROLS}LinearBlock2d"},
    "averaging": {"block_options": ("scale=0",)},
    "attention": {},
}
CIFAR: dict[str, Any] = {
    "model": "resnet20", "insert": ("layer3.*",), "block_options": ("num_heads=4",), "epochs": 200, "lr": 0.1,
    "warmup_epochs": 5.0, "label_smoothing": 0.1, "channels_last": True,
}  # fmt: skip
#: What is known to work for a kind of data: a user's own images have the defaults of ``vision-attn train``.
RECIPES = {"cifar10": CIFAR, "cifar100": CIFAR}
#: What attention is compared with where something has to be looked up, each with about as many parameters but timm's.
LOOKING_UP = (
    *("plain", "convolution", "large-kernel", "map-kernel", "gated-convolution", "se-residual"),
    *("cbam", "eca", "coordinate", "averaging", "linear", "attention"),
)
#: The settings of blocks, and of what trains alone.
OF_BLOCKS = ("insert", "at", "block", "block_options", "attention_lr")
OF_FREEZING = ("freeze_backbone",)
#: What a comparison decides itself.
DECIDED = {"block", "resume", "seed"}


def recipe(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings common to all arms: those given, over those that are known to work for such data.

    >>> found = recipe({"dataset": "cifar100", "block_options": ("impl=bmm",)})
    >>> found["model"], found["block_options"]
    ('resnet20', ('num_heads=4', 'impl=bmm'))
    """
    if decided := sorted(DECIDED & given.keys()):
        raise ValueError(f"{', '.join(decided)}: a comparison decides that itself; a block of yours is an arm's own")
    known = RECIPES.get(given.get("dataset", "folder"), {})
    return with_options({**known, **given}, {**options_of(known), **options_of(given)})


def settings_of_arm(base: str, own: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an arm: those common to all that suit it, then those of its base, then its own.

    Args:
        base: its name among :data:`ARMS`.
        own: what it has of its own.
        common: what all arms have, with what concerns blocks for those that have some.

    >>> found = settings_of_arm("large-kernel", {}, {"insert": ("2",), "block_options": ("gate_init=1", "impl=bmm")})
    >>> found["insert"], found["block_options"]
    (('2',), ('gate_init=1', 'kernel_size=13'))
    """
    if base not in ARMS:
        raise ValueError(f"arms must be among {', '.join(ARMS)}, or NAME=FLAGS with flags of its own; got {base!r}")
    arm = ARMS[base]
    if arm is None:
        # With a new head there is something to train alone in all arms.
        foreign = (*OF_BLOCKS, *(() if common.get("reset_head") else OF_FREEZING))
        return {**{name: value for name, value in common.items() if name not in foreign}, **own}
    values = {"insert": ("-1",), **arm, **common, **own}  # where all blocks go, that of this arm goes too
    suiting = {name: word for name, word in options_of(common).items() if suits(name, values.get("block", "attention"))}
    return with_options(values, {**suiting, **options_of(arm), **options_of(own)})


def insert_arm_(
    model: nn.Module, arm: str, *, names: str, example_input: Any, side: int, **attention: Any
) -> InsertionReport | None:
    """Put the block of an arm into a network that a loop of one's own trains.

    Args:
        model: the network.
        arm: one of :data:`ARMS`, or ``"map-kernel"``, a large kernel over the whole map, as is then that of
            ``"gated-convolution"``.
        names: where, as in :func:`insert_`.
        example_input: as in :func:`insert_`.
        side: rows and columns of the map there.
        **attention: further options of arms that attend.
    """
    import ast

    from vision_attn.networks.insertion import insert_
    from vision_attn.tools.training.network import block_class

    own = ARMS["large-kernel" if arm == "map-kernel" else arm]
    if own is None:
        return None
    options = {name: ast.literal_eval(word) for name, word in options_of(own).items()}
    if arm in ("map-kernel", "gated-convolution"):
        options["kernel_size"] = 2 * side - 1
    if arm in ("averaging", "attention"):
        options = {**attention, **options}
    block = block_class(own.get("block", "attention"))
    return insert_(model, block, names=names, example_input=example_input, **options)


def options_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """Options of blocks as names and values."""
    return {text.partition("=")[0]: text.partition("=")[2] for text in settings.get("block_options", ())}


def with_options(settings: Mapping[str, Any], options: Mapping[str, str]) -> dict[str, Any]:
    found = {name: value for name, value in settings.items() if name != "block_options"}
    return {**found, **({"block_options": tuple(map("=".join, options.items()))} if options else {})}


def suits(option: str, block: str) -> bool:
    """Whether a block takes an option; one that no block takes is left to all, which refuse it."""
    import inspect

    from vision_attn.attention.blocks import Attention2d
    from vision_attn.networks.insertion.makers import get_arguments, get_maker
    from vision_attn.tools.training.network import block_class  # with timm, which the flags of compare do not wait for

    def taken(by: str) -> bool:
        hands_on = inspect.signature(Attention2d).parameters if by == "attention" else ()
        return option in get_arguments(get_maker(block_class(by))) or option in hands_on

    blocks = {arm.get("block", "attention") for arm in ARMS.values() if arm is not None}
    return taken(block) or not any(map(taken, blocks))

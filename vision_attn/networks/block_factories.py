"""Classes and functions that build blocks, with or without the arguments ``device`` and ``dtype``, and their names."""

import inspect
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vision_attn.attention import blocks
from vision_attn.attention.blocks import AttentionBlock1d, AttentionBlock2d, AttentionBlock3d
from vision_attn.text import did_you_mean

#: A class or function that builds a block.
BlockFactory = Callable[..., nn.Module]

#: The default block, by the number of axes of a feature map.
ATTENTION_BLOCKS: dict[int, BlockFactory] = {1: AttentionBlock1d, 2: AttentionBlock2d, 3: AttentionBlock3d}
#: Blocks of this library by name.
BLOCKS: dict[str, BlockFactory] = {name: getattr(blocks, name) for name in blocks.__all__}
#: The names of timm's ``create_attn``, except ``"ge"``, which timm cannot build.
TIMM_BLOCKS = (
    *("se", "ese", "eca", "ecam", "ceca", "gc", "gca", "cbam", "lcbam", "coord", "scoord", "ela", "strip"),
    *("sk", "splat", "lambda", "bottleneck", "halo", "nl", "bat"),
)

#: Largest attention width of a default block: eight heads of 64 channels. BoTNet uses 512 channels in the last stage of
#: a ResNet-50, a quarter of the channels there; non-local networks use half of the channels.
MAX_WIDTH = 512

#: Arguments of timm for the bottleneck of squeeze-and-excitation layers. Attention has no such bottleneck.
BOTTLENECK_ARGUMENTS = ("act_layer", "rd_channels", "rd_divisor", "rd_ratio")


def get_block_factory(block: BlockFactory | str | None, axes: int = 2) -> BlockFactory:
    """Return the class or function for a name; a class or function is returned unchanged.

    >>> get_block_factory("cbam")(8)(torch.randn(1, 8, 7, 7)).shape
    torch.Size([1, 8, 7, 7])
    """
    if block is None or block == "attention":
        return ATTENTION_BLOCKS[axes]
    if isinstance(block, str) and block in BLOCKS:
        return BLOCKS[block]
    if isinstance(block, str) and block in TIMM_BLOCKS:
        from timm.layers import get_attn

        return get_attn(block)
    if isinstance(block, str):
        names = ("attention", *BLOCKS, *TIMM_BLOCKS)
        expected = f"a class or function that returns a module, or one of {', '.join(names)}"
        raise ValueError(f"block must be {expected}, got {block!r}.{did_you_mean(block, names)}")
    if isinstance(block, nn.Module) or not callable(block):
        expected = "a class, or a function such as lambda channels: block"
        raise ValueError(f"block must be {expected}, got an instance of {type(block).__name__}")
    return block


def get_arguments(make: BlockFactory) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(make).parameters)


def make_block(
    make: BlockFactory, channels: int, *, device: Any = None, dtype: Any = None, **options: Any
) -> nn.Module:
    """Build a block with a device and dtype, even if ``make`` does not have these arguments."""
    known = get_arguments(make)
    if "_" in known and (unknown := options.keys() - known.keys()):  # timm's layers ignore unknown arguments.
        options_of_block = ", ".join(list(known)[1:-1])
        raise TypeError(f"unknown option {', '.join(sorted(unknown))}: expected one of {options_of_block}")
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    to = {"device": device, "dtype": dtype}
    options |= {name: value for name, value in to.items() if name in known or takes_all}
    with torch.device(device) if device is not None and "device" not in options else nullcontext():
        block = make(channels, **options)
    return block if to.keys() <= options.keys() or not isinstance(block, nn.Module) else block.to(**to)


def default_widths(make: BlockFactory, channels: int, options: Mapping[str, Any]) -> dict[str, int]:
    """Return the number and widths of heads that are not given as options and whose default does not fit.

    A default block attends in at most 512 channels, and the width of its heads is a multiple of 8. In a block that uses
    all channels, the number of heads divides the number of channels.

    >>> default_widths(AttentionBlock2d, 2048, {})
    {'key_dim': 64, 'value_dim': 64}
    >>> default_widths(AttentionBlock2d, 185, {})
    {'num_heads': 5}
    """
    default = getattr(get_arguments(make).get("num_heads"), "default", None)
    num_heads = options.get("num_heads", default)
    widths: dict[str, int] = {}
    if make in ATTENTION_BLOCKS.values() and channels > MAX_WIDTH and isinstance(num_heads, int) and num_heads > 0:
        width = MAX_WIDTH // num_heads
        widths = {name: max(width // 8 * 8, width % 8, 1) for name in ("key_dim", "value_dim") if name not in options}
    shared = any({**options, **widths}.get(name) is None for name in ("key_dim", "value_dim"))
    if shared and "num_heads" not in options and isinstance(default, int) and channels % default:
        widths["num_heads"] = next(count for count in range(min(default, channels), 0, -1) if channels % count == 0)
    return widths


def build_timm_layer(block: BlockFactory, options: Mapping[str, Any], channels: int, **kwargs: Any) -> nn.Module:
    """Build a block from the arguments that timm's networks pass to a layer."""
    if channels == 8 and kwargs == {"rd_ratio": 1.0}:
        # timm's EfficientNets test whether a layer has the argument rd_ratio by building it with 8 channels. Not every
        # number of heads divides 8, so the block is not built.
        raise TypeError("rd_ratio applies to layers with a channel bottleneck, but attention has no bottleneck")
    known = get_arguments(block)
    unused = {*BOTTLENECK_ARGUMENTS, *({"feat_size"} - known.keys())}  # Only blocks with position tables use the size.
    kwargs = {name: value for name, value in kwargs.items() if name not in unused}
    if "stride" not in known and (stride := kwargs.pop("stride", 1)) != 1:
        what = f"block must have the argument stride, because timm passes stride={stride}, got {block}"
        raise ValueError(f"{what}. Use timm_layer(StridedAttention2d, …)")
    return block(channels, **options, **kwargs)


def timm_layer(block: BlockFactory | None = None, **options: Any) -> BlockFactory:
    """Return a block constructor that timm accepts as the class of attention layers.

    ``timm.create_model("resnet50", block_args=dict(attn_layer=timm_layer(num_heads=4)))`` has the block in every
    residual block, before the addition. The default block is an identity at initialization, so it does not change the
    output of the network. ``self_attn_layer`` of timm's BoTNets replaces a convolution and its
    stride: pass ``timm_layer(StridedAttention2d)``.

    No record of these layers is stored, so rebuild the network with the same call. Each layer has the defaults of its
    class, so that checkpoints can be loaded. :class:`AttentionBlock2d` then uses all channels, which are 1,024 and
    2,048 in the last stages of a ResNet-50. ``timm_layer(key_dim=64, value_dim=64)`` uses 512 channels, like the blocks
    of :func:`insert_`.

    Args:
        block: class or function that is called as ``block(channels, **options)``, with ``device`` and ``dtype`` if timm
            passes them, and with ``stride`` and ``feat_size`` if it has these arguments and timm passes them. The
            default is :class:`vision_attn.AttentionBlock2d`.
        **options: options of ``block``.

    Returns:
        A callable that can be copied and pickled if ``block`` can.

    >>> import torch
    >>> layer = timm_layer(num_heads=4)
    >>> layer(64)(torch.randn(2, 64, 7, 7)).shape
    torch.Size([2, 64, 7, 7])
    """
    return partial(build_timm_layer, get_block_factory(block), options)


def describe_error(error: BaseException) -> str:
    """Return the message of an error or, if it is empty, the line outside of torch that raised it."""
    if str(error):
        kind = "" if isinstance(error, ValueError | TypeError | RuntimeError) else f"{type(error).__name__}: "
        return f"{kind}{error}"
    library = str(Path(torch.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.line for frame in frames if not frame.filename.startswith(library)]
    return f"{type(error).__name__} at {lines[-1]!r}"

"""What makes a block: a class, a function, or a name; with or without ``device`` and ``dtype`` among its arguments."""

from __future__ import annotations

import difflib
import inspect
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vision_attn.attention import blocks
from vision_attn.attention.blocks import AttentionBlock1d, AttentionBlock2d, AttentionBlock3d

#: What makes a block.
Maker = Callable[..., nn.Module]

#: The default block, by how many axes a map has.
ATTENTION_BLOCKS: dict[int, Maker] = {1: AttentionBlock1d, 2: AttentionBlock2d, 3: AttentionBlock3d}
#: Arguments of :func:`vision_attn.insert_` that no block has.
SITE_ARGUMENTS = ("stages", "names", "where", "exclude", "at", "layout", "example_input", "exact")
#: This library's blocks by name.
BLOCKS: dict[str, Maker] = {name: vars(blocks)[name] for name in blocks.__all__ if isinstance(vars(blocks)[name], type)}
#: The names of timm's ``create_attn``, but ``"ge"``, of which timm can make none.
OF_TIMM = (
    *("se", "ese", "eca", "ecam", "ceca", "gc", "gca", "cbam", "lcbam", "coord", "scoord", "ela", "strip"),
    *("sk", "splat", "lambda", "bottleneck", "halo", "nl", "bat"),
)


def maker_of(block: Maker | str | None, axes: int = 2) -> Maker:
    """What makes the block that is asked for.

    >>> maker_of("cbam")(8)(torch.randn(1, 8, 7, 7)).shape
    torch.Size([1, 8, 7, 7])
    """
    if block is None or block == "attention":
        return ATTENTION_BLOCKS[axes]
    if isinstance(block, str) and block in BLOCKS:
        return BLOCKS[block]
    if isinstance(block, str) and block in OF_TIMM:
        from timm.layers import get_attn

        made: Maker = get_attn(block)
        return made
    if isinstance(block, str | nn.Module) or not callable(block):
        names = ", ".join(("attention", *BLOCKS, *OF_TIMM))
        got = repr(block) if isinstance(block, str) else f"a {type(block).__name__}"
        raise ValueError(f"block must be a class or function that makes modules, or one of {names}; got {got}")
    return block


def arguments_of(make: Maker) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(make).parameters)


def make_block(make: Maker, channels: int, *, device: Any = None, dtype: Any = None, **options: Any) -> nn.Module:
    """A block of a device and a type, whether or not what makes it takes them."""
    known = arguments_of(make)
    if "_" in known and (unknown := options.keys() - known.keys()):  # where timm drops what it does not know
        raise TypeError(f"it takes no {', '.join(sorted(unknown))}, only {', '.join(list(known)[1:-1])}")
    takes_all = any(one.kind is one.VAR_KEYWORD for one in known.values())
    where = {"device": device, "dtype": dtype}
    given = {name: value for name, value in where.items() if name in known or takes_all}
    if len(given) == len(where):
        return make(channels, **given, **options)
    with torch.device(device) if device is not None else nullcontext():
        block = make(channels, **given, **options)
    return block.to(**where) if isinstance(block, nn.Module) else block


def hint(error: BaseException, make: Maker) -> str:
    """The argument that may have been meant by one that there is not."""
    _, unknown, name = str(error).rpartition("unexpected keyword argument ")
    if not unknown:
        return ""
    known = {*arguments_of(make), *SITE_ARGUMENTS}
    if make in ATTENTION_BLOCKS.values():
        known |= arguments_of(blocks.Attention2d).keys()
    close = difflib.get_close_matches(name.strip("'"), sorted(known), n=1)
    return f": did you mean {close[0]!r}?" if close else ""


def reason(error: BaseException) -> str:
    """What an error says or, where it says nothing, the line of code that raised it, or had it raised by a check."""
    if str(error):
        said = "" if isinstance(error, ValueError | TypeError | RuntimeError) else f"{type(error).__name__}: "
        return f"{said}{error}"
    library = str(Path(torch.__file__).parent)
    lines = [one.line for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(library)]
    return f"{type(error).__name__} at {lines[-1]!r}"

"""Where the blocks of a network go and what makes them: written down as plain values, and done again from these."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vision_attn.attention import blocks
from vision_attn.attention.blocks import use_impl
from vision_attn.errors import CheckpointError
from vision_attn.networks.checkpoints.specification import from_code, to_code
from vision_attn.networks.insertion import REPLACED, InsertedBlock, insert_, inserted, records, replace_
from vision_attn.text import shorten

#: The blocks that a file may name by themselves.
BLOCKS: dict[str, Callable[..., nn.Module]] = {
    name: made
    for name, made in vars(blocks).items()
    if name in blocks.__all__ and isinstance(made, type) and issubclass(made, nn.Module)
}

#: Numbers in the images of a dry run, which is what a file can make a network work on: 100 images of 3×224×224.
LARGEST_IMAGES = 2**24


@dataclass(frozen=True)
class Placement:
    """One block: where it goes and what it is."""

    #: path of its module
    site: str
    #: "after", "before", "branch" or "instead"
    at: str
    #: name of its class
    block: str
    #: what it was made with
    options: Mapping[str, Any]
    #: the images that its site was looked at with: batch, channels, rows, columns
    input_shape: tuple[int, ...]


def placements_of(model: nn.Module) -> tuple[Placement, ...]:
    """Where the blocks of a model are and how they are made, if that can be written down."""
    held, found = inserted(model), records(model)
    for record in found:
        refuse_unknown_make(record, held[record.site])
    return tuple(Placement(r.site, r.at, r.block, r.options, r.input_shape) for r in found)


def refuse_unknown_make(record: InsertedBlock, block: nn.Module) -> None:
    """A block of ours that a function made may be other than its options say, and would come back as another."""
    if record.block not in BLOCKS:
        return
    old = vars(block).get(REPLACED)
    given = {"stride": old.stride[0], "out_channels": old.out_channels} if isinstance(old, nn.Conv2d) else {}
    try:
        again = BLOCKS[record.block](record.channels, device="meta", **given, **record.options)
        with use_impl(block, "bmm"), use_impl(again, "bmm"):
            same = type(block) is type(again) and str(block) == str(again)
    except (TypeError, ValueError):
        same = False
    if not same:
        options = ", ".join(f"{name}={value!r}" for name, value in record.options.items()) or "no options"
        raise ValueError(
            f"the {record.block} at {record.site!r} is not what its class makes of {options}: give insert_ the class "
            "and its options, not a function that makes it"
        )


def said_of(placements: Iterable[Placement]) -> list[dict[str, Any]]:
    """Blocks as plain values, their options as code."""
    return [
        vars(block) | {"options": {name: to_code(name, value) for name, value in block.options.items()}}
        for block in placements
    ]


def placements_in(said: Iterable[Mapping[str, Any]]) -> tuple[Placement, ...]:
    """The blocks that such values say."""
    placements = tuple(
        Placement(
            site=str(block["site"]),
            at=str(block["at"]),
            block=str(block["block"]),
            options={str(name): from_code(code) for name, code in block["options"].items()},
            input_shape=tuple(map(int, block["input_shape"])),
        )
        for block in said
    )
    if any(math.prod(placement.input_shape) > LARGEST_IMAGES for placement in placements):
        raise ValueError(f"the network was looked at with images of more than {LARGEST_IMAGES:,} numbers")
    return placements


def place(
    model: nn.Module,
    placements: Iterable[Placement],
    makers: Mapping[str, Callable[..., nn.Module]],
    example_input: Any = None,
) -> None:
    """Replace and insert, those together that are alike but for their site."""
    groups: dict[str, list[Placement]] = {}
    # Replaced first: no block is held by a module that goes.
    for placement in sorted(placements, key=lambda placement: placement.at != "instead"):
        groups.setdefault(repr(replace(placement, site="")), []).append(placement)
    for group in groups.values():
        first, sites = group[0], [placement.site for placement in group]
        make, shape = makers[first.block], first.input_shape if example_input is None else example_input
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about sites, which were chosen long ago
            if first.at == "instead":
                replace_(model, make, names=sites, example_input=shape, **first.options)
            else:
                insert_(model, make, names=sites, at=first.at, example_input=shape, **first.options)


def makers_of(
    placements: Iterable[Placement],
    tensors: Mapping[str, Tensor],
    path: str | Path,
    block: Callable[..., nn.Module] | None,
) -> dict[str, Callable[..., nn.Module]]:
    """What makes the blocks of a file that has these tensors, by the name of their class."""
    names = sorted({placement.block for placement in placements})
    foreign = [name for name in names if name not in BLOCKS]
    if block is None:
        if foreign:
            raise CheckpointError(
                f"{path} holds {', '.join(foreign)}, which is no block of this library: give its class, "
                f"block={foreign[0]}"
            )
    elif not foreign:
        raise ValueError(f"block: {path} holds blocks of this library only ({', '.join(names)}): leave it out")
    makers: dict[str, Callable[..., nn.Module]] = BLOCKS | (dict.fromkeys(foreign, block) if block else {})
    parts = [(key.split("."), value.shape) for key, value in tensors.items()]
    saved = {(".".join(names[first:]), shape) for names, shape in parts for first in range(len(names))}
    return {name: only_as_saved(makers[name], saved) for name in names}


def only_as_saved(
    make: Callable[..., nn.Module], saved: Collection[tuple[str, tuple[int, ...]]]
) -> Callable[..., nn.Module]:
    """Makes a block only if the file holds tensors of its names and shapes: options can ask for any size."""

    @wraps(make)
    def made(channels: int, **given: Any) -> nn.Module:
        state = make(channels, **{**given, "device": "meta"}).state_dict()
        other = [f"{key} {tuple(value.shape)}" for key, value in state.items() if (key, value.shape) not in saved]
        if other:
            raise CheckpointError(f"the block made here and the saved ones differ in {shorten(other)}")
        return make(channels, **given)

    return made

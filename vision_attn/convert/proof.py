"""The proof of a conversion: a copy of the source with random weights and what becomes of it, on one random map.

Shapes cannot tell a wrong order of heads from a right one, and a subclass may compute anything. A source's own weights
may hide the difference too: a projection that begins at zero gives zeros in any order. So the weights are random.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from vision_attn.errors import ConversionError

__all__ = ["SIZES", "TOLERANCE", "check_equal", "from_tokens", "proven", "random_like", "to_tokens"]

Source = TypeVar("Source")
Block = TypeVar("Block", bound=nn.Module)

#: Maps to prove a conversion on, by their number of axes; no two of their sides are equal.
SIZES = {1: (6,), 2: (3, 4), 3: (2, 3, 4)}

#: Of the largest element. Another order of rows differs by all of it; arithmetic by 1e-15, and by 1e-7 where Keras's
#: fused kernel rounds to float32.
TOLERANCE = 1e-5

#: What is left to whoever has a source that cannot be proven.
REMEDY = "load its weights into a plain layer of its library, convert that, and do around the block what it did besides"


class RunSource(Protocol):
    """How a source takes a map, and maybe another to attend to, channels second as all maps here."""

    def __call__(self, source: Any, x: Tensor, context: Tensor | None = None, /) -> Tensor: ...


def proven(
    source: Source,
    convert: Callable[[Source], Block],
    run: RunSource,
    *,
    shape: tuple[int, ...],
    stand_in: Callable[[Source], Source] | None = None,
) -> Block:
    """What ``convert`` makes of a source, after it was seen to be right on a stand-in for the source."""
    make = stand_in or module_stand_in
    with torch.inference_mode(False), torch.enable_grad():
        try:
            theirs = make(source)
        except Exception as error:
            raise ConversionError(
                f"this {type(source).__name__} cannot be copied, to be run in float64 "
                f"({type(error).__name__}: {error}): take from it what is no weight, or {REMEDY}"
            ) from error
        check_equal(theirs, convert(theirs), run, shape)
        return convert(source)


def check_equal(
    source: Any, block: nn.Module, run: RunSource, shape: tuple[int, ...], tolerance: float = TOLERANCE
) -> None:
    """Refuse a block that gives other numbers than its source for a random map, and another to attend to if need be."""
    kind = type(source).__name__
    generator = torch.Generator("cpu").manual_seed(0)
    device = next(block.parameters()).device
    context = getattr(block, "context_channels", None)
    shapes = [shape] if context is None else [shape, (context, *shape[1:])]
    maps = [torch.randn(1, *s, generator=generator, dtype=torch.float64, device="cpu").to(device) for s in shapes]
    with torch.no_grad():
        try:
            expected: object = run(source, *maps)
        except Exception as error:
            raise ConversionError(
                f"this {kind} cannot be run as a layer of its class is ({type(error).__name__}: {error}): {REMEDY}"
            ) from error
        if not isinstance(expected, Tensor):
            raise ConversionError(
                f"this {kind} gives a {type(expected).__name__} where a layer of its class gives a tensor: {REMEDY}"
            )
        block = block.eval()
        got = block(maps[0]) if context is None else block(maps[0], context=maps[1])
    difference = f"shape {tuple(got.shape)}, not {tuple(expected.shape)}"
    if got.shape == expected.shape:
        largest, off = expected.abs().max().item(), (got - expected).abs().max().item()
        if off <= tolerance * largest:  # which a difference that is no number is not
            return
        difference = f"a difference of {off:.2g} where the largest is {largest:.2g}"
    raise ConversionError(
        f"the {type(block).__name__} made of this {kind} does not compute what it does: outputs have {difference}. Is "
        f"it a subclass with a forward of its own, or has a part of it been exchanged? Then {REMEDY}"
    )


def module_stand_in(source: Any) -> Any:
    """A copy of a module in float64, on the CPU, in evaluation mode, with random parameters."""
    twin = copy.deepcopy(source).to("cpu", torch.float64).eval()
    parameters = list(twin.parameters())
    with torch.no_grad():
        for parameter, random in zip(parameters, random_like(parameters), strict=True):
            parameter.copy_(random)
    return twin


def random_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Random numbers for parameters, of the size with which a square matrix keeps lengths about as they are.

    The numbers are from a generator of their own.
    """
    generator = torch.Generator("cpu").manual_seed(1)
    draws = [torch.randn(x.shape, generator=generator, dtype=torch.float64, device="cpu") for x in tensors]
    return [(draw * draw.numel() ** -0.25).to(x) for draw, x in zip(draws, tensors, strict=True)]


def to_tokens(x: Tensor) -> Tensor:
    """The tokens of a map, ``(b, tokens, c)``."""
    return x.flatten(2).transpose(1, 2)


def from_tokens(y: Tensor, size: tuple[int, ...]) -> Tensor:
    """The map of tokens, ``(b, c, *size)``."""
    return y.transpose(1, 2).unflatten(2, size)

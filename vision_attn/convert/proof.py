"""The proof of a conversion: a copy of the source with random weights and what becomes of it, on one random map.

Shapes cannot tell a wrong order of heads from a right one, and a subclass may compute anything. A source's own weights
may hide the difference too: a projection that begins at zero gives zeros in any order. So the weights are random.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

__all__ = ["SIZES", "ConversionError", "from_tokens", "proven", "randomise_", "to_tokens"]

Source = TypeVar("Source")
Block = TypeVar("Block", bound=nn.Module)

#: Maps to prove a conversion on, by their number of axes; no two of their sides are equal.
SIZES = {1: (6,), 2: (3, 4), 3: (2, 3, 4)}

#: Of the largest element. Another order of rows differs by all of it; arithmetic by 1e-15, and by 1e-7 where Keras's
#: fused kernel rounds to float32.
TOLERANCE = 1e-5


class ConversionError(RuntimeError):
    """What a source was converted to does not compute what the source does.

    >>> from vision_attn.convert import from_torch_mha
    >>> class Halved(nn.MultiheadAttention):
    ...     def forward(self, *args, **kwargs):
    ...         return super().forward(*args, **kwargs)[0] / 2, None
    >>> from_torch_mha(Halved(8, 2))  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    ConversionError: the Attention2d made of this Halved does not compute what it does
    """


class Run(Protocol):
    """How a source takes a map, and maybe another to attend to, channels second as all maps here."""

    def __call__(self, source: Any, x: Tensor, context: Tensor | None = None, /) -> Tensor: ...


def proven(
    source: Source,
    convert: Callable[[Source], Block],
    run: Run,
    *,
    shape: tuple[int, ...],
    context: tuple[int, ...] | None = None,
    stand_in: Callable[[Source], Source] | None = None,
) -> Block:
    """What ``convert`` makes of a source, after it was seen to be right on a stand-in for the source.

    Args:
        source: the layer of another library; it is not run and not changed.
        convert: gives the block for it.
        run: gives the source's output for a map.
        shape: of the map, ``(c, h, w)``.
        context: of a second map to attend to, if the source always takes one.
        stand_in: gives the copy of the source, in float64 and evaluation mode, with random weights.

    Raises:
        ConversionError: the outputs differ.
    """
    make = stand_in or module_stand_in
    with torch.inference_mode(False), torch.enable_grad():
        theirs = make(source)
        ours = convert(theirs).eval()
        generator = torch.Generator("cpu").manual_seed(0)
        like = next(ours.parameters())
        shapes = [shape] if context is None else [shape, context]
        maps = [torch.randn(1, *s, generator=generator, dtype=like.dtype, device="cpu").to(like.device) for s in shapes]
        with torch.no_grad():
            expected = run(theirs, *maps)
            got = ours(maps[0], context=maps[1]) if context else ours(maps[0])
        check_equal(type(source).__name__, type(ours).__name__, got, expected)
        return convert(source)


def check_equal(source: str, block: str, got: Tensor, expected: Tensor) -> None:
    advice = (
        f"the {block} made of this {source} does not compute what it does; is it a subclass with a forward of its own, "
        "or has a part of it been exchanged?"
    )
    if got.shape != expected.shape:
        raise ConversionError(f"{advice} Outputs have shape {tuple(got.shape)}, not {tuple(expected.shape)}")
    difference, largest = (got - expected).abs().max().item(), expected.abs().max().item()
    if not difference <= TOLERANCE * largest:  # and so for a difference that is no number
        raise ConversionError(f"{advice} Outputs differ by {difference:.2g} where the largest is {largest:.2g}")


def module_stand_in(source: Any) -> Any:
    """A copy of a module in float64, on the CPU, in evaluation mode, with random parameters."""
    twin = copy.deepcopy(source).to("cpu", torch.float64).eval()
    randomise_(twin.parameters())
    return twin


def randomise_(parameters: Any) -> None:
    """Fill parameters with random numbers, of the size with which a square matrix keeps lengths about as they are.

    The numbers are from a generator of their own.

    Args:
        parameters: the tensors.
    """
    generator = torch.Generator("cpu").manual_seed(1)
    with torch.no_grad():
        for parameter in parameters:
            random = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype, device="cpu")
            parameter.copy_(random * parameter.numel() ** -0.25)


def to_tokens(x: Tensor) -> Tensor:
    """The tokens of a map, ``(b, tokens, c)``.

    Args:
        x: the map ``(b, c, …)``.
    """
    return x.flatten(2).transpose(1, 2)


def from_tokens(y: Tensor, size: tuple[int, ...]) -> Tensor:
    """The map of tokens, ``(b, c, *size)``.

    Args:
        y: the tokens ``(b, tokens, c)``.
        size: of the map, in positions.
    """
    return y.transpose(1, 2).unflatten(2, size)

"""The proof of a conversion: a copy of the source and what becomes of it are run on random numbers.

Shapes cannot tell a wrong order of heads from a right one, and a subclass may compute anything. The source's own
weights may hide a difference (a projection that begins at zero gives zeros in any order), so the copy has others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vision_attn.errors import ConversionError

__all__ = ["TOLERANCE", "check_outputs", "difference", "explained", "random_like", "random_map"]

Source = TypeVar("Source", bound=nn.Module)

#: Of the largest element. Another order of rows differs by all of it; arithmetic by 1e-15, and by 1e-7 where Keras's
#: fused kernel rounds to float32.
TOLERANCE = 1e-5

#: What is left to whoever has a source that cannot be proven.
REMEDY = "load its weights into a plain layer of its library, convert that, and do around the block what it did besides"


def difference(source: Source, compute: Callable[..., Any], example: Callable[[Source], tuple[Any, ...]]) -> float:
    """How much ``compute(twin, *arguments)`` differs from what a copy of the source gives; refused if too much."""
    with torch.inference_mode(False), torch.enable_grad():
        twin = random_twin(source)
        arguments = example(twin)
        with explained(source, "run as a layer of its class is"):
            expected = output_of(twin(*arguments))
        return check_outputs(source, expected, output_of(compute(twin, *arguments)))


def output_of(given: Any) -> Tensor:
    y = given[0] if isinstance(given, tuple) else given
    if not isinstance(y, Tensor):
        raise TypeError(f"it gives a {type(y).__name__}, not a tensor")
    return y.detach()


def random_twin(source: Source) -> Source:
    """A copy in float64, in evaluation mode, with random weights."""
    with explained(source, "copied, to be run in float64"):
        twin = copy.deepcopy(source).to("cpu", torch.float64)
        twin.eval()  # which gives back nothing where a library's own does not
        parameters = list(twin.parameters())
        with torch.no_grad():
            for parameter, values in zip(parameters, random_like(parameters), strict=True):
                parameter.copy_(values)
    return twin


def check_outputs(source: nn.Module, expected: Tensor, got: Tensor, tolerance: float = TOLERANCE) -> float:
    """The greatest difference of two outputs, relative to the largest number; refused where it is too large."""
    why = f"shape {tuple(got.shape)}, not {tuple(expected.shape)}"
    if got.shape == expected.shape:
        largest, off = expected.abs().max().item(), (got - expected).abs().max().item()
        if off <= tolerance * largest:  # which a difference that is no number is not
            return off / largest if largest else 0.0
        why = f"a difference of {off:.2g} where the largest is {largest:.2g}"
    raise ConversionError(
        f"what was made of this {type(source).__name__} does not compute what it does: outputs have {why}. Is it a "
        f"subclass with a forward of its own, or has a part of it been exchanged? Then {REMEDY}"
    )


@contextmanager
def explained(source: nn.Module, what: str) -> Iterator[None]:
    """Any error in it is a reason why the source cannot be proven."""
    try:
        yield
    except Exception as error:
        raise ConversionError(
            f"this {type(source).__name__} cannot be {what} ({type(error).__name__}: {error}): {REMEDY}"
        ) from error


def random_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Random numbers for parameters, of the size with which a square matrix keeps lengths about as they are.

    The numbers are from a generator of their own.
    """
    generator = torch.Generator("cpu").manual_seed(1)
    draws = [torch.randn(x.shape, generator=generator, dtype=torch.float64, device="cpu") for x in tensors]
    return [(draw * draw.numel() ** -0.25).to(x) for draw, x in zip(draws, tensors, strict=True)]


def random_map(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float64, device="cpu")

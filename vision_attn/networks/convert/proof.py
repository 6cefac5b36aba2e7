"""What was made of a layer is proven before anyone gets it; what no proof can see is refused first.

A copy of the layer and what becomes of it are run on random numbers, also on small ones, which the ``eps`` of a norm
shows in. Shapes cannot tell a wrong order of heads from a right one, and a subclass may compute anything. The layer's
own weights may hide a difference (a projection that begins at zero gives zeros in any order): the copy has others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from vision_attn.errors import ConversionError

#: Of the largest value. Another order of rows differs by all of it, arithmetic in float64 by 1e-15. Only what has no
#: kernel in float64 is proven in float32.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}

#: How large the inputs are that both are run on.
SIZES = (1.0, 1e-3)

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

#: How a part or setting prints that does nothing.
NOTHING = ("None", "False", "0", "1", "1.0", "(1, 1)", "Identity()", "'sdpa'")

REMEDY = (
    "is it a subclass with a forward of its own, was a part of it replaced, as by an adapter or by quantizing, or has "
    "it an option that no block has? Load its weights into a plain layer of its library, and convert that"
)

# --- what is refused --------------------------------------------------------------------------------------------------


def path_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def part_of(module: Any, path: str) -> Any:
    """The part or setting of a module at a path with dots; None if it has none."""
    return reduce(lambda part, name: getattr(part, name, None), path.split("."), module)


def check_source(module: nn.Module) -> None:
    """Refuse a layer whose hooks, parametrizations or parts in another mode a block would not have."""
    kind = type(module).__name__
    for name, part in module.named_modules():
        where = f"{kind}.{name}" if name else kind
        if any(getattr(part, hooks) for hooks in HOOKS):
            raise ValueError(f"{where} has hooks, which a block would not run: remove them, and put them on the block")
        if is_parametrized(part):
            raise ValueError(f"{where} has parametrizations: call torch.nn.utils.parametrize.remove_parametrizations")
        if isinstance(part, (nn.Dropout, nn.MultiheadAttention)) and part.training != module.training:
            modes = f"{kind} with training={module.training} and {where} with training={part.training}"
            raise ValueError(f"the block has one mode; got {modes}: call .train() or .eval() on all of it first")


def check_without(module: object, remedies: Mapping[str, str]) -> None:
    """Refuse a layer with one of these parts or settings, unless that does nothing."""
    for path, remedy in remedies.items():
        value = part_of(module, path)
        if repr(value) not in NOTHING:
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{type(module).__name__}.{path} cannot be carried over: got {got}; {remedy}")


def drop_of(module: Any, path: str) -> float:
    """The probability of one of a layer's dropouts, 0 if it has none there.

    >>> drop_of(nn.TransformerEncoderLayer(8, 2, dropout=0.25), "dropout1")
    0.25
    """
    part = part_of(module, path)
    if isinstance(part, (int, float)):
        return part
    if type(part) not in (nn.Dropout, nn.Identity, type(None)):
        raise ValueError(f"{type(module).__name__}.{path} must drop single elements, as nn.Dropout does; got {part}")
    return getattr(part, "p", 0.0)


# --- the proof --------------------------------------------------------------------------------------------------------


@contextmanager
def random_twin(source: nn.Module, dtype: torch.dtype) -> Iterator[nn.Module]:
    """A copy of this type, in evaluation mode, with random weights, which are not trained: some kernels only run so."""
    with explained(source, f"copied, to be run in {dtype}"):
        twin = copy.deepcopy(source).to("cpu", dtype).requires_grad_(False)
        twin.eval()  # which gives back nothing where a library's own does not
        parameters = list(twin.parameters())
        with torch.no_grad():
            for parameter, values in zip(parameters, random_like(parameters), strict=True):
                parameter.copy_(values)
    yield twin


def difference(
    source: nn.Module,
    compute: Callable[..., Any],
    example: Callable[[Any], tuple[Any, ...]],
    twin: Callable[[Any, torch.dtype], AbstractContextManager[Any]] = random_twin,
    dtype: torch.dtype = torch.float64,
    **options: bool,
) -> float:
    """How much ``compute(copy, *arguments)`` differs from what the copy gives, in parts of the largest value.

    Refused if that is more than the type explains. The copy is called with the options, too.
    """
    worst = 0.0
    with torch.inference_mode(False), torch.enable_grad(), twin(source, dtype) as other:
        for size in SIZES:
            with explained(source, f"run as a layer of its class is, in {dtype}"):
                given = example(other)
                # One tensor may be several arguments.
                scaled = {id(x): size * x.to(dtype) for x in given if isinstance(x, Tensor)}
                arguments = [scaled.get(id(x), x) for x in given]
                expected = output_of(other(*arguments, **options))
            with explained(source, "run by what was made of it", ValueError):  # which says what is wrong
                worst = max(worst, off_by(source, expected, output_of(compute(other, *arguments))))
    return worst


def output_of(given: Any) -> Tensor:
    y = given[0] if isinstance(given, tuple) else given
    if not isinstance(y, Tensor):
        raise TypeError(f"it gives a {type(y).__name__}, not a tensor")
    return y.detach()


def off_by(source: nn.Module, expected: Tensor, got: Tensor) -> float:
    why = f"shape {tuple(got.shape)}, not {tuple(expected.shape)}"
    if got.shape == expected.shape:
        largest, off = expected.abs().max().item(), (got - expected).abs().max().item()
        if off <= TOLERANCE[expected.dtype] * largest:  # which a difference that is no number is not
            return off / largest if largest else 0.0
        why = f"a difference of {off:.2g} in {expected.dtype} where the largest is {largest:.2g}"
    what = f"what was made of this {type(source).__name__} does not compute what it does"
    raise ConversionError(f"{what}, outputs have {why}: {REMEDY}")


@contextmanager
def explained(source: nn.Module, what: str, known: type[Exception] = ConversionError) -> Iterator[None]:
    """Any error in it, but for those that are known, is a reason why the layer cannot be proven."""
    try:
        yield
    except (ConversionError, known):
        raise
    except Exception as error:
        kind = type(source).__name__
        raise ConversionError(f"this {kind} cannot be {what} ({type(error).__name__}: {error}): {REMEDY}") from error


def random_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Random numbers for parameters, of the size with which a square matrix keeps lengths about as they are.

    The numbers are from a generator of their own.
    """
    generator = torch.Generator("cpu").manual_seed(1)
    draws = [torch.randn(x.shape, generator=generator, dtype=torch.float64, device="cpu") for x in tensors]
    return [(draw * draw.numel() ** -0.25).to(x) for draw, x in zip(draws, tensors, strict=True)]


def random_map(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float64, device="cpu")

"""Checks that a block computes the same as the layer it was made from, and refusals of options that no check can see.

A randomized copy of the layer and its block are run on random inputs of two sizes: small inputs reveal a different
``eps`` of a norm. Shapes cannot distinguish a wrong order of heads from the right one, and a subclass may compute
anything. The layer's weights could hide a difference (a projection of zeros returns zeros in any order), so the copy
has random weights.
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

#: Relative to the largest value. Another order of rows differs by all of it, arithmetic in float64 by 1e-15. Only
#: layers without a float64 kernel are compared in float32.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}

#: Scales of the inputs that both are run on.
SCALES = (1.0, 1e-3)

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

#: The ``repr`` of parts and settings without effect.
NO_EFFECT = ("None", "False", "0", "1", "1.0", "(1, 1)", "Identity()", "'sdpa'")

#: The last step of a check, in error messages.
BLOCK_STEP = "run by its block"

REMEDY = (
    "is it a subclass with a custom forward, was a part of it replaced, as by an adapter or by quantization, or has it "
    "an option that no block has? Load its weights into a plain layer of its library, and convert that"
)

# --- refusals ---------------------------------------------------------------------------------------------------------


def class_path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def get_part(module: Any, path: str) -> Any:
    """Return the part or setting of a module at a dotted path; None if it has none."""
    return reduce(lambda part, name: getattr(part, name, None), path.split("."), module)


def check_source(module: nn.Module, unsupported: Mapping[str, str]) -> None:
    """Refuse a layer with unsupported parts, or with hooks, parametrizations or a second mode, which a block lacks."""
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
    check_without(module, unsupported)


def check_without(module: object, unsupported: Mapping[str, str]) -> None:
    """Refuse a layer that has one of these parts or settings, each with a remedy, unless it has no effect."""
    for path, remedy in unsupported.items():
        value = get_part(module, path)
        if repr(value) not in NO_EFFECT:
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{type(module).__name__}.{path} cannot be carried over: got {got}; {remedy}")


def get_dropout(module: Any, path: str) -> float:
    """Return the probability of one of a layer's dropouts, 0 if the layer has none there.

    >>> get_dropout(nn.TransformerEncoderLayer(8, 2, dropout=0.25), "dropout1")
    0.25
    """
    part = get_part(module, path)
    if isinstance(part, (int, float)):
        return part
    if type(part) not in (nn.Dropout, nn.Identity, type(None)):
        raise ValueError(f"{type(module).__name__}.{path} must drop single elements, as nn.Dropout does; got {part}")
    return getattr(part, "p", 0.0)


# --- equivalence ------------------------------------------------------------------------------------------------------


@contextmanager
def randomized_copy(source: nn.Module, dtype: torch.dtype) -> Iterator[nn.Module]:
    """Yield a copy in evaluation mode with random weights without gradients, which some kernels require."""
    copied = copy.deepcopy(source).to("cpu", dtype).requires_grad_(False)
    copied.eval()  # returns None in some libraries
    parameters = list(copied.parameters())
    with torch.no_grad():
        for parameter, values in zip(parameters, random_like(parameters), strict=True):
            parameter.copy_(values)
    yield copied


def check_equivalence(
    source: nn.Module,
    compute: Callable[..., Any],
    example: Callable[[Any], tuple[Any, ...]],
    make_copy: Callable[[Any, torch.dtype], AbstractContextManager[Any]] = randomized_copy,
    dtype: torch.dtype = torch.float64,
    **options: bool,
) -> float:
    """Return by how much ``compute(copy, *arguments)`` differs from ``copy(*arguments, **options)``.

    The difference is relative to the largest value; a difference above rounding raises an error. Other errors become a
    :class:`ConversionError`, except for a ``ValueError`` of ``compute``, which names its cause.
    """
    worst, step = 0.0, f"copied, to be run in {dtype}"
    try:
        with torch.inference_mode(False), torch.enable_grad(), make_copy(source, dtype) as copied:
            for scale in SCALES:
                step = f"run as a layer of its class is, in {dtype}"
                given = example(copied)
                # One tensor may be several arguments.
                scaled = {id(x): scale * x.to(dtype) for x in given if isinstance(x, Tensor)}
                arguments = [scaled.get(id(x), x) for x in given]
                expected = get_output(copied(*arguments, **options))
                step = BLOCK_STEP
                worst = max(worst, compare(source, expected, get_output(compute(copied, *arguments))))
    except Exception as error:
        if isinstance(error, ConversionError) or (isinstance(error, ValueError) and step == BLOCK_STEP):
            raise
        kind = type(source).__name__
        raise ConversionError(f"this {kind} cannot be {step} ({type(error).__name__}: {error}): {REMEDY}") from error
    return worst


def get_output(result: Any) -> Tensor:
    y: Tensor = result[0] if isinstance(result, tuple) else result
    return y.detach()


def compare(source: nn.Module, expected: Tensor, got: Tensor) -> float:
    why = f"shape {tuple(got.shape)}, not {tuple(expected.shape)}"
    if got.shape == expected.shape:
        largest, off = expected.abs().max().item(), (got - expected).abs().max().item()
        if off <= TOLERANCE[expected.dtype] * largest:  # False for NaN
            return off / largest if largest else 0.0
        why = f"a difference of {off:.2g} in {expected.dtype} where the largest value is {largest:.2g}"
    same = f"the block of this {type(source).__name__} does not compute the same as the layer"
    raise ConversionError(f"{same}, outputs have {why}: {REMEDY}")


def random_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Draw reproducible random weights, scaled so that a square matrix roughly preserves the norm of vectors."""
    generator = torch.Generator("cpu").manual_seed(1)
    draws = [torch.randn(x.shape, generator=generator, dtype=torch.float64, device="cpu") for x in tensors]
    return [(draw * draw.numel() ** -0.25).to(x) for draw, x in zip(draws, tensors, strict=True)]


def random_map(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float64, device="cpu")

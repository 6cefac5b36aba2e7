"""Check that a block reproduces the outputs of the layer it was converted from, and reject unsupported options.

Layer and block are compared by running them, because weights of the correct shapes can have the wrong order of heads,
and a subclass can compute anything. The comparison uses a copy of the layer with random weights: the original weights
can hide a difference (a projection of zeros returns zeros in any order). It is repeated with inputs of small magnitude,
which reveal a different ``eps`` of a norm.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from vision_attn.errors import ConversionError
from vision_attn.networks.finetuning import is_mark
from vision_attn.networks.inspection.network import hook_dicts

#: Largest accepted difference, relative to the largest value. A wrong order of rows causes a relative difference of
#: about 1, and rounding in float64 about 1e-15.
TOLERANCE = 1e-10

#: Scales of the random inputs.
SCALES = (1.0, 1e-3)

#: The ``repr`` of settings and submodules that have no effect.
NO_EFFECT = ("None", "False", "0", "1", "1.0", "(1, 1)", "Identity()", "'sdpa'")

REMEDY = (
    "Possible causes are a subclass with a custom forward, a replaced submodule (by an adapter or quantization) or an "
    "option that blocks do not support. Load the weights into an unmodified layer of the library and convert that layer"
)

# --- rejected layers --------------------------------------------------------------------------------------------------


def class_path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def get_part(module: Any, path: str) -> Any:
    """Return the submodule or setting of a module at a dotted path; None if it does not exist."""
    return reduce(lambda part, name: getattr(part, name, None), path.split("."), module)


def is_hooked(module: nn.Module) -> bool:
    """Return True for a module with hooks of other code, or a forward that a tool (accelerate, LoRA) has assigned."""
    return "forward" in module.__dict__ or not all(is_mark(x) for hooks in hook_dicts(module) for x in hooks.values())


def check_source(module: nn.Module, unsupported: Mapping[str, str]) -> None:
    """Raise an error for a layer with hooks, parametrizations, submodules in another mode or unsupported settings.

    ``unsupported`` maps paths of submodules and settings that must have no effect to remedies.
    """
    kind = type(module).__name__
    for name, part in module.named_modules():
        where = f"{kind}.{name}" if name else kind
        if is_hooked(part):
            what = "hooks or a forward that another tool has assigned, which a block does not run"
            raise ValueError(f"{where} has {what}. Remove them, or call va.swap_ before that tool")
        if is_parametrized(part):
            raise ValueError(f"{where} has parametrizations. Call torch.nn.utils.parametrize.remove_parametrizations")
        if isinstance(part, (nn.Dropout, nn.MultiheadAttention)) and part.training != module.training:
            modes = f"{kind} with training={module.training} and {where} with training={part.training}"
            raise ValueError(f"all modules must be in the same mode: got {modes}. Call .train() or .eval() first")
    for path, remedy in unsupported.items():
        value = get_part(module, path)
        if repr(value) not in NO_EFFECT:
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{kind}.{path} is not supported (got {got}): {remedy}")


def get_dropout(module: Any, path: str) -> float:
    """Return the probability of the dropout at a path of a layer; 0 if there is no dropout.

    >>> get_dropout(nn.TransformerEncoderLayer(8, 2, dropout=0.25), "dropout1")
    0.25
    """
    part = get_part(module, path)
    if isinstance(part, (int, float)):
        return part
    if type(part) not in (nn.Dropout, nn.Identity, type(None)):
        raise ValueError(f"{type(module).__name__}.{path} must be nn.Dropout or nn.Identity, got {part}")
    return getattr(part, "p", 0.0)


# --- equivalence ------------------------------------------------------------------------------------------------------


@contextmanager
def randomized_copy(source: nn.Module) -> Iterator[nn.Module]:
    """Yield a copy of a layer in float64 and evaluation mode, with random weights that do not require gradients.

    Some kernels do not support gradients.
    """
    copied = copy.deepcopy(source).to("cpu", torch.float64).requires_grad_(False)
    copied.eval()  # not chained: in some libraries, eval() returns None
    parameters = list(copied.parameters())
    with torch.no_grad():
        for parameter, values in zip(parameters, random_like(parameters), strict=True):
            parameter.copy_(values)
    yield copied


def check_equivalence(source: nn.Module, compute: Callable[..., Any], conversion: Any) -> float:
    """Return the largest difference between ``compute(copy, *arguments)`` and the output of a copy of a layer.

    Its :class:`.LayerConversion` makes the copy and the arguments. The difference is relative to the largest value. A
    difference above :data:`TOLERANCE` raises an error. Exceptions are converted to :class:`ConversionError`,
    except for a ``ValueError`` of the conversion, which names an unsupported option.
    """
    worst = 0.0
    try:
        with torch.inference_mode(False), torch.enable_grad(), conversion.make_copy(source) as copied:
            for scale in SCALES:
                inputs = conversion.arguments(copied)
                # The same tensor can be passed as several arguments.
                scaled = {id(x): scale * x.to(torch.float64) for x in inputs if isinstance(x, Tensor)}
                arguments = [scaled.get(id(x), x) for x in inputs]
                try:
                    expected = get_output(copied(*arguments, **conversion.call_options))
                except ValueError as error:  # the layer's error does not name an option
                    raise RuntimeError(*error.args) from error
                worst = max(worst, compare(source, expected, get_output(compute(copied, *arguments))))
    except (ConversionError, ValueError):
        raise
    except Exception as error:
        what = f"{type(source).__name__} cannot be compared with a block ({type(error).__name__}: {error})"
        raise ConversionError(f"{what}. {REMEDY}") from error
    return worst


def get_output(result: Any) -> Tensor:
    y: Tensor = result[0] if isinstance(result, tuple) else result
    return y.detach()


def compare(source: nn.Module, expected: Tensor, got: Tensor) -> float:
    """Return the largest difference relative to the largest value; raise an error if it is not a rounding error."""
    reason = f"expected shape {tuple(expected.shape)}, got {tuple(got.shape)}"
    if got.shape == expected.shape:
        largest, error = expected.abs().max().item(), (got - expected).abs().max().item()
        if error <= TOLERANCE * largest:  # False for NaN
            return error / largest if largest else 0.0
        reason = f"a difference of {error:.2g}, with a largest value of {largest:.2g}"
    raise ConversionError(f"the converted {type(source).__name__} has different outputs: {reason}. {REMEDY}")


def random_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Draw reproducible random weights; a square matrix approximately preserves the norm of vectors."""
    generator = torch.Generator("cpu").manual_seed(1)
    draws = [torch.randn(x.shape, generator=generator, dtype=torch.float64, device="cpu") for x in tensors]
    return [(draw * draw.numel() ** -0.25).to(x) for draw, x in zip(draws, tensors, strict=True)]


def random_map(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float64, device="cpu")

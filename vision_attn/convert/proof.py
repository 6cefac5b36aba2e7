"""What a converter asks of a source: that the block here has a counterpart of all its parts, and computes the same.

The first is refused by name. The second is proven: shapes cannot tell a wrong order of heads from a right one, and a
subclass may compute anything, so a copy of the source and what becomes of it are run on one random map. The source's
own weights may hide a difference (a projection that begins at zero gives zeros in any order), so the copy has others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter, call
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from vision_attn.blocks import Attention
from vision_attn.convert.refused import REFUSED
from vision_attn.errors import ConversionError

__all__ = [
    "TOLERANCE",
    "check_carried",
    "check_equal",
    "check_kind",
    "check_outputs",
    "check_parts",
    "check_pointwise",
    "check_source",
    "drop_of",
    "from_tokens",
    "is_a",
    "proven",
    "random_like",
    "random_twin",
    "run_tokens",
    "shapes_for",
    "to_tokens",
]

# --- what is refused by name ------------------------------------------------------------------------------------------

#: Where a module that only wraps another keeps it.
WRAPPED = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def check_kind(name: str, value: object, *paths: str) -> None:
    """Refuse what is none of these classes, going by their paths, so that no library is imported to be asked."""
    if not is_a(value, *paths):
        path = path_of(type(value))
        why = unwrap(name, value) or (f": {REFUSED[path]}" if path in REFUSED else "")
        raise ValueError(f"{name} must be a {' or '.join(paths)}; got {path}{why}")


def check_parts(value: object, what: str, *names: str) -> None:
    """Refuse what has not the parts of a layer that is known by them, since its class is in many repositories."""
    lacking = [name for name in names if not isinstance(getattr(value, name, None), nn.Module | Tensor)]
    if not isinstance(value, nn.Module) or lacking:
        raise ValueError(f"module must be {what}, with {', '.join(names)}; got {path_of(type(value))}")


def is_a(value: object, *paths: str) -> bool:
    return not {path_of(kind) for kind in type(value).__mro__}.isdisjoint(paths)


def check_source(module: nn.Module, *projections: str) -> None:
    """Refuse a module whose parameters do not say all that it computes, or with other projections than linear ones."""
    kind = type(module).__name__
    for name, part in module.named_modules():
        where = f"{kind}.{name}" if name else kind
        for hooks in HOOKS:
            if getattr(part, hooks):
                raise ValueError(
                    f"{where} has {hooks[1:].replace('_', ' ')}, which cannot be carried over: remove them, and "
                    "register them on what it is converted to"
                )
        if is_parametrized(part):
            raise ValueError(
                f"{where} has parametrizations, which cannot be carried over: call torch.nn.utils.parametrize."
                "remove_parametrizations(…, leave_parametrized=True) on it first"
            )
        if isinstance(part, (nn.Dropout, nn.MultiheadAttention)) and part.training != module.training:
            raise ValueError(
                f"the block has one mode; got {kind} with training={module.training} and {where} with "
                f"training={part.training}: call .train() or .eval() on all of it first"
            )
    for name in projections:
        check_pointwise(f"{kind}.{name}", attrgetter(name)(module))


def check_pointwise(name: str, layer: Any) -> None:
    """Refuse what is no linear layer and no convolution that looks at one position at a time."""
    convolution = isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    if not (convolution or isinstance(layer, nn.Linear)) or not layer.weight.is_floating_point():
        remedy = unwrap(name, layer) or ": merge adapters, and convert before quantizing"
        raise ValueError(f"{name} must be an nn.Linear or a 1×1 convolution; got {path_of(type(layer))}{remedy}")
    if not convolution:
        return
    for setting, only in {"kernel_size": 1, "stride": 1, "padding": 0, "groups": 1}.items():
        value = getattr(layer, setting)
        if value not in (only, (only,) * len(layer.kernel_size), "same", "valid"):
            raise ValueError(f"{name} must be a convolution with {setting} {only}; got {value}")


def check_carried(source: object, *table: tuple[str, bool, str]) -> None:
    """Refuse a source by an attribute that the block has no counterpart of: its name, whether it has, and a remedy."""
    for attribute, carried, remedy in table:
        if not carried:
            value = attrgetter(attribute)(source)
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{type(source).__name__}.{attribute} cannot be carried over: got {got}; {remedy}")


def drop_of(module: nn.Module, name: str) -> float:
    """The probability of one of a source's dropouts.

    >>> drop_of(nn.TransformerEncoderLayer(8, 2, dropout=0.25), "dropout1")
    0.25
    """
    part = attrgetter(name)(module)
    known = type(part) in (nn.Dropout, nn.Identity)
    check_carried(module, (name, known, "the block drops single elements: use an nn.Dropout or an nn.Identity"))
    return part.p if isinstance(part, nn.Dropout) else 0.0


def path_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def unwrap(name: str, value: object) -> str:
    wrapped = WRAPPED.get(type(value).__name__)
    return f": take {name}.{wrapped}, which it wraps" if wrapped else ""


# --- the proof --------------------------------------------------------------------------------------------------------

Source = TypeVar("Source", bound=nn.Module)
Block = TypeVar("Block", bound=nn.Module)

#: Maps to prove a conversion on, by their number of axes; no two of their sides are equal.
SIZES = {1: (6,), 2: (3, 4), 3: (2, 3, 4)}

#: Of the largest element. Another order of rows differs by all of it; arithmetic by 1e-15, and by 1e-7 where Keras's
#: fused kernel rounds to float32.
TOLERANCE = 1e-5

#: What is left to whoever has a source that cannot be proven.
REMEDY = "load its weights into a plain layer of its library, convert that, and do around the block what it did besides"


#: How a source takes a map, and another to attend to if it is of other channels: ``run(source, *maps)``.
RunSource = Callable[..., Tensor]


def proven(source: Source, convert: Callable[[Source], Block], run: RunSource = call) -> Block:
    """What ``convert`` makes of a source, after it was seen to be right on a copy of the source."""
    with torch.inference_mode(False), torch.enable_grad():
        twin = random_twin(source)
        check_equal(twin, convert(twin), run)
        return convert(source)


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


def check_equal(source: nn.Module, block: nn.Module, run: RunSource, tolerance: float = TOLERANCE) -> None:
    """Refuse a block that gives other numbers than its source for a random map, and another to attend to if need be."""
    generator = torch.Generator("cpu").manual_seed(0)
    device = next(block.parameters()).device
    maps = [torch.randn(1, *s, generator=generator, dtype=torch.float64, device="cpu") for s in shapes_for(block)]
    maps = [x.to(device) for x in maps]
    with torch.no_grad():
        with explained(source, "run as a layer of its class is"):
            expected: Any = run(source, *maps)
            if not isinstance(expected, Tensor):
                raise TypeError(f"it gives a {type(expected).__name__}, not a tensor")
        got = block.eval()(maps[0], None, *maps[1:])
    check_outputs(source, block, expected, got, tolerance)


def check_outputs(source: nn.Module, block: nn.Module, expected: Tensor, got: Tensor, tolerance: float) -> float:
    """The greatest difference of two outputs, relative to the largest number; refused where it is too large."""
    kind = type(source).__name__
    difference = f"shape {tuple(got.shape)}, not {tuple(expected.shape)}"
    if got.shape == expected.shape:
        largest, off = expected.abs().max().item(), (got - expected).abs().max().item()
        if off <= tolerance * largest:  # which a difference that is no number is not
            return off / largest if largest else 0.0
        difference = f"a difference of {off:.2g} where the largest is {largest:.2g}"
    raise ConversionError(
        f"the {type(block).__name__} made of this {kind} does not compute what it does: outputs have {difference}. Is "
        f"it a subclass with a forward of its own, or has a part of it been exchanged? Then {REMEDY}"
    )


def shapes_for(block: nn.Module) -> list[tuple[int, ...]]:
    """Of a map for a block, and of one to attend to if it is of other channels.

    The size is two by three windows, if it attends in windows, or what its tables are for.
    """
    attention = next(part for part in block.modules() if isinstance(part, Attention))
    cut, specification = attention.partitioner, getattr(attention.position, "specification", None)
    size = getattr(specification, "feat_size", None) or SIZES[attention.rank]
    if None not in cut.window_shape:
        window = cut.line.multiples if hasattr(cut, "line") else cut.window_shape
        steps = getattr(cut, "dilation", (1,) * len(window))
        size = tuple((side or 1) * by * count for side, by, count in zip(window, steps, (2, 3, 2), strict=False))
    channels = (attention.channels, attention.context_channels)
    return [(c, *size) for c in channels if c is not None]


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


def run_tokens(module: nn.Module, x: Tensor) -> Tensor:
    """What a layer of ``(b, tokens, c)`` makes of the positions of a map."""
    return from_tokens(module(to_tokens(x)), x.shape[2:])


def to_tokens(x: Tensor) -> Tensor:
    """The tokens of a map, ``(b, tokens, c)``."""
    return x.flatten(2).transpose(1, 2)


def from_tokens(y: Tensor, size: tuple[int, ...]) -> Tensor:
    """The map of tokens, ``(b, c, *size)``."""
    return y.transpose(1, 2).unflatten(2, size)

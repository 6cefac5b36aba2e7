"""What a converter is given is checked for what the block here could not do."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

__all__ = [
    "check_carried",
    "check_hooks",
    "check_kind",
    "check_mode",
    "check_parameters",
    "check_pointwise",
    "check_projections",
    "drop_of",
    "shown",
]

#: What does something else in training mode, of what is in a source.
DROPPING = (nn.Dropout, nn.MultiheadAttention)

#: Where a module that only wraps another keeps it.
WRAPPED = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}


def check_kind(name: str, value: object, expected: str, *paths: str) -> None:
    """Refuse what is no such class, going by names, so that its library is not imported to be asked."""
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(value).__mro__}
    if kinds.isdisjoint(paths or (expected,)):
        wrapped = WRAPPED.get(type(value).__name__)
        remedy = f": take {name}.{wrapped}, which it wraps" if wrapped else ""
        raise ValueError(f"{name} must be a {expected}; got {path_of(value)}{remedy}")


def check_parameters(module: nn.Module) -> None:
    """Refuse a module whose parameters do not say all that it computes, or hold nothing."""
    check_hooks(module)
    parts = [(f"{type(module).__name__}{'.' * bool(name)}{name}", part) for name, part in module.named_modules()]
    for where, part in parts:
        if is_parametrized(part):
            raise ValueError(
                f"{where} has parametrizations, which cannot be carried over: call torch.nn.utils.parametrize."
                "remove_parametrizations(…, leave_parametrized=True) on it first"
            )
    check_mode((where, part) for where, part in parts if part is module or isinstance(part, DROPPING))
    for name, parameter in module.named_parameters():
        if parameter.is_meta or not parameter.is_floating_point():
            raise ValueError(
                f"{type(module).__name__}.{name} must hold floating-point numbers to be carried over; got "
                f"{parameter.dtype} on {parameter.device}: load its weights first, or convert before quantizing"
            )


def check_hooks(module: nn.Module) -> None:
    """Refuse a module that does more than its forward says."""
    for name, part in module.named_modules():
        for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
            if getattr(part, kind):
                raise ValueError(
                    f"{type(module).__name__}{'.' * bool(name)}{name} has {kind[1:].replace('_', ' ')}, which cannot "
                    "be carried over: remove them, and register them on what it is converted to"
                )


def check_mode(parts: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse parts that are not all in one mode, which is the block's then."""
    first: dict[bool, str] = {}
    for name, part in parts:
        first.setdefault(part.training, name)
    if len(first) > 1:
        raise ValueError(
            f"the block has one mode; got {first[True]} in training mode and {first[False]} in evaluation mode: call "
            ".train() or .eval() on all of it first"
        )


def check_carried(source: object, attribute: str, value: object, carried: bool, remedy: str) -> None:
    """Refuse a source by the attribute that the block here has no counterpart of."""
    if not carried:
        raise ValueError(f"{type(source).__name__}.{attribute} cannot be carried over: got {shown(value)}; {remedy}")


def check_pointwise(name: str, layer: object) -> None:
    """Refuse what is no linear layer and no convolution that looks at one position at a time."""
    if isinstance(layer, nn.Linear):
        return
    if not isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        wrapped = WRAPPED.get(type(layer).__name__)
        remedy = (
            f"take {name}.{wrapped}, which it wraps" if wrapped else "merge adapters, and convert before quantizing"
        )
        raise ValueError(f"{name} must be an nn.Linear or a 1×1 convolution; got {path_of(layer)}: {remedy}")
    plain = {"kernel_size": {1}, "stride": {1}, "padding": {0}}
    for setting, only in plain.items():
        value = getattr(layer, setting)
        if value not in ("same", "valid") and set(value) != only:
            raise ValueError(f"{name} must be a convolution with {setting} {only.pop()}; got {value}")
    if layer.groups > 1:
        raise ValueError(f"{name} must be a convolution with groups 1; got {layer.groups}")


def check_projections(module: nn.Module, *names: str) -> None:
    """Refuse a source with projections that :func:`check_pointwise` does not pass."""
    for name in names:
        check_pointwise(f"{type(module).__name__}.{name}", attrgetter(name)(module))


def drop_of(module: nn.Module, name: str) -> float:
    """The probability of one of a source's dropouts.

    >>> drop_of(nn.TransformerEncoderLayer(8, 2, dropout=0.25), "dropout1")
    0.25
    """
    part = attrgetter(name)(module)
    known = type(part) in (nn.Dropout, nn.Identity)
    check_carried(module, name, part, known, "the block drops single elements: use an nn.Dropout or an nn.Identity")
    return part.p if isinstance(part, nn.Dropout) else 0.0


def path_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def shown(value: object) -> str:
    """A value as messages have it."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value)

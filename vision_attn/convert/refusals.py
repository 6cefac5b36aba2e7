"""What a converter is given is checked for what the block here could not do."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["check_carried", "check_kind", "check_parameters", "check_pointwise"]


def check_kind(name: str, value: object, expected: str, *paths: str) -> None:
    """Refuse what is no such class, going by names, so that its library is not imported to be asked.

    Args:
        name: of the argument.
        value: what was given.
        expected: the class, as its users write it.
        *paths: where it is defined, if elsewhere; any of them will do.

    Raises:
        ValueError: it is none of them, nor a subclass of one.
    """
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(value).__mro__}
    if kinds.isdisjoint(paths or (expected,)):
        raise ValueError(f"{name} must be a {expected}; got {type(value).__module__}.{type(value).__qualname__}")


def check_parameters(module: nn.Module) -> None:
    """Refuse a module whose parameters do not say all that it computes, or hold nothing.

    Args:
        module: the source.

    Raises:
        ValueError: it has hooks, or parameters on the meta device or of whole numbers.
    """
    for name, part in module.named_modules():
        where = f"{type(module).__name__}{'.' * bool(name)}{name}"
        for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
            if getattr(part, kind):
                raise ValueError(
                    f"{where} has {kind[1:].replace('_', ' ')}, which cannot be carried over: remove them, and "
                    "register them on what it is converted to"
                )
    for name, parameter in module.named_parameters():
        if parameter.is_meta or not parameter.is_floating_point():
            raise ValueError(
                f"{type(module).__name__}.{name} must hold floating-point numbers to be carried over; got "
                f"{parameter.dtype} on {parameter.device}: load its weights first, or convert before quantizing"
            )


def check_carried(source: object, attribute: str, value: object, carried: bool, remedy: str) -> None:
    """Refuse a source by the attribute that the block here has no counterpart of.

    Args:
        source: the layer.
        attribute: its name, from the layer.
        value: what it is.
        carried: whether the block can do the same.
        remedy: what to do if not.

    Raises:
        ValueError: it cannot.
    """
    if not carried:
        raise ValueError(f"{type(source).__name__}.{attribute} cannot be carried over: got {shown(value)}; {remedy}")


def check_pointwise(name: str, layer: object) -> None:
    """Refuse what is no linear layer and no convolution that looks at one position at a time.

    Args:
        name: of the argument.
        layer: what was given.

    Raises:
        ValueError: it is another layer, or has a kernel, stride, padding or groups.
    """
    if isinstance(layer, nn.Linear):
        return
    if not isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        raise ValueError(f"{name} must be an nn.Linear or a 1×1 convolution; got {type(layer).__name__}")
    plain = {"kernel_size": {1}, "stride": {1}, "padding": {0}}
    for setting, only in plain.items():
        value = getattr(layer, setting)
        if value not in ("same", "valid") and set(value) != only:
            raise ValueError(f"{name} must be a convolution with {setting} {only.pop()}; got {value}")
    if layer.groups > 1:
        raise ValueError(f"{name} must be a convolution with groups 1; got {layer.groups}")


def shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value)

"""What a block has no counterpart of is refused by name, with what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

__all__ = [
    "HOOKS",
    "REFUSED",
    "check_carried",
    "check_kind",
    "check_parts",
    "check_pointwise",
    "check_source",
    "check_without",
    "drop_of",
    "part_of",
    "path_of",
]

ROTATED = "queries and keys are rotated by an argument of its call, or all but one token's, which a block does not do"
NORMED = "its projections end in batch norms, of which a block has none"
CHANNELS = "it attends between channels, not between positions"

#: Attention of other libraries that no block stands for, and why, by the path of its class.
REFUSED = {
    "timm.layers.attention.AttentionRope": ROTATED,
    "timm.layers.attention_pool2d.RotAttentionPool2d": ROTATED,
    "timm.models.eva.EvaAttention": ROTATED,
    "timm.models.levit.Attention": NORMED,
    "timm.models.levit.AttentionDownsample": NORMED,
    "timm.models.efficientformer_v2.Attention2d": "it mixes the heads of its logits and of its weights (talking heads)",
    "timm.models.efficientformer_v2.Attention2dDownsample": "its projections are batch norms and convolutions as well",
    "timm.models.edgenext.CrossCovarianceAttn": CHANNELS,
    "timm.models.xcit.XCA": CHANNELS,
}

#: Where a module that only wraps another keeps it.
WRAPPED = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

#: How a part or setting prints that does nothing.
NOTHING = ("None", "False", "0", "1", "1.0", "(1, 1)", "Identity()")


def path_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def part_of(module: Any, path: str) -> Any:
    """The part or setting of a module at a path with dots; None if it has none."""
    return reduce(lambda part, name: getattr(part, name, None), path.split("."), module)


def check_kind(name: str, value: object, *paths: str) -> None:
    """Refuse what is none of these classes, going by their paths, so that no library is imported to be asked."""
    if {path_of(kind) for kind in type(value).__mro__}.isdisjoint(paths):
        path = path_of(type(value))
        why = unwrap(name, value) or (f": {REFUSED[path]}" if path in REFUSED else "")
        raise ValueError(f"{name} must be a {' or '.join(paths)}; got {path}{why}")


def check_parts(value: object, what: str, *names: str) -> None:
    """Refuse what has not the parts of a layer that is known by them, since its class is in many repositories."""
    lacking = [name for name in names if not isinstance(getattr(value, name, None), nn.Module | Tensor)]
    if not isinstance(value, nn.Module) or lacking:
        raise ValueError(f"module must be {what}, with {', '.join(names)}; got {path_of(type(value))}")


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
        if (layer := part_of(module, name)) is not None:
            check_pointwise(f"{kind}.{name}", layer)


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


def check_without(module: object, remedies: Mapping[str, str]) -> None:
    """Refuse a module with one of these parts or settings, unless that does nothing."""
    for path, remedy in remedies.items():
        check_carried(module, path, repr(part_of(module, path)) in NOTHING, remedy)


def check_carried(module: object, path: str, carried: bool, remedy: str) -> None:
    if not carried:
        value = part_of(module, path)
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{type(module).__name__}.{path} cannot be carried over: got {got}; {remedy}")


def drop_of(module: Any, path: str) -> float:
    """The probability of one of a source's dropouts, 0 if it has none there.

    >>> drop_of(nn.TransformerEncoderLayer(8, 2, dropout=0.25), "dropout1")
    0.25
    """
    part = part_of(module, path)
    number = isinstance(part, (int, float))
    known = number or part is None or type(part) in (nn.Dropout, nn.Identity)
    check_carried(module, path, known, "the block drops single elements: use an nn.Dropout or an nn.Identity")
    return part if number else getattr(part, "p", 0.0)


def unwrap(name: str, value: object) -> str:
    wrapped = WRAPPED.get(type(value).__name__)
    return f": take {name}.{wrapped}, which it wraps" if wrapped else ""

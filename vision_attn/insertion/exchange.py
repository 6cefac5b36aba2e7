"""One module in the place of another, which is kept."""

from __future__ import annotations

from torch import nn

__all__ = ["REPLACED", "put_back", "put_in_place"]

#: The attribute in which a module keeps the one that it replaces; it is no child, so that its keys are gone.
REPLACED = "replaced"


def put_in_place(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module wherever in the model another one is."""
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is old:
                module._modules[name] = new
    vars(new)[REPLACED] = old


def put_back(model: nn.Module, new: nn.Module) -> None:
    """Undo :func:`put_in_place`; what comes back is where, and of the type that, the model is now."""
    old: nn.Module = vars(new).pop(REPLACED)
    parameter = next(new.parameters(), None)
    before = next(old.parameters(), None)
    if (
        parameter is not None
        and before is not None
        and (before.device, before.dtype) != (parameter.device, parameter.dtype)
    ):
        old.to(device=parameter.device, dtype=parameter.dtype)
    if old.training != new.training:
        old.train(new.training)
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is new:
                module._modules[name] = old

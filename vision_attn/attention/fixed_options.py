"""Options that cannot change after a module was built."""

from collections.abc import Collection
from typing import Any, ClassVar

from torch import Tensor, nn


class FixedOptions(nn.Module):
    """A module with options that cannot change after it was built, because an assignment would have no effect."""

    #: The names of these options. A child module may be replaced by one with an equal ``config``.
    fixed: ClassVar[Collection[str]] = ()
    #: The names of options that may change.
    live: ClassVar[Collection[str]] = ()

    def __setattr__(self, name: str, value: Any) -> None:
        what, layer = f"{name} of {type(self).__name__}", getattr(self, "attn", None)
        if name in self.fixed and hasattr(self, name):
            old, remedy = getattr(self, name), "Build another one, and load its weights"
            if getattr(value, "config", value) != getattr(old, "config", old):
                why = f"cannot change after it was built, got {value!r} in place of {old!r}"
                raise AttributeError(f"{what} {why}. {remedy}")
        elif name in self.live and isinstance(value, Tensor):
            raise AttributeError(f"{what} must not be a tensor, got shape {tuple(value.shape)}. Pass a plain value")
        elif isinstance(layer, FixedOptions) and name in {*layer.fixed, *layer.live} and not hasattr(self, name):
            remedy = "Assign to the attribute of .attn" if name in layer.live else "Build another block"
            raise AttributeError(f"{what} is an option of its attention layer. {remedy}")
        super().__setattr__(name, value)

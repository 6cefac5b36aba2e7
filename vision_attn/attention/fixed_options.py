"""Options that cannot change after a module was built."""

from collections.abc import Collection
from typing import Any, ClassVar

from torch import nn


class FixedOptions(nn.Module):
    """A module with options that cannot change after it was built, because an assignment would have no effect."""

    #: The names of these options. A child module may be replaced by one with an equal ``config``.
    fixed: ClassVar[Collection[str]] = ()
    #: The names of options that may change.
    live: ClassVar[Collection[str]] = ()
    #: The names of arguments that are not attributes.
    arguments: ClassVar[Collection[str]] = ()

    def __setattr__(self, name: str, value: Any) -> None:
        what, layer = f"{name} of {type(self).__name__}", getattr(self, "attn", None)
        if name in self.arguments or (name in self.fixed and hasattr(self, name)):
            old = getattr(self, name, None)
            if name in self.arguments or getattr(value, "config", value) != getattr(old, "config", old):
                instead = "" if name in self.arguments else f" in place of {old!r}"
                remedy = "Build another one, and load its weights"
                raise AttributeError(f"{what} cannot change after it was built, got {value!r}{instead}. {remedy}")
        elif isinstance(layer, FixedOptions) and name in {*layer.fixed, *layer.live} and not hasattr(self, name):
            raise AttributeError(f"{what} is an option of its attention layer. Assign to the attribute of .attn")
        super().__setattr__(name, value)

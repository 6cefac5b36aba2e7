"""Options that cannot change after a module was built."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

from torch import nn


class FixedOptions(nn.Module):
    """A module with options that cannot change after it was built, because an assignment would have no effect."""

    #: The names of these options. A child module may be replaced by one with an equal ``config``.
    fixed: ClassVar[Collection[str]] = ()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.fixed and hasattr(self, name):
            old = getattr(self, name)
            if getattr(value, "config", value) != getattr(old, "config", old):
                what = f"{name} of {type(self).__name__} cannot change after it was built"
                raise AttributeError(
                    f"{what}, got {value!r} in place of {old!r}. Build another one, and load its weights"
                )
        super().__setattr__(name, value)

"""The configuration of a block, stored with its state dict, and its implementation."""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from vision_attn.attention.fixed_options import FixedOptions
from vision_attn.attention.implementations import IMPLEMENTATIONS
from vision_attn.attention.scopes import scoped_values
from vision_attn.checks import check_choice

#: The entry of a block in the metadata of a state dict, next to torch's own ``version``.
CONFIG_KEY = "block"


class Configurable(FixedOptions):
    """A block whose state dict contains its configuration.

    The configuration is part of the state dict's metadata, where torch stores the version of each module and which
    ``torch.save`` writes. The keys of the state dict do not change, and other code ignores the additional entry.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_state_dict_post_hook(store_config)

    def get_config(self) -> dict[str, object]:
        """Return the arguments that affect the output and cannot be derived from the shapes of the weights."""
        return {name: getattr(self, name) for name in self.fixed}


def store_config(module: Any, state: Mapping[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    """Store the configuration of a block in the metadata of its state dict."""
    metadata[CONFIG_KEY] = {name: repr(value) for name, value in module.get_config().items()}


class ConfigurableImpl(Configurable):
    """A block with a choice of implementation."""

    #: The implementations that the block supports.
    impls: ClassVar[Collection[str]] = IMPLEMENTATIONS
    _impl: str

    @property
    def impl(self) -> str:
        """The current implementation, selected by the innermost ``with`` :func:`use_impl` or by :func:`set_impl_`."""
        return [self._impl, *scoped_values(self, "impl")[0]][-1]

    @impl.setter
    def impl(self, impl: str) -> None:
        self.check_impl(impl)
        self._impl = impl

    def check_impl(self, impl: str) -> None:
        """Raise if the block does not support an implementation."""
        check_choice("impl", impl, self.impls)

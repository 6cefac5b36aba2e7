"""The configuration of a block, stored with its state dict, and the choice of an implementation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from vision_attn.attention.fixed_options import FixedOptions
from vision_attn.attention.implementations import IMPLEMENTATIONS
from vision_attn.attention.scopes import scope, scoped_values
from vision_attn.checks import check_choice

#: The entry of a block in the metadata of a state dict, next to torch's own ``version``.
CONFIG_KEY = "block"


class Configurable(FixedOptions):
    """A block whose state dict contains its configuration.

    The configuration is part of the state dict's metadata, where torch stores the version of each module and which
    ``torch.save`` writes. The keys of the state dict do not change, and other code ignores the additional entry.
    """

    def get_config(self) -> dict[str, object]:
        """Return the arguments that affect the output and cannot be derived from the shapes of the weights."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if metadata is not None:
            metadata[CONFIG_KEY] = {name: repr(value) for name, value in self.get_config().items()}


class ConfigurableImpl(Configurable):
    """A block with a choice of implementation."""

    _impl: str

    @property
    def impl(self) -> str:
        """The current implementation, selected by the innermost :func:`use_impl` context or by :func:`set_impl_`."""
        return [self._impl, *scoped_values(self, "impl")[0]][-1]

    @impl.setter
    def impl(self, impl: str) -> None:
        self._impl = impl

    def check_impl(self, impl: str) -> None:
        """Raise if the block does not support an implementation."""
        check_choice("impl", impl, IMPLEMENTATIONS)


def blocks_with_impl(model: nn.Module) -> dict[str, Any]:
    """Return all blocks of a model with a choice of implementation, by path.

    The attribute ``running_block`` of a module is the block that it runs, if that block is not its child.
    """
    blocks = {name: getattr(module, "running_block", module) for name, module in model.named_modules()}
    return {name: block for name, block in blocks.items() if isinstance(block, ConfigurableImpl)}


def blocks_for_impl(model: nn.Module, impl: str) -> Iterable[Any]:
    """Return the blocks of a model; raise if one of them does not support an implementation."""
    blocks = blocks_with_impl(model)
    for path, block in blocks.items():
        try:
            block.check_impl(impl)
        except ValueError as error:
            raise ValueError(f"{error} (in {path or 'the model'}: {type(block).__name__})") from None
    return blocks.values()


def set_impl_(model: nn.Module, impl: str) -> int:
    """Set the implementation of every attention block in a model; the weights stay the same.

    Inside a :func:`use_impl` context, whose choice takes precedence, the new setting applies after the context ends.

    Args:
        model: any module.
        impl: one of :data:`vision_attn.IMPLS`, ``"auto"``, or a name registered with :func:`register_impl`.

    Returns:
        The number of modules whose implementation changed.

    Raises:
        ValueError: ``impl`` is unknown, or a block does not support it; no block is changed in this case.

    >>> from vision_attn.attention.blocks import Attention2d
    >>> set_impl_(nn.Sequential(Attention2d(8, 2), Attention2d(8, 2, impl="bmm")), "bmm")
    1
    """
    changed = [block for block in blocks_for_impl(model, impl) if block._impl != impl]
    for block in changed:
        block.impl = impl
    return len(changed)


@contextmanager
def use_impl(model: nn.Module, impl: str) -> Iterator[nn.Module]:
    """Run another implementation inside a ``with`` block, in the current thread or task only.

    The model is not modified: other threads, including threads started inside the ``with`` block, and copies of the
    model keep their implementation. A compiled model runs eagerly inside the block.

    Args:
        model: any module.
        impl: as in :func:`set_impl_`.

    Yields:
        The model.

    Raises:
        ValueError: as in :func:`set_impl_`.

    >>> import torch
    >>> from vision_attn.attention.blocks import Attention2d
    >>> block = Attention2d(8, 2)
    >>> with use_impl(block, "einx"):
    ...     block(torch.randn(1, 8, 3, 4)).shape
    torch.Size([1, 8, 3, 4])
    >>> block.impl
    'auto'
    """
    with scope(model, "impl", dict.fromkeys(blocks_for_impl(model, impl), impl)):
        yield model

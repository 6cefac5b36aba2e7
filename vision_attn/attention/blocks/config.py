"""The configuration of a block, stored with its state dict, and the choice of an implementation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from vision_attn.attention.implementations import check_impl
from vision_attn.checks import check_type

#: The entry of a block in the metadata of a state dict, next to torch's own ``version``.
CONFIG_KEY = "block"


class Configurable(nn.Module):
    """A block whose state dict contains its configuration.

    It is in the metadata in which torch keeps the version of every module, and which ``torch.save`` writes. The keys
    stay the same, and code that does not know of it is not affected.
    """

    def get_config(self) -> dict[str, object]:
        """Return the arguments that change the result and do not follow from the shapes of the weights."""
        raise NotImplementedError

    def check_impl(self, impl: str) -> None:
        """Raise for an implementation that the block cannot run."""
        check_impl(impl)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if metadata is not None:
            metadata[CONFIG_KEY] = {name: repr(value) for name, value in self.get_config().items()}


def blocks_with_impl(model: nn.Module) -> dict[str, Any]:
    """Return every block of a model that has a choice of implementation, by its path.

    A module that runs a block in its own place, which is not a child of it, has it as ``running_block``.
    """
    check_type("model", model, nn.Module, "a network, an nn.Module")
    blocks = {name: getattr(module, "running_block", module) for name, module in model.named_modules()}
    return {name: block for name, block in blocks.items() if isinstance(block, Configurable) and hasattr(block, "impl")}


def set_impl_(model: nn.Module, impl: str) -> int:
    """Set the implementation of every attention block in a model; the weights stay the same.

    Args:
        model: any module.
        impl: one of :data:`vision_attn.IMPLS`, ``"auto"``, or one that was registered.

    Returns:
        The number of modules whose implementation changed.

    Raises:
        ValueError: unknown ``impl``, or one that a block cannot run; then no block is changed.

    >>> from vision_attn.attention.blocks import Attention2d
    >>> set_impl_(nn.Sequential(Attention2d(8, 2), Attention2d(8, 2, impl="bmm")), "bmm")
    1
    """
    blocks = blocks_with_impl(model)
    for path, block in blocks.items():
        try:
            block.check_impl(impl)
        except ValueError as error:
            raise ValueError(f"{error} (in {path or 'the model'}: {type(block).__name__})") from None
    if not blocks:
        check_impl(impl)
    changed = [block for block in blocks.values() if block.impl != impl]
    for block in changed:
        block.impl = impl
    return len(changed)


@contextmanager
def use_impl(model: nn.Module, impl: str) -> Iterator[nn.Module]:
    """Run another implementation inside a ``with`` block; afterwards every module has its own again.

    Args:
        model: any module.
        impl: as in :func:`set_impl_`.

    Yields:
        The model.

    Raises:
        ValueError: as :func:`set_impl_`.

    >>> import torch
    >>> from vision_attn.attention.blocks import Attention2d
    >>> block = Attention2d(8, 2)
    >>> with use_impl(block, "einx"):
    ...     block(torch.randn(1, 8, 3, 4)).shape
    torch.Size([1, 8, 3, 4])
    >>> block.impl
    'auto'
    """
    before = [(block, block.impl) for block in blocks_with_impl(model).values()]
    set_impl_(model, impl)
    try:
        yield model
    finally:
        for block, name in before:
            block.impl = name

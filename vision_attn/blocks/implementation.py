"""Which implementation the attention of a model runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from vision_attn.attend import check_impl
from vision_attn.blocks.attention import Attention2d

__all__ = ["attention_modules", "set_impl", "use_impl"]


def set_impl(model: nn.Module, impl: str) -> int:
    """Let every :class:`Attention2d` in a model run another implementation; the weights stay as they are.

    Args:
        model: any module.
        impl: one of :data:`vision_attn.IMPLS`.

    Returns:
        How many modules run another implementation than before.

    Raises:
        ValueError: unknown ``impl``.

    >>> set_impl(nn.Sequential(Attention2d(8, 2), Attention2d(8, 2, impl="bmm")), "bmm")
    1
    """
    check_impl(impl)
    changed = [block for block in attention_modules(model).values() if block.impl != impl]
    for block in changed:
        block.impl = impl
    return len(changed)


@contextmanager
def use_impl(model: nn.Module, impl: str) -> Iterator[nn.Module]:
    """Run another implementation inside a ``with`` block; afterwards every module runs its own again.

    >>> import torch
    >>> block = Attention2d(8, 2)
    >>> with use_impl(block, "einx"):
    ...     block(torch.randn(1, 8, 3, 4)).shape
    torch.Size([1, 8, 3, 4])
    >>> block.impl
    'sdpa'
    """
    before = {block: block.impl for block in attention_modules(model).values()}
    set_impl(model, impl)
    try:
        yield model
    finally:
        for block, name in before.items():
            block.impl = name


def attention_modules(model: nn.Module) -> dict[str, Attention2d]:
    """Every :class:`Attention2d` of a model by its path.

    >>> list(attention_modules(nn.ModuleDict({"a": Attention2d(8), "b": nn.ReLU()})))
    ['a']
    """
    return {name: module for name, module in model.named_modules() if isinstance(module, Attention2d)}

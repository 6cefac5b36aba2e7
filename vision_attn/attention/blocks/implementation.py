"""Which implementation the attention of a model runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from vision_attn.attention.attend import check_impl
from vision_attn.attention.blocks.attention import Attention
from vision_attn.attention.blocks.linear import LinearAttention2d
from vision_attn.checks import check_type

__all__ = ["EXCHANGED", "attention_modules", "set_impl_", "use_impl"]

#: The attribute in which an attention module of another library, which a block stands for, keeps that: ``.block``, what
#: it ``.sees``, and how that is ``.placed`` on the map. The block is no child of it.
EXCHANGED = "exchanged"


def set_impl_(model: nn.Module, impl: str) -> int:
    """Let every attention block in a model run another implementation; the weights stay as they are.

    Args:
        model: any module.
        impl: one of :data:`vision_attn.IMPLS`, or one that was registered.

    Returns:
        How many modules run another implementation than before.

    Raises:
        ValueError: unknown ``impl``, or one that a block cannot run; then no block is changed.

    >>> from vision_attn.attention.blocks import Attention2d
    >>> set_impl_(nn.Sequential(Attention2d(8, 2), Attention2d(8, 2, impl="bmm")), "bmm")
    1
    """
    blocks = with_impl(model)
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
    """Run another implementation inside a ``with`` block; afterwards every module runs its own again.

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
    'sdpa'
    """
    before = {block: block.impl for block in with_impl(model).values()}
    set_impl_(model, impl)
    try:
        yield model
    finally:
        for block, name in before.items():
            block.impl = name


def with_impl(model: nn.Module) -> dict[str, Attention | LinearAttention2d]:
    """Every block of a model that has a choice of implementation, by its path."""
    check_type("model", model, nn.Module, "a network, an nn.Module")
    blocks = {
        name: module if kept is None else kept.block
        for name, module in model.named_modules()
        for kept in [vars(module).get(EXCHANGED)]
    }
    return {name: block for name, block in blocks.items() if isinstance(block, Attention | LinearAttention2d)}


def attention_modules(model: nn.Module) -> dict[str, Attention]:
    """Every :class:`Attention1d`, :class:`Attention2d` and :class:`Attention3d` of a model, by its path.

    >>> from vision_attn.attention.blocks import Attention2d
    >>> list(attention_modules(nn.ModuleDict({"a": Attention2d(8), "b": nn.ReLU()})))
    ['a']
    """
    return {name: block for name, block in with_impl(model).items() if isinstance(block, Attention)}

"""The choice of an implementation for the blocks of a network, and the attention that it does not reach."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import nn

from vision_attn.attention.blocks import Attention
from vision_attn.attention.blocks.config import ConfigurableImpl
from vision_attn.attention.implementations import IMPLEMENTATIONS
from vision_attn.attention.scopes import scope
from vision_attn.checks import check_choice
from vision_attn.text import shorten


def blocks_with_impl(model: nn.Module) -> dict[str, Any]:
    """Return all blocks of a model with a choice of implementation, by path.

    The attribute ``running_block`` of a module is the block that it runs, if that block is not its child. It is an
    attribute of the class: wrappers, such as that of ``torch.compile``, have the attributes of the module inside.
    """
    modules = dict(model.named_modules())
    blocks = {path: x.running_block if hasattr(type(x), "running_block") else x for path, x in modules.items()}
    return {path: block for path, block in blocks.items() if isinstance(block, ConfigurableImpl)}


def blocks_for_impl(model: nn.Module, impl: str) -> Iterable[Any]:
    """Return the blocks of a model; raise if one of them does not support an implementation."""
    check_choice("impl", impl, IMPLEMENTATIONS)
    blocks = blocks_with_impl(model)
    for path, block in blocks.items():
        try:
            block.check_impl(impl)
        except ValueError as error:
            raise ValueError(f"{error} (in {path or 'the model'}: {type(block).__name__})") from None
    return blocks.values()


def is_attention(module: nn.Module) -> bool:
    """Return True for a module of another library with parameters and with names that are typical of attention."""
    kind = type(module)
    projections = ("qkv", "qkvs", "qk", "to_qkv", "q_proj", "query", "query_conv", "theta")
    similar = any(word in kind.__name__.lower().replace("_", "") for word in ("attention", "attn", "nonlocal"))
    parts = chain(module.named_children(), module.named_parameters(recurse=False))  # not those inside a wrapper
    similar = similar or any(name in projections for name, _ in parts)
    return similar and not kind.__module__.startswith("vision_attn.") and any(True for _ in module.parameters())


def warn_unreached(model: nn.Module, impl: str, level: int) -> None:
    """Warn about attention that an implementation does not reach; ``level`` is the number of frames to the caller.

    The attribute ``bypass_reason`` of a module is the reason why it does not run its ``running_block``.
    """
    modules = {path or "the model": module for path, module in model.named_modules()}
    reasons = {path: x.bypass_reason for path, x in modules.items() if hasattr(type(x), "bypass_reason")}
    lines = [f"{path}, which runs its original code, because {reason}" for path, reason in reasons.items() if reason]
    others = [path for path, module in modules.items() if is_attention(module)]
    if others and not blocks_with_impl(model):
        lines = [f"attention of another library ({shorten(others)}). Call va.swap_(model) first"]
    if lines:
        warnings.warn(f"impl={impl!r} has no effect on {shorten(lines, 3)}", stacklevel=level)


def set_impl_(model: nn.Module, impl: str) -> int:
    """Set the implementation of every attention block in a model; the weights stay the same.

    Inside a ``with`` block of :func:`use_impl`, whose choice takes precedence, the setting applies after its end.
    Attention of another library is reached after :func:`vision_attn.swap_`, except in calls that run its original code:
    ``maps.reasons`` of :func:`vision_attn.capture` lists them. A warning names swapped modules that were changed since,
    and all attention of a model without blocks.

    Args:
        model: any module.
        impl: one of ``va.implementations.IMPLS``, ``"auto"``, or a name registered with :func:`register_impl`.

    Returns:
        The number of modules whose implementation changed.

    Raises:
        ValueError: ``impl`` is unknown, or a block does not support it; no block is changed in this case.

    >>> from vision_attn.attention.blocks import Attention2d
    >>> set_impl_(nn.Sequential(Attention2d(8, 2), Attention2d(8, 2, impl="bmm")), "bmm")
    1
    """
    changed = [block for block in blocks_for_impl(model, impl) if block._impl != impl]
    warn_unreached(model, impl, level=3)
    for block in changed:
        block.impl = impl
    return len(changed)


@contextmanager
def use_impl(model: nn.Module, impl: str) -> Iterator[nn.Module]:
    """Run another implementation inside a ``with`` block, in the current thread or task only.

    The model is not modified: other threads, including threads started inside the ``with`` block, and copies of the
    model keep their implementation. A compiled model runs eagerly inside the block. A warning names attention that is
    not reached, as in :func:`set_impl_`.

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
    warn_unreached(model, impl, level=4)
    with scope(model, "impl", dict.fromkeys(blocks_for_impl(model, impl), impl)):
        yield model


def attention_modules(model: nn.Module) -> dict[str, Attention]:
    """Return all :class:`Attention1d`, :class:`Attention2d` and :class:`Attention3d` modules of a model by path.

    >>> from vision_attn.attention.blocks import Attention2d
    >>> list(attention_modules(nn.ModuleDict({"a": Attention2d(8), "b": nn.ReLU()})))
    ['a']
    """
    return {name: block for name, block in blocks_with_impl(model).items() if isinstance(block, Attention)}

"""What :func:`vision_attn.swap_` has to know of the attention modules of one class, and forwards that many share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vision_attn.blocks import Attention

__all__ = ["OWN", "Family", "lent_maps", "lent_tokens", "random_map", "refusal"]

#: What the forward of a family gives for a call that is the module's own to serve.
OWN: Any = object()


@dataclass(frozen=True)
class Family:
    """The attention modules of one class."""

    #: refuses what the block does not do
    check: Callable[[Any], None]
    #: the block for one of them
    block: Callable[[Any], Attention]
    #: the block's parameters, made of those of the module
    weights: Callable[[Any], dict[str, Tensor]]
    #: ``(module, attend, *args)`` to what the module gives, or :data:`OWN`
    forward: Callable[..., Any]
    #: arguments to try one with
    example: Callable[[Any], tuple[Any, ...]]
    #: attributes that the block was made by
    settings: tuple[str, ...]
    #: calls that are served by the module itself
    own: str = ""


def refusal(reason: str) -> Family:
    """The family of modules that no block stands for."""

    def refuse(module: Any) -> Any:
        raise ValueError(reason)

    return Family(refuse, refuse, refuse, refuse, refuse, ())


def random_map(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def lent_tokens(mask: Callable[..., Any] = lambda module, x: None) -> Callable[..., Any]:
    """The forward of a module on ``(b, tokens, c)``, which adds ``mask(module, x, *args)`` to its logits."""

    def forward(module: Any, attend: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        added = mask(module, x, *args, **kwargs)
        return OWN if added is OWN or x.dim() != 3 else attend(x.transpose(1, 2), added).transpose(1, 2)

    return forward


def lent_maps(module: Any, attend: Callable[..., Tensor], x: Tensor, attn_mask: Tensor | None = None) -> Any:
    """The forward of a module on maps."""
    return OWN if attn_mask is not None else attend(x)

"""What the implementations share: masks, rows that see nothing, and the precision of logits."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = [
    "apply_mask",
    "at_least_float32",
    "check_mask",
    "for_every_head",
    "in_range_of",
    "masks_together",
    "without_autocast",
    "without_later_keys",
    "zero_unreachable",
]


def at_least_float32(x: Tensor) -> Tensor:
    """A tensor in float32 at least: half precision holds neither large logits nor small differences between them.

    Args:
        x: a tensor.

    Returns:
        ``x`` itself, or as float32 where it is float16 or bfloat16.
    """
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def apply_mask(logits: Tensor, mask: Tensor | None, causal: bool = False) -> tuple[Tensor, Tensor | None]:
    """The masked logits, finite in every row, and which queries ``(…, i, 1)`` have a key to attend to (None: all).

    Args:
        logits: ``(b, n, i, j)``.
        mask: bool (True = may attend) or additive float, broadcastable to the logits, or None.
        causal: whether later keys are masked too.
    """
    if causal:
        mask = without_later_keys(mask, logits.shape[2], logits.shape[3], logits.device)
    if mask is None:
        return logits, None
    logits = torch.where(mask, logits, -torch.inf) if mask.dtype == torch.bool else logits + mask
    # Compared with -inf rather than tested for finiteness, so that a NaN stays a NaN and is seen.
    reachable = (logits != -torch.inf).any(dim=-1, keepdim=True)
    return logits.masked_fill(~reachable, 0.0), reachable


def masks_together(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """One mask that does what both do; each is bool or additive.

    Args:
        first: a mask, or None.
        second: another that broadcasts with it, or None.

    Returns:
        A mask of the shape that both broadcast to: bool if both are, else additive; None if both are None.

    >>> masks_together(torch.tensor([True, True, False]), torch.tensor([0.5, 0.0, 0.5]))
    tensor([0.5000, 0.0000,   -inf])
    """
    if first is None or second is None:
        return second if first is None else first
    if first.dtype == second.dtype == torch.bool:
        return first & second
    if first.dtype == torch.bool or second.dtype == torch.bool:
        allowed, added = (first, second) if first.dtype == torch.bool else (second, first)
        return torch.where(allowed, added, -torch.inf)
    return at_least_float32(first) + second  # in half precision two finite values may make an infinite one


def without_later_keys(mask: Tensor | None, queries: int, keys: int, device: torch.device) -> Tensor:
    """A mask that also hides the keys that are later than the query, ``(…, i, j)``.

    Args:
        mask: bool (True = may attend) or additive float, broadcastable to ``(…, i, j)``, or None.
        queries: how many there are, ``i``.
        keys: how many there are, ``j``.
        device: where the mask is to be.

    >>> without_later_keys(None, 2, 3, torch.device("cpu"))
    tensor([[ True, False, False],
            [ True,  True, False]])
    """
    allowed = torch.arange(keys, device=device) <= torch.arange(queries, device=device)[:, None]
    both = masks_together(mask, allowed)
    return allowed if both is None else both


def zero_unreachable(weights: Tensor, reachable: Tensor | None) -> Tensor:
    """The weights ``(…, i, j)`` with zeros for every query that may attend to nothing.

    Args:
        weights: of finite logits, ``(…, i, j)``.
        reachable: which queries have a key to attend to, ``(…, i, 1)``; None: all.
    """
    return weights if reachable is None else weights.masked_fill(~reachable, 0.0)


def for_every_head(q: Tensor, k: Tensor) -> Tensor:
    """The keys or values ``(b, m, j, d)`` repeated for the heads that share them, ``(b, n, j, d)``.

    Args:
        q: queries, ``(b, n, i, d)``.
        k: keys or values, ``(b, m, j, d)``.

    Raises:
        ValueError: ``n`` is no multiple of ``m``.
    """
    n, m = q.shape[1], k.shape[1]
    if n == m:
        return k
    if n % m:
        raise ValueError(f"q must have a multiple of the heads of k and v; got {n} and {m}")
    return k.unsqueeze(2).expand(-1, -1, n // m, -1, -1).flatten(1, 2)


def in_range_of(dtype: torch.dtype, mask: Tensor) -> Tensor:
    """An additive mask in another type, in which a large finite value stays finite: it is no ``-inf``.

    Args:
        dtype: the type, of floating point.
        mask: an additive mask.

    Returns:
        The mask in that type.
    """
    limits = torch.finfo(dtype)
    if limits.max >= torch.finfo(mask.dtype).max:
        return mask.to(dtype)
    return torch.where(mask.isinf(), mask, mask.clamp(limits.min, limits.max)).to(dtype)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context without autocast, which would take the logits back to half precision.

    Args:
        x: a tensor on the device in question.
    """
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):  # there is no autocast of tensors without values
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def check_mask(mask: Tensor | None, shape: tuple[int, int, int, int]) -> None:
    """Refuse what is no mask for these logits.

    Args:
        mask: what a caller gave.
        shape: batch, heads, query tokens and key tokens.

    Raises:
        ValueError: it is no tensor, neither bool nor floating point, or does not broadcast to ``shape``.
    """
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise ValueError(f"mask must be a tensor, or None; got {type(mask).__name__}: make it one with torch.as_tensor")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"mask must be bool (True = may attend) or an additive float; got {mask.dtype}: convert it with mask.bool()"
        )
    fits = len(mask.shape) <= 4 and all(
        size in (1, full) for size, full in zip(reversed(mask.shape), reversed(shape), strict=False)
    )
    if not fits or not mask.shape:
        raise ValueError(
            f"mask must broadcast to (batch, heads, query tokens, key tokens) = {shape}; got {tuple(mask.shape)}"
        )

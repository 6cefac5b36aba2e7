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
    """Half precision holds neither large logits nor small differences between them."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def apply_mask(logits: Tensor, mask: Tensor | None, causal: bool = False) -> tuple[Tensor, Tensor | None]:
    """Masked logits, finite in every row, and which queries ``(…, i, 1)`` have a key to attend to (None: all)."""
    if causal:
        mask = without_later_keys(mask, logits.shape[2], logits.shape[3], logits.device)
    if mask is None:
        return logits, None
    logits = torch.where(mask, logits, -torch.inf) if mask.dtype == torch.bool else logits + mask
    # Compared with -inf rather than tested for finiteness, so that a NaN stays a NaN and is seen.
    reachable = (logits != -torch.inf).any(dim=-1, keepdim=True)
    return logits.masked_fill(~reachable, 0.0), reachable


def masks_together(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """One mask that does what both do; each is bool or additive."""
    if first is None or second is None:
        return second if first is None else first
    if first.dtype == second.dtype == torch.bool:
        return first & second
    if first.dtype == torch.bool or second.dtype == torch.bool:
        allowed, added = (first, second) if first.dtype == torch.bool else (second, first)
        return torch.where(allowed, added, -torch.inf)
    return at_least_float32(first) + second  # in half precision two finite values may make an infinite one


def without_later_keys(mask: Tensor | None, queries: int, keys: int, device: torch.device) -> Tensor:
    """A mask that also hides the keys that are later than the query, ``(…, i, j)``."""
    allowed = torch.arange(keys, device=device) <= torch.arange(queries, device=device)[:, None]
    both = masks_together(mask, allowed)
    return allowed if both is None else both


def zero_unreachable(weights: Tensor, reachable: Tensor | None) -> Tensor:
    return weights if reachable is None else weights.masked_fill(~reachable, 0.0)


def for_every_head(q: Tensor, k: Tensor) -> Tensor:
    """Keys or values ``(b, m, j, d)`` repeated for the heads that share them, ``(b, n, j, d)``."""
    n, m = q.shape[1], k.shape[1]
    if n == m:
        return k
    if n % m:
        raise ValueError(f"q must have a multiple of the heads of k and v; got {n} and {m}")
    return k.unsqueeze(2).expand(-1, -1, n // m, -1, -1).flatten(1, 2)


def in_range_of(dtype: torch.dtype, mask: Tensor) -> Tensor:
    """An additive mask in another type, in which a large finite value stays finite: it is no ``-inf``."""
    limits = torch.finfo(dtype)
    if limits.max >= torch.finfo(mask.dtype).max:
        return mask.to(dtype)
    return torch.where(mask.isinf(), mask, mask.clamp(limits.min, limits.max)).to(dtype)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Autocast would take the logits back to half precision."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):  # there is no autocast of tensors without values
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def check_mask(mask: Tensor | None, shape: tuple[int, int, int, int]) -> None:
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

"""Attention masks: checks, combinations, and fully masked rows.

Letters: ``b`` batch, ``n`` heads, ``i`` query token, ``j`` key token. A mask is bool (True = may attend) or an additive
float. For the groups of a pattern, it has five axes, ``(b or 1, groups or 1, n or 1, i, j)``.
"""

from collections.abc import Iterable, Sequence
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_attn.checks import product

#: An attention mask, or None for no mask.
Mask = Tensor | None


def upcast(x: Tensor) -> Tensor:
    """Return a tensor in at least float32, because half precision rounds large logits and their differences."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def add_mask(logits: Tensor, mask: Mask, causal: bool) -> Tensor:
    """Mask logits ``(b·groups, n, i, j)``; the rows of the mask may be padded."""
    if causal:
        mask = combine_masks(causal_mask(logits.shape[2], logits.shape[3], logits.device), mask)
    if mask is None:
        return logits
    (batch, groups, *_, columns), keys = mask.shape, logits.shape[3]
    mask = mask if columns in (1, keys) else mask[..., :keys]
    is_shared = batch == groups == 1  # by all images and groups
    logits, mask = (logits, mask.flatten(0, 1)) if is_shared else (split_groups(logits, mask), mask)
    logits = torch.where(mask, logits, -torch.inf) if mask.dtype == torch.bool else logits + mask
    return logits if is_shared else logits.flatten(0, 1)


def split_groups(x: Tensor, mask: Tensor) -> Tensor:
    """Split the first axis of ``(b·groups, …)`` for a mask ``(b or 1, groups or 1, …)``."""
    batch, groups = mask.shape[:2]
    return x.reshape(-1, groups, *x.shape[1:]) if batch == 1 else x.reshape(batch, -1, *x.shape[1:])


def align_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive mask whose rows start at multiples of 8 elements; fused GPU kernels would copy others."""
    mask = F.pad(mask, (0, -mask.shape[-1] % 8))
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask.logical_not(), -torch.inf)


def combine_masks(mask: Tensor, other: Mask) -> Tensor:
    """Combine two masks: into a bool mask if both are bool, otherwise into an additive one.

    >>> combine_masks(torch.tensor([True, True, False]), torch.tensor([0.5, 0.0, 0.5]))
    tensor([0.5000, 0.0000,   -inf])
    """
    if other is None:
        return mask
    allowed, added = (mask, other) if mask.dtype == torch.bool else (other, mask)
    if allowed.dtype != torch.bool:
        return upcast(mask) + other  # in half precision the sum of two finite values may be infinite
    return torch.logical_and(mask, other) if added.dtype == torch.bool else torch.where(allowed, added, -torch.inf)


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return the causal mask ``(1, 1, 1, i, j)``: True for keys that do not follow the query.

    >>> causal_mask(2, 3, torch.device("cpu"))[0, 0, 0]
    tensor([[ True, False, False],
            [ True,  True, False]])
    """
    return (torch.arange(keys, device=device) <= torch.arange(queries, device=device)[:, None])[None, None, None]


def broadcast_mask(mask: Tensor) -> Tensor:
    """View a mask as ``(b or 1, n or 1, i or 1, j or 1)``."""
    return mask[(None,) * (4 - mask.dim())]


def split_mask(mask: Mask, size: int, axis: int) -> Iterable[Mask]:
    """Split a mask into chunks of a size along an axis; a mask that broadcasts there is repeated for every chunk."""
    return repeat(mask) if mask is None or mask.shape[axis] == 1 else mask.split(size, dim=axis)


def unmask_empty_rows(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mask in which every row allows a key, and a bool tensor ``(…, i, 1)`` of the rows that already did.

    Set the output of the other rows to zero, because kernels compute different values for them. Rows of an additive
    mask are reduced by their maximum, which does not change the softmax and keeps them in the range of float16.
    """
    if mask.dtype == torch.bool:
        row_has_key = mask.any(dim=-1, keepdim=True)
        return torch.logical_or(mask, ~row_has_key), row_has_key
    mask = upcast(mask)
    largest = mask.detach().amax(dim=-1, keepdim=True)
    row_has_key = largest != -torch.inf  # NaN remains NaN, so that it is visible in the output
    return (mask - torch.where(row_has_key, largest, 0.0)).masked_fill(~row_has_key, 0.0), row_has_key


def zero_fully_masked_rows(y: Tensor, row_has_key: Mask) -> Tensor:
    """Set fully masked rows of ``(b·groups, n, i, …)`` to zero; the mask is ``(b or 1, groups or 1, n or 1, i, 1)``."""
    if row_has_key is None:
        return y
    y = split_groups(y, row_has_key)
    return torch.where(row_has_key, y, torch.zeros((), dtype=y.dtype, device=y.device)).flatten(0, 1)


def check_mask(
    got: Sequence[int], dtype: torch.dtype, batch: int, heads: int, size: Sequence[int], keys_size: Sequence[int]
) -> None:
    """Raise unless a mask's shape broadcasts to ``(batch, heads, queries, keys)`` for feature maps of these sizes."""
    if dtype != torch.bool and not dtype.is_floating_point:
        raise ValueError(f"mask must be bool or an additive float, got {dtype}. Convert it with mask.bool()")
    shape = (batch, heads, product(size), product(keys_size))
    sizes = zip(reversed(got), reversed(shape), strict=False)
    if not 1 <= len(got) <= 4 or any(length not in (1, full) for length, full in sizes):
        raise ValueError(f"mask must broadcast to (batch, heads, queries, keys) = {shape}, got {tuple(got)}")

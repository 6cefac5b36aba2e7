"""Attention masks: checked, combined, and the rows that may attend to nothing.

Letters: ``b`` batch, ``n`` heads, ``i`` query token, ``j`` key token. A mask is bool (True = may attend) or an additive
float.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from vision_attn.attention.patterns import Partition
from vision_attn.checks import product

#: None is for a mask that hides nothing.
Mask = Tensor | None


@dataclass(frozen=True)
class AxisBias:
    """What each query adds to its logits for where a key lies along each axis: for its row, and for its column.

    It is added to the logits as a mask, or folded into queries and keys.
    """

    #: of queries ``(b·groups, n, i, d)``, by axis: ``(b·groups, n, i, keys along the axis)``
    logits: Callable[[Tensor], dict[int, Tensor]]
    #: how many keys a group has along each axis
    keys_shape: Sequence[int]
    groups: int

    def along(self, q: Tensor) -> list[Tensor]:
        """The logits of each axis, to be broadcast along the others, ``(b·groups, n, i, <keys of each axis, or 1>)``.

        They may be beyond float16.
        """
        return [
            one.unflatten(3, [length if other == axis else 1 for other, length in enumerate(self.keys_shape)])
            for axis, one in self.logits(upcast(q)).items()
        ]

    def fold(self, q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Scaled queries with these logits behind them, and keys with a one for the row and the column they are in.

        Memory grows with the tokens, whatever kernel runs; but queries and keys are so much wider.
        """
        logits = self.logits(q)
        one_hot = [one_hot_along(self.keys_shape, axis, k).expand(*k.shape[:2], -1, -1) for axis in logits]
        return torch.cat([scale * q, *logits.values()], dim=-1), torch.cat([k, *one_hot], dim=-1)


def one_hot_along(shape: Sequence[int], axis: int, k: Tensor) -> Tensor:
    """Where each key lies along an axis, ``(keys, length of the axis)``."""
    number = torch.arange(product(shape), device=k.device)
    index = number // product(shape[axis + 1 :]) % shape[axis]
    return (index[:, None] == torch.arange(shape[axis], device=k.device)).to(k.dtype)


def mask_of(along: Sequence[Tensor], groups: int) -> Tensor:
    """The mask ``(b, groups, n, i, j)`` that the logits along each axis sum to."""
    return reduce(torch.add, along).flatten(3).unflatten(0, (-1, groups))


def upcast(x: Tensor) -> Tensor:
    """A tensor in float32 at least: half precision holds neither large logits nor small differences between them."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def add_mask(logits: Tensor, mask: Mask, causal: bool) -> Tensor:
    """Masked logits ``(b·groups, n, i, j)``; the mask is ``(b or 1, groups or 1, n or 1, i, j)``, bool or additive."""
    if causal:
        mask = combine_masks(causal_mask(logits.shape[2], logits.shape[3], logits.device), mask)
    if mask is None:
        return logits
    logits = logits.unflatten(0, groups_of(mask))
    logits = torch.where(mask, logits, -torch.inf) if mask.dtype == torch.bool else logits + mask
    return logits.flatten(0, 1)


def groups_of(mask: Tensor) -> tuple[int, int]:
    """How the axis ``b·groups`` of tokens falls apart for a mask ``(b or 1, groups or 1, …)``."""
    return (-1, mask.shape[1]) if mask.shape[0] == 1 else (mask.shape[0], -1)


def combine_masks(first: Tensor, second: Mask) -> Tensor:
    """One mask that does what both do: bool if both are, else additive.

    >>> combine_masks(torch.tensor([True, True, False]), torch.tensor([0.5, 0.0, 0.5]))
    tensor([0.5000, 0.0000,   -inf])
    """
    if second is None:
        return first
    if first.dtype == second.dtype == torch.bool:
        return first & second
    if first.dtype == torch.bool or second.dtype == torch.bool:
        allowed, added = (first, second) if first.dtype == torch.bool else (second, first)
        return torch.where(allowed, added, -torch.inf)
    return upcast(first) + second  # in half precision two finite values may make an infinite one


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """The keys that are no later than the query, ``(1, 1, 1, i, j)``.

    >>> causal_mask(2, 3, torch.device("cpu"))[0, 0, 0]
    tensor([[ True, False, False],
            [ True,  True, False]])
    """
    return (torch.arange(keys, device=device) <= torch.arange(queries, device=device)[:, None])[None, None, None]


def masks_of_groups(
    part: Partition, mask: Mask, bias: Tensor | AxisBias | None, causal: bool
) -> tuple[Tensor | None, Tensor | None, bool]:
    """All that masks the groups of a map, in one mask ``(b or 1, groups or 1, n or 1, i, j)``.

    ``mask`` is that of the user, on the map, broadcastable to ``(b, n, tokens, key tokens)``; ``bias`` that of the
    position term, in the groups: a tensor goes into the mask, an :class:`AxisBias` is added later. With the one mask
    come the rows that may attend to anything (None: all), and whether the kernel is to hide later keys, as it can where
    there is no mask.
    """
    own, reachable = part.mask, None
    by_kernel = causal and part.is_global and mask is None and bias is None
    if causal and not by_kernel:
        own = combine_masks(part.causal_mask(), own)
    if mask is not None:
        mask = part.cut_mask(with_four_axes(mask))
        own, reachable = open_rows(combine_masks(mask, own))
    return combine_masks(bias, own) if isinstance(bias, Tensor) else own, reachable, by_kernel


def with_four_axes(mask: Tensor) -> Tensor:
    """``(b or 1, n or 1, i or 1, j or 1)``."""
    return mask[(None,) * (4 - mask.dim())]


def zero_rows(y: Tensor, reachable: Mask) -> Tensor:
    """``(b·groups, n, i, …)`` with zeros for rows not ``reachable``, ``(b or 1, groups or 1, n or 1, i, 1)``."""
    if reachable is None:
        return y
    y = y.unflatten(0, groups_of(reachable))
    return torch.where(reachable, y, torch.zeros((), dtype=y.dtype, device=y.device)).flatten(0, 1)


def open_rows(mask: Tensor) -> tuple[Tensor, Tensor]:
    """A mask in which every row has a key to attend to, and which rows ``(…, i, 1)`` had one before.

    What comes out of the other rows is to be set to zero: kernels differ in what they make of them. The largest value
    of a row is taken off an additive mask: softmax does not see it, and half precision holds the rest.
    """
    if mask.dtype == torch.bool:
        reachable = mask.any(dim=-1, keepdim=True)
        return mask | ~reachable, reachable
    mask = upcast(mask)
    largest = mask.detach().amax(dim=-1, keepdim=True)
    reachable = largest != -torch.inf  # a NaN stays a NaN and is seen
    return (mask - torch.where(reachable, largest, 0.0)).masked_fill(~reachable, 0.0), reachable


def check_mask(mask: Tensor, batch: int, heads: int, size: Sequence[int], keys_size: Sequence[int]) -> None:
    """Refuse all but a mask for so many maps and heads, of queries and keys from maps of these sizes."""
    if not isinstance(mask, Tensor):
        raise ValueError(f"mask must be a tensor, or None; got {type(mask).__name__}: make it one with torch.as_tensor")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"mask must be bool (True = may attend) or an additive float; got {mask.dtype}: convert it with mask.bool()"
        )
    shape = (batch, heads, product(size), product(keys_size))
    sizes = zip(reversed(mask.shape), reversed(shape), strict=False)
    if not 1 <= mask.dim() <= 4 or any(length not in (1, full) for length, full in sizes):
        raise ValueError(
            f"mask must broadcast to (batch, heads, query tokens, key tokens) = {shape}; got {tuple(mask.shape)}"
        )

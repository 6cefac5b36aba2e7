"""Maps as blocks take and give them: their shape is checked, their memory format kept."""

from __future__ import annotations

import math
from numbers import Integral, Real

import torch
from torch import Tensor

__all__ = [
    "channels_innermost",
    "check_count",
    "check_counts",
    "check_divides",
    "check_flags",
    "check_map",
    "check_number",
    "check_probability",
    "check_queries",
    "in_format_of",
]

#: What the axes of a map are called in messages, by how many there are.
AXES_IN_WORDS = {1: "width", 2: "height, width", 3: "depth, height, width"}


def check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1; got {value!r}")


def check_counts(**counts: int) -> None:
    for name, value in counts.items():
        check_count(name, value)


def check_divides(name: str, value: int, whole_name: str, whole: int) -> None:
    if whole % value:
        divisors = [n for n in range(1, whole + 1) if whole % n == 0]
        raise ValueError(
            f"{name} must divide {whole_name}; got {whole_name}={whole} and {name}={value}: "
            f"choose {name} from {', '.join(map(str, divisors))}"
        )


def check_flags(**flags: bool) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False; got {value!r}")


def check_probability(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be a probability between 0 and 1; got {value!r}")


def check_number(name: str, value: float, above: float = -math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or not value > above:
        least = "" if above == -math.inf else f" above {above:g}"
        raise ValueError(f"{name} must be a finite number{least}; got {value!r}")


def check_map(name: str, x: Tensor, channels: int, rank: int) -> None:
    if x.dim() != 2 + rank or x.shape[1] != channels:
        raise ValueError(
            f"{name} must be maps of shape (batch, {channels}, {AXES_IN_WORDS[rank]}); got {tuple(x.shape)}"
        )


def check_queries(queries: Tensor | None, tokens: int) -> None:
    if queries is None:
        return
    if not isinstance(queries, Tensor):
        raise ValueError(f"queries must be a tensor of indices, or None for all; got {type(queries).__name__}")
    if queries.dim() != 1 or queries.is_floating_point() or queries.dtype == torch.bool:
        raise ValueError(
            "queries must be indices of tokens, whole numbers of shape (i,); got "
            f"{queries.dtype} of shape {tuple(queries.shape)}"
        )
    if queries.numel() and not 0 <= int(queries.min()) <= int(queries.max()) < tokens:
        raise ValueError(
            f"queries must be indices of {tokens} tokens; got {int(queries.min())} to {int(queries.max())}"
        )


def channels_innermost(x: Tensor) -> Tensor:
    """The same map with the channels of a place beside each other in memory: channels-last, for any number of axes."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def in_format_of(x: Tensor, y: Tensor) -> Tensor:
    """``y`` in the memory format of ``x``; where ``x`` is in both, as with a single channel, in the default one."""
    if x.shape[1] > 1 and x.stride(1) == 1 and not x.is_contiguous():
        return channels_innermost(y)
    return y.contiguous()

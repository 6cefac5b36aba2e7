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
    """Refuse what is no count.

    Args:
        name: of the argument, for the message.
        value: what was given for it.

    Raises:
        ValueError: it is no whole number of at least 1.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1; got {value!r}")


def check_counts(**counts: int) -> None:
    """Refuse the first of several arguments that is no count.

    Args:
        **counts: what was given for each argument.

    Raises:
        ValueError: one is no whole number of at least 1.
    """
    for name, value in counts.items():
        check_count(name, value)


def check_divides(name: str, value: int, whole_name: str, whole: int) -> None:
    """Refuse a number that does not divide another, and name those that do.

    Args:
        name: of the argument, for the message.
        value: what was given for it.
        whole_name: what is divided, for the message.
        whole: that number.

    Raises:
        ValueError: ``value`` does not divide ``whole``.
    """
    if whole % value:
        divisors = [n for n in range(1, min(whole, 10_000) + 1) if whole % n == 0]
        raise ValueError(
            f"{name} must divide {whole_name}; got {whole_name}={whole} and {name}={value}: "
            f"choose {name} from {', '.join(map(str, divisors))}{', …' * (whole > 10_000)}"
        )


def check_flags(**flags: bool) -> None:
    """Refuse the first of several arguments that is neither True nor False.

    Args:
        **flags: what was given for each argument.

    Raises:
        ValueError: one is no bool.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False; got {value!r}")


def check_probability(name: str, value: float) -> None:
    """Refuse what is no probability.

    Args:
        name: of the argument, for the message.
        value: what was given for it.

    Raises:
        ValueError: it is no number between 0 and 1.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be a probability between 0 and 1; got {value!r}")


def check_number(name: str, value: float, above: float = -math.inf) -> None:
    """Refuse what is no finite number.

    Args:
        name: of the argument, for the message.
        value: what was given for it.
        above: what it must be larger than.

    Raises:
        ValueError: it is no number, not finite, or not above.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or not value > above:
        least = "" if above == -math.inf else f" above {above:g}"
        raise ValueError(f"{name} must be a finite number{least}; got {value!r}")


def check_map(name: str, x: Tensor, channels: int, rank: int) -> None:
    """Refuse what is no batch of maps.

    Args:
        name: of the argument, for the message.
        x: what was given for it.
        channels: that the maps must have.
        rank: how many axes they must have.

    Raises:
        ValueError: its shape is not ``(b, channels, …)`` with so many axes.
    """
    if x.dim() != 2 + rank or x.shape[1] != channels:
        raise ValueError(
            f"{name} must be maps of shape (batch, {channels}, {AXES_IN_WORDS[rank]}); got {tuple(x.shape)}"
        )


def check_queries(queries: Tensor | None, tokens: int) -> None:
    """Refuse what are no indices of tokens.

    Args:
        queries: what was given; None is for all tokens.
        tokens: how many there are.

    Raises:
        ValueError: it is no tensor of whole numbers ``(i,)``, or one of them is no token's.
    """
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
    """The same map with the channels of a place beside each other in memory: channels-last, for any number of axes.

    Args:
        x: a map, ``(b, c, …)``.

    Returns:
        ``(b, c, …)``.
    """
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def in_format_of(x: Tensor, y: Tensor) -> Tensor:
    """A map in the memory format of another; where that is in both, as with a single channel, in the default one.

    Args:
        x: the map whose format counts, ``(b, c, …)``.
        y: the map that takes it, of as many axes.

    Returns:
        ``y``, or a copy of it.
    """
    if x.shape[1] > 1 and x.stride(1) == 1 and not x.is_contiguous():
        return channels_innermost(y)
    return y.contiguous()

"""Argument checks, and the product of sizes."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import torch

#: The largest size, count or number of threads that torch supports.
MAX_COUNT = 2**31 - 1


def check_count(name: str, value: int) -> None:
    """Raise unless the value is an integer from 1 to :data:`MAX_COUNT`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= value <= MAX_COUNT:
        limit = f" and <= {MAX_COUNT:,}" if isinstance(value, Integral) and value > MAX_COUNT else ""
        raise ValueError(f"{name} must be an integer >= 1{limit}, got {reprlib.repr(value)}")


def check_counts(**counts: int | None) -> None:
    """Raise for the first argument that is neither a positive integer nor None."""
    for name, value in counts.items():
        if value is not None:
            check_count(name, value)


def check_divides(name: str, value: int, total_name: str, total: int) -> None:
    """Raise unless one number divides another; the message lists the divisors.

    >>> check_divides("num_heads", 5, "channels", 12)
    Traceback (most recent call last):
    ValueError: num_heads must divide channels, got channels=12 and num_heads=5. Choose num_heads from 1, 2, 3, 4, 6, 12
    """
    if total % value:
        # A file may contain a very large number, so the search for divisors is limited.
        divisors = [n for n in range(1, min(total, 10_000) + 1) if total % n == 0]
        choice = f"Choose {name} from {', '.join(map(str, divisors))}{', …' * (total > 10_000)}"
        raise ValueError(f"{name} must divide {total_name}, got {total_name}={total} and {name}={value}. {choice}")


def check_bools(**flags: bool) -> None:
    """Raise for the first argument that is neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")


def check_probability(name: str, value: float) -> None:
    """Raise unless the value is a number between 0 and 1."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be a probability between 0 and 1, got {value!r}")


def check_number(name: str, value: float, above: float = -math.inf) -> None:
    """Raise unless the value is a finite number greater than ``above``."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or not value > above:
        least = "" if above == -math.inf else f" above {above:g}"
        raise ValueError(f"{name} must be a finite number{least}, got {value!r}")


def check_choice(name: str, value: object, choices: Iterable[str], context: str = "") -> None:
    """Raise unless the value is one of the choices."""
    names = list(choices)
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, names))}{context}, got {value!r}")


def check_factory_args(device: Any, dtype: Any, **sizes: int) -> None:
    """Raise unless the sizes are positive integers, the dtype is a floating-point type and the device exists."""
    for name, value in sizes.items():
        check_count(name, value)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be a floating-point torch.dtype, or None, got {dtype!r}")
    try:
        torch.empty(0, device=device)
    except (AssertionError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        why = str(error).partition("\n")[0][:120]
        given = reprlib.repr(device)
        raise ValueError(f"device must be available on this machine, such as 'cpu', got {given}: {why}") from error


def check_type(name: str, value: object, kinds: Any, what: str) -> None:
    """Raise unless the value has one of these types."""
    if not isinstance(value, kinds):
        raise ValueError(f"{name} must be {what}, got {type(value).__name__}")


def as_list(name: str, value: Any, what: str, *, single: type | tuple[type, ...] = ()) -> list[Any]:
    """Return an argument as a list; a single value becomes a list of one."""
    if isinstance(value, single):
        return [value]
    try:
        return list(value)
    except TypeError:  # A tensor without axes has an iterator, but raises the same error.
        raise ValueError(f"{name} must be {what}, got {type(value).__name__}") from None


def product(factors: Iterable[int]) -> int:
    """Return the product of sizes; unlike ``math.prod``, it supports the symbolic sizes of compiled graphs."""
    result = 1
    for factor in factors:
        result = result * factor
    return result

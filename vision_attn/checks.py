"""Checks of arguments, and the product of sizes: what every room may use."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import torch

__all__ = [
    "MOST",
    "as_list",
    "check_count",
    "check_counts",
    "check_divides",
    "check_flags",
    "check_new",
    "check_number",
    "check_probability",
    "check_type",
    "product",
]


#: The largest size, count or number of threads: what torch and the system take.
MOST = 2**31 - 1


def check_count(name: str, value: int) -> None:
    """Refuse what is no whole number of at least 1, or larger than any size."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= value <= MOST:
        most = f" and at most {MOST:,}" if isinstance(value, Integral) and value > MOST else ""
        raise ValueError(f"{name} must be a whole number of at least 1{most}; got {reprlib.repr(value)}")


def check_counts(**counts: int | None) -> None:
    """Refuse the first of several arguments that is neither a count nor None."""
    for name, value in counts.items():
        if value is not None:
            check_count(name, value)


def check_divides(name: str, value: int, whole_name: str, whole: int) -> None:
    """Refuse a number that does not divide another, and name those that do."""
    if whole % value:
        # Those of a very large number, as a file may name it, are not looked for up to the end.
        divisors = [n for n in range(1, min(whole, 10_000) + 1) if whole % n == 0]
        raise ValueError(
            f"{name} must divide {whole_name}; got {whole_name}={whole} and {name}={value}: "
            f"choose {name} from {', '.join(map(str, divisors))}{', …' * (whole > 10_000)}"
        )


def check_flags(**flags: bool) -> None:
    """Refuse the first of several arguments that is neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False; got {value!r}")


def check_probability(name: str, value: float) -> None:
    """Refuse what is no number between 0 and 1."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be a probability between 0 and 1; got {value!r}")


def check_number(name: str, value: float, above: float = -math.inf) -> None:
    """Refuse what is no finite number, or none above a bound."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or not value > above:
        least = "" if above == -math.inf else f" above {above:g}"
        raise ValueError(f"{name} must be a finite number{least}; got {value!r}")


def check_new(device: Any, dtype: Any, **sizes: int) -> None:
    """Refuse sizes that are no counts, a dtype that cannot be trained, and a device that does not exist."""
    for name, value in sizes.items():
        check_count(name, value)
    check_type("dtype", dtype, (torch.dtype, type(None)), "a torch.dtype, or None")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be of floating point, to be trained; got {dtype}")
    try:
        torch.empty(0, device=device)
    except (AssertionError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        why = str(error).partition("\n")[0][:120]
        raise ValueError(f"device must be one that there is, as 'cpu'; got {reprlib.repr(device)}: {why}") from error


def check_type(name: str, value: object, kinds: Any, what: str) -> None:
    """Refuse what is of none of these types."""
    if not isinstance(value, kinds):
        raise ValueError(f"{name} must be {what}; got {type(value).__name__}")


def as_list(name: str, value: Any, what: str, *, single: type | tuple[type, ...] = ()) -> list[Any]:
    """An argument as a list, in which a single value stands alone; refused where it cannot be gone through."""
    if isinstance(value, single):
        return [value]
    try:
        return list(value)
    except TypeError:  # as a tensor without axes does, too, though it has an iterator
        raise ValueError(f"{name} must be {what}; got {type(value).__name__}") from None


def product(factors: Iterable[int]) -> int:
    """The product of sizes; some may be symbols, which ``math.prod`` does not take where a graph is compiled."""
    result = 1
    for factor in factors:
        result = result * factor
    return result

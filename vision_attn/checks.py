"""Checks of arguments that would otherwise fail in silence, and the product of sizes."""

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any


def check_divides(name: str, value: int, total_name: str, total: int) -> None:
    """Raise unless one integer divides another; the message lists the divisors.

    >>> check_divides("num_heads", 5, "channels", 12)
    Traceback (most recent call last):
    ValueError: num_heads must divide channels, got channels=12 and num_heads=5. Choose num_heads from 1, 2, 3, 4, 6, 12
    """
    check_above(0, Integral, **{total_name: total, name: value})
    if total % value:
        # A file may contain a very large number, so the search for divisors is limited.
        divisors = [n for n in range(1, min(total, 10_000) + 1) if total % n == 0]
        choice = f"Choose {name} from {', '.join(map(str, divisors))}{', …' * (total > 10_000)}"
        raise ValueError(f"{name} must divide {total_name}, got {total_name}={total} and {name}={value}. {choice}")


def check_above(limit: float, kind: Any = Real, **values: Any) -> None:
    """Raise for the first value that is neither a number of this kind above the limit nor None.

    >>> check_above(0, lr=0.0)
    Traceback (most recent call last):
    ValueError: lr must be a number above 0, got 0.0
    """
    word = "an integer" if kind is Integral else "a number"
    for name, value in values.items():
        if value is not None and not (isinstance(value, kind) and value > limit and not isinstance(value, bool)):
            raise ValueError(f"{name} must be {word} above {limit:g}, got {value!r}")


def check_bool(**values: Any) -> None:
    """Raise for the first value that is neither True nor False, such as the word "false", which is true in Python.

    >>> check_bool(causal="false")
    Traceback (most recent call last):
    ValueError: causal must be True or False, got 'false'
    """
    for name, value in values.items():
        if value not in (True, False):
            raise ValueError(f"{name} must be True or False, got {value!r}")


def check_kernel_size(kernel_size: Any) -> None:
    """Raise unless the size of a convolution kernel is an odd integer, so that padding can keep the size of the input.

    >>> check_kernel_size(1)
    >>> check_kernel_size(4)
    Traceback (most recent call last):
    ValueError: kernel_size must be odd, got 4
    """
    check_above(0, Integral, kernel_size=kernel_size)
    if kernel_size % 2 == 0:
        raise ValueError(f"kernel_size must be odd, got {kernel_size}")


def check_choice(name: str, value: object, choices: Iterable[str], context: str = "") -> None:
    """Raise unless the value is one of the choices."""
    names = list(choices)
    if value not in names:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, names))}{context}, got {value!r}")


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


def get_version(x: Any) -> int:
    """Return the number of changes in place of a tensor, from which torch's autograd also finds such changes."""
    return x._version

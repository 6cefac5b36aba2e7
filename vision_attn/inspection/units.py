"""Numbers and lists as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["GIBI", "compact", "gibi", "listed", "mebi", "percent"]

MEBI, GIBI = 2**20, 2**30


def compact(count: int) -> str:
    """A number in three digits and a letter.

    >>> [compact(count) for count in (0, 980, 4_736, 25_557_032, 4_089_184_256)]
    ['0', '980', '4.74 k', '25.6 M', '4.09 G']
    """
    for letter, unit in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= unit:
            value = count / unit
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {letter}"
    return str(count)


def percent(part: float, whole: float) -> str:
    """A share of a whole; a dash where there is no whole.

    >>> percent(1, 8), percent(1, 10_000), percent(5, 2), percent(0, 0)
    ('12.5 %', '0.0 %', '250 %', '–')
    """
    if not whole:
        return "–"
    return f"{100 * part / whole:,.{1 if part < 0.9995 * whole else 0}f} %"


def mebi(count: int) -> str:
    """A number of bytes in MiB, without the unit.

    >>> mebi(718_144), mebi(1 << 40)
    ('0.7', '1,048,576')
    """
    value = count / MEBI
    return f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def gibi(count: float) -> str:
    """A number of bytes in GiB, with the unit.

    >>> gibi(3 << 29), gibi(1 << 26)
    ('1.5 GiB', '0.062 GiB')
    """
    value = count / GIBI
    return f"{value:,.1f} GiB" if value > 0.95 else f"{value:.2g} GiB"


def listed(items: Sequence[str], last: str = "and") -> str:
    """The words in a row, as in a sentence.

    >>> listed(["einx", "bmm", "einsum"], "or")
    'einx, bmm or einsum'
    """
    return f" {last} ".join(filter(None, (", ".join(items[:-1]), items[-1])))

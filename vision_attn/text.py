"""Text for reports and messages: tables, lists that are cut short, and names from files without control characters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

__all__ = ["escaped", "shorten", "table"]


def table(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Rows of cells, the header first, as lines with aligned columns.

    Args:
        rows: of as many cells each.
        left: the columns that are aligned to the left, which words are; the others are to the right, as numbers are.

    >>> print(table([("where", "map", "tokens"), ("layer3.1", "14×14", "196"), ("layer4.1", "7×7", "49")]))
    where       map  tokens
    layer3.1  14×14     196
    layer4.1    7×7      49
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def escaped(text: object) -> str:
    r"""What a file says, or is called, without the characters that steer a terminal.

    >>> escaped("conv1\x1b[2J.weight")
    'conv1\\x1b[2J.weight'
    """
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in str(text))


def shorten(keys: Iterable[str], limit: int = 6) -> str:
    """The first keys, escaped, and how many more there are, as text.

    >>> shorten(["conv1", "bn1", "layer1", "layer2"], limit=2)
    'conv1, bn1, … (2 more)'
    """
    keys = tuple(keys)
    shown = ", ".join(map(escaped, keys[:limit]))
    return f"{shown}, … ({len(keys) - limit} more)" if len(keys) > limit else shown

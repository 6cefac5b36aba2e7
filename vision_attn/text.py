"""Text for reports and messages: tables, shortened lists, and escaped names from files."""

import difflib
import html
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

#: Command that installs the packages of an extra, in all messages.
INSTALL = 'pip install "vision-attn[{0}]", or ".[{0}]" in a clone'


class Table(NamedTuple):
    """Table that prints with aligned columns; displayed as an HTML table in a notebook.

    Args:
        rows: rows with the same number of cells, the header first.
        left: indices of left-aligned columns; the others are right-aligned.

    >>> print(Table([("site", "size", "tokens"), ("layer3.1", "14×14", "196"), ("layer4.1", "7×7", "49")]))
    site       size  tokens
    layer3.1  14×14     196
    layer4.1    7×7      49
    """

    rows: Sequence[Sequence[str]]
    left: Collection[int] = (0,)

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        align = [f"<{width}" if column in self.left else f">{width}" for column, width in enumerate(widths)]
        return "\n".join("  ".join(map(format, row, align)).rstrip() for row in self.rows)

    def _repr_html_(self) -> str:
        sides = ["left" if column in self.left else "right" for column in range(len(self.rows[0]))]

        def row(cells: Sequence[str], tag: str) -> str:
            parts = zip(cells, sides, strict=True)
            return "".join(f'<{tag} style="text-align: {side}">{html.escape(cell)}</{tag}>' for cell, side in parts)

        header, *rows = self.rows
        body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in rows)
        return f"<table><thead><tr>{row(header, 'th')}</tr></thead><tbody>{body}</tbody></table>"


class Report:
    """Report that prints as text and tables; displayed as HTML in a notebook.

    >>> class Sizes(Report):
    ...     def parts(self):
    ...         return ["2 < 3", Table([("site", "size"), ("layer4", "7×7")])]
    >>> Sizes()
    2 < 3
    site    size
    layer4   7×7
    >>> Sizes()._repr_html_().partition("<table>")[0]
    '<div style="white-space: pre-wrap">2 &lt; 3</div>'
    """

    def parts(self) -> Iterable[str | Table]:
        """Return the texts and tables of the report, in order."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(map(str, self.parts()))

    def __repr__(self) -> str:
        return str(self)  # Interactive sessions display the representation.

    def _repr_html_(self) -> str:
        paragraph = '<div style="white-space: pre-wrap">{}</div>'
        parts = (x._repr_html_() if isinstance(x, Table) else paragraph.format(html.escape(x)) for x in self.parts())
        return "".join(parts)


def escape_control_characters(text: object) -> str:
    r"""Escape control characters in text from a file.

    >>> escape_control_characters("conv1\x1b[2J.weight")
    'conv1\\x1b[2J.weight'
    """
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in str(text))


def shorten(keys: Iterable[str], limit: int = 6) -> str:
    """Join the first keys, escaped, followed by the number of remaining keys.

    >>> shorten(["conv1", "bn1", "layer1", "layer2"], limit=2)
    'conv1, bn1, … (2 more)'
    """
    keys = tuple(keys)
    shown = ", ".join(map(escape_control_characters, keys[:limit]))
    return f"{shown}, … ({len(keys) - limit} more)" if len(keys) > limit else shown


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the most similar known names, to append to an error; empty if none is similar.

    >>> did_you_mean("layr3", ["stem", "layer3", "layer4"])
    " Did you mean 'layer3' or 'layer4'?"
    """
    close = difflib.get_close_matches(name, list(known))
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""

"""Docstrings as Markdown: they are written for the terminal, in Google's style with roles of reStructuredText."""

import re
from pathlib import Path
from typing import Any

import griffe

#: What the pages of the API document, by the last part of its name.
DOCUMENTED = {
    path.rpartition(".")[2]: path
    for page in sorted((Path(__file__).parent / "api").glob("*.md"))
    for path in re.findall(r"^::: (\S+)", page.read_text(), flags=re.MULTILINE)
}


class Docstrings(griffe.Extension):
    """Makes Markdown of docstrings, and docstrings of the comments at attributes: ``#:`` above, or behind them."""

    def on_attribute(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        if attr.docstring is None and attr.lineno:
            source = attr.lines_collection[attr.filepath]
            lines = []
            for line in reversed(source[: attr.lineno - 1]):
                if not line.strip().startswith("#: "):
                    break
                lines.append(line.strip()[3:])
            behind = source[attr.lineno - 1].partition("  # ")[2]
            if lines or behind:
                attr.docstring = griffe.Docstring("\n".join(reversed(lines)) or behind, parent=attr)

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """A docstring as Markdown: its tables, examples and roles."""
    text = re.sub(r"^(=+  .*)\n((?:.+\n)+?)\1(?:\n((?:.+\n)+?)\1)?$", table, text, flags=re.MULTILINE)
    text = re.sub(r"^::\n\n", "", text, flags=re.MULTILINE)  # an indented block is code as it is
    text = re.sub(r"^>>> .*(?:\n.+)*", r"```pycon\n\g<0>\n```", text, flags=re.MULTILINE)
    return re.sub(r":(?:class|func|meth|attr|data|mod):`~?([^`]+)`", reference, text)


def reference(role: re.Match[str]) -> str:
    """A link to what is documented, and code otherwise."""
    name = role[1]
    for part in (name, name.rpartition(".")[0]):  # a method is on the page of its class
        path = DOCUMENTED.get(part.rpartition(".")[2])
        if path:
            return f"[`{name.removeprefix('vision_attn.')}`][{path}]"
    return f"`{name}`"


def table(found: re.Match[str]) -> str:
    """A simple table of reStructuredText as one of Markdown; without a header where it has none."""
    places = [(rule.start(), rule.end()) for rule in re.finditer("=+", found[1])]
    places[-1] = (places[-1][0], None)
    head, body = (found[2], found[3]) if found[3] else ("", found[2])
    rows = [[line[a:b].strip() for a, b in places] for line in [head, *body.splitlines()]]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(places), *lines[1:]])

"""List the docstrings, comments and messages of Python files for proofreading, one per line.

python .ci/strings.py                        the package, the examples and the benchmarks
python .ci/strings.py vision_attn/recipes      files or folders
python .ci/strings.py --sample 50            fifty random texts, including sentences of the documentation
"""

import argparse
import ast
import io
import random
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CHANGELOG.md", "docs/*.md", "examples/README.md", "weights/**/*.md")


def python_texts(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the kind and the text of all docstrings, comments, and strings of several words."""
    source = path.read_text()
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            docstrings.add(node.body[0].value)
    inside = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside:
            if re.search(r"[A-Za-z]{2,} +[A-Za-z]", node.value):
                yield node.lineno, "docstring" if node in docstrings else "string", node.value
        elif isinstance(node, ast.JoinedStr) and re.search(r"[A-Za-z]{2,} ", text := ast.unparse(node)):
            yield node.lineno, "string", text[2:-1]
    comments: list[list] = []  # first line, last line and text; comments on consecutive lines are joined
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# type:", "# noqa", "# %%")):
            line, text = token.start[0], token.string.lstrip("#: ")
            if comments and comments[-1][1] == line - 1 and token.line.lstrip().startswith("#"):
                comments[-1][1:] = line, f"{comments[-1][2]} {text}"
            else:
                comments.append([line, line, text])
    yield from ((line, "comment", text) for line, _, text in comments if text)


def page_sentences(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the sentences of a page outside code blocks, tables and headings."""
    text = re.sub(r"^```.*?^```|^\|.*?$|^#.*?$|<[^>]+>", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for sentence in re.split(r"(?<=[.!?:])\s+|\n\n+", text):
        if len(sentence.split()) > 3:
            yield 0, "page", sentence


def main() -> None:
    """Print the texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "paths", nargs="*", type=Path, default=[ROOT / name for name in ("vision_attn", "examples", "benchmarks")]
    )
    parser.add_argument("--sample", type=int, help="number of texts to draw")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    files = [file for path in arguments.paths for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]
    texts = [(file, *text) for file in files for text in sorted(python_texts(file))]
    if arguments.sample:
        pages = [page for pattern in PAGES for page in sorted(ROOT.glob(pattern))]
        texts += [(page, *sentence) for page in pages for sentence in page_sentences(page)]
        sentences = [text for text in texts if len(text[3].split()) > 4]
        texts = random.Random(arguments.seed).sample(sentences, arguments.sample)
    for file, line, kind, text in texts:
        print(f"{file.resolve().relative_to(ROOT)}:{line} {kind}: {' '.join(text.split())}")


if __name__ == "__main__":
    main()

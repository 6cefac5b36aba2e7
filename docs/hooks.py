"""Collect the pages of the site from the repository, in the same folders, and render the notebooks."""

import base64
import json
import re
import textwrap
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]

#: The pages, and the files that they show or link to.
SHOWN = (
    *("*.md", "LICENSE", "CITATION.cff", "docs/*.md", "docs/*.svg", "docs/*.png", "docs/explorer/*", "docs/api/*.md"),
    *("vision_attn/attention/kernels.py", "tests/reference.py"),
    *(
        "examples/*.md",
        "examples/*.py",
        "examples/experiments/*.py",
        "examples/experiments/*/*.png",
        "examples/experiments/*/*.md",
        "examples/*/*.png",
        "examples/experiments/results/*.json",
        "examples/notebooks/*.ipynb",
    ),
    "benchmarks/*.py",
    *("weights/*.md", "weights/*/*.md", "weights/*/*.png"),
)
#: Cards of the home page: page, title, text and picture.
CARDS = (
    (
        *("docs/quickstart.md", "Quickstart and training"),
        "Fine-tune a pretrained network on a folder of images, in Python or on the command line.",
        "examples/pictures/quickstart.png",
    ),
    (
        *("docs/insert.md", "Insert blocks"),
        "Add attention, or any other block, to a network without changing its output.",
        "examples/experiments/recall_attention/attention.png",
    ),
    (
        *("docs/see.md", "Visualize attention"),
        "See what every position attends to, in figures and on an interactive page.",
        "docs/explorer/light.png",
    ),
    (
        *("docs/implementations.md#patterns", "Patterns and positions"),
        "Full, axial, window, grid and neighborhood attention, or a custom einx expression.",
        "examples/pictures/einx_patterns.png",
    ),
    (
        *("docs/results.md", "Results"),
        "Where attention helps, measured against other blocks of the same size.",
        "examples/experiments/results/recall.png",
    ),
    (
        *("examples/README.md", "Tutorials and scripts"),
        "Learn how attention is written, from one einsum to a transformer block.",
        "examples/pictures/attention_matrices.png",
    ),
)

#: A picture of the explorer that links to a page, and the page in place of the picture.
EXPLORER = r"^\[!\[(.*)\]\(explorer/light\.png\)\]\((explorer/.*)\)$"
FRAME = r'<iframe src="\2#y=0.375&x=0.2083" title="\1" width="100%" height="760" loading="lazy"></iframe>'


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of the repository, and a page for each notebook."""
    for pattern in SHOWN:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    for path in sorted(ROOT.glob("examples/notebooks/*.ipynb")):
        page = path.relative_to(ROOT).with_suffix(".md").as_posix()
        text, images = render_notebook(json.loads(path.read_text()), path.stem)
        files.append(File.generated(config, page, content=text))
        for name, content in images.items():
            files.append(File.generated(config, f"examples/notebooks/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Adapt a page to the site: notebooks as pages, code side by side, the explorer to try, cards on the home page."""
    markdown = re.sub(r"(\]\([^):]*notebooks/\w+)\.ipynb\)", r"\1.md)", markdown)
    for table in re.findall(r"<table>\n<tr><th>.*?</table>", markdown, flags=re.DOTALL):
        page.meta["hide"] = ["toc"]  # leaves room for two columns
        markdown = markdown.replace(table, columns(table))
    if page.file.src_uri == "docs/results.md":
        page.meta["hide"] = ["toc"]  # leaves room for the columns of the first table
        markdown = re.sub(r"(?<=\S) (\([A-Za-z][^|()]*\)[^|()]*\|)", r"<br>\1", markdown)
    markdown = re.sub(EXPLORER, FRAME, markdown, flags=re.MULTILINE)
    if page.file.src_uri == "README.md":
        markdown = re.sub(r"^\[!\[CI\].*\n\n", "", markdown, flags=re.MULTILINE)  # works on GitHub and PyPI only
        markdown = markdown.replace("\n## ", f"\n{cards()}\n\n## ", 1)
    return markdown


def columns(table: str) -> str:
    """Return a table of code as tabs, which are columns on a wide screen (site.css)."""
    titles = re.findall(r"<th>(.*?)</th>", table)
    sets = []
    for row in re.findall(r"<tr><td>(.*?)</td></tr>", table, flags=re.DOTALL):
        cells = zip(titles, row.split("</td><td>"), ("!", ""), strict=True)  # the mark starts another set of tabs
        sets += [f'==={mark} "{title}"\n\n{textwrap.indent(cell.strip(), "    ")}' for title, cell, mark in cells]
    return "\n\n".join(sets)


def cards() -> str:
    """Return the cards of the home page."""
    items = [
        f"-   [**{title}**]({target})\n\n    {text}\n\n    [![]({picture}){{ loading=lazy }}]({target})"
        for target, title, text, picture in CARDS
    ]
    return '<div class="grid cards" markdown>\n\n' + "\n\n".join(items) + "\n\n</div>"


def render_notebook(notebook: dict, name: str) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and its images by file name."""
    parts: list[str] = []
    images: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(re.sub(r"(\]\(\w+)\.ipynb\)", r"\1.md)", source))
            if len(parts) == 1:
                parts.append(f"[Download the notebook]({name}.ipynb) or [the script](../{name}.py).")
            continue
        parts.append(f"```python\n{source}\n```")
        printed = "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")
        outputs = [{"text/plain": printed}] if printed else []
        outputs += [output["data"] for output in cell["outputs"] if "data" in output]
        for data in outputs:
            if "image/png" in data:
                image = f"{name}-{len(images)}.png"
                images[image] = base64.b64decode(data["image/png"])
                parts.append(f"![]({image})")
            elif "text/html" in data:
                parts.append(f'<div class="output">{"".join(data["text/html"])}</div>')
            else:
                text = "".join(data["text/plain"]).rstrip()
                parts.append(f"```text\n{text}\n```")
    return "\n\n".join(parts) + "\n", images

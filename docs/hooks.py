"""The site's files: those of the repository that its pages show or link to, in the same folders."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]

#: The pages, and what they link to.
SHOWN = (
    *("*.md", "LICENSE", "CITATION.cff", "docs/*.md", "docs/*.svg", "docs/explorer/*", "docs/api/*.md"),
    "vision_attn/attention/kernels.py",
    *("examples/*.md", "examples/*.py", "examples/*/*.png", "examples/results/*.json", "examples/notebooks/*.ipynb"),
    "benchmarks/*.py",
    *("weights/*.md", "weights/*/*.md", "weights/*/*.png"),
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for pattern in SHOWN:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Two columns of code, which are wider than a page of the site, come one below the other."""
    return re.sub(
        r"<table>\n<tr><th>(.*)</th><th>(.*)</th></tr>\n<tr><td>(.*?)</td><td>(.*?)</td></tr>\n</table>",
        r"**\1**\n\3\n**\2**\n\4",
        markdown,
        flags=re.DOTALL,
    )

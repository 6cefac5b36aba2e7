"""Metadata of the distributions: PyPI shows the README, whose relative links lead to the repository in project.urls."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


def link_to(repository: str, version: str, text: str) -> str:
    """Return a page with absolute links: pages and pictures of the tag of this version, and the badge of a workflow."""

    def absolute(match: re.Match[str]) -> str:
        before, target = match.groups()
        if target.startswith("../../"):  # on GitHub, relative to blob/main
            return f"{before}{repository}/{target.removeprefix('../../')}"
        kind = "raw" if re.search(r"\.(png|svg)$", target) else "blob"
        return f"{before}{repository}/{kind}/v{version}/{target}"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)  # every second part is code
    parts[::2] = [re.sub(r'(\]\(|src=")(?!https?:|#)([^)"]+)', absolute, part) for part in parts[::2]]
    return "".join(parts)


class ReadmeHook(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        root = Path(self.root)
        version = re.search(r'"(.*)"', (root / "vision_attn" / "version.py").read_text().split("__version__")[1])[1]
        repository, text = metadata["urls"]["Repository"], (root / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": link_to(repository, version, text)}

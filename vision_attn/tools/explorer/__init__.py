"""The explorer: what a network attends to, as one page of HTML."""

from vision_attn.tools.explorer.report import explore

__all__ = ["explore"]

"""Interactive HTML page with the attention maps of a network."""

from vision_attn.tools.explorer.report import explore

__all__ = ["explore"]

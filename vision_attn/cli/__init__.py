"""The command line, ``vision-attn``: each command is one function of the library, each flag one of its settings."""

from vision_attn.cli.failures import exit_code, explain
from vision_attn.cli.flags import given
from vision_attn.cli.program import main, parser

__all__ = ["exit_code", "explain", "given", "main", "parser"]

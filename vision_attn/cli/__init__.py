"""The command line, ``vision-attn``: each command is one function of the library, each flag one of its settings."""

from vision_attn.cli.failures import run_program
from vision_attn.cli.flags import given
from vision_attn.cli.program import main, parser

__all__ = ["given", "main", "parser", "run_program"]

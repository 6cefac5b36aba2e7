"""What is said of a file that does not get in."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["CheckpointError", "shorten"]


class CheckpointError(RuntimeError):
    """A file cannot be read as a checkpoint, or does not fit the model; the model is as it was."""


def shorten(keys: Iterable[str], limit: int = 6) -> str:
    """The first keys, and how many more there are."""
    keys = tuple(keys)
    shown = ", ".join(keys[:limit])
    return f"{shown}, … ({len(keys) - limit} more)" if len(keys) > limit else shown

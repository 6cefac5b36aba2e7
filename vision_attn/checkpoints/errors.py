"""What is said of a file that does not get in."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["CheckpointError", "shorten"]


class CheckpointError(RuntimeError):
    """A file cannot be read as a checkpoint, or does not fit the model; the model is as it was.

    >>> import tempfile, pathlib
    >>> from vision_attn.checkpoints import read_checkpoint
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "net.pth"
    >>> file.write_bytes(b"a part of it")
    12
    >>> read_checkpoint(file)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    vision_attn.checkpoints.errors.CheckpointError: ...net.pth is truncated or no checkpoint: fetch or save it again...
    """


def shorten(keys: Iterable[str], limit: int = 6) -> str:
    """The first keys, and how many more there are, as text.

    Args:
        keys: names.
        limit: how many are shown.

    >>> shorten(["conv1", "bn1", "layer1", "layer2"], limit=2)
    'conv1, bn1, … (2 more)'
    """
    keys = tuple(keys)
    shown = ", ".join(keys[:limit])
    return f"{shown}, … ({len(keys) - limit} more)" if len(keys) > limit else shown

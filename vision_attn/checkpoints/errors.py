"""What is said of a file that does not get in."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["CheckpointError", "escaped", "shorten"]


class CheckpointError(RuntimeError):
    """A file cannot be read as a checkpoint, or does not fit the model; the model is as it was.

    Args:
        *lines: of the message, in which what a file says of itself is escaped.

    >>> import tempfile, pathlib
    >>> from vision_attn.checkpoints import read_checkpoint
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "net.pth"
    >>> file.write_bytes(b"a part of it")
    12
    >>> read_checkpoint(file)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    vision_attn.checkpoints.errors.CheckpointError: ...net.pth is truncated or no checkpoint: fetch or save it again...
    """

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(map(escaped, lines)))


def escaped(text: object) -> str:
    r"""What a file says, or is called, without the characters that steer a terminal.

    >>> escaped("conv1\x1b[2J.weight")
    'conv1\\x1b[2J.weight'
    """
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in str(text))


def shorten(keys: Iterable[str], limit: int = 6) -> str:
    """The first keys, escaped, and how many more there are, as text.

    >>> shorten(["conv1", "bn1", "layer1", "layer2"], limit=2)
    'conv1, bn1, … (2 more)'
    """
    keys = tuple(keys)
    shown = ", ".join(map(escaped, keys[:limit]))
    return f"{shown}, … ({len(keys) - limit} more)" if len(keys) > limit else shown

"""The errors of the library, by what a caller would do about them; a wrong argument is a plain ``ValueError``."""

from __future__ import annotations

from vision_attn.text import escaped


class VisionAttnError(Exception):
    """The base of this library's errors; a wrong argument is a plain ``ValueError``.

    The kinds are in ``vision_attn.errors``: :class:`SiteError`, :class:`CheckpointError`, :class:`ConversionError`,
    and ``DataError``, ``TrainingError`` and ``ExportError`` of the commands.

    >>> issubclass(SiteError, VisionAttnError), issubclass(SiteError, ValueError)
    (True, True)
    """


class SiteError(VisionAttnError, ValueError):
    """A site does not exist or cannot take a block; the model is as it was.

    >>> import torch
    >>> from vision_attn import insert_
    >>> model = torch.nn.Sequential(torch.nn.ReLU())
    >>> insert_(model, names="layer4", example_input=(1, 3, 16, 16))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    vision_attn.errors.SiteError: names: 'layer4' matches no module; ...
    """


class CheckpointError(VisionAttnError, RuntimeError):
    """A file cannot be read as a checkpoint, or does not fit the model; the model is as it was.

    Its arguments are the lines of the message; text from the file is escaped.

    >>> import tempfile, pathlib
    >>> from vision_attn.networks.safe import read_checkpoint
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "net.pth"
    >>> file.write_bytes(b"a part of it")
    12
    >>> read_checkpoint(file)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    vision_attn.errors.CheckpointError: ...net.pth is truncated or not a checkpoint. Download or save it again...
    """

    def __str__(self) -> str:
        return "\n".join(map(escaped, self.args))


class ConversionError(VisionAttnError, RuntimeError):
    """The converted layer does not compute the same as the original, or this cannot be checked.

    >>> from torch import nn
    >>> from vision_attn.networks.convert import from_layer
    >>> class Halved(nn.MultiheadAttention):
    ...     def forward(self, *args, **kwargs):
    ...         return super().forward(*args, **kwargs)[0] / 2, None
    >>> from_layer(Halved(8, 2))  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    ConversionError: the converted Halved has different outputs
    """


class DataError(VisionAttnError, RuntimeError):
    """The data is missing, damaged or does not fit."""


class TrainingError(VisionAttnError, RuntimeError):
    """Training cannot continue; files that were saved before are intact."""


class ExportError(VisionAttnError, RuntimeError):
    """The network cannot be exported, or the exported network gives another output; no file is left behind."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM stopped a run after it was saved; like ``KeyboardInterrupt`` it is no ``Exception``."""

    def __init__(self, signal: int, message: str) -> None:
        super().__init__(signal, message)
        self.signal = signal

    def __str__(self) -> str:
        return str(self.args[1])

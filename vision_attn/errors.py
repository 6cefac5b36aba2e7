"""Exceptions of the library. An invalid argument raises a plain ``ValueError``.

:class:`VisionAttnError` is the base class of :class:`SiteError`, :class:`CheckpointError`, :class:`ConversionError`,
:class:`DataError`, :class:`TrainingError` and :class:`ExportError`. :class:`Interrupted` is a ``KeyboardInterrupt``.
"""

from vision_attn.text import escape_control_characters

__all__ = [
    "CheckpointError", "ConversionError", "DataError", "ExportError", "Interrupted", "SiteError", "TrainingError",
    "VisionAttnError",
]  # fmt: skip


class VisionAttnError(Exception):
    """Base class of the exceptions in this library. An invalid argument raises a plain ``ValueError``.

    >>> issubclass(SiteError, VisionAttnError), issubclass(SiteError, ValueError)
    (True, True)
    """


class SiteError(VisionAttnError, ValueError):
    """Raised if a site does not exist or cannot take a block. The model is unchanged.

    >>> import torch
    >>> from vision_attn import insert_
    >>> model = torch.nn.Sequential(torch.nn.ReLU())
    >>> insert_(model, names="layer4", example_input=(1, 3, 16, 16))
    Traceback (most recent call last):
    vision_attn.errors.SiteError: names: no module matches 'layer4'. Top-level modules: 0
    """


class CheckpointError(VisionAttnError, RuntimeError):
    """Raised if a file cannot be read as a checkpoint, or does not match the model. The model is unchanged.

    The arguments are the lines of the message. Control characters in text from the file are escaped.

    >>> import tempfile, pathlib
    >>> from vision_attn.networks.safe import read_file
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "net.pth"
    >>> file.write_bytes(b"a part of it")
    12
    >>> read_file(file)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    vision_attn.errors.CheckpointError: ...net.pth is truncated or not a checkpoint. Download or save it again...
    """

    def __str__(self) -> str:
        return "\n".join(map(escape_control_characters, self.args))


class ConversionError(VisionAttnError, RuntimeError):
    """Raised if the outputs of a converted layer differ from the original layer, or cannot be compared.

    >>> from torch import nn
    >>> from vision_attn.convert import from_layer
    >>> class Halved(nn.MultiheadAttention):
    ...     def forward(self, *args, **kwargs):
    ...         return super().forward(*args, **kwargs)[0] / 2, None
    >>> from_layer(Halved(8, 2))  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    ConversionError: the converted Halved has different outputs
    """


class DataError(VisionAttnError, RuntimeError):
    """Raised if data is missing, damaged or does not match the model."""


class TrainingError(VisionAttnError, RuntimeError):
    """Raised if training cannot continue. Files saved earlier are intact."""


class ExportError(VisionAttnError, RuntimeError):
    """Raised if a network cannot be exported, or if the exported network has different outputs. No file is kept."""


class Interrupted(KeyboardInterrupt):
    """Raised after Ctrl-C or SIGTERM, once the run is saved; like ``KeyboardInterrupt``, not an ``Exception``."""

    def __init__(self, signal: int, message: str) -> None:
        super().__init__(signal, message)
        self.signal = signal

    def __str__(self) -> str:
        return str(self.args[1])

"""From a classifier to a file: written aside, read back, compared with the network, and only then put in its place."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

from vision_attn.checks import check_type
from vision_attn.errors import ExportError
from vision_attn.networks.models.folder import FILES
from vision_attn.networks.safe import write_atomically, written_folder
from vision_attn.text import shorten
from vision_attn.tools.export.classifier import Classifier
from vision_attn.tools.export.formats import FORMATS, Format

__all__ = ["ExportReport", "export_classifier"]

#: Difference from the network's logits that rounding explains, as a share of the largest of them.
TOLERANCE = 1e-4
#: Images in the batches that are compared: other numbers than the one that a graph is traced with.
BATCHES = (1, 3)


@dataclass(frozen=True)
class ExportReport:
    """What was written, and how it compares; prints as a summary."""

    #: the file or folder
    path: Path
    #: its form
    format: str
    #: of an image that it takes: channels, rows, columns
    input_size: tuple[int, int, int]
    #: whether it normalises the pixels itself
    normalize: bool
    #: how many classes it has
    classes: int
    #: bytes on disk
    size: int
    #: largest difference of a logit from the network's
    difference: float
    #: the largest of these logits
    largest: float

    def __str__(self) -> str:
        pixels = "of pixels in 0…1, normalised inside" if self.normalize else "normalised by mean and std before"
        return (
            f"{self.path}: {self.format}, {self.size / 1e6:.2f} MB, {self.classes} classes; takes images "
            f"(batch, {', '.join(map(str, self.input_size))}) {pixels}\n"
            f"read back and run on {sum(BATCHES)} random images: the largest difference of a logit from the network's "
            f"is {self.difference:.1e}, of logits up to {self.largest:.3g}"
        )


def export_classifier(
    classifier: Classifier, output: str | Path, *, format: str | None = None, normalize: bool | None = None
) -> ExportReport:
    """Write a network in a form that others run, and prove that it computes the same.

    What is written is read back, run on random images in batches of another size, and compared with the network,
    before it takes the place that was asked for. It holds float32 weights and, unless it is a folder, the
    classes and statistics as JSON in its metadata, under ``classifier``.

    >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 2))
    >>> classifier = Classifier(network, ("cat", "dog"), (3, 8, 8), mean=(0.5,) * 3, std=(0.25,) * 3)
    >>> report = export_classifier(classifier, Path(tempfile.mkdtemp()) / "network.pt2")
    >>> report.format, report.normalize, report.difference < 1e-5
    ('torch-export', True, True)
    """
    check_type("classifier", classifier, Classifier, "a Classifier")
    check_type("format", format, (str, type(None)), "a text, or None")
    output = Path(os.path.abspath(output))  # or the name of .. is none
    name = format_of(output, format)
    form = FORMATS[name]
    if normalize is not None and not form.graph:
        raise ValueError(f"normalize applies to onnx and torch-export, which are graphs; got {name}, which is none")
    normalize = form.graph if normalize is None else normalize
    refuse_something_else(output, form)
    for package in form.packages:
        import_module(package)
    classifier = classifier.to_export()

    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as aside:
        path = Path(aside) / f"network{form.ending}"
        difference, largest = write_and_compare(form, classifier, normalize, path)
        size = sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else (path,)))
        if path.is_dir():
            with written_folder(output) as new:
                shutil.copytree(path, new, dirs_exist_ok=True)
        else:
            write_atomically(output, path.read_bytes())
    return ExportReport(
        output, name, classifier.input_size, normalize, len(classifier.classes), size, difference, largest
    )


def format_of(output: Path, format: str | None) -> str:
    """The format that is named, or that the ending says; they must not say two."""
    by_ending = next((name for name, form in FORMATS.items() if form.ending == output.suffix.lower()), None)
    if format not in (None, *FORMATS) or (format is None and by_ending is None):
        endings = ", ".join(form.ending for form in FORMATS.values() if form.ending)
        raise ValueError(
            f"output must end in {endings}, or in nothing for a folder, or format be one of "
            f"{', '.join(FORMATS)}; got {output.name!r} and {format!r}"
        )
    if format is not None and output.suffix and by_ending not in (None, format):
        raise ValueError(f"format: {output.name!r} has the ending of {by_ending}; got {format!r}: give one of the two")
    return format or str(by_ending)


def refuse_something_else(output: Path, form: Format) -> None:
    """Refuse to write over what is no export."""
    if output.exists() and output.is_dir() == bool(form.ending):
        raise ValueError(
            f"output: {output} is a {'folder' if output.is_dir() else 'file'}, and what is written a "
            f"{'file' if form.ending else 'folder'}: choose another --output"
        )
    others = sorted({path.name for path in output.iterdir()} - FILES) if output.is_dir() else []
    if others:
        raise ValueError(f"output: {output} holds more than an export ({shorten(others)}): choose another --output")


def write_and_compare(form: Format, classifier: Classifier, normalize: bool, path: Path) -> tuple[float, float]:
    """Write it, read it back, and compare it with the network: the largest difference, and the largest logit."""
    generator = torch.Generator().manual_seed(0)
    pixels = [torch.rand(count, *classifier.input_size, generator=generator) for count in BATCHES]
    images = [classifier.normalization(batch) for batch in pixels]
    with torch.no_grad():
        expected = torch.cat([classifier.model(batch) for batch in images])
    if expected.shape[1:] != (len(classifier.classes),):
        given, named = tuple(expected.shape[1:]), len(classifier.classes)
        raise ValueError(f"classes: the network gives {given} numbers for an image, and {named} classes are named")
    try:
        with warnings.catch_warnings(), torch.no_grad():
            # Of the exporters, about themselves.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)
            form.write(classifier, normalize, path)
            run = form.reopen(classifier, path)
            found = torch.cat([run(batch) for batch in (pixels if normalize else images)])
    except Exception as error:
        if not form.graph or isinstance(error, OSError):
            raise
        # torch's exporters, and what runs their graphs, may fail in any way.
        raise ExportError(f"the network cannot be exported ({type(error).__name__}: {error})") from error
    if found.shape != expected.shape:
        raise ExportError(f"what was written gives {tuple(found.shape)}, the network {tuple(expected.shape)}")
    difference, largest = float((found - expected).abs().max()), float(expected.abs().max())
    if not difference <= TOLERANCE * largest:  # also where it is no number
        raise ExportError(
            f"what was written computes something else: a logit differs by {difference:.1e} from the network's, which "
            f"are up to {largest:.3g}; nothing is left of it"
        )
    return difference, largest

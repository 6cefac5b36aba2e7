"""Export of networks to other runtimes, with a comparison of the outputs before a file is saved."""

from __future__ import annotations

import copy
import json
import logging
import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.transforms.v2 import Normalize

from vision_attn.attention.blocks import set_impl_
from vision_attn.errors import ExportError
from vision_attn.networks.checkpoints.folder import get_classes
from vision_attn.networks.insertion import inserted_blocks
from vision_attn.networks.inspection.example import make_example
from vision_attn.networks.inspection.network import unwrap_model
from vision_attn.networks.safe import check_writable, write_atomically
from vision_attn.networks.safe.write import name_errors, temporary_folder
from vision_attn.text import Report
from vision_attn.tools.export.formats import FORMATS, Axis, Format, export_program
from vision_attn.version import __version__

#: Largest allowed difference, which is attributed to rounding, as a fraction of the largest output.
TOLERANCE = 1e-4
#: Default crop and interpolation of images, in the format of timm.
CROP = {"crop_pct": 1.0, "crop_mode": "center", "interpolation": "bilinear"}
#: Implementations of attention to export. The second is used if a runtime does not support the first.
EXPORT_IMPLS = ("sdpa", "bmm")
#: Batch sizes for the comparison, and pixels added to the height and width if they are dynamic. Not all resulting sizes
#: are divisible by window sizes, so that padding is tested.
BATCHES, ADDED = (1, 3), ((0, 0), (9, 22), (31, 0))


@dataclass(frozen=True, repr=False)
class ExportReport(Report):
    """Exported file and its comparison with the network; prints as a summary."""

    file: Path
    #: channels, height and width of an input image
    input_size: tuple[int, int, int]
    #: range of the pixels that the file expects
    pixels: str
    #: dynamic dimensions: "batch" and "size"
    dynamic: tuple[Axis, ...]
    #: largest difference from the output of the network, and largest output
    difference: float
    largest: float
    #: number of compared images
    images: int
    #: size of the file in bytes
    size: int
    #: workarounds and accuracies
    notes: tuple[str, ...] = ()

    def parts(self) -> list[str]:
        channels, height, width = self.input_size
        shape = f"batch, {channels}, " if "batch" in self.dynamic else f"1, {channels}, "
        shape += f"height, width), traced at {height}×{width}" if "size" in self.dynamic else f"{height}, {width})"
        return [
            f"{self.file}: {self.size / 1e6:.2f} MB, input ({shape}, pixels in {self.pixels}",
            f"largest difference from the network on {self.images} random images: {self.difference:.1e}, for outputs "
            f"up to {self.largest:.3g}",
            *self.notes,
        ]


def export_model(
    model: nn.Module,
    output: str | Path,
    *,
    example_input: Tensor | Sequence[int] | None = None,
    dynamic: Sequence[Axis] | None = None,
    int8: str | Path | None = None,
    normalize: bool | None = None,
) -> ExportReport:
    """Export a network, and compare the output of the file with the output of the network.

    The file contains float32 weights, and JSON text with the classes, input size and image statistics as the metadata
    entry ``classifier``. Before the file is saved, it is run on random images by its runtime and compared with the
    network.

    Args:
        model: network for images ``(b, c, h, w)`` that returns a tensor. The image size and statistics are read from
            ``model.pretrained_cfg`` of timm and :func:`vision_attn.load_model`, and the classes from ``model.classes``.
        output: file to write. The suffix selects the format: ``.onnx``, ``.pt2`` (``torch.export``), ``.aoti.pt2``
            (AOTInductor), ``.tflite`` (LiteRT) or ``.pte`` (ExecuTorch). OpenVINO and TensorRT read ``.onnx`` files.
        example_input: images or their shape, such as ``(1, 3, 96, 96)``, for another image size, and for networks
            without ``pretrained_cfg``.
        dynamic: dimensions that may vary between calls: ``"batch"`` and ``"size"``. The default is the batch, and no
            dimension for LiteRT and ExecuTorch, whose files process one image at a time. With a dynamic batch,
            ExecuTorch allocates memory for the largest batch, which is 8.
        int8: folder of labeled images, ``train/CLASS/IMAGE`` and ``val/CLASS/IMAGE``. Weights and activations are
            quantized to 8 bits with the training images, and the accuracy on the validation images is reported.
        normalize: include the normalization of pixels in 0…1 in the file; by default, if the model has statistics.

    Raises:
        ValueError: the suffix of ``output`` is unknown, its format does not support ``dynamic`` or ``int8``, or the
            image size is unknown.
        ImportError: a package of the runtime is not installed.
        ExportError: the network cannot be exported, or the output of the file differs. An existing file is kept.
        OSError: the file cannot be written. This is checked before the export.

    >>> import tempfile
    >>> network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2))
    >>> report = export_model(network, Path(tempfile.mkdtemp()) / "network.pt2", example_input=(1, 3, 8, 8))
    >>> report.difference < 1e-5
    True
    """
    output, plain = Path(output), unwrap_model(model)
    suffix = next((suffix for suffix in FORMATS if output.name.lower().endswith(suffix)), None)
    if suffix is None:
        raise ValueError(f"output must end in {', '.join(FORMATS)}, got {output.name!r}")
    form = FORMATS[suffix]
    if fixed := [axis for axis in dynamic or () if axis not in form.dynamic]:
        raise ValueError(f"dynamic: {form.runtime} does not support a dynamic {fixed[0]}. Remove {fixed[0]!r}")
    if int8 is not None and suffix != ".onnx":
        raise ValueError(f"int8 requires an .onnx file, which OpenVINO also supports, got {output.name!r}")
    axes = form.default if dynamic is None else tuple(dynamic)
    metadata = make_metadata(plain, example_input, normalize)
    form.check_packages()
    network = copy.deepcopy(plain).cpu().float().eval()
    if metadata["pixels"] == "0…1":
        network = nn.Sequential(Normalize(list(metadata["mean"]), list(metadata["std"])), network).eval()
    output.parent.mkdir(parents=True, exist_ok=True)
    check_writable(output)
    if int8 is not None:
        from vision_attn.tools.export.int8 import load_images, quantize

        calibration, _ = load_images(Path(int8), metadata, train=True)
        labeled = load_images(Path(int8), metadata, train=False)
    with name_errors(output), temporary_folder(output.parent) as folder:
        written = folder / f"network{suffix}"
        comparison, notes = export_and_compare(network, form, written, axes, metadata)
        if int8 is not None:
            with quiet():
                notes.append(quantize(written, calibration, *labeled))
        content = written.read_bytes()
        write_atomically(output, content)
    shape, pixels = metadata["input_size"], metadata["pixels"]
    return ExportReport(output, shape, pixels, axes, *comparison, len(content), tuple(notes))


def make_metadata(
    model: nn.Module, example_input: Tensor | Sequence[int] | None, normalize: bool | None
) -> dict[str, Any]:
    """Return the metadata of the file: image size, statistics and crop, classes and blocks."""
    config = getattr(model, "pretrained_cfg", None) or {}
    if example_input is None and "input_size" not in config:
        raise ValueError("example_input is required for a model without pretrained_cfg, such as (1, 3, 224, 224)")
    _, *input_size = make_example(model, example_input).shape
    if len(input_size) != 3:
        raise ValueError(f"example_input must be images (b, c, h, w) or their shape, got (b, {input_size})")
    if normalize and "mean" not in config:
        raise ValueError("normalize requires model.pretrained_cfg = {'mean': (…), 'std': (…)}")
    plain = "0…1, then (pixels - mean) / std" if "mean" in config else "the range of the network"
    return {
        "classes": list(get_classes(model)),
        "input_size": tuple(input_size),
        **{name: config.get(name) for name in ("mean", "std", "architecture")},
        **{name: config.get(name, default) for name, default in CROP.items()},
        "pixels": plain if normalize is False or "mean" not in config else "0…1",
        "inserted": list(inserted_blocks(model)),
        "library": f"vision_attn {__version__}",
    }


def export_and_compare(
    network: nn.Module, form: Format, file: Path, axes: Sequence[Axis], metadata: Mapping[str, Any]
) -> tuple[tuple[float, float, int], list[str]]:
    """Write a file with the first implementation of attention for which the runtime reproduces the network.

    Return the largest difference, the largest output, the number of images, and notes on workarounds.
    """
    channels, height, width = metadata["input_size"]
    generator = torch.Generator().manual_seed(0)
    images = [
        torch.rand(count, channels, height + rows, width + columns, generator=generator)
        for count in (BATCHES if "batch" in axes else (1, 1))
        for rows, columns in (ADDED if "size" in axes else ADDED[:1])
    ]
    set_impl_(network, EXPORT_IMPLS[0])
    try:
        with torch.no_grad():
            expected = [network(batch) for batch in images]
        largest = torch.stack([logits.abs().max() for logits in expected]).max().item()
    except Exception as error:  # networks raise many types of errors
        sizes = ", ".join(dict.fromkeys("×".join(map(str, batch.shape[1:])) for batch in images))
        what = f"the network cannot process images of {sizes} ({describe(error)})"
        raise ExportError(f"{what}. No file was written") from error
    if not math.isfinite(largest):
        raise ExportError("the output of the network is not finite: training may have diverged. No file was written")
    failures: list[str] = []
    for impl in EXPORT_IMPLS:
        if not set_impl_(network, impl) and failures:  # no block has another implementation
            break
        try:
            with quiet(), torch.no_grad():
                example = torch.zeros(2 if "batch" in axes else 1, *metadata["input_size"])
                program = export_program(network, example, axes, form.max_batch)
                form.write(program, file, json.dumps(metadata, ensure_ascii=False))
                run = form.open(file)
                difference = max(map(compare, map(run, images), expected))
        except (ImportError, OSError):
            raise
        except Exception as error:  # exporters and runtimes raise many types of errors
            failures.append(f"cannot be exported for {form.runtime} ({describe(error)})")
            continue
        if difference <= TOLERANCE * largest:
            instead = f"attention is exported as impl={impl!r}, because with {EXPORT_IMPLS[0]!r} the network"
            return (difference, largest, sum(map(len, images))), [f"{instead} {failure}" for failure in failures]
        outputs = f"the largest difference is {difference:.1e}, for outputs up to {largest:.3g}"
        failures.append(f"has a different output in {form.runtime}: {outputs}")
    both = f"; with impl={EXPORT_IMPLS[1]!r} it ".join(dict.fromkeys(failures))
    raise ExportError(f"the network {both}. No file was written")


def describe(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the logs and warnings of exporters, and print their progress to standard error."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stdout(sys.stderr):
            yield
    finally:
        logging.disable(disabled)


def compare(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, or infinity if the shapes differ or an output is NaN."""
    if found.shape != expected.shape:
        return torch.inf
    return float((found - expected).abs().nan_to_num(nan=torch.inf).max())

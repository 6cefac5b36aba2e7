"""Export of networks as files for other runtimes, each run and compared with the network before it is kept."""

from __future__ import annotations

import copy
import json
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.transforms.v2 import Normalize

from vision_attn.attention.blocks import set_impl_
from vision_attn.errors import ExportError
from vision_attn.networks.insertion import inserted_blocks, plain_network
from vision_attn.networks.models.registry import get_model_cfg
from vision_attn.networks.safe import check_writable, write_atomically
from vision_attn.networks.safe.write import TEMPORARY
from vision_attn.tools.export.formats import DIMS, FORMATS, Axis, Format, export_program
from vision_attn.version import __version__

#: Difference from the network's output that rounding explains, as a fraction of its largest value.
TOLERANCE = 1e-4
#: Crop and interpolation of images by default, in timm's words.
CROP = {"crop_pct": 1.0, "crop_mode": "center", "interpolation": "bilinear"}
#: Implementations of attention to export, in this order: a runtime may not take the first.
IMPLS = ("sdpa", "bmm")
#: Sizes of the batches that are compared, and pixels that are added to the height and width if these are dynamic. The
#: sizes are odd, because windows are padded there.
BATCHES, ADDED = (1, 3), ((0, 0), (9, 22), (31, 0))


@dataclass(frozen=True)
class ExportReport:
    """The exported file, and how it compares with the network; prints as a summary."""

    path: Path
    #: channels, rows and columns of an input image
    input_size: tuple[int, int, int]
    #: True if the file normalizes pixels
    normalize: bool
    #: dimensions that vary: "batch" and "size"
    dynamic: tuple[Axis, ...]
    #: largest difference of an output from the network's, and the largest output
    difference: float
    largest: float
    #: number of images that were compared
    images: int
    #: bytes of all files
    size: int
    #: workarounds and accuracies
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        pixels = "of pixels in 0…1, normalized inside" if self.normalize else "normalized by mean and std before"
        channels, height, width = self.input_size
        shape = f"batch, {channels}, " if "batch" in self.dynamic else f"1, {channels}, "
        shape += f"height, width), traced at {height}×{width}," if "size" in self.dynamic else f"{height}, {width})"
        lines = [
            f"{self.path}: {self.size / 1e6:.2f} MB; takes images ({shape} {pixels}",
            f"read back and run on {self.images} random images: the largest difference from the network's output is "
            f"{self.difference:.1e}, of values up to {self.largest:.3g}",
        ]
        return "\n".join([*lines, *self.notes])


def export_model(
    model: nn.Module,
    output: str | Path,
    *,
    input_size: int | Sequence[int] | None = None,
    dynamic: Sequence[Axis] | None = None,
    int8: str | Path | None = None,
    normalize: bool = True,
) -> ExportReport:
    """Export a network, and compare the outputs of the file with the network's.

    A file holds float32 weights, and as metadata, under ``classifier``, JSON text with the classes, and the size and
    statistics of images. It is opened by its runtime, run on random images and compared with the network before it
    replaces an older file.

    Args:
        model: a classifier that takes images ``(b, c, h, w)``, with ``pretrained_cfg`` and, if they are known,
            ``classes``, such as :func:`vision_attn.load_model` returns.
        output: file to write. Its suffix is the format: ``.onnx``, ``.pt2`` (``torch.export``), ``.aoti.pt2``
            (AOTInductor), ``.xml`` (OpenVINO), ``.tflite`` (LiteRT) or ``.pte`` (ExecuTorch).
        input_size: side of the images, or their height and width, in pixels; the model's by default.
        dynamic: what may vary between calls, of ``"batch"`` and ``"size"``. By default the batch, and nothing for
            LiteRT and ExecuTorch: the file takes one image at a time. ExecuTorch allocates memory for the largest
            batch, which is 8.
        int8: folder of labeled images, in ``train/CLASS/IMAGE`` and ``val/CLASS/IMAGE``, to quantize weights and
            activations to 8 bits with the training images, and to report the accuracy on the others before and after.
        normalize: let the file take pixels in 0…1 and normalize them.

    Raises:
        ValueError: ``output`` has another suffix, or its format cannot do what ``dynamic`` or ``int8`` requests.
        ImportError: a package of the runtime is not installed.
        ExportError: the network cannot be exported, or the file computes something else. It is not kept, and a file
            that was there before stays.
        OSError: the file cannot be written, which is checked before the network is exported.

    >>> import tempfile
    >>> network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2))
    >>> network.classes = ("cat", "dog")
    >>> network.pretrained_cfg = {"input_size": (3, 8, 8), "mean": (0.5,) * 3, "std": (0.25,) * 3}
    >>> report = export_model(network, Path(tempfile.mkdtemp()) / "network.pt2")
    >>> report.difference < 1e-5
    True
    """
    output, plain = Path(output).absolute(), plain_network(model)
    suffix = next((suffix for suffix in FORMATS if output.name.lower().endswith(suffix)), None)
    if suffix is None:
        raise ValueError(f"output must end in {', '.join(FORMATS)}; got {output.name!r}")
    form = FORMATS[suffix]
    if isinstance(dynamic, str) or set(dynamic or ()) - DIMS.keys():
        raise ValueError(f"dynamic must be a sequence of 'batch' and 'size'; got {dynamic!r}")
    try:
        config = get_model_cfg(plain)
    except KeyError:
        needed = "pretrained_cfg = {'input_size': (3, h, w), 'mean': (…), 'std': (…)}"
        raise ValueError(f"model must have a configuration of its images: set model.{needed}") from None
    if fixed := [axis for axis in dynamic or () if axis not in form.dynamic]:
        raise ValueError(f"dynamic: {form.runtime} files have a fixed {fixed[0]}: leave out {fixed[0]!r}")
    if int8 is not None and suffix != ".onnx":
        raise ValueError(f"int8: only .onnx files are quantized, which OpenVINO also runs; got {output.name!r}")
    open_batch: tuple[Axis, ...] = ("batch",) if "batch" in form.dynamic and form.max_batch is None else ()
    axes = open_batch if dynamic is None else tuple(dynamic)
    given = config["input_size"][1:] if input_size is None else input_size
    sides = [*given] if isinstance(given, Sequence) else [given] * 2
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ValueError(f"input_size must be a side, or a height and a width, in pixels; got {input_size!r}")
    about: dict[str, Any] = {
        "classes": list(vars(plain).get("classes") or ()),
        "input_size": (config["input_size"][0], *sides),
        "mean": config["mean"],
        "std": config["std"],
        **{name: config.get(name, default) for name, default in CROP.items()},
        "pixels": "0…1" if normalize else "0…1, then (pixels - mean) / std",
        "architecture": config.get("architecture"),
        "inserted": list(inserted_blocks(plain)),
        "library": f"vision_attn {__version__}",
    }
    form.check_packages()
    network = copy.deepcopy(plain).cpu().float().eval()
    if normalize:
        network = nn.Sequential(Normalize(list(config["mean"]), list(config["std"])), network).eval()
    output.parent.mkdir(parents=True, exist_ok=True)
    # The weights come first: the graph is replaced when its weights are there.
    targets = {ending: output.with_suffix(ending) for ending in form.weights} | {suffix: output}
    for path in targets.values():
        check_writable(path)
    for path in targets.values():
        if path != output and path.exists() and not output.exists():
            raise FileExistsError(f"{path} would be overwritten and belongs to another file: choose another name")
    if int8 is not None:
        from vision_attn.tools.export.int8 import load_images, quantize

        calibration, _ = load_images(Path(int8), about, train=True)
        labeled = load_images(Path(int8), about, train=False)
    with TemporaryDirectory(prefix=TEMPORARY, dir=output.parent) as folder:
        written = Path(folder) / f"network{suffix}"
        comparison, notes = export_and_compare(network, form, written, axes, about)
        if int8 is not None:
            with quiet():
                notes.append(quantize(written, calibration, *labeled))
        for ending, path in targets.items():
            staged = Path(folder) / f"network{ending}"
            write_atomically(path, staged.read_bytes())
            staged.unlink()  # so that there is room for the next one
    size = sum(path.stat().st_size for path in targets.values())
    return ExportReport(output, about["input_size"], normalize, axes, *comparison, size, tuple(notes))


def export_and_compare(
    network: nn.Module, form: Format, path: Path, axes: Sequence[Axis], about: Mapping[str, Any]
) -> tuple[tuple[float, float, int], list[str]]:
    """Write a file with the first implementation of attention that the runtime computes as the network does.

    Return the largest difference of an output, the largest output and the number of images, and workarounds.
    """
    channels, height, width = about["input_size"]
    generator = torch.Generator().manual_seed(0)
    images = [
        torch.rand(count, channels, height + rows, width + columns, generator=generator)
        for count in (BATCHES if "batch" in axes else (1, 1))
        for rows, columns in (ADDED if "size" in axes else ADDED[:1])
    ]
    set_impl_(network, IMPLS[0])
    try:
        with torch.no_grad():
            expected = [network(batch) for batch in images]
        finite = all(logits.isfinite().all() for logits in expected)
    except Exception as error:  # of any network
        sizes = ", ".join(dict.fromkeys("×".join(map(str, batch.shape[1:])) for batch in images))
        raise ExportError(
            f"the network does not take images of {sizes} ({describe(error)}); no file was written"
        ) from error
    if not finite:
        raise ExportError("The output of the network is not finite: training may have diverged. No file was written.")
    largest = max(float(logits.abs().max()) for logits in expected)
    failures: list[str] = []
    for impl in IMPLS:
        if not set_impl_(network, impl) and failures:  # the network has no block that differs
            break
        try:
            with quiet(), torch.no_grad():
                example = torch.zeros(2 if "batch" in axes else 1, *about["input_size"])
                program = export_program(network, example, axes, form.max_batch)
                form.write(program, path, json.dumps(about, ensure_ascii=False))
                run = form.open(path)
                difference = max(map(compare, map(run, images), expected))
        except (ImportError, OSError):
            raise
        except Exception as error:  # torch's exporters, and what runs their graphs, may fail in any way
            failures.append(f"cannot be exported for {form.runtime} ({describe(error)})")
        else:
            if difference <= TOLERANCE * largest:
                notes = [
                    f"attention runs as impl={impl!r}, since with {IMPLS[0]!r} the network {why}" for why in failures
                ]
                return (difference, largest, sum(map(len, images))), notes
            failures.append(
                f"computes something else in {form.runtime}: an output differs by {difference:.1e} from the network's, "
                f"which are up to {largest:.3g}"
            )
    other = f"; with impl={IMPLS[1]!r} it {failures[1]}" if len(set(failures)) > 1 else ""
    raise ExportError(f"the network {failures[0]}{other}; no file was written")


def describe(error: Exception) -> str:
    """Return the type of an error, and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


@contextmanager
def quiet() -> Iterator[None]:
    """Silence exporters: they log graphs, warn about themselves, and print progress, which goes to standard error."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stdout(sys.stderr):
            yield
    finally:
        logging.disable(disabled)


def compare(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference; infinity where shapes differ or an output is not a number."""
    return (
        float((found - expected).abs().nan_to_num(nan=torch.inf).max()) if found.shape == expected.shape else torch.inf
    )

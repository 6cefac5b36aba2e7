"""Export a network for another runtime, and compare the outputs before the file is saved.

vision-attn export runs/train-1 --output flowers.onnx
python my_export.py runs/train-1 --output flowers.onnx        # a copy of this file with your changes
"""

import copy
import io
import json
import logging
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torchvision.transforms.v2 import Normalize

import vision_attn as va
from vision_attn import cli
from vision_attn.errors import ExportError
from vision_attn.recipes.runs import check_writable, load_run, unwrap, write_file
from vision_attn.recipes.settings import Export

#: Largest allowed difference, which is attributed to rounding, as a fraction of the largest output.
TOLERANCE = 1e-4
#: Entries of ``pretrained_cfg`` in the metadata of a file, with their defaults.
CONFIG: dict[str, Any] = {"mean": None, "std": None, "architecture": None, "crop_pct": 1.0, "crop_mode": "center",
                          "interpolation": "bilinear"}  # fmt: skip
#: Batch sizes for the comparison, and pixels added to the height and width if they are dynamic. Not all resulting sizes
#: are divisible by window sizes, so that padding is tested.
BATCHES, ADDED = (1, 3), ((0, 0), (9, 22), (31, 0))
#: Name of the metadata entry in a file: JSON text with classes, input size and statistics.
ENTRY = "classifier"
#: Dimensions that may be dynamic, with their names in a file.
DIMS = {"batch": {0: "batch"}, "size": {2: "height", 3: "width"}}

Axis = Literal["batch", "size"]
Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Format:
    """File format with functions to write and run it."""

    #: name of the runtime, for messages
    runtime: str
    #: packages required to write and run a file
    packages: tuple[str, ...]
    #: function that writes a program with JSON text as metadata
    write: Callable[[ExportedProgram, Path, str], None]
    #: function that opens a file and returns a function from images to outputs
    open: Callable[[Path], Run]


def export_program(network: nn.Module, images: Tensor, dynamic: Sequence[Axis]) -> ExportedProgram:
    """Trace a network; raise an error if a dynamic dimension becomes static."""
    dims: dict[int, Any] = {dim: Dim.DYNAMIC for axis in dynamic for dim in DIMS[axis]}
    return torch.export.export(network, (images,), dynamic_shapes=(dims,))


def write_onnx(program: ExportedProgram, path: Path, metadata: str) -> None:
    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["logits"]}
    dims = {**DIMS["batch"], **DIMS["size"]}  # names of the dynamic dimensions
    exported = torch.onnx.export(program, dynamo=True, verbose=False, dynamic_shapes=(dims,), **names)
    assert exported is not None
    exported.model.metadata_props[ENTRY] = metadata
    path.write_bytes(exported.model_proto.SerializeToString())


def open_onnx(path: Path) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised as well
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def write_program(program: ExportedProgram, path: Path, metadata: str) -> None:
    content = io.BytesIO()  # torch ends the process if it writes to a full disk
    torch.export.save(program, content, extra_files={ENTRY: metadata})
    path.write_bytes(content.getvalue())


def open_program(path: Path) -> Run:
    return torch.export.load(path).module()


#: File formats by suffix.
FORMATS = {
    ".onnx": Format("ONNX Runtime", ("onnxruntime", "onnxscript"), write_onnx, open_onnx),
    ".pt2": Format("torch.export", (), write_program, open_program),
}


@dataclass(frozen=True)
class ExportReport:
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

    def __str__(self) -> str:
        channels, height, width = self.input_size
        batch = "batch" if "batch" in self.dynamic else "1"
        shape = f"{batch}, {channels}, {'height, width' if 'size' in self.dynamic else f'{height}, {width}'}"
        found = f"{self.images} random images: {self.difference:.1e}, for outputs up to {self.largest:.3g}"
        file = f"{self.file}: {self.size / 1e6:.2f} MB, input ({shape}), pixels in {self.pixels}"
        return f"{file}\nlargest difference from the network on {found}"


def export_model(
    model: nn.Module,
    output: str | Path,
    *,
    example_input: Tensor | Sequence[int] | None = None,
    dynamic: Sequence[Axis] | None = None,
    normalize: bool | None = None,
) -> ExportReport:
    """Export a network, and compare the output of the file with the output of the network.

    The file contains float32 weights, and JSON text with the classes, input size and image statistics as the metadata
    entry ``classifier``. Before the file is saved, it is run on random images by its runtime and compared with the
    network. A copy of the network is exported, on which ``with`` blocks such as :func:`vision_attn.disabled` have no
    effect.

    Args:
        model: network for images ``(b, c, h, w)`` that returns a tensor. The image size and statistics are read from
            ``model.pretrained_cfg`` of timm and :func:`vision_attn.load_model`, and the classes from ``model.classes``.
        output: file to write. The suffix selects the format: ``.onnx``, which OpenVINO and TensorRT read too, or
            ``.pt2`` (``torch.export``), which the compilers of other runtimes read.
        example_input: images or their shape, such as ``(1, 3, 96, 96)``, for another image size, and for networks
            without ``pretrained_cfg``.
        dynamic: dimensions that may vary between calls: ``"batch"``, the default, and ``"size"``.
        normalize: include the normalization of pixels in 0…1 in the file; by default, if the model has statistics.

    Raises:
        ValueError: the suffix of ``output`` or a dimension in ``dynamic`` is unknown, or the image size is.
        ImportError: a package of the runtime is not installed.
        ExportError: the network cannot be exported, or the output of the file differs. An existing file is kept.
        OSError: the file cannot be written. This is checked before the export.

    >>> import tempfile
    >>> network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2))
    >>> report = export_model(network, Path(tempfile.mkdtemp()) / "network.pt2", example_input=(1, 3, 8, 8))
    >>> report.difference < 1e-5
    True
    >>> export_model(network, report.file, example_input=(1, 3, 8, 8), dynamic=()).images  # of a fixed batch size
    2
    """
    output, plain, axes = Path(output), unwrap(model), ("batch",) if dynamic is None else tuple(dynamic)
    if (form := FORMATS.get(output.suffix.lower())) is None:
        raise ValueError(f"output must end in {' or '.join(FORMATS)}, got {output.name!r}")
    if unknown := [axis for axis in axes if axis not in DIMS]:
        raise ValueError(f"dynamic must contain batch or size, got {unknown[0]!r}")
    metadata = make_metadata(plain, example_input, normalize)
    if missing := next((name for name in form.packages if find_spec(name) is None), None):
        remedy = f"Install it: {cli.INSTALL.format('export')}"
        raise ModuleNotFoundError(f"{form.runtime} requires the package {missing}. {remedy}", name=missing)
    network = copy.deepcopy(plain).cpu().float().eval()
    if metadata["pixels"] == "0…1":
        network = nn.Sequential(Normalize(list(metadata["mean"]), list(metadata["std"])), network).eval()
    output.parent.mkdir(parents=True, exist_ok=True)
    check_writable(output)
    try:
        with tempfile.TemporaryDirectory(prefix=".vision_attn-", dir=output.parent) as folder:
            written = Path(folder, output.name)
            comparison = export_and_compare(network, form, written, axes, metadata)
            content = written.read_bytes()
        write_file(output, content)
    except OSError as error:  # can name a temporary file
        raise OSError(error.errno, error.strerror or str(error), str(output)) from error
    shape, pixels = metadata["input_size"], metadata["pixels"]
    return ExportReport(output, shape, pixels, axes, *comparison, len(content))


def make_metadata(model: nn.Module, example_input: Any, normalize: bool | None) -> dict[str, Any]:
    """Return the metadata of the file: image size, statistics and crop, classes and blocks."""
    config = getattr(model, "pretrained_cfg", None) or {}
    if example_input is None and "input_size" not in config:
        raise ValueError("example_input is required for a model without pretrained_cfg, such as (1, 3, 224, 224)")
    shape = tuple(getattr(example_input, "shape", example_input) or (1, *config["input_size"]))
    if len(shape) != 4:
        raise ValueError(f"example_input must be images (b, c, h, w) or their shape, got {shape}")
    if normalize and "mean" not in config:
        raise ValueError("normalize requires model.pretrained_cfg = {'mean': (…), 'std': (…)}")
    names = found if isinstance(found := getattr(model, "classes", ()), list | tuple) else ()
    plain = "0…1, then (pixels - mean) / std" if "mean" in config else "the range of the network"
    return {
        "classes": [*names] if all(isinstance(name, str) for name in names) else [], "input_size": shape[1:],
        **{name: config.get(name, default) for name, default in CONFIG.items()},
        "pixels": plain if normalize is False or "mean" not in config else "0…1",
        "inserted": list(va.inserted_blocks(model)), "library": f"vision_attn {va.__version__}",
    }  # fmt: skip


def export_and_compare(
    network: nn.Module, form: Format, file: Path, axes: Sequence[Axis], metadata: Mapping[str, Any]
) -> tuple[float, float, int]:
    """Write a file, run it, and return the largest difference, the largest output and the number of images."""
    channels, height, width = metadata["input_size"]
    generator = torch.Generator().manual_seed(0)
    counts, added = BATCHES if "batch" in axes else (1, 1), ADDED if "size" in axes else ADDED[:1]
    shapes = [(count, channels, height + rows, width + columns) for count in counts for rows, columns in added]
    images = [torch.rand(shape, generator=generator) for shape in shapes]
    with quiet():  # a network can have attention of another library only
        va.set_impl_(network, "auto")  # in graphs, torch's fused attention
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
    try:
        with quiet(), torch.no_grad():
            # An axis of length one becomes a constant of the graph, also in a feature map: larger images are traced.
            sides = [2 * side if "size" in axes else side for side in (height, width)]
            example = torch.zeros(2 if "batch" in axes else 1, channels, *sides)
            form.write(export_program(network, example, axes), file, json.dumps(metadata, ensure_ascii=False))
            pairs = [torch.stack(pair) for pair in zip(map(form.open(file), images), expected, strict=True)]
            difference = torch.stack([pair.diff(dim=0).abs().max() for pair in pairs]).max().item()
    except (ImportError, OSError):
        raise
    except Exception as error:  # exporters and runtimes raise many types of errors
        what = f"the network cannot be exported for {form.runtime} ({describe(error)})"
        raise ExportError(f"{what}. No file was written") from error
    if not difference <= TOLERANCE * largest:  # also if it is NaN
        found = f"the largest difference is {difference:.1e}, for outputs up to {largest:.3g}"
        raise ExportError(f"the network has a different output in {form.runtime}: {found}. No file was written")
    return difference, largest, sum(map(len, images))


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


def export(e: Export) -> ExportReport:
    """Export the network of a run."""
    model, size = load_run(e.run, e.block, "export RUN --output FILE"), e.img_size
    shape = (1, model.pretrained_cfg["input_size"][0], *(size * 2 if len(size) == 1 else size)) if size else None
    dynamic: Any = e.dynamic
    report = export_model(model, e.output, example_input=shape, dynamic=dynamic, normalize=e.normalize)
    cli.print_escaped(report)
    return report


if __name__ == "__main__":
    cli.run_script("export", export)

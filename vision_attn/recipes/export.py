"""Export a network for another runtime, and compare the outputs before the file is saved.

vision-attn export runs/train-1 --output flowers.onnx
python my_export.py runs/train-1 --output flowers.onnx        # a copy of this file with your changes
"""

from __future__ import annotations

import copy
import io
import json
import logging
import math
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from timm.data import create_transform
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torchvision.transforms.v2 import Normalize

import vision_attn as va
from vision_attn import cli
from vision_attn.errors import DataError, ExportError
from vision_attn.recipes.data import open_data
from vision_attn.recipes.runs import check_writable, load_run, unwrap, write_file
from vision_attn.recipes.settings import Export

#: Largest allowed difference, which is attributed to rounding, as a fraction of the largest output.
TOLERANCE = 1e-4
#: Default crop and interpolation of images, in the format of timm.
CROP = {"crop_pct": 1.0, "crop_mode": "center", "interpolation": "bilinear"}
#: Implementations of attention to export. The second is used if a runtime does not support the first.
EXPORT_IMPLS = ("sdpa", "bmm")
#: Batch sizes for the comparison, and pixels added to the height and width if they are dynamic. Not all resulting sizes
#: are divisible by window sizes, so that padding is tested.
BATCHES, ADDED = (1, 3), ((0, 0), (9, 22), (31, 0))
#: Numbers of images for calibration and evaluation, evenly spaced in the order of classes.
CALIBRATION, EVALUATION = 128, 1000
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
    #: dimensions that may be dynamic, and dimensions that are dynamic by default
    dynamic: tuple[Axis, ...] = ("batch", "size")
    default: tuple[Axis, ...] = ("batch",)
    #: largest batch, if the runtime allocates memory for it
    max_batch: int | None = None

    def check_packages(self) -> None:
        """Raise an error if a required package is not installed."""
        for name in self.packages:
            if find_spec(name) is None:
                remedy = f"Install it: {cli.INSTALL.format('export' if 'onnx' in name else 'runtimes')}"
                raise ModuleNotFoundError(f"{self.runtime} requires the package {name}. {remedy}", name=name)


def export_program(
    network: nn.Module, images: Tensor, dynamic: Sequence[Axis], max_batch: int | None = None
) -> ExportedProgram:
    """Trace a network; raise an error if a dynamic dimension becomes static."""
    dims: dict[int, Any] = {dim: Dim.DYNAMIC for axis in dynamic for dim in DIMS[axis]}
    if max_batch and 0 in dims:
        dims[0] = Dim.DYNAMIC(max=max_batch)
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

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def write_program(program: ExportedProgram, path: Path, metadata: str) -> None:
    content = io.BytesIO()  # torch ends the process if it writes to a full disk
    torch.export.save(program, content, extra_files={ENTRY: metadata})
    path.write_bytes(content.getvalue())


def open_program(path: Path) -> Run:
    return torch.export.load(path).module()


def write_compiled(program: ExportedProgram, path: Path, metadata: str) -> None:
    from torch._inductor import aoti_compile_and_package

    configs = {"aot_inductor.metadata": {ENTRY: metadata}}
    aoti_compile_and_package(program, package_path=str(path), inductor_configs=configs)


def open_compiled(path: Path) -> Run:
    from torch._inductor import aoti_load_package

    return aoti_load_package(str(path))


def write_tflite(program: ExportedProgram, path: Path, metadata: str) -> None:
    import litert_torch

    litert_torch.convert(program.module(), program.example_inputs[0]).export(str(path))
    with zipfile.ZipFile(path, "a") as archive:  # LiteRT stores associated files in a ZIP archive
        archive.writestr(f"{ENTRY}.json", metadata)


def open_tflite(path: Path) -> Run:
    from ai_edge_litert.interpreter import Interpreter

    runner = Interpreter(str(path)).get_signature_runner()
    (name,) = runner.get_input_details()
    return lambda images: torch.from_numpy(next(iter(runner(**{name: images.numpy()}).values())))


def write_executorch(program: ExportedProgram, path: Path, metadata: str) -> None:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    # The check of the program makes a dynamic batch static.
    unchecked = EdgeCompileConfig(_check_ir_validity=False)
    options = {"compile_config": unchecked, "constant_methods": {ENTRY: metadata}}
    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()], **options)
    path.write_bytes(lowered.to_executorch().buffer)


def open_executorch(path: Path) -> Run:
    from executorch.runtime import Runtime

    method = Runtime.get().load_program(path).load_method("forward")
    return lambda images: method.execute([images])[0]


#: File formats by suffix. The first matching suffix is used.
FORMATS = {
    ".onnx": Format("ONNX Runtime", ("onnxruntime", "onnxscript"), write_onnx, open_onnx),
    ".aoti.pt2": Format("AOTInductor", (), write_compiled, open_compiled),
    ".pt2": Format("torch.export", (), write_program, open_program),
    ".tflite": Format("LiteRT", ("litert_torch", "ai_edge_litert"), write_tflite, open_tflite, (), ()),
    ".pte": Format("ExecuTorch", ("executorch",), write_executorch, open_executorch, ("batch",), (), 8),
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
    #: workarounds and accuracies
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        channels, height, width = self.input_size
        shape = f"batch, {channels}, " if "batch" in self.dynamic else f"1, {channels}, "
        shape += f"height, width), traced at {height}×{width}" if "size" in self.dynamic else f"{height}, {width})"
        found = f"{self.images} random images: {self.difference:.1e}, for outputs up to {self.largest:.3g}"
        file = f"{self.file}: {self.size / 1e6:.2f} MB, input ({shape}, pixels in {self.pixels}"
        return "\n".join([file, f"largest difference from the network on {found}", *self.notes])


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
    output, plain = Path(output), unwrap(model)
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
    try:
        with tempfile.TemporaryDirectory(prefix=".vision_attn-", dir=output.parent) as folder:
            if int8 is not None:
                calibration, (images, labels) = (
                    load_labeled(Path(int8), metadata, train=half) for half in (True, False)
                )
            written = Path(folder) / f"network{suffix}"
            comparison, notes = export_and_compare(network, form, written, axes, metadata)
            if int8 is not None:
                with quiet():
                    notes.append(quantize(written, calibration[0], images, labels))
            content = written.read_bytes()
        write_file(output, content)
    except OSError as error:  # can name a temporary file
        raise OSError(error.errno, error.strerror or str(error), str(output)) from error
    shape, pixels = metadata["input_size"], metadata["pixels"]
    return ExportReport(output, shape, pixels, axes, *comparison, len(content), tuple(notes))


def make_metadata(
    model: nn.Module, example_input: Tensor | Sequence[int] | None, normalize: bool | None
) -> dict[str, Any]:
    """Return the metadata of the file: image size, statistics and crop, classes and blocks."""
    config = getattr(model, "pretrained_cfg", None) or {}
    if example_input is None and "input_size" not in config:
        raise ValueError("example_input is required for a model without pretrained_cfg, such as (1, 3, 224, 224)")
    _, *input_size = getattr(example_input, "shape", example_input) or (1, *config["input_size"])
    if len(input_size) != 3:
        got: Any = getattr(example_input, "shape", example_input)
        raise ValueError(f"example_input must be images (b, c, h, w) or their shape, got {tuple(got)}")
    if normalize and "mean" not in config:
        raise ValueError("normalize requires model.pretrained_cfg = {'mean': (…), 'std': (…)}")
    names = found if isinstance(found := getattr(model, "classes", ()), list | tuple) else ()
    plain = "0…1, then (pixels - mean) / std" if "mean" in config else "the range of the network"
    return {
        "classes": [*names] if all(isinstance(name, str) for name in names) else [], "input_size": tuple(input_size),
        **{name: config.get(name) for name in ("mean", "std", "architecture")},
        **{name: config.get(name, default) for name, default in CROP.items()},
        "pixels": plain if normalize is False or "mean" not in config else "0…1",
        "inserted": list(va.inserted_blocks(model)), "library": f"vision_attn {va.__version__}",
    }  # fmt: skip


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
    with quiet():  # a network can have attention of another library only
        va.set_impl_(network, EXPORT_IMPLS[0])
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
        with quiet():
            changed = va.set_impl_(network, impl)
        if not changed and failures:  # no block has another implementation
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


def quantize(path: Path, calibration: list[Tensor], images: list[Tensor], labels: Tensor) -> str:
    """Quantize an ONNX file with images for calibration; return a line with its accuracy before and after."""
    from onnxruntime.quantization import CalibrationDataReader, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        remaining = iter(calibration)

        def get_next(self) -> dict[str, Any] | None:
            return next(({"images": image.numpy()} for image in self.remaining), None)

    try:
        before = torch.cat([*map(open_onnx(path), images)])
        quant_pre_process(path, path, skip_symbolic_shape=True)  # converts weights to constants, which can be quantized
        # Weights have 7 bits, because sums of two 8-bit products saturate on CPUs without VNNI instructions.
        quantize_static(path, path, Reader(), per_channel=True, reduce_range=True)
        after = torch.cat([*map(open_onnx(path), images)])
    except Exception as error:  # the quantizer raises many types of errors
        raise ExportError(f"the network cannot be quantized ({type(error).__name__}: {error})") from error
    exact, rounded = (100 * float((logits.argmax(1) == labels).float().mean()) for logits in (before, after))
    accuracy = f"accuracy {exact:.2f} % before and {rounded:.2f} % after, on {len(images)} images"
    return f"quantized to 8 bits with {len(calibration)} images: {accuracy}"


def load_labeled(folder: Path, metadata: Mapping[str, Any], *, train: bool) -> tuple[list[Tensor], Tensor]:
    """Return batches of one image, preprocessed for the exported file, and their class indices in the network."""
    names, training, validation = open_data(SimpleNamespace(data=folder, dataset="folder", val_fraction=None, seed=0))
    source, classes = training if train else validation, metadata["classes"]
    if unknown := [name for name in names if name not in classes]:
        raise DataError(f"{folder} contains the class {unknown[0]!r}, which is not a class of the network")
    options = {key: metadata[key] for key in ("interpolation", "crop_pct", "crop_mode")}
    source.transform = create_transform(metadata["input_size"], normalize=False, **options)
    rows = torch.linspace(0, len(source) - 1, min(CALIBRATION if train else EVALUATION, len(source))).long().tolist()
    pairs = [source[row] for row in rows]
    normalize = nn.Identity() if metadata["pixels"] == "0…1" else Normalize(metadata["mean"], metadata["std"])
    images = [normalize(image[None] / 255) for image, _ in pairs]
    return images, torch.tensor([classes.index(names[label]) for _, label in pairs])


def export(e: Export) -> ExportReport:
    """Export the network of a run."""
    if e.output is None:
        raise ValueError(f"--output is required: a file that ends in {', '.join(FORMATS)}")
    model, size = load_run(e.run, e.block, "export RUN --output FILE"), e.img_size
    shape = (1, model.pretrained_cfg["input_size"][0], *(size * 2 if len(size) == 1 else size)) if size else None
    options: Any = {"dynamic": e.dynamic, "int8": e.int8, "normalize": e.normalize}
    report = export_model(model, e.output, example_input=shape, **options)
    cli.print_escaped(report)
    return report


if __name__ == "__main__":
    sys.exit(cli.run_program("export", lambda: cli.run_command("export", sys.argv[1:], export)))

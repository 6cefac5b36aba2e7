"""File formats of exported networks, with functions to write and run each format."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vision_attn.text import INSTALL

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
                remedy = f"Install it: {INSTALL.format('export' if 'onnx' in name else 'runtimes')}"
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
    import torch._inductor

    configs = {"aot_inductor.metadata": {ENTRY: metadata}}
    torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=configs)


def open_compiled(path: Path) -> Run:
    import torch._inductor

    return torch._inductor.aoti_load_package(str(path))


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

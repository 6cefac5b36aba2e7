"""Networks and inference runtimes for the compatibility tests of ``runtimes.py``."""

from __future__ import annotations

import copy
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

import vision_attn as va
from vision_attn.networks.models import create_model
from vision_attn.recipes.export import DIMS, FORMATS, Axis, Format, Run, export_program

#: Dynamic dimensions by mode.
MODES: dict[str, tuple[Axis, ...]] = {"fixed": (), "batch": ("batch",), "size": ("batch", "size")}


# --- networks ---------------------------------------------------------------------------------------------------------


def small_cnn(scale: float = 0.5, **options: Any) -> nn.Module:
    """Build three convolutions and a head, with a block after the second one: 8×12 positions for images of 32×48."""
    layers: dict[str, nn.Module] = {}
    for number, channels in enumerate((3, 16, 16), 1):
        layers[f"conv{number}"] = nn.Conv2d(channels, 16, 3, stride=2, padding=1)
        layers[f"act{number}"] = nn.ReLU()
    layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(16, 5)}
    network = nn.Sequential(OrderedDict(layers))
    initialization = {"exact": False} if "block" in options else {"gate_init": 1.0}
    va.insert_(network, names="act2", num_heads=2, example_input=(1, 3, 32, 48), **initialization, **options)
    return with_large_logits(network, scale)


@torch.no_grad()
def with_large_logits(network: nn.Module, scale: float = 0.5) -> nn.Module:
    """Scale queries and keys, because the attention of an untrained network is nearly uniform."""
    for name, weight in network.named_parameters():
        if name.endswith("qkv.weight"):
            weight.mul_(scale / weight.std())
    return network


def swapped_vit() -> nn.Module:
    network = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=2, num_classes=5)
    va.swap_(network)
    return with_large_logits(network)


@dataclass(frozen=True)
class Network:
    build: Callable[..., nn.Module]
    size: tuple[int, int] = (32, 48)
    other_sizes: tuple[tuple[int, int], ...] = ((40, 32), (56, 48))

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().eval()

    def images(self, mode: str) -> list[Tensor]:
        """Return the example input for the conversion, and the images for the comparison of outputs."""
        generator = torch.Generator().manual_seed(1)
        example = (1 if mode == "fixed" else 2, *self.size)
        others = {
            "fixed": [example],
            "batch": [(1, *self.size), (3, *self.size)],
            "size": [(3, *size) for size in self.other_sizes],
        }
        return [torch.rand(b, 3, h, w, generator=generator) for b, h, w in (example, *others[mode])]


BLOCKS: dict[str, dict[str, Any]] = {
    "full": {},
    'full, impl="bmm"': {"impl": "bmm"},
    "full, kv_stride=2": {"kv_stride": 2},
    "full, causal=True": {"causal": True},
    "rows": {"pattern": "rows"},
    "Window(4)": {"pattern": va.Window(4)},
    "Window(4, shift=2)": {"pattern": va.Window(4, shift=2)},
    "Window(5), padded": {"pattern": va.Window(5)},
    "Grid(4)": {"pattern": va.Grid(4)},
    "Halo(4, 1)": {"pattern": va.Halo(4, 1)},
    "Neighborhood(3)": {"pattern": va.Neighborhood(3)},
    "RelPosDecomposed": {"position": va.RelPosDecomposed((8, 12))},
    "RelPosDecomposed, Window(4)": {"position": va.RelPosDecomposed(), "pattern": va.Window(4)},
    "RelPosTable": {"position": va.RelPosTable((8, 12))},
    "RelPosTable, Window(4)": {"position": va.RelPosTable(), "pattern": va.Window(4)},
    "AbsPos": {"position": va.AbsPos((8, 12))},
    "Rope": {"position": va.Rope()},
    "ConditionalPos": {"position": va.ConditionalPos(3)},
    "SinCos": {"position": va.SinCos()},
    "TransformerBlock2d": {"block": va.blocks.TransformerBlock2d},
    "LinearAttention2d": {"block": va.blocks.LinearAttention2d, "scale": 3.0},
}
CIFAR = partial(create_model, "resnet20_attention", pretrained=True)
NETWORKS: dict[str, Network] = {
    **{name: Network(partial(small_cnn, **options)) for name, options in BLOCKS.items()},
    "resnet20_attention": Network(CIFAR, (32, 32), ((40, 48), (24, 32))),
    "ViT after va.swap_": Network(swapped_vit, (32, 32), ()),
}


# --- runtimes ---------------------------------------------------------------------------------------------------------


@lru_cache(1)
def shared_program(network: nn.Module, images: Tensor, dynamic: tuple[Axis, ...]) -> torch.export.ExportedProgram:
    return export_program(network, images, dynamic)


def write_compiled(program: torch.export.ExportedProgram, path: Path, metadata: str) -> None:
    from torch._inductor import aoti_compile_and_package

    aoti_compile_and_package(program, package_path=str(path))


def open_compiled(path: Path) -> Run:
    from torch._inductor import aoti_load_package

    return aoti_load_package(str(path))


def write_tflite(program: torch.export.ExportedProgram, path: Path, metadata: str) -> None:
    import litert_torch

    litert_torch.convert(program.module(), program.example_inputs[0]).export(str(path))


def open_tflite(path: Path) -> Run:
    from ai_edge_litert.interpreter import Interpreter

    runner = Interpreter(str(path)).get_signature_runner()
    (name,) = runner.get_input_details()
    return lambda images: torch.from_numpy(next(iter(runner(**{name: images.numpy()}).values())))


def write_executorch(program: torch.export.ExportedProgram, path: Path, metadata: str) -> None:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    unchecked = EdgeCompileConfig(_check_ir_validity=False)  # the check makes a dynamic batch static
    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()], compile_config=unchecked)
    path.write_bytes(lowered.to_executorch().buffer)


def open_executorch(path: Path) -> Run:
    from executorch.runtime import Runtime

    method = Runtime.get().load_program(path).load_method("forward")
    return lambda images: method.execute([images])[0]


#: File formats by suffix: formats of ``vision-attn export``, and formats that are compiled from an exported program.
FILES: dict[str, Format] = {
    **FORMATS,
    ".aoti.pt2": Format("AOTInductor", (), write_compiled, open_compiled),
    ".tflite": Format("LiteRT", ("litert_torch", "ai_edge_litert"), write_tflite, open_tflite),
    ".pte": Format("ExecuTorch", ("executorch",), write_executorch, open_executorch),
}


def export_small_batches(network: nn.Module, images: Tensor, dynamic: tuple[Axis, ...]) -> torch.export.ExportedProgram:
    """Trace a network for at most eight images: some runtimes allocate memory for the largest batch."""
    dims: dict[int, Any] = {dim: torch.export.Dim.DYNAMIC(max=8) for axis in dynamic for dim in DIMS[axis]}
    return torch.export.export(network, (images,), dynamic_shapes=(dims,))


def run_executorch(network: nn.Module, images: Tensor, dynamic: tuple[Axis, ...], folder: Path) -> Run:
    network = copy.deepcopy(network)
    va.set_impl_(network, "bmm")  # the fused operator is decomposed to a view with incompatible strides
    write_executorch(export_small_batches(network, images, dynamic), folder / "network.pte", "{}")
    return open_executorch(folder / "network.pte")


def run_file(suffix: str, network: nn.Module, images: Tensor, dynamic: tuple[Axis, ...], folder: Path) -> Run:
    """Write a file and open it."""
    program, path = shared_program(network, images, dynamic), folder / f"network{suffix}"
    FILES[suffix].write(program, path, "{}")
    return FILES[suffix].open(path)


def run_trace(network: nn.Module, images: Tensor, dynamic: tuple[Axis, ...], folder: Path) -> Run:
    torch.jit.trace(network, images, check_trace=False).save(folder / "network.pt")
    return torch.jit.load(folder / "network.pt")


def open_openvino(model: Any) -> Run:
    """Compile a file or a converted network; the default precision is bfloat16 on CPUs that support it."""
    import openvino

    compiled = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda images: torch.from_numpy(compiled(images.numpy())[0])


def run_openvino(network: nn.Module, images: Tensor, dynamic: tuple[Axis, ...], folder: Path) -> Run:
    import openvino

    return open_openvino(openvino.convert_model(shared_program(network, images, dynamic)))


def run_openvino_trace(network: nn.Module, images: Tensor, dynamic: tuple[Axis, ...], folder: Path) -> Run:
    import openvino

    axes = {axis for name in dynamic for axis in DIMS[name]}
    shape = [-1 if axis in axes else length for axis, length in enumerate(images.shape)]
    return open_openvino(openvino.convert_model(network, example_input=images, input=shape))


def run_openvino_onnx(network: nn.Module, images: Tensor, dynamic: tuple[Axis, ...], folder: Path) -> Run:
    FILES[".onnx"].write(shared_program(network, images, dynamic), folder / "network.onnx", "{}")
    return open_openvino(folder / "network.onnx")


def convert_core_ml(network: nn.Module, images: Tensor, dynamic: tuple[Axis, ...], folder: Path) -> None:
    import coremltools

    program = export_small_batches(network, images, dynamic).run_decompositions({})
    coremltools.convert(program, convert_to="mlprogram", skip_model_load=True)


def run_ncnn(network: nn.Module, images: Tensor, dynamic: tuple[Axis, ...], folder: Path) -> Run:
    import ncnn
    import numpy as np
    import pnnx

    pnnx.export(network, str(folder / "network.pt"), (images,), fp16=False)
    net = ncnn.Net()
    net.opt.use_fp16_packed = net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = False
    for load, suffix in ((net.load_param, "param"), (net.load_model, "bin")):
        if load(str(folder / f"network.ncnn.{suffix}")):
            raise RuntimeError(f"ncnn does not load network.ncnn.{suffix}")

    def run(images: Tensor) -> Tensor:
        with net.create_extractor() as extractor:
            extractor.input("in0", ncnn.Mat(images[0].numpy()).clone())
            status, output = extractor.extract("out0")
        if status:
            raise RuntimeError(f"ncnn returns {status}")
        return torch.from_numpy(np.array(output))[None]

    return run


@dataclass(frozen=True)
class Runtime:
    title: str
    package: str
    convert: Callable[..., Run | None]
    modules: tuple[str, ...] = ()
    modes: tuple[str, ...] = tuple(MODES)
    networks: tuple[str, ...] = tuple(NETWORKS)


#: Modes of runtimes that are measured with images of one size.
ONE_SIZE = "fixed", "batch"
#: Networks for a runtime that compiles C++ for each measurement.
COMPILED = "full", "Window(5), padded", "Neighborhood(3)", "RelPosDecomposed"

RUNTIMES = {
    "torch-export": Runtime("`torch.export`", "torch", partial(run_file, ".pt2")),
    "trace": Runtime("`torch.jit.trace`", "torch", run_trace),
    "onnxruntime": Runtime("ONNX Runtime", "onnxruntime", partial(run_file, ".onnx"), ("onnxruntime", "onnxscript")),
    "openvino": Runtime("OpenVINO, `torch.export`", "openvino", run_openvino, ("openvino",)),
    "openvino-trace": Runtime("OpenVINO, `example_input=`", "openvino", run_openvino_trace, ("openvino",)),
    "openvino-onnx": Runtime("OpenVINO, ONNX", "openvino", run_openvino_onnx, ("openvino",), ONE_SIZE),
    "executorch": Runtime("ExecuTorch", "executorch", run_executorch, ("executorch.exir",), ONE_SIZE),
    "litert": Runtime("LiteRT", "litert-torch", partial(run_file, ".tflite"), ("litert_torch",), ("fixed",)),
    "core-ml": Runtime("Core ML", "coremltools", convert_core_ml, ("coremltools",), ONE_SIZE),
    "ncnn": Runtime("ncnn", "ncnn", run_ncnn, ("ncnn", "pnnx"), ("fixed",)),
    "aot-inductor": Runtime("AOTInductor", "torch", partial(run_file, ".aoti.pt2"), (), ONE_SIZE, COMPILED),
}


# --- comparison -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure(runtime: str, network: nn.Module, example: Tensor, others: list[Tensor], mode: str) -> float | None:
    """Return the largest relative difference from torch, or None for a runtime that only converts the network."""
    expected = [network(images) for images in others]
    with tempfile.TemporaryDirectory() as folder:
        run = RUNTIMES[runtime].convert(network, example, MODES[mode], Path(folder))
        found = None if run is None else [run(images) for images in others]
    if found is None:
        return None
    for x, y in zip(found, expected, strict=True):
        if x.shape != y.shape:
            raise RuntimeError(f"the output has shape {tuple(x.shape)} instead of {tuple(y.shape)}")
    differences = [(x - y).abs().max() / y.abs().max() for x, y in zip(found, expected, strict=True)]
    return float(torch.stack(differences).max())  # NaN if a difference is NaN

"""Compatibility table: attention blocks on inference runtimes, with fixed and with dynamic shapes.

    python benchmarks/runtimes.py                                        # writes docs/runtimes.md
    python benchmarks/runtimes.py --runtimes onnxruntime --networks rows  # prints these cells

Each cell converts a small network, and compares the outputs for other images than the example with torch's. A network
and runtime have a process, so that a crash or a hang is one failed cell. Runtimes that are not installed are left out.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

import vision_attn as va

TABLE = Path(__file__).resolve().parents[1] / "docs" / "runtimes.md"

#: Relative difference that rounding explains.
TOLERANCE = 1e-4
#: Seconds for one cell.
TIME_LIMIT = 120
#: Axes of the images whose length is dynamic, by the name of the mode.
MODES = {"fixed": (), "batch": (0,), "size": (0, 2, 3)}

Run = Callable[[Tensor], Tensor]


# --- networks ---------------------------------------------------------------------------------------------------------


def small_cnn(**options: Any) -> nn.Module:
    """Build two convolutions, a block on a feature map of 8×12 positions for images of 32×48 pixels, and a head."""
    layers: dict[str, nn.Module] = {}
    for number, channels in enumerate((3, 16, 16), 1):
        layers[f"conv{number}"] = nn.Conv2d(channels, 16, 3, stride=2, padding=1)
        layers[f"act{number}"] = nn.ReLU()
    layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(16, 5)}
    network = nn.Sequential(OrderedDict(layers))
    va.insert_(network, names="act2", gate_init=1.0, example_input=(1, 3, 32, 48), **{"num_heads": 2, **options})
    return network


def swapped_vit() -> nn.Module:
    network = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=2, num_classes=5)
    va.swap_(network)
    return network


@dataclass(frozen=True)
class Network:
    build: Callable[..., nn.Module]
    size: tuple[int, int] = (32, 48)
    other_sizes: tuple[tuple[int, int], ...] = ((40, 32), (56, 48))

    def make(self) -> nn.Module:
        """Build the network with weights for which the output depends on the weights of attention."""
        torch.manual_seed(0)
        network = self.build().eval()
        with torch.no_grad():
            for block in va.inserted_blocks(network).values():
                for name, parameter in block.named_parameters():
                    if name.endswith(("qkv.weight", "proj.weight")):
                        parameter.mul_(3.0)
        return network

    def images(self, mode: str) -> list[Tensor]:
        """Return the example that a network is converted with, and the images that its outputs are compared for."""
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
    "Rope2d": {"position": va.Rope2d()},
    "ConditionalPos": {"position": va.ConditionalPos(3)},
    "SinCos": {"position": va.SinCos()},
    "TransformerBlock2d": {"block": va.TransformerBlock2d},
    "LinearAttention2d": {"block": va.LinearAttention2d},
}
CIFAR = partial(timm.create_model, "resnet20_attention", pretrained=True)
NETWORKS: dict[str, Network] = {
    **{name: Network(partial(small_cnn, **options)) for name, options in BLOCKS.items()},
    "resnet20_attention": Network(CIFAR, (32, 32), ((40, 48), (24, 32))),
    "ViT after va.swap_": Network(swapped_vit, (32, 32), ()),
}


# --- runtimes ---------------------------------------------------------------------------------------------------------


@lru_cache(1)
def export(network: nn.Module, images: Tensor, axes: tuple[int, ...]) -> torch.export.ExportedProgram:
    """Export a network; ExecuTorch plans memory for the largest batch and image."""
    limits = {axis: torch.export.Dim.DYNAMIC(max=8 if axis == 0 else 64) for axis in axes}
    return torch.export.export(network, (images,), dynamic_shapes=(limits,) if axes else None)


@lru_cache(1)
def onnx_program(network: nn.Module, images: Tensor, axes: tuple[int, ...]) -> torch.onnx.ONNXProgram:
    program = torch.onnx.export(export(network, images, axes), dynamo=True, verbose=False)
    assert program is not None
    return program


def run_export(network: nn.Module, images: Tensor, axes: tuple[int, ...], folder: Path) -> Run:
    torch.export.save(export(network, images, axes), folder / "network.pt2")
    return torch.export.load(folder / "network.pt2").module()


def run_aot_inductor(network: nn.Module, images: Tensor, axes: tuple[int, ...], folder: Path) -> Run:
    from torch._inductor import aoti_compile_and_package, aoti_load_package

    return aoti_load_package(
        aoti_compile_and_package(export(network, images, axes), package_path=str(folder / "n.pt2"))
    )


def run_trace(network: nn.Module, images: Tensor, axes: tuple[int, ...], folder: Path) -> Run:
    torch.jit.trace(network, images, check_trace=False).save(folder / "network.pt")
    return torch.jit.load(folder / "network.pt")


def run_onnxruntime(network: nn.Module, images: Tensor, axes: tuple[int, ...], folder: Path) -> Run:
    import onnxruntime

    onnx_program(network, images, axes).save(folder / "network.onnx")
    session = onnxruntime.InferenceSession(folder / "network.onnx", providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda images: torch.from_numpy(session.run(None, {name: images.numpy()})[0])


def openvino_compiled(model: Any) -> Run:
    import openvino

    compiled = openvino.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda images: torch.from_numpy(compiled(images.numpy())[0].copy())


def run_openvino(network: nn.Module, images: Tensor, axes: tuple[int, ...], folder: Path) -> Run:
    import openvino

    return openvino_compiled(openvino.convert_model(export(network, images, axes)))


def run_openvino_trace(network: nn.Module, images: Tensor, axes: tuple[int, ...], folder: Path) -> Run:
    import openvino

    shape = [-1 if axis in axes else length for axis, length in enumerate(images.shape)]
    return openvino_compiled(openvino.convert_model(network, example_input=images, input=shape))


def run_openvino_onnx(network: nn.Module, images: Tensor, axes: tuple[int, ...], folder: Path) -> Run:
    import openvino

    onnx_program(network, images, axes).save(folder / "network.onnx")
    return openvino_compiled(openvino.convert_model(folder / "network.onnx"))


def run_executorch(network: nn.Module, images: Tensor, axes: tuple[int, ...], folder: Path) -> Run:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
    from executorch.runtime import Runtime

    network = copy.deepcopy(network)
    va.set_impl_(network, "bmm")  # SDPA is decomposed to a view of other strides (pytorch/pytorch#141107)
    program = export(network, images, axes)
    unchecked = EdgeCompileConfig(_check_ir_validity=False)  # the check fixes the batch size where an operator splits
    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()], compile_config=unchecked)
    (folder / "network.pte").write_bytes(lowered.to_executorch().buffer)
    method = Runtime.get().load_program(folder / "network.pte").load_method("forward")
    return lambda images: method.execute([images])[0].clone()


def run_litert(network: nn.Module, images: Tensor, axes: tuple[int, ...], folder: Path) -> Run:
    import litert_torch

    dynamic = ({axis: torch.export.Dim(f"axis{axis}", max=64) for axis in axes},) if axes else None
    model = litert_torch.convert(network, (images,), dynamic_shapes=dynamic)
    return lambda images: torch.as_tensor(model(images))


def run_core_ml(network: nn.Module, images: Tensor, axes: tuple[int, ...], folder: Path) -> None:
    import coremltools

    program = export(network, images, axes).run_decompositions({})
    coremltools.convert(program, convert_to="mlprogram", skip_model_load=True)


def run_ncnn(network: nn.Module, images: Tensor, axes: tuple[int, ...], folder: Path) -> Run:
    import ncnn
    import numpy as np
    import pnnx

    others = {"inputs2": (torch.rand(1, 3, *(side + 8 for side in images.shape[2:])),)} if axes else {}
    pnnx.export(network, str(folder / "network.pt"), (images[:1],), fp16=False, **others)
    net = ncnn.Net()
    net.opt.use_fp16_packed = net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = False
    for load, suffix in ((net.load_param, "param"), (net.load_model, "bin")):
        if load(str(folder / f"network.ncnn.{suffix}")):
            raise RuntimeError(f"ncnn does not load network.ncnn.{suffix}")

    def run(images: Tensor) -> Tensor:
        outputs = []
        for image in images:
            with net.create_extractor() as extractor:
                extractor.input("in0", ncnn.Mat(image.numpy()).clone())
                status, output = extractor.extract("out0")
                if status:
                    raise RuntimeError(f"ncnn returns {status}")
                outputs.append(torch.from_numpy(np.array(output)))
        return torch.stack(outputs)

    return run


@dataclass(frozen=True)
class Runtime:
    title: str
    package: str
    convert: Callable[..., Run | None]
    modules: tuple[str, ...] = ()
    modes: tuple[str, ...] = tuple(MODES)
    networks: tuple[str, ...] = tuple(NETWORKS)


#: C++ is compiled for each cell.
COMPILED = "full", "Window(5), padded", "Neighborhood(3)", "RelPosDecomposed"
SIZES_ARE_FIXED = "fixed", "batch"

RUNTIMES = {
    "torch-export": Runtime("`torch.export`", "torch", run_export),
    "trace": Runtime("`torch.jit.trace`", "torch", run_trace),
    "onnxruntime": Runtime("ONNX Runtime", "onnxruntime", run_onnxruntime, ("onnxruntime", "onnxscript")),
    "openvino": Runtime("OpenVINO, `torch.export`", "openvino", run_openvino, ("openvino",)),
    "openvino-trace": Runtime("OpenVINO, `example_input=`", "openvino", run_openvino_trace, ("openvino",)),
    "openvino-onnx": Runtime("OpenVINO, ONNX", "openvino", run_openvino_onnx, ("openvino",), SIZES_ARE_FIXED),
    "executorch": Runtime(
        "ExecuTorch", "executorch", run_executorch, ("executorch.exir", "executorch.runtime"), SIZES_ARE_FIXED
    ),
    "litert": Runtime("LiteRT", "litert-torch", run_litert, ("litert_torch",), ("fixed",)),
    "core-ml": Runtime("Core ML", "coremltools", run_core_ml, ("coremltools",), SIZES_ARE_FIXED),
    "ncnn": Runtime("ncnn", "ncnn", run_ncnn, ("ncnn", "pnnx"), ("fixed",)),
    "aot-inductor": Runtime("AOTInductor", "torch", run_aot_inductor, (), SIZES_ARE_FIXED, COMPILED),
}


# --- cells ------------------------------------------------------------------------------------------------------------

Cell = tuple[str, str]  # runtime and mode


@torch.no_grad()
def measure(runtime: str, network: nn.Module, example: Tensor, others: list[Tensor], mode: str) -> float | None:
    """Return the largest relative difference from torch; None for a runtime that only converts here."""
    expected = [network(images) for images in others]
    with tempfile.TemporaryDirectory() as folder:
        run = RUNTIMES[runtime].convert(network, example, MODES[mode], Path(folder))
        found = None if run is None else [run(images) for images in others]
    if found is None:
        return None
    for x, y in zip(found, expected, strict=True):
        if x.shape != y.shape:
            raise RuntimeError(f"the output has shape {tuple(x.shape)} instead of {tuple(y.shape)}")
    return max(((x - y).abs().max() / y.abs().max()).item() for x, y in zip(found, expected, strict=True))


def in_child(network: str, cells: list[Cell], pipe: Any, log: str) -> None:
    """Send the difference or the error of each cell."""
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    warnings.simplefilter("ignore")
    model = NETWORKS[network].make()
    images = {mode: NETWORKS[network].images(mode) for _, mode in cells}
    for runtime, mode in cells:
        try:
            pipe.send(measure(runtime, model, images[mode][0], images[mode][1:], mode))
        except BaseException as error:  # a panic of a runtime is no Exception
            pipe.send(f"{type(error).__name__}: {error}")
    os._exit(0)


def measure_network(network: str, cells: list[Cell], log: str) -> Iterator[tuple[Cell, str | float | None]]:
    """Yield the outcome of each cell, from a process that is started again after a crash or a hang."""
    while cells:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(target=in_child, args=(network, cells, theirs, log))
        child.start()
        theirs.close()
        while cells:
            cell, *cells = cells
            if not ours.poll(TIME_LIMIT):
                yield cell, f"no result within {TIME_LIMIT} s"
                break
            try:
                found = ours.recv()
            except EOFError:
                child.join()
                yield cell, f"the process ended with exit code {child.exitcode}"
                break
            yield cell, found
        child.kill()
        child.join()


# --- table ------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtimes", nargs="+", choices=RUNTIMES, default=list(RUNTIMES), help="runtimes to measure")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="networks to measure")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="dynamic axes to measure")
    parser.add_argument("--results", type=Path, default=TABLE.parents[1] / "build/runtimes.json", help="stored cells")
    options = parser.parse_args()
    options.results.parent.mkdir(exist_ok=True)
    stored = json.loads(options.results.read_text()) if options.results.exists() else {}
    installed = [name for name in options.runtimes if find_spec(RUNTIMES[name].package.replace("-", "_"))]
    print("not installed:", *[name for name in options.runtimes if name not in installed])
    for module in dict.fromkeys(module for name in installed for module in RUNTIMES[name].modules):
        import_module(module)
    torch.export.export(nn.Flatten(), (torch.ones(2, 2),))  # imports more, once for all networks
    for name in options.networks:
        cells = [
            (runtime, mode)
            for mode in options.modes
            for runtime in installed
            if name in RUNTIMES[runtime].networks and mode in RUNTIMES[runtime].modes
            if mode != "size" or NETWORKS[name].other_sizes
        ]
        for (runtime, mode), found in measure_network(name, cells, f"{options.results}.log"):
            stored.setdefault(name, {}).setdefault(runtime, {})[mode] = found
            print(name, runtime, mode, shown(found), sep="  ", flush=True)
        options.results.write_text(json.dumps(stored, indent=1))


def shown(value: Any) -> str:
    return "converts" if value is None else f"{value:.0e}" if isinstance(value, float) else str(value)[:150]


if __name__ == "__main__":
    main()

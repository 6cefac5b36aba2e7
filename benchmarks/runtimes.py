"""Compatibility table: attention blocks on inference runtimes, with fixed and with dynamic shapes.

    pip install -e ".[runtimes]"
    python benchmarks/runtimes.py                                         # writes docs/runtimes.md
    python benchmarks/runtimes.py --runtimes onnxruntime --networks rows  # measures these cells again

Each cell converts a small network, and compares the outputs for other images than the example with torch's. A network
has its own process, so that a crash or a hang is one failed cell. Runtimes that are not installed are left out. Cells
are stored, so that the page can be written again when some of them are measured again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import warnings
from collections.abc import Iterator
from datetime import date
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from runtime_cases import MODES, NETWORKS, RUNTIMES, measure
from torch import nn

from vision_attn.text import markdown

#: The page that this script writes.
TABLE = Path(__file__).resolve().parents[1] / "docs" / "runtimes.md"
#: Relative difference that rounding explains.
TOLERANCE = 1e-4
#: Seconds for one cell.
TIME_LIMIT = 120

# --- cells ------------------------------------------------------------------------------------------------------------

Cell = tuple[str, str]  # runtime and mode


def in_child(network: str, cells: list[Cell], pipe: Any, results: Path) -> None:
    """Send the difference or the error of each cell; what converters print goes to a log."""
    stream = os.open(f"{results}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    warnings.simplefilter("ignore")
    model = NETWORKS[network].make()
    images = {mode: NETWORKS[network].images(mode) for _, mode in cells}
    for runtime, mode in cells:
        try:
            pipe.send(measure(runtime, model, images[mode][0], images[mode][1:], mode))
        except BaseException as error:  # a panic in a runtime is not an Exception
            pipe.send(f"{type(error).__name__}: {error}")
    os._exit(0)


def measure_network(network: str, cells: list[Cell], results: Path) -> Iterator[tuple[Cell, str | float | None]]:
    """Yield the outcome of each cell, from a process that is started again after a crash or a hang."""
    while cells:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(target=in_child, args=(network, cells, theirs, results))
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

HEAD = """# Runtime compatibility

Attention blocks in a small network, converted for each runtime and compared with torch on other images than the
example. A number is the largest difference, relative to the largest output. It covers a file for one image and a file
for batches of any size, run on one and on three images{sizes}; a cell names what works where only a part was measured
or works. LiteRT and ncnn are measured with one image. Core ML runs only on Apple's systems: only the
conversion is tried. A dash means not measured.

`python benchmarks/runtimes.py` wrote this page on {date} with {versions}.
"""

#: Runtimes side by side.
TABLES = {
    "ONNX Runtime and OpenVINO": ("onnxruntime", "openvino", "openvino-trace", "openvino-onnx"),
    "Phones and embedded devices": ("executorch", "litert", "core-ml", "ncnn"),
    "PyTorch": ("torch-export", "aot-inductor", "trace"),
}
HEADINGS = {"fixed": "one image", "batch": "any batch", "size": "any size"}

#: Known causes of errors, and what to do.
CAUSES = {
    r"only supports tensors with rank <= 5": "Core ML has tensors of at most five axes "
    "([coremltools#2291](https://github.com/apple/coremltools/issues/2291)); windows and grids in batches of any size "
    "have six. Convert for one image.",
    r"Invalid target shape in `reshape`": "coremltools 9.0 does not fold the sizes of decomposed relative positions in "
    "windows. Use `RelPosTable`, or another runtime.",
    r"Unsupported fx node addcmul": "coremltools 9.0 does not convert `addcmul`, by which `Rope2d` rotates queries and "
    "keys. Use another position encoding, or another runtime.",
    r"Failed to load method forward": "ExecuTorch 1.5 does not load the file. Use `RelPosDecomposed`.",
    r"SyntaxError": "pnnx writes a Python module with a syntax error. Use another position encoding or runtime.",
    r"ncnn does not load|ncnn returns": "ncnn has tensors of at most four axes, and pnnx writes layers that ncnn does "
    "not load for patterns and tables of positions that need more "
    "([ncnn#4708](https://github.com/Tencent/ncnn/issues/4708)). Use full attention, or another runtime.",
}

#: What export does for a runtime.
NOTES = """## Notes

- ExecuTorch is measured with `impl="bmm"`, which patterns other than full attention, windows and grids need: the fused
  operator is decomposed to a view that does not fit its strides
  ([pytorch#141107](https://github.com/pytorch/pytorch/issues/141107)).
- ExecuTorch's check of a program fixes a dynamic batch at the example's where an operator returns several tensors, as
  the split into queries, keys and values does: running fails with "Failed to resize output tensor". Lower with
  `EdgeCompileConfig(_check_ir_validity=False)`, as `vision-attn export` does.
- LiteRT's converter has no dynamic batch for convolutional networks, with or without attention
  ([litert-torch#685](https://github.com/google-ai-edge/litert-torch/issues/685)).
- Masks and indices of patterns are constants of a file for images of one size. In a file for any size they are computed
  in each call.
"""


def cell(runtime: str, outcomes: dict[str, Any], numbers: dict[str, int]) -> str:
    """Return the largest difference, what works if not all was measured and does, and the numbers of causes."""
    works = {mode: found for mode, found in outcomes.items() if found is None or found_is_close(found)}
    wrong = [found for found in outcomes.values() if isinstance(found, float) and not found_is_close(found)]
    causes = [cause(found) for found in outcomes.values() if isinstance(found, str)]
    marks = "".join(f"<sup>{numbers.setdefault(text, len(numbers) + 1)}</sup>" for text in dict.fromkeys(causes))
    if wrong:
        return f"**wrong: {max(wrong):.2g}**{marks}"
    if not outcomes or not works:
        return f"no{marks}" if outcomes else "–"
    numeric = [found for found in works.values() if found is not None]
    text = shown(max(numeric)) if numeric else "converts"
    expected = {*RUNTIMES[runtime].modes} - {"size"} | {*outcomes}
    return text if works.keys() == expected else f"{text}, {' and '.join(HEADINGS[mode] for mode in works)}{marks}"


def found_is_close(found: Any) -> bool:
    return isinstance(found, float) and found <= TOLERANCE


def cause(error: str) -> str:
    """Return the known cause of an error, or its first line."""
    return next((text for pattern, text in CAUSES.items() if re.search(pattern, error)), f"`{error.splitlines()[0]}`")


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0e}".replace("e-0", "e-") if value else "0"
    return "converts" if value is None else value[:150]


def page(stored: dict[str, dict[str, dict[str, Any]]]) -> str:
    packages = dict.fromkeys(runtime.package for runtime in RUNTIMES.values() if is_installed(runtime.package))
    versions = ", ".join(f"{name} {version(name).split('+')[0]}" for name in packages)
    sized = [f"`{network}`" for network, row in stored.items() if any("size" in modes for modes in row.values())]
    sizes = f", and for {', '.join(sized)} a file for images of any size, where the runtime has one" if sized else ""
    text, numbers = [HEAD.format(versions=versions, date=date.today().isoformat(), sizes=sizes)], {}
    for title, names in TABLES.items():
        rows = [["block", *(RUNTIMES[name].title for name in names)]]
        for network in NETWORKS:
            found = (cell(name, stored.get(network, {}).get(name, {}), numbers) for name in names)
            rows.append([f"`{network}`", *found])
        text.append(f"## {title}\n\n{markdown(rows, left=range(len(rows[0])))}\n")
    limits = "\n".join(f"{number}. {reason}" for reason, number in numbers.items())
    return "\n".join([*text, f"## Limits\n\n{limits}\n", NOTES])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtimes", nargs="*", choices=RUNTIMES, default=list(RUNTIMES), help="runtimes to measure")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="networks to measure")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="what varies between calls")
    parser.add_argument("--results", type=Path, default=TABLE.parents[1] / "build/runtimes.json", help="stored cells")
    options = parser.parse_args()
    options.results.parent.mkdir(exist_ok=True)
    stored = json.loads(options.results.read_text()) if options.results.exists() else {}
    installed = [name for name in options.runtimes if is_installed(RUNTIMES[name].package)]
    for name in options.runtimes:
        if name not in installed:
            print(f"{name} is left out: {RUNTIMES[name].package} is not installed")
    for module in dict.fromkeys(module for name in installed for module in RUNTIMES[name].modules):
        import_module(module)
    torch.export.export(nn.Flatten(), (torch.ones(2, 2),))  # imports more, once for all networks
    for network in options.networks:
        for (runtime, mode), found in measure_network(
            network, cells(network, installed, options.modes), options.results
        ):
            stored.setdefault(network, {}).setdefault(runtime, {})[mode] = found
            print(network, runtime, mode, shown(found), sep="  ", flush=True)
        options.results.write_text(json.dumps(stored, indent=1))
    TABLE.write_text(page(stored))


def is_installed(package: str) -> bool:
    return find_spec(package.replace("-", "_")) is not None


def cells(network: str, runtimes: list[str], modes: list[str]) -> list[Cell]:
    """Return the cells of a network's row, one program after the other."""
    found = [(runtime, mode) for mode in modes for runtime in runtimes if mode in RUNTIMES[runtime].modes]
    sized = bool(NETWORKS[network].other_sizes)
    return [one for one in found if network in RUNTIMES[one[0]].networks and (one[1] != "size" or sized)]


if __name__ == "__main__":
    main()

"""Compatibility of attention blocks with inference runtimes, with fixed and with dynamic shapes.

    pip install -e ".[runtimes]"
    python benchmarks/runtimes.py                                         # writes a section of docs/deploy.md
    python benchmarks/runtimes.py --runtimes onnxruntime --networks rows  # repeats these measurements

Each measurement converts a small network, and compares its outputs with the outputs of torch for images other than the
example. Each network runs in a separate process, so a crash or a hang only affects one measurement. Runtimes that are
not installed are skipped. All results are stored in a file, so the section can be written after a part of them is
repeated.
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
from page_sections import DOCS, markdown, write_section
from runtime_cases import MODES, NETWORKS, RUNTIMES, measure
from torch import nn

#: The page with the section that this script writes.
PAGE = DOCS / "deploy.md"
#: The largest relative difference that is attributed to rounding.
TOLERANCE = 1e-4
#: Seconds for one measurement.
TIME_LIMIT = 120

# --- measurements -----------------------------------------------------------------------------------------------------

Case = tuple[str, str]  # runtime and mode


def run_in_process(network: str, cases: list[Case], pipe: Any, results: Path) -> None:
    """Send the difference or the error of each case. The output of converters is written to a log file."""
    stream = os.open(f"{results}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    warnings.simplefilter("ignore")
    model = NETWORKS[network].make()
    images = {mode: NETWORKS[network].images(mode) for _, mode in cases}
    for runtime, mode in cases:
        try:
            pipe.send(measure(runtime, model, images[mode][0], images[mode][1:], mode))
        except BaseException as error:  # a panic in a runtime does not raise an Exception
            pipe.send(f"{type(error).__name__}: {error}")
    os._exit(0)


def measure_network(network: str, cases: list[Case], results: Path) -> Iterator[tuple[Case, str | float | None]]:
    """Yield the result of each case, from a process that is restarted after a crash or a hang."""
    while cases:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        arguments = network, cases, sender, results
        child = multiprocessing.get_context("fork").Process(target=run_in_process, args=arguments)
        child.start()
        sender.close()
        while cases:
            case, *cases = cases
            if not receiver.poll(TIME_LIMIT):
                yield case, f"no result within {TIME_LIMIT} s"
                break
            try:
                result = receiver.recv()
            except EOFError:
                child.join()
                yield case, f"the process ended with exit code {child.exitcode}"
                break
            yield case, result
        child.kill()
        child.join()


# --- table ------------------------------------------------------------------------------------------------------------

#: Titles of the tables, and their columns.
TABLES = {
    "ONNX Runtime and OpenVINO": ("onnxruntime", "openvino", "openvino-trace", "openvino-onnx"),
    "Phones and embedded devices": ("executorch", "litert", "core-ml", "ncnn"),
    "PyTorch": ("torch-export", "aot-inductor", "trace"),
}
HEADINGS = {"fixed": "one image", "batch": "any batch", "size": "any size"}

#: Known limitations and alternatives, by a pattern of the error message.
LIMITATIONS = {
    r"only supports tensors with rank <= 5": (
        "Core ML tensors have at most five axes ([coremltools#2291](https://github.com/apple/coremltools/issues/2291)),"
        " and windows and grids with a dynamic batch need six.",
        "Convert for one image.",
    ),
    r"Invalid target shape in `reshape`": (
        "coremltools 9.0 does not fold the sizes of decomposed relative positions in windows.",
        "Use `RelPosTable` or another runtime.",
    ),
    r"Unsupported fx node addcmul": (
        "coremltools 9.0 does not convert `addcmul`, which `Rope` uses to rotate queries and keys.",
        "Use another position encoding or runtime.",
    ),
    r"Failed to load method forward": ("ExecuTorch 1.5 does not load the file.", "Use `RelPosDecomposed`."),
    r"SyntaxError": (
        "pnnx writes a Python module with a syntax error.",
        "Use another position encoding or runtime.",
    ),
    r"ncnn does not load|ncnn returns": (
        "ncnn tensors have at most four axes. For patterns and position tables that need more axes, pnnx writes layers "
        "that ncnn does not load ([ncnn#4708](https://github.com/Tencent/ncnn/issues/4708)).",
        "Use full attention or another runtime.",
    ),
}


def format_cell(runtime: str, results: dict[str, Any], numbers: dict[tuple[str, str], int]) -> str:
    """Format the largest difference, the modes that work if others do not, and the numbers of limitations."""
    working = {mode: result for mode, result in results.items() if result is None or is_close(result)}
    wrong = [result for result in results.values() if isinstance(result, float) and not is_close(result)]
    found = [find_limitation(result) for result in results.values() if isinstance(result, str)]
    marks = "".join(f"<sup>{numbers.setdefault(key, len(numbers) + 1)}</sup>" for key in dict.fromkeys(found))
    if wrong:
        return f"**wrong: {max(wrong):.2g}**{marks}"
    if not results or not working:
        return f"no{marks}" if results else "–"
    differences = [result for result in working.values() if result is not None]
    text = format_result(max(differences)) if differences else "converts"
    expected = {*RUNTIMES[runtime].modes} - {"size"} | {*results}
    return text if working.keys() == expected else f"{text}, {' and '.join(HEADINGS[mode] for mode in working)}{marks}"


def is_close(result: Any) -> bool:
    return isinstance(result, float) and result <= TOLERANCE


def find_limitation(error: str) -> tuple[str, str]:
    """Return a known limitation and its alternative, or the first line of the error."""
    found = (limitation for pattern, limitation in LIMITATIONS.items() if re.search(pattern, error))
    return next(found, (f"`{error.splitlines()[0]}`", ""))


def format_result(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0e}".replace("e-0", "e-") if value else "0"
    return "converts" if value is None else value[:150]


def format_section(stored: dict[str, dict[str, dict[str, Any]]]) -> str:
    packages = dict.fromkeys(runtime.package for runtime in RUNTIMES.values() if is_installed(runtime.package))
    versions = ", ".join(f"{name} {version(name).split('+')[0]}" for name in packages)
    dynamic = [f"`{network}`" for network, row in stored.items() if any("size" in modes for modes in row.values())]
    parts = [f"Measured on {date.today().isoformat()} with {versions}."]
    if dynamic:
        parts.append(f"The results include files with a dynamic image size for {', '.join(dynamic)}.")
    numbers: dict[tuple[str, str], int] = {}
    for title, names in TABLES.items():
        rows = [["block", *(RUNTIMES[name].title for name in names)]]
        for network in NETWORKS:
            cells = (format_cell(name, stored.get(network, {}).get(name, {}), numbers) for name in names)
            rows.append([f"`{network}`", *cells])
        parts.append(f"**{title}**\n\n{markdown(rows, left=range(len(rows[0])))}")
    limitations = [["", "limitation", "alternative"]]
    limitations += [[str(number), *limitation] for limitation, number in numbers.items()]
    parts.append(f"**Limitations**\n\n{markdown(limitations, left=range(3))}")
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtimes", nargs="*", choices=RUNTIMES, default=list(RUNTIMES), help="runtimes to measure")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="networks to measure")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="dynamic dimensions")
    parser.add_argument(
        "--results", type=Path, default=DOCS.parent / "build/runtimes.json", help="JSON file with the stored results"
    )
    options = parser.parse_args()
    options.results.parent.mkdir(exist_ok=True)
    stored = json.loads(options.results.read_text()) if options.results.exists() else {}
    installed = [name for name in options.runtimes if is_installed(RUNTIMES[name].package)]
    for name in options.runtimes:
        if name not in installed:
            print(f"Skipping {name}: the package {RUNTIMES[name].package} is not installed.")
    for module in dict.fromkeys(module for name in installed for module in RUNTIMES[name].modules):
        import_module(module)
    torch.export.export(nn.Flatten(), (torch.ones(2, 2),))  # imports more modules, once for all processes
    for network in options.networks:
        cases = select_cases(network, installed, options.modes)
        for (runtime, mode), result in measure_network(network, cases, options.results):
            stored.setdefault(network, {}).setdefault(runtime, {})[mode] = result
            print(network, runtime, mode, format_result(result), sep="  ", flush=True)
        options.results.write_text(json.dumps(stored, indent=1))
    write_section(PAGE, "runtimes", format_section(stored))


def is_installed(package: str) -> bool:
    return find_spec(package.replace("-", "_")) is not None


def select_cases(network: str, runtimes: list[str], modes: list[str]) -> list[Case]:
    """Return the measurements of a network. Those that share an exported program are consecutive."""
    cases = [(runtime, mode) for mode in modes for runtime in runtimes if mode in RUNTIMES[runtime].modes]
    has_sizes = bool(NETWORKS[network].other_sizes)
    return [
        (runtime, mode)
        for runtime, mode in cases
        if network in RUNTIMES[runtime].networks and (mode != "size" or has_sizes)
    ]


if __name__ == "__main__":
    main()

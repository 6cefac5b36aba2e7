"""Latency of exported networks with an attention block, as a ratio to the same networks without it.

    python benchmarks/latency.py --suffixes .onnx .tflite .pte

Each network is exported with and without a block after its second-last stage, and all files run in turns on one CPU
core, with one image of 224×224. The table has the median latency without the block, and the median ratio with its
quartiles. The load of the machine is printed, because other programs increase latencies and make ratios less accurate.
"""

import argparse
import os
import statistics
import sys
import warnings
from contextlib import redirect_stdout
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import timm
import torch
from page_sections import markdown
from runtime_cases import FILES
from speed import describe_machine, time_in_turns

import vision_attn as va
from vision_attn.recipes.export import export_program

NETWORKS = ("resnet18", "mobilenetv3_small_100", "convnext_atto")


def build(name, with_block):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10).eval()
    for weights in model.parameters():
        if not weights.any():  # compilers remove branches that are multiplied by zero, as in an untrained network
            torch.nn.init.constant_(weights, 0.1)
    if with_block:
        va.insert_(model, stages=-2, gate_init=0.5)
        va.set_impl_(model, "sdpa")
    return model


def compile_files(model, image, suffixes, folder):
    """Yield each suffix with a function that runs the exported file."""
    folder.mkdir()
    program = export_program(model, image, ())
    for suffix in suffixes:
        FILES[suffix].write(program, folder / f"network{suffix}", "{}")
        yield suffix, partial(FILES[suffix].open(folder / f"network{suffix}"), image)


def ratio_with_quartiles(plain, with_block):
    low, middle, high = statistics.quantiles([b / a for a, b in zip(plain, with_block, strict=True)], n=4)
    return f"{middle:.2f} ({low:.2f}…{high:.2f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=NETWORKS, metavar="NAME", help="names of timm models")
    parser.add_argument(
        "--suffixes", nargs="+", default=[".onnx"], choices=list(FILES), help="suffixes of file formats"
    )
    parser.add_argument("--rounds", type=int, default=30, help="number of measurements of each file")
    options = parser.parse_args()
    if missing := [name for suffix in options.suffixes for name in FILES[suffix].packages if not find_spec(name)]:
        parser.error(f"install the packages {', '.join(missing)}")
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # some runtimes start one thread per core
    warnings.simplefilter("ignore")  # raised by exporters
    image, rows = torch.rand(1, 3, 224, 224, generator=torch.Generator().manual_seed(0)), []
    for name in options.networks:
        with TemporaryDirectory() as folder, torch.no_grad(), redirect_stdout(sys.stderr):
            calls = {
                (suffix, with_block): call
                for with_block in (False, True)
                for suffix, call in compile_files(
                    build(name, with_block), image, options.suffixes, Path(folder, str(with_block))
                )
            }
            seconds = time_in_turns(calls, rounds=options.rounds, threads=1)
        for suffix in options.suffixes:
            plain, with_block = seconds[suffix, False], seconds[suffix, True]
            milliseconds = f"{1000 * statistics.median(plain):.1f} ms"
            rows.append((name, FILES[suffix].runtime, milliseconds, ratio_with_quartiles(plain, with_block)))
            print(*rows[-1], file=sys.stderr, flush=True)
    print(markdown([("network", "runtime", "without", "ratio"), *rows], left=(0, 1)))
    print(f"\n{describe_machine(image.device, 1, torch.float32)}; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()

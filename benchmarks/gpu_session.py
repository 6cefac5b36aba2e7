"""Run all measurements that need a GPU, in one command of at most ten minutes.

    python benchmarks/gpu_session.py --output gpu.json
    python benchmarks/gpu_session.py --steps layers flex --output gpu.json

The output file is written after every measurement, so that an interrupted session loses only the current one.
Candidates of a row take turns; times are medians in microseconds, with the interquartile range.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import timm
import torch
from timm.layers.attention2d import Attention2d as TimmAttention2d
from timm.layers.bottleneck_attn import BottleneckAttn
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torchvision.models.swin_transformer import ShiftedWindowAttention

import vision_attn as va

ROUNDS, REPEATS = 15, 20
DTYPE = torch.bfloat16
#: Largest allowed difference of FlexAttention from the default, as a fraction of the largest output in bfloat16.
TOLERANCE = 2e-2


class SwinWindows(nn.Module):
    """torchvision's windows for feature maps ``(b, c, h, w)``."""

    def __init__(self, channels, shift, num_heads):
        super().__init__()
        self.layer = ShiftedWindowAttention(channels, [7, 7], [shift, shift], num_heads)

    def forward(self, x):
        return self.layer(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def windows(shift):
    return {
        "vision_attn": va.Attention2d(96, 3, pattern=va.Window(7, shift), position=va.RelPosTable()),
        "torchvision": SwinWindows(96, shift, 3),
    }


def relative(side):
    return {
        "vision_attn": va.Attention2d(256, 8, position=va.RelPosDecomposed((side, side))),
        "timm": BottleneckAttn(256, feat_size=(side, side), num_heads=8),
    }


def plain():
    return {"vision_attn": va.Attention2d(256, 8), "timm": TimmAttention2d(256, num_heads=8)}


#: Input shape and candidates of each row.
LAYERS = {
    **{f"full, {s}×{s}": ((b, 256, s, s), plain) for b, s in ((64, 7), (64, 14), (32, 28), (8, 56))},
    **{f"RelPosDecomposed, {s}×{s}": ((b, 256, s, s), lambda s=s: relative(s)) for b, s in ((64, 14), (32, 28))},
    "Window(7)": ((64, 96, 56, 56), lambda: windows(0)),
    "Window(7, shift=3)": ((64, 96, 56, 56), lambda: windows(3)),
    "Rope, 14×14": ((64, 256, 14, 14), lambda: {"vision_attn": va.Attention2d(256, 8, position=va.Rope())}),
    "Neighborhood(7)": ((8, 64, 56, 56), lambda: {"vision_attn": va.Attention2d(64, 2, pattern=va.Neighborhood(7))}),
    "AttentionBlock2d, 14×14": (
        (64, 256, 14, 14),
        lambda: {"vision_attn": va.AttentionBlock2d(256), "timm, layer only": TimmAttention2d(256, num_heads=8)},
    ),
}
#: Rows that are also compiled, which takes about half a minute each.
COMPILED = ("full, 14×14", "AttentionBlock2d, 14×14")

FLEX = {
    "Neighborhood(7), RelPosDecomposed": (
        (8, 64, 56, 56),
        {"pattern": va.Neighborhood(7), "position": va.RelPosDecomposed()},
    ),
    "Neighborhood(7)": ((8, 64, 56, 56), {"pattern": va.Neighborhood(7)}),
    "full, RelPosDecomposed": ((8, 64, 28, 28), {"position": va.RelPosDecomposed((28, 28))}),
}


# --- measurements -----------------------------------------------------------------------------------------------------


def time_in_turns(calls, rounds=ROUNDS, repeats=REPEATS):
    """Return the median and the interquartile range of each call, in microseconds."""
    seconds = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(3):
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            torch.cuda.synchronize()
            seconds[name].append((time.perf_counter() - start) / repeats)
    quartiles = {name: np.quantile(values, (0.25, 0.5, 0.75)) * 1e6 for name, values in seconds.items()}
    return {name: {"median": round(q[1], 1), "range": round(q[2] - q[0], 1)} for name, q in quartiles.items()}


def kernel_time(call):
    """Return the microseconds that kernels run in a call, and their number."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    events = [event for event in trace.events() if "CUDA" in str(event.device_type)]
    return {"microseconds": round(sum(event.device_time for event in events), 1), "kernels": len(events)}


def peak_memory(call):
    """Return the peak memory of a call after the first one, in MiB."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def capture(module, x):
    """Return the replay of a CUDA graph of a forward pass."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(3):
            module(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        module(x)
    return graph.replay


def passes(module, x):
    """Return a forward pass, and a forward and backward pass that also computes gradients of the parameters."""
    trained, leaves = x.detach().requires_grad_(), [p for p in module.parameters() if p.requires_grad]
    with torch.no_grad():
        gradient = torch.randn_like(module(x))

    def forward():
        with torch.no_grad():
            module(x)

    return forward, lambda: torch.autograd.grad(module(trained), [trained, *leaves], gradient)


def make_input(shape):
    return torch.randn(shape, device="cuda", dtype=DTYPE).to(memory_format=torch.channels_last)


# --- steps ------------------------------------------------------------------------------------------------------------


def measure_layers(save):
    for name, (shape, build) in LAYERS.items():
        modules = {key: module.to("cuda", DTYPE) for key, module in build().items()}
        x, row = make_input(shape), {}
        both = {key: passes(module, x) for key, module in modules.items()}
        for number, kind in enumerate(("forward", "gradients")):
            calls = {key: pair[number] for key, pair in both.items()}
            row[kind] = time_in_turns(calls)
            row[f"{kind}, kernels"] = {key: kernel_time(call) for key, call in calls.items()}
            row[f"{kind}, MiB"] = {key: peak_memory(call) for key, call in calls.items()}
        row["forward, CUDA graph"] = time_in_turns({key: capture(module, x) for key, module in modules.items()})
        if name in COMPILED:
            compiled = {key: passes(torch.compile(module), x) for key, module in modules.items()}
            for number, kind in enumerate(("forward", "gradients")):
                row[f"{kind}, compiled"] = time_in_turns({key: pair[number] for key, pair in compiled.items()})
        save(name, row)


def measure_flex(save):
    for name, (shape, options) in FLEX.items():
        modules, x = {}, make_input(shape)
        for impl in ("auto", "flex"):
            torch.manual_seed(0)
            modules[impl] = va.Attention2d(64, 2, impl=impl, **options).to("cuda", DTYPE)
        with torch.no_grad():
            outputs = {impl: module(x).float() for impl, module in modules.items()}
        difference = float((outputs["auto"] - outputs["flex"]).abs().max() / outputs["auto"].abs().max())
        both = {impl: passes(module, x) for impl, module in modules.items()}
        row = {"difference": difference, "within tolerance": difference <= TOLERANCE}
        for number, kind in enumerate(("forward", "gradients")):
            calls = {impl: pair[number] for impl, pair in both.items()}
            row[kind] = time_in_turns(calls)
            row[f"{kind}, MiB"] = {impl: peak_memory(call) for impl, call in calls.items()}
        save(name, row)


def measure_network(save):
    """Measure training steps of resnet50 with two blocks, in bfloat16 with autocast."""
    x, labels = make_input((64, 3, 224, 224)).float(), torch.randint(1000, (64,), device="cuda")
    calls = {}
    for name in ("resnet50", "resnet50 with two blocks", "resnet50 with two blocks, compiled"):
        model = timm.create_model("resnet50").to("cuda", memory_format=torch.channels_last)
        if "blocks" in name:
            va.insert_(model, stages=[-2, -1])
        run = torch.compile(model) if "compiled" in name else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(run=run, optimizer=optimizer):
            with torch.autocast("cuda", DTYPE):
                loss = nn.functional.cross_entropy(run(x), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        calls[name] = step
    save("training step", time_in_turns(calls, rounds=5, repeats=5))


def run_tests(save):
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    save("pytest -m gpu", {"exit status": done.returncode, "end": done.stdout[-4000:]})


STEPS = {"layers": measure_layers, "flex": measure_flex, "network": measure_network, "tests": run_tests}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), help="measurements, in this order")
    parser.add_argument("--output", type=Path, default=Path("gpu.json"), help="JSON file for all measurements")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device is available")
    packages = {name: version(name) for name in ("torch", "torchvision", "timm")}
    about = {"device": torch.cuda.get_device_name(), "python": platform.python_version(), **packages}
    results = {"about": {**about, "threads": torch.get_num_threads(), "dtype": str(DTYPE)}}

    def save(name, row):
        results[name] = row
        print(name, json.dumps(row), flush=True)
        partial = options.output.with_suffix(".part")
        partial.write_text(json.dumps(results, indent=1, ensure_ascii=False))
        os.replace(partial, options.output)

    for step in options.steps:
        try:
            STEPS[step](save)
        except Exception as error:  # the other steps still run
            save(f"{step} failed", f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()

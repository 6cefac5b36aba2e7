"""Checkpoints with random formats, entries, keys, dtypes and objects: what is read equals what was written."""

import argparse
import datetime
import random
import tempfile
from collections import OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, seed, settings, strategies as st
from safetensors.torch import save_file
from small_networks import Net, copied, randomize_
from torch import nn

import vision_attn as va

#: Entries of training scripts around the weights, from outside to inside.
ENTRIES = st.sampled_from(["", "state_dict", "model", "net", "params", "checkpoint.model", "custom", "learner.student"])
WRAPPERS = st.lists(st.sampled_from(["module.", "_orig_mod.", "_fsdp_wrapped_module."]), max_size=2, unique=True)
PREFIXES = st.sampled_from(["", "backbone.", "encoder.model.", "0."])
#: Key styles: the replacement in the file, and the pairs that undo it.
RENAMED = (("conv.", "features_"), ("norm.", "bn_")), ((r"features_", "conv."), (r"bn_", "norm."))
NESTED = (("conv", "stage1.conv"),), (("^stage1\\.", ""),)
STYLES = st.sampled_from([((), ()), RENAMED, NESTED])
#: Objects that training scripts save beside the weights.
EXTRAS = {
    "epoch": 7, "best": 0.5, "loss": np.float64(0.25), "when": datetime.date(2026, 1, 2), "big": 2**70, "text": "ü" * 9,
    "args": argparse.Namespace(lr=0.1, names=["a"]), "rng": torch.get_rng_state(), "path": Path("runs/1"),
    "history": [{"loss": 1.0}, (1, None, True)], "counts": defaultdict(int, a=2), "bytes": b"\x00\xff", "set": {1, 2},
    "array": np.arange(6.0).reshape(2, 3), "optimizer": torch.optim.Adam([nn.Parameter(torch.ones(2))]).state_dict(),
    "shape": torch.Size([1, 2]), "dtype": torch.bfloat16,
}  # fmt: skip
CASES = {
    "kind": st.sampled_from(["zip", "legacy", "safetensors"]),
    "dtype": st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    "protocol": st.sampled_from([2, 3, 4, 5]),
    "entry": ENTRIES, "wrappers": WRAPPERS, "prefix": PREFIXES, "style": STYLES,
    "extras": st.sets(st.sampled_from(sorted(EXTRAS)), max_size=5),
    "layout": st.sampled_from(["as is", "transposed", "shared storage", "parameters"]),
    "inserted": st.booleans(), "crc": st.booleans(), "numbers": st.integers(0, 2**31),
}  # fmt: skip


def network(inserted):
    run = lambda net, x: net.fc(net.norm(net.conv(x)).mean((2, 3)))  # noqa: E731
    net = Net(run, conv=nn.Conv2d(3, 8, 3), norm=nn.BatchNorm2d(8), fc=nn.Linear(8, 2))
    if inserted:
        va.insert_(net, names="norm", num_heads=2, example_input=torch.zeros(1, 3, 8, 8))
    return randomize_(net)


def lay_out(state, layout):
    """Return the tensors with another memory layout, which does not change their values."""
    if layout == "transposed":
        return {key: x.mT.contiguous().mT if x.dim() > 1 else x for key, x in state.items()}
    if layout == "shared storage":
        parts = torch.cat([x.double().flatten() for x in state.values()]).split([x.numel() for x in state.values()])
        pairs = zip(state.items(), parts, strict=True)
        return {key: y.view(x.shape) if x.dtype == torch.float64 else x for (key, x), y in pairs}
    if layout == "parameters":
        return {key: nn.Parameter(x, x.is_floating_point()) for key, x in state.items()}
    return state


def write(path, kind, state, entry, extras, protocol, crc):
    if kind == "safetensors":  # contains tensors only
        return save_file({key: x.detach().contiguous().clone() for key, x in state.items()}, path)
    content = OrderedDict(state)
    for name in reversed(entry.split(".") if entry else ()):
        content = {name: content}
    content = {**{name: EXTRAS[name] for name in extras}, **content} if entry else content
    torch.serialization.set_crc32_options(crc)
    try:
        torch.save(content, path, pickle_protocol=protocol, _use_new_zipfile_serialization=kind == "zip")
    finally:
        torch.serialization.set_crc32_options(True)
    return None


def check(kind, dtype, protocol, entry, wrappers, prefix, style, extras, layout, inserted, crc, numbers):
    torch.manual_seed(numbers)
    source, target = network(inserted), network(inserted)
    state = {key: x.to(dtype) if x.is_floating_point() else x for key, x in source.state_dict().items()}
    expected = {key: x.to(source.state_dict()[key]) for key, x in copied(source.to(dtype)).items()}
    renames, undo = style
    named = {}
    for key, x in lay_out(state, layout).items():
        for old, new in renames:
            key = key.replace(old, new, 1)
        named["".join(wrappers) + prefix + key] = x
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("net.safetensors" if kind == "safetensors" else "net.pth")
        write(path, kind, named, entry, extras, protocol, crc)
        report = va.load_checkpoint_(target, path, prefix=prefix if undo else "", rename=undo)
    assert set(report.loaded) == set(expected)
    assert (report.entry, report.prefix) == ("" if kind == "safetensors" else entry, prefix)
    for key, x in target.state_dict().items():
        torch.testing.assert_close(x, expected[key].to(x.dtype), rtol=0, atol=0)


test_read_equals_written = settings(max_examples=60)(given(**CASES)(check))
test_read_equals_written.__name__ = "test_read_equals_written"


@pytest.mark.thorough
def test_read_equals_written_with_random_seed():
    print(f"seed {(number := random.SystemRandom().randrange(2**32))}")
    seed(number)(settings(max_examples=5000, derandomize=False)(given(**CASES)(check)))()

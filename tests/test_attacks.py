"""Guarantees of docs/SECURITY.md for hostile and damaged files, network access and wrong arguments."""

import inspect
import os
import random
import re
import socket
import subprocess
import sys

import attack_files
import numpy as np
import pytest
import torch
from networks import convolutions
from torch import nn

import vision_attn as va
from vision_attn.attention.implementations import attend
from vision_attn.networks.capture.figures import attention_figure
from vision_attn.networks.capture.maps import AttentionMap, AttentionMaps


def test_flipped_bits_are_detected(tmp_path):
    """Checksums of archives and hashes of adapters detect flipped bits in the content."""
    refused = 0
    files = attack_files.honest(tmp_path)
    for path in (tmp_path / "zip.pth", tmp_path / "adapter.safetensors"):
        content, original = path.read_bytes(), attack_files.comparable(files[path](path))
        for bit in random.Random(0).sample(range(8 * len(content)), 150):
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            try:
                assert attack_files.comparable(files[path](path)) == original
            except va.errors.CheckpointError:
                refused += 1
    assert refused > 150


def test_tests_have_no_network():
    with socket.socket() as one, pytest.raises(pytest.fail.Exception, match=r"192.0.2.1"):
        one.connect(("192.0.2.1", 80))


@pytest.mark.slow
def test_hostile_and_mutated_files_are_read_or_rejected():
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # forked processes do not inherit threads
    done = subprocess.run(
        [sys.executable, attack_files.__file__], capture_output=True, text=True, timeout=300, env=environment
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert int(re.match(r"\d+", done.stdout)[0]) > 270


# --- wrong arguments --------------------------------------------------------------------------------------------------

SIZES = {"channels": 8, "num_heads": 2}
AUGMENTED = {"in_channels": 8, "out_channels": 8, "num_heads": 2, "key_channels": 4, "value_channels": 4}
RANKS = [getattr(va, f"{kind}{rank}d") for kind in ("Attention", "AttentionBlock") for rank in (1, 2, 3)]
#: Blocks, patterns and position encodings, with valid arguments.
PARTS = [
    *(("block", make, SIZES) for make in (*RANKS, va.LinearAttention2d, va.StridedAttention2d, va.TransformerBlock2d)),
    ("block", va.AugmentedConv2d, AUGMENTED),
    *(("pattern", make, {"size": 2}) for make in (va.Window, va.Grid)),
    *(("pattern", va.Halo, {"block_size": 2, "halo_size": 1}), ("pattern", va.Neighborhood, {"kernel_size": 3})),
    *(("position", make, {"feat_size": (4, 5)}) for make in (va.RelPosDecomposed, va.RelPosTable, va.AbsPos)),
    *(("position", make, {}) for make in (va.Rope2d, va.SinCos, va.ConditionalPos)),
]
#: Valid and invalid values for any argument.
ANYTHING = (
    None, True, False, 0, 1, 2, -1, 2**31, 10**30, 0.0, 0.5, -1.0, 1e300, float("nan"), float("inf"), "", "full",
    "a\x1b[2J\nb", "\0", b"0", (), [], {}, (2, 3), [1], (1, 2, 3, 4), [None], {0}, object(), int, len, range(2),
    np.int64(2), np.float32(0.5), np.ones(2), torch.tensor(2), torch.ones(2), torch.ones(1, 8, 4, 5), torch.float16,
    torch.int64, "cpu", "meta", "cuda:99", "einx", nn.ReLU(), va.Window(2), va.RelPosTable(), va.Attention2d, "mean",
)  # fmt: skip


def test_invalid_arguments_give_a_result_or_an_error_that_names_them():
    for number in range(300):
        rng = random.Random(number)
        kind, make, arguments = rng.choice(PARTS)
        names = [one.name for one in inspect.signature(make).parameters.values() if one.kind != one.VAR_KEYWORD]
        changed, value, failure = rng.choice(names), rng.choice(ANYTHING), None
        try:
            part = make(**{**arguments, changed: value})
            block = part if kind == "block" else va.Attention2d(8, 2, **{kind: part})
            shape, like = (4, 5, 3)[: getattr(block, "rank", 2)], next(block.parameters())
            with torch.no_grad():
                block.eval()(torch.randn(1, 8, *shape, device=like.device, dtype=like.dtype))
        except Exception as error:
            failure = error
        if failure is not None and not re.search("allocate memory|Storage size|overflow", str(failure)):
            assert isinstance(failure, ValueError | TypeError), (make, changed, value, failure)
            assert re.search(changed.split("_")[0], str(failure)), (make, changed, value, failure)


def capture(*arguments, **options):
    va.capture(nn.Sequential(va.Attention2d(8, 2)), *arguments, **options).__enter__()


MAPS = AttentionMaps({"0": AttentionMap(torch.ones(1, 1, 1, 1, 1), ((0, 0),), (1, 1))})
QKV = [torch.rand(1, 2, 4, 4)] * 3
IMAGE = torch.rand(1, 3, 4, 4)
#: Argument -> calls that reject a number or a string for it.
CALLS = {
    "model": [
        va.gates, va.remove_, va.swap_, va.stage_names, va.freeze_backbone_, lambda x: va.set_impl_(x, "bmm"),
        lambda x: va.use_impl(x, "bmm").__enter__(), lambda x: va.explore(x, IMAGE, "page.html"),
    ],
    **{name: [lambda x, name=name: attend(**{**dict(zip("qkv", QKV, strict=True)), name: x})] for name in "qkv"},
    "causal": [lambda x: attend(*QKV, causal=x)],
    "dropout": [lambda x: attend(*QKV, dropout=x)],
    "x": [va.Attention2d(8, 2), va.Attention2d(8, 2).attention_weights],
    "queries": [capture, lambda x: capture([x])],
    "heads": [lambda x: capture(heads=x)],
    "residual": [lambda x: MAPS.rollout(residual=x)],
    "sites": [lambda x: capture(sites=torch.tensor(len(str(x))))],
    "images": [lambda x: va.explore(convolutions(3, 8), x, "page.html"), lambda x: attention_figure(x, MAPS["0"])],
    "query": [lambda x: attention_figure(IMAGE, MAPS["0"], query=[x])],
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_a_wrong_type_are_rejected_by_name(name):
    for call in CALLS[name]:
        for wrong in ("3", 3.5):
            with pytest.raises(ValueError, match=rf"^{name}(:| must) "):
                call(wrong)

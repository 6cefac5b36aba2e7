"""What is promised of hostile files, damage and the network, kept; docs/SECURITY.md has a table of it."""

import os
import random
import re
import socket
import subprocess
import sys

import attack_arguments
import attack_files
import attack_numbers
import pytest
import torch

import vision_attn as va
from vision_attn.attention.implementations import attend
from vision_attn.networks.figures import attention_figure
from vision_attn.networks.maps import AttentionMap, Maps
from vision_attn.networks.safe import read_checkpoint


def test_flipped_bits_of_a_checkpoint_never_change_what_is_read(tmp_path):
    """The archive has a checksum of each of its parts: what is read is the same, or refused."""
    path = tmp_path / "last.pth"
    content = {"model": {"weight": torch.randn(20, 20)}, "epoch": 3, "rows": [{"loss": 0.5}]}
    torch.save(content, path)
    whole, refused = path.read_bytes(), 0
    for bit in random.Random(0).sample(range(8 * len(whole)), 500):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            assert attack_files.known(read_checkpoint(path)) == attack_files.known(content)
        except va.CheckpointError:
            refused += 1
    assert refused > 250


def test_a_checkpoint_that_is_cut_at_any_kilobyte_is_refused(tmp_path):
    path = tmp_path / "last.pth"
    torch.save({"model": {f"layer{n}.weight": torch.randn(40, 40) for n in range(40)}, "epoch": 3}, path)
    whole = path.read_bytes()
    assert len(whole) > 250_000
    for length in (*range(0, len(whole), 1024), len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(va.CheckpointError):
            read_checkpoint(path)


def test_random_attention_is_that_of_float64():
    _, wrong = attack_numbers.attack(4, seed=1)
    assert not wrong


def test_the_network_is_out_of_reach_of_the_tests():
    with socket.socket() as one, pytest.raises(pytest.fail.Exception, match=r"a connection to \('192.0.2.1', 80\)"):
        one.connect(("192.0.2.1", 80))


@pytest.mark.slow
def test_hostile_and_mutated_files_are_read_or_refused():
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # a copy of a process has none of its threads
    done = subprocess.run(
        [sys.executable, attack_files.__file__], capture_output=True, text=True, timeout=300, env=environment
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert int(re.match(r"\d+", done.stdout)[0]) > 600


def blocks():
    return attack_arguments.with_blocks()


def seen():
    return Maps({"0": AttentionMap(torch.ones(1, 1, 1, 1, 1), ((0, 0),), (1, 1))})


#: What is given to an argument that it cannot be: each of these was an error that did not name it, or none, once.
CALLS = {
    "model": [
        va.gates, va.remove_, va.swap_, va.stage_names, va.freeze_backbone_, lambda x: va.set_impl_(x, "bmm"),
        lambda x: va.use_impl(x, "bmm").__enter__(),
        lambda x: va.explore(x, torch.rand(1, 3, 4, 4), "page.html"),
    ],
    **{
        name: [lambda x, name=name: attend(**{**dict.fromkeys("qkv", torch.rand(1, 2, 4, 4)), name: x})]
        for name in "qkv"
    },
    "causal": [lambda x: attend(*[torch.rand(1, 2, 4, 4)] * 3, causal=x)],
    "dropout": [lambda x: attend(*[torch.rand(1, 2, 4, 4)] * 3, dropout=x)],
    "x": [va.Attention2d(8, 2), va.Attention2d(8, 2).attention_weights],
    "queries": [lambda x: va.capture(blocks(), x).__enter__(), lambda x: va.capture(blocks(), [x]).__enter__()],
    "heads": [lambda x: va.capture(blocks(), heads=x).__enter__()],
    "residual": [lambda x: seen().rollout(residual=x)],
    "sites": [lambda x: va.capture(blocks(), sites=torch.tensor(len(str(x)))).__enter__()],
    "also_train": [lambda x: va.freeze_backbone_(blocks(), also_train=[x])],
    "where": [
        lambda x: va.swap_(blocks(), where=x),
        lambda x: va.insert_(attack_arguments.network(), where=x, example_input=(1, 3, 8, 8)),
    ],
    "block": [lambda x: va.insert_(attack_arguments.network(), type(x), names="0", example_input=(1, 3, 8, 8))],
    "memory_limit": [lambda x: va.inspect_model(blocks(), example_input=(1, 3, 8, 8), memory_limit=[x])],
    "device": [lambda x, make=make: make(device=x) for make in attack_arguments.MAKERS],
    "dtype": [lambda x, make=make: make(dtype=x) for make in attack_arguments.MAKERS],
    "channels": [lambda x: va.Attention2d(None)],
    "images": [lambda x: va.explore(blocks(), x, "page.html"), lambda x: attention_figure(x, seen()["0"])],
    "titles": [lambda x: va.explore(blocks(), torch.rand(1, 3, 4, 4), "page.html", titles=b"1")],
    "query": [lambda x: attention_figure(torch.rand(1, 3, 4, 4), seen()["0"], query=[x])],
    "Grid: size": [lambda x: va.Grid(10**30)],
    "RelPosTable: feat_size": [lambda x: va.RelPosTable(10**30)],
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_what_an_argument_cannot_be_is_refused_by_its_name(name):
    for call in CALLS[name]:
        for wrong in ("3" if name != "device" else "nowhere", 3.5):
            with pytest.raises(ValueError, match=rf"^{name}(:| must) "):
                call(wrong)


def test_a_temperature_may_be_any_whole_number():
    assert va.Attention2d(8, 2, position=va.SinCos(10**30))(torch.rand(1, 8, 3, 3)).isfinite().all()


def test_wrong_arguments_end_in_a_result_or_an_error_that_names_them():
    _, wrong = attack_arguments.attack(60, seed=20)
    assert not wrong

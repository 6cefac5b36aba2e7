"""What is promised of hostile files, damage and the network, kept; docs/SECURITY.md has a table of it."""

import os
import random
import re
import socket
import subprocess
import sys

import attack_files
import attack_numbers
import pytest
import torch

import vision_attn as va
from vision_attn.attend import attend
from vision_attn.checkpoints import read_checkpoint


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


def test_random_attention_is_that_of_float64():
    _, wrong = attack_numbers.attack(8, seed=1)
    assert not wrong


def test_the_network_is_out_of_reach_of_the_tests():
    with socket.socket() as one, pytest.raises(pytest.fail.Exception, match=r"a connection to \('192.0.2.1', 80\)"):
        one.connect(("192.0.2.1", 80))


def test_importing_opens_no_connection():
    program = """
import sys
sys.addaudithook(lambda event, arguments: print(event) if event.startswith("socket.") else None)
import vision_attn
print("imported")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"imported", "socket.gethostname"}


@pytest.mark.slow
def test_hostile_and_mutated_files_are_read_or_refused():
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # a copy of a process has none of its threads
    done = subprocess.run(
        [sys.executable, attack_files.__file__], capture_output=True, text=True, timeout=300, env=environment
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert int(re.match(r"\d+", done.stdout)[0]) > 900


@pytest.mark.parametrize(
    ("call", "name"),
    [
        *((function, "model") for function in (
            va.gates, va.remove_, va.swap_, va.stage_names, va.freeze_backbone_, va.print_trainable_parameters,
            lambda model: va.explore(model, torch.rand(1, 3, 4, 4), "page.html"),
            lambda model: va.set_impl(model, "bmm"), lambda model: va.use_impl(model, "bmm").__enter__(),
        )),
        *((lambda x, name=name: attend(**{**dict.fromkeys("qkv", torch.rand(1, 2, 4, 4)), name: x}), name) for name in "qkv"),
    ],
)  # fmt: skip
def test_what_is_of_another_type_is_refused_by_the_name_of_the_argument(call, name):
    for wrong in ("3", 3.5):
        with pytest.raises(ValueError, match=rf"^{name} must "):
            call(wrong)

"""Guarantees of docs/SECURITY.md for hostile and damaged files and network access."""

import os
import random
import re
import subprocess
import sys

import attack_files
import pytest

import vision_attn as va


def test_flipped_bits_are_detected(tmp_path):
    """Checksums of archives and hashes of adapters detect flipped bits in the content."""
    refused, files = 0, attack_files.honest(tmp_path)
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


@pytest.mark.slow
def test_hostile_and_mutated_files_are_read_or_rejected():
    line = [sys.executable, attack_files.__file__]
    # Forked processes do not inherit threads.
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, env={"OMP_NUM_THREADS": "1", **os.environ})
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert int(re.match(r"\d+", done.stdout)[0]) > 270

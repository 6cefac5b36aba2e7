"""What is promised of hostile files, damage and the network, kept; docs/SECURITY.md has a table of it."""

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
from torch import nn

import vision_attn as va
from vision_attn.attention.implementations import attend
from vision_attn.networks.figures import attention_figure
from vision_attn.networks.maps import AttentionMap, Maps


def test_flipped_bits_never_change_what_is_read(tmp_path):
    """An archive has a checksum of each of its parts, an adapter a hash: what is read is the same, or refused."""
    refused = 0
    for path, read in attack_files.honest(tmp_path).items():
        if path.stem not in ("zip", "adapter"):
            continue
        whole, original = path.read_bytes(), attack_files.known(read(path))
        for bit in random.Random(0).sample(range(8 * len(whole)), 150):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            try:
                assert attack_files.known(read(path)) == original
            except va.CheckpointError:
                refused += 1
    assert refused > 150


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


# --- wrong arguments --------------------------------------------------------------------------------------------------

SIZES = {"channels": 8, "num_heads": 2}
AUGMENTED = {"in_channels": 8, "out_channels": 8, "num_heads": 2, "key_channels": 4, "value_channels": 4}
#: What makes a block, with arguments that it takes.
BLOCKS = {
    **{getattr(va, f"{kind}{rank}d"): SIZES for kind in ("Attention", "AttentionBlock") for rank in (1, 2, 3)},
    **dict.fromkeys((va.LinearAttention2d, va.StridedAttention2d, va.TransformerBlock2d), SIZES),
    va.AugmentedConv2d: AUGMENTED,
}
#: What makes a pattern or a position term.
PATTERNS = {
    va.Window: {"size": 2},
    va.Grid: {"size": 2},
    va.Halo: {"block_size": 2, "halo_size": 1},
    va.Neighborhood: {"kernel_size": 3},
}
SIZED = {kind: {"feat_size": (4, 5)} for kind in (va.RelPosDecomposed, va.RelPosTable, va.AbsPos)}
PARTS = {"pattern": PATTERNS, "position": {**SIZED, va.Rope2d: {}, va.SinCos: {}, va.ConditionalPos: {}}}
#: What is handed over in the place of any argument.
ANYTHING = (
    None, True, False, 0, 1, 2, -1, 2**31, 10**30, 0.0, 0.5, -1.0, 1e300, float("nan"), float("inf"), "", "full",
    "a\x1b[2J\nb", "\0", b"0", (), [], {}, (2, 3), [1], (1, 2, 3, 4), [None], {0}, object(), int, len, range(2),
    np.int64(2), np.float32(0.5), np.ones(2), torch.tensor(2), torch.ones(2), torch.ones(1, 8, 4, 5), torch.float16,
    torch.int64, "cpu", "meta", "cuda:99", "einx", nn.ReLU(), va.Window(2), va.RelPosTable(), va.Attention2d, "mean",
)  # fmt: skip


def run_with_a_wrong_argument(rng):
    """One call with a wrong argument: what it was, and the error that it ended in."""
    name = rng.choice(("block", *PARTS))
    makers = BLOCKS if name == "block" else PARTS[name]
    make = rng.choice(list(makers))
    given = dict(makers[make])
    takes = [one.name for one in inspect.signature(make).parameters.values() if one.kind != one.VAR_KEYWORD]
    changed = rng.choice(takes)
    given[changed] = rng.choice(ANYTHING)
    what = f"{make.__name__}({changed}={given[changed]!r:.160})"
    try:
        block = make(**given) if name == "block" else va.Attention2d(8, 2, **{name: make(**given)})
        rank = getattr(block, "rank", 2)
        like = next(block.parameters())
        with torch.no_grad():
            block.eval()(torch.randn(1, 8, *(4, 5, 3)[:rank], device=like.device, dtype=like.dtype))
    except Exception as error:
        return what, changed, error
    return what, changed, None


def test_wrong_arguments_end_in_a_result_or_an_error_that_names_them():
    for number in range(300):
        what, changed, error = run_with_a_wrong_argument(random.Random(number))
        if error is not None and not re.search("allocate memory|Storage size|overflow", str(error)):
            assert isinstance(error, ValueError | TypeError), (what, error)
            assert re.search(changed.split("_")[0], str(error)), (what, error)


def network():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))


def blocks():
    model = network()
    va.insert_(model, names=["0", "2"], num_heads=2, example_input=(1, 3, 8, 8))
    return model


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
    "images": [lambda x: va.explore(blocks(), x, "page.html"), lambda x: attention_figure(x, seen()["0"])],
    "titles": [lambda x: va.explore(blocks(), torch.rand(1, 3, 4, 4), "page.html", titles=b"1")],
    "query": [lambda x: attention_figure(torch.rand(1, 3, 4, 4), seen()["0"], query=[x])],
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_what_an_argument_cannot_be_is_refused_by_its_name(name):
    for call in CALLS[name]:
        for wrong in ("3", 3.5):
            with pytest.raises(ValueError, match=rf"^{name}(:| must) "):
                call(wrong)

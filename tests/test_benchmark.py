"""The benchmark: everybody computes what ours does, and times, ratios and memory are what they say."""

import copy
import json

import numpy as np
import pytest
import torch
from torch import nn

import vision_attn as va
from vision_attn.errors import BenchmarkError
from vision_attn.tools.benchmark import contestants, run
from vision_attn.tools.benchmark.contest import Contest
from vision_attn.tools.benchmark.contestants import CONTESTANTS, ROWS
from vision_attn.tools.benchmark.run import peak_memory, run_benchmark, time_in_turns

CPU = torch.device("cpu")
QUICK = {"heads": 2, "device": "cpu", "rounds": 1}
#: A shape that is quick, of each row.
SHAPES = {
    "attention": (1, 16, 4, 4), "backbone": (1, 3, 32, 32), "positions": (1, 16, 3, 4),
    "windows": (1, 16, 14, 14), "shifted-windows": (1, 16, 14, 14), "einx": (1, 16, 4, 4), "memory": (1, 16, 7, 7),
    "choices": (1, 16, 4, 4), "position-choices": (1, 16, 3, 4), "compiled": (1, 16, 4, 4),
    "compiled-backbone": (1, 3, 32, 32),
}  # fmt: skip


def measured(*rows, shapes=(), say=lambda text: None, **options):
    """The tables of a contest whose shapes are numbers."""
    options |= {"rows": rows} if rows else {}
    return run_benchmark(Contest(shapes=tuple(",".join(map(str, shape)) for shape in shapes), **options), say=say)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """No call is repeated to be timed well: the tests do not look at how long it takes."""
    monkeypatch.setattr(run, "SHORTEST", 1e-9)


@pytest.fixture
def small_backbone(monkeypatch):
    create = contestants.timm.create_model
    monkeypatch.setattr(contestants.timm, "create_model", lambda name: create("resnet18"))


def test_a_table_is_what_was_measured_as_text_and_as_a_file(tmp_path):
    said, file = [], tmp_path / "all.json"
    shapes = [(2, 16, 5, 4), (2, 16, 7, 7)]
    found = measured(shapes=shapes, heads=2, device="cpu", rounds=3, threads=1, output=file, say=said.append)
    assert [one.title.split(", ")[2] for one in found] == ["5×4", "7×7"]
    held = json.loads(file.read_text())
    assert torch.__version__ in held["about"]
    assert said[0].startswith(held["about"])
    for one, written, text in zip(found, held["tables"], said[1:], strict=True):
        assert list(written["timings"]) == list(one.timings) == [*ROWS["implementations"].contestants]
        for what in ("forward", "gradients"):
            ours = np.array(one.timings["ours"].seconds[what])
            for name, timing in one.timings.items():
                assert written["timings"][name]["seconds"][what] == timing.seconds[what]
                assert len(timing.seconds[what]) == 3
                assert one.ratio(name, what) == pytest.approx(np.median(ours / timing.seconds[what]))
                assert timing.mebibytes[what] > 0
                assert f"\n{name}  " in text


@pytest.mark.usefixtures("small_backbone")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in ROWS if name != "implementations" and not name.startswith("compiled")),
        ("positions", "bfloat16"),
        *(pytest.param(name, "float32", marks=pytest.mark.slow) for name in ("compiled", "compiled-backbone")),
    ],
)
def test_everybody_in_a_row_runs_and_computes_the_same(name, dtype):
    found = measured(name, shapes=[SHAPES[name]], dtype=dtype, **QUICK)
    assert [one.title.rpartition(", ")[2] for one in found] == list(ROWS[name].layouts)
    assert all(list(one.timings) == list(ROWS[name].contestants) for one in found)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROWS)
def test_rows_on_cuda(name):
    said = []
    measured(name, device="cuda", rounds=2, say=said.append)
    assert torch.cuda.get_device_name() in said[0]


def wrong_block(x, n):
    return va.Attention2d(16, n), va.Attention2d(16, n)


def not_a_number(x, n):
    block = va.Attention2d(16, n)
    broken = copy.deepcopy(block)
    nn.init.constant_(broken.proj.bias, torch.nan)
    return broken, block


@pytest.mark.parametrize("wrong", [wrong_block, not_a_number])
def test_who_does_not_compute_the_same_stops_the_run_before_anything_is_timed(monkeypatch, wrong):
    monkeypatch.setattr(run, "time_in_turns", lambda *arguments, **further: pytest.fail("something was timed"))
    monkeypatch.setitem(ROWS["attention"].contestants, "floor", wrong)
    with pytest.raises(BenchmarkError, match=r"floor: its output on a map of \(1, 16, 4, 4\) differs"):
        measured("attention", shapes=[SHAPES["attention"]], **QUICK)


@pytest.mark.usefixtures("small_backbone")
@pytest.mark.parametrize(
    ("name", "shape", "part"),
    [
        ("timm layers Attention2d", (1, 256, 56, 56), "qkv.weight"),
        ("timm BottleneckAttn", (1, 64, 28, 28), "height_rel"),
        ("torchvision shifted window", (1, 64, 28, 28), "bias_table"),
        ("resnet50, timm's by hand", (1, 3, 64, 64), "gate"),
    ],
)
def test_another_scale_position_or_gate_is_far_outside_of_what_is_allowed(name, shape, part):
    torch.manual_seed(0)
    x = torch.randn(shape)
    module, twin = (one.eval() for one in CONTESTANTS[name](x, 4))
    run.check_output(name, module, twin, x)
    for key, value in twin.named_parameters():
        if key.endswith(part):
            value.data[: len(value) // 3] *= 8
            value.data[len(value) // 3 :] *= 1 if part == "qkv.weight" else 0
    with pytest.raises(BenchmarkError, match="differs from that of ours"):
        run.check_output(name, module, twin, x)


class Tokens(nn.Module):
    """A network with timm's attention, a head of zeros, and a part that evaluation does not use."""

    def __init__(self):
        super().__init__()
        from timm.layers import Attention

        self.attn, self.head, self.other = Attention(8, 1), nn.Linear(8, 4), nn.Linear(3, 4)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x):
        return self.head(self.attn(x.flatten(2).transpose(1, 2)))


def test_a_network_before_and_after_the_swap(monkeypatch):
    networks = {"tokens": Tokens, "plain": lambda: nn.Conv2d(8, 8, 1)}
    monkeypatch.setattr(run, "network_of", lambda name: networks[name]())
    (found,) = measured(swap=["tokens"], shapes=[(1, 8, 4, 4)], **QUICK)
    assert list(found.timings) == ["swapped", "as it was"]
    with pytest.raises(ValueError, match="nothing of plain can be swapped"):
        measured(swap=["plain"], shapes=[(1, 8, 4, 4)], **QUICK)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": 0}, "heads must be a whole number of at least 1"),
        ({"shapes": [(1, 64, 4, 4)], "heads": 7}, "num_heads must divide .*channels=64 and num_heads=7"),
        ({"rows": ["speed"]}, "rows must be among implementations, .*, all; got speed"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        measured(*arguments.pop("rows", ()), device="cpu", **arguments)


def test_contestants_take_turns_and_short_calls_are_repeated(monkeypatch):
    turns = []

    class Pretended:
        def __init__(self, stmt, globals, num_threads):
            self.call = globals["call"]

        def timeit(self, number):
            turns.append((self.call(), number))
            return type("", (), {"mean": {"short": 1e-4, "long": 1.0}[self.call()]})

    monkeypatch.setattr(run, "SHORTEST", 5e-3)
    monkeypatch.setattr(run, "Timer", Pretended)
    found = time_in_turns({"short": lambda: "short", "long": lambda: "long"}, rounds=8)
    assert found == {"short": [1e-4] * 8, "long": [1.0] * 8}
    rounds = [tuple(turns[start : start + 2]) for start in range(4, 20, 2)]
    assert all(sorted(turn) == [("long", 1), ("short", 50)] for turn in rounds)
    assert len(set(rounds)) == 2, "the order changes by the round"


def test_the_peak_is_what_is_held_at_one_moment():
    def one_after_the_other():
        first = torch.ones(1000, 1000)
        del first
        return torch.ones(1000, 1000)

    kept = torch.ones(1000, 1000)
    for call, expected in ((one_after_the_other, 4e6), (lambda: kept + kept * 2, 8e6), (lambda: kept.view(-1), 0)):
        assert peak_memory(call, CPU) == pytest.approx(expected, rel=0.02, abs=1000)

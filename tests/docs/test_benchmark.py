"""The scripts in benchmarks/: comparison of outputs, times, ratios, memory, and generated sections of pages."""

import copy
import json
import re
from types import SimpleNamespace

import candidates
import numpy as np
import pytest
import speed
import timm
import torch
from torch import nn

import vision_attn as va

SHAPES = {
    "attention": "1,16,4,4", "backbone": "1,3,32,32", "positions": "1,16,3,4", "windows": "1,16,14,14",
    "shifted-windows": "1,16,14,14", "einx": "1,16,4,4", "memory": "1,16,7,7", "choices": "1,16,4,4",
    "position-choices": "1,16,3,4", "compiled": "1,16,4,4", "compiled-backbone": "1,3,32,32",
}  # fmt: skip
QUICK = ("--heads", "2", "--device", "cpu", "--rounds", "1", "--threads", "1")


def compare(*arguments):
    return speed.compare(speed.build_parser().parse_args(list(map(str, arguments))))


@pytest.fixture(autouse=True)
def use_single_calls_and_a_small_backbone(monkeypatch, create=timm.create_model):
    monkeypatch.setattr(speed, "MIN_SECONDS", 1e-9)
    monkeypatch.setattr(candidates.timm, "create_model", lambda name: create("resnet18"))


@pytest.mark.slow
def test_tables_are_printed_and_written_to_the_file(tmp_path, capsys):
    file = tmp_path / "times.json"
    tables = compare("--shapes", "2,16,5,4", "2,16,7,7", *QUICK, "--rounds", "3", "--output", file)
    written, printed = json.loads(file.read_text()), capsys.readouterr().out
    assert written["tables"] == tables
    assert torch.__version__ in written["about"]
    assert printed.startswith(written["about"])
    for table in tables:
        timings = table["timings"]
        assert list(timings) == list(candidates.ROWS["implementations"].candidates)
        assert table["title"] in printed
        for name, timing in timings.items():
            for step in ("forward", "gradients"):
                assert len(timing["seconds"][step]) == 3
                assert timing["mebibytes"][step] > 0
                ratios = np.array(timings["vision_attn"]["seconds"][step]) / timing["seconds"][step]
                assert speed.speedup(timings, name, step) == pytest.approx(np.median(ratios))


ROWS = [pytest.param(x, "float32", marks=[pytest.mark.slow] * bool(re.search("compiled|backbone", x))) for x in SHAPES]


@pytest.mark.parametrize(("name", "dtype"), [*ROWS, ("positions", "bfloat16")])
def test_candidates_of_a_row_have_equal_outputs(name, dtype):
    assert {"implementations", *SHAPES} == set(candidates.ROWS), "SHAPES must have an entry for every row"
    tables = compare("--rows", name, "--shapes", SHAPES[name], "--dtype", dtype, *QUICK)
    row = candidates.ROWS[name]
    assert [table["title"].rpartition(", ")[2] for table in tables] == list(row.layouts)
    assert all(list(table["timings"]) == list(row.candidates) for table in tables)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # raised by torch's compiler, and by cuBLAS in a thread without a CUDA context
@pytest.mark.parametrize("name", candidates.ROWS)
def test_rows_on_cuda(name, capsys):
    compare("--rows", name, "--device", "cuda", "--rounds", "2")
    assert torch.cuda.get_device_name() in capsys.readouterr().out


@pytest.mark.parametrize("bias", [0.5, torch.nan])
def test_a_candidate_with_another_output_is_not_timed(monkeypatch, bias):
    def wrong(x, n):
        block = va.Attention2d(16, n)
        broken = copy.deepcopy(block)
        nn.init.constant_(broken.proj.bias, bias)
        return broken, block

    monkeypatch.setattr(speed, "time_in_turns", lambda *arguments, **options: pytest.fail("a candidate was timed"))
    monkeypatch.setitem(candidates.ROWS["attention"].candidates, "lower bound", wrong)
    with pytest.raises(RuntimeError, match=r"lower bound.*\(1, 16, 4, 4\)"):
        compare("--rows", "attention", "--shapes", SHAPES["attention"], *QUICK)


def test_a_network_with_and_without_the_swap(monkeypatch):
    head = nn.Linear(8, 4, bias=False)
    head.unused = nn.Linear(3, 4)
    nn.init.zeros_(head.weight)
    tokens = nn.Sequential(nn.Flatten(2), nn.Linear(16, 8), timm.layers.Attention(8, 1), head)
    monkeypatch.setattr(speed, "create_network", {"tokens": tokens, "plain": nn.Conv2d(8, 8, 1)}.get)
    (table,) = compare("--swap", "tokens", "--shapes", "1,8,4,4", *QUICK)
    assert list(table["timings"]) == ["swapped", "original"]
    with pytest.raises(ValueError, match="--swap: plain"):
        compare("--swap", "plain", "--shapes", "1,8,4,4", *QUICK)


def test_calls_take_turns_and_short_calls_are_repeated(monkeypatch):
    turns = []

    def timer(stmt, globals, num_threads):
        def timeit(number):
            turns.append((globals["call"](), number))
            return SimpleNamespace(mean={"short": 1e-4, "long": 1.0}[turns[-1][0]])

        return SimpleNamespace(timeit=timeit)

    monkeypatch.setattr(speed, "MIN_SECONDS", 5e-3)
    monkeypatch.setattr(speed, "Timer", timer)
    seconds = speed.time_in_turns({"short": lambda: "short", "long": lambda: "long"}, rounds=8, threads=1)
    assert seconds == {"short": [1e-4] * 8, "long": [1.0] * 8}
    rounds = [tuple(turns[start : start + 2]) for start in range(2, 18, 2)]
    assert all(sorted(turn) == [("long", 1), ("short", 50)] for turn in rounds)
    assert len(set(rounds)) == 2, "the order must vary"


def test_peak_memory_counts_tensors_that_exist_at_the_same_time():
    def one_after_the_other():
        first = torch.ones(1000, 1000)
        del first
        return torch.ones(1000, 1000)

    kept = torch.ones(1000, 1000)
    for call, expected in ((one_after_the_other, 4e6), (lambda: kept + kept * 2, 8e6), (lambda: kept.view(-1), 0)):
        assert speed.peak_memory(call, torch.device("cpu")) == pytest.approx(expected, rel=0.02, abs=1000)

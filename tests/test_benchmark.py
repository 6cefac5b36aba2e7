"""The benchmark: who is in it, that they compute the same, and that time, memory and ratios are what they say."""

import json
import os
import subprocess
import sys
from dataclasses import fields

import numpy as np
import pytest
import torch

from vision_attn import IMPLS, Attention2d, RelPosDecomposed, cli
from vision_attn.benchmark import contestants, libraries, run, timing
from vision_attn.benchmark.contestants import FLOOR, contestants_relative, make_map
from vision_attn.benchmark.errors import BenchmarkError
from vision_attn.benchmark.machine import Machine, describe, prepared
from vision_attn.benchmark.marks import judge
from vision_attn.benchmark.memory import peak_memory
from vision_attn.benchmark.report import as_json, checklist, header, table
from vision_attn.benchmark.results import Cost, Group, Row
from vision_attn.benchmark.settings import RELATIVE_SHAPES, SHAPES, Settings
from vision_attn.benchmark.timing import time_in_turns

CPU = torch.device("cpu")
TINY = ("--shapes", "2,16,5,4", "--relative-shapes", "1,16,3,4", "--heads", "2", "--device", "cpu", "--rounds", "2")
PLAIN = [
    "floor", *sorted(f"ours {impl}" for impl in IMPLS), "notebook bmm", "notebook einx", "timm layers Attention2d",
    "timm maxxvit Attention2d", "torch MultiheadAttention",
]  # fmt: skip
RELATIVE = ["ours sdpa", "timm BottleneckAttn"]


def bench(capsys, *arguments):
    code = cli.main(["bench", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("--dtype", "bfloat16"), ("--channels-last",), ("--dtype", "float16")])
def test_one_command_measures_everyone(capsys, tmp_path, options):
    code, out, err = bench(capsys, *TINY, *options, "--output", tmp_path / "all.json")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    for name in (*PLAIN, *RELATIVE):
        expected = 1 + (name == "ours sdpa")
        assert sum(line.startswith(name + "  ") for line in lines) == expected, name
    found = json.loads((tmp_path / "all.json").read_text())
    plain, relative = (group["contestants"] for group in found["groups"])
    assert sorted(plain) == sorted(PLAIN)
    assert sorted(relative) == RELATIVE
    for group in (plain, relative):
        for name, row in group.items():
            for what in ("forward", "forward_backward"):
                if (name, what) == ("ours flex", "forward_backward"):
                    assert row[what] is None, "flex has no backward pass on the CPU"
                    continue
                cost = row[what]
                assert len(cost["seconds"]) == 2
                assert min(cost["seconds"]) > 0
                assert cost["median_seconds"] == pytest.approx(np.median(cost["seconds"]))
                assert (cost["peak_bytes"] is None) == (name == FLOOR)
    assert found["settings"]["heads"] == 2
    assert found["machine"]["versions"]["torch"] == torch.__version__


def test_the_machine_is_set_up_and_left_as_it_was():
    def state():
        return torch.get_num_threads(), torch.backends.cudnn.allow_tf32, torch.get_rng_state().tolist()

    def fail_inside():
        with prepared(Settings(threads=3), CPU):
            assert torch.get_num_threads() == describe(CPU).threads == 3
            assert not torch.backends.cudnn.allow_tf32
            torch.randn(3)
            raise RuntimeError("whatever happens")

    before = state()
    with pytest.raises(RuntimeError, match="whatever happens"):
        fail_inside()
    assert state() == before


def test_the_command_measures_with_the_threads_asked_for(capsys, monkeypatch):
    def measure(*arguments):
        raise ValueError(f"{torch.get_num_threads()} threads")

    monkeypatch.setattr(run, "measure", measure)
    code, out, err = bench(capsys, *TINY, "--threads", 3)
    assert code == 2
    assert "3 threads" in err
    assert "threads 3" in out


def test_a_log_file_holds_the_report_and_nothing_else():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("KINETO_LOG_LEVEL", None)
    command = [sys.executable, "-W", "error", "-m", "vision_attn", "bench", *TINY]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stderr == ""
    assert "\r" not in done.stdout


def test_progress_is_shown_to_a_person_and_erased(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, out, err = bench(capsys, *TINY)
    assert code == 0
    assert "2,16,5,4, forward + backward: round 2/2" in err
    assert err.endswith("\r\033[K")
    assert "round 2/2" not in out


def test_every_flag_sets_what_it_names():
    arguments = {
        "--shapes": "1,8,4,4 2,8,4,4", "--relative-shapes": "1,8,3,3", "--heads": "4", "--device": "cpu",
        "--dtype": "float16", "--threads": "3", "--rounds": "2", "--channels-last": None, "--output": "all.json",
    }  # fmt: skip
    assert {flag.lstrip("-").replace("-", "_") for flag in arguments} == {field.name for field in fields(Settings)}
    for flag, value in arguments.items():
        options = vars(cli.parser().parse_args(["bench", flag, *(value.split() if value else [])]))
        name = flag.lstrip("-").replace("-", "_")
        assert options[name] != getattr(Settings(), name)
        assert set(options) == {"command", "traceback", name}, "a flag that is not given sets nothing"


def test_the_shapes_given_are_those_measured():
    plain, relative = ((1, 8, 4, 4),), ((1, 8, 3, 3),)
    assert Settings().groups == (*((shape, False) for shape in SHAPES), *((shape, True) for shape in RELATIVE_SHAPES))
    assert Settings(shapes=plain).groups == ((plain[0], False),)
    assert Settings(relative_shapes=relative).groups == ((relative[0], True),)
    assert Settings(shapes=plain, relative_shapes=relative).groups == ((plain[0], False), (relative[0], True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "8,64,8"], "shapes must each be batch,channels,height,width"),
        (["--shapes", "8,64,8,x"], "got '8,64,8,x'"),
        (["--shapes", "8,64,0,8"], "got '8,64,0,8'"),
        (["--relative-shapes", "8x64x8x8"], "relative_shapes must each be"),
        (["--shapes", "1,64,4,4", "--heads", "7"], "heads must divide channels; got channels=64 and heads=7"),
        (["--heads", "0"], "heads must be a whole number of at least 1"),
        (["--rounds", "0"], "rounds must be a whole number of at least 1"),
        (["--threads", "0"], "threads must be a whole number of at least 1"),
    ],
)
def test_bad_usage_exits_with_2(capsys, arguments, message):
    code, out, err = bench(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("vision-attn: error: ")
    assert message in err
    assert "Traceback" not in err


def test_a_device_that_is_not_there_exits_with_2(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = bench(capsys, *TINY, "--device", "cuda")
    assert (code, out) == (2, "")
    assert "there is no CUDA device" in err


@pytest.mark.parametrize("arguments", [["--dtype", "float8"], ["--device", "tpu"], ["--rounds", "few"]])
def test_what_argparse_refuses_exits_with_2(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", *arguments])
    assert caught.value.code == 2
    assert "usage: vision-attn bench" in capsys.readouterr().err


def test_settings_made_in_python_are_checked_alike():
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16; got 'float8'"):
        Settings(dtype="float8")
    with pytest.raises(ValueError, match="device must be one of cpu, cuda; got 'tpu'"):
        Settings(device="tpu")


@pytest.mark.parametrize(("output", "message"), [("nowhere/all.json", "there is no folder"), ("", "is a folder")])
def test_an_output_that_cannot_be_written_is_said_before_anything_is_measured(capsys, tmp_path, output, message):
    code, out, err = bench(capsys, *TINY, "--output", tmp_path / output)
    assert (code, out) == (1, "")
    assert message in err
    assert "Traceback" not in err


# --- the same computation ---------------------------------------------------------------------------------------------


def other_weights(ours):
    return libraries.torch_multihead(Attention2d(ours.channels, ours.num_heads))


def other_head_order(ours):
    """What a strict load of another layout's weights gives: shapes cannot tell."""
    module = libraries.timm_maxxvit(ours)
    module.load_state_dict(ours.state_dict())
    return module


def other_scale(ours):
    module = libraries.OTHERS["notebook bmm"](ours)
    module.scale = 1.0
    return module


def other_size(ours):
    return torch.nn.Sequential(libraries.timm_layers(ours), torch.nn.AvgPool2d(2))


def not_a_number(ours):
    module = libraries.timm_layers(ours)
    torch.nn.init.constant_(module.proj.bias, torch.nan)
    return module


@pytest.mark.parametrize("wrong", [other_weights, other_head_order, other_scale, other_size, not_a_number])
def test_who_does_not_compute_the_same_stops_the_run_before_anything_is_timed(capsys, monkeypatch, tmp_path, wrong):
    monkeypatch.setitem(libraries.OTHERS, "somebody else", wrong)
    monkeypatch.setattr(timing, "seconds", lambda *arguments: pytest.fail("something was timed"))
    code, out, err = bench(capsys, *TINY, "--output", tmp_path / "all.json")
    assert code == 1
    assert "somebody else at 2,16,5,4: its output" in err
    assert "nothing is timed there" in err
    assert "Traceback" not in err
    assert "contestant  " not in out
    assert not (tmp_path / "all.json").exists()


def test_with_relative_positions_who_leaves_them_out_stops_the_run(capsys, monkeypatch):
    def without(ours):
        module = libraries.timm_bottleneck(ours)
        torch.nn.init.zeros_(module.pos_embed.height_rel)
        return module

    monkeypatch.setitem(libraries.OTHERS_RELATIVE, "timm BottleneckAttn", without)
    code, _, err = bench(capsys, *TINY)
    assert code == 1
    assert "timm BottleneckAttn at 1,16,3,4 with relative positions: its output differs" in err


@pytest.mark.parametrize("shape", SHAPES)
def test_at_every_default_shape_a_missing_scale_is_far_outside_of_what_is_allowed(shape):
    """The larger the map, the more attention is a mean of all values: the comparison must still see what it is for."""
    torch.manual_seed(0)
    x = make_map((1, *shape[1:]), device=CPU, dtype=torch.float32, channels_last=False)
    ours = Attention2d(shape[1], 8)
    wrong = Attention2d(shape[1], 8, scale=1.0)
    wrong.load_state_dict(ours.state_dict())
    found = [contestants.contestant(name, block.eval(), x) for name, block in (("ours sdpa", ours), ("wrong", wrong))]
    with pytest.raises(BenchmarkError, match="wrong at here"):
        run.compare(found, "here", "bfloat16")


def test_memory_that_does_not_suffice_is_said_with_the_name(capsys, monkeypatch):
    class Enormous(torch.nn.Module):
        def forward(self, x):
            return torch.empty(2**60)

    monkeypatch.setitem(libraries.OTHERS, "somebody else", lambda ours: Enormous())
    code, _, err = bench(capsys, *TINY)
    assert code == 1
    assert "somebody else at 2,16,5,4: there is not enough memory for it: choose smaller --shapes" in err
    assert "Traceback" not in err


def test_the_backward_pass_reaches_the_input_and_every_parameter():
    torch.manual_seed(0)
    x = make_map((1, 16, 3, 4), device=CPU, dtype=torch.float32, channels_last=False)
    for found, names in ((contestants.contestants(x, 2), 4), (contestants_relative(x, 2), 3)):
        for one in found:
            if one.backward:
                gradients = [gradient for step in one.steps for gradient in step.forward_backward()]
                assert all(gradient.abs().sum() > 0 for gradient in gradients)
                # The floor's parts have gradients to what is between them too: q, k, v and what is joined.
                assert len(gradients) == 1 + names + (4 if one.name == FLOOR else 0), one.name
    assert x.grad is None


def test_maps_are_in_the_format_asked_for():
    for channels_last in (False, True):
        x = make_map((2, 8, 3, 4), device=CPU, dtype=torch.bfloat16, channels_last=channels_last)
        assert x.is_contiguous(memory_format=torch.channels_last) == channels_last
        assert x.dtype == torch.bfloat16


# --- time -------------------------------------------------------------------------------------------------------------


def test_contestants_take_turns_and_short_calls_are_repeated(monkeypatch):
    calls = []

    def pretend(call, repeats, device):
        calls.append((call(), repeats))
        return {"short": 1e-4, "long": 1.0, "part": 0.25}[call()]

    monkeypatch.setattr(timing, "seconds", pretend)
    times = time_in_turns(
        {"short": [lambda: "short"], "long": [lambda: "long"], "parts": [lambda: "part", lambda: "part"]},
        rounds=8,
        device=CPU,
        place="here",
        progress=lambda text: None,
    )
    assert times == {"short": (1e-4,) * 8, "long": (1.0,) * 8, "parts": (0.5,) * 8}
    measured = calls[-8 * 4 :]
    rounds = [measured[start : start + 4] for start in range(0, len(measured), 4)]
    for turn in rounds:
        assert sorted(turn) == [("long", 1), ("part", 1), ("part", 1), ("short", 50)]
    assert len({tuple(turn) for turn in rounds}) > 1, "the order changes by the round"


def test_a_measurement_is_seconds_of_one_call():
    import time

    assert timing.seconds(lambda: time.sleep(0.01), 3, CPU) == pytest.approx(0.01, rel=0.5)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_the_peak_is_what_is_held_at_one_moment():
    def one_after_the_other():
        first = torch.ones(1000, 1000)
        del first
        return torch.ones(1000, 1000)

    def together():
        return torch.ones(1000, 1000) + torch.ones(1000, 1000)  # and their sum

    kept = torch.ones(1000, 1000)
    for call, expected in ((one_after_the_other, 4e6), (together, 12e6), (lambda: kept.view(-1), 0)):
        assert peak_memory(call, CPU) == pytest.approx(expected, rel=0.02, abs=1000)


def test_what_was_held_before_and_is_given_back_does_not_count_as_less():
    held = [torch.ones(1000, 1000)]

    def give_back():
        held.clear()
        return torch.ones(500, 500)

    assert peak_memory(give_back, CPU) == pytest.approx(1e6, rel=0.02)


@pytest.mark.parametrize(
    ("block", "has_weights"),
    [
        (Attention2d(16, 2, impl="bmm"), True),
        (Attention2d(16, 2), False),
        (Attention2d(16, 2, position=RelPosDecomposed(feat_size=(32, 32))), False),
        (libraries.OTHERS["notebook bmm"](Attention2d(16, 2)), True),
    ],
)
def test_unfused_attention_holds_tokens_by_tokens_and_fused_does_not(block, has_weights):
    x = make_map((1, 16, 32, 32), device=CPU, dtype=torch.float32, channels_last=False)
    (step,) = contestants.contestant("somebody", block, x).steps
    weights = 2 * 1024**2 * 4
    for call in (step.forward, step.forward_backward):
        call()
        assert (peak_memory(call, CPU) > weights) == has_weights


# --- the report -------------------------------------------------------------------------------------------------------


def group(shape, relative, **milliseconds):
    """Contestants, each with the times of its forward pass; backward takes as long again."""
    rows = []
    for name, times in milliseconds.items():
        memory = None if name == FLOOR else 3 * 2**20
        forward, both = (Cost(tuple(factor * time / 1000 for time in times), memory) for factor in (1, 2))
        rows.append(Row(name.replace("_", " "), 1e-7, forward, both))
    return Group(shape, 8, relative, rows)


def test_ratios_are_of_medians_and_quartiles_are_quartiles():
    times = {"floor": (1, 2, 90), "ours_sdpa": (2.4, 2.5, 2.6), "notebook_bmm": (1, 10, 11)}
    lines = table(group((1, 64, 64, 64), False, **times), "float32").splitlines()
    cells = {line[:24].strip(): " ".join(line[24:].split()) for line in lines[3:]}
    assert cells["floor"] == "2.00 1.50–46.0 1.00 0.80 4.00 3.00–92.0 1.00 0.80 – –"
    assert cells["ours sdpa"] == "2.50 2.45–2.55 1.25 1.00 5.00 4.90–5.10 1.25 1.00 3.00 3.00"
    assert cells["notebook bmm"] == "10.0 5.50–10.5 5.00 4.00 20.0 11.0–21.0 5.00 4.00 3.00 3.00"


def test_columns_are_aligned_whatever_stands_in_them():
    rows = [
        Row("ours sdpa", 0.0, Cost((1e-5,), 10), Cost((1e-3,), 10**9)),
        Row("ours flex", 0.0, Cost((2.5,), 10**10), None),
    ]
    lines = table(Group((1, 8, 4, 4), 8, False, rows), "float32").splitlines()[2:4]
    assert len({len(line) for line in lines}) == 1
    assert max(len(line) for line in lines) <= 120


@pytest.mark.parametrize(
    ("ours", "holds"),
    [(1.25, [True, True]), (1.35, [False, True]), (1.9, [False, False])],
)
def test_the_marks_of_plain_attention(ours, holds):
    times = {"floor": (1.0,), "ours_sdpa": (ours,), "notebook_bmm": (5.0,)}
    marks = judge([group((1, 128, 64, 64), False, **times)], "float32")
    assert [mark.holds for mark in marks] == holds
    assert [mark.measured for mark in marks] == [f"{ours:.2f} ×", f"{5 / ours:.2f} ×"]
    lines = checklist(marks).splitlines()[1:]
    assert ["does not hold" not in line for line in lines] == holds


def test_the_marks_of_relative_positions():
    for shape, theirs, holds in (
        ((1, 256, 56, 56), 1.6, [True, True, True, True]),
        ((1, 256, 56, 56), 1.4, [False, False, True, True]),
    ):
        found = group(shape, True, ours_sdpa=(1.0,), timm_BottleneckAttn=(theirs,))
        assert [mark.holds for mark in judge([found], "float32")] == holds
    weights = 8 * 3136**2 * 4
    ours = Row("ours sdpa", 0.0, Cost((1.0,), weights - 1), Cost((1.0,), weights))
    theirs = Row("timm BottleneckAttn", 0.0, Cost((2.0,), 0), Cost((2.0,), 0))
    marks = judge([Group((1, 256, 56, 56), 8, True, [ours, theirs])], "float32")
    assert [mark.holds for mark in marks] == [True, True, True, False]
    assert "300 MiB" in marks[2].what


def test_marks_are_judged_at_their_shapes_only():
    times = {"floor": (1.0,), "ours_sdpa": (2.0,), "notebook_bmm": (5.0,)}
    assert judge([group((8, 64, 8, 8), False, **times)], "float32") == []
    assert len(judge([group((8, 64, 14, 14), False, **times)], "float32")) == 1
    relative = {"ours_sdpa": (2.0,), "timm_BottleneckAttn": (5.0,)}
    assert judge([group((1, 64, 14, 14), True, **relative)], "float32") == []
    assert "none of them" in checklist([])


def test_the_report_says_what_was_measured_on():
    machine = Machine("cpu (a processor)", 2, 4, "an operating system", "3.11", {"torch": "9.9", "timm": "8.8"})
    text = header(machine, Settings(dtype="bfloat16", channels_last=True, rounds=7))
    for part in ("cpu (a processor)", "threads 2", "bfloat16", "channels-last", "torch 9.9, timm 8.8", "7 rounds"):
        assert part in text
    found = group((1, 64, 64, 64), False, floor=(1.0, 3.0), ours_sdpa=(4.0, 4.0))
    document = json.loads(as_json(machine, Settings(), [found], judge([found], "float32")))
    assert document["machine"]["versions"] == {"torch": "9.9", "timm": "8.8"}
    ours = document["groups"][0]["contestants"]["ours sdpa"]
    assert ours["forward"]["times_floor"] == pytest.approx(2.0)
    assert ours["forward"]["quartiles_seconds"] == pytest.approx([0.004, 0.004])
    assert document["marks"][0]["holds"] is False

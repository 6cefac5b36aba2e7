"""The benchmark: who is in it, that they compute the same, and that ratios, memory and calls are what they say."""

import json
import sys
from dataclasses import fields

import numpy as np
import pytest
import torch
from timm.layers import Attention as TimmAttention

from vision_attn import IMPLS, Attention2d, RelPosDecomposed
from vision_attn.errors import BenchmarkError
from vision_attn.networks.convert import timing
from vision_attn.tools import cli
from vision_attn.tools.benchmark import contestants, measure, run
from vision_attn.tools.benchmark.contestants import CASES, Case, Contestant, contestant, make_map
from vision_attn.tools.benchmark.measure import count_calls, peak_memory, time_in_turns
from vision_attn.tools.benchmark.plan import COMPARISONS, Plan
from vision_attn.tools.benchmark.run import BEST, ResultTable, as_text, chart, written

CPU = torch.device("cpu")
QUICK = ("--heads", 2, "--device", "cpu", "--rounds", 1)
#: Who is in the tables of each comparison, but for the implementations, and a shape that is quick.
LIBRARIES = ["timm layers Attention2d", "timm maxxvit Attention2d", "torch MHA", "torch MHA, training mode"]
VARIANTS = [
    "full", "RelPosDecomposed", "RelPosTable", "Rope2d", "ConditionalPos", "window with a table",
    "shifted window with a table", "neighbourhood",
]  # fmt: skip
ROWS = {
    "attention": ("2,16,5,4", [["ours sdpa", "floor", *LIBRARIES, "best of the others"]] * 2),
    "backbone": ("1,3,32,32", [["ours inserted", "timm by hand", "plain network"]]),
    "positions": ("1,16,3,4", [["ours RelPosDecomposed", "timm BottleneckAttn"]]),
    "windows": ("1,16,14,14", [["ours", "torchvision"]] * 4),
    "einx": ("1,16,4,4", [["ours einx", "ours bmm"]]),
    "memory": ("1,16,7,7", [VARIANTS]),
}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """No call is repeated to be timed well: the tests do not look at how long it takes."""
    monkeypatch.setattr(measure, "SHORTEST", 1e-9)


def bench(capsys, *arguments):
    code = cli.main(["bench", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_default_rows_in_all_forms_of_output(capfd, monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(run, "chart", lambda results: figures.append(chart(results)) or figures[-1])
    files = "--output", tmp_path / "all.json", "--chart", tmp_path / "all.png", "--markdown", tmp_path / "all.md"
    code, out, err = bench(capfd, *QUICK, "--rounds", 2, "--shapes", "2,16,5,4", "2,16,7,7", "--threads", 1, *files)
    assert (code, err) == (0, "")  # nor do the profiler's lines, which are not Python's, go into a log file
    assert "\r" not in out
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads((tmp_path / "all.json").read_text())
    assert document["settings"]["heads"] == 2
    assert document["machine"]["versions"]["torch"] == torch.__version__
    assert [result["shape"] for result in document["results"]] == [[2, 16, 5, 4], [2, 16, 7, 7]]
    for result in document["results"]:
        rows = result["rows"]
        assert {"ours sdpa", "ours einx", "ours bmm", "floor", "written out, bmm", *LIBRARIES} <= set(rows)
        assert len(rows) == 4 + len(IMPLS) - 1 + len(LIBRARIES)
        for what in ("forward", "gradients"):
            seconds = result["details"]["seconds"][what]
            ours = np.array(seconds["ours sdpa"])
            for name in seconds:
                assert out.count(f"\n{name}  ") == 2
                assert len(seconds[name]) == 2
                assert rows[name][f"{what} ms"][1] == pytest.approx(1000 * np.median(seconds[name]))
                if name != "ours sdpa":
                    assert rows[name][f"{what} ratio"][1] == pytest.approx(np.median(ours / seconds[name]))
            best = min(rows[name][f"{what} ms"][1] for name in LIBRARIES)
            assert rows["best of the others"][f"{what} ms"][1] == best
    lines = (tmp_path / "all.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("### ")] == [
        f"### attention: batch 2, 16 channels, {size}, 2 heads, nchw" for size in ("5×4", "7×7")
    ]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert {len(row) for row in cells} == {7}
    assert cells[0][:4] == ["", "forward ms", "forward ours sdpa ÷ it", "forward MiB"]
    assert [row[0] for row in cells if row[0] in rows] == [*rows, *rows]
    assert [row[1] for row in cells if row[0] == "floor"] == [
        written(tuple(result["rows"]["floor"]["forward ms"])) for result in document["results"]
    ]
    for axis in figures[0].axes:
        drawn = {line.get_label(): line for line in axis.get_lines()}
        assert drawn["ours sdpa"].get_xdata().tolist() == [20, 49]
        value = document["results"][1]["rows"]["ours sdpa"][axis.get_title()]
        assert drawn["ours sdpa"].get_ydata()[1] == (value[1] if isinstance(value, list) else value)
        assert len(drawn["floor"].get_xdata()) == (2 if axis.get_title().endswith("ms") else 0)
        looks = [(line.get_color(), line.get_marker()) for line in drawn.values()]
        assert len(set(looks)) == len(drawn) == len(rows) - 1
    assert [axis.get_title() for axis in figures[0].axes] == [
        "forward ms", "gradients ms", "forward MiB", "gradients MiB"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in ROWS), ("einx", "bfloat16"), ("positions", "float16")]
)
def test_named_rows(capsys, monkeypatch, tmp_path, name, dtype):
    create = contestants.timm.create_model
    monkeypatch.setattr(contestants.timm, "create_model", lambda name: create("resnet18"))  # is quicker than resnet50
    shape, expected = ROWS[name]
    file = tmp_path / "all.json"
    code, _, err = bench(capsys, "--rows", name, *QUICK, "--shapes", shape, "--dtype", dtype, "--output", file)
    assert (code, err) == (0, "")
    results = json.loads(file.read_text())["results"]
    assert [list(result["rows"]) for result in results] == expected
    for result in results:
        timed = {"forward"} if name == "backbone" else {"forward", "gradients"}
        assert set(result["details"]["seconds"]) == timed
    assert {result["layout"] for result in results} == set(COMPARISONS[name].layouts)


def test_only_the_contestants_that_are_chosen_run(capsys, tmp_path):
    file = tmp_path / "all.json"
    chosen = "--only", "MHA", "floor", "--shapes", "2,16,5,4", "--layouts", "nchw", "--output", file
    code, out, err = bench(capsys, "--rows", "attention", *QUICK, *chosen)
    assert (code, err) == (0, "")
    (result,) = json.loads(file.read_text())["results"]
    assert list(result["rows"]) == ["floor", "torch MHA", "torch MHA, training mode", BEST]
    assert "floor ÷ it" in out
    # Those of the others that are left out are no best, and no base to subtract.
    x = make_map((1, 8, 4, 4), "nchw", CPU, torch.float32)
    one = contestant(torch.nn.Identity(), x)
    case = Case("", {"ours": one, "theirs": one, "plain": one}, rivals=("theirs",), base="plain")
    assert run.only(case, ("ours",)) == Case("", {"ours": one})
    assert run.only(case, ()) == case


def test_what_was_measured_is_kept_when_a_run_is_interrupted(capsys, monkeypatch, tmp_path):
    create = contestants.make_map

    def interrupted(shape, *arguments):
        if shape[2] == 7:
            raise KeyboardInterrupt
        return create(shape, *arguments)

    monkeypatch.setattr(run, "make_map", interrupted)
    files = [tmp_path / f"all.{ending}" for ending in ("json", "md", "png")]
    flags = zip(("--output", "--markdown", "--chart"), files, strict=True)
    shapes = "--shapes", "1,8,4,4", "1,8,5,5", "1,8,7,7", "1,8,8,8"
    code, out, err = bench(capsys, "--rows", "einx", *QUICK, *shapes, *(part for pair in flags for part in pair))
    assert (code, err) == (130, "vision-attn: interrupted\n")
    assert len(json.loads(files[0].read_text())["results"]) == files[1].read_text().count("### ") == 2
    assert files[2].read_bytes().startswith(b"\x89PNG")
    assert out.count("\n--- einx") == 2
    assert f"2 tables are in {', '.join(map(str, files))}." in out


@pytest.mark.slow
def test_compiled_rows(capsys):
    code, out, _ = bench(capsys, "--rows", "compiled", *QUICK, "--shapes", "1,16,4,4")
    assert code == 0
    assert "\nours einx  " in out


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["attention", "backbone", "positions", "windows", "memory", "calls"])
def test_rows_on_cuda(capsys, name):
    code, out, _ = bench(capsys, "--rows", name, "--device", "cuda", "--rounds", 2)
    assert code == 0
    assert torch.cuda.get_device_name() in out


def test_all_rows_but_the_compiled_ones_and_each_once():
    assert Plan(rows=("calls", "all")).comparisons == (
        "calls", "implementations", "attention", "backbone", "positions", "windows", "einx", "memory",
    )  # fmt: skip


def test_every_flag_sets_what_it_names():
    arguments = {
        "--only": "rope full", "--markdown": "all.md", "--swap": "test_vit torchvision:swin_t",
        "--rows": "calls", "--shapes": "1,8,4,4 2,8,4,4", "--heads": "4", "--layouts": "nchw", "--device": "cpu",
        "--dtype": "float16", "--threads": "3", "--rounds": "2", "--output": "all.json", "--chart": "all.png",
    }  # fmt: skip
    assert {flag.lstrip("-") for flag in arguments} == {field.name for field in fields(Plan)}
    for flag, value in arguments.items():
        options = vars(cli.parser().parse_args(["bench", flag, *value.split()]))
        name = flag.lstrip("-")
        assert options[name] != getattr(Plan(), name)
        assert set(options) == {"command", "traceback", name}, "a flag that is not given sets nothing"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "8,64,8"], "shapes must each be batch,channels,height,width"),
        (["--shapes", "8,64,8,x"], "got '8,64,8,x'"),
        (["--shapes", "8,64,0,8"], "got '8,64,0,8'"),
        (["--shapes", "1,64,4,4", "--heads", "7"], "heads must divide channels; got channels=64 and heads=7"),
        (["--heads", "0"], "heads must be a whole number of at least 1"),
        (["--rounds", "0"], "rounds must be a whole number of at least 1"),
        (["--rows", "calls", "einx", "--shapes", "1,64,4,4"], "one of the rows at a time; got calls, einx"),
        (["--rows", "windows", "--shapes", "1,16,8,7"], "multiples of 7; got (8, 7)"),
        (["--rows", "backbone", "--shapes", "1,16,32,32"], "with 3 channels; got 16 channels"),
        (["--rows", "calls", "--chart", "a.png"], "chart is of one of the rows but calls"),
        (["--rows", "einx", "positions", "--chart", "a.png"], "chart is of one of the rows"),
        (["--shapes", "1,8,4,4", "1,16,4,4", "--chart", "a.png"], "one number of channels"),
        (["--chart", "a.jpg"], "chart must end in .png"),
        (["--rows", "einx", "--shapes", "1,8,4,4", "--only", "speed"], "no contestant of einx has speed in its name"),
    ],
)
def test_bad_usage_exits_with_2(capsys, arguments, message):
    code, _, err = bench(capsys, *arguments)
    assert code == 2
    assert err.startswith("vision-attn: error: ")
    assert message in err
    assert "Traceback" not in err


def test_a_network_before_and_after_the_exchange(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(timing, "time_ratio", lambda *arguments: 0.5)
    monkeypatch.setattr(contestants, "network_of", lambda name: NETWORKS[name]())
    file = tmp_path / "all.json"
    chosen = "--swap", "tokens", "--shapes", "1,3,8,8", "2,3,8,16", "--device", "cpu", "--rounds", 2
    code, out, err = bench(capsys, *chosen, "--output", file, "--markdown", tmp_path / "all.md")
    assert (code, err) == (0, "")
    title = "tokens, 1 of 1 modules exchanged"
    assert [line[4:] for line in (tmp_path / "all.md").read_text().splitlines() if line.startswith("### ")] == [
        f"{title}: batch {size}, nchw" for size in ("1, 3 channels, 8×8", "2, 3 channels, 8×16")
    ]
    assert "exchanged ÷ it" in out
    for result in json.loads(file.read_text())["results"]:
        assert (result["comparison"], result["title"]) == ("swap", title)
        assert tuple(result["rows"]) == ("exchanged", "as it was")
        for what in ("forward", "gradients"):
            seconds = result["details"]["seconds"][what]
            expected = np.median(np.array(seconds["exchanged"]) / seconds["as it was"])
            assert result["rows"]["as it was"][f"{what} ratio"][1] == pytest.approx(expected)
            assert result["rows"]["exchanged"][f"{what} MiB"] > 0
    code, _, err = bench(capsys, "--swap", "plain", "--shapes", "1,3,8,8", "--device", "cpu")
    assert code == 2
    assert "nothing of plain can be exchanged" in err
    code, _, err = bench(capsys, "--swap", "tokens", "--shapes", "1,4,8,8", "--device", "cpu")
    assert code == 2
    assert "the model does not run on an example of shape (1, 4, 8, 8)" in err
    monkeypatch.setattr(timing, "time_ratio", lambda *arguments: 1.5)
    (case,) = contestants.swap(make_map((1, 3, 8, 8), "nchw", CPU, torch.float32), ["tokens"])
    assert tuple(case.contestants) == ("exchanged", "as it was", "with slower ones")
    assert case.title == "tokens, 0 of 1 modules exchanged"


class Tokens(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = TimmAttention(3, 1)

    def forward(self, x):
        return self.attn(x.flatten(2).transpose(1, 2))


class Begun(Tokens):
    """With a head of zeros, as torchvision's ViT begins, and one that evaluation does not use, as of distillation."""

    def __init__(self):
        super().__init__()
        self.head, self.other = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
        torch.nn.init.zeros_(self.head.weight), torch.nn.init.zeros_(self.head.bias)

    def forward(self, x):
        return self.head(super().forward(x))


NETWORKS = {"tokens": Tokens, "plain": lambda: torch.nn.Conv2d(3, 8, 1), "begun": Begun}


def test_a_network_whose_head_is_zero_and_that_uses_not_all_of_its_parameters_is_timed(monkeypatch):
    monkeypatch.setattr(contestants, "network_of", lambda name: NETWORKS[name]())
    monkeypatch.setattr(timing, "time_ratio", lambda *arguments: 0.5)
    x = make_map((1, 3, 8, 8), "nchw", CPU, torch.float32)
    (case,) = contestants.swap(x, ["begun"])
    assert run.check_outputs(case, x, "here", "float32") == 0
    for one in case.contestants.values():
        (step,) = one.steps
        assert None in step.gradients()()


@pytest.mark.parametrize(
    "arguments", [["--rows", "speed"], ["--rows", "swap"], ["--dtype", "float8"], ["--layouts", "nhwc"]]
)
def test_what_argparse_refuses_exits_with_2(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", *arguments])
    assert caught.value.code == 2
    assert "usage: vision-attn bench" in capsys.readouterr().err


def test_a_device_that_is_not_there_exits_with_2(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = bench(capsys, "--device", "cuda")
    assert (code, out) == (2, "")
    assert "there is no CUDA device" in err


@pytest.mark.parametrize("output", ["nowhere/all.json", ""])
def test_an_output_that_cannot_be_written_is_said_before_anything_is_measured(capsys, tmp_path, output):
    code, out, err = bench(capsys, "--output", tmp_path / output)
    assert (code, out) == (1, "")
    assert str(tmp_path / output).rstrip("/") in err


def test_the_machine_is_set_up_and_left_as_it_was(capsys, monkeypatch):
    def state():
        return torch.get_num_threads(), torch.backends.cudnn.allow_tf32, torch.get_rng_state().tolist()

    def fail(*arguments):
        assert not torch.backends.cudnn.allow_tf32
        torch.randn(3)
        raise ValueError(f"{torch.get_num_threads()} threads")

    monkeypatch.setattr(run, "make_map", fail)
    before = state()
    code, out, err = bench(capsys, "--device", "cpu", "--threads", 3)
    assert code == 2
    assert "3 threads" in err
    assert "threads 3" in out
    assert state() == before


# --- the same computation ---------------------------------------------------------------------------------------------


def wrong_block(x):
    return contestant(Attention2d(16, 2).eval(), x)


def wrong_size(x):
    return contestant(torch.nn.AvgPool2d(2), x)


def not_a_number(x):
    block = Attention2d(16, 2)
    torch.nn.init.constant_(block.proj.bias, torch.nan)
    return contestant(block, x)


@pytest.mark.parametrize("wrong", [wrong_block, wrong_size, not_a_number])
def test_who_does_not_compute_the_same_stops_the_run_before_anything_is_timed(capsys, monkeypatch, wrong):
    monkeypatch.setattr(contestants, "floor", lambda ours, x: Contestant(wrong(x).steps, twin=ours))
    monkeypatch.setattr(measure, "seconds", lambda *arguments: pytest.fail("something was timed"))
    code, _, err = bench(capsys, "--rows", "attention", *QUICK, "--shapes", "2,16,5,4")
    assert code == 1
    assert "floor, attention at 2,16,5,4: its output differs" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("name", ["backbone", "positions", "windows", "attention"])
def test_another_network_position_or_scale_is_far_outside_of_what_is_allowed(monkeypatch, name):
    """What is compared must show: blocks behind a gate, tables, and attention over many tokens."""
    create = contestants.timm.create_model
    monkeypatch.setattr(contestants.timm, "create_model", lambda name: create("resnet18"))  # is quicker than resnet50
    torch.manual_seed(0)
    shape = {"attention": (1, 256, 56, 56), "backbone": (1, 3, 64, 64)}.get(name, (1, 64, 28, 28))
    x = make_map(shape, "nchw", CPU, torch.float32)
    (case, *_) = CASES[name](x, 4)
    (theirs,) = [one for one in case.contestants.values() if one.twin is not None][:1]
    for key, value in theirs.twin.named_parameters():
        if name == "attention" and key == "qkv.weight":
            value.data[: len(value) // 3] *= 8  # of queries: another scale
        if "bias_table" in key or key.endswith("height_rel") or (name == "backbone" and key.endswith("gate")):
            value.data.zero_()
    case = Case("", {"theirs": theirs})
    with pytest.raises(BenchmarkError, match="theirs, here: its output differs"):
        run.check_outputs(case, x, "here", "float32")


def test_memory_that_does_not_suffice_is_said(capsys, monkeypatch):
    monkeypatch.setattr(contestants, "floor", lambda ours, x: torch.empty(2**60))
    code, _, err = bench(capsys, "--rows", "attention", *QUICK, "--shapes", "2,16,5,4")
    assert code == 1
    assert "attention at 2,16,5,4: there is not enough memory: choose smaller --shapes" in err


def test_the_backward_pass_reaches_the_input_and_every_parameter():
    torch.manual_seed(0)
    x = make_map((1, 16, 7, 7), "channels-last", CPU, torch.float32)
    assert x.is_contiguous(memory_format=torch.channels_last)
    for name, parameters in (("attention", 4), ("positions", 3), ("windows", 5)):
        for case in CASES[name](x, 2):
            for who, one in case.contestants.items():
                gradients = [gradient for step in one.steps for gradient in step.gradients()()]
                assert all(gradient.abs().sum() > 0 for gradient in gradients), who
                # The floor's parts have gradients to what is between them too: q, k, v and what is joined.
                assert len(gradients) == 1 + parameters + (4 if who == "floor" else 0), who
    assert x.grad is None


# --- what is measured -------------------------------------------------------------------------------------------------


def test_contestants_take_turns_and_short_calls_are_repeated(monkeypatch):
    calls = []

    def pretend(call, repeats, device):
        calls.append((call(), repeats))
        return {"short": 1e-4, "long": 1.0, "part": 0.25}[call()]

    monkeypatch.setattr(measure, "SHORTEST", 5e-3)
    monkeypatch.setattr(measure, "seconds", pretend)
    parts = {"short": [lambda: "short"], "long": [lambda: "long"], "parts": [lambda: "part", lambda: "part"]}
    assert time_in_turns(parts, rounds=8, device=CPU) == {
        "short": (1e-4,) * 8, "long": (1.0,) * 8, "parts": (0.5,) * 8
    }  # fmt: skip
    measured = calls[-8 * 4 :]
    rounds = [measured[start : start + 4] for start in range(0, len(measured), 4)]
    assert all(sorted(turn) == [("long", 1), ("part", 1), ("part", 1), ("short", 50)] for turn in rounds)
    assert len({tuple(turn) for turn in rounds}) > 1, "the order changes by the round"


def test_a_machine_that_is_not_idle_is_warned_of(capsys, monkeypatch, tmp_path):
    def rows(spread):
        ms = {"forward ms": (10 - 5 * spread, 10.0, 10 + 5 * spread)}
        return {"ours": {"forward ms": (1.0, 2.0, 9.0)}, "floor": ms}

    assert run.unrest(rows(0.05)) == run.unrest({"ours": {"calls": 3}}) == ""
    assert "half of the times of floor are 30% of the median apart" in run.unrest(rows(0.3))
    monkeypatch.setattr(run, "STILL", -1.0)
    file = tmp_path / "all.md"
    _, out, _ = bench(capsys, "--rows", "einx", *QUICK, "--shapes", "1,8,4,4", "--markdown", file)
    for text in (out, file.read_text()):
        assert "Warning, the machine was not idle: half of the times of ours einx are " in text


def test_the_peak_is_what_is_held_at_one_moment():
    def one_after_the_other():
        first = torch.ones(1000, 1000)
        del first
        return torch.ones(1000, 1000)

    kept = torch.ones(1000, 1000)
    for call, expected in ((one_after_the_other, 4e6), (lambda: kept + kept * 2, 8e6), (lambda: kept.view(-1), 0)):
        assert peak_memory(call, CPU) == pytest.approx(expected, rel=0.02, abs=1000)


@pytest.mark.parametrize(
    ("options", "has_weights"),
    [({"impl": "bmm"}, True), ({}, False), ({"position": RelPosDecomposed(feat_size=(32, 32))}, False)],
)
def test_unfused_attention_holds_tokens_by_tokens_and_fused_does_not(options, has_weights):
    x = make_map((1, 16, 32, 32), "nchw", CPU, torch.float32)
    (step,) = contestant(Attention2d(16, 2, **options), x).steps
    for call in (step.forward, step.gradients()):
        call()
        assert (peak_memory(call, CPU) > 2 * 1024**2 * 4) == has_weights


def test_calls_of_ours_are_counted(capsys, tmp_path):
    file = tmp_path / "all.json"
    assert bench(capsys, "--rows", "calls", "--shapes", "1,16,7,7", "--heads", 2, "--output", file)[0] == 0
    (result,) = json.loads(file.read_text())["results"]
    assert list(result["rows"]) == VARIANTS
    for name, row in result["rows"].items():
        walk = result["details"]["walks"][name]
        assert row["calls"] == sum(count for _, _, count in walk)
        assert row["functions"] == len(walk) > 5
        assert not [file for file, _, _ in walk if file.startswith("benchmark")]


def test_calls_of_functions_and_steps_of_generators_are_counted_and_only_those_of_the_package(tmp_path):
    (tmp_path / "package").mkdir()
    inside, outside = tmp_path / "package" / "inside.py", tmp_path / "outside.py"
    for path, code in (
        (inside, "def three():\n    yield from [1, 2, 3]\ndef both():\n    return sum(three()) + len(str(1))\n"),
        (outside, "def nothing():\n    pass\n"),
    ):
        path.write_text(code)
        exec(compile(code, str(path), "exec"), names := {})
        globals().update({name: value for name, value in names.items() if callable(value)})
    found = count_calls(lambda: (both(), nothing()), tmp_path / "package")  # noqa: F821
    assert found == {("inside.py", "both"): 1, ("inside.py", "three"): 4}
    assert sys.getprofile() is None


def test_the_table_is_aligned_whatever_stands_in_it():
    rows = {
        "ours": {"forward ms": (1.0, 2.0, 3.456), "forward ratio": None, "gradients ms": (10.0, 1234.5, 9999.0)},
        "a long name of somebody": {"forward ms": (1.0, 2.0, 3.0), "forward ratio": 0.5, "gradients ms": None},
    }
    lines = as_text(ResultTable("x", "x", (1, 8, 4, 4), 8, "nchw", rows, "done")).splitlines()
    assert lines[0] == "--- x: batch 1, 8 channels, 4×4, 8 heads, nchw"
    assert len({len(line) for line in lines[1:5]}) == 1
    assert "2.00 (1.00–3.46)" in lines[3]
    assert "1234 (10.0–9999)" in lines[3]
    assert lines[4].split()[-1] == "–"
    assert lines[-1] == "done"

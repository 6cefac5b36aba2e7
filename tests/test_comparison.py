"""Comparing blocks: the statistics are SciPy's and keep what they promise, and no interruption changes a table."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from scipy import stats

import vision_attn as va
from vision_attn.errors import TrainingError
from vision_attn.tools import cli
from vision_attn.tools.comparison import runs
from vision_attn.tools.comparison.arms import ARMS, settings_of_arm
from vision_attn.tools.comparison.compare import compare, said_of
from vision_attn.tools.comparison.statistics import Difference, compare_scores, detectable
from vision_attn.tools.training import digits, network, run_folder, settings
from vision_attn.tools.training.run_folder import RunFolder
from vision_attn.tools.training.settings import Settings

# --- statistics -------------------------------------------------------------------------------------------------------


def made_up(*means, seeds=6, spread=0.7, seed=0):
    draw = np.random.default_rng(seed).normal
    return {f"arm {index}": draw(mean, spread, seeds).tolist() for index, mean in enumerate(means)}


def test_two_arms_are_compared_as_scipy_compares_them():
    scores = made_up(45, 46)
    (found,) = compare_scores(scores)
    one, other = scores["arm 1"], scores["arm 0"]
    student, welch = stats.ttest_ind(one, other), stats.ttest_ind(one, other, equal_var=False)
    assert found.arms == ("arm 1", "arm 0")
    assert (found.low, found.high, found.p) == pytest.approx((*student.confidence_interval(), student.pvalue))
    assert found.welch == pytest.approx((*welch.confidence_interval(), welch.pvalue))
    assert found.mean == pytest.approx(np.mean(one) - np.mean(other))
    # The percentiles of resampled differences, drawn otherwise.
    draw = np.random.default_rng(1)
    resampled = [np.mean(draw.choice(one, 6)) - np.mean(draw.choice(other, 6)) for _ in range(4000)]
    assert found.bootstrap == pytest.approx(np.percentile(resampled, [2.5, 97.5]), abs=0.05)
    assert compare_scores(made_up(45, 46, seeds=4))[0].bootstrap is None


def test_several_arms_are_corrected_for_as_many_comparisons():
    scores = made_up(45, 45.4, 46, 47)
    *others, last = scores.values()
    found, dunnett = compare_scores(scores), stats.dunnett(*others, control=last, rng=np.random.default_rng(0))
    assert [one.arms for one in found] == [("arm 3", "arm 0"), ("arm 3", "arm 1"), ("arm 3", "arm 2")]
    widths = [one.high - one.low for one in found]
    interval = dunnett.confidence_interval()
    # Bonferroni's intervals, of a pooled spread too, are a little wider than Dunnett's.
    assert all(1 <= wide / narrow < 1.05 for wide, narrow in zip(widths, interval.high - interval.low, strict=True))
    assert all(p <= one.p < 1.2 * p + 1e-3 for one, p in zip(found, dunnett.pvalue, strict=True))
    welch = stats.ttest_ind(last, others[2], equal_var=False)
    assert found[2].welch[2] == pytest.approx(min(1, 3 * welch.pvalue))
    every = compare_scores(scores, "all")
    assert len(every) == 6
    assert every[0].arms == ("arm 1", "arm 0")


@pytest.fixture
def verdicts_alone(monkeypatch):
    """Welch's test and the bootstrap, which take the time, are left out."""
    monkeypatch.setattr(stats, "ttest_ind", lambda *_, **__: stats.ttest_1samp([0, 1, 2], 0))
    monkeypatch.setattr("vision_attn.tools.comparison.statistics.FEWEST", 99)


@pytest.mark.usefixtures("verdicts_alone")
@pytest.mark.parametrize(("arms", "seeds"), [(2, 3), (4, 8)])
def test_equal_arms_are_told_apart_as_seldom_as_promised(arms, seeds):
    wrong = sum(
        any(one.verdict != "not told apart" for one in compare_scores(made_up(*[45] * arms, seeds=seeds, seed=seed)))
        for seed in range(250)
    )
    assert 0.01 < wrong / 250 < 0.09  # 5 %, with a standard error of 1.4; the correction may be careful


@pytest.mark.usefixtures("verdicts_alone")
def test_what_can_be_shown_is_shown_four_times_in_five():
    least = detectable(0.7, seeds=5, arms=3, comparisons=2)
    found = [compare_scores(made_up(45, 45, 45 + least, seeds=5, seed=seed))[0].verdict for seed in range(300)]
    assert found.count("above") / 300 == pytest.approx(0.8, abs=0.06)
    # The table of powers that the project had before, by statsmodels' formula.
    assert [round(detectable(0.69, seeds), 1) for seeds in (3, 5, 8)] == [2.1, 1.4, 1.0]


@pytest.mark.parametrize(
    ("scores", "verdict", "interval"),
    [
        ({"plain": [40.0, 41.0], "other": [60.0, 61.0]}, "above", True),
        ({"plain": [60.0, 61.0], "other": [40.0, 41.0]}, "below", True),
        ({"plain": [40.0], "other": [60.0]}, "not told apart", False),  # one seed has no spread
        ({"plain": [40.0, 40.0], "other": [40.0, 40.0]}, "not told apart", True),
        ({"plain": [40.0, 41.0], "other": [60.0]}, "above", True),
    ],
)
def test_words_follow_from_the_numbers(scores, verdict, interval):
    (found,) = compare_scores(scores)
    assert found.verdict == verdict
    assert (found.low is not None) == interval
    text = said_of(scores, [found])
    said = "Not told apart: other and plain." if verdict == "not told apart" else f"other is {verdict} plain."
    assert (f"- {said}" if interval else "One seed shows no spread") in text
    assert ("What can be shown here" in text) == (interval and np.std(scores["plain"]) > 0)
    assert "nan" not in text


def test_the_text_says_what_the_table_says():
    difference = Difference(("a", "b"), 1.25, 0.5, 2.0, 1e-9, (-0.1, 2.6, 0.07), (0.75, 1.75))
    text = said_of({"b": [1.0, 2.0, 3.0], "a": [2.25, 3.25, 4.25]}, [difference])
    assert "| a − b | +1.25 | +0.50 to +2.00 | < 0.001 | -0.10 to +2.60, 0.070 | +0.75 to +1.75 | above |" in text
    least = f"3 seeds {detectable(1.0, 3):.2g}, 5 seeds {detectable(1.0, 5):.2g}, 8 seeds {detectable(1.0, 8):.2g}"
    assert (
        f"The spread over seeds is 1. What can be shown here, four times in five, is a difference of: {least}" in text
    )


# --- arms -------------------------------------------------------------------------------------------------------------


def test_settings_of_blocks_go_to_the_arms_that_they_suit():
    common = {"weights": "net.pth", "attention_lr": 0.1, "freeze_backbone": True, "at": "before", "impl": "bmm"}
    common |= {"lr": 0.2, "insert": ("layer3",), "block_options": ("gate_init=1", "position=Rope2d()")}
    arms = {arm: Settings(data="", **settings_of_arm(arm, {}, common)) for arm in ARMS}
    assert arms["plain"] == Settings(data="", weights="net.pth", lr=0.2)
    assert {one.attention_lr for arm, one in arms.items() if arm != "plain"} == {0.1}
    assert {arm: (one.block, one.impl, one.block_options) for arm, one in arms.items() if arm != "plain"} == {
        "convolution": ("conv", "sdpa", ("gate_init=1",)),
        "large-kernel": ("conv", "sdpa", ("gate_init=1", "kernel_size=13")),
        "norm-shortcut": ("norm", "sdpa", ("gate_init=1",)),
        "se": ("excite", "sdpa", ("rd_ratio=2",)),
        "se-residual": ("se", "sdpa", ("gate_init=1",)),
        "pooled-mlp": ("conv", "sdpa", ("gate_init=1", "kernel_size=None")),
        "averaging": ("attention", "bmm", ("gate_init=1", "position=Rope2d()", "scale=0")),
        "attention": ("attention", "bmm", ("gate_init=1", "position=Rope2d()")),
    }
    # Its place is the branch, unless all blocks have another.
    assert settings_of_arm("se", {}, {})["at"] == "branch"
    # What no block takes is refused by the first that is made.
    assert settings_of_arm("norm-shortcut", {}, {"block_options": ("gate=1",)})["block_options"] == ("gate=1",)
    # What a new head is trained with is common to all, and what an arm has of its own wins.
    assert settings_of_arm("plain", {}, {"freeze_epochs": 2, "reset_head": True})["freeze_epochs"] == 2
    own = settings_of_arm("attention", {"block_options": ("gate_init=0",), "lr": 0.1}, common)
    assert (own["lr"], own["block_options"]) == (0.1, ("gate_init=0", "position=Rope2d()"))
    with pytest.raises(ValueError, match=r"arms must be among plain, convolution.*got 'conv'"):
        settings_of_arm("conv", {}, {})


@pytest.fixture
def small(monkeypatch):
    """Few canvases, and nothing drawn, which takes longer than training on them."""
    monkeypatch.setattr(digits, "TRAIN_CANVASES", 128)
    monkeypatch.setattr(digits, "EVAL_CANVASES", 50)
    monkeypatch.setattr(run_folder, "save_figure", lambda figure, path: path.write_bytes(b""))


def run(*arguments):
    return cli.main(["compare", "--jobs", "1", *map(str, arguments)])


def scores(folder):
    found = json.loads((folder / "comparison.json").read_text())
    return {arm: one["scores"] for arm, one in found["arms"].items()}


SMALL = ["--dataset", "digit-pairs", "--epochs", 2, "--warmup-epochs", 0, "--arms", "plain", "rope=--block-options "
         "position=Rope2d()"]  # fmt: skip


@pytest.mark.usefixtures("small")
def test_a_comparison_goes_on_where_it_was_interrupted(tmp_path, monkeypatch, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(*SMALL, "--seeds", 0, 1, "--output", whole) == 0
    assert "4 of 4 runs are ahead, of 8 epochs together, 1 side by side" in capsys.readouterr().out
    found = json.loads((whole / "comparison.json").read_text())
    assert list(found["arms"]) == ["plain", "rope"]
    (difference,) = found["differences"]
    assert difference["arms"] == ["rope", "plain"]
    assert {"mean", "low", "high", "p", "verdict", "welch", "bootstrap"} < set(difference)
    first = found["arms"]["rope"]["runs"]["0"]
    assert (
        first["multiply_adds"] - found["arms"]["plain"]["runs"]["0"]["multiply_adds"] == 121_088
    )  # as insert_ reports
    assert (first["parameters"], first["changed"] is None, first["milliseconds"] > 0) == (29_970, False, True)
    table = (whole / "comparison.md").read_text()
    assert "| rope | 29,970 | 1,027,904 |" in table
    assert (whole / "comparison.png").exists()
    assert Settings(**settings_in(whole / "rope-1")).block_options == ("position=Rope2d()",)

    saved, save = [], RunFolder.save

    def interrupted(folder, name, content):
        if name == "last.pth":
            saved.append(folder.path.name)
            if len(saved) == 6:  # the second epoch of the second run is not saved
                raise KeyboardInterrupt
        return save(folder, name, content)

    monkeypatch.setattr(RunFolder, "save", interrupted)
    capsys.readouterr()
    assert run(*SMALL, "--seeds", 0, "--output", parts) == cli.INTERRUPTED
    assert "the same command goes on from here" in capsys.readouterr().err
    assert run(*SMALL, "--seeds", 0, "--output", parts) == 0
    assert "1 of 2 runs are ahead" in capsys.readouterr().out
    assert scores(parts) == {arm: {"0": by_seed["0"]} for arm, by_seed in scores(whole).items()}
    assert (saved.count("plain-0"), saved.count("rope-0")) == (3, 4), "what was saved is not trained again"
    assert "One seed shows no spread" in (parts / "comparison.md").read_text()
    assert run(*SMALL, "--seeds", 0, "--output", parts, "--lr", 0.1) == 2
    assert "plain-0 holds a run whose lr differ: give another" in capsys.readouterr().err
    (parts / "plain-0" / "outcome.json").write_text("{}")
    assert run(*SMALL, "--seeds", 0, "--output", parts) == 2
    assert "plain-0/outcome.json is damaged, or of another version: remove it" in capsys.readouterr().err


def settings_in(folder):
    return run_folder.read_config(folder / "settings.yaml")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--arms", "attention", "conv"], "arms must be among plain"),
        (["--arms", "attention"], "arms must be two or more"),
        (["--arms", "plain", "a=se", "a=attention"], "arms must have names that differ"),
        (["--arms", "plain", "../a=se"], "arms must have names that"),
        (["--arms", "plain", "mine=--block no.such:Block"], "block must be a class that can be imported"),
        (["--seeds", "1", "1"], "seeds one or more that differ"),
        (["--jobs", "0"], "jobs must be at least 1"),
        (["--candidates", "a=attention", "b=averaging"], "hold_out applies to dataset folder or"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, capsys, flags, message):
    assert run("--dataset", "digit-pairs", "--output", tmp_path / "runs", *flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_mistyped_flag_of_an_arm_is_one_line_with_a_hint(capsys):
    with pytest.raises(SystemExit):
        run("--dataset", "digit-pairs", "--arms", "plain", "mine=se --num-head 2")
    assert capsys.readouterr().err.splitlines()[1:] == [
        "vision-attn compare --arms: error: unrecognized arguments: --num-head 2; did you mean --num-heads?"
    ]


@pytest.mark.parametrize("flag", ["--seed", "--overwrite", "--test-only", "--block"])
def test_what_a_comparison_decides_is_no_flag(flag, capsys):
    with pytest.raises(SystemExit):
        run("--dataset", "digit-pairs", flag, "1")
    assert f"unrecognized arguments: {flag}" in capsys.readouterr().err


def test_candidates_are_chosen_by_images_held_out_from_training(image_folder, tmp_path, monkeypatch, capsys):
    """The images to evaluate on are seen by the arms that are reported alone."""
    seen = []

    def outcome(settings):
        settings.folder.mkdir(parents=True)
        seen.append((settings.folder.name, settings.hold_out, settings.block_options))
        top1 = {"open-0": 50.0, "shut-0": 60.0}.get(settings.folder.name, 40.0)
        return runs.Outcome(top1, 1.0, 10, 20, 1.0, 1.0, None)

    monkeypatch.setattr(runs, "run", outcome)
    candidates = ["open=attention --block-options gate_init=1", "shut=attention --block-options gate_init=0"]
    arguments = ["--data", image_folder, "--arms", "plain", "convolution", "--seeds", 0, "--output", tmp_path]
    assert run(*arguments, "--hold-out", 0.25, "--candidates", *candidates) == 0
    assert seen == [
        ("open-0", 0.25, ("gate_init=1",)),
        ("shut-0", 0.25, ("gate_init=0",)),
        ("plain-0", None, ()),
        ("convolution-0", None, ()),
        ("shut-0", None, ("gate_init=0",)),
    ]
    out = capsys.readouterr().out
    assert "The best of the candidates, on images held out from training: shut" in out
    assert list(scores(tmp_path)) == ["plain", "convolution", "shut"]
    assert "held-out training images" in (tmp_path / "candidates" / "comparison.md").read_text()
    assert "held-out" not in (tmp_path / "comparison.md").read_text()


@pytest.mark.usefixtures("small")
def test_a_block_of_ones_own_is_an_arm(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(settings.CHOICES, "block", settings.CHOICES["block"])
    monkeypatch.setattr(network, "BLOCKS", dict(network.BLOCKS))
    (tmp_path / "my_blocks.py").write_text(
        "from vision_attn.tools.comparison.controls import NormBlock2d\n\n\nclass Mine(NormBlock2d):\n    pass\n"
    )
    with pytest.raises(ValueError, match=r"block must be one of .*got 'my_blocks:Mine'"):
        Settings(data="", insert=("layer3",), block="my_blocks:Mine")  # a file imports nothing
    flags = [
        "--dataset",
        "digit-pairs",
        "--epochs",
        1,
        "--warmup-epochs",
        0,
        "--seeds",
        0,
        "--output",
        tmp_path / "runs",
    ]
    assert run(*flags, "--arms", "plain", "mine=--block my_blocks:Mine --block-options gate_init=0.5") == 0
    assert "Mine" in (tmp_path / "runs" / "mine-0" / "inserted.txt").read_text()
    assert type(va.load_run(tmp_path / "runs" / "mine-0").model.stage3[1][2].inserted).__name__ == "Mine"


# --- side by side -----------------------------------------------------------------------------------------------------


class Process:
    """One that ends at once, with what it was given."""

    def __init__(self, given, fails):
        self.given, self.fails, self.ended = given, fails, False
        self.sentinel, self.end = multiprocessing.Pipe()

    def start(self):
        settings = self.given[0]
        settings.folder.mkdir(parents=True, exist_ok=True)
        (settings.folder / "log.txt").write_text("Traceback …\nDataError: no images\n")
        if settings.folder.name not in self.fails:
            outcome = runs.asdict(runs.Outcome(50.0, 1.0, 10, 20, 1.0, 1.0, None))
            content = {"settings": settings.as_dict(), "outcome": outcome}
            (settings.folder / "outcome.json").write_text(json.dumps(content))
        self.end.close()

    def join(self):
        self.ended = True

    terminate = join


def test_runs_side_by_side_share_the_cores_and_the_gpus(tmp_path, monkeypatch):
    made, fails = [], ["b-1"]

    class Context:
        def Process(self, target, args):  # noqa: N802
            made.append(Process(args, fails))
            return made[-1]

    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: Context())
    monkeypatch.setattr(runs, "cores", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setattr(runs.torch.cuda, "device_count", lambda: 2)
    arms = {"a": {"dataset": "digit-pairs"}, "b": {"dataset": "digit-pairs"}}
    with pytest.raises(TrainingError, match=r"b-1 ended early: DataError: no images \(all of it in .*b-1/log\.txt\)"):
        compare(arms, seeds=(0, 1), output=str(tmp_path), jobs=3)
    assert {one.given[1] for one in made} == {8 // 3}
    assert [one.given[2] for one in made[:3]] == ["3", "5", "3"]  # of three on two, two share one
    assert all(one.ended for one in made)
    assert scores(tmp_path) == {"a": {"0": 50.0}, "b": {"0": 50.0}}  # of the seed that was complete
    fails.clear()
    compare(arms, seeds=(0, 1), output=str(tmp_path), jobs=3)
    assert made[-1].given[1:] == (8 // 3, "3")  # what is left alone has the threads that it would have had
    assert made[-1].given[0].folder.name == "b-1"


@pytest.mark.thorough
def test_a_comparison_killed_at_random_moments_gives_the_same_table(image_folder, tmp_path):
    """The runs are processes of their own; they leave when the comparison that started them is killed."""
    random.seed(0)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    arguments = [
        "--data", image_folder, "--epochs", 8, "--batch-size", 16, "--device", "cpu", "--arms", "plain", "convolution",
        "--seeds", 0, "--insert", "layer3", "--jobs", 2, "--output",
    ]  # fmt: skip

    def begin(folder):
        command = [sys.executable, "-m", "vision_attn", "compare", *map(str, [*arguments, folder])]
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)

    whole, killed = begin(tmp_path / "whole"), 0
    assert whole.wait() == 0
    while not (tmp_path / "parts" / "comparison.json").exists():
        process, saved = begin(tmp_path / "parts"), list((tmp_path / "parts").glob("*/last.pth"))
        until = time.monotonic() + 120
        while process.poll() is None and killed < 2 and time.monotonic() < until:
            if len(list((tmp_path / "parts").glob("*/last.pth"))) > 0 or saved:
                time.sleep(random.uniform(0, 1))
                process.send_signal(signal.SIGKILL)
                killed += 1
                break
            time.sleep(0.1)
        process.wait()
    assert scores(tmp_path / "parts") == scores(tmp_path / "whole")
    logs = [path.read_text() for path in (tmp_path / "parts").glob("*/log.txt")]
    assert any("resumed after epoch" in log for log in logs)

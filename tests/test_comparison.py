"""Comparing blocks: the intervals are SciPy's, the words follow from them, and no interruption changes a table."""

import json
import multiprocessing

import numpy as np
import pytest
from scipy import stats

import vision_attn as va
from vision_attn.errors import Interrupted, TrainingError
from vision_attn.tools.comparison import runs
from vision_attn.tools.comparison.arms import ARMS, OF_TIMM, recipe, settings_of_arm
from vision_attn.tools.comparison.own_loop import trials
from vision_attn.tools.comparison.runs import Outcome, compare
from vision_attn.tools.comparison.statistics import compare_scores, difference_table
from vision_attn.tools.training import folder
from vision_attn.tools.training.loop import Trainer
from vision_attn.tools.training.settings import Settings


def made_up(*means, seeds=6, spreads=(0.3, 0.7, 1.5)):
    draw = np.random.default_rng(0).normal
    return {
        f"arm {index}": draw(mean, spreads[index % len(spreads)], seeds + index).tolist()
        for index, mean in enumerate(means)
    }


def test_all_pairs_have_games_and_howells_intervals_the_last_arms_first():
    scores = made_up(45, 45.4, 46)
    found = compare_scores(scores)
    assert [one.arms for one in found] == [("arm 2", "arm 0"), ("arm 2", "arm 1"), ("arm 1", "arm 0")]
    for one in found:
        first, second = (np.array(scores[arm]) for arm in one.arms)
        parts = [values.var(ddof=1) / len(values) for values in (first, second)]
        freedom = sum(parts) ** 2 / sum(part**2 / (len(v) - 1) for part, v in zip(parts, (first, second), strict=True))
        half = stats.studentized_range.ppf(0.95, 3, freedom) * np.sqrt(sum(parts) / 2)
        mean = first.mean() - second.mean()
        assert (one.mean, one.low, one.high) == pytest.approx((mean, mean - half, mean + half), rel=1e-3)


@pytest.mark.parametrize(
    ("scores", "verdict", "known"),
    [
        ({"plain": [40.0, 41.0, 42.0], "other": [60.0, 61.0, 62.0]}, "better", True),
        ({"plain": [60.0, 61.0, 62.0], "other": [40.0, 41.0, 42.0]}, "worse", True),
        ({"plain": [40.0, 41.0], "other": [41.0, 42.0]}, "no significant difference", True),
        ({"plain": [40.0], "other": [60.0]}, "no verdict", False),  # one seed has no spread
        ({"plain": [40.0, 40.0], "other": [40.0, 40.0]}, "no verdict", False),
    ],
)
def test_words_follow_from_the_numbers(scores, verdict, known):
    (found,) = compare_scores(scores)
    assert (found.verdict, found.low is not None) == (verdict, known)
    text = difference_table([found])
    assert (f"| other − plain | {found.mean:+.2f} |" in text and f"| {verdict} |" in text) == known
    assert ("by Games and Howell" in text, "no spread to measure differences by" in text) == (known, not known)
    assert "nan" not in text


def test_settings_of_blocks_go_to_the_arms_that_they_suit():
    common = {"weights": "net.pth", "attention_lr": 0.1, "freeze_backbone": True, "at": "before", "lr": 0.2}
    common |= {"insert": ("layer3",), "block_options": ("gate_init=1", "position=Rope2d()", "num_heads=2")}
    arms = {arm: Settings(**settings_of_arm(arm, {}, common)) for arm in ARMS}
    assert arms.pop("plain") == Settings(weights="net.pth", lr=0.2)
    assert {(one.attention_lr, one.at, one.insert) for one in arms.values()} == {(0.1, "before", ("layer3",))}
    attention = ("gate_init=1", "position=Rope2d()", "num_heads=2")
    assert {arm: (one.block.rpartition(":")[2], one.block_options) for arm, one in arms.items()} == {
        "convolution": ("ConvBlock2d", ("gate_init=1",)),
        "large-kernel": ("ConvBlock2d", ("gate_init=1", "kernel_size=13")),
        "norm-shortcut": ("NormBlock2d", ("gate_init=1",)),
        "se": ("se", ("rd_ratio=2",)),
        **{arm: (block, ()) for arm, block in OF_TIMM.items()},
        "se-residual": ("SqueezeExciteBlock2d", ("gate_init=1",)),
        "pooled-mlp": ("ConvBlock2d", ("gate_init=1", "kernel_size=None")),
        "gated-convolution": ("GatedConvBlock2d", ("gate_init=1", "kernel_size=13")),
        "linear": ("LinearBlock2d", ("gate_init=1", "num_heads=2")),
        "averaging": ("attention", (*attention, "scale=0")),
        "attention": ("attention", attention),
    }
    # Its place is the branch, unless all blocks have another. What a new head is trained with is common to all.
    assert settings_of_arm("se", {}, {})["at"] == "branch"
    assert settings_of_arm("plain", {}, {"freeze_backbone": True, "reset_head": True})["freeze_backbone"]
    own = settings_of_arm("attention", {"block_options": ("num_heads=4",), "lr": 0.1}, common)
    assert (own["lr"], own["block_options"]) == (0.1, ("gate_init=1", "position=Rope2d()", "num_heads=4"))
    with pytest.raises(ValueError, match=r"arms must be among plain, convolution.*got 'conv'"):
        settings_of_arm("conv", {}, {})


def test_what_a_comparison_decides_is_refused_as_a_common_setting():
    assert recipe({"dataset": "cifar100", "lr": 0.2})["lr"] == 0.2
    assert recipe({"data": "flowers"}) == {"data": "flowers"}
    with pytest.raises(ValueError, match="block, seed: a comparison decides that itself"):
        recipe({"dataset": "cifar100", "seed": 1, "block": "my:Block"})


def test_paths_among_the_settings_are_written_as_text(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "save_figure", lambda figure, path: None)
    outcome = Outcome(50.0, 1.0, 10, 20, 3.0, 4.0, None)
    found = runs.summary({"plain": {0: outcome}, "se": {0: outcome}}, "", Settings())
    runs.write(found, {"plain": {"data": tmp_path}, "se": {}}, tmp_path)
    held = json.loads((tmp_path / "comparison.json").read_text())
    assert held["arms"]["plain"]["settings"] == {"data": str(tmp_path)}


@pytest.fixture
def two_arms(image_folder, monkeypatch):
    """Make the settings of two arms on a few images; no figures are drawn, which takes longer than the training."""
    monkeypatch.setattr(folder, "save_figure", lambda figure, path: path.write_bytes(b""))

    def settings(**further):
        common = {"data": image_folder, "model": "tiny", "device": "cpu", "epochs": 2, "batch_size": 72, **further}
        common = recipe({**common, "warmup_epochs": 0.0, "insert": ("layer2",), "block_options": ("num_heads=4",)})
        rope = {"block_options": ("position=Rope2d()",)}
        return {"plain": settings_of_arm("plain", {}, common), "rope": settings_of_arm("attention", rope, common)}

    return settings


def scores(path):
    found = json.loads((path / "comparison.json").read_text())
    return {arm: one["scores"] for arm, one in found["arms"].items()}


def test_a_comparison_goes_on_where_it_was_interrupted(two_arms, tmp_path, monkeypatch, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    found = compare(two_arms(), seeds=(0, 1), output=str(whole), jobs=1, command="a command")
    assert "4 of 4 runs are ahead, of 8 epochs together, 1 side by side" in capsys.readouterr().out
    held = json.loads((whole / "comparison.json").read_text())
    assert list(held["arms"]) == ["plain", "rope"]
    assert held["differences"] == json.loads(json.dumps([one.as_dict() for one in found.differences]))
    first = held["arms"]["rope"]["runs"]["0"]
    assert first["multiply_adds"] - held["arms"]["plain"]["runs"]["0"]["multiply_adds"] == 196_608  # as insert_ reports
    assert (first["parameters"], first["changed"] is None, first["milliseconds"] > 0) == (2_603, False, True)
    text = (whole / "comparison.md").read_text()
    assert "| rope | 2,603 | 325,680 |" in text
    assert "`a command`" in text
    assert (whole / "comparison.png").exists()
    block = va.inserted_blocks(va.load_model(whole / "rope-1"))
    assert [one.attn.num_heads for one in block.values()] == [4], "the common heads, beside the arm's own option"

    saved, save = [], Trainer.save

    def interrupted(trainer):
        saved.append(trainer.folder.name)
        if len(saved) == 9:  # five of the first run, and the second run's last but one
            raise KeyboardInterrupt
        save(trainer)

    monkeypatch.setattr(Trainer, "save", interrupted)
    with pytest.raises(Interrupted, match="the same command goes on from here"):
        compare(two_arms(), seeds=(0,), output=str(parts), jobs=1)
    compare(two_arms(), seeds=(0,), output=str(parts), jobs=1)
    assert "1 of 2 runs are ahead" in capsys.readouterr().out
    again = json.loads((parts / "comparison.json").read_text())["arms"]
    for arm, one in held["arms"].items():
        assert again[arm]["runs"]["0"]["loss"] == one["runs"]["0"]["loss"]
    assert (saved.count("plain-0"), saved.count("rope-0") < 8) == (5, True), "what was saved is not trained again"
    assert "shows no spread" in (parts / "comparison.md").read_text()
    with pytest.raises(ValueError, match="plain-0 holds a run whose lr differ: give another"):
        compare(two_arms(lr=0.1), seeds=(0,), output=str(parts), jobs=1)
    (parts / "plain-0" / "outcome.json").write_text("{}")
    with pytest.raises(ValueError, match=r"outcome\.json is damaged, or of another version: remove it"):
        compare(two_arms(), seeds=(0,), output=str(parts), jobs=1)


@pytest.mark.parametrize(
    ("further", "message"),
    [({"arms": {"a": {}}}, "arms must be two or more"), ({"seeds": (1, 1)}, "seeds one or more that differ")],
)
def test_what_cannot_be_compared_is_refused(tmp_path, further, message):
    with pytest.raises(ValueError, match=message):
        compare(**{"arms": {"a": {}, "b": {}}, "output": str(tmp_path / "runs"), **further})
    assert not (tmp_path / "runs").exists()


class Process:
    """One that ends at once, with what it was given."""

    def __init__(self, given, fails):
        self.given, self.fails, self.ended = given, fails, False
        self.sentinel, self.end = multiprocessing.Pipe()

    def start(self):
        settings = self.given[0]
        settings.output.mkdir(parents=True, exist_ok=True)
        (settings.output / "log.txt").write_text("Traceback …\nDataError: no images\n")
        if settings.output.name not in self.fails:
            outcome = runs.asdict(Outcome(50.0, 1.0, 10, 20, 1.0, 1.0, None))
            content = {"settings": settings.as_dict(), "outcome": outcome}
            (settings.output / "outcome.json").write_text(json.dumps(content))
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
    arms = {"a": {}, "b": {}}
    with pytest.raises(TrainingError, match=r"b-1 ended early: DataError: no images \(all of it in .*b-1/log\.txt\)"):
        compare(arms, seeds=(0, 1), output=str(tmp_path), jobs=3)
    assert {one.given[1] for one in made} == {8 // 3}
    assert [one.given[2] for one in made[:3]] == ["3", "5", "3"]  # of three on two, two share one
    assert all(one.ended for one in made)
    assert scores(tmp_path) == {"a": {"0": 50.0}, "b": {"0": 50.0}}  # of the seed that was complete
    fails.clear()
    compare(arms, seeds=(0, 1), output=str(tmp_path), jobs=3)
    assert made[-1].given[1:] == (8 // 3, "3")  # what is left alone has the threads that it would have had
    assert made[-1].given[0].output.name == "b-1"


# --- trials in a loop of one's own ------------------------------------------------------------------------------------

SCORES = {"plain": (50.0, 52.0, 51.0), "block": (60.0, 61.0, 65.0)}


def measured(arm, seed, shift):
    score = SCORES[arm][seed] + shift
    return {"parameters": len(arm), "right %": score, "real px": 100 - score}


def test_trials_tell_mean_deviation_and_intervals_of_what_a_loop_measured(tmp_path, monkeypatch, capsys):
    how = {"seeds": (0, 1, 2), "output": tmp_path, "jobs": 1, "shift": 0.5}
    assert trials(measured, ["plain", "block"], **how)["block"]["2"]["right %"] == 65.5
    text = (tmp_path / "trials.md").read_text()
    mean, spread = np.mean(SCORES["block"]) + 0.5, np.std(SCORES["block"], ddof=1)
    assert f"| block | 5 | {mean:.1f} ± {spread:.1f} | {100 - mean:.2f} ± {spread:.2f} | 3 |" in text
    assert text in capsys.readouterr().out
    found = json.loads((tmp_path / "runs.json").read_text())["differences"]
    assert set(found) == {"right %", "real px"}  # what is the same in every run of an arm has none
    interval = stats.tukey_hsd(SCORES["plain"], SCORES["block"], equal_var=False).confidence_interval(0.95)
    assert found["right %"][0]["low"] == pytest.approx(interval.low[1, 0])
    assert [found[name][0]["verdict"] for name in found] == ["better", "better"]  # fewer pixels are better
    monkeypatch.setitem(SCORES, "plain", None)  # what is noted is not run again
    trials(measured, ["plain", "block"], **how)
    with pytest.raises(ValueError, match=r"holds runs with \{'shift': 0.5\}, not \{'shift': 1\}: give another folder"):
        trials(measured, ["plain"], **{**how, "shift": 1})
    for wrong, named in (({"seeds": (1, 1)}, "seeds must be one or more that differ"), ({"jobs": 0}, "jobs must be")):
        with pytest.raises(ValueError, match=named):
            trials(measured, ["plain"], **{**how, **wrong})

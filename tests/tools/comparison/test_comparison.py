"""Comparison of variants: intervals, verdicts and interrupted comparisons."""

import io
import json
import os
import re
import signal
import subprocess
import time
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from small_networks import assert_same
from vision_attn.tools import cli, environment
from vision_attn.tools.comparison import demo, experiments, recall, runs as comparison_runs
from vision_attn.tools.comparison.experiments import trials
from vision_attn.tools.comparison.runs import compare
from vision_attn.tools.comparison.statistics import Difference, as_markdown, compare_scores, difference_parts
from vision_attn.tools.comparison.variants import VARIANTS, recipe, settings_for_variant
from vision_attn.tools.training.loop import Trainer
from vision_attn.tools.training.settings import Settings

import vision_attn as va
from vision_attn.errors import TrainingError


def test_the_last_variant_has_paired_intervals_with_bonferroni_correction():
    draw, spreads = np.random.default_rng(0).normal, {45: 0.3, 45.4: 0.7, 46: 1.5}
    images = draw(0, 3, 6)  # a common effect of each seed, which paired intervals do not contain
    scores = {name: dict(enumerate(images + draw(name, spread, 6))) for name, spread in spreads.items()}
    shuffled = {name: dict(sorted(of.items(), key=lambda entry: (entry[1], name))) for name, of in scores.items()}
    for found in (compare_scores(scores), compare_scores(shuffled)):
        assert [one.variants for one in found] == [(46, 45), (46, 45.4)]
        for one in found:
            difference = np.subtract(*([*scores[name].values()] for name in one.variants))
            low, high = stats.t.interval(1 - 0.05 / 2, 5, np.mean(difference), stats.sem(difference))
            p = min(1, 2 * stats.ttest_1samp(difference, 0).pvalue)
            assert (one.mean, one.low, one.high, one.p) == pytest.approx((difference.mean(), low, high, p))
            assert (one.p < 0.05) == (one.verdict != "no significant difference")


def test_variants_with_other_seeds_have_the_intervals_of_games_and_howell_for_a_pair():
    draw = np.random.default_rng(0).normal
    scores = {"more seeds": dict(enumerate(draw(45, 2, 8))), "same": dict(enumerate(draw(45, 1, 5)))}
    scores["block"] = dict(enumerate(draw(47, 1, 5)))
    unpaired, paired = compare_scores(scores)
    samples = [[*scores[name].values()] for name in unpaired.variants]
    howell = stats.tukey_hsd(*samples, equal_var=False)
    interval = howell.confidence_interval(1 - 0.05 / 2)
    expected = (np.mean(samples[0]) - np.mean(samples[1]), interval.low[0, 1], interval.high[0, 1])
    assert (unpaired.mean, unpaired.low, unpaired.high) == pytest.approx(expected, rel=1e-3)
    assert unpaired.p == pytest.approx(2 * howell.pvalue[0, 1], rel=1e-3)
    difference = np.subtract([*scores["block"].values()], [*scores["same"].values()])
    assert paired.low == pytest.approx(stats.t.interval(0.975, 4, difference.mean(), stats.sem(difference))[0])


def test_verdicts_respect_the_direction_and_p_is_printed():
    scores = {
        "near": {0: 10.0, 1: 11.0, 2: 12.5},
        "far": {0: 5.0, 1: 6.1, 2: 6.0},
        "block": {0: 10.3, 1: 11.0, 2: 12.1},
    }
    near, far = compare_scores(scores)
    assert (near.verdict, far.verdict) == ("no significant difference", "better")
    assert [one.verdict for one in compare_scores(scores, lower_is_better=True)] == [near.verdict, "worse"]
    expected = 2 * stats.ttest_rel([10.3, 11.0, 12.1], [5.0, 6.1, 6.0]).pvalue
    assert 0.0005 < expected < 0.05
    assert (near.p, far.p) == (1, pytest.approx(expected))
    table = as_markdown(difference_parts([near, far, Difference(("a", "b"), 2.0, 1.0, 3.0, 0.0004)]))
    printed = re.findall(r"\| (\S+ ?\S*) \| (?:no significant difference|better) \|", table)
    assert printed == ["1.000", f"{expected:.3f}", "< 0.001"]


@pytest.mark.parametrize(
    "values",
    [((40.0, 41.0), (41.0, 43.0)), ((40.0,), (60.0,)), ((40.0, 40.0), (40.0, 40.0)), ((63.2, 64.3), (50.1, 51.2))],
)
def test_tables_have_intervals_for_differences_that_vary(values):
    (found,) = compare_scores({name: dict(enumerate(of)) for name, of in zip(("plain", "other"), values, strict=True)})
    text, known = as_markdown(difference_parts([found])), values[1] == (41.0, 43.0)
    assert (found.verdict, found.low is not None) == ("no significant difference" if known else "no verdict", known)
    assert (f"| other − plain | {found.mean:+.2f} |" in text and f"| {found.verdict} |" in text) == known
    assert ("Bonferroni" in text, "nan" in text) == (known, False)


def test_block_settings_apply_to_the_variants_that_accept_them():
    common = {"weights": "net.pth", "attention_lr": 0.1, "freeze_backbone": True, "at": "before", "lr": 0.2}
    common |= {"names": ("layer3",), "block_options": ("gate_init=1", "position=Rope()", "num_heads=2")}
    variants = {name: Settings(**settings_for_variant(name, {}, common)) for name in VARIANTS}
    assert variants.pop("plain") == Settings(weights="net.pth", lr=0.2)
    assert {(one.attention_lr, one.at, one.names) for one in variants.values()} == {(0.1, "before", ("layer3",))}
    attention = ("gate_init=1", "position=Rope()", "num_heads=2")
    for name, block, options in (
        ("large-kernel", "ConvBlock2d", ("gate_init=1", "kernel_size=13")),
        ("se", "se", ("rd_ratio=2",)),
        ("cbam", "cbam", ()),
        ("averaging", "attention", (*attention, "scale=0")),
    ):
        found = variants[name]
        assert (found.block.rpartition(":")[2], found.block_options) == (block, options)
    # It is inserted in the branch unless all blocks have another position. A new head is trained in all variants.
    assert settings_for_variant("se", {}, {})["at"] == "branch"
    assert settings_for_variant("plain", {}, {"freeze_backbone": True, "reset_head": True})["freeze_backbone"]
    custom = settings_for_variant("attention", {"block_options": ("num_heads=4",), "lr": 0.1}, common)
    assert (custom["lr"], custom["block_options"]) == (0.1, ("gate_init=1", "position=Rope()", "num_heads=4"))
    with pytest.raises(ValueError, match=r"plain, convolution.*'convolutoin'\. Did you mean 'convolution'"):
        settings_for_variant("convolutoin", {}, {})
    with pytest.raises(ValueError, match="--block, --seed"):
        recipe({"dataset": "cifar100", "seed": 1, "block": "my:Block"})


def test_a_comparison_resumes_where_it_was_interrupted(image_folder, tmp_path, monkeypatch, capsys):
    def two_variants(**further):
        common = {"data": image_folder, "model": "tiny", "device": "cpu", "epochs": 2, "batch_size": 36, "workers": 0}
        common = recipe({**common, "names": ("layer2",), "block_options": ("num_heads=4",), **further})
        rope = settings_for_variant("attention", {"block_options": ("position=Rope()",)}, common)
        return {"plain": settings_for_variant("plain", {}, common), "rope": rope}

    complete, resumed = tmp_path / "complete", tmp_path / "resumed"
    found = compare(two_variants(), seeds=(0, 1), output=complete, jobs=1, command="a command")
    assert "4 runs, 0 of them complete, 1 in parallel" in capsys.readouterr().out
    rope, plain = found["rope"]["0"], found["plain"]["0"]
    assert rope["MACs"] - plain["MACs"] == 196_608  # as reported by insert_
    assert (rope["parameters"], "% changed when disabled" in plain) == (2_603, False)
    table = np.genfromtxt(complete / "rope-0" / "metrics.csv", delimiter=",", names=True)
    assert rope["ms per step"] == pytest.approx(1000 * 36 / np.median(table["images_per_second"]))
    assert rope["top-1 %"] == pytest.approx(table["eval_top1"][-1])
    text = (complete / "comparison.md").read_text()
    assert re.search(r"\| rope \| 2,603 \| 325,680 \| .* \| 2 \|", text)
    assert re.search(r"\| plain \| .* \| — \| 2 \|", text)
    assert "`a command`" in text
    block = va.inserted_blocks(va.load_model(complete / "rope-1"))
    assert [one.attn.num_heads for one in block.values()] == [4], (
        "the common number of heads is combined with the option of the variant"
    )

    saved, save = [], Trainer.save

    def interrupted(trainer):
        saved.append(trainer.folder.name)
        if len(saved) == 9:  # five saves of the first run, and the next-to-last save of the second run
            raise KeyboardInterrupt
        save(trainer)

    monkeypatch.setattr(Trainer, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compare(two_variants(), seeds=(0,), output=resumed, jobs=1)
    again = compare(two_variants(), seeds=(0,), output=resumed, jobs=1)
    assert "2 runs, 1 of them complete, 1 in parallel" in capsys.readouterr().out
    assert {name: again[name]["0"]["top-1 %"] for name in again} == {n: found[n]["0"]["top-1 %"] for n in found}
    assert_same(*(va.load_model(path / "rope-0").state_dict() for path in (complete, resumed)))
    assert (saved.count("plain-0"), saved.count("rope-0") < 8) == (5, True), "completed steps are not repeated"
    with pytest.raises(ValueError, match=r"plain-0 contains a run with lr=None instead of 0\.1"):
        compare(two_variants(lr=0.1), seeds=(0,), output=resumed, jobs=1)
    moved = tmp_path / "moved"
    moved.symlink_to(image_folder)
    compare(two_variants(data=moved, workers=1), seeds=(0,), output=resumed, jobs=1)
    assert "2 runs, 2 of them complete" in capsys.readouterr().out, "these settings do not change the result"


def test_accuracies_and_changes_are_percentages(tmp_path, monkeypatch):
    class Constant(torch.nn.Module):
        def forward(self, images):  # the first color everywhere
            return torch.tensor([1.0, *[0.0] * 7])[:, None, None].expand(len(images), 8, recall.CELLS, recall.CELLS)

    colors = recall.canvases(recall.EVALUATED, 4, train=False, generator=torch.Generator().manual_seed(0))[1]
    expected = 100 * np.mean(colors[colors != recall.NOTHING].numpy() == 0)
    assert 5 < expected < 25
    assert recall.accuracy(Constant(), 4) == pytest.approx(expected)

    ablation = SimpleNamespace(predictions_changed=3, images=12)
    result = SimpleNamespace(model=torch.nn.Conv2d(3, 4, 1), input_size=(3, 8, 8), ablation=ablation)
    result.settings = Settings(batch_size=4)
    result.history, result.final = [{"images_per_second": 5}], SimpleNamespace(top1=40.0)
    monkeypatch.setattr(comparison_runs, "run_training", lambda settings, log: result)
    (tmp_path / "plain-0").mkdir()
    found = comparison_runs.train_variant("plain", 0, output=tmp_path, batch_size=4)
    changed = {"% changed when disabled": 25.0, "top-1 %": 40.0}
    assert found == {"parameters": 16, "MACs": 768, "ms per step": 800.0, **changed}


@pytest.mark.slow
def test_an_interruption_keeps_completed_runs_and_processes_share_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def run(variant, seed, folder):
        def wait_for(pattern):
            while len(list(Path(folder).glob(pattern))) < 3:
                time.sleep(0.05)

        (Path(folder) / f"pid {os.getpid()}").touch()
        wait_for("pid *")
        if (variant, seed) == ("b", 1) and os.getppid() == parent:
            wait_for("*/run.json")
            os.kill(parent, signal.SIGINT)
            time.sleep(600)  # the parent does not wait for the worker
        return {
            "pid": os.getpid(),
            "gpu": int(os.environ["CUDA_VISIBLE_DEVICES"].split(",")[0]),
            "right %": 50.0 + seed,
        }

    parent, how = os.getpid(), {"seeds": (0, 1), "output": tmp_path, "gpu": True, "folder": str(tmp_path)}
    with pytest.raises(KeyboardInterrupt):
        trials(run, ["a", "b"], jobs=3, **how)
    kept = {file: file.read_bytes() for file in tmp_path.glob("*/run.json")}
    assert {file.parent.name for file in kept} == {"a-0", "b-0", "a-1"}
    found = trials(run, ["a", "b"], jobs=1, **how)
    assert all(file.read_bytes() == noted for file, noted in kept.items())
    here = found["b"].pop("1")
    assert (here["pid"], here["right %"]) == (parent, 51)
    by_process = {one["pid"]: one["gpu"] for by_seed in found.values() for one in by_seed.values()}
    assert sorted(by_process.values()) in ([3, 3, 5], [3, 5, 5])


SCORES = {"plain": (50.0, 52.0, 51.0), "block": (60.0, 61.0, 65.0)}


def measured(variant, seed, shift, scale=1):
    score = SCORES[variant][seed] + shift
    return {"parameters": len(variant), "right %": score, "real px": scale * (100 - score), "loss": score}


@pytest.mark.slow
def test_trials_report_means_deviations_and_intervals(tmp_path, monkeypatch, capsys):
    how = {"seeds": (0, 1, 2), "output": tmp_path, "jobs": 1, "shift": 0.5}
    variants = {"plain": {}, "block": {"scale": 2}}
    assert trials(measured, variants, **how)["block"]["2"]["right %"] == 65.5
    text = (tmp_path / "comparison.md").read_text()
    mean, spread = np.mean(SCORES["block"]) + 0.5, np.std(SCORES["block"], ddof=1)
    px = f"{200 - 2 * mean:.2f} ± {2 * spread:.2f}"
    assert f"| block | 5 | {mean:.1f} ± {spread:.1f} | {px} | {mean:.0f} ± {spread:.0f} | 3 |" in text
    assert re.search(rf"^block +5 +{mean:.1f} ± {spread:.1f} ", capsys.readouterr().out, re.MULTILINE)
    summary = json.loads((tmp_path / "runs.json").read_text())
    found = summary["differences"]
    assert set(found) == {"right %", "real px"}
    assert [found[name][0]["verdict"] for name in found] == ["better", "worse"]  # lower is better for pixels
    assert (tmp_path / "comparison.png").read_bytes()[1:4] == b"PNG"
    monkeypatch.setitem(SCORES, "plain", None)  # complete runs are not repeated
    trials(measured, variants, **how)
    assert (tmp_path / "comparison.md").read_text() == text
    with pytest.raises(ValueError, match="block-0 contains a run with scale=2 instead of None"):
        trials(measured, ["plain", "block"], **how)
    with pytest.raises(TrainingError, match=r"other, seed 0 .*KeyError: 'other'"):
        trials(measured, ["other"], **how)


def test_runs_record_versions_device_and_commit(tmp_path, monkeypatch):
    trials(measured, ["plain", "block"], seeds=(0, 1), output=tmp_path, jobs=1, shift=0)
    (found,) = json.loads((tmp_path / "runs.json").read_text())["environments"]
    assert (found["torch"], found["vision_attn"]) == (torch.__version__, va.__version__)
    assert found["cpu"]
    assert (found["gpu"] is not None) == torch.cuda.is_available()
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "a/b/environment.py"))  # no checkout
    monkeypatch.setenv("GIT_COMMIT", "1234abc")
    trials(measured, ["plain", "block"], seeds=(0, 1, 2), output=tmp_path, jobs=1, shift=0)
    both = json.loads((tmp_path / "runs.json").read_text())["environments"]
    assert both == [found, {**found, "commit": "1234abc"}], "the runs of another commit"


def test_the_commit_of_a_checkout_is_read_from_git(tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    (file := tmp_path / "file").write_text("1")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "a/b/environment.py"))
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert environment.get_commit() == head
    file.write_text("2")
    assert environment.get_commit() == f"{head}-dirty"


def test_the_progress_of_a_run_is_printed_from_its_start(tmp_path, monkeypatch, capsys):
    def run(variant, seed):
        report = experiments.progress_printer(variant, seed)
        with redirect_stdout(io.StringIO()):  # as runs do that have a log
            for step in range(100):
                now[0] += 1
                report(f"step {step + 1} of 100")
        return {"right %": 50.0 + seed + len(variant)}

    now = [0.0]
    monkeypatch.setattr(experiments.time, "monotonic", lambda: now[0])
    trials(run, ["a", "bb"], seeds=(0, 1), output=tmp_path, jobs=1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "4 runs, 0 of them complete, 1 in parallel",
        "a, seed 0: started",
        *(f"a, seed 0: step {step} of 100" for step in (11, 22)),
    ]
    assert lines[10:12] == ["a, seed 0: step 99 of 100", "a, seed 0: right % 51.0"]
    assert lines[-2:] == [
        f"Tables: {tmp_path / 'comparison.md'}",
        f"Plot of the differences and their intervals: {tmp_path / 'comparison.png'}",
    ]


@pytest.mark.slow
def test_compare_without_data_compares_on_recall(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recall, "BATCH", 2)
    monkeypatch.setattr(demo, "compare_on_recall", partial(demo.compare_on_recall, steps=1))
    flags = ["compare", "--seeds", "0", "--jobs", "1", "--output", str(tmp_path), "--variants", "plain", "se"]
    assert cli.main([*flags, "rope=attention --block-options position=Rope()"]) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^{name} +[\d,]+ +\d+\.\d ", out, re.MULTILINE) for name in ("plain", "se", "rope"))
    (block,) = va.inserted_blocks(va.load_model(tmp_path / "rope-0")).values()
    assert (repr(block.attn.position).partition("(")[0], block.attn.num_heads) == ("RotaryEncoding", 4)
    assert cli.main([*flags, "--epochs", "2", "--lr", "0.1"]) == 2
    assert re.search(r"--epochs, --lr: .*--data", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seeds": (0, 0)}, r"seeds must be distinct"),
        ({"seeds": ()}, "at least one"),
        ({"jobs": 0}, "jobs must be above 0"),
    ],
)
def test_wrong_seeds_and_jobs_are_named_before_a_run(tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        trials(print, ["a", "b"], output=tmp_path / "new", **{"seeds": (0, 1), **given})
    with pytest.raises(ValueError, match="expected at least 2"):
        compare({"plain": {}}, output=tmp_path / "new", seeds=(0,))
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_worker_ends_with_its_parent(monkeypatch):
    parents, killed = iter((7, 7, 1)), []
    for name, function in {"getppid": lambda: next(parents), "kill": lambda *how: killed.append(how)}.items():
        monkeypatch.setattr(experiments.os, name, function)
    experiments.end_with_parent(7)
    assert killed == [(os.getpid(), signal.SIGTERM)]

"""Comparison of variants: intervals, verdicts, interrupted comparisons, and backends."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from PIL import Image
from scipy import stats

import vision_attn as va
from vision_attn.errors import TrainingError
from vision_attn.recipes import compare as module
from vision_attn.recipes.compare import compare_settings, settings_for_variant, trials
from vision_attn.recipes.differences import compare_scores, difference_table, plot, report
from vision_attn.recipes.runs import import_block, newest_state
from vision_attn.recipes.settings import Settings, parse_options


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


def test_verdicts_respect_the_direction_and_p_is_printed(tmp_path):
    near, far, block = [1.0, 1.1, 1.25], [0.5, 0.61, 0.6], [1.03, 1.1, 1.21]
    scores = {name: dict(enumerate(of)) for name, of in {"near": near, "far": far, "block": block}.items()}
    near, far = compare_scores(scores)
    assert (near.verdict, far.verdict) == ("no significant difference", "better")
    assert [one.verdict for one in compare_scores(scores, lower_is_better=True)] == [near.verdict, "worse"]
    assert compare_scores({name: scores[name] for name in ("block", "far")})[0].verdict == "worse"
    expected = 2 * stats.ttest_rel(block, list(scores["far"].values())).pvalue
    assert 0.0005 < expected < 0.05
    assert (near.p, far.p) == (1, pytest.approx(expected))
    table = difference_table([near, far, replace(near, p=0.0004)])
    printed = re.findall(r"\| +(\S+ ?\S*) \| +(?:no significant difference|better) \|", table)
    assert printed == ["1.000", f"{expected:.3f}", "< 0.001"]
    runs = {name: {str(seed): {"top-1 %": x, "error px": x} for seed, x in of.items()} for name, of in scores.items()}
    verdicts = {name: found[1].verdict for name, found in report(runs)[1].items()}
    assert verdicts == {"top-1 %": "better", "error px": "worse"}
    with mock.patch.object(Axes, "errorbar", autospec=True, side_effect=Axes.errorbar) as bars:
        plot({"top-1 %": [near, far], "steps": [far, replace(far, high=None)]}, tmp_path / "plot.png")
    assert [call.args[1] for call in bars.mock_calls] == [[near.mean, far.mean], [far.mean] * 2]
    assert bars.call_args.kwargs["xerr"] == [far.high - far.mean, 0]
    with Image.open(tmp_path / "plot.png") as image:
        assert image.size == (7 * 150, round((2 * 1.2 + 4 * 0.35) * 150))


RUNS = [((40.0, 41.0), (41.0, 43.0)), ((40.0,), (60.0,)), ((40.0, 40.0), (40.0, 40.0)), ((63.2, 64.3), (50.1, 51.2))]


@pytest.mark.parametrize("values", RUNS)
def test_tables_have_intervals_for_differences_that_vary(values):
    by_name = zip(("plain", "other"), values, strict=True)
    runs = {name: {str(seed): {"top-1 %": x, "MACs": 2603} for seed, x in enumerate(of)} for name, of in by_name}
    text, differences = report(runs, "a note")
    assert "| : |" not in text  # Markdown requires a dash below each header
    assert len({len(line) for line in text.partition("\n\n")[0].splitlines()}) == 1
    assert (f" {np.mean(values[0]):.1f}" in text, "| 2,603 |" in text) == (True, True)
    known = values[1] == (41.0, 43.0)
    (found,) = compare_scores({name: {seed: one["top-1 %"] for seed, one in of.items()} for name, of in runs.items()})
    assert (found.verdict, found.low is not None) == ("no significant difference" if known else "no verdict", known)
    differ = values[0] != values[1]
    assert (list(differences), f"{found.mean:+.2f}" in text) == (["top-1 %"] * differ, differ)
    assert ("Bonferroni" in text, "\n\na note\n\n" in text, "nan" in text) == (True, True, False)


def test_block_settings_apply_to_the_variants_that_accept_them():
    options = ("gate_init=1", "position=Rope()", "num_heads=2")
    common = Settings(weights="net.pth", attention_lr=0.1, freeze_backbone=True, at="before", lr=0.2)
    common = replace(common, names=("layer3",), block_options=options)
    with pytest.warns(UserWarning, match="plain has no block and no new classifier to train, so all its weights are"):
        found = dict(settings_for_variant(name, common) for name in module.VARIANTS)
    assert found.pop("plain") == Settings(weights="net.pth", lr=0.2)
    assert {(one.attention_lr, one.at, one.names) for one in found.values()} == {(0.1, "before", ("layer3",))}
    assert {name: (one.block.rpartition(":")[2], one.block_options) for name, one in found.items()} == {
        "convolution": ("ConvNeXtBlock", ("kernel_size=3", "mlp_ratio=2", "ls_init_value=None")),
        "se": ("se", ()),
        "averaging": ("attention", (*options, "scale=0")),
        "cost-volume": ("attention", ("gate_init=1", "position=Rope()", "num_heads=1", "qk_norm=cosine")),
        "attention": ("attention", options),
    }
    # A new head is trained in all variants.
    assert settings_for_variant("plain", Settings(freeze_backbone=True, reset_head=True))[1].freeze_backbone
    assert settings_for_variant("attention", Settings())[1].stages == (-1,)
    name, one = settings_for_variant("w=attention --at after --block-options num_heads=4 --lr 0.1 --stages -2", common)
    assert (name, one.lr, one.stages, one.names) == ("w", 0.1, (-2,), ())
    assert one.block_options == ("gate_init=1", "position=Rope()", "num_heads=4")
    assert settings_for_variant("other=averaging --block=attention", common)[1].block_options == ()
    with pytest.raises(ValueError, match=r"plain, convolution.*'convolutoin'\. Did you mean 'convolution'"):
        settings_for_variant("convolutoin", Settings())
    fixed = "(--seed|--config|-o|--val-fraction)"
    for word in ("x=se --seed 5", "x=plain --config=runs/other", "x=se -o a", "x=se --val_fraction 0.3"):
        with pytest.raises(ValueError, match=f"must not contain {fixed}, which is the same"):
            settings_for_variant(word, Settings())


def test_the_precision_and_the_device_are_the_same_for_all_variants(base, tmp_path):
    variants = {"one": base, "other": replace(base, amp="bfloat16")}
    with pytest.raises(ValueError, match="--amp and --device must be the same for all variants"):
        compare_settings(variants, seeds=[0], output=tmp_path / "c", command="", jobs=1)


def test_a_convolution_has_as_many_parameters_as_attention():
    common = Settings(names=("layer",), block_options=("num_heads=4",))
    name, s = settings_for_variant("large=convolution --block-options kernel_size=13", common)
    assert (name, s.block_options) == ("large", ("kernel_size=13", "mlp_ratio=2", "ls_init_value=None"))
    convolution = settings_for_variant("convolution", common)[1]
    for channels in (64, 256, 512):
        block = import_block(convolution.block)(channels, **parse_options(convolution.block_options))
        one, other = (sum(p.numel() for p in b.parameters()) for b in (block, va.AttentionBlock2d(channels)))
        assert abs(one - other) < 0.04 * other


@pytest.fixture
def base(base):
    return replace(base, img_size=None, epochs=2, batch_size=36, names=("layer2",), block_options=("num_heads=4",))


@pytest.mark.slow
def test_a_comparison_resumes_where_it_was_interrupted(base, tmp_path, capsys):
    variants = dict(settings_for_variant(word, base) for word in ("plain", "rope=--block-options 'position=Rope()'"))
    complete, resumed, shared = tmp_path / "complete", tmp_path / "resumed", {"command": "a command", "jobs": 1}
    found = compare_settings(variants, seeds=(0, 1), output=complete, **shared)
    assert "4 runs, 0 of them complete, 1 in parallel" in capsys.readouterr().out
    rope, plain = found["rope"]["0"], found["plain"]["0"]
    assert rope["MACs"] - plain["MACs"] == 196_608  # as reported by insert_
    assert rope["parameters"] == 2_603
    assert all(text in (complete / "comparison.md").read_text() for text in ("a command", "| plain ", "| rope "))
    summary = json.loads((complete / "runs.json").read_text())
    assert (summary["runs"], summary["environments"][0]["vision_attn"]) == (found, va.__version__)
    effects = [mock.DEFAULT, mock.DEFAULT, KeyboardInterrupt]
    interrupted = mock.patch.object(module, "train", mock.Mock(wraps=module.train, side_effect=effects))
    with interrupted, pytest.raises(KeyboardInterrupt):
        compare_settings(variants, seeds=(0, 1), output=resumed, **shared)
    again = compare_settings(variants, seeds=(0, 1), output=resumed, **shared)
    assert "4 runs, 2 of them complete" in capsys.readouterr().out
    assert all(again[name]["1"]["top-1 %"] == one["1"]["top-1 %"] for name, one in found.items())
    assert list(compare_settings(variants, seeds=(0, 1, 2), output=resumed, **shared)["plain"]) == ["0", "1", "2"]


def test_an_aborted_comparison_with_other_settings_names_its_folder(base, tmp_path):
    def interrupted(settings, log):
        settings.output.mkdir(exist_ok=True)
        (settings.output / "settings.json").write_text(json.dumps({"lr": 0.5}))
        raise KeyboardInterrupt

    variants = dict(settings_for_variant(word, base) for word in ("plain", "attention"))
    with mock.patch.object(module, "train", interrupted), pytest.raises(KeyboardInterrupt):
        compare_settings(variants, seeds=[0], output=tmp_path / "c", command="", jobs=1)
    with pytest.raises(ValueError, match=r"--output: .*c has a comparison with other settings \(--lr\). Choose"):
        compare_settings(variants, seeds=[0], output=tmp_path / "c", command="", jobs=1)


def test_runs_on_other_images_are_not_compared(base, photos, tmp_path):
    base = replace(base, data=photos, epochs=1, batch_size=12)
    variants = {"one": base, "other": replace(base, lr=0.01)}
    compare = partial(compare_settings, seeds=[0, 1], output=tmp_path / "c", command="", jobs=1)
    assert {name: of["0"]["MACs"] for name, of in compare(variants).items()} == dict.fromkeys(variants, 325_680)
    summary = json.loads((tmp_path / "c/runs.json").read_text())["runs"]
    assert (list(summary), compare(variants)) == (["one", "other"], summary)  # again: all runs are complete
    shutil.copy(photos / "red" / "0.png", photos / "red" / "another.png")
    with pytest.raises(TrainingError, match=r"or different images for seed 0. Restore the images of --d"):
        compare({**variants, "third": replace(base, lr=0.02)})
    (photos / "red").rename(photos / "zebra")
    with pytest.raises(TrainingError, match=r"one, seed 2 failed: DataError: .* have different classes"):
        compare(variants, seeds=[2])


def test_seeds_have_the_same_images_in_a_folder_val(base, image_folder, tmp_path):
    data = shutil.copytree(image_folder, tmp_path / "data")
    variants = {name: replace(base, data=data, epochs=1, lr=lr) for name, lr in (("one", 0.1), ("other", 0.01))}
    compare = partial(compare_settings, variants, output=tmp_path / "c", command="", jobs=1)
    compare(seeds=[0])
    (data / "val" / "red" / "0.png").unlink()
    with pytest.raises(TrainingError, match=r"one, seed 1 failed: DataError: .* different images for seed 1"):
        compare(seeds=[0, 1])


def score(variant, seed, **options):
    if variant == "large":
        os.kill(os.getpid(), signal.SIGKILL)
    return {"top-1 %": 50.0 + seed + len(variant), "pid": os.getpid()}


@pytest.mark.parametrize(("gpus", "cores", "jobs"), [(0, 64, 16), (0, 4, 4), (3, 64, 3)])
def test_runs_are_divided_among_gpus_or_at_most_sixteen_cores(tmp_path, monkeypatch, gpus, cores, jobs):
    for name in ("joblib.Parallel", "torch.cuda.set_device", "threading.Thread", "multiprocessing.set_start_method"):
        monkeypatch.setattr(name, mock.Mock(side_effect=KeyboardInterrupt if name == "joblib.Parallel" else None))
    monkeypatch.setattr("joblib.cpu_count", lambda: cores)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(KeyboardInterrupt):
        trials(score, ["small"], seeds=range(20), output=tmp_path / "runs" / "compare")
    assert module.joblib.Parallel.call_args.args == (jobs,)
    assert (tmp_path / "runs" / "compare" / "runs.json").exists()  # marks the folder
    module.make_run(score, "small", 0, {}, tmp_path / "run.json", os.getppid(), 4)
    module.threading.Thread.return_value.start.assert_called_once()
    default = module.multiprocessing.get_all_start_methods()[0]
    assert module.multiprocessing.set_start_method.call_args == mock.call(default, force=True)
    target, daemon = module.threading.Thread.call_args.kwargs.values()
    monkeypatch.setattr(os, "_exit", mock.Mock(side_effect=SystemExit))
    monkeypatch.setattr(os, "getppid", mock.Mock(side_effect=[os.getppid(), 1]))
    with mock.patch("time.sleep") as sleep, pytest.raises(SystemExit):
        target()  # ends the process with its parent
    assert (daemon, sleep.mock_calls, os._exit.mock_calls) == (True, [mock.call(1)], [mock.call(1)])
    assert torch.cuda.set_device.call_args_list == ([mock.call(4 % gpus)] if gpus else [])


@pytest.mark.slow
def test_a_worker_that_is_killed_is_one_error(tmp_path):
    with pytest.raises(va.errors.TrainingError, match=r"ended by the system, usually .* memory .*\. Use fewer --jobs"):
        trials(score, ["small", "large"], seeds=[0, 1], output=tmp_path, jobs=2)


@pytest.mark.slow
def test_processes_end_with_the_main_process_and_the_command_goes_on(image_folder, tmp_path):
    words = f"compare --model resnet20 --names layer3 --batch-size 8 --data {image_folder} --workers 1 --device cpu"
    line = [sys.executable, "-m", "vision_attn", *words.split(), "--seeds", "0", "--jobs", "2", "--variants", "plain"]
    line += ["attention", "--output", str(tmp_path / "c"), "--epochs"]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    main = subprocess.Popen([*line, "400"], start_new_session=True, **silent)
    states = [tmp_path / "c" / f"{name}-0" / "state" for name in ("plain", "attention")]
    while main.poll() is None and not all(list(state.glob("0000[1-9]-*")) for state in states):
        time.sleep(0.1)
    main.send_signal(signal.SIGKILL)
    main.wait()
    for _ in range(30):
        time.sleep(1)
        rows = subprocess.run(["ps", "-eo", "sid=,stat=,args="], capture_output=True, text=True, check=True).stdout
        left = [row for row in rows.splitlines() if row.split()[0] == str(main.pid) and row.split()[1][0] != "Z"]
        if not left:
            break
    assert left == []
    saved = [newest_state(state.parent) for state in states]
    epochs = [json.loads((state / "progress.json").read_text())["epoch"] for state in saved]
    done = subprocess.run([*line, "400", "--resume", "auto"], capture_output=True, text=True, check=False)
    assert (done.returncode, min(epochs) > 0) == (2, True), "resume is automatic"

"""What training does: its settings, each in a step or a network that it makes, and what a run leaves in its folder."""

import copy
import csv
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from accelerate.utils import LoggerType
from PIL import Image
from timm.layers import DropPath, SqueezeExcite

import vision_attn as va
from vision_attn.errors import DataError
from vision_attn.networks.checkpoints import CheckpointError, load_adapter_, read_checkpoint
from vision_attn.networks.models import create_model
from vision_attn.tools.comparison.controls import ConvBlock2d, NormBlock2d, SqueezeExciteBlock2d
from vision_attn.tools.training.data import open_data, open_images
from vision_attn.tools.training.evaluation import Normalize, evaluate
from vision_attn.tools.training.images import ImageSet
from vision_attn.tools.training.loop import Trainer
from vision_attn.tools.training.network import build_network, new_head
from vision_attn.tools.training.run_folder import RunFolder, curves_figure, numbered_folder
from vision_attn.tools.training.settings import Settings
from vision_attn.tools.training.step import TrainingStep, make_schedule
from vision_attn.tools.training.train import make_accelerator, train

pytestmark = pytest.mark.usefixtures("no_pictures")

#: Of a data set: what a network is made for.
SOURCE = SimpleNamespace(classes=("blue", "green", "red"), channels=3, size=(16, 16))


@pytest.fixture
def base(image_folder, tmp_path):
    """A short run of a small network: four steps an epoch."""
    return Settings(
        data=str(image_folder),
        model="tiny",
        img_size=16,
        insert=("layer1",),
        epochs=3,
        batch_size=16,
        lr=0.05,
        crop_padding=2,
        clip_grad=5.0,
        device="cpu",
        output=str(tmp_path / "run"),
    )


def quiet(line):
    pass


def weights_of(folder):
    return read_checkpoint(os.path.join(folder, "last.pth"))["model"]


def equal(one, other):
    return list(one) == list(other) and all(torch.equal(one[key], other[key]) for key in one)


def step_of(settings, epoch=0):
    """The step that a run makes, of four an epoch, ready in an epoch."""
    torch.manual_seed(0)
    step = TrainingStep(settings, make_accelerator(settings), build_network(settings, SOURCE, quiet), steps=4)
    step.enter_epoch(epoch, quiet)
    step.model.train()
    return step


def batch(count=8):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 3, 16, 16, generator=generator), torch.randint(3, (count,), generator=generator)


def zoo_file(base, tmp_path, classes=3):
    torch.manual_seed(5)
    torch.save(create_model(base.model, num_classes=classes).state_dict(), tmp_path / "base.pth")
    return str(tmp_path / "base.pth")


# --- a run and what it leaves -----------------------------------------------------------------------------------------


def test_a_run_learns_and_leaves_what_it_promises(base, tmp_path):
    lines, folder = [], tmp_path / "run"
    result = train(replace(base, report_classes=True, log_with=("tensorboard",)), lines.append)
    assert result.best.top1 > 90
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock", "best.pth", "classes.csv", "confusion.csv", "confusion.png", "curves.png", "inserted.txt", "last.pth",
        "logs", "metrics.csv", "settings.yaml",
    ]  # fmt: skip
    with open(folder / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        "epoch", "lr", "train_loss", "eval_loss", "eval_top1", "eval_top5", "branch_share", "seconds",
        "images_per_second", "raw_loss", "raw_top1",
    ]  # fmt: skip
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    assert float(rows[-1]["eval_top1"]) == pytest.approx(result.final.top1, abs=1e-4)
    assert float(rows[-1]["train_loss"]) < float(rows[0]["train_loss"])
    assert (folder / "inserted.txt").read_text().startswith("1 block inserted")
    assert list((folder / "logs").rglob("events.out.tfevents*"))
    assert sum(line.startswith("epoch ") for line in lines) == 3
    assert not any("optimizer" in line for line in lines), "that word of the report is for loops of one's own"

    # What the block contributes is said as it grows, and what closing it changes in the end.
    assert all(float(row["branch_share"]) > 0 for row in rows)
    assert f"branch/stream {float(rows[-1]['branch_share']):.4f}" in next(
        line for line in lines if line.startswith("epoch 3")
    )
    (worth,) = [line for line in lines if "closed" in line or "closing" in line]
    assert worth == str(result.closed)
    twin = copy.deepcopy(result.model)
    va.set_gates_(twin, 0.0)
    images = open_images(open_data(base, train=False), (16, 16), torch.device("cpu"), workers=0)
    without, _ = evaluate(twin, result.normalize, images)
    assert without.top1 == pytest.approx(result.closed.without.top1)
    assert without.loss == pytest.approx(result.closed.without.loss, rel=1e-4)
    assert without.branch_share == 0

    # The best weights, loaded by what a user has at hand, give the accuracy that was logged.
    evaluated = train(replace(base, weights=str(folder / "best.pth"), test_only=True, output=None), quiet)
    assert evaluated.final == result.best
    assert evaluated.closed.whole == result.best


def test_evaluation_alone_reports_classes_where_it_is_told_to(base, tmp_path):
    settings = replace(base, weights=zoo_file(base, tmp_path), test_only=True, report_classes=True)
    result = train(settings, quiet)
    images = open_images(open_data(base, train=False), (16, 16), torch.device("cpu"), workers=0)
    predicted = result.model.eval()(result.normalize(images.images)).argmax(1)
    with open(tmp_path / "run" / "confusion.csv") as file:
        counted = [list(map(int, row[1:])) for row in list(csv.reader(file))[1:]]
    expected = [[int(((images.labels == i) & (predicted == j)).sum()) for j in range(3)] for i in range(3)]
    assert counted == expected
    assert expected != torch.tensor(expected).T.tolist(), "rows and columns cannot be taken for each other"
    with open(tmp_path / "run" / "classes.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == ["blue", "green", "red"]
    assert [(int(row["images"]), int(row["right"])) for row in rows] == [(8, expected[i][i]) for i in range(3)]
    assert [float(row["accuracy"]) for row in rows] == pytest.approx([12.5 * expected[i][i] for i in range(3)])
    with pytest.raises(ValueError, match="output must name a folder for what report_classes writes"):
        replace(settings, output=None)


def test_the_curves_and_the_confusions_are_drawn(tmp_path, monkeypatch):
    monkeypatch.undo()
    keys = ("lr", "train_loss", "eval_loss", "eval_top1", "branch_share")
    rows = [{"epoch": i, **{key: f"{j + 1 / i:.3f}" for j, key in enumerate(keys)}} for i in (1, 2, 3)]
    loss, top1, rate, share = curves_figure(rows).axes
    lines = zip((rate, loss, loss, top1, share), (0, 1, 0, 0, 0), keys, strict=True)
    for axis, line, key in lines:
        assert list(axis.lines[line].get_xdata()) == [1, 2, 3]
        assert list(axis.lines[line].get_ydata()) == [float(row[key]) for row in rows]
    assert len(curves_figure([{**row, "branch_share": ""} for row in rows]).axes) == 3
    folder = RunFolder(tmp_path)
    folder.write_metrics(rows, at_end=True)
    folder.write_classes(torch.eye(24, dtype=torch.long), [f"class {i}" for i in range(24)])
    for name in ("curves.png", "confusion.png"):
        with Image.open(tmp_path / name) as picture:
            assert picture.width > 500


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "log_with: 'nothing' is not installed, or no tracker .*tensorboard"),
        ("aim", "log_with: 'aim' is not installed"),
    ],
)
def test_a_tracker_that_is_not_there_is_refused_before_anything_is_written(base, name, message, tmp_path, monkeypatch):
    monkeypatch.setattr("vision_attn.tools.training.train.get_available_trackers", lambda: [LoggerType.TENSORBOARD])
    with pytest.raises(ValueError, match=message):
        train(replace(base, log_with=("tensorboard", name)), quiet)
    assert not (tmp_path / "run").exists()


def test_the_seed_decides_and_the_seed_alone(base, tmp_path):
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        train(replace(base, epochs=1, batch_size=36, seed=seed, output=str(tmp_path / name)), quiet)
    assert equal(weights_of(tmp_path / "one"), weights_of(tmp_path / "same"))
    assert not equal(weights_of(tmp_path / "one"), weights_of(tmp_path / "other"))


def test_the_average_is_what_counts_and_is_shown_beside_what_is_not_averaged(base, tmp_path):
    lines = []
    base = replace(base, epochs=1, lr=0.005)
    result = train(replace(base, model_ema=True, model_ema_decay=0.5), lines.append)
    last, best = (read_checkpoint(tmp_path / "run" / f"{name}.pth") for name in ("last", "best"))
    assert equal(best["model"], last["model_ema"])
    assert not equal(best["model"], last["model"])
    (row,) = last["rows"]
    raw = train(replace(base, test_only=True, weights=str(tmp_path / "run" / "last.pth"), output=None), quiet).final
    assert (row["raw_top1"], row["raw_loss"]) == (f"{raw.top1:.4f}", f"{raw.loss:.6f}")
    assert row["eval_loss"] == f"{result.final.loss:.6f}" != row["raw_loss"]
    (said,) = [line for line in lines if line.startswith("epoch 1/1")]
    assert f"{result.final} (not averaged: top-1 {raw.top1:.2f} %, loss {raw.loss:.4f}), " in said


def test_the_average_warms_up_so_that_a_short_run_has_more_than_its_beginning(base):
    step = step_of(replace(base, model_ema=True))
    before = copy.deepcopy(step.model.state_dict())
    for number in range(8):
        step(*batch(4), number // 4, number % 4)
    averaged, now = step.ema.module.state_dict(), step.model.state_dict()
    key = "fc.weight"
    assert (averaged[key] - now[key]).norm() < (averaged[key] - before[key]).norm()
    assert [step.ema.get_decay(number) for number in (1, 9)] == [0.0, pytest.approx(0.7689, abs=1e-4)]
    assert step.ema.get_decay(10**6) == 0.999


def test_runs_without_an_output_are_numbered(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "train-7").mkdir(parents=True)
    (tmp_path / "runs" / "train-old").mkdir()
    lines = []
    with pytest.raises(ValueError, match="cutout must be at most"):
        train(replace(base, output=None, cutout=33), quiet)
    assert not (tmp_path / "runs" / "train-8").exists(), "what is refused takes no number"
    train(replace(base, output=None, epochs=1, batch_size=36), lines.append)
    assert lines[-1].endswith(", in runs/train-8/best.pth")
    assert (tmp_path / "runs" / "train-8" / "last.pth").exists()
    train(replace(base, epochs=1, batch_size=36, resume="runs/train-8/last.pth", output=None), quiet)
    with monkeypatch.context() as patched:  # two that begin at once, and have not seen each other
        patched.setattr(Path, "glob", lambda path, pattern: [])
        assert [numbered_folder(), numbered_folder()] == [Path("runs/train-1"), Path("runs/train-2")]
    assert numbered_folder() == Path("runs/train-9")
    # As it was before there were numbers.
    assert replace(base, output=None, resume="auto").folder == replace(base, output=None).folder == Path("runs/train")


def test_a_run_stops_early_where_it_gets_no_better(base, monkeypatch):
    scores, lines = iter([0.0, 40.0, 50.0, 50.0, 45.0, 60.0]), []
    original = Trainer.evaluate

    def evaluate(trainer):
        found, seen = original(trainer)
        return replace(found, top1=next(scores)), seen

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    base = replace(base, epochs=9, batch_size=36, early_stopping=2)
    assert train(base, lines.append).best.top1 == 50.0
    assert "stopped early: 2 epochs have not surpassed the top-1 of epoch 2" in lines
    assert sum(line.startswith("epoch ") for line in lines) == 4
    # It stays so, but for one who has more patience, or none at all.
    scores = iter([45.0, 45.0, 60.0])
    train(replace(base, resume="auto"), lines.append)
    assert sum(line.startswith("epoch ") for line in lines) == 4
    with pytest.raises(StopIteration):  # of the scores
        train(replace(base, resume="auto", early_stopping=None), lines.append)
    assert lines[-1].startswith("epoch 5/9")


def test_a_run_leaves_other_runs_alone(base, tmp_path):
    base = replace(base, epochs=1)
    train(base, quiet)
    before = (tmp_path / "run" / "last.pth").read_bytes()
    with pytest.raises(ValueError, match=r"holds a run already: choose another --output.*--resume.*--overwrite"):
        train(replace(base, seed=1), quiet)
    assert (tmp_path / "run" / "last.pth").read_bytes() == before
    train(replace(base, seed=1, insert=(), overwrite=True), quiet)
    assert (tmp_path / "run" / "last.pth").read_bytes() != before
    assert not (tmp_path / "run" / "inserted.txt").exists()
    with pytest.raises(ValueError, match="output: a run goes on in its own folder"):
        replace(base, resume=str(tmp_path / "elsewhere" / "last.pth"))
    assert replace(base, output=None, resume="elsewhere/last.pth").folder.name == "elsewhere"


# --- one step ---------------------------------------------------------------------------------------------------------


def test_the_optimiser_is_the_one_that_is_named_with_its_numbers(base):
    step = step_of(replace(base, opt="adamw", lr=0.003, weight_decay=0.02))
    assert isinstance(step.optimizer, torch.optim.AdamW)
    assert {group["weight_decay"] for group in step.optimizer.param_groups} == {0.02, 0.0}
    assert step.rate == 0.003
    step = step_of(replace(base, momentum=0.7))
    assert {(group["momentum"], group["nesterov"]) for group in step.optimizer.param_groups} == {(0.7, True)}
    assert replace(base, lr=None).base_lr == 0.1
    assert replace(base, lr=None, weights="a.pth").base_lr == 0.01
    assert replace(base, lr=None, opt="adamw").base_lr == 0.001


def test_rates_warm_up_follow_the_cosine_and_keep_their_ratio(base):
    settings = replace(
        base, model="test_resnet", epochs=3, warmup_epochs=1, min_lr=0.01, attention_lr=0.2, layer_decay=0.5
    )
    step = step_of(settings)
    for done in range(12):
        step(*batch(2), done // 4, done % 4)
        warming = 0.0005 + done / 4 * (0.05 - 0.0005)  # from a hundredth of the rate
        cosine = 0.01 + 0.04 / 2 * (1 + math.cos(math.pi * (done - 4) / 8))
        assert step.rate == pytest.approx(warming if done < 4 else cosine)
        rates = {group["name"]: group["lr"] for group in step.optimizer.param_groups}
        assert rates["attention, decay"] == rates["attention, no decay"] == pytest.approx(4 * step.rate)
        layers = sorted({rate for name, rate in rates.items() if name.startswith("backbone")}, reverse=True)
        assert layers == pytest.approx([step.rate / 2**depth for depth in range(len(layers))])
        assert len(layers) > 3


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({"sched": "constant"}, [0.05] * 12),
        ({"sched": "step", "decay_epochs": 1.0, "decay_rate": 0.5}, [0.05] * 4 + [0.025] * 4 + [0.0125] * 4),
        ({"sched": "multistep", "decay_milestones": (2, 1)}, [0.05] * 3 + [0.005] * 4 + [0.0005] * 5),
        ({"sched": "poly", "decay_rate": 1.0}, [0.05 * (1 - done / 12) for done in range(12)]),
        (
            {"sched": "wsd", "decay_epochs": 1.0, "min_lr": 0.01},
            [0.05] * 8 + [0.01 + 0.04 * (1 - (done / 4) ** 0.5) for done in range(4)],
        ),
    ],
    ids=lambda value: value.get("sched") if isinstance(value, dict) else "",
)
def test_rates_fall_by_timms_schedules(base, options, rates):
    step = step_of(replace(base, epochs=3, attention_lr=0.2, **options))
    for done, rate in enumerate(rates):
        step(*batch(2), done // 4, done % 4)
        assert step.rate == pytest.approx(rate)
        ratios = {round(group["lr"] / step.rate, 6) for group in step.optimizer.param_groups}
        assert ratios == {1.0, 4.0}, "the block's rate over the others'"


def test_rare_classes_count_more_on_request(base):
    step = step_of(replace(base, model="test_efficientnet_gn", insert=("blocks.1",), weight_decay=0.0))
    images, labels = batch(8)
    weights = torch.tensor([0.5, 1.0, 3.0])
    before = copy.deepcopy(step.model)
    step.class_weights = weights
    loss = step(images, labels, 0, 0)
    each = F.cross_entropy(before(images), labels, reduction="none") * weights[labels]
    assert loss.item() == pytest.approx(each.mean().item(), rel=1e-5)
    # Where images are mixed, each of their classes counts by its share.
    shares, before = F.one_hot(labels, 3) * 0.7 + 0.1, copy.deepcopy(step.model)
    expected = -(before(images).log_softmax(1) * shares * weights).sum(1).mean()
    assert step(images, shares, 0, 1).item() == pytest.approx(expected.item(), rel=1e-4)


def test_a_run_balances_its_classes(base, image_folder, tmp_path, monkeypatch):
    folder, seen = tmp_path / "images", []
    for half in ("train", "val"):
        shutil.copytree(image_folder / half, folder / half)
    for index in range(12):
        (folder / "train" / "red" / f"{index}.png").unlink()
    monkeypatch.setattr(Trainer, "train", lambda trainer, checkpoint: seen.append(trainer.step.class_weights))
    for options in ({}, {"class_weights": "balanced"}):
        train(replace(base, data=str(folder), **options), quiet)
    assert seen[0] is None
    torch.testing.assert_close(seen[1], torch.tensor([60 / 72, 60 / 72, 60 / 36]))


def test_branches_are_dropped_on_request(base, monkeypatch):
    plain = create_model("resnet20", num_classes=3)

    def rates(**options):
        model = build_network(replace(base, **{"model": "test_resnet", "insert": (), **options}), SOURCE, quiet).model
        return [module.drop_prob for module in model.modules() if isinstance(module, DropPath)]

    assert rates() == []
    assert rates(drop_path=0.3) == pytest.approx([0.1, 0.2, 0.3])
    with pytest.raises(ValueError, match="model: 'vgg11' takes no drop_path_rate"):
        rates(model="vgg11", drop_path=0.3)
    monkeypatch.setattr("vision_attn.tools.training.network.create_model", lambda *name, drop_path_rate, **how: plain)
    with pytest.raises(ValueError, match="drop_path: 'resnet20' has no branches that timm can drop"):
        rates(model="resnet20", drop_path=0.3)


def test_a_step_clips_gradients_and_smooths_labels(base):
    settings = replace(base, momentum=0.5, weight_decay=0.0, clip_grad=1e-3, label_smoothing=0.3)
    step = step_of(settings)
    before = copy.deepcopy(step.model)
    images, labels = batch()
    loss = step(images, labels, 0, 0)
    expected = F.cross_entropy(before(images), labels, label_smoothing=0.3)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    changes = [
        (one - other).square().sum() for one, other in zip(step.model.parameters(), before.parameters(), strict=True)
    ]
    # The first step of Nesterov's momentum goes 1.5 times along the gradient, and no gradient is longer than 1e-3.
    assert torch.stack(changes).sum().sqrt().item() == pytest.approx(0.05 * 1.5 * 1e-3, rel=1e-3)


def test_accumulated_gradients_are_those_of_the_whole_batch(base, monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "100")  # the settings say how many
    images, labels = batch(8)
    found = []
    for parts in (1, 4):
        # Without batch norms, which would see parts of the batch.
        step = step_of(replace(base, model="test_efficientnet_gn", insert=("blocks.1",), grad_accum_steps=parts))
        start, seen = copy.deepcopy(step.model.state_dict()), []
        step.model.conv_stem.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(len(args[0])))
        losses = [step(images, labels, 0, number).item() for number in range(2)]
        assert seen == 2 * parts * [8 // parts], "no more than a part of the batch is in the network"
        found.append((losses, step.model.state_dict()))
    (losses, one), (others, four) = found
    assert losses == pytest.approx(others, rel=1e-4)
    for key, value in one.items():
        torch.testing.assert_close(four[key], value, rtol=1e-4, atol=1e-5)
    assert max((one[key] - start[key]).abs().max() for key in one) > 1e-2


def test_dropout_is_drawn_anew_in_each_step_and_in_each_process(base, monkeypatch):
    seeds = []
    for process, settings in ((0, base), (0, replace(base, seed=1)), (1, base)):
        step = step_of(settings)
        monkeypatch.setattr(type(step.accelerator), "process_index", process)
        for epoch, number in ((0, 0), (0, 1), (1, 0)):
            step(*batch(2), epoch, number)
            seeds.append(torch.initial_seed())
    assert len(set(seeds)) == 9
    monkeypatch.undo()
    step_of(base)(*batch(2), 1, 0)
    assert torch.initial_seed() == seeds[2]


def test_half_precision_is_that_of_every_stage_and_leaves_a_plain_network_behind(base, tmp_path):
    settings = replace(base, amp=True, freeze_epochs=1, weights=zoo_file(base, tmp_path))
    step, seen = step_of(settings), []
    hook = step.model.layer1.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    step(*batch(2), 0, 0)
    assert not step.model.layer1[0].weight.requires_grad
    step.enter_epoch(1, quiet)
    step.model.train()
    step(*batch(2), 1, 0)
    assert step.model.layer1[0].weight.requires_grad
    step.unwrap()
    step.model(batch(2)[0])
    assert seen == [torch.bfloat16, torch.bfloat16, torch.float32]
    hook.remove()


def test_inputs_are_channels_last_on_request(base):
    for wanted in (True, False):
        step, seen = step_of(replace(base, channels_last=wanted)), []
        step.model.layer1.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0]))
        step(*batch(2), 0, 0)
        assert seen[0].is_contiguous(memory_format=torch.channels_last) == wanted


def test_a_run_augments_as_its_settings_say(base, monkeypatch):
    seen = []
    monkeypatch.setattr(Trainer, "train", lambda trainer, checkpoint: seen.append(trainer.augmentation))
    options = {"hflip": 0.2, "cutout": 5, "mixup": 0.3, "cutmix": 0.7, "mixup_switch_prob": 0.1}
    train(replace(base, **options), quiet)
    assert [(one.size, one.padding) for one in seen] == [((16, 16), 2)]
    assert {name: getattr(seen[0].settings, name) for name in options} == options


@pytest.mark.slow
def test_a_compiled_run_learns_the_same(base, tmp_path):
    plain = train(replace(base, output=str(tmp_path / "plain")), quiet)
    compiled = train(replace(base, compile=True), quiet)
    # Fused arithmetic rounds otherwise, and training carries that on.
    assert compiled.final.loss == pytest.approx(plain.final.loss, abs=0.05)
    assert compiled.final.top1 > 90
    assert list(weights_of(tmp_path / "run")) == list(weights_of(tmp_path / "plain"))


# --- the network ------------------------------------------------------------------------------------------------------


def test_what_is_inserted_is_what_the_settings_say(base):
    def block(**options):
        (found,) = va.inserted(build_network(replace(base, **options), SOURCE, quiet).model).values()
        return found

    assert isinstance(block(block="conv"), ConvBlock2d)
    assert isinstance(block(block="se"), SqueezeExciteBlock2d)
    assert isinstance(block(block="norm"), NormBlock2d)
    assert isinstance(block(block="excite"), SqueezeExcite)
    assert block(num_heads=4, impl="bmm").attn.num_heads == 4
    assert block(num_heads=4, impl="bmm").attn.impl == "bmm"
    assert block(model="rexnet_100", insert=("features.3",), img_size=32).attn.num_heads == 5  # of 50 channels
    assert "Rope2d" in repr(block(num_heads=2, block_options=("position=Rope2d()",)).attn.position)
    sites = {at: build_network(replace(base, at=at), SOURCE, quiet).inserted.blocks[0].at for at in ("before", "after")}
    assert sites == {"before": "before", "after": "after"}
    by_index = build_network(replace(base, insert=("1",)), SOURCE, quiet).model
    assert [site.partition(".")[0] for site in va.inserted(by_index)] == ["layer2"]
    assert build_network(replace(base, insert=()), SOURCE, quiet).inserted is None


def test_a_network_has_the_size_and_the_statistics_that_are_given(base):
    network = build_network(replace(base, img_size=24, mean=(0.5,) * 3, std=(0.2,) * 3), SOURCE, quiet)
    assert (network.size, network.mean, network.std) == ((24, 24), (0.5,) * 3, (0.2,) * 3)
    assert build_network(replace(base, img_size=None), SOURCE, quiet).size == (16, 16)


def test_a_frozen_backbone_is_the_one_that_came_and_its_adapter_makes_the_run_again(base, tmp_path):
    base = replace(base, epochs=2)
    file, lines = zoo_file(base, tmp_path), []
    train(
        replace(base, weights=file, freeze_backbone=True, model_ema=True, model_ema_decay=0.5, amp=True), lines.append
    )
    assert any(line.startswith("the backbone is frozen: ") for line in lines)
    given, last = read_checkpoint(file), weights_of(tmp_path / "run")
    assert equal({key: last[key] for key in given}, given)
    changed = {key for key in last if key not in given and not torch.equal(last[key], torch.zeros_like(last[key]))}
    assert any(key.endswith("attn.proj.weight") for key in changed)

    # The adapter is the best epoch, and needs no more than the network that the run began with.
    model = create_model(base.model, num_classes=3)
    va.load_checkpoint(model, file)
    load_adapter_(model, tmp_path / "run" / "adapter.safetensors")
    assert equal(model.state_dict(), read_checkpoint(tmp_path / "run" / "best.pth")["model"])


def test_a_new_head_is_trained_and_saved_with_the_adapter(base, tmp_path):
    file = zoo_file(base, tmp_path, classes=7)
    settings = replace(base, weights=file, freeze_backbone=True, reset_head=True, epochs=1)
    train(settings, quiet)
    given, last = read_checkpoint(file), weights_of(tmp_path / "run")
    assert {key for key in given if not torch.equal(given[key], last[key])} == {"fc.weight", "fc.bias"}
    model = create_model(base.model, num_classes=3)
    va.load_checkpoint(model, file, fresh=["fc.*"])
    load_adapter_(model, tmp_path / "run" / "adapter.safetensors")
    assert equal(model.state_dict(), read_checkpoint(tmp_path / "run" / "best.pth")["model"])
    # Without blocks the head alone learns, and there is nothing to adapt with.
    train(replace(settings, insert=(), overwrite=True), quiet)
    last = weights_of(tmp_path / "run")
    assert {key for key in given if not torch.equal(given[key], last[key])} == {"fc.weight", "fc.bias"}
    assert not (tmp_path / "run" / "adapter.safetensors").exists()


def test_pretrained_weights_for_other_classes_have_a_new_head_too():
    settings = Settings(data="images", pretrained=True, insert=("layer3",))
    assert new_head(create_model("resnet20", num_classes=3), settings, 3) == ("fc.*",)
    assert new_head(create_model("resnet20.cifar10", num_classes=10), settings, 10) == ()
    assert new_head(create_model("resnet20", num_classes=3), replace(settings, pretrained=False), 3) == ()


def test_a_checkpoint_of_the_plain_network_is_a_beginning(base, tmp_path):
    lines = []
    settings = replace(base, weights=zoo_file(base, tmp_path), test_only=True)
    inserted = train(settings, lines.append)
    plain = train(replace(settings, insert=()), quiet)
    assert inserted.final == replace(plain.final, branch_share=0.0)
    assert any("7 new by design" in line for line in lines)


def test_a_new_head_takes_other_classes(base, tmp_path):
    settings = replace(base, weights=zoo_file(base, tmp_path, classes=7), test_only=True)
    with pytest.raises(CheckpointError, match=r"trained for 7 classes and the model has 3.*--reset-head"):
        train(settings, quiet)
    train(replace(settings, reset_head=True, insert=()), quiet)


def test_a_network_that_does_not_name_its_classifier_has_no_new_head(base):
    model = create_model(base.model, num_classes=3)
    model.pretrained_cfg = {**model.pretrained_cfg, "classifier": None}
    with pytest.raises(ValueError, match=r"^model: .*classifier='…' in its default_cfgs"):
        new_head(model, replace(base, weights="a.pth", reset_head=True), 3)


def test_a_checkpoint_brings_its_statistics_and_size_and_is_held_to_its_classes_and_blocks(
    base, image_folder, tmp_path
):
    statistics = {"mean": (0.2, 0.3, 0.4), "std": (0.5, 0.6, 0.7)}
    first = train(replace(base, epochs=1, num_heads=2, **statistics), quiet)
    again = replace(base, num_heads=2, weights=str(tmp_path / "run" / "best.pth"), test_only=True, img_size=None)
    assert train(again, quiet).final == first.best
    assert train(replace(again, mean=(0.9,) * 3, std=(0.1,) * 3), quiet).final != first.best
    assert train(replace(again, img_size=32), quiet).final != first.best
    renamed = tmp_path / "renamed" / "val"
    renamed.mkdir(parents=True)
    for old, new in (("blue", "zebra"), ("green", "green"), ("red", "red")):
        os.symlink(image_folder / "val" / old, renamed / new)
    with pytest.raises(CheckpointError, match="for the classes blue, green, red; the data has green, red, zebra"):
        train(replace(again, data=str(renamed.parent)), quiet)
    train(replace(again, data=str(renamed.parent), reset_head=True), quiet)
    for change, message in (
        ({"num_heads": 8}, "other blocks than are to be inserted: they were made with --num-heads 2"),
        ({"at": "branch"}, "they were made with --at after"),
        ({"block_options": ("position=Rope2d()",)}, "they were made with no --block-options"),
    ):
        with pytest.raises(CheckpointError, match=message):
            train(replace(again, **change), quiet)


# --- evaluation -------------------------------------------------------------------------------------------------------


def test_evaluation_counts_every_image_once():
    torch.manual_seed(0)
    data = ImageSet(torch.randint(0, 256, (37, 3, 4, 4), dtype=torch.uint8), torch.randint(0, 8, (37,)))
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 8)).train()
    normalize = Normalize((0.5,) * 3, (0.2,) * 3, channels=3)
    score, seen = evaluate(model, normalize, data, batch_size=10)
    logits = model((data.images / 255 - 0.5) / 0.2).detach()
    assert torch.equal(seen, torch.stack([data.labels, logits.argmax(1)]))
    assert score.branch_share is None
    assert score.top1 == pytest.approx(100 * float((logits.argmax(1) == data.labels).float().mean()))
    top5 = (logits.argsort(1, descending=True)[:, :5] == data.labels[:, None]).any(1)
    assert score.top5 == pytest.approx(100 * float(top5.float().mean()))
    assert score.loss == pytest.approx(float(F.cross_entropy(logits, data.labels)), rel=1e-5)
    assert model.training


def test_a_schedule_that_an_older_timm_lacks_is_refused(base, monkeypatch):
    monkeypatch.setattr("vision_attn.tools.training.step.create_scheduler_v2", lambda *args, **how: (None, 1))
    with pytest.raises(ValueError, match=r"^sched: timm .* knows no 'cosine': upgrade timm"):
        make_schedule(None, base, 10)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixup": 1.0, "mixup_switch_prob": 0.1}, "mixup_switch_prob applies to cutmix"),
        ({"dataset": "digit-pairs", "img_size": None, "workers": 2}, "workers applies to dataset folder"),
        ({"warmup_epochs": 3}, "warmup_epochs must be fewer than epochs=3"),
        ({"freeze_epochs": 3, "weights": "a.pth"}, "freeze_epochs must be fewer than epochs=3"),
        ({"weights": "a.pth", "pretrained": True}, "weights and pretrained exclude each other"),
        ({"resume": "auto", "test_only": True}, "resume and test_only exclude each other"),
        ({"resume": "auto", "overwrite": True}, "resume and overwrite exclude each other"),
        ({"mean": (0.5,)}, "mean and std go together"),
        ({"data": None}, "data must name the folder"),
        ({"dataset": "digit-pairs"}, "img_size applies to dataset folder"),
        ({"amp_dtype": "float16"}, "amp_dtype applies to amp"),
        ({"model_ema_decay": 0.5}, "model_ema_decay applies to model_ema"),
        ({"dataset_download": True}, "dataset_download applies to dataset cifar10"),
        ({"block": "conv", "num_heads": 4}, "num_heads applies to block attention"),
        ({"insert": (), "at": "branch"}, "at applies to insert"),
        ({"insert": (), "attention_lr": 0.1}, "attention_lr applies to insert"),
        ({"reset_head": True}, "reset_head applies to weights"),
        ({"sched": "plateau"}, "sched must be one of cosine, tanh, poly, wsd, rsqrt, step, multistep, constant; got"),
        ({"sched": "step"}, "decay_epochs must be given for sched step"),
        ({"sched": "multistep"}, "decay_milestones must be given for sched multistep"),
        ({"sched": "constant", "min_lr": 0.01}, "min_lr applies to sched cosine or tanh or poly or wsd or rsqrt"),
        ({"decay_rate": 0.5}, "decay_rate applies to sched step or multistep or poly, and sched is 'cosine'"),
        ({"remode": "const"}, "remode applies to reprob: give reprob too"),
        (
            {"dataset": "wds/a", "img_size": None, "class_weights": "balanced"},
            "class_weights applies to dataset folder",
        ),
        ({"dataset": "digit-pairs", "img_size": None, "aa": "rand-m9"}, "aa applies to dataset folder"),
        ({"freeze_backbone": True}, "freeze_backbone keeps weights as they are, and none are given"),
        ({"freeze_backbone": True, "weights": "a.pth", "insert": ()}, "freeze_backbone leaves nothing to train"),
        ({"freeze_backbone": True, "weights": "a.pth", "layer_decay": 0.5}, "freeze_backbone and layer_decay exclude"),
        (
            {"freeze_epochs": 1, "freeze_backbone": True, "weights": "a.pth"},
            "freeze_backbone and freeze_epochs exclude",
        ),
    ],
    ids=str,
)
def test_settings_without_effect_or_sense_are_refused(base, options, message):
    with pytest.raises(ValueError, match=message):
        replace(base, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "resnet21"}, "model: there is no 'resnet21'; close to it: .*resnet2"),
        (
            {"model": "vit_tiny_patch16_224", "insert": (), "img_size": 64},
            r"model: .* does not run on images of 64×64.*--img-size",
        ),
        ({"insert": ("layer9",)}, "'layer9' matches no module"),
        ({"insert": ("layer3", "-1")}, "insert takes stages by index or modules by name, not both"),
        ({"num_heads": 5}, "num_heads must divide channels"),
        ({"block_options": ("pos=Rope2d()",)}, "block_options do not suit AttentionBlock2d: .*'pos'"),
        ({"block_options": ("num_heads=4",)}, "block_options: num_heads is given twice"),
        ({"block_options": ("Rope2d()",)}, "block_options must be NAME=VALUE"),
        ({"block_options": ("position=Rope3d()",)}, "block_options: position: .* is not the code of a value"),
        ({"block": "se", "block_options": ("position=Rope2d()",)}, "block_options do not suit SqueezeExciteBlock2d"),
        ({"impl": "flash"}, "impl must be one of"),
        ({"batch_size": 100}, "batch_size must be at most the 72 training images"),
        ({"batch_size": 15, "mixup": 1.0}, "batch_size must be a multiple of 2"),
        ({"grad_accum_steps": 3}, "batch_size must be a multiple of 3"),
        ({"momentum": 0.0}, "Nesterov momentum requires a momentum"),
        ({"cutout": 33}, "cutout must be at most the shorter side of the images"),
        ({"mean": (0.5, 0.5), "std": (0.5, 0.5)}, "mean must have a value for each of the 3 channels"),
        ({"device": "tpu"}, "device must be one of cpu, cuda"),
        ({"min_lr": 0.5}, "min_lr must be at most lr="),
        ({"opt": "adamww"}, "Optimizer adamww not found"),
        ({"opt": "lion", "lr": None}, "lr must be given for lion"),
        ({"opt": "adamw", "momentum": 0.5}, "momentum applies to optimisers such as sgd"),
        ({"opt": "adahessian"}, "opt: 'adahessian' needs second derivatives"),
        ({"amp": True, "amp_dtype": "float16"}, "amp_dtype: float16 needs CUDA"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_anything_is_written(base, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(replace(base, **options), quiet)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_refused(base):
    with pytest.raises(ValueError, match="device: cuda was asked for and there is no CUDA device"):
        train(replace(base, device="cuda"), quiet)


def test_halves_of_other_classes_are_refused(base, image_folder, tmp_path):
    (tmp_path / "val").mkdir()
    for name in ("red", "blue"):
        os.symlink(image_folder / "val" / name, tmp_path / "val" / name)
    os.symlink(image_folder / "train", tmp_path / "train")
    with pytest.raises(DataError, match=r"^green: classes of .*train or of .*val, and not of both"):
        train(replace(base, data=str(tmp_path)), quiet)
    assert not (tmp_path / "run").exists()

"""The trainer on small data: what it learns, what it leaves behind, and that a resumed run is the run."""

import copy
import csv
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import yaml

import vision_attn as va
from vision_attn.checkpoints import CheckpointError, load_adapter, read_checkpoint
from vision_attn.errors import DataError, TrainingError
from vision_attn.models import create_model
from vision_attn.training import train as train_room
from vision_attn.training.data import open_data, open_images
from vision_attn.training.evaluation import Normalize, evaluate
from vision_attn.training.images import ImageSet
from vision_attn.training.loop import Run
from vision_attn.training.network import build_network, new_head
from vision_attn.training.settings import Settings
from vision_attn.training.step import TrainingStep
from vision_attn.training.train import train


def short_run(data, output):
    """Settings of a short run in which everything random and everything with a state takes part."""
    return Settings(
        data=str(data),
        model="resnet20",
        insert=("layer3",),
        epochs=3,
        batch_size=16,
        lr=0.05,
        crop_padding=2,
        warmup_epochs=0.5,
        label_smoothing=0.1,
        clip_grad=5.0,
        device="cpu",
        output=str(output),
    )


@pytest.fixture
def base(image_folder, tmp_path):
    return short_run(image_folder, tmp_path / "run")


def quiet(line):
    pass


def weights_of(folder):
    return read_checkpoint(os.path.join(folder, "last.pth"))["model"]


def equal(one, other):
    return list(one) == list(other) and all(torch.equal(one[key], other[key]) for key in one)


def test_a_run_learns_and_leaves_what_it_promises(base, tmp_path):
    lines = []
    base = replace(base, epochs=6)
    result = train(base, lines.append)
    assert result.best.top1 > 90
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "best.pth",
        "curves.png",
        "inserted.txt",
        "last.pth",
        "metrics.csv",
        "settings.yaml",
    ]
    with open(tmp_path / "run" / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    assert float(rows[-1]["eval_top1"]) == pytest.approx(result.final.top1, abs=1e-4)
    assert float(rows[-1]["train_loss"]) < float(rows[0]["train_loss"])
    assert yaml.safe_load((tmp_path / "run" / "settings.yaml").read_text())["insert"] == ["layer3"]
    assert (tmp_path / "run" / "inserted.txt").read_text().startswith("1 block inserted")
    assert sum(line.startswith("epoch ") for line in lines) == 6

    # What the block contributes is said as it grows, and what closing it changes in the end.
    shares = [float(row["branch_share"]) for row in rows]
    assert 0 < shares[0] < shares[-1]
    assert f"branch/stream {shares[-1]:.4f}" in next(line for line in lines if line.startswith("epoch 6"))
    (worth,) = [line for line in lines if "closed" in line or "closing" in line]
    assert worth == str(result.closed)
    twin = copy.deepcopy(result.model)
    va.set_gates_(twin, 0.0)
    source = open_data(base, train=False)
    images = open_images(source, (32, 32), torch.device("cpu"), workers=0)
    without, _ = evaluate(twin, result.normalize, images)
    assert without.top1 == pytest.approx(result.closed.without.top1)
    assert without.loss == pytest.approx(result.closed.without.loss, rel=1e-4)
    assert without.branch_share == 0

    # The best weights, loaded by what a user has at hand, give the accuracy that was logged.
    evaluated = train(
        replace(base, weights=str(tmp_path / "run" / "best.pth"), test_only=True, output=str(tmp_path / "none")), quiet
    )
    assert evaluated.final == result.best
    assert evaluated.closed.whole == result.best
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model_ema": True, "model_ema_decay": 0.9},
        {"opt": "adamw", "lr": 1e-3},
        {"amp": True, "channels_last": True},
        {"dropout": 0.5},
        {"attention_lr": 0.2, "layer_decay": 0.7},
        {"cutout": 8, "mixup": 0.2, "cutmix": 1.0},
    ],
    ids=["sgd", "ema", "adamw", "amp", "dropout", "rates", "mixed"],
)
def test_a_resumed_run_ends_with_the_same_bits(base, options, tmp_path, monkeypatch):
    def with_dropout(*arguments):
        network = build_network(*arguments)
        network.model.head_drop.p = options.get("dropout", 0.0)
        return network

    monkeypatch.setattr(train_room, "build_network", with_dropout)
    base = replace(base, **{key: value for key, value in options.items() if key != "dropout"})
    train(base, quiet)
    whole = read_checkpoint(tmp_path / "run" / "last.pth")

    class KilledError(Exception):
        pass

    def kill_in_the_third_epoch(line):
        if line.startswith("epoch 2/"):
            raise KilledError

    interrupted = replace(base, output=str(tmp_path / "interrupted"))
    with pytest.raises(KilledError):
        train(interrupted, kill_in_the_third_epoch)
    # The second epoch was cut off before it was saved: only the first is behind the resumed run.
    assert read_checkpoint(tmp_path / "interrupted" / "last.pth")["epoch"] == 1
    train(replace(interrupted, resume=str(tmp_path / "interrupted" / "last.pth")), quiet)
    resumed = read_checkpoint(tmp_path / "interrupted" / "last.pth")
    assert equal(resumed["model"], whole["model"])
    if base.model_ema:
        assert equal(resumed["model_ema"], whole["model_ema"])
        assert not equal(resumed["model_ema"], resumed["model"])
    keys = ("epoch", "lr", "train_loss", "eval_loss", "eval_top1")
    assert [[row[key] for key in keys] for row in resumed["rows"]] == [
        [row[key] for key in keys] for row in whole["rows"]
    ]


def test_the_seed_decides_and_the_seed_alone(base, tmp_path):
    base = replace(base, epochs=1, warmup_epochs=0)
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        train(replace(base, seed=seed, output=str(tmp_path / name)), quiet)
    assert equal(weights_of(tmp_path / "one"), weights_of(tmp_path / "same"))
    assert not equal(weights_of(tmp_path / "one"), weights_of(tmp_path / "other"))


def test_the_rate_warms_up_and_follows_the_cosine_over_the_whole_run(base, tmp_path):
    def rates(name, **options):
        train(replace(base, output=str(tmp_path / name), **options), quiet)
        return [float(row["lr"]) for row in read_checkpoint(tmp_path / name / "last.pth")["rows"]]

    # 72 images in batches of 16 are 4 steps an epoch; a row has the rate of the last of them.
    cosine = [0.05 / 2 * (1 + math.cos(math.pi * step / 12)) for step in (3, 7, 11)]
    assert rates("cosine", warmup_epochs=0) == pytest.approx(cosine, rel=1e-4)
    # An epoch of warm-up from a hundredth of the rate, three quarters of it done; then the cosine over two epochs.
    warm = 0.0005 + 0.75 * (0.05 - 0.0005)
    cosine = [0.01 + 0.04 / 2 * (1 + math.cos(math.pi * step / 8)) for step in (3, 7)]
    assert rates("warm", warmup_epochs=1, min_lr=0.01) == pytest.approx([warm, *cosine], rel=1e-4)


def test_rates_of_blocks_and_layers_keep_their_ratio_through_warm_up_and_cosine(base, monkeypatch):
    seen = []
    original = Run.record

    def watching(run, *arguments):
        seen.append({group["name"]: group["lr"] for group in run.step.optimizer.param_groups})
        original(run, *arguments)

    monkeypatch.setattr(Run, "record", watching)
    options = {"attention_lr": 0.2, "layer_decay": 0.5, "min_lr": 0.01, "warmup_epochs": 1.5}
    rows = []
    train(replace(base, **options), rows.append)
    assert len(seen) == 3
    # The stem, nine blocks of layers and the classifier; the blocks of attention at four times the rate.
    for rates, row in zip(seen, read_checkpoint(base.folder / "last.pth")["rows"], strict=True):
        rate = float(row["lr"])
        assert rates["attention, decay"] == rates["attention, no decay"] == pytest.approx(4 * rate, rel=1e-5)
        assert rates["backbone, layer 10, decay"] == pytest.approx(rate, rel=1e-5)
        assert rates["backbone, layer 0, no decay"] == pytest.approx(rate / 2**10, rel=1e-5)


def frozen_run(base, tmp_path, classes=3, **options):
    """A run that trains blocks alone, from weights of a network for some number of classes."""
    torch.manual_seed(5)
    torch.save(create_model("resnet20", num_classes=classes).state_dict(), tmp_path / "base.pth")
    return replace(base, weights=str(tmp_path / "base.pth"), freeze_backbone=True, **options)


@pytest.mark.parametrize("options", [{}, {"model_ema": True, "model_ema_decay": 0.5}, {"amp": True}], ids=str)
def test_a_frozen_backbone_is_the_one_that_came_and_its_adapter_makes_the_run_again(base, tmp_path, options):
    lines = []
    train(frozen_run(base, tmp_path, **options), lines.append)
    assert "the backbone is frozen: 16,832 parameters are trained" in lines
    given, last = read_checkpoint(tmp_path / "base.pth"), weights_of(tmp_path / "run")
    assert equal({key: last[key] for key in given}, given)
    assert last["layer3.2.inserted.attn.proj.weight"].abs().max() > 0

    # The adapter is the best epoch, and needs no more than the network that the run began with.
    model = create_model("resnet20", num_classes=3)
    va.load_checkpoint(model, tmp_path / "base.pth")
    load_adapter(model, tmp_path / "run" / "adapter.safetensors")
    assert equal(model.state_dict(), read_checkpoint(tmp_path / "run" / "best.pth")["model"])
    assert (tmp_path / "run" / "adapter.safetensors").stat().st_size < 100_000


def test_a_new_head_is_trained_and_saved_with_the_adapter(base, tmp_path):
    settings = frozen_run(base, tmp_path, classes=7, reset_head=True)
    train(settings, quiet)
    given, last = read_checkpoint(tmp_path / "base.pth"), weights_of(tmp_path / "run")
    assert {key for key in given if not torch.equal(given[key], last[key])} == {"fc.weight", "fc.bias"}
    model = create_model("resnet20", num_classes=3)
    va.load_checkpoint(model, tmp_path / "base.pth", fresh=["fc.*"])
    load_adapter(model, tmp_path / "run" / "adapter.safetensors")
    assert equal(model.state_dict(), read_checkpoint(tmp_path / "run" / "best.pth")["model"])
    # Without blocks the head alone learns, and there is nothing to adapt with.
    probe = replace(settings, insert=(), overwrite=True)
    train(probe, quiet)
    last = weights_of(tmp_path / "run")
    assert {key for key in given if not torch.equal(given[key], last[key])} == {"fc.weight", "fc.bias"}
    assert not (tmp_path / "run" / "adapter.safetensors").exists()


def test_pretrained_weights_for_other_classes_have_a_new_head_too():
    settings = Settings(data="images", pretrained=True, insert=("layer3",))
    assert new_head(create_model("resnet20", num_classes=3), settings, 3) == ("fc.*",)
    assert new_head(create_model("resnet20.cifar10", num_classes=10), settings, 10) == ()
    assert new_head(create_model("resnet20", num_classes=3), replace(settings, pretrained=False), 3) == ()


def test_a_frozen_run_is_resumed_with_the_same_bits(base, tmp_path, monkeypatch):
    settings = frozen_run(base, tmp_path, epochs=2, attention_lr=0.1)
    train(settings, quiet)
    whole = weights_of(tmp_path / "run")

    class KilledError(Exception):
        pass

    def kill(line):
        if line.startswith("epoch 2/"):
            raise KilledError

    interrupted = replace(settings, output=str(tmp_path / "interrupted"))
    with pytest.raises(KilledError):
        train(interrupted, kill)
    train(replace(interrupted, resume=str(tmp_path / "interrupted" / "last.pth")), quiet)
    assert equal(weights_of(tmp_path / "interrupted"), whole)


def test_a_frozen_run_on_two_processes_gives_what_one_gives(base, image_folder, tmp_path):
    # With batch norms, too: they are frozen, and do not know how the batch is shared.
    settings = frozen_run(base, tmp_path, epochs=1, warmup_epochs=0)
    train(settings, quiet)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    flags = [
        "--data", image_folder, "--model", "resnet20", "--insert", "layer3", "--weights", settings.weights,
        "--freeze-backbone", "--epochs", "1", "--batch-size", "16", "--lr", "0.05", "--crop-padding", "2",
        "--label-smoothing", "0.1", "--clip-grad", "5", "--device", "cpu", "--output", tmp_path / "two",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ""}
    command = [*launch, "vision_attn", "train", *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    one, two = weights_of(tmp_path / "run"), weights_of(tmp_path / "two")
    given = read_checkpoint(tmp_path / "base.pth")
    assert equal({key: two[key] for key in given}, given)
    for key in one:
        torch.testing.assert_close(two[key], one[key], rtol=1e-4, atol=1e-6)
    assert (tmp_path / "two" / "adapter.safetensors").exists()


def test_resuming_refuses_another_run(base, tmp_path):
    base = replace(base, epochs=1, warmup_epochs=0)
    train(base, quiet)
    last = str(tmp_path / "run" / "last.pth")
    with pytest.raises(ValueError, match=r"but epochs, lr differ from .*--weights"):
        train(replace(base, epochs=2, lr=0.1, resume=last), quiet)
    with pytest.raises(CheckpointError, match=r"is not the last.pth of such a run \(it lacks best, .*optimizer, rows"):
        train(replace(base, resume=str(tmp_path / "run" / "best.pth")), quiet)
    # A run that is over stays as it is.
    before = read_checkpoint(last)
    train(replace(base, resume=last), quiet)
    assert equal(weights_of(tmp_path / "run"), before["model"])


def test_a_checkpoint_of_the_plain_network_is_a_beginning(base, tmp_path):
    torch.manual_seed(5)
    model = create_model("resnet20", num_classes=3)
    torch.save(model.state_dict(), tmp_path / "base.pth")
    lines = []
    settings = replace(base, weights=str(tmp_path / "base.pth"), test_only=True)
    inserted = train(settings, lines.append)
    plain = train(replace(settings, insert=()), quiet)
    assert inserted.final == replace(plain.final, branch_share=0.0)
    assert any("7 new by design" in line for line in lines)
    assert settings.base_lr == 0.05
    assert replace(settings, lr=None).base_lr == 0.01
    assert replace(settings, lr=None, weights=None, opt="adamw").base_lr == 0.001


def test_a_new_head_takes_other_classes(base, tmp_path):
    torch.save(create_model("resnet20", num_classes=7).state_dict(), tmp_path / "base.pth")
    settings = replace(base, weights=str(tmp_path / "base.pth"), test_only=True)
    with pytest.raises(CheckpointError, match=r"trained for 7 classes and the model has 3.*--reset-head"):
        train(settings, quiet)
    lines = []
    train(replace(settings, reset_head=True, insert=()), lines.append)
    assert any("2 new by design: fc.weight, fc.bias" in line for line in lines)


def test_the_average_is_what_is_evaluated_and_saved_as_best(base, tmp_path):
    train(replace(base, epochs=1, warmup_epochs=0, model_ema=True, model_ema_decay=0.5), quiet)
    last, best = (read_checkpoint(tmp_path / "run" / f"{name}.pth") for name in ("last", "best"))
    assert equal(best["model"], last["model_ema"])
    assert not equal(best["model"], last["model"])


def test_every_way_to_run_the_machine_learns_too(base, tmp_path):
    for options in ({"amp": True}, {"channels_last": True}, {"impl": "bmm"}, {"block": "conv"}, {"insert": ("-1",)}):
        result = train(replace(base, epochs=6, overwrite=True, **options), quiet)
        assert result.best.top1 > 90, options
    assert isinstance(va.inserted(result.model)["layer3.2"], va.AttentionBlock2d)


def test_tensorboard_events_are_written_on_request(base, tmp_path):
    train(replace(base, epochs=1, warmup_epochs=0, tensorboard=True), quiet)
    assert list((tmp_path / "run").rglob("events.out.tfevents*"))


@pytest.mark.slow
def test_a_compiled_run_learns_the_same(base, tmp_path):
    base = replace(base, epochs=6)
    plain = train(replace(base, output=str(tmp_path / "plain")), quiet)
    compiled = train(replace(base, compile=True), quiet)
    # Fused arithmetic rounds otherwise, and training carries that on.
    assert compiled.final.loss == pytest.approx(plain.final.loss, abs=0.05)
    assert compiled.final.top1 > 90
    assert list(weights_of(tmp_path / "run")) == list(weights_of(tmp_path / "plain"))


def test_a_loss_that_is_no_number_stops_the_run_and_saves_nothing_of_it(base, tmp_path, monkeypatch):
    settings = replace(base, warmup_epochs=0, clip_grad=None)
    original = Run.train_epoch

    def poisoned(run):
        if run.state.progress.epoch == 1:
            with torch.no_grad():
                run.model.fc.weight.fill_(torch.nan)
        return original(run)

    monkeypatch.setattr(Run, "train_epoch", poisoned)
    with pytest.raises(TrainingError, match=r"the loss of epoch 2 is nan, at .* last good checkpoint is"):
        train(settings, quiet)
    last = read_checkpoint(tmp_path / "run" / "last.pth")
    assert last["epoch"] == 1
    assert all(torch.isfinite(value).all() for value in last["model"].values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixup": 1.0, "mixup_switch_prob": 0.1}, "mixup_switch_prob applies to cutmix: give cutmix too"),
        ({"dataset": "digit-pairs", "workers": 2}, "workers applies to dataset folder or .*, and dataset is 'digit"),
        ({"warmup_epochs": 3}, "warmup_epochs must be fewer than epochs=3; got 3"),
        ({"weights": "a.pth", "pretrained": True}, "weights and pretrained exclude each other"),
        ({"mean": (0.5,)}, "mean and std go together"),
        ({"data": None}, "data must name the folder of the data set 'folder'"),
        ({"dataset": "digit-pairs", "img_size": 32}, "img_size applies to dataset folder or cifar10 or"),
    ],
)
def test_settings_that_make_no_sense_are_refused(base, options, message):
    with pytest.raises(ValueError, match=message):
        replace(base, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "resnet21"}, "model: there is no 'resnet21'; close to it: .*resnet2"),
        ({"model": "resnet20.imagenet"}, "model: 'resnet20' has no tag 'imagenet'; it has resnet20.cifar10"),
        ({"model": "resnet20", "pretrained": True}, "model: 'resnet20' cannot be made .*No pretrained weights"),
        ({"insert": ("layer9",)}, "'layer9' matches no module"),
        ({"insert": ("layer3", "-1")}, "insert takes stages by index or modules by name, not both; got layer3 -1"),
        ({"num_heads": 5}, "num_heads must divide channels; got channels=64 and num_heads=5"),
        ({"block_options": ("pos=Rope2d()",)}, "block_options do not suit AttentionBlock2d: .*'pos'"),
        ({"block_options": ("num_heads=4",)}, "block_options: num_heads is given twice, or by a setting of its own"),
        ({"block_options": ("Rope2d()",)}, r"block_options must be NAME=VALUE.*got 'Rope2d\(\)'"),
        (
            {"block_options": ("position=Rope3d()",)},
            r"block_options: position: 'Rope3d\(\)' is not the code of a value",
        ),
        ({"block": "se", "block_options": ("position=Rope2d()",)}, "block_options do not suit SqueezeExciteBlock2d"),
        ({"impl": "flash"}, "impl must be one of"),
        (
            {"batch_size": 100},
            "batch_size must be at most the 72 training images; got 100: give a smaller --batch-size",
        ),
        ({"min_lr": 0.5}, "min_lr must be at most lr=.*, which falls to it; got 0.5"),
        (
            {"batch_size": 15, "mixup": 1.0},
            "batch_size must be a multiple of 2, as mixup and cutmix make pairs in each",
        ),
        ({"cutout": 33}, "cutout must be at most the shorter side of the images, 32 pixels; got 33"),
        ({"mean": (0.5, 0.5), "std": (0.5, 0.5)}, "mean must have a value for each of the 3 channels; got"),
        ({"device": "tpu"}, "device must be one of cpu, cuda; got 'tpu'"),
    ],
)
def test_what_does_not_exist_is_refused_before_anything_is_written(base, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(replace(base, **options), quiet)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_refused(base):
    with pytest.raises(ValueError, match="device: cuda was asked for and there is no CUDA device"):
        train(replace(base, device="cuda"), quiet)


def test_data_that_is_not_there_is_refused_with_what_was_expected(base, image_folder, tmp_path):
    def attempt(folder, message, **options):
        with pytest.raises(DataError, match=message):
            train(replace(base, data=str(folder), **options), quiet)

    attempt(tmp_path / "nothing", "nothing has no folder 'val'")
    attempt(tmp_path, "has no folder 'val' or 'validation' or 'valid' or 'test': expected train/CLASS/IMAGE")
    (tmp_path / "val").mkdir()
    attempt(tmp_path, "val has 0 class folders: expected CLASS/IMAGE")
    (tmp_path / "val" / "red").mkdir()
    attempt(tmp_path, "val has 1 class folders: expected CLASS/IMAGE")
    (tmp_path / "val" / "red" / "notes.txt").write_text("not an image")
    os.symlink(image_folder / "train" / "blue", tmp_path / "val" / "blue")
    attempt(tmp_path, "val: .* classes red")
    os.symlink(image_folder / "train" / "red" / "0.png", tmp_path / "val" / "red" / "0.png")
    attempt(tmp_path, "has no folder 'train'")
    os.symlink(image_folder / "train", tmp_path / "train")
    attempt(tmp_path, "val lacks classes that .*train has: green: both need the same class folders")
    attempt(tmp_path, "cifar10 cannot be read in .* --dataset-download", dataset="cifar10")
    assert not (tmp_path / "run").exists()


def test_evaluation_counts_every_image_once():
    torch.manual_seed(0)
    data = ImageSet(torch.randint(0, 256, (37, 3, 4, 4), dtype=torch.uint8), torch.randint(0, 8, (37,)))
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 8)).train()
    normalize = Normalize((0.5,) * 3, (0.2,) * 3, channels=3)
    score, predicted = evaluate(model, normalize, data, batch_size=10)
    logits = model((data.images / 255 - 0.5) / 0.2).detach()
    assert torch.equal(predicted, logits.argmax(1))
    assert score.branch_share is None
    assert score.top1 == pytest.approx(100 * float((logits.argmax(1) == data.labels).float().mean()))
    top5 = (logits.argsort(1, descending=True)[:, :5] == data.labels[:, None]).any(1)
    assert score.top5 == pytest.approx(100 * float(top5.float().mean()))
    assert score.loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits, data.labels)), rel=1e-5)
    assert model.training


@pytest.mark.parametrize(
    "change",
    [
        {"opt": "adamw"},
        {"lr": 0.04},
        {"momentum": 0.5},
        {"weight_decay": 0.1},
        {"warmup_epochs": 0.0},
        {"min_lr": 0.02},
        {"clip_grad": 0.01},
        {"label_smoothing": 0.0},
        {"crop_padding": 0},
        {"hflip": 0.0},
        {"cutout": 8},
        {"mixup": 0.2},
        {"cutmix": 1.0},
        {"mixup": 0.2, "cutmix": 1.0},
        {"mixup": 0.2, "cutmix": 1.0, "mixup_switch_prob": 1.0},
        {"batch_size": 8},
        {"amp": True},
        {"block": "conv"},
        {"block": "se"},
        {"insert": ()},
        {"num_heads": 4},
        {"at": "before"},
        {"block_options": ("position=Rope2d()",)},
        {"img_size": 24},
        {"mean": (0.5,) * 3, "std": (0.5,) * 3},
        {"attention_lr": 0.5},
        {"layer_decay": 0.5},
        {"grad_accum_steps": 2},
    ],
    ids=str,
)
def test_every_setting_of_the_recipe_changes_the_result(base, change, tmp_path, reference_run):
    train(replace(base, **change), quiet)
    changed = weights_of(tmp_path / "run")
    assert not torch.equal(changed["conv1.weight"], reference_run["conv1.weight"])


@pytest.fixture(scope="module")
def reference_run(image_folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("reference") / "run"
    train(short_run(image_folder, output), quiet)
    return weights_of(output)


def test_the_reference_run_is_the_base_run(base, tmp_path, reference_run):
    train(base, quiet)
    assert equal(weights_of(tmp_path / "run"), reference_run)


def test_inputs_are_channels_last_on_request(base, monkeypatch):
    seen = []

    def watching(*arguments):
        network = build_network(*arguments)
        network.model.conv1.register_forward_pre_hook(lambda module, args: seen.append((module.training, args[0])))
        return network

    monkeypatch.setattr(train_room, "build_network", watching)
    train(replace(base, epochs=1, warmup_epochs=0, channels_last=True), quiet)
    training = [x for in_training, x in seen if in_training]
    assert len(training) == 4
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x in training)


def test_a_run_leaves_other_runs_alone(base, tmp_path):
    base = replace(base, epochs=1, warmup_epochs=0)
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


def test_a_checkpoint_brings_its_statistics_and_is_held_to_its_classes(base, image_folder, tmp_path):
    statistics = {"mean": (0.2, 0.3, 0.4), "std": (0.5, 0.6, 0.7)}
    first = train(replace(base, epochs=1, warmup_epochs=0, **statistics), quiet)
    again = replace(base, weights=str(tmp_path / "run" / "best.pth"), test_only=True)
    assert train(again, quiet).final == first.best
    assert train(replace(again, mean=(0.9,) * 3, std=(0.1,) * 3), quiet).final != first.best
    renamed = tmp_path / "renamed" / "val"
    renamed.mkdir(parents=True)
    for old, new in (("blue", "zebra"), ("green", "green"), ("red", "red")):
        os.symlink(image_folder / "val" / old, renamed / new)
    with pytest.raises(CheckpointError, match="for the classes blue, green, red; the data has green, red, zebra"):
        train(replace(again, data=str(renamed.parent)), quiet)
    train(replace(again, data=str(renamed.parent), reset_head=True), quiet)


def test_a_checkpoint_brings_the_size_of_its_images(base, tmp_path):
    first = train(replace(base, epochs=1, warmup_epochs=0, img_size=24), quiet)
    again = replace(base, weights=str(tmp_path / "run" / "best.pth"), test_only=True)
    assert train(again, quiet).final == first.best
    assert train(replace(again, img_size=32), quiet).final != first.best


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "other blocks than are to be inserted: they were made with --num-heads 2"),
        ({"num_heads": 2, "at": "branch"}, "they were made with --at after"),
        ({"num_heads": 2, "block_options": ("position=Rope2d()",)}, "they were made with no --block-options"),
    ],
)
def test_a_checkpoint_is_held_to_its_blocks(base, tmp_path, change, message):
    train(replace(base, epochs=1, warmup_epochs=0, num_heads=2), quiet)
    again = replace(base, weights=str(tmp_path / "run" / "best.pth"), test_only=True, **change)
    with pytest.raises(CheckpointError, match=message):
        train(again, quiet)


@pytest.mark.parametrize("options", [{}, {"freeze_epochs": 1, "reset_head": True}], ids=["all", "staged"])
def test_half_precision_is_that_of_every_epoch(base, options, tmp_path, monkeypatch):
    torch.save(create_model("resnet20", num_classes=3).state_dict(), tmp_path / "base.pth")
    seen, step = [], TrainingStep.__call__

    def looking(self, *arguments):
        layer = self.model.get_submodule("layer1.0.conv1")
        with layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype)):
            return step(self, *arguments)

    monkeypatch.setattr(TrainingStep, "__call__", looking)
    base = replace(base, epochs=2, warmup_epochs=0, amp=True, weights=str(tmp_path / "base.pth"), **options)
    train(base, quiet)
    assert seen == [torch.bfloat16] * 8


def test_a_run_in_half_precision_leaves_a_plain_network_behind(base):
    result = train(replace(base, epochs=1, warmup_epochs=0, amp=True), quiet)
    seen = []
    result.model.layer1.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    data = ImageSet(torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.zeros(2, dtype=torch.long))
    result.model(torch.zeros(2, 3, 32, 32))
    evaluate(result.model, result.normalize, data)
    assert seen == [torch.float32, torch.float32]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opt": "sgd", "momentum": 0.0}, "momentum must be above 0 for sgd"),
        ({"model_ema_decay": 0.5}, "model_ema_decay applies to model_ema: give model_ema too"),
        (
            {"dataset_download": True},
            "dataset_download applies to dataset cifar10 or cifar100 or torch/…, and dataset is",
        ),
        ({"resume": "auto", "test_only": True}, "resume and test_only exclude each other"),
        ({"block": "conv", "num_heads": 4}, "num_heads applies to block attention, and block is 'conv'"),
        ({"insert": (), "at": "branch"}, "at applies to insert: give insert too"),
        ({"insert": (), "impl": "bmm"}, "impl applies to insert: give insert too"),
        ({"reset_head": True}, "reset_head applies to weights: give weights too"),
        ({"attention_lr": 0.1, "insert": ()}, "attention_lr applies to insert: give insert too"),
        ({"freeze_backbone": True}, "freeze_backbone keeps weights as they are, and none are given"),
        ({"freeze_backbone": True, "weights": "a.pth", "insert": ()}, "freeze_backbone leaves nothing to train"),
        (
            {"freeze_backbone": True, "weights": "a.pth", "layer_decay": 0.5},
            "freeze_backbone and layer_decay exclude each other",
        ),
    ],
)
def test_values_out_of_range_and_settings_without_effect_are_refused(base, options, message):
    with pytest.raises(ValueError, match=message):
        replace(base, **options)


def test_a_model_that_does_not_take_the_images_is_refused_before_anything_is_written(base, tmp_path):
    with pytest.raises(ValueError, match=r"model: 'vit_tiny_patch16_224' does not run on images of 64×64.*--img-size"):
        train(replace(base, model="vit_tiny_patch16_224", img_size=64, insert=()), quiet)
    assert not (tmp_path / "run").exists()

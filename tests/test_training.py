"""What training does: its settings, each in a step or a network that it makes, and what a run leaves in its folder."""

import copy
import csv
import math
import os
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import Mixup

import vision_attn as va
from vision_attn.errors import DataError
from vision_attn.networks.models import create_model
from vision_attn.tools.training.data import InMemory, Source, seed_all
from vision_attn.tools.training.evaluation import Evaluation, normalization
from vision_attn.tools.training.folder import curves_figure, numbered_folder
from vision_attn.tools.training.loop import Trainer
from vision_attn.tools.training.network import build_network
from vision_attn.tools.training.run import evaluate, make_accelerator, train
from vision_attn.tools.training.settings import Settings, read_settings, write_settings

pytestmark = pytest.mark.usefixtures("no_pictures")

#: Of a data set: what a network is made for.
SOURCE = Source("colours", ("blue", "green", "red"), SimpleNamespace(data=np.zeros((3, 16, 16, 3), np.uint8)), range(3))
OURS = "vision_attn.attention.blocks:AttentionBlock2d"


@pytest.fixture
def base(image_folder, tmp_path):
    """A short run of a small network: four steps an epoch."""
    return Settings(
        data=image_folder, model="tiny", img_size=16, insert="layer1", epochs=3, batch_size=16, lr=0.05,
        crop_padding=2, clip_grad=5.0, device="cpu", output=tmp_path / "run",
    )  # fmt: skip


def quiet(line):
    pass


def equal(one, other):
    return list(one) == list(other) and all(torch.equal(one[key], other[key]) for key in one)


def saved(folder):
    return va.load_model(folder).state_dict()


def trainer_of(settings, count=32):
    """What makes a run's steps, on images of noise: eight a step are four steps an epoch."""
    torch.manual_seed(0)
    accelerator = make_accelerator(settings)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, 3, 16, 16), dtype=torch.uint8, generator=generator)
    data = InMemory(images, torch.arange(count) % 3)
    network = build_network(settings, SOURCE, quiet)
    evaluation = Evaluation(accelerator, normalization(network.config), data, 8)
    Path(settings.output).mkdir(exist_ok=True)
    trainer = Trainer(settings, network, data, evaluation, quiet)
    trainer.model.train()
    return trainer


def plain_step(settings, **options):
    """A trainer whose images reach the network as they are."""
    trainer = trainer_of(replace(settings, batch_size=8, crop_padding=0, hflip=0.0, **options))
    trainer.evaluation = replace(trainer.evaluation, normalize=lambda images: images)
    return trainer


def batch(count=8):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 3, 16, 16, generator=generator), torch.randint(3, (count,), generator=generator)


def zoo_file(base, tmp_path, classes=3):
    torch.manual_seed(5)
    torch.save(create_model(base.model, num_classes=classes).state_dict(), tmp_path / "base.pth")
    return tmp_path / "base.pth"


def test_settings_go_through_their_file_and_what_concerns_a_call_alone_stays_behind(base, tmp_path):
    settings = replace(base, mean=(0.1,) * 3, std=(1e-5,) * 3, seed=3, decay_epochs=(1, 2), amp="no")
    (tmp_path / "settings.yaml").write_bytes(write_settings(settings))
    assert read_settings(tmp_path, ()) == replace(settings, output=None)
    (tmp_path / "settings.yaml").write_text("lr: 1e-3\nepochs: 5\ninsert: layer3")
    assert read_settings(tmp_path / "settings.yaml", ()) == Settings(lr=0.001, epochs=5, insert=("layer3",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch: 3", "epoch: Unexpected keyword argument"),
        ("- lr", "must hold settings, each a name with a value; got list"),
        ("model: !!python/object/apply:os.system [echo this ran]", "could not determine a constructor"),
        ("\0", "is no file of settings"),
        ("dataset: hfds/someone/photos", "which fetches or runs code: give it too to trust it"),
        ("block: os:system", "which fetches or runs code: give it too to trust it"),
    ],
)
def test_a_file_that_is_not_one_of_settings_is_refused(text, message, tmp_path):
    (tmp_path / "settings.yaml").write_text(text)
    with pytest.raises(ValueError, match=f"settings.yaml.*{message}"):
        read_settings(tmp_path, ())


def test_what_a_file_may_not_fetch_or_run_by_itself_it_may_if_it_is_given(tmp_path):
    (tmp_path / "settings.yaml").write_text(f"block: {OURS}\ninsert: [layer3]\ndownload: true")
    found = read_settings(tmp_path, ("block",))
    assert (found.block, found.download) == (OURS, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup_epochs": 3}, "warmup_epochs must be fewer than epochs=3"),
        ({"weights": "a.pth", "pretrained": True}, "weights and pretrained exclude each other"),
        ({"mean": (0.5,)}, "mean needs std: give both"),
        ({"insert": (), "attention_lr": 0.1}, "attention_lr needs insert"),
        ({"sched": "step"}, "decay_epochs must be given for sched step"),
        ({"dataset": "tfds/a"}, "dataset: String should match"),
        ({"lr": math.nan, "epochs": 0}, "epochs: Input should be greater than or equal to 1; got 0; lr: "),
    ],
    ids=str,
)
def test_settings_without_sense_are_refused_in_a_line(base, options, message):
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        Settings(**{**{field.name: getattr(base, field.name) for field in fields(base)}, **options})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "resnet21"}, "model: there is no 'resnet21'; close to it: .*resnet2"),
        (
            {"model": "vit_tiny_patch16_224", "insert": (), "img_size": 64},
            "does not run on images of 64×64.*--img-size",
        ),
        ({"insert": ("layer3", "-1")}, "insert takes stages by index or modules by name, not both"),
        ({"block_options": "pos=Rope2d()"}, "block_options do not suit attention: .*'pos'"),
        ({"block_options": ("num_heads=4", "num_heads=2")}, "block_options must be NAME=VALUE, each name once"),
        ({"block_options": "position=Rope3d()"}, "Rope3d.* is not the code of a value"),
        ({"block": "vision_attn:Nothing"}, "block must be a name or a class, MODULE:CLASS"),
        ({"batch_size": 100}, "batch_size must be at most the 72 training images"),
        ({"batch_size": 15, "mixup": 1.0}, "batch_size must be .* a multiple of 2"),
        ({"grad_accum_steps": 3}, "batch_size must be .* a multiple of 3"),
        ({"mean": (0.5, 0.5), "std": (0.5, 0.5)}, "mean must have a value for each of 3 channels"),
        ({"opt": "lion", "lr": None}, "lr must be given for lion"),
        ({"device": "cuda"}, "device: cuda was asked for and there is no CUDA"),
        ({"amp": "float16"}, "amp: float16 was asked for and there is no CUDA"),
        ({"freeze_backbone": True, "insert": ()}, "model has nothing to train when frozen"),
        ({"aa": "rand-x9"}, r"aa: timm knows no 'rand-x9' .*: give one such as rand-m9-mstd0.5"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(base, options, message, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=message):
        train(replace(base, **options), say=quiet)
    assert not (tmp_path / "run" / "state").exists()


def test_halves_of_other_classes_are_refused(base, image_folder, tmp_path):
    (tmp_path / "val").mkdir()
    for name in ("red", "blue"):
        os.symlink(image_folder / "val" / name, tmp_path / "val" / name)
    os.symlink(image_folder / "train", tmp_path / "train")
    with pytest.raises(DataError, match=r"^green: classes of .*train or of .*val, and not of both"):
        train(replace(base, data=tmp_path), say=quiet)


def test_a_run_learns_and_leaves_what_it_promises(base, image_folder, tmp_path):
    lines, folder = [], tmp_path / "run"
    result = train(replace(base, log_with="tensorboard"), say=lines.append)
    assert result.best.top1 > 90
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock", "curves.png", "first_batch.png", "inserted.txt", "logs", "metrics.csv",
        "model", "settings.yaml", "state",
    ]  # fmt: skip
    with open(folder / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    assert rows[-1] == {key: "" if value is None else str(value) for key, value in result.rows[-1].items()}
    assert rows[-1]["eval_top1"] == str(result.final.top1)
    assert float(rows[-1]["train_loss"]) < float(rows[0]["train_loss"])
    assert (folder / "inserted.txt").read_text().startswith("1 block inserted")
    assert list((folder / "logs").rglob("events.out.tfevents*"))
    with Image.open(folder / "first_batch.png") as picture:
        assert (picture.width, picture.height) == (8 * 18 + 2, 2 * 18 + 2)  # sixteen images with two pixels between
    assert sum(line.startswith("epoch ") for line in lines) == 3

    # What disabling the blocks changes is what a twin with gates of zero says.
    assert str(result.disabled) in lines[-1]
    model = va.load_model(folder)
    assert model.classes == ("blue", "green", "red")
    twin = copy.deepcopy(result.model)
    for gate in va.gates(twin).values():
        torch.nn.init.zeros_(gate)
    images = [Image.open(path) for path in sorted((image_folder / "val").glob("*/*.png"))]
    images, labels = torch.stack([model.transform(image) for image in images]), torch.arange(3).repeat_interleave(8)
    assert result.disabled.without.loss == pytest.approx(F.cross_entropy(twin(images), labels).item(), rel=1e-4)

    # The best network, by what a user has at hand, gives the scores that were logged.
    evaluated = evaluate(read_settings(folder, ()), folder, say=quiet)
    assert evaluated.final == result.best
    assert result.best.loss == pytest.approx(F.cross_entropy(model(images), labels).item(), rel=1e-4)
    with pytest.raises(ValueError, match=r"holds a run already: choose another, or go on with --resume"):
        train(replace(base, seed=1), say=quiet)


def test_a_network_is_trained_with_the_blocks_that_are_in_it(image_folder, tmp_path):
    torch.manual_seed(0)
    model = create_model("test_resnet", num_classes=3)
    va.insert_(model, stages=0, num_heads=2, example_input=(1, 3, 32, 32))
    before = copy.deepcopy(model.state_dict())
    how = {"data": image_folder, "img_size": 32, "epochs": 1, "batch_size": 36, "device": "cpu", "say": quiet}
    result = va.train(model=model, output=tmp_path / "run", **how)
    assert list(va.inserted_blocks(va.load_model(tmp_path / "run"))) == list(va.inserted_blocks(model))
    assert equal(result.model.state_dict(), saved(tmp_path / "run"))
    assert not equal(model.state_dict(), before), "it is trained in place"
    with pytest.raises(ValueError, match=r"for the 3 classes of .*; got a ResNet for 4"):
        va.train(model=create_model("test_resnet", num_classes=4), output=tmp_path / "other", **how)
    with pytest.raises(ValueError, match="settings and options exclude each other: give data, "):
        va.train(Settings(), **how)


def test_the_curves_are_drawn(monkeypatch):
    monkeypatch.undo()
    keys = ("eval_loss", "train_loss", "eval_top1", "lr", "branch_share")
    rows = [{"epoch": i, **{key: j + 1 / i for j, key in enumerate(keys)}} for i in (1, 2, 3)]
    lines = [line for axis in curves_figure(rows).axes for line in axis.lines]
    assert [[*line.get_ydata()] for line in lines] == [[row[key] for row in rows] for key in keys]


def test_the_average_is_what_counts_and_warms_up(base, tmp_path):
    trainer = plain_step(base, ema=0.999)
    before = copy.deepcopy(trainer.model.state_dict())
    for number in range(8):
        trainer.step(*batch(), number // 4, number % 4)
    averaged, now = trainer.ema.module.state_dict(), trainer.model.state_dict()
    one, other, begin = (state["fc.weight"] for state in (averaged, now, before))
    assert 0 < (one - other).norm() < (one - begin).norm()
    assert trainer.ema.get_decay(10**6) == 0.999
    assert equal(trainer.network_now().state_dict(), averaged)


def test_runs_without_an_output_are_numbered(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "train-7").mkdir(parents=True)
    (tmp_path / "runs" / "train-old").mkdir()
    with pytest.raises(ValueError, match="batch_size must be at most"):
        train(replace(base, output=None, batch_size=100), say=quiet)
    assert not (tmp_path / "runs" / "train-8").exists(), "what is refused takes no number"
    assert train(replace(base, output=None, epochs=1, batch_size=36), say=quiet).folder == Path("runs/train-8")
    assert numbered_folder() == Path("runs/train-9")


def test_a_run_stops_early_where_it_gets_no_better(base, monkeypatch):
    scores, lines, original = iter([0.0, 40.0, 50.0, 50.0, 45.0, 60.0, 60.0]), [], Evaluation.__call__

    def evaluated(evaluation, model):
        found, seen = original(evaluation, model)
        return replace(found, top1=next(scores)), seen

    monkeypatch.setattr(Evaluation, "__call__", evaluated)
    monkeypatch.setattr(Evaluation, "without_blocks", lambda *given: None)
    base = replace(base, epochs=9, batch_size=36, early_stopping=2)
    assert train(base, say=lines.append).best.top1 == 50.0
    assert "stopped early: 2 epochs have not surpassed the top-1 of epoch 2" in lines
    train(replace(base, resume="auto"), say=lines.append)  # it stays so
    assert sum(line.startswith("epoch ") for line in lines) == 4


def test_the_optimizer_is_the_one_that_is_named_with_its_numbers(base):
    optimizer = plain_step(base, opt="adamw", lr=0.003, weight_decay=0.02).optimizer
    assert isinstance(optimizer.optimizer, torch.optim.AdamW)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.02, 0.0}
    trainer = plain_step(base, momentum=0.7)
    assert trainer.rate == 0.05
    assert {(group["momentum"], group["nesterov"]) for group in trainer.optimizer.param_groups} == {(0.7, True)}
    rates = [Settings(**options).base_lr for options in ({}, {"weights": "a.pth"}, {"opt": "adamw"})]
    assert rates == [0.1, 0.01, 0.001]


def test_rates_warm_up_follow_the_cosine_and_keep_their_ratio(base):
    trainer = plain_step(base, model="test_resnet", warmup_epochs=1, min_lr=0.01, attention_lr=0.2, layer_decay=0.5)
    for done in range(12):
        trainer.step(*batch(2), done // 4, done % 4)
        warming = 0.0005 + done / 4 * (0.05 - 0.0005)  # from a hundredth of the rate
        cosine = 0.01 + 0.04 / 2 * (1 + math.cos(math.pi * (done - 4) / 8))
        assert trainer.rate == pytest.approx(warming if done < 4 else cosine)
        rates = {group["name"]: group["lr"] for group in trainer.optimizer.param_groups}
        assert rates["attention, decay"] == rates["attention, no decay"] == pytest.approx(4 * trainer.rate)
        layers = sorted({rate for name, rate in rates.items() if name.startswith("backbone")}, reverse=True)
        assert layers == pytest.approx([trainer.rate / 2**depth for depth in range(len(layers))])
        assert len(layers) > 3


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({"sched": "step", "decay_epochs": (1,), "decay_rate": 0.5}, [0.05] * 4 + [0.025] * 4 + [0.0125] * 4),
        ({"sched": "multistep", "decay_epochs": (2, 1)}, [0.05] * 3 + [0.005] * 4 + [0.0005] * 5),
        ({"sched": "poly", "decay_rate": 1.0}, [0.05 * (1 - done / 12) for done in range(12)]),
    ],
    ids=lambda value: value.get("sched") if isinstance(value, dict) else "",
)
def test_rates_fall_by_timms_schedules(base, options, rates):
    trainer = plain_step(base, attention_lr=0.2, **options)
    for done, rate in enumerate(rates):
        trainer.step(*batch(2), done // 4, done % 4)
        assert trainer.rate == pytest.approx(rate)
        ratios = {round(group["lr"] / trainer.rate, 6) for group in trainer.optimizer.param_groups}
        assert ratios == {1.0, 4.0}, "the block's rate over the others'"


def test_rare_classes_count_more_on_request(base):
    trainer = plain_step(base, model="test_efficientnet_gn", insert="blocks.1", weight_decay=0.0, class_weights=True)
    torch.testing.assert_close(trainer.class_weights, torch.tensor([32 / 33, 32 / 33, 32 / 30]))
    images, labels = batch()
    before, weights = copy.deepcopy(trainer.model), torch.tensor([0.5, 1.0, 3.0])
    trainer.class_weights = weights
    each = F.cross_entropy(before(images), labels, reduction="none") * weights[labels]
    assert trainer.step(images, labels, 0, 0).item() == pytest.approx(each.mean().item(), rel=1e-5)


def test_a_step_clips_gradients_and_smooths_labels(base):
    trainer = plain_step(base, momentum=0.5, weight_decay=0.0, clip_grad=1e-3, label_smoothing=0.3)
    before = copy.deepcopy(trainer.model)
    images, labels = batch()
    loss = trainer.step(images, labels, 0, 0)
    expected = F.cross_entropy(before(images), labels, label_smoothing=0.3)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    pairs = zip(trainer.model.parameters(), before.parameters(), strict=True)
    changes = torch.stack([(one - other).square().sum() for one, other in pairs])
    # The first step of Nesterov's momentum goes 1.5 times along the gradient, and no gradient is longer than 1e-3.
    assert changes.sum().sqrt().item() == pytest.approx(0.05 * 1.5 * 1e-3, rel=1e-3)


def test_accumulated_gradients_are_those_of_the_whole_batch(base, monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "100")  # the settings say how many
    images, labels = batch(8)
    found = []
    for parts in (1, 4):
        # Without batch norms, which would see parts of the batch.
        trainer = plain_step(base, model="test_efficientnet_gn", insert="blocks.1", grad_accum_steps=parts)
        start, seen = copy.deepcopy(trainer.model.state_dict()), []
        trainer.model.conv_stem.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(len(args[0])))
        losses = [trainer.step(images, labels, 0, number).item() for number in range(2)]
        assert seen == 2 * parts * [8 // parts], "no more than a part of the batch is in the network"
        found.append((losses, trainer.model.state_dict()))
    (losses, one), (others, four) = found
    assert losses == pytest.approx(others, rel=1e-4)
    for key, value in one.items():
        torch.testing.assert_close(four[key], value, rtol=1e-4, atol=1e-5)
    assert max((one[key] - start[key]).abs().max() for key in one) > 1e-2


def test_what_is_random_is_drawn_anew_in_each_step_and_in_each_process(base, monkeypatch):
    seeds = []
    for process, settings in ((0, base), (0, replace(base, seed=1)), (1, base)):
        trainer = plain_step(settings)
        monkeypatch.setattr(type(trainer.accelerator), "process_index", process)
        for epoch, number in ((0, 1), (0, 2), (1, 0)):
            trainer.step(*batch(2), epoch, number)
            seeds.append(torch.initial_seed())
    assert len(set(seeds)) == 9
    monkeypatch.undo()
    plain_step(base).step(*batch(2), 1, 0)
    assert torch.initial_seed() == seeds[2]


def test_images_are_erased_and_mixed_by_timm(base):
    images, labels = torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8), torch.arange(8) % 3
    plain = replace(base, batch_size=8, crop_padding=0, hflip=0.0)
    trainer = trainer_of(replace(plain, mixup=0.4, cutmix=1.0))
    normalized = trainer.evaluation.normalize(images)
    seed_all(7)
    mixed, shares = trainer.vary(images, labels)
    seed_all(7)
    torch.randint(1, (8, 1)), torch.randint(1, (8, 1)), torch.rand(8, 1)  # the crops and flips before
    expected, of_each = Mixup(0.4, 1.0, label_smoothing=0.0, num_classes=3)(normalized.clone(), labels)
    assert torch.equal(mixed, expected)
    assert torch.equal(shares, of_each)
    erased, same = trainer_of(replace(plain, reprob=1.0)).vary(images, labels)
    assert torch.equal(same, labels)
    assert (erased != normalized).flatten(1).any(1).all()


def test_half_precision_leaves_a_plain_network_behind(base):
    trainer, seen = plain_step(base, amp="bfloat16", channels_last=True), []
    trainer.model.layer1.register_forward_hook(lambda module, args, output: seen.extend([*args, output]))
    trainer.step(*batch(2), 0, 0)
    assert trainer.network_now()(batch(2)[0]).dtype == torch.float32
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    assert seen[1].dtype == torch.bfloat16
    assert {value.dtype for value in trainer.model.parameters()} == {torch.float32}
    assert make_accelerator(replace(base, amp=None)).mixed_precision == "no", "on the CPU, unasked"


@pytest.mark.slow
def test_a_compiled_run_learns_the_same(base, tmp_path):
    plain = train(replace(base, output=tmp_path / "plain"), say=quiet)
    compiled = train(replace(base, compile=True), say=quiet)
    # Fused arithmetic rounds otherwise, and training carries that on.
    assert compiled.final.loss == pytest.approx(plain.final.loss, abs=0.05)
    assert compiled.final.top1 > 90


def test_what_is_inserted_is_what_the_settings_say(base):
    def block(**options):
        (found,) = va.inserted_blocks(build_network(replace(base, **options), SOURCE, quiet).model).values()
        return found

    found = block(block_options=("num_heads=2", "impl=bmm", "position=Rope2d()"))
    assert (found.attn.num_heads, found.attn.impl, "Rope2d" in repr(found.attn.position)) == (2, "bmm", True)
    assert block(block=OURS, block_options="num_heads=4").attn.num_heads == 4  # where 8 were made once
    assert block(model="rexnet_100", insert="features.3", img_size=32).attn.num_heads == 5  # of 50 channels
    control = block(block="vision_attn.tools.comparison.controls:ConvBlock2d", block_options="kernel_size=5")
    assert type(control).__name__ == "ConvBlock2d"
    assert "layer1.0  Att" in build_network(replace(base, at="before", model="resnet20"), SOURCE, quiet).report
    by_index = build_network(replace(base, insert=1), SOURCE, quiet).model
    assert [site.partition(".")[0] for site in va.inserted_blocks(by_index)] == ["layer2"]
    assert build_network(replace(base, insert=()), SOURCE, quiet).report == ""


def test_a_network_has_the_size_the_statistics_and_the_crop_that_are_given(base):
    config = build_network(replace(base, img_size=24, mean=(0.5,) * 3, std=(0.2,) * 3), SOURCE, quiet).config
    assert (config["input_size"], config["mean"], config["std"]) == ((3, 24, 24), (0.5,) * 3, (0.2,) * 3)
    network = build_network(replace(base, model="test_resnet", insert=(), img_size=None), SOURCE, quiet)
    assert network.config["input_size"] == (3, 16, 16), "the data's"
    assert network.config is network.model.pretrained_cfg
    for crop, share in (("pad", 1.0), ("resized", 0.95)):
        found = build_network(replace(base, model="test_resnet", insert=(), crop=crop, drop_path=0.3), SOURCE, quiet)
        assert found.config["crop_pct"] == share
        assert max(getattr(module, "drop_prob", 0.0) or 0.0 for module in found.model.modules()) == pytest.approx(0.3)


def test_a_frozen_backbone_is_the_one_that_came_and_its_adapter_makes_the_run_again(base, tmp_path):
    file = zoo_file(base, tmp_path, classes=7)
    settings = replace(base, epochs=2, weights=file, reset_head=True, freeze_backbone=True, ema=0.5, amp="bfloat16")
    lines = []
    train(settings, say=lines.append)
    assert any(line.startswith("the backbone is frozen: ") for line in lines)
    given, found = torch.load(file, weights_only=True), saved(tmp_path / "run")
    assert {key for key in given if not torch.equal(found[key], given[key])} == {"fc.weight", "fc.bias"}
    # The adapter is the best epoch, and needs no more than the network that the run began with.
    model = create_model(base.model, num_classes=3)
    va.load_checkpoint(model, file, skip=["fc.*"])
    va.load_adapter_(model, tmp_path / "run" / "adapter.safetensors")
    assert equal(model.state_dict(), found)
    # Without blocks the head alone learns, and there is nothing to adapt with.
    train(replace(settings, insert=(), output=tmp_path / "plain"), say=quiet)
    found = saved(tmp_path / "plain")
    assert {key for key in given if not torch.equal(given[key], found[key])} == {"fc.weight", "fc.bias"}
    assert not (tmp_path / "plain" / "adapter.safetensors").exists()


def test_pretrained_weights_for_other_classes_have_a_new_head_too(monkeypatch):
    monkeypatch.setattr(
        "vision_attn.tools.training.network.create_model", lambda name, pretrained, **how: create_model(name, **how)
    )
    settings = Settings(data="images", pretrained=True, freeze_backbone=True, insert="layer3", device="cpu")
    assert build_network(settings, SOURCE, quiet).new_head == ("fc.*",)


def test_a_trained_network_is_held_to_its_classes(base, image_folder, tmp_path):
    result = train(replace(base, epochs=1, mean=(0.2, 0.3, 0.4), std=(0.5, 0.6, 0.7)), say=quiet)
    other = Settings(data=image_folder, device="cpu", batch_size=16)
    assert evaluate(other, tmp_path / "run", say=quiet).final == result.best, "size and statistics are its own"
    assert evaluate(replace(other, img_size=32), tmp_path / "run", say=quiet).final != result.best
    for old, new in (("blue", "zebra"), ("green", "green"), ("red", "red")):
        (tmp_path / "renamed" / "val").mkdir(parents=True, exist_ok=True)
        os.symlink(image_folder / "val" / old, tmp_path / "renamed" / "val" / new)
    with pytest.raises(ValueError, match=r"for the classes blue, green, red; .* has green, red, zebra"):
        evaluate(replace(other, data=tmp_path / "renamed"), tmp_path / "run", say=quiet)


def test_evaluation_counts_every_image_once(base):
    torch.manual_seed(0)
    data = InMemory(torch.randint(0, 256, (37, 3, 4, 4), dtype=torch.uint8), torch.randint(0, 8, (37,)))
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 8)).train()
    config = {"mean": (0.5,) * 3, "std": (0.2,) * 3}
    score, seen = Evaluation(make_accelerator(base), normalization(config), data, 10)(model)
    logits = model((data.images / 255 - 0.5) / 0.2).detach()
    assert torch.equal(seen, logits.argmax(1))
    assert score.branch_share is None
    assert score.top1 == pytest.approx(100 * float((logits.argmax(1) == data.labels).float().mean()))
    top5 = (logits.argsort(1, descending=True)[:, :5] == data.labels[:, None]).any(1)
    assert score.top5 == pytest.approx(100 * float(top5.float().mean()))
    assert score.loss == pytest.approx(float(F.cross_entropy(logits, data.labels)), rel=1e-5)
    assert model.training

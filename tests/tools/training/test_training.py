"""Training: settings, training steps, networks and the folder of a run."""

import copy
import csv
import math
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from small_networks import assert_same, copied
from timm.data import Mixup
from timm.utils import ModelEmaV3
from vision_attn.tools.training.data import DataSplit, InMemory, seed_all
from vision_attn.tools.training.evaluation import Evaluation
from vision_attn.tools.training.folder import numbered_folder
from vision_attn.tools.training.loop import Progress, Trainer
from vision_attn.tools.training.network import build_network
from vision_attn.tools.training.run import evaluate, make_accelerator, run_training
from vision_attn.tools.training.settings import Settings, make_settings, read_settings

import vision_attn as va
from vision_attn.errors import DataError
from vision_attn.networks.models import create_model

OURS = "vision_attn.attention.blocks:AttentionBlock2d"


def noise(count, *classes, side=16):
    """Return a data set of noise in memory, in which image i has class i modulo the number of classes."""
    pixels = np.random.default_rng(0).integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    targets = [index % len(classes) for index in range(count)]
    return DataSplit("noise", classes, SimpleNamespace(data=pixels, targets=targets), range(count))


SOURCE = noise(32, "blue", "green", "red")


@pytest.fixture
def base(image_folder, tmp_path):
    """Return settings for a short run of a small network with four steps per epoch."""
    return Settings(
        data=image_folder, model="tiny", img_size=16, names="layer1", epochs=3, batch_size=16, lr=0.05,
        crop_padding=2, clip_grad=5.0, device="cpu", workers=0, output=tmp_path / "run",
    )  # fmt: skip


def quiet(line):
    pass


def changed_keys(state, other):
    return {key for key, value in state.items() if not torch.equal(other[key], value)}


def make_trainer(settings, **options):
    """Return a trainer on noise with four steps per epoch, without augmentation and normalization."""
    settings = replace(settings, **{"batch_size": 8, "crop_padding": 0, "hflip": 0.0, **options})
    torch.manual_seed(0)
    network = build_network(settings, SOURCE, quiet)
    evaluation = Evaluation(SOURCE, settings, network, make_accelerator(settings))
    Path(settings.output).mkdir(exist_ok=True)
    trainer = Trainer(settings, network, evaluation.data, evaluation, quiet)
    trainer.model.train()
    evaluation.normalize = lambda images: images
    return trainer


def batch(count=8):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 3, 16, 16, generator=generator), torch.randint(3, (count,), generator=generator)


def test_settings_are_restored_from_their_file_except_call_settings(base, tmp_path):
    file = tmp_path / "settings.yaml"
    settings = replace(base, mean=(0.1,) * 3, std=(1e-5,) * 3, seed=3, amp="no")
    file.write_bytes(settings.to_yaml())
    assert read_settings(tmp_path, ()) == replace(settings, output=None)
    file.write_text("lr: 1e-3\nepochs: 5\nnames: layer3")
    assert read_settings(file, ()) == Settings(lr=0.001, epochs=5, names=("layer3",))
    file.write_text(f"block: {OURS}\nnames: [layer3]\ndownload: true")  # code only if the caller passes it too
    found = read_settings(tmp_path, ("block",))
    assert (found.block, found.download) == (OURS, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch: 3", "epoch: "),
        ("lr", "does not contain settings"),
        ("model: !!python/object/apply:os.system [echo this ran]", "could not determine a constructor"),
        ("dataset: hfds/someone/photos", "dataset 'hfds/someone/photos'"),
        ("block: os:system", "block 'os:system'"),
    ],
)
def test_files_with_invalid_settings_or_code_are_rejected(text, message, tmp_path):
    (tmp_path / "settings.yaml").write_text(text)
    with pytest.raises(ValueError, match=f"settings.yaml.*{message}"):
        read_settings(tmp_path, ())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup_epochs": 3}, "warmup_epochs .* epochs=3, got 3"),
        ({"weights": "a.pth", "pretrained": True}, "weights cannot be combined with pretrained=True"),
        ({"mean": (0.5,) * 3}, "mean requires std"),
        ({"lr": math.nan, "epochs": 0}, "epochs: .* 1, got 0$"),
        ({"hflip": -0.5}, r"hflip: .* 0, got -0\.5"),
        ({"reprob": 1.5}, r"reprob: .* 1, got 1\.5"),
        ({"model": "resnet21"}, r"'resnet21' does not exist\. Did you mean .*resnet20"),
        ({"model": "vit_tiny_patch16_224", "names": (), "img_size": 64}, "64×64.*--img-size"),
        ({"block_options": "pos=Rope()"}, "block_options .*'pos'"),
        ({"block_options": ("num_heads=4", "num_heads=2")}, "block_options .*'num_heads=2'"),
        ({"block": "vision_attn:Nothing"}, "block .*MODULE:CLASS, got 'vision_attn:Nothing'"),
        ({"batch_size": 100}, "batch_size .* 72, .* got 100"),
        ({"batch_size": 15, "mixup": 1.0}, "batch_size .* 2, got 15"),
        ({"weights": "x.pth", "rename": "efficientnet"}, "rename: .*'efficientnet-pytorch', got 'efficientnet'"),
        ({"rename": "efficientnet-pytorch"}, "rename requires weights"),
        ({"opt": "lion", "lr": None}, "lr .*=lion"),
        ({"device": "cuda"}, "device=cuda requires a CUDA device"),
        ({"amp": "float16"}, "amp=float16 requires a CUDA device"),
        ({"freeze_backbone": True, "names": ()}, "nothing to train"),
        ({"aa": "rand-x9"}, "aa: .*rand-m9-mstd0.5, got 'rand-x9'"),
        ({"resume": "nothing"}, "output .*resume=nothing, got .*run"),
        ({"resume": "nothing", "output": None}, "resume: nothing does not contain a run"),
        ({"model": None}, "model is required: expected .*--model resnet18 --pretrained"),
    ],
    ids=str,
)
def test_invalid_settings_are_one_line_errors(base, options, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        run_training(make_settings(**{**vars(base), **options}))
    assert "\n" not in str(caught.value)
    assert not (base.output / "state").exists()


def test_a_run_learns_and_writes_its_folder(base, image_folder):
    lines, folder = [], base.output
    result = run_training(replace(base, log_with="tensorboard"), log=lines.append)
    assert result.best.top1 > 90
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock", "first_batch.png", "logs", "metrics.csv",
        "model", "settings.yaml", "state",
    ]  # fmt: skip
    with open(folder / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    assert rows[-1] == {key: "" if value is None else str(value) for key, value in result.history[-1].items()}
    assert float(rows[-1]["train_loss"]) < float(rows[0]["train_loss"])
    for row in result.history:
        assert row["images_per_second"] * row["seconds"] == pytest.approx(4 * base.batch_size, rel=0.01)
    assert lines[0].startswith("tiny: 1,779 parameters, input 3×16×16, 3 classes\n1 inserted block:")
    assert list((folder / "logs").rglob("events.out.tfevents*"))
    with Image.open(folder / "first_batch.png") as picture:
        assert picture.size == (8 * 18 + 2, 2 * 18 + 2)  # sixteen images, separated by two pixels

    # Disabled blocks are equivalent to blocks with zero gates.
    assert str(result.ablation) in lines[-4]
    command = f"vision-attn compare --config {folder} --output {folder / 'compare'}"
    assert lines[-2:] == [command, lines[-1]]
    assert lines[-1].startswith("One of the 24 validation images is 4.2 points of top-1.")
    model, ungated = va.load_model(folder), copy.deepcopy(result.model)
    assert model.classes == ("blue", "green", "red")
    for block in va.inserted_blocks(ungated).values():
        torch.nn.init.zeros_(block.gate)
    images = [Image.open(path) for path in sorted((image_folder / "val").glob("*/*.png"))]
    images, labels = torch.stack([*map(model.transform, images)]), torch.arange(3).repeat_interleave(8)
    names = [model.classes[index] for index in model(images).argmax(1)]
    folders = [path.parent.name for path in sorted((image_folder / "val").glob("*/*.png"))]
    assert np.mean([name == folder for name, folder in zip(names, folders, strict=True)]) > 0.9
    scores = ungated(images)
    assert result.ablation.scores_without_blocks.loss == pytest.approx(F.cross_entropy(scores, labels).item(), rel=1e-4)
    assert result.ablation.predictions_changed == int((scores.argmax(1) != result.model(images).argmax(1)).sum())

    # The saved network has the scores in the log.
    assert evaluate({}, folder, log=quiet) == result.best
    assert result.best.loss == pytest.approx(F.cross_entropy(model(images), labels).item(), rel=1e-4)
    with pytest.raises(ValueError, match=f"{folder} .*--resume {folder}"):
        run_training(replace(base, seed=1), log=quiet)


def test_train_takes_options_and_a_model_by_name_or_with_its_blocks(image_folder, tmp_path):
    torch.manual_seed(0)
    model = create_model("test_resnet", num_classes=3)
    va.insert_(model, stages=0, num_heads=2, example_input=(1, 3, 32, 32))
    before = copied(model)
    options = {"data": image_folder, "img_size": 32, "epochs": 1, "batch_size": 36, "device": "cpu", "log": quiet}
    result = va.train(model, output=tmp_path / "run", **options)
    assert list(va.inserted_blocks(va.load_model(tmp_path / "run"))) == list(va.inserted_blocks(model))
    assert_same(result.model.state_dict(), va.load_model(tmp_path / "run").state_dict())
    assert changed_keys(model.state_dict(), before), "it is trained in place"
    with pytest.raises(ValueError, match=r"3 classes .* ResNet with 4"):
        va.train(model=create_model("test_resnet", num_classes=4), output=tmp_path / "other", **options)
    assert va.train("tiny", output=tmp_path / "named", **options).model.pretrained_cfg["architecture"] == "tiny"
    with pytest.raises(ValueError, match=r"^model: .*, got Settings"):
        va.train(Settings(), **options)


def test_settings_that_create_a_network_are_refused_for_a_given_network(image_folder, tmp_path):
    model = create_model("test_resnet", num_classes=3)
    options = {"data": image_folder, "img_size": 32, "epochs": 1, "batch_size": 36, "device": "cpu", "log": quiet}
    wrong = {"names": "layer3", "weights": "missing.pth", "reset_head": True, "drop_path": 0.2, "block": "cbam"}
    with pytest.raises(ValueError, match=r"^weights, reset_head, names, block, drop_path: expected .* got a ResNet\. "):
        va.train(model, output=tmp_path / "run", **wrong, **options)
    assert not (tmp_path / "run").exists()
    va.insert_(model, stages=0, num_heads=2, example_input=(1, 3, 32, 32))
    result = va.train(model, output=tmp_path / "run", attention_lr=0.3, **options)
    assert (result.settings.has_blocks, result.settings.attention_lr) == (False, 0.3)
    assert result.ablation is not None


def test_a_resumed_run_keeps_its_settings(image_folder, tmp_path):
    options = {"data": image_folder, "img_size": 16, "names": "layer1", "batch_size": 36, "lr": 0.01, "device": "cpu"}
    va.train("tiny", output=tmp_path / "run", epochs=1, log=quiet, **options)
    for folder in (tmp_path / "run", str(tmp_path / "run")):
        result = va.train(resume=folder, epochs=2, log=quiet)
    assert (result.settings.lr, result.settings.names, len(result.history)) == (0.01, ("layer1",), 2)
    assert result.folder == tmp_path / "run"
    with pytest.raises(FileNotFoundError, match="nothing"):
        va.train(resume=tmp_path / "nothing", log=quiet)


def test_runs_without_an_output_are_numbered(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train-7", "train-old"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    with pytest.raises(ValueError, match="batch_size must be at most 72, the number of training images, got 100"):
        run_training(replace(base, output=None, batch_size=100), log=quiet)
    assert not (tmp_path / "runs" / "train-8").exists(), "an invalid run does not use a number"
    result = run_training(replace(base, output=None, epochs=1, batch_size=36), log=quiet)
    assert (result.folder, numbered_folder()) == (Path("runs/train-8"), Path("runs/train-9"))


def test_the_moving_average_warms_up_and_is_saved(base):
    trainer = make_trainer(base, ema=0.999)
    begin = trainer.model.fc.weight.detach().clone()
    expected = ModelEmaV3(trainer.model, 0.999, use_warmup=True)
    for number in range(8):
        trainer.step(*batch(), number // 4, number % 4)
        expected.update(trainer.model, step=number)
    averaged = trainer.ema.module.state_dict()
    assert_same(averaged, expected.module.state_dict())
    one, other = averaged["fc.weight"], trainer.model.fc.weight
    assert 0 < (one - other).norm() < (one - begin).norm()
    assert trainer.ema.get_decay(10**6) == 0.999
    assert_same(trainer.get_network_to_save().state_dict(), averaged)


def test_the_optimizer_has_the_name_and_numbers_of_the_settings(base):
    optimizer = make_trainer(base, opt="adamw", lr=0.003, weight_decay=0.02).optimizer
    assert isinstance(optimizer.optimizer, torch.optim.AdamW)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.02, 0.0}
    trainer = make_trainer(base, momentum=0.7)
    assert trainer.lr == 0.05
    assert {(group["momentum"], group["nesterov"]) for group in trainer.optimizer.param_groups} == {(0.7, True)}
    assert [Settings(**of).base_lr for of in ({}, {"weights": "a.pth"}, {"opt": "adamw"})] == [0.1, 0.01, 0.001]
    frozen = Settings(pretrained=True, freeze_backbone=True)  # only new parameters are trained
    assert (frozen.optimizer, frozen.base_lr) == ("adamw", 0.001)


def test_learning_rates_warm_up_follow_the_cosine_and_keep_their_ratio(base):
    trainer = make_trainer(base, model="test_resnet", warmup_epochs=1, min_lr=0.01, attention_lr=0.2, layer_decay=0.5)
    for done in range(12):
        trainer.step(*batch(2), done // 4, done % 4)
        warming = 0.0005 + done / 4 * (0.05 - 0.0005)  # starts at 1/100 of the learning rate
        cosine = 0.01 + 0.04 / 2 * (1 + math.cos(math.pi * (done - 4) / 8))
        assert trainer.lr == pytest.approx(warming if done < 4 else cosine)
        rates = {group["name"]: group["lr"] for group in trainer.optimizer.param_groups}
        assert rates["attention, decay"] == rates["attention, no decay"] == pytest.approx(4 * trainer.lr)
        layers = sorted({rate for name, rate in rates.items() if name.startswith("backbone")}, reverse=True)
        assert layers == pytest.approx([trainer.lr / 2**depth for depth in range(len(layers))])
        assert len(layers) > 3


def test_a_constant_learning_rate_warms_up(base):
    trainer = make_trainer(base, attention_lr=0.2, sched="constant", warmup_epochs=1)
    for done in range(12):
        trainer.step(*batch(2), done // 4, done % 4)
        assert trainer.lr == pytest.approx(0.0005 + done / 4 * (0.05 - 0.0005) if done < 4 else 0.05)


def test_a_step_clips_gradients_smooths_labels_and_weights_classes(base):
    options = {"momentum": 0.5, "weight_decay": 0.0, "clip_grad": 1e-3, "label_smoothing": 0.3, "class_weights": True}
    trainer = make_trainer(base, **options)
    torch.testing.assert_close(trainer.loss.weight, torch.tensor([32 / 33, 32 / 33, 32 / 30]))
    before, (images, labels) = copy.deepcopy(trainer.model), batch()
    trainer.loss.weight = torch.tensor([0.5, 1.0, 3.0])
    losses = F.cross_entropy(before(images), labels, trainer.loss.weight, label_smoothing=0.3, reduction="none")
    assert trainer.step(images, labels, 0, 0).item() == pytest.approx(losses.mean().item(), rel=1e-5)
    # The first step with Nesterov momentum is 1.5 times the gradient, whose norm is at most 1e-3.
    one, other = (torch.nn.utils.parameters_to_vector(model.parameters()) for model in (trainer.model, before))
    assert (one - other).norm().item() == pytest.approx(0.05 * 1.5 * 1e-3, rel=1e-3)


def test_accumulated_gradients_are_those_of_the_complete_batch(base, monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "100")  # the settings take precedence
    found = []
    for parts in (1, 4):
        # No batch norms, whose statistics depend on the micro-batch.
        trainer = make_trainer(base, model="test_efficientnet_gn", names="blocks.1", grad_accum_steps=parts)
        start, sizes = copied(trainer.model), []
        trainer.model.conv_stem.register_forward_pre_hook(lambda module, args, sizes=sizes: sizes.append(len(args[0])))
        losses = [trainer.step(*batch(), 0, number).item() for number in range(2)]
        assert sizes == 2 * parts * [8 // parts]
        found.append((losses, trainer.model.state_dict()))
    (losses, one), (others, four) = found
    assert losses == pytest.approx(others, rel=1e-4)
    torch.testing.assert_close(four, one, rtol=1e-4, atol=1e-5)
    assert max((one[key] - start[key]).abs().max() for key in one) > 1e-2


def test_random_numbers_differ_between_seeds_epochs_steps_and_processes(base, monkeypatch):
    seeds = []
    for process, settings in ((0, base), (0, replace(base, seed=1)), (1, base)):
        trainer = make_trainer(settings)
        monkeypatch.setattr(type(trainer.accelerator), "process_index", process)
        for epoch, number in ((0, 1), (0, 2), (1, 0)):
            trainer.step(*batch(2), epoch, number)
            seeds.append(torch.initial_seed())
    assert len(set(seeds)) == 9
    monkeypatch.undo()
    make_trainer(base).step(*batch(2), 1, 0)
    assert torch.initial_seed() == seeds[2]


def test_every_epoch_has_another_order_of_images_and_another_augmentation(base, monkeypatch):
    trainer, order, epochs, augmented = make_trainer(base, crop_padding=2, hflip=0.5, mixup=0.4), [], [], []
    augment, batches = trainer.augment, InMemory.batches

    def record(data, indices, epoch):
        order.append(torch.cat(list(indices)).tolist())
        epochs.append(epoch)
        return batches(data, indices, epoch)

    def augment_same(*_):
        images, labels = augment(*batch())
        augmented.extend((images, labels))
        return images, labels

    monkeypatch.setattr(InMemory, "batches", record)
    trainer.augment = augment_same
    for epoch in range(3):
        trainer.progress = Progress(epoch)
        trainer.train_epoch()
    assert epochs == [0, 1, 2]
    assert [sorted(rows) for rows in order] == [[*range(32)]] * 3
    assert len({tuple(rows) for rows in order}) == 3
    steps = [images.flatten() for images in augmented[::2]], [labels.flatten() for labels in augmented[1::2]]
    assert [len(torch.stack(found).unique(dim=0)) for found in steps] == [12, 12], "crops and flips; mixup"


def test_images_are_erased_and_mixed_by_timm(base):
    images, labels = torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8), torch.arange(8) % 3
    normalized, trainer = images / 255, make_trainer(base, mixup=0.4, cutmix=1.0)
    trainer.evaluation.normalize = lambda images: images / 255
    seed_all(7)
    mixed = trainer.augment(images, labels)
    seed_all(7)
    torch.randint(1, (8, 1)), torch.randint(1, (8, 1)), torch.rand(8, 1)  # crops and flips precede it
    expected = Mixup(0.4, 1.0, label_smoothing=0.0, num_classes=3)(normalized.clone(), labels)
    assert all(map(torch.equal, mixed, expected))
    erased, same = make_trainer(base, reprob=1.0).augment(normalized, labels)
    assert torch.equal(same, labels)
    assert (erased != normalized).flatten(1).any(1).all()


def test_mixed_precision_saves_a_plain_network(base):
    trainer, seen = make_trainer(base, amp="bfloat16", channels_last=True), []
    trainer.model.layer1.register_forward_hook(lambda module, args, output: seen.extend([*args, output]))
    trainer.step(*batch(2), 0, 0)
    assert trainer.get_network_to_save()(batch(2)[0]).dtype == torch.float32
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    assert seen[1].dtype == torch.bfloat16
    assert {value.dtype for value in trainer.model.parameters()} == {torch.float32}
    assert make_accelerator(replace(base, amp=None)).mixed_precision == "no", "by default on the CPU"


@pytest.mark.slow
def test_a_compiled_run_has_the_same_results(base, tmp_path):
    plain = run_training(replace(base, output=tmp_path / "plain"), log=quiet)
    compiled = run_training(replace(base, compile=True), log=quiet)
    assert compiled.final.loss == pytest.approx(plain.final.loss, abs=0.05)
    assert compiled.final.top1 > 90


def test_blocks_are_inserted_from_the_settings(base):
    def block(**options):
        (found,) = va.inserted_blocks(build_network(replace(base, **options), SOURCE, quiet).model).values()
        return found

    found = block(block_options=("num_heads=2", "position=Rope()")).attn
    assert (found.num_heads, type(found.position).__name__) == (2, "RotaryEncoding")
    assert block(block=OURS, block_options="num_heads=4").attn.num_heads == 4
    assert "layer1.0  Att" in str(build_network(replace(base, at="before", model="resnet20"), SOURCE, quiet))
    by_index = build_network(replace(base, names=(), stages=1), SOURCE, quiet).model
    assert [site.partition(".")[0] for site in va.inserted_blocks(by_index)] == ["layer2"]
    assert build_network(replace(base, names=()), SOURCE, quiet).report is None


def test_a_network_has_the_size_of_the_data_and_the_statistics_and_crop_of_the_settings(base):
    plain = replace(base, model="test_resnet", names=(), img_size=None, mean=(0.5,) * 3, std=(0.2,) * 3)
    for crop, fraction in (("pad", 1.0), ("resized", 0.95)):
        found = build_network(replace(plain, crop=crop, drop_path=0.3), SOURCE, quiet)
        config = found.model.pretrained_cfg
        assert (config["input_size"], config["mean"], config["std"]) == ((3, 16, 16), (0.5,) * 3, (0.2,) * 3)
        assert config["crop_pct"] == fraction
        assert max(getattr(module, "drop_prob", 0.0) or 0.0 for module in found.model.modules()) == pytest.approx(0.3)


def test_a_frozen_backbone_is_unchanged_and_its_adapter_restores_the_network(base, tmp_path):
    torch.manual_seed(5)
    given, file = create_model(base.model, num_classes=7).state_dict(), tmp_path / "base.pth"
    torch.save(given, file)
    settings = replace(base, epochs=2, weights=file, reset_head=True, freeze_backbone=True, ema=0.5, amp="bfloat16")
    run_training(settings, log=quiet)
    found = va.load_model(base.output).state_dict()
    assert changed_keys(given, found) == {"fc.weight", "fc.bias"}
    # The adapter of the best epoch requires only the initial checkpoint.
    model = create_model(base.model, num_classes=3)
    va.load_checkpoint_(model, file, skip=["fc.*"])
    va.load_adapter_(model, base.output / "adapter.safetensors")
    assert_same(model.state_dict(), found)
    run_training(replace(settings, names=(), output=tmp_path / "plain"), log=quiet)
    assert changed_keys(given, va.load_model(tmp_path / "plain").state_dict()) == {"fc.weight", "fc.bias"}
    assert not (tmp_path / "plain" / "adapter.safetensors").exists()


def test_pretrained_weights_for_other_classes_have_a_new_head(monkeypatch):
    monkeypatch.setattr(
        "vision_attn.tools.training.network.create_model", lambda name, pretrained, **how: create_model(name, **how)
    )
    settings = Settings(
        data="images", model="resnet20", pretrained=True, freeze_backbone=True, names="layer3", device="cpu"
    )
    network = build_network(settings, SOURCE, quiet)
    assert network.new_head == ("fc.*",)
    assert not any(parameter.any() for parameter in network.model.fc.parameters())
    assert all(parameter.any() for name, parameter in network.model.named_parameters() if name.endswith("conv1.weight"))


def test_a_trained_network_is_evaluated_with_its_size_statistics_and_classes(base, image_folder, tmp_path):
    result = run_training(replace(base, epochs=1, mean=(0.2, 0.3, 0.4), std=(0.5, 0.6, 0.7)), log=quiet)
    other = {"device": "cpu", "batch_size": 16}
    assert evaluate(other, base.output, log=quiet) == result.best
    assert evaluate({"data": image_folder, **other}, base.output / "model", log=quiet) == result.best
    assert evaluate({"img_size": 32, **other}, base.output, log=quiet) != result.best
    for old, new in (("blue", "zebra"), ("green", "green"), ("red", "red")):
        (tmp_path / "renamed" / "val").mkdir(parents=True, exist_ok=True)
        os.symlink(image_folder / "val" / old, tmp_path / "renamed" / "val" / new)
    with pytest.raises(ValueError, match=r"expected blue, green, red, got green, red, zebra"):
        evaluate({"data": tmp_path / "renamed", **other}, base.output, log=quiet)
    os.symlink(image_folder / "train", tmp_path / "renamed" / "train")
    with pytest.raises(DataError, match=r"^classes of .*train and .*val differ: blue, zebra "):
        run_training(Settings(model="tiny", data=tmp_path / "renamed", device="cpu"), log=quiet)


def test_evaluation_counts_every_image_once(base):
    source = noise(37, *"abcdefgh", side=4)
    config = {"input_size": (3, 4, 4), "mean": (0.5,) * 3, "std": (0.2,) * 3}
    settings = replace(base, batch_size=10)
    evaluation = Evaluation(source, settings, SimpleNamespace(config=config), make_accelerator(settings))
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 8)).train()
    score, predictions = evaluation(model)
    logits = model((torch.tensor(source.dataset.data).permute(0, 3, 1, 2) / 255 - 0.5) / 0.2).detach()
    assert torch.equal(predictions, logits.argmax(1))
    assert score.residual_ratio is None
    assert score.top1 == pytest.approx(100 * float((logits.argmax(1) == source.labels).float().mean()))
    top5 = (logits.argsort(1, descending=True)[:, :5] == source.labels[:, None]).any(1)
    assert score.top5 == pytest.approx(100 * float(top5.float().mean()))
    assert score.loss == pytest.approx(float(F.cross_entropy(logits, source.labels)), rel=1e-5)
    assert model.training

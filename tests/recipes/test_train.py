"""Training: settings, networks, training steps, and the folder of a run."""

import csv
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate.tracking import TensorBoardTracker
from PIL import Image
from small_networks import assert_same
from timm.utils import ModelEmaV3

import vision_attn as va
from vision_attn import cli
from vision_attn.networks.models import create_model
from vision_attn.recipes import compare, settings as flags, train as module
from vision_attn.recipes.runs import read_settings
from vision_attn.recipes.settings import Comparison, Evaluation, Settings, check
from vision_attn.recipes.train import build_network, evaluate, make_accelerator, make_transforms

ROOT, OURS = Path(__file__).parents[2], "vision_attn.attention.blocks:AttentionBlock2d"
CLASSES = ("blue", "green", "red")


quiet = lambda line: None  # noqa: E731


def changed_keys(state, other):
    return {key for key, value in state.items() if not torch.equal(other[key], value)}


def test_settings_are_restored_from_their_file_except_call_settings(base, tmp_path):
    file, settings = tmp_path / "settings.json", replace(base, seed=3, amp="no")
    file.write_text(json.dumps(asdict(settings), default=str))
    assert read_settings(tmp_path, ()) == replace(settings, output=None)
    file.write_text(json.dumps({"lr": 1e-3, "epochs": 5, "names": ["layer3"]}))
    assert read_settings(file, ()) == Settings(lr=0.001, epochs=5, names=("layer3",))
    file.write_text(json.dumps({"block": OURS, "names": ["layer3"], "download": True}))
    found = read_settings(tmp_path, ("--block", OURS))  # code only if the caller passes it too
    assert (found.block, found.download) == (OURS, False)
    file.write_text(json.dumps({"block": OURS, "block_options": ["heads=4"], "pattern": "rows", "names": ["layer3"]}))
    assert read_settings(file, (), Comparison) == Comparison(names=("layer3",))  # has its own blocks and seeds


INVALID_FILES = [
    ('{"epoch": 3}', "unknown settings epoch"),
    ("lr", "does not contain settings"),
    ("[1]", "does not contain settings"),
    ('{"lr": "0.1"}', "lr must be float . None, got '0.1'"),
    ('{"freeze_backbone": "false"}', "freeze_backbone must be bool, got 'false'"),
    ('{"epochs": 2.5}', "epochs must be int, got 2.5"),
    ('{"epochs": true}', "epochs must be int, got True"),
    ('{"names": "layer2"}', "names must be tuple.*, got 'layer2'"),
    ('{"dataset": "hfds/someone/photos"}', "--dataset hfds/someone/photos"),
    ('{"block": "os:system"}', "--block os:system"),
]


@pytest.mark.parametrize(("text", "message"), INVALID_FILES)
def test_files_with_invalid_settings_or_code_are_rejected(text, message, tmp_path):
    (tmp_path / "settings.json").write_text(text)
    with pytest.raises(ValueError, match=f"settings.json.*{message}"):
        read_settings(tmp_path, ())


INVALID = [
    ({"warmup_epochs": 3.0}, "--warmup-epochs must be less than --epochs 3, got 3"),
    ({"weights": "a.pth", "pretrained": True}, "--weights cannot be combined with --pretrained"),
    ({"stages": (1,)}, "--stages cannot be combined with --names"),
    ({"config": Path("a"), "resume": "b"}, "--config cannot be combined with --resume RUN"),
    ({"output": None, "resume": "auto"}, "--resume auto requires --output"),
    ({"lr": math.nan}, "--lr must be at least 1e-12, got nan"),
    ({"lr": 1e9}, r"--lr must be at most 1000, got 1e\+?09|--lr must be at most 1000, got 1000000000.0"),
    ({"seed": 2**32}, r"--seed must be at most 4294967295, got 4294967296"),
    ({"seed": -1}, "--seed must be at least 0, got -1"),
    ({"epochs": 10**7}, "--epochs must be at most 1000000, got 10000000"),
    ({"weight_decay": -1.0}, r"--weight-decay must be at least 0, got -1\.0"),
    ({"mixup": 1e4}, r"--mixup must be at most 1000, got 10000\.0"),
    ({"crop_scale": 0.0}, r"--crop-scale must be at least 1e-06, got 0\.0"),
    ({"crop_scale": 2.0}, r"--crop-scale must be at most 1, got 2\.0"),
    ({"val_fraction": 0.0}, r"--val-fraction must be at least 1e-06, got 0\.0"),
    ({"hflip": -0.5}, r"--hflip must be at least 0, got -0\.5"),
    ({"reprob": 1.5}, r"--reprob must be at most 1, got 1\.5"),
    ({"layer_decay": 1.0}, r"--layer-decay must be at most 0\.999999, got 1\.0"),
    ({"model": "vit_tiny_patch16_224", "names": (), "img_size": 64}, "64×64.* needs --img-size 224"),
    ({"block_options": ("pos=Rope()",)}, "--block-options do not match --block attention: .*'pos'"),
    ({"block_options": ("num_heads=4", "num_heads=2")}, "--block-options .*'num_heads=2'"),
    ({"block_options": ("num_heads",)}, "--block-options .*'num_heads'"),
    ({"block_options": ("context_channels=4",)}, "--block-options must not contain context_channels"),
    ({"block": "vision_attn:Nothing"}, "--block .*MODULE:CLASS, got 'vision_attn:Nothing'"),
    ({"pattern": "row"}, "pattern must be one of 'full', 'rows', .* got 'row'"),
    ({"pattern": "Windo(7)"}, r"pattern must be one of .*Window.* got 'Windo\(7\)'"),
    ({"pattern": "Window()"}, r"--pattern: Window\(\): .* missing .* 'size'"),
    ({"batch_size": 15, "mixup": 1.0}, "--batch-size .* 2, got 15"),
    ({"weights": "x.pth", "rename": "efficientnet"}, "--rename .*efficientnet-pytorch, got 'efficientnet'"),
    ({"rename": "efficientnet-pytorch"}, "--rename requires --weights"),
    ({"names": (), "attention_lr": 0.1}, "--attention-lr requires --stages or --names"),
    ({"opt": "lion", "lr": None}, "--lr is required for --opt lion"),
    ({"opt": "adamww", "lr": None}, "--opt: timm has no optimizer 'adamww'. Did you mean .*'adamw'"),
    ({"opt": "fusedadamw"}, "--opt fusedadamw is not available: CUDA required"),
    ({"opt": "adahessian", "lr": 0.01}, "--opt adahessian requires second derivatives"),
    ({"device": "cuda"}, "--device cuda requires a CUDA device"),
    ({"device": "tpu"}, "--device must be cpu or cuda, got 'tpu'"),
    ({"amp": "float16"}, "--amp float16 requires a CUDA device"),
    ({"freeze_backbone": True}, "--freeze-backbone requires --weights or --pretrained"),
    ({"aa": "rand-x9"}, "--aa .*rand-m9-mstd0.5, got 'rand-x9'"),
    ({"resume": "nothing"}, "--output .* --resume nothing, got .*run"),
    ({"model": None}, "--model is required: .*--model resnet18 --pretrained"),
    ({"data": None}, "--data is required: a folder of images"),
    ({"dataset": "nothing"}, "cannot read torch/nothing in .* Pass its folder as --data"),
    ({"log_with": ("wandb",)}, "--log-with wandb is not installed. Install it: pip install wandb"),
]


@pytest.mark.parametrize(("options", "message"), INVALID, ids=str)
def test_invalid_settings_are_one_line_errors(base, options, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises((ValueError, va.errors.DataError), match=message) as caught:
        module.train(replace(base, **options))
    assert "\n" not in str(caught.value)
    assert not base.output.exists()


def test_a_run_learns_and_writes_its_folder(base, image_folder):
    lines, folder = [], base.output
    finish = mock.patch.object(TensorBoardTracker, "finish", autospec=True, side_effect=TensorBoardTracker.finish)
    with finish as finished, mock.patch.object(module, "time", SimpleNamespace(perf_counter=iter(range(9)).__next__)):
        history = module.train(replace(base, log_with=("tensorboard",)), log=lines.append)
    finished.assert_called_once()
    best = module.best_epoch(history)
    assert best["eval_top1"] > 90
    assert {x.name for x in folder.iterdir()} == {".lock", "logs", "metrics.csv", "model", "settings.json", "state"}
    rows = list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    assert rows[-1] == {key: str(value) for key, value in history[-1].items()}
    assert float(rows[-1]["train_loss"]) < float(rows[0]["train_loss"])
    assert [row["images_per_second"] for row in history] == [4 * 16] * 3  # each epoch takes a second
    assert lines[0].startswith("1 block inserted")
    assert lines[1] == "tiny: 1,779 parameters, input 3×16×16, 3 classes, 72 training and 24 validation images"
    assert list((folder / "logs").rglob("events.out.tfevents*"))
    assert lines[-1].endswith(f"\nvision-attn compare --config {folder} --output {folder / 'compare'}")

    # The pages show the output of a run, with other numbers.
    def shape(line):
        return re.sub(r"\S*\d\S*", "#", line.removesuffix(" …"))

    found = [shape(line) for line in "\n".join(lines).replace("tiny: ", "").splitlines()]
    for page in ("README.md", "docs/quickstart.md"):
        (shown,) = re.findall(r"\ntf_efficientnet_lite0: (.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
        for line in map(shape, shown.replace("\n…", "").splitlines()):
            assert any(one.startswith(line) for one in found), line

    # The saved network has the scores in the log, with and without blocks.
    model, plain = va.load_model(folder), va.load_model(folder)
    assert model.classes == CLASSES
    for block in va.inserted_blocks(plain).values():
        torch.nn.init.zeros_(block.gate)
    images = [Image.open(path) for path in sorted((image_folder / "val").glob("*/*.png"))]
    images, labels = torch.stack([*map(model.transform, images)]), torch.arange(3).repeat_interleave(8)
    scores, others = model(images), plain(images)
    at = lines.index(f"best epoch, {best['epoch']}, in {folder / 'model'}:")
    top1, without = (100 * float((x.argmax(1) == labels).float().mean()) for x in (scores, others))
    losses = [float(F.cross_entropy(x, labels).detach()) for x in (scores, others)]
    assert lines[at + 1] == f"top-1 {top1:.2f} %, loss {losses[0]:.4f}"
    assert best["eval_top1"] == pytest.approx(top1)
    changed = int((scores.argmax(1) != others.argmax(1)).sum())
    ablation = f"top-1 {without:.2f} %, loss {losses[1]:.4f} (top-1 {without - top1:+.2f})"
    assert lines[at + 2] == f"ablation, with the blocks disabled: {ablation}; {changed} of 24 predictions change"
    told = []
    assert evaluate(Evaluation(run=str(folder), device="cpu"), log=told.append)["loss"] == best["eval_loss"]
    assert told[1:] == lines[at + 1 : at + 3]
    with pytest.raises(ValueError, match=f"{folder} .*--resume {folder}"):
        module.train(replace(base, seed=1), log=quiet)


def test_the_command_of_a_comparison_compares_the_block_of_the_run(base, tmp_path, monkeypatch):
    lines, output = [], tmp_path / "new" / "a run"
    options = {"block": "TransformerBlock2d", "pattern": "rows", "block_options": ("num_heads=2",)}
    other = replace(base, output=output, seed=3, epochs=1, **options)
    module.train(other, log=lines.append)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "settings.json").write_text("[1]")  # of another program
    assert [module.runs.has_blocks(of) for of in (str(output), f"{output}/model/x", "net.pth", None)] == [1, 1, 0, 0]
    command = lines[-1].splitlines()[1]
    module.train(
        replace(other, names=(), stages=(), block_options=(), pattern=None, output=tmp_path / "b"), log=lines.append
    )
    assert lines[-1].startswith("top-1 ")
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    with mock.patch.object(compare, "trials") as trials:
        compare.compare(cli.parse(Comparison, sys.argv[2:], "compare"))
    assert trials.call_args.kwargs["note"].endswith(f" Command: `{command}`")
    plain, trained = trials.call_args.args[1].values()
    assert (plain["names"], plain["lr"]) == ((), base.lr)
    assert {"names": base.names, **options}.items() <= trained.items()


def test_scores_are_means_over_all_images_also_in_batches_of_different_sizes(base):
    logits, labels = 5 * torch.eye(3)[[0, 1, 1, 2, 0]], torch.tensor([0, 1, 2, 2, 1])
    batches = zip(logits.split(3), labels.split(3), strict=True)
    scores, predictions = module.score(torch.nn.Identity(), batches, make_accelerator(base))
    assert (scores["top1"], predictions.tolist()) == (60, [0, 1, 1, 2, 0])
    assert scores["loss"] == pytest.approx(F.cross_entropy(logits, labels).item())


def test_the_network_of_the_best_epoch_is_saved(base, monkeypatch):
    scores, lines = ({"loss": 0.5, "top1": top1} for top1 in (50.0, 70.0, 60.0, 70.0, 80.0)), []
    monkeypatch.setattr(module, "score", lambda *given: ((one := next(scores)), torch.full((24,), one["top1"])))
    with mock.patch.object(va, "save_model", wraps=va.save_model) as save:
        module.train(base, log=lines.append)
    assert (save.call_count, "(top-1 +10.00); 24 of 24 predictions change" in lines[-2]) == (2, True), "the best of 3"


def test_runs_without_an_output_are_numbered(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train-7", "train-old"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    with pytest.raises(ValueError, match=r"batch-size must be at most 72, the number of training images, .*got 100"):
        module.train(replace(base, output=None, batch_size=100), log=quiet)
    assert not (tmp_path / "runs" / "train-8").exists(), "an invalid run does not use a number"
    lines = []
    module.train(replace(base, output=None, epochs=1, batch_size=None, mixup=1.0), log=lines.append)
    assert (tmp_path / "runs" / "train-8" / "settings.json").exists()
    assert "1 epoch of 9 steps of 8 images on cpu, in runs/train-8" in lines, "pairs, at least eight steps per epoch"


@pytest.mark.parametrize(("count", "batch"), [(1100, 128), (12, 4), (104, 13)])
def test_a_step_has_4_to_128_images_by_default(base, monkeypatch, count, batch):
    classes, images, evaluated = module.open_data(base)
    images.rows = [number % 72 for number in range(count)]
    monkeypatch.setattr(module, "open_data", lambda settings: (classes, images, evaluated))
    monkeypatch.setattr(module, "make_loader", loader := mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        module.train(replace(base, batch_size=None), log=quiet)
    assert loader.call_args.args[2] == batch


def spy(monkeypatch, name, owner=module):
    """Record the results of a function of the recipe, or of a method."""
    made, original = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given, **how: made.append(original(*given, **how)) or made[-1])
    return made


def test_the_optimizer_has_the_name_and_numbers_of_the_settings(base, monkeypatch):
    made = spy(monkeypatch, "create_optimizer_v2")
    module.train(replace(base, opt="adamw", lr=0.003, weight_decay=0.02, epochs=1), log=quiet)
    assert isinstance(made[0], torch.optim.AdamW)
    assert {group["weight_decay"] for group in made[0].param_groups} == {0.02, 0.0}
    module.train(replace(base, output=base.output.with_name("sgd"), lr=None, epochs=1), log=quiet)
    assert {(group["momentum"], group["nesterov"]) for group in made[1].param_groups} == {(0.9, True)}
    before = read_settings(base.output.with_name("sgd"), ())  # defaults follow from the settings of the next run
    assert [(s.opt, s.lr) for s in (before, check(before))] == [(None, None), ("sgd", 0.1)]
    plain = Settings(data=Path("x"), model="tiny")
    found = [check(replace(plain, **of)).lr for of in ({}, {"weights": "a.pth"}, {"opt": "adamw"}, {"lr": 3.0})]
    assert found == [0.1, 0.01, 0.001, 3.0]
    frozen = check(replace(plain, pretrained=True, freeze_backbone=True))  # only new parameters are trained
    assert (frozen.opt, frozen.lr) == ("adamw", 0.001)


def before_each_step(monkeypatch, action):
    """Call ``action`` with the epoch and the step."""
    seed_all = module.seed_all
    monkeypatch.setattr(module, "seed_all", lambda *given: (len(given) == 4 and action(given[1:3]), seed_all(*given)))


def at_step(monkeypatch, epoch, step, action):
    """Call ``action`` at the start of a step."""
    before_each_step(monkeypatch, lambda at: at == (epoch, step) and action())


def test_learning_rates_warm_up_follow_the_cosine_and_keep_their_ratio(base, monkeypatch):
    made, rates = spy(monkeypatch, "create_optimizer_v2"), []

    def record(step):
        if step != (0, 0):  # the rates of the step before
            rates.append({group["name"]: group["lr"] for group in made[0].param_groups})

    before_each_step(monkeypatch, record)
    options = {"model": "test_resnet", "warmup_epochs": 1, "attention_lr": 0.2, "layer_decay": 0.5, "img_size": 32}
    history = module.train(replace(base, **options), log=quiet)
    for done, found in enumerate(rates):
        warming = 0.0005 + done / 4 * (0.05 - 0.0005)  # starts at 1/100 of the learning rate
        lr = warming if done < 4 else 0.05 / 2 * (1 + math.cos(math.pi * (done - 4) / 8))
        assert found["attention, decay"] == found["attention, no decay"] == pytest.approx(4 * lr)
        layers = sorted({rate for name, rate in found.items() if name.startswith("backbone")}, reverse=True)
        assert layers == pytest.approx([lr / 2**depth for depth in range(len(layers))])
        assert len(layers) > 3
    assert history[1]["lr"] == pytest.approx(0.05 / 2 * (1 + math.cos(math.pi * 3 / 8)))


def test_a_step_clips_gradients_and_smooths_labels(base, monkeypatch):
    networks = spy(monkeypatch, "build_network")
    monkeypatch.setattr(module.F, "cross_entropy", loss := mock.Mock(wraps=F.cross_entropy))
    options = {"weight_decay": 0.0, "clip_grad": 1e-3, "label_smoothing": 0.3, "batch_size": 72, "epochs": 1}
    starts = []

    def weights(step=None):
        return torch.nn.utils.parameters_to_vector(networks[0][0].parameters()).detach().clone()

    before_each_step(monkeypatch, lambda step: starts.append(weights()))
    module.train(replace(base, **options), log=quiet)
    assert loss.call_args_list[0].kwargs == {"label_smoothing": 0.3}
    # The first step with Nesterov momentum is 1.9 times the gradient, whose norm is at most 1e-3.
    assert (weights() - starts[0]).norm().item() == pytest.approx(0.05 * 1.9 * 1e-3, rel=2e-3)


def test_the_training_loss_is_the_mean_over_the_steps_of_an_epoch(base):
    options = {"batch_size": 72, "lr": 1e-12, "crop_scale": 1.0, "hflip": 0.0, "epochs": 2}
    one, other = module.train(replace(base, **options), log=quiet)
    assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-5)


def test_accumulated_gradients_are_those_of_the_complete_batch(base, monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "100")  # the settings take precedence
    found = []
    for parts in (1, 4):
        # No batch norms, whose statistics depend on the micro-batch.
        options = {"model": "test_efficientnet_gn", "names": ("blocks.1",), "grad_accum_steps": parts, "epochs": 1}
        run = replace(base, output=tmp_path / str(parts), lr=0.01, clip_grad=None, **options)
        found.append((module.train(run, log=quiet)[0]["train_loss"], va.load_model(run.output).state_dict()))
    (loss, one), (other, four) = found
    assert loss == pytest.approx(other, rel=1e-4)
    torch.testing.assert_close(four, one, rtol=1e-3, atol=1e-4)


def test_random_numbers_differ_between_seeds_epochs_steps_and_processes(base, monkeypatch, tmp_path):
    seeds = []
    monkeypatch.setattr(module, "seed_all", lambda *numbers: len(numbers) == 4 and seeds.append(numbers))
    module.train(replace(base, epochs=2), log=quiet)
    assert seeds == [(0, epoch, step, 0) for epoch in range(2) for step in range(4)]
    from vision_attn.recipes.data import seed_all

    found = set()
    for numbers in ((0, 1, 2, 0), (1, 1, 2, 0), (0, 2, 1, 0), (0, 1, 2, 1)):
        seed_all(*numbers)
        found.add((torch.initial_seed(), np.random.rand()))
    assert len(found) == 4


def test_the_moving_average_is_evaluated_and_saved(base, monkeypatch):
    made, built = spy(monkeypatch, "ModelEmaV3"), spy(monkeypatch, "build_network")
    with mock.patch.object(ModelEmaV3, "update", autospec=True, side_effect=ModelEmaV3.update) as update:
        module.train(replace(base, ema=0.999, epochs=3), log=quiet)
    assert [call.kwargs["step"] for call in update.mock_calls] == [*range(12)]
    assert isinstance(made[0], ModelEmaV3)
    assert made[0].get_decay(2) < 0.5 < made[0].get_decay(10**6) == 0.999
    saved = va.load_model(base.output).state_dict()
    assert_same(saved, made[0].module.state_dict())
    assert changed_keys(saved, built[0][0].state_dict())


def test_images_are_mixed_by_timm_and_erased(base, monkeypatch):
    made = spy(monkeypatch, "__call__", module.Mixup)
    monkeypatch.setattr(module.F, "cross_entropy", loss := mock.Mock(wraps=F.cross_entropy))
    module.train(replace(base, cutmix=1.0, epochs=1), log=quiet)
    mixed = [call.args[1] for call in loss.call_args_list if call.args[1].dim() == 2]
    assert [tuple(labels.shape) for labels in mixed] == [(16, 3)] * 4
    assert all(torch.equal(labels, found) for labels, (_, found) in zip(mixed, made, strict=True))
    assert all((labels == 0).any(1).all() for labels in mixed), "smoothed only by the loss"
    config = create_model("tiny").pretrained_cfg | {"input_size": (3, 16, 16)}
    image = Image.new("RGB", (16, 16), (200, 100, 50))
    train, evaluation = make_transforms(replace(base, reprob=1.0, crop_scale=1.0, hflip=0.0), config)
    assert not torch.equal(train(image), evaluation(image))
    assert torch.equal(make_transforms(replace(base, crop_scale=1.0, hflip=0.0), config)[0](image), evaluation(image))


def test_mixed_precision_saves_a_plain_network(base, monkeypatch):
    built, seen = spy(monkeypatch, "build_network"), []
    watch = lambda module, args, output: seen.extend([*args, output])  # noqa: E731
    at_step(monkeypatch, 0, 0, lambda: built[0][0].layer1.register_forward_hook(watch))
    (row,) = module.train(replace(base, amp="bfloat16", channels_last=True, epochs=1), log=quiet)
    assert evaluate(Evaluation(run=str(base.output), device="cpu"), log=quiet)["loss"] == row["eval_loss"]
    maps = [x for x in seen if len(x) == 16]
    assert maps[0].is_contiguous(memory_format=torch.channels_last)
    assert maps[1].dtype == torch.bfloat16
    assert {value.dtype for value in va.load_model(base.output).parameters()} == {torch.float32}


def test_mixed_precision_is_not_the_default_on_the_cpu_and_does_not_change_in_a_process(base):
    assert make_accelerator(replace(base, amp=None)).mixed_precision == "no"
    with pytest.raises(ValueError, match="mixed_precision='bf16'"):
        make_accelerator(replace(base, amp="bfloat16"))


@pytest.mark.slow
def test_a_compiled_run_has_the_same_results(base, tmp_path):
    plain = module.train(replace(base, output=tmp_path / "plain"), log=quiet)
    compiled = module.train(replace(base, compile=True), log=quiet)
    assert compiled[-1]["eval_loss"] == pytest.approx(plain[-1]["eval_loss"], abs=0.05)


def build(settings, side=16, log=quiet):
    return build_network(settings, CLASSES, side, log, resumed=False)[0]


def test_blocks_are_inserted_from_the_settings(base):
    def block(**options):
        (found,) = va.inserted_blocks(build(replace(base, **options))).values()
        return found

    found = block(block_options=("num_heads=2", "position=Rope()"), pattern="rows").attn
    assert (found.num_heads, type(found.position).__name__, found.pattern) == (2, "RotaryEncoding", "rows")
    assert block(pattern="Window(4)").attn.pattern == va.Window(4)
    assert block(block=OURS, block_options=("num_heads=4",)).attn.num_heads == 4
    lines = []
    build(replace(base, at="before", model="resnet20"), log=lines.append)
    assert "layer1.0  Att" in lines[0]
    by_index = build(replace(base, names=(), stages=(1,)))
    assert [site.partition(".")[0] for site in va.inserted_blocks(by_index)] == ["layer2"]
    assert not va.inserted_blocks(build(replace(base, names=())))


def test_a_network_has_the_size_of_the_data_and_no_crop_for_small_images(base):
    plain = replace(base, model="test_resnet", names=(), img_size=None)
    for side, fraction in ((48, 1.0), (64, 1.0), (65, 0.95)):
        config = build(plain, side).pretrained_cfg
        assert (config["input_size"], config["crop_pct"]) == ((3, side, side), fraction)


def test_a_frozen_backbone_is_unchanged_and_its_adapter_restores_the_network(base, tmp_path):
    torch.manual_seed(5)
    given, file = create_model(base.model, num_classes=7).state_dict(), str(tmp_path / "base.pth")
    torch.save(given, file)
    settings = replace(base, epochs=2, weights=file, reset_head=True, freeze_backbone=True, ema=0.5, amp="bfloat16")
    module.train(settings, log=quiet)
    found = va.load_model(base.output).state_dict()
    assert changed_keys(given, found) == {"fc.weight", "fc.bias"}
    # The adapter of the best epoch requires only the initial checkpoint.
    model = create_model(base.model, num_classes=3)
    va.load_checkpoint_(model, file, skip=["fc.*"])
    va.load_adapter_(model, base.output)
    assert_same(model.state_dict(), found)
    assert {*va.load_checkpoint_(model, base.output).loaded} == found.keys()
    module.train(replace(settings, names=(), output=tmp_path / "plain"), log=quiet)
    assert changed_keys(given, va.load_model(tmp_path / "plain").state_dict()) == {"fc.weight", "fc.bias"}
    assert not (tmp_path / "plain" / "adapter.safetensors").exists()
    torch.save(create_model(base.model, num_classes=3).state_dict(), file)
    with pytest.raises(ValueError, match="--freeze-backbone leaves nothing to train"):
        module.train(replace(settings, names=(), reset_head=False, output=tmp_path / "none"), log=quiet)


def test_weights_for_classes_of_other_names_require_a_new_head(base, tmp_path):
    folder = va.save_model(create_model(base.model, num_classes=3), tmp_path / "net", classes=["red", "green", "blue"])
    for weights in (folder, shutil.copy(folder / "model.safetensors", tmp_path)):
        settings = replace(base, weights=str(weights))
        with pytest.raises(
            ValueError, match=r"--weights are for the classes red, green, blue, got blue, green, red\. "
        ):
            build(settings)
    build(replace(settings, reset_head=True))


def test_pretrained_weights_for_other_classes_have_a_new_head(base, monkeypatch):
    create = mock.Mock(side_effect=lambda name, pretrained, **how: create_model(name, **how))
    monkeypatch.setattr(module, "create_model", create)
    settings = replace(base, model="resnet20", pretrained=True, freeze_backbone=True, names=("layer3",))
    model, new = build_network(settings, CLASSES, 32, quiet, resumed=False)
    assert (new, create.call_args.kwargs["pretrained"]) == (["fc.*"], True)
    assert not any(parameter.any() for parameter in model.fc.parameters())
    assert all(parameter.any() for name, parameter in model.named_parameters() if name.endswith("conv1.weight"))
    same = [*map(str, range(model.pretrained_cfg["num_classes"]))]
    with pytest.warns(UserWarning, match=f"is kept, because it has {len(same)} classes, too. Pass --reset-head"):
        assert build_network(settings, same, 32, quiet, resumed=False)[1] == []


def test_a_trained_network_is_evaluated_with_its_size_and_classes(base, image_folder, tmp_path):
    base = replace(base, data=shutil.copytree(image_folder, tmp_path / "data"))
    best = module.best_epoch(module.train(replace(base, epochs=1), log=quiet))

    def score(folder=base.output, **options):
        return evaluate(Evaluation(run=str(folder), device="cpu", batch_size=16, **options), log=quiet)["loss"]

    shutil.copy(next(base.data.glob("train/red/*")), base.data / "train" / "green" / "another.png")  # without a warning
    assert score() == best["eval_loss"]
    reordered, order = va.load_model(base.output), [2, 0, 1]
    for parameter in reordered.get_submodule(reordered.pretrained_cfg["classifier"]).parameters():
        parameter.data = parameter.data[order]
    folder = va.save_model(reordered, tmp_path / "reordered", classes=[CLASSES[at] for at in order])
    assert score(folder, data=image_folder) == pytest.approx(best["eval_loss"])
    assert score(base.output / "model", data=image_folder) == best["eval_loss"]
    half = va.save_model(va.load_model(base.output).half(), tmp_path / "half")
    assert score(half, data=image_folder) == pytest.approx(best["eval_loss"], rel=0.01)
    gray = va.save_model(create_model("tiny", num_classes=3, in_chans=1), tmp_path / "gray", classes=CLASSES)
    assert evaluate(Evaluation(run=str(gray), device="cpu", data=image_folder), log=quiet)["loss"] > 0
    settings = json.loads((base.output / "settings.json").read_text())
    settings |= {"device": "cuda", "amp": "float16", "log_with": ["wandb"]}  # of another machine
    (base.output / "settings.json").write_text(json.dumps(settings))
    assert evaluate(Evaluation(run=str(base.output)), log=quiet)["loss"] == best["eval_loss"]
    two = [shutil.copytree(image_folder / "val", tmp_path / f"-{x}", ignore=shutil.ignore_patterns(x)) for x in CLASSES]
    losses = [score(data=folder) for folder in two]  # the images of each class are evaluated twice
    assert np.mean(losses) == pytest.approx(best["eval_loss"])
    for old, new in (("blue", "zebra"), ("green", "green"), ("red", "red")):
        (tmp_path / "renamed" / "val").mkdir(parents=True, exist_ok=True)
        os.symlink(image_folder / "val" / old, tmp_path / "renamed" / "val" / new)
    with pytest.raises(ValueError, match=r"the classes of .*, blue, green, red, got green, red, zebra"):
        score(data=tmp_path / "renamed")
    other = va.save_model(create_model("tiny", num_classes=2), tmp_path / "other")
    with pytest.raises(ValueError, match=r"the classes of .*, 0, 1, got blue, green, red"):
        score(other, data=image_folder)
    os.symlink(image_folder / "train", tmp_path / "renamed" / "train")
    with pytest.raises(va.errors.DataError, match=r"^classes of training and validation images differ: blue, zebra "):
        module.train(Settings(model="tiny", data=tmp_path / "renamed", device="cpu", output=tmp_path / "x"), log=quiet)


@pytest.mark.slow
def test_a_copy_of_the_recipe_with_a_few_changed_lines_trains_resumes_and_is_used(image_folder, tmp_path):
    """As documented: copy the file, change the loss and the augmentation, train, resume and predict."""
    source = Path(module.__file__).read_text()
    loss = "F.binary_cross_entropy_with_logits(forward(x).float(), F.one_hot(y, len(classes)).float())"
    changes = {"F.cross_entropy(forward(x).float(), y, label_smoothing=s.label_smoothing)": loss}
    for old, new in {**changes, "v2.RandomHorizontalFlip(s.hflip)])": "v2.RandomVerticalFlip(s.hflip)])"}.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    (tmp_path / "my_train.py").write_text(source)
    words = f"--data {image_folder} --model resnet20 --names layer3 --batch-size 24 --device cpu --workers 0 -o run"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def run(*line):
        done = subprocess.run([sys.executable, *line], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert "epoch 1/1" in run("my_train.py", *words.split(), "--epochs", "1")
    assert "resumed at epoch 2" in run("my_train.py", "--resume", "run", "--epochs", "2")
    assert run("-m", "vision_attn", "predict", "run", str(image_folder / "val" / "red" / "0.png")).count("%") == 3
    assert "largest difference" in run("-m", "vision_attn", "export", "run", "-o", "net.pt2")


#: Defaults of flags, except None, False, zero and empty tuples. The result of a run depends on its defaults.
TRAINING = {
    "dataset": "folder", "train_split": "train", "val_split": "validation", "at": "after", "block": "attention",
    "epochs": 30, "weight_decay": 5e-4, "grad_accum_steps": 1, "crop_scale": 0.08, "hflip": 0.5,
}  # fmt: skip
VARIANTS = {"variants": ("plain", "convolution", "se", "attention"), "seeds": (0, 1, 2, 3, 4), "backend": "loky"}
DEFAULTS = {
    Settings: TRAINING, Comparison: TRAINING | VARIANTS, Evaluation: {}, flags.Prediction: {"top": 5, "batch_size": 32},
    flags.Export: {"dynamic": ("batch",), "normalize": True}, flags.Exploration: {"output": Path("report.html")},
    flags.Demo: {"output": Path("demo-output"), "steps": 400}, flags.Inspection: {"pattern": "full"},
}  # fmt: skip


@pytest.mark.parametrize("kind", DEFAULTS, ids=lambda kind: kind.__name__)
def test_flags_have_these_defaults(kind):
    found = {field.name: field.default for field in fields(kind) if field.default is not MISSING}
    flags.check_values(SimpleNamespace(**found))
    assert kind.__dataclass_params__.frozen
    assert {name: value for name, value in found.items() if value not in (None, False, ())} == DEFAULTS[kind]


def test_every_setting_has_a_help_text():
    names, source = [field.name for field in fields(Settings)], Path(check.__code__.co_filename).read_text()
    body = source[source.index("class Settings") : source.index("class Comparison")].splitlines()
    for name in names:
        (at,) = (at for at, line in enumerate(body) if line.strip().startswith(f"{name}: "))
        assert "  # " in body[at] or body[at - 1].strip().startswith("# "), f"{name} has no help"

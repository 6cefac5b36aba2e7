"""The example scripts run with the commands of their headers, on small data."""

import importlib
import itertools
import json
import re
import runpy
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import vision_attn as va
from vision_attn import cli
from vision_attn.networks.models import create_model
from vision_attn.recipes.data import open_data, open_image
from vision_attn.recipes.runs import from_json
from vision_attn.recipes.train import build_network

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = ROOT / "examples" / "experiments"

#: Arguments that reduce each example to a short run.
EXAMPLES = {
    "train_cifar.py": "--epochs 6 --batch-size 8 --lr 0.05",
    "cifar.py": "--epochs 6 --batch-size 8 --seeds 0 1 --lr 0.05",
    "classify.py": "",
    "evidence.py": "--epochs 1 --seeds 0 --jobs 1",
    "recall.py": "--variants linear matching --seeds 0 --steps 20 --jobs 1",
    "shredded.py": "--variants borders solver plain separate-cost-volume matching --seeds 0 --steps 1 --jobs 1",
    "tiles.py": "--variants solver heads-1 two-blocks-1 --seeds 0 --steps 1 --jobs 1",
    "mosaic.py": "--variants nearest-neighbor matching --seeds 0 --steps 1 --thaw 1 --jobs 1",
    "stereo.py": "--variants cost-volume matching --seeds 0 --steps 1 --jobs 1",
    "one_shot_video.py": "--seeds 0 --steps 1 --jobs 1 --device cpu",
    "denoise.py": "--sigmas 50 --seeds 0 1 --steps 1 --variants plain convolution",
    "finetuning.py": "--variants plain attention --regimes frozen --seeds 0 --steps 1 --jobs 1 --device cpu",
    "color_by_reference.py": "--steps 1 --jobs 1 --seeds 0",
    "readme_picture.py": "",
    "street_segmentation.py": "--variants plain attention --seeds 0 --steps 1 --jobs 1 --scratch --device cpu",
}
EXAMPLES = {name: flags.split() for name, flags in EXAMPLES.items()}


def save(path, pixels, **options):
    """Save an image in a new folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, np.uint8)).save(path, **options)


def results_of(example, folder, *flags):
    """Run an experiment, and return its results by variant and seed."""
    example.main([*EXAMPLES[f"{example.__name__}.py"], *map(str, flags), "--output", str(folder)])
    return json.loads((folder / "runs.json").read_text())["runs"]


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Return a function that runs an example as a program in this process, and returns exit code, stdout and stderr."""

    def run_here(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, (*EXAMPLES[name], *arguments))])
        capsys.readouterr()
        code = None
        try:
            path = EXPERIMENTS / name if (EXPERIMENTS / name).exists() else ROOT / "examples" / name
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return (1, out, err + code) if isinstance(code, str) else (code or 0, out, err)  # as the interpreter does

    return run_here


@pytest.fixture
def load(monkeypatch):
    """Return a function that imports an example and sets its constants and functions for the test."""

    def load(name, **values):
        for attribute, value in values.items():
            monkeypatch.setattr(f"{name}.{attribute}", value)
        return importlib.import_module(name)

    return load


pytestmark = pytest.mark.slow
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def few_timed_steps(monkeypatch):
    monkeypatch.setattr("experiments.ROUNDS", 5)


def save_photographs(folder, pixels):
    """Save 40 images of 32×32 for each split, whose channels are a function of column, row and number."""
    column, row = np.meshgrid(np.arange(32), np.arange(32))
    for number, split in itertools.product(range(40), ("train", "test")):
        save(folder / split / "class" / f"{number:02}.png", np.stack(pixels(column, row, np.full_like(row, number)), 2))


def interrupted_in_the_second_epoch():
    effects = itertools.chain([mock.DEFAULT], itertools.repeat(ZeroDivisionError))
    return mock.patch.object(torch, "save", mock.Mock(wraps=torch.save, side_effect=effects))


@pytest.fixture
def cifar(image_folder, tmp_path):
    """Return the arguments for a folder of images like that of CIFAR, with a test split."""
    for name, split in (("train", "train"), ("test", "val")):
        (tmp_path / name).symlink_to(image_folder / split)
    return "--data", tmp_path, "--device"


def test_every_example_is_tested():
    paths = [*(ROOT / "examples").glob("*.py"), *EXPERIMENTS.glob("*.py")]
    scripts = {path.name for path in paths if not path.read_text().startswith("# %%")}
    # The last one draws photographs of scikit-image.
    shared = {"border_solver.py", "controls.py", "experiments.py", "recall_task.py", "pieces_picture.py"}
    assert scripts - shared == set(EXAMPLES)  # all other scripts are tutorials, which the tests of notebooks cover


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # raised in a thread without a CUDA context
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])])
def test_train_cifar_trains_and_resumes(cifar, tmp_path, run_here, device):
    flags = *cifar, device, "--output"
    code, out, err = run_here("train_cifar.py", *flags, tmp_path / "complete")
    assert (code, err, out.count("3 blocks inserted")) == (0, "", 1)
    assert float(re.search(r"top-1 ([\d.]+) %", out)[1]) > 50, "three colors"
    with interrupted_in_the_second_epoch(), pytest.raises(ZeroDivisionError):
        run_here("train_cifar.py", *flags, tmp_path / "resumed")
    code, _, err = run_here("train_cifar.py", *flags, tmp_path / "resumed", "--lr", "0.1")
    assert (code, "has a run with other settings: " in err) == (2, True)
    code, again, _ = run_here("train_cifar.py", *flags, tmp_path / "resumed")
    assert (code, "epoch 1/6" in again, "epoch 2/6" in again) == (0, False, True)
    if device == "cpu":
        assert again.splitlines()[-1] == out.splitlines()[-1]
    code, plain, _ = run_here("train_cifar.py", *flags, tmp_path / "plain", "--block", "none", "--epochs", "1")
    assert (code, "inserted" in plain) == (0, False)
    code, _, err = run_here("train_cifar.py", *flags, tmp_path / "diverged", "--lr", "1e30")
    assert (code, "the loss is nan. Use a lower --lr" in err) == (1, True)


def test_cifar_compares_networks_and_resumes_a_run(cifar, tmp_path, run_here):
    flags = *cifar, "cpu", "--output"
    code, out, err = run_here("cifar.py", *flags, tmp_path / "complete")
    assert (code, err, out.count("3 blocks inserted")) == (0, "", 4)
    complete = json.loads((tmp_path / "complete/runs.json").read_text())["runs"]
    assert list(complete) == ["plain", "convolution", "attention"]
    assert complete["attention"]["0"]["parameters"] > complete["plain"]["0"]["parameters"]
    assert complete["attention"]["0"]["top-1 %"] > 50, "three colors"

    single = (*flags, tmp_path / "resumed", "--variants", "attention")
    with interrupted_in_the_second_epoch():
        assert run_here("cifar.py", *single)[0] == 1
    code, _, err = run_here("cifar.py", *single, "--lr", "0.1")  # other settings must not resume this run
    assert code == 1
    assert re.search(r"attention-0\.pt belongs to a run with other settings: .*got .*'lr': 0\.05.* Pass another", err)
    code, out, _ = run_here("cifar.py", *single)
    assert (code, "seed 0, epoch 1/6" in out, "seed 0, epoch 2/6" in out) == (0, False, True)
    resumed = json.loads((tmp_path / "resumed/runs.json").read_text())["runs"]["attention"]
    assert resumed["0"]["top-1 %"] == pytest.approx(complete["attention"]["0"]["top-1 %"])


def test_cifar_runs_its_controls_and_stops_if_the_loss_is_not_finite(cifar, tmp_path, run_here):
    controls = ["resnet32", "se-residual", "large-kernel", "averaging", "attention"]
    flags = *cifar, "cpu", "--epochs", "1", "--seeds", "0", "--variants"
    code, _, err = run_here("cifar.py", *flags, *controls, "--output", tmp_path / "controls")
    assert (code, err) == (0, "")
    summary = json.loads((tmp_path / "controls/runs.json").read_text())
    sizes = {name: by_seed["0"]["parameters"] for name, by_seed in summary["runs"].items()}
    assert list(sizes) == controls
    assert sizes.pop("resnet32") == sum(p.numel() for p in create_model("resnet32", num_classes=3).parameters())
    assert max(sizes.values()) - min(sizes.values()) < 400, "blocks of about the same size"
    code, _, err = run_here("cifar.py", *flags, "attention", "--lr", "1e30", "--output", tmp_path / "diverged")
    assert (code, "attention, seed 0 failed: TrainingError: epoch 1: the loss is nan" in err) == (1, True)


def test_denoise_saves_each_run_and_resumes(tmp_path, monkeypatch, load):
    denoise = load("denoise", photograph=lambda name: torch.rand(1, 1, 51, 50))
    sizes = {name: sum(p.numel() for p in denoise.network(name, 0).parameters()) for name in denoise.VARIANTS}
    assert all(abs(size - sizes["attention"]) < 150 for name, size in sizes.items() if name != "plain")
    for run in (denoise.run, None):  # the second call needs no run
        monkeypatch.setattr(denoise, "run", run)
        denoise.main([*EXAMPLES["denoise.py"], "--output", str(tmp_path)])
        assert "| convolution − plain |" in (tmp_path / "denoise.md").read_text()


def test_color_by_reference_compares_blocks_and_draws_a_picture(tmp_path, load):
    draw = partial(np.random.default_rng(0).integers, 0, 256, (120, 130, 3), dtype=np.uint8)
    reference = load("color_by_reference", photograph=lambda name: draw(), CANVASES=2)
    load("color_by_reference", photographs=cache(reference.photographs.__wrapped__))
    arguments = [*EXAMPLES["color_by_reference.py"], "--output", str(tmp_path)]
    reference.main([*arguments, "--variants", "plain", "attention"])
    assert "| attention |" in (tmp_path / "comparison.md").read_text()
    reference.main([*arguments, "--picture", str(tmp_path / "colors.png")])
    with Image.open(tmp_path / "colors.png") as image:
        assert image.width > 1_000


def test_recall_draws_its_figures(tmp_path, run_here, monkeypatch):
    monkeypatch.setattr("recall_task.BATCH", 4)
    assert run_here("recall.py", "--output", tmp_path)[0] == 0
    table = (tmp_path / "comparison.md").read_text()
    assert len(re.findall(r"^\| (?:linear|matching) +\|.* 1 \|$", table, re.MULTILINE)) == 2
    with Image.open(tmp_path / "curve.png") as picture:
        assert picture.width > 900
    assert run_here("recall.py", "--initialization", tmp_path / "initialization.png")[0] == 0
    assert (tmp_path / "initialization.png").exists()


def test_labels_of_a_mosaic_are_those_of_its_examples(tmp_path, load):
    mosaic = load("mosaic", HELD_OUT=11, MOSAICS=8)
    for name, number in itertools.product(range(22), range(2)):  # the images of a class have one distinct color
        color = np.full((32, 32, 3), (11 * name, 255 - 11 * name, 40 * number))
        save(tmp_path / "data" / "train" / f"{name:02}" / f"{number}.png", color)
    torch.save(timm.create_model("resnet20").state_dict(), tmp_path / "net.pth")
    runs = results_of(mosaic, tmp_path, "--data", tmp_path / "data", "--weights", tmp_path / "net.pth")
    assert set(runs) == {"nearest-neighbor", "matching"}
    saved, extractor = torch.load(tmp_path / "photographs-1.pt"), mosaic.FeatureExtractor()
    extractor.thaw(tmp_path / "net.pth", parts=1)  # the untrained last stage must reproduce the saved features
    torch.testing.assert_close(extractor.features(saved["maps"]), saved["features"], atol=0.02, rtol=0.02)
    pool = torch.eye(64)[:11, None].expand(-1, 3, -1)  # all photographs of a class are the same
    features, given, target = mosaic.mosaics(8, pool, torch.Generator().manual_seed(0))
    assert (given.sum((1, 2)) == 5).all()
    assert ((given.sum(2) == 1) == (target == mosaic.IGNORED)).all()
    assert (mosaic.NearestNeighbor()(features, given).argmax(1) == target)[target != mosaic.IGNORED].all()


def test_the_next_strip_of_a_shredded_photograph_is_its_continuation(tmp_path, load):
    shredded = load("shredded", EVALUATED=16)
    # Brightness follows the column; each photograph has its own stripes.
    save_photographs(tmp_path, lambda column, row, number: [4 * column, row * (number + 1) % 256, 6 * number])
    pool = shredded.load_photographs(tmp_path, "test")
    strips, following = shredded.canvases(2, pool, torch.Generator().manual_seed(0))
    scored = following >= 0
    given, right = strips[scored], shredded.take(strips, following)[scored]
    assert (given.shape[0], right.shape[1:]) == (2 * 48, (3, 32, 4))
    torch.testing.assert_close(right[:, 0, :, 0], given[:, 0, :, -1] + 4 * 5 / 255)  # four columns are lost
    torch.testing.assert_close(right[:, 1:], given[:, 1:])
    assert len(shredded.load_photographs(tmp_path, "train")) + len(shredded.load_photographs(tmp_path, "val")) == 40
    # The first column is the nearest of two rows.
    assert shredded.found_one_to_one(torch.tensor([[[0.0, 1, 2], [0, 9, 5], [1, 2, 0]]])).tolist() == [[2, 0, 1]]
    runs = results_of(shredded, tmp_path / "runs", "--data", tmp_path)
    assert runs["borders"]["0"]["found %"] == 100
    assert runs["solver"]["0"]["found %"] > 90
    trained = ("plain", "separate-cost-volume", "matching")
    assert [runs[name]["0"]["parameters"] // 1000 for name in trained] == [188, 255, 255]


def test_the_neighbors_of_a_tile_are_its_continuations(tmp_path, load):
    tiles = load("tiles", EVALUATED=16)
    save_photographs(tmp_path, lambda column, row, number: [7 * column, 7 * row, 6 * number])
    drawn, index = tiles.canvases(2, tiles.load_photographs(tmp_path, "test"), torch.Generator().manual_seed(0))
    found = tiles.targets(drawn, index)
    for number, (down, right) in enumerate(tiles.DIRECTIONS.values()):
        inside = index[:, number] >= 0
        assert inside.sum() == 2 * 4 * 12
        step = found[:, number][inside].sub(drawn[inside])[:, :, 0, 0] * 255
        torch.testing.assert_close(step, torch.tensor([56.0 * right, 56.0 * down, 0]).expand_as(step))
    runs = results_of(tiles, tmp_path / "runs", "--data", tmp_path)
    assert runs["solver"]["0"]["found %"] > 90
    assert runs["heads-1"]["0"]["parameters"] // 1000 == runs["two-blocks-1"]["0"]["parameters"] // 1000 == 304


def test_stereo_measures_synthetic_pairs_and_the_real_pair(tmp_path, load):
    pytest.importorskip("skimage")
    stereo = load("stereo", EVALUATED=2)
    runs = results_of(stereo, tmp_path)
    assert set(json.loads((tmp_path / "milliseconds.json").read_text())) == {"cost-volume", "matching"}
    assert set(runs["matching"]["0"]) == {"parameters", "synthetic px", "real px", "real within 3 px %"}
    left, right, disparity = stereo.synthetic_pair(torch.Generator().manual_seed(1))
    source = (torch.arange(stereo.WIDTH) - disparity).round().long()  # column of each left position in the right view
    error = (right.gather(2, source.clamp(0).expand(3, -1, -1)) - left).abs().mean(0)[source >= 0]
    assert error.median() < 0.1 < (right - left).abs().mean()


@pytest.fixture
def video(tmp_path, load):
    """Return the example of one-shot video with a random backbone, and a folder of two drives."""
    create, rng = partial(timm.create_model, "tf_efficientnet_lite0"), np.random.default_rng(0)
    for split, drive, position in itertools.product(("train", "val"), ("0001TP", "Seq05VD"), range(6)):
        for kind, suffix, shape in (("images", "webp", (48, 64, 3)), ("labels", "png", (48, 64))):
            path = tmp_path / "camvid" / split / kind / f"{drive}_{position:06}.{suffix}"
            save(path, rng.integers(0, 12 if kind == "labels" else 256, shape))
    return load("one_shot_video", create_backbone=create, EVALUATED=16), tmp_path


def test_video_is_segmented_without_reading_the_test_split(video, monkeypatch):
    video, folder = video
    results = results_of(video, folder / "runs", "--data", folder, "--split", "val")  # the folder has no test images
    assert tuple(results) == video.VARIANTS
    drives = {f"{drive} pixels %" for drive in ("0001TP", "Seq05VD")}
    assert all(set(runs["0"]) == {"parameters", "pixels %", "classes %", *drives} for runs in results.values())
    sizes = {variant: runs["0"]["parameters"] for variant, runs in results.items()}
    assert len({sizes[variant] // 1000 for variant in ("averaging", "linear", "attention", "matching")}) == 1
    assert sizes["matching"] <= min(sizes[variant] for variant in video.MERGED if variant not in ("plain", "cbam"))
    with pytest.raises(ValueError, match=r"--data: no frames found, expected .*test"):
        video.run("reference-position", 0, 1, "test", "cpu", str(folder))
    calls, load, train = [], video.load_frames, video.train
    monkeypatch.setattr(video, "load_frames", lambda *args: calls.append(args[1]) or load(*args))
    monkeypatch.setattr(video, "train", lambda *options: (train(*options), calls.append("trained"))[0])
    video.run("matching", 0, 1, "val", "cpu", str(folder))
    assert calls == ["train", "trained", "val"]


def test_pairs_of_video_frames_have_consistent_labels(video):
    video, folder = video
    features, labels, pairs, _ = video.load_frames(str(folder), "train", "cpu")
    assert features.shape == (12, 152, 6, 8)
    every = itertools.product(range(12), repeat=2)  # six frames of each of two drives
    assert sorted(pairs.tolist()) == [[i, j] for i, j in every if i // 6 == j // 6 and 3 <= abs(i - j) <= 12]
    features[:, 0], features[:, 1] = torch.arange(12.0)[:, None, None], torch.arange(8.0)  # encode frame and column
    batch = video.draw_batch((features, labels, pairs, None), 64, torch.Generator().manual_seed(0))
    assert 16 < (batch[1][:, 1, 0, 0] > 0).sum() < 48  # mirrored references
    assert len({tuple(given.flatten().tolist()) for given in batch[2]}) > 60  # labels are exchanged


def test_labels_of_the_same_video_frame_are_copied(video):
    video, _ = video
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.randn(4, 9, 6, 8, generator=generator), torch.randint(12, (4, 6, 8), generator=generator)
    frames = features, labels, torch.arange(4)[:, None].expand(-1, 2), np.array(["a", "a", "b", "b"])
    *inputs, target, classes, _ = video.draw_batch(frames, 32, generator)
    labels_of = {name: video.copy_labels(*inputs, variant=name, scale=100.0).argmax(1) for name in video.UNTRAINED}
    correct = {name: found == target for name, found in labels_of.items()}
    known, mirrored = target != video.IGNORED, (inputs[0] != inputs[1]).flatten(1).any(1)
    assert torch.equal(known, classes != video.UNLABELED)
    assert correct["reference-position"][known & ~mirrored[:, None, None]].all()
    assert correct["reference-position"][known & mirrored[:, None, None]].double().mean() < 0.5
    assert correct["nearest-neighbor"][known].all()
    assert correct["soft-nearest-neighbor"][known].all(), "a high scale selects the most similar position"


@pytest.mark.parametrize("plan", ["cifar", "positions", "matching", "adapters"])
def test_evidence_makes_the_planned_runs(image_folder, tmp_path, monkeypatch, plan):
    monkeypatch.setenv("EVIDENCE_MAPS", "")  # restored after the test, because the plan sets it
    evidence, built = importlib.import_module("evidence"), {}

    def build(variant, seed, output, **values):
        settings = from_json(values, seed=seed, output=output / f"{variant}-{seed}")
        plain = replace(settings, weights=None, reset_head=False, freeze_backbone=False, pretrained=False)
        model, _ = build_network(plain, open_data(plain)[0], None, lambda line: None, resumed=False)
        built[settings.output.relative_to(tmp_path / "runs").as_posix()] = len(va.inserted_blocks(model))
        return {"top-1 %": 50.0}

    monkeypatch.setattr("vision_attn.recipes.compare.train_variant", build)
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        (tmp_path / "data" / split).symlink_to(image_folder / "train")
    torch.save(timm.create_model("resnet20").state_dict(), tmp_path / "net.pth")
    arguments = [plan, "--data", str(tmp_path / "data"), "--output", str(tmp_path / "runs")]
    evidence.main([*arguments, "--weights", str(tmp_path / "net.pth"), *EXAMPLES["evidence.py"]])
    if plan == "cifar":
        assert {name: count for name, count in built.items() if name.endswith("-0")} == {
            "ways/in the last stage-0": 3, "ways/after two stages-0": 2, "ways/botnet-0": 3, "ways/augmented-0": 6,
            "ways/with se-0": 10, "ways/gating-0": 3, "ways/attention pool-0": 0,
        }  # fmt: skip
    else:
        assert len(built) == {"matching": 2, "positions": 9, "adapters": 10}[plan]
    # The label of a canvas is the position of the photograph whose class, a color, is that of the first.
    for path in (tmp_path / "runs" / "canvases").glob("*/*/*.png"):
        with Image.open(path) as image:
            colors = np.asarray(image.resize((2, 2), Image.Resampling.BOX)).argmax(2).flatten().tolist()
        assert colors[1:].index(colors[0]) == ["row", "column", "diagonal"].index(path.parent.name)


@pytest.mark.parametrize("flags", [(), ("--no-normalize",)], ids=str)
def test_classify_agrees_with_the_library_and_does_not_need_torch(tmp_path, run_here, monkeypatch, flags):
    pictures = [tmp_path / "photograph.jpg", tmp_path / "deep.png"]
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 120, 3), dtype=np.uint8))
    exif = noise.getexif()
    exif[0x0112] = 6
    noise.save(pictures[0], "PNG", exif=exif)  # the suffix is not used
    Image.fromarray(np.linspace(0, 2**16 - 1, 36 * 32).reshape(36, 32).astype(np.uint16)).save(pictures[1])
    model = create_model("tiny", num_classes=3).eval()
    model.pretrained_cfg |= {"crop_pct": 0.9, "interpolation": "bicubic", "mean": (0.1, 0.2, 0.3)}
    model = va.load_model(va.save_model(model, tmp_path / "net", classes=["blue", "green", "red"]))
    assert cli.main(["export", str(tmp_path / "net"), "--output", str(tmp_path / "net.onnx"), *flags]) == 0
    with torch.no_grad():
        probabilities = model(torch.stack([model.transform(open_image(path)) for path in pictures])).softmax(1)
    expected = []
    for path, row in zip(pictures, probabilities, strict=True):
        ranked = [f"{model.classes[i]} {100 * row[i]:.1f} %" for i in row.argsort(descending=True)]
        expected.append("  ".join([str(path), *ranked]))
    monkeypatch.setitem(sys.modules, "torch", None)
    code, out, err = run_here("classify.py", tmp_path / "net.onnx", *pictures)
    assert (code, out.splitlines(), err) == (0, expected, "")
    (tmp_path / "half.png").write_bytes(pictures[0].read_bytes()[:500])
    for network, picture in ((tmp_path / "net.onnx", tmp_path / "half.png"), (pictures[0], pictures[0])):
        code, out, err = run_here("classify.py", network, picture)
        assert (code, out, str(picture) in err) == (1, "", True)


def test_street_segmentation_is_scored_by_mean_iou_on_labeled_pixels(tmp_path, monkeypatch, load):
    jaccard_score = pytest.importorskip("sklearn.metrics").jaccard_score
    street, rng = load("street_segmentation", BATCH=2), np.random.default_rng(0)
    files = {"images/{}.webp": (256, (6, 8, 3)), "labels/{}.png": (12, (6, 8))}
    for split, number, (name, shape) in itertools.product(("train", "val"), range(3), files.items()):
        enlarged = rng.integers(0, *shape).repeat(30, axis=0).repeat(30, axis=1)  # to 180×240
        save(tmp_path / split / name.format(number), enlarged, lossless=True)
    measure, measured = street.measure, []
    monkeypatch.setattr(street, "measure", lambda *pair: measured.append((*pair, measure(*pair))) or measured[-1][2])
    results_of(street, tmp_path / "runs", "--data", tmp_path, "--split", "val")
    for labels, predictions, scores in measured:
        labeled = labels != 11
        expected = jaccard_score(labels[labeled], predictions[labeled], average="macro", zero_division=0)
        assert scores["mIoU %"] == pytest.approx(100 * expected)
        assert scores["pixels %"] == pytest.approx(100 * (labels == predictions)[labeled].double().mean())
    logits = torch.randn(2, 11, 6, 8, requires_grad=True)
    street.build_loss(labels := torch.from_numpy(rng.integers(0, 12, (2, 6, 8))))(logits, labels).backward()
    assert ((logits.grad == 0).all(1) == (labels == 11)).all()


def test_the_picture_of_the_readme_shows_what_its_training_found(tmp_path, capsys, load):
    noise = torch.rand(2, 3, 28, 42)

    def photograph(name, size):
        return torch.nn.functional.interpolate(noise[[int(name == "chelsea")]], size, mode="bilinear")

    network = timm.create_model("tf_efficientnet_lite0", features_only=True, out_indices=(3,)).eval()
    small = {"photograph": photograph, "pretrained_network": lambda: network, "PHOTOGRAPHS": ("one", "chelsea")}
    small |= {"SIZE": (128, 192), "TRAINING_SIZE": (128, 192), "VIEWS": 8, "STEPS": 100}
    load("readme_picture", **small).main(["--output", str(tmp_path / "picture.png")])
    before, after = map(float, re.findall(r"([\d.]+) px", capsys.readouterr().out))
    assert after < 0.7 * before
    assert (tmp_path / "picture.png").stat().st_size > 50_000


@pytest.fixture
def finetuning(tmp_path, load):
    """Return the example with few classes, random weights, and images whose colors encode class, number and split."""
    small = {"CLASSES": 2, "TRAINED": 3, "HELD_OUT": 2, "BATCH": 4, "PILOTS": ("plain",), "PILOT_SEEDS": (10,)}
    example = load("finetuning", **small, LEARNING_RATES={"frozen": (1e-3,)})
    for split, count in (("train", 6), ("test", 2)):
        for label, name in enumerate((*example.FLOWERS, "apple", "bear", "cloud", "dolphin", "elephant")):
            for number in range(count):
                color = np.full((32, 32, 3), (20 * label, 20 * number, 200 * (split == "test")))
                save(tmp_path / "data" / split / name / f"{number}.png", color)
    torch.manual_seed(1)
    torch.save(timm.create_model(example.MODEL).state_dict(), tmp_path / "net.pth")
    example.save_images(tmp_path / "data", tmp_path / "images.pt")
    return example


def test_training_images_are_not_evaluated(finetuning, tmp_path):
    def colors(images):
        return [tuple(image[:, 0, 0].tolist()) for image in images]

    classes = []
    for data_set, seed, held_out in itertools.product(finetuning.SETS, range(2), (True, False)):
        train, evaluation = finetuning.load_images(tmp_path / "images.pt", data_set, seed, held_out)
        train_colors, evaluation_colors = colors(train[0]), colors(evaluation[0])
        count = len({label for label, _, _ in train_colors})
        assert len(set(train_colors)) == 3 * count
        assert len(set(evaluation_colors)) == 2 * count  # all test images, or all held-out images
        assert not {*train_colors} & {*evaluation_colors}
        assert {blue for _, _, blue in evaluation_colors} == {0 if held_out else 200}
        for images, (_, labels) in ((train_colors, train), (evaluation_colors, evaluation)):
            assert len({(red, label) for (red, _, _), label in zip(images, labels.tolist(), strict=True)}) == count
        classes.append(frozenset(red for red, _, _ in train_colors))
    flowers, first, second = dict.fromkeys(classes)  # every seed has the same classes
    assert (flowers, len(first), len(second), len(first | second)) == (frozenset(range(0, 100, 20)), 2, 2, 4)
    assert not flowers & (first | second)


def test_fine_tuning_writes_a_comparison_of_each_data_set(finetuning, tmp_path):
    arguments = [*EXAMPLES["finetuning.py"], "--weights", str(tmp_path / "net.pth"), "--output", str(tmp_path / "runs")]
    finetuning.main([*arguments, "--data", str(tmp_path / "data")])
    for data_set, classes in zip(finetuning.SETS, (5, 2, 2), strict=True):
        folder = tmp_path / "runs" / f"frozen-{data_set}"
        runs = json.loads((folder / "runs.json").read_text())["runs"]
        trained = {name: by_seed["0"]["trained parameters"] for name, by_seed in runs.items()}
        assert trained == {"plain": 1281 * classes, "attention": 1281 * classes + 50_960}
        assert "learning rate 0.001" in (folder / "comparison.md").read_text()

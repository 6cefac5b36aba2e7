"""Training data: file formats, storage and augmentation."""

import gc
import itertools
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from timm.data import create_dataset, create_transform
from torchvision.transforms import v2
from vision_attn.tools import cli
from vision_attn.tools.images import open_image
from vision_attn.tools.training import data as module
from vision_attn.tools.training.data import (
    DecodedImages,
    InMemory,
    open_data,
    open_images,
    seed_all,
)
from vision_attn.tools.training.loop import Trainer, crop_and_flip
from vision_attn.tools.training.run import run_training
from vision_attn.tools.training.settings import Settings

from vision_attn.errors import DataError

CPU = torch.device("cpu")
#: timm configuration for images of 24×24, with the central 80 % for validation.
CONFIG = {
    "input_size": (3, 24, 24), "interpolation": "bicubic", "crop_pct": 0.8, "crop_mode": "center",
    "mean": (0.5,) * 3, "std": (0.25,) * 3,
}  # fmt: skip


def images_of(settings, train=False, **config):
    return open_images(open_data(settings, train=train), settings, {**CONFIG, **config}, CPU, train=train)


def all_of(images, epoch=0):
    return next(iter(images.batches([torch.arange(len(images.labels))], epoch)))


@pytest.mark.parametrize(
    ("image", "name", "options", "expected"),
    [
        (Image.new("RGBA", (40, 40), (10, 20, 30, 0)), "clear.png", {}, (10, 20, 30)),
        (Image.new("RGB", (9, 9), (10, 20, 30)).quantize(), "index.png", {"transparency": b"\x00\x80"}, (10, 20, 30)),
        (Image.new("CMYK", (40, 40), (255, 0, 255, 0)), "print.tif", {}, (0, 255, 0)),
        (Image.fromarray(np.full((40, 40), 100 * 256 + 7, np.uint16)), "deep.png", {}, (100, 100, 100)),
        (Image.fromarray(np.full((40, 40), 255 * 256 + 7, np.uint16)), "deep.tif", {}, (255, 255, 255)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_images_of_any_mode_become_rgb(image, name, options, expected, tmp_path):
    image.save(tmp_path / name, **options)
    found = np.asarray(open_image(tmp_path / name))
    assert np.unique(found.reshape(-1, 3), axis=0).tolist() == [list(expected)]


def test_images_are_rotated_by_their_exif_orientation(tmp_path):
    image = Image.fromarray(np.repeat(np.uint8([200, 0]), 20)[:, None].repeat(40, 1))
    exif = image.getexif()
    exif[0x0112] = 6  # rotated by 90 degrees clockwise
    image.save(tmp_path / "turned.png", exif=exif)
    assert np.asarray(open_image(tmp_path / "turned.png"))[:, 20:].min() == 200


@pytest.mark.parametrize(("damage", "workers"), [("truncated", 0), ("truncated", 1), ("float", 0), ("gone", 0)])
def test_a_damaged_image_is_named_in_one_line(image_folder, tmp_path, capsys, damage, workers):
    for half in ("train", "val"):
        shutil.copytree(image_folder / half, tmp_path / "data" / half)
    bad = tmp_path / "data" / "train" / "red" / "bad.tif"
    if damage == "truncated":
        bad.write_bytes((image_folder / "train" / "red" / "0.png").read_bytes()[:500])
    elif damage == "float":
        Image.fromarray(np.full((8, 8), 0.5, np.float32)).save(bad)
    else:
        os.symlink(tmp_path / "nowhere.png", bad)
    line = f"train --data {tmp_path / 'data'} --output {tmp_path / 'run'} --model tiny --epochs 1 --batch-size 16"
    assert cli.main([*line.split(), "--device", "cpu", "--workers", str(workers)]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert f"error: {bad} " in said
    assert not (tmp_path / "run").exists()
    assert not multiprocessing.active_children()  # Python would wait for them at exit, and they ignore SIGTERM


def test_hidden_folders_and_files_are_ignored(tmp_path):
    root = tmp_path / ".data"  # parent folders may be hidden
    for name in ("blue", "red", ".ipynb_checkpoints", "red/.ipynb_checkpoints"):
        (root / name).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(root / name / "IMAGE.PNG")
    for name in ("notes.txt", "._IMAGE.PNG", ".DS_Store"):
        (root / "red" / name).touch()
    found = module.Folder(root)
    assert found.classes == ["blue", "red"]
    assert [Path(path).name for path, _ in found.samples].count("._IMAGE.PNG") == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": "nothing"}, "nothing: "),
        ({"data": "one"}, "one: expected CLASS/IMAGE .* got 1"),
        ({"data": "empty"}, "empty: no images in the class folders b, c"),
        ({"dataset": "hfds/someone/photos"}, "hfds/someone/photos requires the package datasets: pip install datasets"),
        ({"data": "without"}, "without contains no folder 'train': .* val$"),
        ({"data": "few"}, r"few: cannot hold out 10 % .* Add images"),
        ({"data": "few", "dataset": "cifar100"}, "cannot read torch/cifar100 .*--download"),
        ({}, "data is required: expected a folder of images"),
    ],
)
def test_missing_data_is_named(settings, message, tmp_path, monkeypatch):
    for name in ("one/a", "without/val/a", "few/a", "few/b", "empty/a"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name / "0.png")
    for name in "bc":
        (tmp_path / "empty" / name).mkdir()
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    where = {"data": tmp_path / settings["data"]} if "data" in settings else {}
    with pytest.raises((DataError, ValueError, ModuleNotFoundError), match=message):
        open_data(Settings(**{**settings, **where}), train=True)


def test_without_evaluation_images_a_fraction_of_each_class_is_held_out(image_folder, tmp_path):
    for name, count in (("blue", 40), ("red", 12)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for index in range(count):
            os.symlink(image_folder / "train" / name / f"{index % 24}.png", tmp_path / "photos" / name / f"{index}.png")

    def halves(data=tmp_path / "photos", **options):
        return [open_data(Settings(data=data, **options), train=train) for train in (True, False)]

    training, evaluation = halves()
    assert (len(training), len(evaluation), len({*training.indices, *evaluation.indices})) == (46, 6, 52)
    assert evaluation.labels.tolist() == [0, 0, 0, 0, 0, 1]
    assert evaluation.name == f"{tmp_path / 'photos'}, 10 % of each class (split with seed 0)"
    assert halves()[1].indices == evaluation.indices != halves(seed=1)[1].indices
    # An explicit fraction ignores the validation folder.
    training, evaluation = halves(image_folder, val_fraction=0.25)
    assert (len(training), len(evaluation), evaluation.labels.bincount().tolist()) == (54, 18, [6, 6, 6])
    assert all("/train" in half.name for half in (training, evaluation))
    assert ["/train" in half.name for half in halves(image_folder)] == [True, False]


@pytest.mark.parametrize("name", ["cifar10", "torch/cifar10"])
def test_cifar_is_kept_as_bytes_and_decoded_only_for_augmentation(tmp_path, monkeypatch, name):
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *file: True)
    cifar = tmp_path / "cifar"
    folder = cifar / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    numbers = np.random.default_rng(0)

    def images(count):
        return {"data": numbers.integers(0, 256, (count, 3072), dtype=np.uint8), "labels": [*range(10)] * (count // 10)}

    files = {**{f"data_batch_{index}": images(10) for index in range(1, 6)}, "test_batch": images(20)}
    for file, content in {**files, "batches.meta": {"label_names": [f"kind{i}" for i in range(10)]}}.items():
        (folder / file).write_bytes(pickle.dumps(content))
    settings = Settings(dataset=name, data=cifar, workers=0)
    for train, count in ((True, 50), (False, 20)):
        source = open_data(settings, train=train)
        assert (len(source), source.classes[3]) == (count, "kind3")
        memory = open_images(source, settings, {**CONFIG, "input_size": (3, 32, 32)}, CPU, train=train)
        assert isinstance(memory, InMemory)
    raw = pickle.loads((cifar / "cifar-10-batches-py" / "test_batch").read_bytes())
    assert torch.equal(memory.images.flatten(1), torch.tensor(raw["data"]))
    assert memory.labels.tolist() == raw["labels"]
    varied = Settings(dataset=name, data=cifar, workers=0, aa="rand-m9")
    loader = open_images(source, varied, {**CONFIG, "input_size": (3, 32, 32)}, CPU, train=True)
    assert all_of(loader)[0].shape == (20, 3, 32, 32)
    held_out = open_data(Settings(dataset=name, data=cifar, val_fraction=0.2), train=False)
    assert (len(held_out), held_out.labels.bincount().tolist()) == (10, [1] * 10)


def test_timms_readers_read_every_image(image_folder):
    """Readers of Hugging Face's data sets behave the same way, but need another package."""
    found = create_dataset("", str(image_folder), "train")
    found.reader.label_key, found.reader.dataset = "label", {"label": [label for _, label in found.reader.samples]}
    by_timm = module.DataSplit("by timm", ("blue", "green", "red"), found, range(72))
    ours = open_data(Settings(data=image_folder), train=True)
    one, other = (DecodedImages(source, module.eval_transform(CONFIG), seed=0, workers=0) for source in (by_timm, ours))
    assert sorted(int(one.dataset[i][0].sum()) for i in range(72)) == sorted(
        int(other.dataset[i][0].sum()) for i in range(72)
    )


def test_evaluation_uses_the_crop_and_interpolation_of_the_network(image_folder):
    settings = Settings(data=image_folder)
    images, labels = all_of(images_of(settings))
    how = {"interpolation": "bicubic", "crop_pct": 0.8, "normalize": False}
    with Image.open(image_folder / "val" / "green" / "0.png") as file:
        expected = create_transform((3, 24, 24), **how)(file)
        assert not torch.equal(create_transform((3, 24, 24), **{**how, "crop_pct": 1.0})(file), expected)
    assert torch.equal(images[8], expected)
    assert labels.tolist() == [0] * 8 + [1] * 8 + [2] * 8


def test_small_sets_that_do_not_vary_are_kept_in_memory(image_folder, monkeypatch):
    settings, (small, large) = Settings(data=image_folder, workers=0), ((3, 64, 64), (3, 65, 65))
    # Photographs are cropped in each epoch and small images once, unless the settings override this.
    for crop, size, kind in (
        (None, small, InMemory), (None, large, DecodedImages),
        ("pad", large, InMemory), ("resized", small, DecodedImages),
    ):  # fmt: skip
        assert isinstance(images_of(replace(settings, crop=crop), train=True, input_size=size), kind)
    memory = images_of(settings)
    monkeypatch.setattr(module, "MAX_IN_MEMORY", 24 * 3 * 24 * 24 - 1)
    loader, rows = images_of(settings), torch.randperm(24).split(10)
    assert (type(memory), type(loader)) == (InMemory, DecodedImages)
    for one, other in zip(memory.batches(rows), loader.batches(rows), strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files that the worker had open
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_worker_ignores_ctrl_c_and_sigterm_and_its_exit_is_an_error(image_folder, number):
    loader = images_of(Settings(data=image_folder, crop="resized", workers=1), train=True)
    batches, others = loader.batches(torch.arange(72).split(2)), multiprocessing.active_children()
    next(batches)
    (process,) = {*multiprocessing.active_children()} - {*others}  # others may be ending
    if number != signal.SIGKILL:
        os.kill(process.pid, number)
        assert len(list(batches)) == 35
        return

    def kill_and_read():
        os.kill(process.pid, number)
        return list(batches)

    # torch raises its error when the worker's end is signaled, maybe before the next batch.
    with pytest.raises((DataError, RuntimeError), match=r"^(a worker process ended.*--workers|DataLoader worker)"):
        kill_and_read()
    gc.collect()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_worker_that_is_killed_during_a_step_is_named(image_folder, tmp_path, monkeypatch, capsys):
    settings = Settings(
        data=image_folder, model="tiny", img_size=16, epochs=1, batch_size=2, crop="resized", workers=1, device="cpu",
        output=tmp_path / "run",
    )  # fmt: skip

    others = multiprocessing.active_children()

    def step(self, *_):
        (process,) = {*multiprocessing.active_children()} - {*others}
        os.kill(process.pid, signal.SIGKILL)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            time.sleep(0.01)  # until torch raises its error here
        pytest.fail("torch raised no error")

    monkeypatch.setattr(Trainer, "step", step)

    def train():
        run_training(settings, log=lambda line: None)

    assert cli.run_program("vision-attn", train) == 1
    error = capsys.readouterr().err
    assert error.startswith("vision-attn: error: a worker process ended. Use fewer --workers. Cause: DataLoader worker")
    gc.collect()


@pytest.fixture
def places(tmp_path):
    """Create images whose colors encode the position of each pixel: red is the column, green is the row."""
    pixels = np.stack([*np.meshgrid(np.arange(200), np.arange(200)), np.zeros((200, 200))], -1).astype(np.uint8)
    for name in ("a", "b"):
        (tmp_path / "train" / name).mkdir(parents=True)
        for index in range(50):
            Image.fromarray(pixels).save(tmp_path / "train" / name / f"{index:02}.png", compress_level=0)
    (tmp_path / "val").symlink_to(tmp_path / "train")
    return tmp_path


@pytest.mark.parametrize("options", [{"crop": "resized"}, {"crop": "pad", "aa": "augmix-m5-w4", "color_jitter": 0.3}])
def test_augmentation_follows_from_the_seed_the_epoch_and_the_image(places, options):
    images = images_of(Settings(data=places, workers=0, **options), train=True)
    rows = [torch.tensor([2, 0]), torch.tensor([7])]

    def epoch(number, workers=0, seed=0):
        again = images_of(Settings(data=places, workers=workers, seed=seed, **options), train=True)
        return torch.cat([batch[0] for batch in again.batches(rows, number)])

    first = epoch(1)
    assert torch.equal(epoch(1, workers=2), first)
    assert torch.equal(torch.cat([batch[0] for batch in images.batches(rows[1:], 1)]), first[2:])
    assert not torch.equal(epoch(2), first)
    assert not torch.equal(epoch(1, seed=1), first)
    assert len(first.flatten(1).unique(dim=0)) == 3


@pytest.mark.parametrize(
    "options",
    [{"crop": "resized", "crop_scale": 0.35}, {"aa": "rand-m9", "color_jitter": 0.2}],
    ids=str,
)
def test_images_are_augmented_by_timm(places, options):
    settings, config = Settings(**{"data": places, "crop": "pad", "workers": 0, **options}), {**CONFIG, "crop_pct": 1.0}
    (found,) = all_of(open_images(open_data(settings, train=True), settings, config, CPU, train=True))[0][:1]
    crops, theirs, _ = create_transform(
        (3, 24, 24), is_training=True, separate=True, hflip=0.0, interpolation="bicubic", mean=CONFIG["mean"],
        auto_augment=options.get("aa"), color_jitter=None, scale=(0.35, 1.0),
    )  # fmt: skip
    if settings.crop == "pad":  # cropped later, on the device
        crops = v2.Compose(module.eval_transform(config).transforms[:-1])
    seed_all(0, 0, 0)
    expected = theirs(crops(open_image(places / "train" / "a" / "00.png")))
    if settings.color_jitter:  # timm does not combine color jitter with a policy
        expected = v2.ColorJitter(0.2, 0.2, 0.2)(expected)
    assert torch.equal(v2.functional.pil_to_tensor(expected), found)


def test_posterize_to_zero_bits_is_black():
    image = Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3))
    for bits in (1, 4, 7):
        assert module.posterize(image, bits).tobytes() == ImageOps.posterize(image, bits).tobytes()
    assert not np.asarray(module.posterize(image, 0)).any()


def test_crops_and_flips_are_those_of_torchvision_and_equally_frequent():
    images = torch.arange(3 * 4 * 5).view(1, 3, 4, 5).expand(4000, -1, -1, -1)
    seed_all(0)
    found = crop_and_flip(images, padding=1, hflip=0.3)
    padded = v2.functional.pad(images[0], [1])
    for top, left in itertools.product(range(3), range(3)):
        crop = v2.functional.crop(padded, top, left, 4, 5)
        for expected, chance in ((crop, 0.7 / 9), (v2.functional.horizontal_flip(crop), 0.3 / 9)):
            share = (found == expected).flatten(1).all(1).float().mean().item()
            assert share == pytest.approx(chance, abs=0.015), (top, left)


@pytest.mark.parametrize("root", [None, Path("cache")])
def test_a_data_set_of_the_hub_has_a_folder_only_if_it_is_given(root, monkeypatch):
    def create(name, given, *others, **options):
        raise OSError(f"{name} in {given!r}")

    monkeypatch.setattr("vision_attn.tools.training.data.find_spec", lambda name: name)  # as if it were installed
    monkeypatch.setattr("vision_attn.tools.training.data.create_dataset", create)
    with pytest.raises(DataError, match=re.escape(f"hfds/owner/name in {root and str(root)!r}")):
        open_data(Settings(dataset="hfds/owner/name", data=root), train=True)

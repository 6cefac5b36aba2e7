"""Images and data sets: file formats, folders, held-out parts, augmentation and worker processes."""

import multiprocessing
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_dataset, create_transform
from torchvision.transforms import v2

from vision_attn import cli
from vision_attn.errors import DataError
from vision_attn.recipes import data as inputs, train as recipe
from vision_attn.recipes.data import Folder, Images, find_images, make_loader, open_data, open_image, seed_all
from vision_attn.recipes.settings import Settings
from vision_attn.recipes.train import make_accelerator, make_transforms

#: timm configuration for images of 24×24, with the central 80 % for validation.
CONFIG = {
    "input_size": (3, 24, 24), "interpolation": "bicubic", "crop_pct": 0.8, "crop_mode": "center",
    "mean": (0.5,) * 3, "std": (0.25,) * 3,
}  # fmt: skip


IMAGES = [
    (Image.new("RGBA", (40, 40), (10, 20, 30, 0)), "clear.png", {}, (10, 20, 30)),
    (Image.new("1", (40, 40), 1), "bilevel.png", {}, (255, 255, 255)),
    (Image.new("RGB", (9, 9), (10, 20, 30)).quantize(), "index.png", {"transparency": b"\x07\x80"}, (10, 20, 30)),
    (Image.new("CMYK", (40, 40), (255, 0, 255, 0)), "print.tif", {}, (0, 255, 0)),
    (Image.fromarray(np.full((40, 40), 100 * 256 + 7, np.uint16)), "deep.png", {}, (100, 100, 100)),
    (Image.fromarray(np.full((40, 40), 255 * 256 + 7, np.uint16)), "deep.tif", {}, (255, 255, 255)),
]


@pytest.mark.parametrize(("image", "name", "options", "expected"), IMAGES)
def test_images_of_any_mode_become_rgb(image, name, options, expected, tmp_path):
    image.save(tmp_path / name, **options)
    assert np.unique(np.asarray(open_image(tmp_path / name)).reshape(-1, 3), axis=0).tolist() == [list(expected)]


def test_images_are_rotated_by_their_exif_orientation(tmp_path):
    image = Image.fromarray(np.repeat(np.uint8([200, 0]), 20)[:, None].repeat(40, 1))
    exif = image.getexif()
    exif[0x0112] = 6  # rotated by 90 degrees clockwise
    image.save(tmp_path / "turned.png", exif=exif)
    assert np.asarray(open_image(tmp_path / "turned.png"))[:, 20:].min() == 200


@pytest.mark.parametrize("damage", ["truncated", "float", "gone"])
def test_all_damaged_images_are_listed_before_the_first_epoch(image_folder, tmp_path, capsys, damage):
    shutil.copytree(image_folder, tmp_path / "data")
    bad = [tmp_path / "data" / half / "red" / "bad.tif" for half in ("train", "val")]
    for file in bad:
        if damage == "truncated":
            file.write_bytes((image_folder / "train" / "red" / "0.png").read_bytes()[:500])
        elif damage == "float":
            Image.fromarray(np.full((8, 8), 0.5, np.float32)).save(file)
        else:
            os.symlink(tmp_path / "nowhere.png", file)
    line = f"train --data {tmp_path / 'data'} --output {tmp_path / 'run'} --model tiny --epochs 1 --batch-size 16"
    assert cli.main([*line.split(), "--device", "cpu"]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert "error: 2 images cannot be read: " in said
    assert all(f"{file} (" in said for file in bad)
    assert said.endswith("). Replace or remove them")
    assert not (tmp_path / "run").exists()


def test_hidden_folders_and_files_are_ignored_and_unsupported_files_are_named(tmp_path):
    root = tmp_path / ".data"  # parent folders may be hidden
    for name in ("blue", "red", ".ipynb_checkpoints", "__MACOSX", "red/.ipynb_checkpoints"):
        (root / name).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(root / name / "IMAGE.PNG")
    for name in ("notes.txt", "._IMAGE.PNG", ".DS_Store", "photo.heic"):
        (root / "red" / name).touch()
    (root / "red").rename(tmp_path / "elsewhere")
    (root / "red").symlink_to(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match=r"1 \.heic files cannot be read"):
        found = Folder(root)
    assert found.classes == ["blue", "red"]
    assert [Path(path).name for path, _ in found.samples] == ["IMAGE.PNG", "IMAGE.PNG"]


def write(*names):
    for name in map(Path, names):
        name.mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(name / "0.png")


MISSING = [
    ({"data": "nothing"}, "nothing: no such folder"),
    ({"data": "one"}, "one: expected CLASS/IMAGE .* got 1"),
    ({"data": "empty"}, "empty: no images in the class folders b, c. 1 .HEIC files cannot be read. Convert them"),
    ({"data": "x", "dataset": "hfds/someone/photos"}, "cannot read hfds/someone/photos .*pip install datasets"),
    ({"data": "without"}, "without contains no folder 'train': .* val$"),
    ({"data": "few"}, r"few: cannot hold out 10 %|cannot hold out 10 % .* too few images of a, b\. Add images"),
    ({"data": "few", "dataset": "cifar100"}, "cannot read torch/cifar100 .*--download"),
    ({"data": "sets"}, "sets: Set1 and Set2 contain the same folders cat, dog, so they are not classes. Name them"),
]


@pytest.mark.parametrize(("settings", "message"), MISSING)
def test_missing_data_is_named(settings, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("one/a", "without/val/a", "few/a", "few/b", "empty/a")
    write(*(f"sets/{half}/{kind}" for half in ("Set1", "Set2") for kind in ("cat", "dog")))
    for name in "bc":
        (tmp_path / "empty" / name).mkdir()
    (tmp_path / "empty/b/photo.HEIC").touch()
    with pytest.raises(DataError, match=message):
        open_data(Settings(**{**settings, "data": Path(settings["data"])}))


def test_the_names_of_the_parts_are_recognized_in_any_case(tmp_path):
    write(*(tmp_path / half / kind for half in ("Training", "Testing") for kind in ("cat", "dog")))
    classes, train, val = open_data(Settings(data=tmp_path))
    assert (classes, len(train), len(val)) == (["cat", "dog"], 2, 2)
    assert "/Training/" in str(train.source.samples[0][0])
    assert "/Testing/" in str(val.source.samples[0][0])


def test_without_evaluation_images_a_fraction_of_each_class_is_held_out(image_folder, tmp_path):
    for name, count in (("blue", 40), ("red", 12)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for index in range(count):
            os.symlink(image_folder / "train" / name / f"{index % 24}.png", tmp_path / "photos" / name / f"{index}.png")

    def halves(data=tmp_path / "photos", **options):
        return open_data(Settings(data=data, **options))[1:]

    training, evaluation = halves()
    assert (len(training), len(evaluation), len({*training.rows, *evaluation.rows})) == (47, 5, 52)
    assert evaluation.labels == [0, 0, 0, 0, 1]
    assert halves()[1].rows == evaluation.rows != halves(seed=1)[1].rows
    # An explicit fraction ignores the validation folder.
    training, evaluation = halves(image_folder, val_fraction=0.25)
    assert (len(training), len(evaluation), np.bincount(evaluation.labels).tolist()) == (54, 18, [6, 6, 6])
    assert all("/train" in str(half.source.samples[0][0]) for half in (training, evaluation))
    assert ["/train" in str(half.source.samples[0][0]) for half in halves(image_folder)] == [True, False]


@pytest.mark.parametrize("name", ["cifar10", "torch/cifar10"])
def test_cifar_is_read_and_split(tmp_path, monkeypatch, name):
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *file: True)
    folder = tmp_path / "cifar" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    numbers = np.random.default_rng(0)

    def images(count):
        return {"data": numbers.integers(0, 256, (count, 3072), dtype=np.uint8), "labels": [*range(10)] * (count // 10)}

    files = {**{f"data_batch_{index}": images(10) for index in range(1, 6)}, "test_batch": images(20)}
    for file, content in {**files, "batches.meta": {"label_names": [f"kind{i}" for i in range(10)]}}.items():
        (folder / file).write_bytes(pickle.dumps(content))
    settings = Settings(dataset=name, data=tmp_path / "cifar", workers=0, model="tiny")
    classes, train, val = open_data(settings)
    assert (len(train), len(val), classes[3]) == (50, 20, "kind3")
    val.transform = v2.functional.pil_to_tensor
    image, label = val[7]
    assert image.flatten().tolist() == files["test_batch"]["data"][7].tolist()
    assert label == val.labels[7] == 7
    held_out = open_data(Settings(dataset=name, data=tmp_path / "cifar", val_fraction=0.2))[2]
    assert (len(held_out), np.bincount(held_out.labels).tolist()) == (10, [1] * 10)
    # The network has the size of the images.
    recipe.train(Settings(**{**vars(settings), "epochs": 1, "device": "cpu", "output": tmp_path / "run"}), log=print)
    assert (tmp_path / "run/model/config.json").read_text().count("32") >= 2


def test_timms_readers_read_every_image(image_folder):
    """Readers of Hugging Face's data sets behave the same way, but need another package."""
    found = create_dataset("", str(image_folder), "train")
    found.reader.label_key, found.reader.dataset = "label", {"label": [label for _, label in found.reader.samples]}
    one, other = Images(found, range(72)), open_data(Settings(data=image_folder))[1]
    for images in (one, other):
        images.transform = v2.functional.pil_to_tensor
    assert sorted(int(one[i][0].sum()) for i in range(72)) == sorted(int(other[i][0].sum()) for i in range(72))
    assert one.labels == [label for _, label in found.reader.samples]


def test_evaluation_uses_the_crop_and_interpolation_of_the_network(image_folder):
    images = open_data(Settings(data=image_folder))[2]
    images.transform = make_transforms(Settings(), CONFIG)[1]
    how = {"interpolation": "bicubic", "crop_pct": 0.8, "mean": CONFIG["mean"], "std": CONFIG["std"]}
    with Image.open(image_folder / "val" / "green" / "0.png") as file:
        expected = create_transform((3, 24, 24), **how)(file)
        assert not torch.equal(create_transform((3, 24, 24), **{**how, "crop_pct": 1.0})(file), expected)
    image, label = images[8]
    assert torch.equal(image, expected)
    assert label == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_worker_ignores_signals_to_the_group_until_training_ends(image_folder, number):
    images = open_data(Settings(data=image_folder))[1]
    images.transform = make_transforms(Settings(), CONFIG)[0]
    loader = make_loader(make_accelerator(Settings(device="cpu")), images, 2, 1, train=True)
    others, batches = multiprocessing.active_children(), iter(loader)
    next(batches)
    (worker,) = (one for one in multiprocessing.active_children() if one not in others)
    os.kill(worker.pid, number)
    assert len(list(batches)) == 35
    images.epoch.fill_(-1)
    # Python ends processes at exit in this way, and would wait for them.
    command = f"import os, signal; os.kill({worker.pid}, signal.SIGTERM)"
    assert worker.is_alive()
    subprocess.run([sys.executable, "-c", command], check=True)
    worker.join(20)
    assert worker.exitcode == 0


@pytest.mark.parametrize(("count", "processes", "workers"), [(319, 1, 4), (320, 1, 5), (9999, 1, 16), (9999, 4, 10)])
def test_the_number_of_workers(image_folder, monkeypatch, count, processes, workers):
    """One for every 64 images, but at most one per core, and at most sixteen."""
    monkeypatch.setattr("joblib.cpu_count", lambda: 40)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(40))  # torch warns if there are fewer cores
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    images = open_data(Settings(data=image_folder))[1]
    images.rows = range(count)
    assert make_loader(make_accelerator(Settings(device="cpu")), images, 2, None).num_workers == workers


@pytest.mark.slow
def test_a_worker_that_is_killed_is_named(image_folder, tmp_path):
    words = f"train --data {image_folder} --model test_resnet --img-size 72 --epochs 99999 --batch-size 24 --workers 1"
    line = [sys.executable, "-m", "vision_attn", *words.split(), "--device", "cpu", "-o", str(tmp_path / "run")]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not list(tmp_path.glob("run/state/0*[1-9]-*")):
        time.sleep(0.05)
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    # torch raises the error in a signal handler, also in a destructor, which Python reports before or after our line.
    message = "vision-attn: error: a worker process ended. Use fewer --workers. Cause: DataLoader worker"
    assert [line.startswith(message) for line in error.splitlines()].count(True) == 1, error


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


@pytest.mark.parametrize(("size", "options"), [(24, {"aa": "augmix-m5-w4"}), (72, {})], ids=["pad", "resized"])
def test_augmentation_follows_from_the_seed_the_epoch_and_the_image(places, size, options):
    def epoch(number, rows=(2, 0, 7), workers=0, seed=0):
        settings = Settings(data=places, **options)
        images = open_data(settings)[1]
        images.transform, images.seed = make_transforms(settings, {**CONFIG, "input_size": (3, size, size)})[0], seed
        images.epoch.fill_(number)
        images.rows = list(rows)
        return next(iter(torch.utils.data.DataLoader(images, 3, num_workers=workers)))[0]

    first = epoch(1)
    assert torch.equal(epoch(1, workers=2), first)
    assert torch.equal(epoch(1, rows=[7]), first[2:])
    assert not torch.equal(epoch(2), first)
    assert not torch.equal(epoch(1, seed=1), first)
    assert len(first.flatten(1).unique(dim=0)) == 3


@pytest.mark.parametrize("side", [48, 64])
def test_small_images_are_padded_and_cropped_and_photographs_are_resized(places, side):
    image = open_image(places / "train" / "a" / "00.png")
    config = {**CONFIG, "input_size": (3, side, side), "crop_pct": 1.0, "mean": (0.0,) * 3, "std": (1.0,) * 3}
    small, corners, padding = make_transforms(Settings(hflip=0.0), config)[0], set(), set()
    for number in range(40):
        seed_all(number)
        found = small(image)
        corners.add((bool((found[:, 0] == 0).all()), bool((found[:, :, 0] == 0).all())))
        padding.add(int((found.amax((0, 2)) == 0).sum()))
    assert len(corners) == 4, "zeros at the upper and the left side, or not"
    assert padding == {0, 1, 2, 3, 4}
    photo = {**config, "input_size": (3, 72, 72)}
    seed_all(0)
    found = make_transforms(Settings(crop_scale=0.35), photo)[0](image)
    seed_all(0)
    options = {"mean": config["mean"], "std": config["std"], "scale": (0.35, 1.0), "color_jitter": None}
    expected = create_transform((3, 72, 72), is_training=True, interpolation="bicubic", **options)
    assert torch.equal(found, expected(image))


@pytest.mark.parametrize("root", [None, Path("cache")])
def test_a_data_set_of_the_hub_has_a_folder_only_if_it_is_given(root, monkeypatch):
    def create(name, root, **options):
        raise OSError(f"{name} in {root!r}")

    monkeypatch.setattr(inputs, "create_dataset", create)
    with pytest.raises(DataError, match=re.escape(f"hfds/owner/name in {root and str(root)!r}")):
        open_data(Settings(dataset="hfds/owner/name", data=root))


def test_an_error_for_a_damaged_file_lists_at_most_twenty(tmp_path):
    write(*(tmp_path / kind for kind in "ab"))
    for number in range(30):
        (tmp_path / "a" / f"bad{number}.png").write_bytes(b"")
    source = Folder(tmp_path)
    with pytest.raises(DataError, match=r"^30 images cannot be read: .* and 10 more. Replace or remove them$"):
        inputs.require_readable(Images(source, range(len(source))).files)


def test_images_of_a_folder_are_those_that_are_trained(image_folder, tmp_path):
    for name in ("a", "b"):
        shutil.copytree(image_folder / "val" / "red", tmp_path / name / ".thumbnails")
        (tmp_path / name / "linked").symlink_to(image_folder / "val" / "blue")
        Image.new("RGB", (9, 9)).save(tmp_path / name / "animated.gif")
    assert find_images([tmp_path]) == sorted(Path(file) for file, _ in Folder(tmp_path).samples)
    assert len(find_images([tmp_path])) == 2 * 9

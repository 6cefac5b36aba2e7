"""The trainer's data: what becomes of files of any kind, that all ways to keep images agree, and augmentation."""

import io
import itertools
import math
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import Mixup, create_dataset, create_transform
from timm.data.random_erasing import RandomErasing
from timm.loss import SoftTargetCrossEntropy
from torchvision.transforms import v2

from vision_attn.errors import DataError, Interrupted
from vision_attn.tools import cli
from vision_attn.tools.export.classifier import images_in
from vision_attn.tools.training import data as data_room
from vision_attn.tools.training.augmentation import Augmentation, crop_and_flip, cut_out, seeded, share
from vision_attn.tools.training.data import image_folder as open_folder
from vision_attn.tools.training.data import open_data, open_images, varied
from vision_attn.tools.training.evaluation import Normalize, evaluate
from vision_attn.tools.training.images import (
    Bar,
    Decoder,
    ImageLoader,
    ImageSet,
    ImageStream,
    centre,
    open_image,
    prepare,
    rgb,
)
from vision_attn.tools.training.run_folder import read_config
from vision_attn.tools.training.settings import Settings
from vision_attn.tools.training.train import train

pytestmark = pytest.mark.usefixtures("no_pictures")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def source(image_folder):
    return open_folder(image_folder / "train")


def decode(path, size=(32, 32)):
    """One image file as (3, H, W)."""
    return prepare(open_image(path), size, None)


# --- files ------------------------------------------------------------------------------------------------------------


def palette_image(*colours):
    image = Image.new("P", (40, 40))
    image.putpalette([value for colour in colours for value in colour] + [0] * (768 - 3 * len(colours)))
    return image


@pytest.mark.parametrize(
    ("image", "name", "options", "expected"),
    [
        (Image.new("RGB", (40, 40), (1, 2, 3)), "rgb.png", {}, (1, 2, 3)),
        (Image.new("L", (40, 40), 200), "grey.png", {}, (200, 200, 200)),
        (Image.new("1", (40, 40), 1), "bits.png", {}, (255, 255, 255)),
        (Image.new("RGBA", (40, 40), (10, 20, 30, 0)), "clear.png", {}, (10, 20, 30)),
        (Image.new("LA", (40, 40), (200, 128)), "grey_alpha.png", {}, (200, 200, 200)),
        (palette_image((10, 20, 30)), "palette.png", {}, (10, 20, 30)),
        (palette_image((10, 20, 30)), "palette_alpha.png", {"transparency": b"\x00\x80"}, (10, 20, 30)),
        (Image.new("CMYK", (40, 40), (255, 0, 255, 0)), "print.tif", {}, (0, 255, 0)),
        (Image.fromarray(np.full((40, 40), 100 * 256 + 7, np.uint16)), "deep.png", {}, (100, 100, 100)),
        (Image.fromarray(np.full((40, 40), 255 * 256 + 7, np.uint16)), "deep.tif", {}, (255, 255, 255)),
        (
            Image.new("RGB", (40, 40), (1, 2, 3)),
            "frames.webp",
            {"save_all": True, "lossless": True, "append_images": [Image.new("RGB", (40, 40), (90, 90, 90))]},
            (1, 2, 3),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_images_of_any_mode_become_rgb(image, name, options, expected, tmp_path):
    image.save(tmp_path / name, **options)
    assert decode(tmp_path / name).flatten(1).unique(dim=1).T.tolist() == [list(expected)]


def test_sixteen_bits_of_a_format_that_pillow_reads_as_more(tmp_path):
    pixels = np.full((40, 40), 100 * 256 + 7, ">u2")
    (tmp_path / "deep.pgm").write_bytes(b"P5 40 40 65535\n" + pixels.tobytes())
    assert decode(tmp_path / "deep.pgm").unique().tolist() == [100]


def test_images_of_any_size_are_cropped_to_their_centre(tmp_path):
    # Of three squares beside each other or on each other the middle one is left.
    squares = np.repeat([0, 100, 200], 20)[None].repeat(20, axis=0).astype(np.uint8)
    for name, pixels in (("wide.png", squares), ("tall.png", squares.T)):
        Image.fromarray(pixels).save(tmp_path / name)
        assert decode(tmp_path / name, (10, 10))[:, 1:-1, 1:-1].unique().tolist() == [100]


def test_images_stand_upright(tmp_path):
    pixels = np.zeros((40, 40, 3), np.uint8)
    pixels[:20] = 200
    image = Image.fromarray(pixels)
    exif = image.getexif()
    exif[0x0112] = 6  # to be shown turned to the right by a quarter
    image.save(tmp_path / "turned.png", exif=exif)
    with Image.open(tmp_path / "turned.png") as file:
        opened_by_torchvision = prepare(rgb(file.convert("RGB")), (40, 40), None)
    for found in (decode(tmp_path / "turned.png", (40, 40)), opened_by_torchvision):
        assert (found[:, :, 20:] == 200).all()
        assert (found[:, :, :20] == 0).all()


@pytest.fixture
def damaged_folder(image_folder, tmp_path):
    """Two classes with whole images and 23 that are damaged, the first six each in its way."""
    whole = (image_folder / "train" / "red" / "0.png").read_bytes()
    for half in ("train", "val"):
        for name in ("blue", "red"):
            folder = tmp_path / "images" / half / name
            folder.mkdir(parents=True)
            for index in range(8):
                (folder / f"{index}.png").write_bytes(whole)
    red = tmp_path / "images" / "train" / "red"
    (red / "a-truncated.png").write_bytes(whole[: len(whole) // 2])
    (red / "b-empty.jpg").touch()
    (red / "c-text.jpeg").write_text("this is no image\nat all")
    Image.fromarray(np.full((8, 8), 0.5, np.float32)).save(red / "d-float.tif")
    Image.fromarray(np.full((8, 8), 255, np.int32)).save(red / "e-deep.tif")
    os.symlink(tmp_path / "nowhere.png", red / "f-link.png")
    for index in range(17):
        (red / f"g-{index:02}.png").touch()
    return tmp_path / "images"


NAMES = ".*".join(
    rf"{name}\S* \(" for name in ("a-trunc", "b-empty", "c-text", "d-float", "e-deep", "f-link", "g-00", "g-13")
)


def test_damaged_images_are_named(damaged_folder):
    source = open_folder(damaged_folder / "train")
    with pytest.raises(DataError, match=f"^damaged or no images: .*{NAMES}.* and 3 more: "):
        source.read((32, 32))
    loader = ImageLoader(Decoder(source.dataset, (32, 32)), workers=1, device=CPU)
    batches = loader.batches([torch.arange(0, 8), torch.arange(8, 39)])
    assert len(next(batches)[0]) == 8
    with pytest.raises(DataError, match=f"^damaged or no images: .*{NAMES}.* and 3 more: "):
        next(batches)


def test_an_image_that_vanishes_after_it_was_listed_is_named(image_folder, tmp_path):
    shutil.copytree(image_folder / "train", tmp_path / "images")
    source = open_folder(tmp_path / "images")
    (tmp_path / "images" / "red" / "3.png").unlink()
    with pytest.raises(DataError, match=r"^damaged or no images: .*red/3\.png \(.*No such file"):
        source.read((32, 32))


@pytest.mark.parametrize("cache", ["ram", "none"])
def test_a_damaged_image_is_one_line_on_the_command_line(damaged_folder, cache, capsys, tmp_path):
    code = cli.main(
        ["train", "--data", str(damaged_folder), "--device", "cpu", "--epochs", "1", "--batch-size", "39",
         "--output", str(tmp_path / "run"), "--cache-images", cache]
    )  # fmt: skip
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 1
    assert line.startswith("vision-attn: error: damaged or no images: ")
    assert "a-truncated.png" in line


def test_a_worker_that_dies_is_no_traceback(source, monkeypatch):
    monkeypatch.setattr(Decoder, "decode", lambda *arguments, **options: os._exit(1))
    loader = ImageLoader(Decoder(source.dataset, (32, 32)), workers=1, device=CPU)
    with pytest.raises(DataError, match=r"a worker process that decodes images ended, .*--workers"):
        list(loader.batches([torch.arange(4)]))


def test_what_is_hidden_is_neither_a_class_nor_an_image(image_folder, tmp_path):
    root = tmp_path / ".data"  # what is above the images may be hidden
    for name in ("blue", "red"):
        (root / name).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(root / name / "IMAGE.PNG")
    for name in ("notes.txt", "Makefile", "._IMAGE.PNG", ".DS_Store"):
        (root / "red" / name).touch()
    for folder in (".ipynb_checkpoints", "red/.ipynb_checkpoints"):
        (root / folder).mkdir()
        Image.new("RGB", (32, 32)).save(root / folder / "IMAGE.png")
    found = open_folder(root)
    assert (found.classes, len(found)) == (("blue", "red"), 2)
    assert images_in([root]) == [root / name / "IMAGE.PNG" for name in ("blue", "red")]


def test_folders_without_classes_or_images_are_refused(image_folder, tmp_path):
    with pytest.raises(DataError, match="red has 0 class folders"):
        open_folder(image_folder / "val" / "red")
    for name in ("blue", "empty", "red"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (32, 32)).save(tmp_path / name / "0.png")
    (tmp_path / "empty" / "0.png").unlink()
    with pytest.raises(DataError, match=r"empty.*\.jpg"):
        open_folder(tmp_path)


def test_links_and_pipes_neither_multiply_nor_mislabel_images(tmp_path):
    """Loops, links to other classes and to what lies around them; a link to images elsewhere is followed."""
    root = tmp_path / "data"
    for folder in (root / "cat", root / "dog" / "small", tmp_path / "more"):
        folder.mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / f"{folder.name}.png")
    (tmp_path / "outside.png").touch()
    for link, target in (
        ("cat/again", root / "cat"), ("cat/all", root), ("cat/above", tmp_path), ("cat/dogs", root / "dog"),
        ("cat/more", tmp_path / "more"), ("dog/round", root / "dog"), ("dog/small/cats", root / "cat"),
    ):  # fmt: skip
        (root / link).symlink_to(target, target_is_directory=True)
    os.symlink("itself", root / "cat" / "itself")
    os.mkfifo(root / "cat" / "pipe.png")
    found = open_folder(root)
    assert [(Path(path).name, label) for path, label in found.dataset.samples] == [
        ("cat.png", 0), ("more.png", 0), ("small.png", 1),
    ]  # fmt: skip
    (root / "wolf").symlink_to(root / "dog", target_is_directory=True)
    with pytest.raises(DataError, match="has no images of wolf"):
        open_folder(root)
    assert len(images_in([root])) == 2  # the images of a folder are classified without following links


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_of_too_many_pixels_is_refused_by_name(tmp_path, monkeypatch):
    Image.new("RGB", (30, 20)).save(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 599)
    with pytest.raises(ValueError, match="30×20 pixels, more than the 599 that one image may have"):
        open_image(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert open_image(tmp_path / "large.png").size == (30, 20)


# --- a folder without images to evaluate on --------------------------------------------------------------------------


@pytest.fixture
def one_half(image_folder, tmp_path):
    """40 blue images and 12 red ones."""
    for name, colour, count in (("red", "red", 12), ("blue", "blue", 40)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for index in range(count):
            image = image_folder / "train" / colour / f"{index % 24}.png"
            os.symlink(image, tmp_path / "photos" / name / f"{index:02}.png")
    return tmp_path / "photos"


def names(source):
    return [os.path.relpath(path, source.dataset.root) for path, _ in source.dataset.samples]


def test_without_images_to_evaluate_on_a_share_of_each_class_is_held_out(one_half, tmp_path):
    def halves(**options):
        settings = Settings(data=str(one_half), **options)
        return [open_data(settings, train=train) for train in (True, False)]

    training, evaluation = halves()
    assert (len(training), len(evaluation)) == (46, 6)
    assert sorted(names(training) + names(evaluation)) == sorted(names(open_folder(one_half)))
    assert [name.partition("/")[0] for name in names(evaluation)] == ["blue"] * 5 + ["red"]
    assert evaluation.name == f"{one_half}, 10 % of each class, held out by seed 0"
    images = open_images(evaluation, (8, 8), CPU)
    assert (len(images), images.labels.tolist()) == (6, [0, 0, 0, 0, 0, 1])
    assert [names(half) for half in halves()] == [names(training), names(evaluation)]
    assert names(halves(seed=1)[1]) != names(evaluation)
    assert [len(half) for half in halves(val_split=0.25)] == [39, 13]

    # By itself a folder of classes is evaluated whole, and with a share as the run that held it out.
    assert len(halves(test_only=True)[1]) == 52
    assert names(halves(test_only=True, val_split="0.1")[1]) == names(evaluation)
    moved = tmp_path / "moved"
    moved.mkdir()
    one_half.rename(moved / "train")
    one_half.symlink_to(moved)
    assert [names(half) for half in halves()] == [names(training), names(evaluation)]
    assert names(halves(test_only=True)[1]) == names(evaluation)
    (moved / "val").symlink_to(moved / "train")
    assert len(halves()[1]) == 52
    with pytest.raises(
        ValueError, match=r"val_split is for a folder without images to evaluate on, and there is .*val"
    ):
        halves(val_split="0.2")


def test_a_folder_that_cannot_be_halved_is_refused(one_half, image_folder, tmp_path):
    with pytest.raises(DataError, match=r"0\.01 of the images cannot be held out .*classes = 2.*--val-split"):
        open_data(Settings(data=str(one_half), val_split="0.01"), train=True)
    (tmp_path / "nested").mkdir()
    for name in ("Train", "Val"):
        (tmp_path / "nested" / name).symlink_to(image_folder / "train")
    with pytest.raises(DataError, match="nested has folders in class folders: expected CLASS/IMAGE, or train/CLASS"):
        open_data(Settings(data=str(tmp_path / "nested")), train=True)
    (tmp_path / "nested" / "Val").rename(tmp_path / "nested" / "val")
    with pytest.raises(DataError, match="nested has no folder 'train'"):
        open_data(Settings(data=str(tmp_path / "nested")), train=True)
    for wrong in ("1", "0", "third", "nan"):
        with pytest.raises(ValueError, match="val_split of a folder must be a share between 0 and 1; got"):
            Settings(data="images", val_split=wrong)
    with pytest.raises(ValueError, match="val_split applies to dataset folder or "):
        Settings(dataset="cifar10", data="images", val_split="0.1")


def test_a_run_says_what_it_holds_out_and_evaluates_the_same_again(one_half, tmp_path):
    lines, output = [], str(tmp_path / "run")
    base = Settings(data=str(one_half), model="tiny", img_size=16, batch_size=46, epochs=1, device="cpu", output=output)
    first = train(base, lines.append)
    held_out = f"evaluation: 6 images of {one_half}, 10 % of each class, held out by seed 0, in memory"
    assert held_out in lines
    assert f"training: 46 images of {one_half}, without those, in memory" in lines
    train(replace(base, resume=f"{output}/last.pth"), lines.append)
    saved = {**read_config(f"{output}/settings.yaml"), "weights": f"{output}/last.pth", "test_only": True}
    assert saved["val_split"] == "0.1"
    assert train(Settings(**saved), lines.append).final == first.final
    assert lines.count(held_out) == 3


def test_a_part_of_the_training_images_is_held_out_to_choose_by(image_folder, one_half, cifar, monkeypatch):
    """Those for evaluation stay unseen, wherever they are."""
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *file: True)

    def halves(**options):
        settings = Settings(**options, hold_out=0.25)
        return [open_data(settings, train=train) for train in (True, False)]

    training, evaluation = halves(data=str(image_folder))
    assert (len(training), len(evaluation)) == (54, 18)
    whole = open_folder(image_folder / "train")
    assert sorted(names(training) + names(evaluation)) == sorted(names(whole))
    assert torch.bincount(torch.tensor(evaluation.dataset.targets)).tolist() == [6, 6, 6]
    assert names(halves(data=str(image_folder))[1]) == names(evaluation)
    # Of a folder without val, a share of what is left for training.
    training, evaluation = halves(data=str(one_half))
    tested = open_data(Settings(data=str(one_half)), train=False)
    assert (len(training), len(evaluation), len(tested)) == (34, 12, 6)
    assert len({*names(training), *names(evaluation), *names(tested)}) == 52
    # Of images that come as tensors.
    training, evaluation = halves(dataset="cifar10", data=str(cifar), seed=3)
    assert (len(training), len(evaluation)) == (37, 13)
    both = torch.cat([half.read((32, 32)).images for half in (training, evaluation)]).flatten(1)
    expected = open_data(Settings(dataset="cifar10", data=str(cifar)), train=True).read((32, 32)).images.flatten(1)
    assert sorted(both.tolist()) == sorted(expected.tolist())
    with pytest.raises(ValueError, match="hold_out applies to dataset folder or"):
        Settings(dataset="digit-pairs", hold_out=0.1)


# --- how far it has come ----------------------------------------------------------------------------------------------


def test_without_a_terminal_a_line_every_half_minute_says_how_far_it_is(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    bar = Bar(range(200), "epoch 2/3", 200, initial=20)
    for number in bar:
        bar.set_postfix(loss=f"{number:.4f}", refresh=False)
        now[0] += 0.5
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert (out, len(lines)) == ("", 3)
    assert lines[0] == "epoch 2/3: 80 of 200 in 00:30, 01:00 to go, loss=59.0000"
    assert list(Bar(range(3), "short", 3)) == [0, 1, 2]
    assert list(Bar(range(3), "of another process", 3, hidden=True)) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_there_is_a_bar_whose_loss_moves_in_a_short_epoch(source, tmp_path, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("tqdm.std.time", itertools.count().__next__)  # long enough between two steps to draw each
    base = Settings(
        data=os.path.dirname(source.dataset.root), model="tiny", img_size=16, batch_size=8, epochs=1,
        device="cpu", output=str(tmp_path / "run"),
    )  # fmt: skip
    train(base, lambda line: None)
    drawn = terminal.getvalue().split("\r")
    losses = [re.search(r"epoch 1/1: .* (\d)/9 .*loss=(\d\.\d+)", text) for text in drawn]
    assert len({found[2] for found in losses if found}) > 3
    assert any("evaluate: " in text for text in drawn)


# --- in memory, or decoded by worker processes -----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with one core
@pytest.mark.parametrize("workers", [0, 2])
def test_worker_processes_give_the_batches_that_the_memory_gives(source, workers):
    memory = open_images(source, (24, 24), CPU)
    assert isinstance(memory, ImageSet)
    loader = open_images(source, (24, 24), CPU, cache="none", workers=workers)
    assert isinstance(loader, ImageLoader)
    assert len(memory) == len(loader) == 72
    torch.manual_seed(0)
    for rows in (torch.randperm(72).split(10), torch.arange(72).split(50), torch.randperm(72)[:30].view(2, 15)):
        before = torch.get_rng_state()
        found = list(loader.batches(rows))
        assert torch.equal(torch.get_rng_state(), before)
        for chosen, (images, labels), (expected, classes) in zip(rows, found, memory.batches(rows), strict=True):
            assert torch.equal(images, expected)
            assert torch.equal(images, memory.images[chosen])
            assert torch.equal(labels, classes)


def test_ctrl_c_is_left_to_the_process_that_trains(source):
    batches = open_images(source, (24, 24), CPU, workers=1).batches(torch.arange(72).split(8))
    next(batches)
    (process,) = multiprocessing.active_children()
    os.kill(process.pid, signal.SIGINT)
    assert len(list(batches)) == 8
    process.join(5)
    assert process.exitcode == 0


def test_where_images_are_kept(source, monkeypatch):
    """Small sets in memory; others, and those that workers are given for, are decoded; both can be said."""
    monkeypatch.setattr(data_room, "cores", lambda: 1)

    def kept(**options):
        return open_images(source, (32, 32), CPU, **options).kept

    memory, decoded = "in memory", "decoded in every epoch by 1 worker process"
    assert kept() == kept(cache="ram") == kept(cache="ram", workers=1) == memory
    assert kept(cache="none") == kept(workers=1) == kept(vary=centre) == decoded
    monkeypatch.setattr(data_room, "SMALL", 72 * 3 * 32 * 32 - 1)
    assert kept() == decoded
    assert kept(cache="ram") == memory
    # What is large stays beside the device: its batches are copied there.
    images = open_images(source, (32, 32), torch.device("meta"), cache="ram")
    assert images.images.device == CPU
    assert next(images.batches([torch.arange(4)]))[0].is_meta


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_unasked_there_are_as_many_workers_as_cores_up_to_16(source, monkeypatch):
    for cores, processes, workers in ((6, 1, 6), (6, 2, 3), (192, 1, 16), (1, 4, 1)):
        monkeypatch.setattr(data_room, "cores", lambda cores=cores: cores)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        assert open_images(source, (32, 32), CPU, cache="none").workers == workers


def test_evaluation_by_worker_processes_is_that_in_memory(source):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 3))
    normalize = Normalize((0.5,) * 3, (0.2,) * 3, channels=3)
    one, other = (
        evaluate(model, normalize, open_images(source, (16, 16), CPU, workers=workers), batch_size=50)[0]
        for workers in (None, 1)
    )
    assert one == other


# --- data sets by timm's names ---------------------------------------------------------------------------------------


@pytest.fixture
def cifar(tmp_path):
    """Forty images in CIFAR-10's files, which torchvision would refuse by their hash."""
    folder = tmp_path / "cifar" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    numbers = np.random.default_rng(0)

    def images(count):
        return {"data": numbers.integers(0, 256, (count, 3072), dtype=np.uint8), "labels": [*range(10)] * (count // 10)}

    files = {**{f"data_batch_{index}": images(10) for index in range(1, 6)}, "test_batch": images(20)}
    for name, content in {**files, "batches.meta": {"label_names": [f"kind{i}" for i in range(10)]}}.items():
        (folder / name).write_bytes(pickle.dumps(content))
    return tmp_path / "cifar"


@pytest.mark.parametrize("name", ["cifar10", "torch/cifar10"])
@pytest.mark.parametrize("size", [(32, 32), (24, 24)], ids=str)
def test_cifar_comes_as_tensors_and_as_images_alike(cifar, name, size, monkeypatch):
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *file: True)
    for train_half, count in ((True, 50), (False, 20)):
        source = open_data(Settings(dataset=name, data=str(cifar)), train=train_half)
        assert (len(source), source.size, source.classes[3]) == (count, (32, 32), "kind3")
        memory, loader = open_images(source, size, CPU), open_images(source, size, CPU, cache="none", workers=1)
        rows = [torch.randperm(count)]
        for found, expected in zip(next(loader.batches(rows)), next(memory.batches(rows)), strict=True):
            assert torch.equal(found, expected)
    if size == (32, 32):
        raw = pickle.loads((cifar / "cifar-10-batches-py" / "test_batch").read_bytes())
        assert torch.equal(memory.images.flatten(1), torch.tensor(raw["data"]))
        assert memory.labels.tolist() == raw["labels"]


def test_grey_tensors_become_rgb():
    grey = type("Grey", (), {"data": torch.arange(8, dtype=torch.uint8).view(2, 2, 2), "targets": torch.tensor([1, 0])})
    images, labels = data_room.as_tensors(grey)
    assert torch.equal(images, grey.data[:, None].expand(2, 3, 2, 2))
    assert labels.tolist() == [1, 0]


def test_a_folder_by_a_name_of_timms(image_folder, source):
    settings = Settings(dataset="torch/image_folder", data=str(image_folder))
    found = open_data(settings, train=True)
    assert (found.classes, len(found)) == (source.classes, 72)
    one, other = (open_images(data, (24, 24), CPU) for data in (found, source))
    assert torch.equal(one.images, other.images)
    assert torch.equal(one.labels, other.labels)


def test_timms_readers_give_every_image_or_name_it(damaged_folder, image_folder, source):
    whole = create_dataset("", str(image_folder), "train")  # its reader of folders, as those of hfds/
    images, labels = Decoder(whole, (24, 24)).decode(range(72))
    expected = source.read((24, 24))
    assert torch.equal(images[labels == 2].sum(0), expected.images[expected.labels == 2].sum(0))
    damaged = create_dataset("", str(damaged_folder), "train")
    with pytest.raises(DataError, match=r"a-truncated\.png \(.*b-empty\.jpg \("):
        Decoder(damaged, (24, 24)).decode(range(len(damaged)))


def test_a_data_set_of_hugging_face(image_folder, tmp_path):
    pytest.importorskip("datasets")
    found = open_data(Settings(dataset=f"hfds/{image_folder}", data=str(tmp_path)), train=True)
    assert (found.classes, len(found)) == (("blue", "green", "red"), 72)
    images, labels = Decoder(found.dataset, (24, 24)).decode(range(72))
    assert labels.bincount().tolist() == [24, 24, 24]
    assert len(images) == 72


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "torchvision"}, "dataset must be folder, .* or digit-pairs; got 'torchvision'"),
        ({"dataset": "wds/a", "cache_images": "ram"}, "cache_images applies to dataset .*, and dataset is 'wds/a'"),
        ({"dataset": "wds/a", "data": None}, "data must name the folder of the data set 'wds/a'"),
        ({"dataset": "cifar10", "num_classes": 4}, "num_classes applies to dataset torch/"),
        ({"cache_images": "ram", "train_crop": "resized"}, "cache_images ram"),
        ({"crop_scale": 0.5}, "crop_scale applies to train_crop resized, and train_crop is 'pad'"),
        ({"crop_padding": 2, "train_crop": "resized"}, "crop_padding applies to train_crop pad"),
        ({"dataset": "digit-pairs", "train_crop": "resized"}, "train_crop applies to dataset folder"),
    ],
)
def test_settings_of_data_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Settings(**{"data": "images", **options})


@pytest.mark.parametrize("name", ["torch/places", "torch/cifar100", "wds/shards"])
def test_data_that_is_not_there_is_named(name, tmp_path):
    if name == "wds/shards":
        pytest.importorskip("webdataset")
    with pytest.raises(DataError, match=f"{name} cannot be read in {tmp_path}"):
        open_data(Settings(dataset=name, data=str(tmp_path)), train=True)


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def shards(image_folder, tmp_path):
    """The images as four shards to train on and two to evaluate on, in the format of webdataset."""
    pytest.importorskip("webdataset")
    for half, count in (("train", 4), ("val", 2)):
        paths = sorted((image_folder / half).glob("*/*.png"))
        for shard in range(count):
            with tarfile.open(tmp_path / f"{half}-{shard}.tar", "w") as file:
                for index, path in list(enumerate(paths))[shard::count]:
                    label = sorted(("blue", "green", "red")).index(path.parent.name)
                    for ending, content in (("png", path.read_bytes()), ("cls", str(label).encode())):
                        member = tarfile.TarInfo(f"{index:04}.{ending}")
                        member.size = len(content)
                        file.addfile(member, io.BytesIO(content))
    return Settings(
        dataset="wds/colours", data=str(tmp_path), train_split="train-{0..3}.tar|72", val_split="val-{0..1}.tar|24",
        num_classes=3, model="tiny", img_size=16, batch_size=36, epochs=1, device="cpu", workers=1,
        output=str(tmp_path / "run"),
    )  # fmt: skip


def bag(images):
    """The images of a batch in an order of their own."""
    return sorted(image.numpy().tobytes() for image in images)


def test_a_stream_is_evaluated_image_by_image_on_any_number_of_processes(shards, image_folder):
    memory = open_folder(image_folder / "val").read((24, 24))
    found = []
    for process in range(2):
        stream = open_images(open_data(shards, train=False), (24, 24), CPU, workers=1)
        assert isinstance(stream, ImageStream)
        assert len(stream) == 24
        parts = torch.arange(24).split(5)
        for images, labels in stream.batches([part[process::2] for part in parts if len(part) > process]):
            found += zip(images, labels.tolist(), strict=True)
    assert bag(image for image, _ in found) == bag(memory.images)
    classes = {
        image.numpy().tobytes(): label for image, label in zip(memory.images, memory.labels.tolist(), strict=True)
    }
    assert all(classes[image.numpy().tobytes()] == label for image, label in found)


def test_a_stream_is_shuffled_by_the_seed_of_the_epoch(shards):
    def epoch(seed, settings=shards):
        vary = varied(settings, (24, 24), (0.5,) * 3)
        stream = open_images(open_data(settings, train=True), (24, 24), CPU, workers=1, vary=vary)
        return [images for images, _ in stream.batches(torch.arange(72).split(24), seed=seed)]

    one, same, other = epoch(1), epoch(1), epoch(2)
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one[0], other[0])
    assert len(set(bag(torch.cat(one)))) == len(set(bag(torch.cat(other)))) == 72
    one, same = (epoch(1, replace(shards, aa="rand-m9", color_jitter=0.4)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not set(bag(torch.cat(one))) & set(bag(torch.cat(other)))


def test_a_run_on_a_stream_is_interrupted_and_goes_on(shards):
    lines = []

    def interrupting(line):
        lines.append(line)
        if line.startswith("before epoch"):
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted, match="saved after step 1 of 2 of epoch 1"):
        train(shards, interrupting)
    kept = "72 images of wds/colours (train-{0..3}.tar|72), streamed by 1 worker process"
    assert f"training: {kept}" in lines
    train(replace(shards, resume=f"{shards.output}/last.pth"), lines.append)
    assert lines[-2].startswith("epoch 1/1")


def test_a_stream_that_ends_too_early_or_does_not_say_its_classes_is_refused(shards):
    stream = open_images(
        open_data(replace(shards, val_split="val-{0..1}.tar|30"), train=False), (24, 24), CPU, workers=1
    )
    with pytest.raises(DataError, match="the stream ends before its 30 images"):
        list(stream.batches([torch.arange(30)]))
    with pytest.raises(ValueError, match="num_classes must be given"):
        open_data(replace(shards, num_classes=None), train=False)
    with pytest.raises(ValueError, match="workers must be at least 1 for a stream"):
        open_images(open_data(shards, train=False), (24, 24), CPU, workers=0)
    stream = open_images(open_data(replace(shards, num_classes=2), train=True), (24, 24), CPU, workers=1)
    with pytest.raises(DataError, match="an image has the label 2, and labels go from 0 to 1: see --num-classes"):
        list(stream.batches([torch.arange(72)]))
    with pytest.raises(DataError, match="how many images"):
        open_data(replace(shards, val_split="val-{0..1}.tar"), train=False)


# --- augmentation -----------------------------------------------------------------------------------------------------


def augmentation_of(size, **options):
    return Augmentation(Settings(dataset="digit-pairs", **{"crop_padding": 0, "hflip": 0.0, **options}), size)


def first_choice(count, size=(8, 8), seed=0, **options):
    augmentation = augmentation_of(size, **options)
    return augmentation, next(augmentation.choices(count, seed=seed, device="cpu"))


def test_crops_and_flips_are_those_of_torchvision():
    images = torch.arange(8 * 3 * 4 * 5).view(8, 3, 4, 5)
    _, choice = first_choice(8, (4, 5), crop_padding=2, hflip=0.5)
    found = crop_and_flip(images, choice, padding=2)
    for index, (top, left) in enumerate(choice.corner.T.tolist()):
        expected = v2.functional.crop(v2.functional.pad(images[index], [2]), top, left, 4, 5)
        assert torch.equal(found[index], v2.functional.horizontal_flip(expected) if choice.flip[index] else expected)
    assert 0 < choice.flip.sum() < 8


def test_every_crop_flip_and_centre_is_drawn_equally_often():
    _, choice = first_choice(50_000, (3, 5), crop_padding=2, hflip=0.3, cutout=2)
    for values, count in ((choice.corner[0], 5), (choice.corner[1], 5), (choice.centre[0], 3), (choice.centre[1], 5)):
        torch.testing.assert_close(torch.bincount(values) / 50_000, torch.full((count,), 1 / count), rtol=0, atol=0.01)
    assert choice.flip.float().mean() == pytest.approx(0.3, abs=0.01)
    assert not torch.equal(*choice.corner)


@pytest.mark.parametrize("side", [1, 2, 3, 6])
def test_cutout_erases_what_torchvision_erases(side):
    images = torch.rand(12, 3, 6, 7) + 1
    centre = torch.tensor([[0, 5, 3, 3, 2, 1] * 2, [0, 6, 4, 0, 6, 3, 3, 3, 2, 1, 5, 6]])
    found = cut_out(images, centre, side)
    for index, (row, column) in enumerate(centre.T.tolist()):
        top, left = max(0, row - side // 2), max(0, column - side // 2)
        bottom, right = row - side // 2 + side, column - side // 2 + side
        expected = v2.functional.erase(
            images[index], top, left, min(bottom, 6) - top, min(right, 7) - left, torch.zeros(1)
        )
        assert torch.equal(found[index], expected)


@pytest.mark.parametrize("options", [{"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 0.2, "cutmix": 1.0}], ids=str)
def test_mixup_and_cutmix_are_those_of_timm(options):
    torch.manual_seed(0)
    images, labels = torch.randint(0, 256, (6, 3, 8, 20), dtype=torch.uint8), torch.tensor([0, 1, 2, 3, 4, 0])
    augmentation, choice = first_choice(6, (8, 20), **options)
    before = np.random.get_state()[1].copy()
    found, shares = augmentation.apply(images, labels, choice, normalize=torch.Tensor.float, classes=5)
    assert (np.random.get_state()[1] == before).all()
    with seeded(0):
        np.random.seed(choice.seed)
        theirs = Mixup(*(options.get(name, 0.0) for name in ("mixup", "cutmix")), label_smoothing=0.1, num_classes=5)
        expected, smoothed = theirs(images.float(), labels)
    assert torch.equal(found, expected)
    assert not torch.equal(found, images.float())
    # The loss smooths what timm smooths before it.
    logits = torch.randn(6, 5)
    torch.testing.assert_close(
        F.cross_entropy(logits, shares, label_smoothing=0.1), SoftTargetCrossEntropy()(logits, smoothed)
    )


def test_choices_follow_from_the_seed():
    def drawn(seed):
        augmentation = augmentation_of((8, 8), crop_padding=2, hflip=0.5, cutout=2, mixup=1.0, cutmix=1.0)
        return list(itertools.islice(augmentation.choices(16, seed=seed, device="cpu"), 3))

    one, same, other = drawn(0), drawn(0), drawn(1)
    for a, b in zip(one, same, strict=True):
        assert torch.equal(torch.cat([a.corner, a.flip[None], a.centre]), torch.cat([b.corner, b.flip[None], b.centre]))
        assert a.seed == b.seed
    assert len({choice.seed for choice in one + other}) == 6
    assert not torch.equal(one[0].centre, other[0].centre)
    assert not torch.equal(one[0].centre, one[1].centre)


@pytest.mark.parametrize("mode", ["pixel", "rand", "const"])
def test_random_erasing_is_timms_with_a_seed_for_each_image(mode):
    torch.manual_seed(0)
    images, labels = torch.rand(12, 3, 8, 8), torch.arange(12)
    augmentation, choice = first_choice(12, reprob=0.5, remode=mode)
    states = torch.get_rng_state(), random.getstate()
    found, _ = augmentation.apply(images, labels, choice, normalize=torch.Tensor.clone, classes=12)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    for image, seed, erased in zip(images, choice.erasing.tolist(), found, strict=True):
        random.seed(seed)
        torch.manual_seed(seed)
        assert torch.equal(RandomErasing(0.5, mode=mode, device="cpu")(image.clone()), erased)
    changed = (found != images).flatten(1).any(1)
    assert 2 < changed.sum() < 12
    if mode == "const":
        assert not found[found != images].any()


@pytest.mark.parametrize("options", [{"mixup": 1.0}, {"cutmix": 1.0}, {"cutout": 3}, {"reprob": 0.7}], ids=str)
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_make_of_their_shares_what_one_makes_of_the_batch(processes, options):
    torch.manual_seed(0)
    images, labels = torch.randint(0, 256, (16, 3, 8, 8), dtype=torch.uint8), torch.arange(16)
    augmentation, choice = first_choice(16, crop_padding=2, hflip=0.5, **options)
    how = {"normalize": Normalize((0.5,) * 3, (0.2,) * 3, channels=3), "classes": 16}
    whole_images, whole_labels = augmentation.apply(images, labels, choice, **how)
    shares = [share(16, process, processes) for process in range(processes)]
    assert torch.cat(shares).sort().values.tolist() == list(range(16))
    for mine in shares:
        assert len(mine) == 16 / processes
        found, classes = augmentation.apply(images[mine], labels[mine], choice[mine], **how)
        assert torch.equal(found, whole_images[mine])
        assert torch.equal(classes, whole_labels[mine])


def test_one_process_has_its_batch_in_order_also_of_an_odd_number():
    assert share(7, 0, 1).tolist() == list(range(7))
    assert math.prod(share(9, 1, 3).shape) == 3


def test_cutout_leaves_the_mean_colour():
    augmentation, choice = first_choice(2, cutout=8)
    normalize = Normalize((0.1, 0.2, 0.3), (0.2,) * 3, channels=3)
    images = torch.full((2, 3, 8, 8), 255, dtype=torch.uint8)
    found, labels = augmentation.apply(images, torch.tensor([0, 1]), choice, normalize=normalize, classes=2)
    assert found.min() == 0
    assert labels.tolist() == [0, 1]


# --- crops of any size, made while decoding --------------------------------------------------------------------------


def pixels_of_places(path):
    """An image whose colours say where in it a pixel is: red the column, green the row."""
    places = np.zeros((200, 200, 3), np.uint8)
    places[:, :, 0], places[:, :, 1] = np.arange(200)[None], np.arange(200)[:, None]
    Image.fromarray(places).save(path)


class Places:
    """The same image many times."""

    def __init__(self, path, count):
        self.samples = [(str(path), 0)] * count

    def __getitem__(self, row):
        return open_image(self.samples[row][0]), 0

    def __len__(self):
        return len(self.samples)


def test_random_crops_have_the_sizes_and_places_of_the_recipe(tmp_path):
    pixels_of_places(tmp_path / "places.png")
    crops, _ = Decoder(
        Places(tmp_path / "places.png", 300), (32, 32), v2.RandomResizedCrop((32, 32), (0.35, 1.0))
    ).decode(range(300), seed=3)
    crops = crops.float()
    # From edge to edge of a crop there are 31/32 of its width between the middles of pixels.
    width = (crops[:, 0, 0, -1] - crops[:, 0, 0, 0]) * 32 / 31
    height = (crops[:, 1, -1, 0] - crops[:, 1, 0, 0]) * 32 / 31
    area, ratio = width * height / 200**2, width / height
    assert 0.33 < area.min() < 0.4
    assert 0.9 < area.max() < 1.02
    assert 0.72 < ratio.min() < 0.8
    assert 1.25 < ratio.max() < 1.4
    assert crops[:, 0, 0, 0].unique().numel() > 50


def test_random_crops_follow_from_the_seed_and_the_image_alone(tmp_path):
    pixels_of_places(tmp_path / "places.png")
    decoder = Decoder(Places(tmp_path / "places.png", 4), (16, 16), v2.RandomResizedCrop((16, 16)))
    state = torch.get_rng_state()
    one, _ = decoder.decode([0, 1, 2, 3], seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(decoder.decode([3, 1], seed=5)[0], one[[3, 1]])
    assert len(one.flatten(1).unique(dim=0)) == 4
    assert not torch.equal(decoder.decode([0], seed=6)[0][0], one[0])
    # A worker hands on the seed of the epoch.
    loader = ImageLoader(decoder, workers=1, device=CPU)
    for seed in (5, 6):
        ((images, _),) = loader.batches([torch.tensor([2, 0])], seed=seed)
        assert torch.equal(images, decoder.decode([2, 0], seed=seed)[0])


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({"aa": "rand-m9-mstd0.5-inc1"}, {"auto_augment": "rand-m9-mstd0.5-inc1", "color_jitter": None}),
        ({"color_jitter": 0.4}, {"color_jitter": 0.4}),
        ({"aa": "augmix-m5-w4", "color_jitter": 0.2, "train_crop": "resized", "crop_scale": 0.5}, None),
    ],
    ids=str,
)
def test_images_are_varied_by_timm_while_they_are_decoded(image_folder, tmp_path, options, flags):
    settings, mean = Settings(data=str(image_folder), **options), (0.1, 0.2, 0.3)
    pixels_of_places(tmp_path / "places.png")
    decoder = Decoder(Places(tmp_path / "places.png", 4), (16, 24), varied(settings, (16, 24), mean))
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    one, _ = decoder.decode(range(4), seed=5)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()
    assert random.getstate() == states[2]
    assert one.shape == (4, 3, 16, 24)
    assert len(one.flatten(1).unique(dim=0)) == 4
    assert torch.equal(decoder.decode([3, 1], seed=5)[0], one[[3, 1]])
    ((images, _),) = ImageLoader(decoder, workers=1, device=CPU).batches([torch.tensor([2, 0])], seed=5)
    assert torch.equal(images, one[[2, 0]])
    if flags is not None:
        theirs = create_transform(
            (16, 24), is_training=True, separate=True, hflip=0.0, interpolation="bilinear", mean=mean, **flags
        )[1]
        with seeded(int(np.random.SeedSequence((5, 1)).generate_state(1)[0])):
            expected = theirs(centre(open_image(tmp_path / "places.png"), (16, 24)))
        assert torch.equal(v2.functional.pil_to_tensor(expected), one[1])
    with pytest.raises(ValueError, match=f"cache_images ram keeps images .*, and {'|'.join(options)} varies"):
        replace(settings, cache_images="ram")


@pytest.mark.parametrize("name", ["rand-x9", "randaugment5", "best"])
def test_an_augmentation_that_timm_does_not_know_is_refused(name):
    with pytest.raises(ValueError, match=f"aa: timm knows no '{name}' .*: give one such as rand-m9-mstd0.5"):
        varied(Settings(data="images", aa=name), (16, 16), (0.5,) * 3)


def test_the_classes_of_images_are_known_before_they_are_decoded(image_folder, source, cifar, monkeypatch):
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *file: True)
    expected = [0] * 24 + [1] * 24 + [2] * 24
    assert open_images(source, (8, 8), CPU, workers=1).labels.tolist() == expected
    assert open_images(source, (8, 8), CPU).labels.tolist() == expected
    by_timm = ImageLoader(Decoder(create_dataset("", str(image_folder), "train"), (8, 8)), workers=1, device=CPU)
    assert sorted(by_timm.labels.tolist()) == expected
    tensors = open_data(Settings(dataset="cifar10", data=str(cifar)), train=False)
    assert open_images(tensors, (8, 8), CPU, workers=1).labels.tolist() == [*range(10)] * 2
    fewer = replace(source, classes=("blue", "green"))
    for workers in (None, 1):  # in memory, and decoded by a worker
        with pytest.raises(DataError, match="an image has the label 2, and labels go from 0 to 1"):
            list(open_images(fewer, (8, 8), CPU, workers=workers).batches([torch.arange(40, 50)]))
    unknown = ImageLoader(Decoder(Places("a.png", 3), (8, 8)), workers=1, device=CPU)
    with pytest.raises(ValueError, match="class_weights: Places does not say what the classes of its images are"):
        _ = unknown.labels


def test_a_run_crops_at_random_to_train_and_not_to_evaluate(image_folder, tmp_path):
    lines = []
    train(
        Settings(
            data=str(image_folder), model="tiny", batch_size=36, epochs=1, img_size=16, device="cpu",
            train_crop="resized", output=str(tmp_path / "run"),
        ),
        lines.append,
    )  # fmt: skip
    kept = [line.rpartition(", ")[2].split()[0] for line in lines if line.startswith(("training", "evaluation"))]
    assert kept == ["in", "decoded"]

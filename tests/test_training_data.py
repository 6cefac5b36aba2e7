"""The trainer's data: what becomes of files of any kind, that both ways to keep images agree, and augmentation."""

import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm.data.mixup as timm_mixup
import torch
import torch.nn.functional as F
from PIL import Image
from timm.loss import SoftTargetCrossEntropy
from torchvision.transforms.v2 import functional as v2

from vision_attn import cli
from vision_attn.checkpoints import read_checkpoint
from vision_attn.errors import DataError
from vision_attn.training import data as data_room
from vision_attn.training import train as train_room
from vision_attn.training.augmentation import Augmentation, crop_and_flip, cut_out, draw_mixing, mix, share
from vision_attn.training.data import Source, container_limit, open_images
from vision_attn.training.data import image_folder as open_folder
from vision_attn.training.evaluation import Normalize, evaluate
from vision_attn.training.image_files import ImageFiles
from vision_attn.training.image_loader import ImageLoader
from vision_attn.training.images import ImageSet
from vision_attn.training.network import build_network
from vision_attn.training.settings import Settings
from vision_attn.training.train import train

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def source(image_folder):
    return open_folder(image_folder / "train")


def decode(path, size=(32, 32)):
    """One image file as (3, H, W)."""
    return ImageFiles([str(path)], [0]).decode([0], size)[0]


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
    found = decode(tmp_path / "turned.png", (40, 40))
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


REASONS = (
    r"a-truncated\.png \(.*truncated.*\), .*b-empty\.jpg \(is of no known format\), "
    r".*c-text\.jpeg \(is of no known format\), .*d-float\.tif \(floating-point pixels, whose range is not known\), "
    r".*e-deep\.tif \(32 bits a pixel, whose range is not known\), .*f-link\.png \(.*No such file.*\), "
    r".*g-13\.png \(is of no known format\) and 3 more: fetch them again or remove them$"
)


def test_all_damaged_images_are_named_at_once(damaged_folder):
    source = open_folder(damaged_folder / "train")
    with pytest.raises(DataError, match=f"^damaged or no images: .*{REASONS}"):
        source.read((32, 32))
    with pytest.raises(DataError, match=f"^damaged or no images: .*{REASONS}"):
        list(ImageLoader(source.files, (32, 32), workers=1, device=CPU).batches([torch.arange(len(source))]))


def test_a_damaged_image_of_one_batch_has_those_of_all_named(damaged_folder):
    source = open_folder(damaged_folder / "train")
    loader = ImageLoader(source.files, (32, 32), workers=1, device=CPU)
    whole, damaged = torch.arange(0, 8), torch.arange(30, 32)
    batches = loader.batches([whole, damaged])
    next(batches)
    with pytest.raises(DataError, match=f"^damaged or no images: .*{REASONS}"):
        next(batches)


def test_a_damaged_image_that_is_whole_again_is_named(damaged_folder):
    source = open_folder(damaged_folder / "val")
    files, loader = source.files, ImageLoader(source.files, (32, 32), workers=1, device=CPU)
    path = Path(os.fsdecode(files.paths[3]))
    content = path.read_bytes()
    path.write_bytes(b"")
    batches = loader.batches([torch.arange(8)])
    check = files.check
    files.check = lambda: (path.write_bytes(content), check())
    with pytest.raises(DataError, match=r"3\.png \(is of no known format\): fetch"):
        next(batches)


@pytest.mark.parametrize("workers", [(), ("--workers", "1")], ids=["in memory", "in a worker"])
def test_a_damaged_image_is_one_line_on_the_command_line(damaged_folder, workers, capsys, tmp_path):
    code = cli.main(
        ["train", "--data", str(damaged_folder), "--device", "cpu", "--epochs", "1", "--batch-size", "39",
         "--output", str(tmp_path / "run"), *workers]
    )  # fmt: skip
    lines = capsys.readouterr().err.splitlines()
    assert code == 1
    assert len(lines) == 1
    assert lines[0].startswith("vision-attn: error: damaged or no images: ")
    assert "a-truncated.png" in lines[0]


def test_a_worker_that_dies_is_no_traceback(source, monkeypatch):
    monkeypatch.setattr(ImageFiles, "decode", lambda *arguments, **options: os._exit(1))
    loader = ImageLoader(source.files, (32, 32), workers=1, device=CPU)
    with pytest.raises(DataError, match=r"a worker process that decodes images ended, .*--workers"):
        list(loader.batches([torch.arange(4)]))


def test_files_that_are_no_images_by_their_names_are_left_out_and_said(image_folder, tmp_path):
    root = tmp_path / ".data"  # what is above the images may be hidden
    for half in ("train", "val"):
        (root / half).mkdir(parents=True)
        for name in ("blue", "green", "red"):
            os.symlink(image_folder / half / name, root / half / name)
    os.unlink(root / "val" / "red")
    (root / "val" / "red").mkdir()
    for name in ("one.gif", "two.gif", "notes.txt", "Makefile", "._IMAGE.PNG", ".DS_Store"):
        (root / "val" / "red" / name).touch()
    for folder in (".ipynb_checkpoints", "red/.ipynb_checkpoints"):
        (root / "val" / folder).mkdir()
        Image.new("RGB", (32, 32)).save(root / "val" / folder / "IMAGE.png")
    Image.new("RGB", (32, 32)).save(root / "val" / "red" / "IMAGE.PNG")
    lines = []
    train(Settings(data=str(root), device="cpu", test_only=True), lines.append)
    (line,) = [line for line in lines if line.startswith("evaluation")]
    assert line.startswith("evaluation: 17 images of ")
    assert line.endswith(", in memory; no images by their names and left out: 2 .gif, 1 .txt, 1 Makefile, 3 hidden")
    with pytest.raises(DataError, match=r"\.data/val/red has no class folders"):
        open_folder(root / "val" / "red")


# --- in memory, or decoded by worker processes -----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with one core
def test_worker_processes_give_the_batches_that_the_memory_gives(source):
    memory = open_images(source, (24, 24), CPU)
    loader = open_images(source, (24, 24), CPU, workers=2)
    assert isinstance(memory, ImageSet)
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


def test_worker_processes_outlive_an_epoch(source):
    loader = ImageLoader(source.files, (24, 24), workers=1, device=CPU)
    workers = []
    for _ in range(2):
        list(loader.batches(torch.arange(8).split(4)))
        workers.append([process.pid for process in loader.loader._iterator._workers])
    assert workers[0] == workers[1]


def test_ctrl_c_is_left_to_the_process_that_trains(source):
    loader = ImageLoader(source.files, (24, 24), workers=1, device=CPU)
    batches = loader.batches(torch.arange(72).split(8))
    next(batches)
    (process,) = loader.loader._iterator._workers
    os.kill(process.pid, signal.SIGINT)
    assert len(list(batches)) == 8
    del loader, batches
    process.join(5)
    assert process.exitcode == 0


def test_a_run_with_worker_processes_ends_with_the_bits_of_one_without(image_folder, tmp_path, monkeypatch):
    def with_dropout(*arguments):
        network = build_network(*arguments)
        network.model.head_drop.p = 0.5
        return network

    monkeypatch.setattr(train_room, "build_network", with_dropout)
    settings = Settings(
        data=str(image_folder), epochs=2, batch_size=16, lr=0.05, mixup=0.2, cutmix=1.0, cutout=8, device="cpu",
        img_size=24, output=str(tmp_path / "memory"),
    )  # fmt: skip
    lines = []
    train(settings, lines.append)
    train(replace(settings, workers=1, output=str(tmp_path / "workers")), lines.append)
    one, other = (read_checkpoint(tmp_path / name / "last.pth") for name in ("memory", "workers"))
    assert all(torch.equal(one["model"][key], other["model"][key]) for key in one["model"])
    for key in ("train_loss", "eval_loss", "eval_top1"):
        assert [row[key] for row in one["rows"]] == [row[key] for row in other["rows"]]
    assert [line.rpartition(", ")[2] for line in lines if line.startswith(("training", "evaluation"))] == (
        2 * ["in memory"] + 2 * ["decoded in every epoch by 1 worker process"]
    )


def test_what_does_not_fit_into_memory_is_decoded_by_as_many_workers_as_cores(source, monkeypatch):
    monkeypatch.setattr(data_room, "cores", lambda: 6)
    monkeypatch.setattr("warnings.warn", lambda *arguments, **options: None)  # DataLoader's, of too many workers
    needed = 72 * 3 * 32 * 32

    def machine_with(memory):
        found = SimpleNamespace(available=memory / 0.8)
        monkeypatch.setattr(data_room.psutil, "virtual_memory", lambda: found)

    machine_with(needed + 10)
    assert open_images(source, (32, 32), CPU).kept == "in memory"
    # Two processes hold the images twice.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    kept = "decoded in every epoch by 3 worker processes"
    assert open_images(source, (32, 32), CPU).kept == kept
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    machine_with(needed - 10)
    kept = "decoded in every epoch by 6 worker processes"
    assert open_images(source, (32, 32), CPU).kept == kept
    monkeypatch.setattr(data_room, "cores", lambda: 192)
    kept = "decoded in every epoch by 16 worker processes"
    assert open_images(source, (32, 32), CPU).kept == kept


def test_what_neither_fits_into_memory_nor_is_files_is_refused_before_it_is_read():
    source = Source("cifar", ("a", "b"), 3, (32, 32), None, 50_000)
    with pytest.raises(DataError, match=r"50,000 images of 1000000×1000000 take .* GiB .* choose a smaller --img-size"):
        open_images(source, (1_000_000, 1_000_000), CPU)


def test_a_container_may_have_less_memory_than_the_machine(tmp_path):
    limit = tmp_path / "memory.max"
    assert container_limit(limit) == math.inf
    for text, size in (("max\n", math.inf), ("1073741824\n", 2**30)):
        limit.write_text(text)
        assert container_limit(limit) == size


def test_evaluation_by_worker_processes_is_that_in_memory(source):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 3))
    normalize = Normalize((0.5,) * 3, (0.2,) * 3, channels=3)
    one, other = (
        evaluate(model, normalize, open_images(source, (16, 16), CPU, workers=workers), batch_size=50)[0]
        for workers in (None, 1)
    )
    assert one == other


# --- augmentation -----------------------------------------------------------------------------------------------------


def first_choice(count, size=(8, 8), seed=0, **options):
    augmentation = Augmentation(size, **options)
    return augmentation, next(augmentation.choices(count, seed=seed, device="cpu"))


def test_crops_and_flips_are_those_of_torchvision():
    images = torch.arange(8 * 3 * 4 * 5).view(8, 3, 4, 5)
    _, choice = first_choice(8, (4, 5), crop_padding=2, hflip=0.5)
    found = crop_and_flip(images, choice, padding=2)
    for index, (top, left) in enumerate(zip(choice.top.tolist(), choice.left.tolist(), strict=True)):
        expected = v2.crop(v2.pad(images[index], [2]), top, left, 4, 5)
        assert torch.equal(found[index], v2.horizontal_flip(expected) if choice.flip[index] else expected)
    assert 0 < choice.flip.sum() < 8


def test_every_crop_flip_and_centre_is_drawn_equally_often():
    _, choice = first_choice(50_000, (3, 5), crop_padding=2, hflip=0.3, cutout=2)
    for values, count in ((choice.top, 5), (choice.left, 5), (choice.centre[0], 3), (choice.centre[1], 5)):
        torch.testing.assert_close(torch.bincount(values) / 50_000, torch.full((count,), 1 / count), rtol=0, atol=0.01)
    assert choice.flip.float().mean() == pytest.approx(0.3, abs=0.01)
    assert not torch.equal(choice.top, choice.left)


@pytest.mark.parametrize("side", [1, 2, 3, 6])
def test_cutout_erases_what_torchvision_erases(side):
    images = torch.rand(12, 3, 6, 7) + 1
    centre = torch.tensor([[0, 5, 3, 3, 2, 1] * 2, [0, 6, 4, 0, 6, 3, 3, 3, 2, 1, 5, 6]])
    found = cut_out(images, centre, side)
    for index, (row, column) in enumerate(centre.T.tolist()):
        top, left = max(0, row - side // 2), max(0, column - side // 2)
        bottom, right = row - side // 2 + side, column - side // 2 + side
        expected = v2.erase(images[index], top, left, min(bottom, 6) - top, min(right, 7) - left, torch.zeros(1))
        assert torch.equal(found[index], expected)


def timm_with(monkeypatch, own, cut, middle=(0, 0)):
    """timm's Mixup, which draws this share for each image itself and this middle of the box."""
    middles = iter(middle)
    mixup = timm_mixup.Mixup(label_smoothing=0.1, num_classes=5)
    monkeypatch.setattr(mixup, "_params_per_batch", lambda: (own, cut))
    monkeypatch.setattr(timm_mixup.np.random, "randint", lambda *arguments, **options: next(middles))
    return mixup


class Fixed:
    """Numbers that are drawn one after the other, in place of random ones."""

    def __init__(self, share, *middle):
        self.share, self.middle = share, list(middle)

    def beta(self, one, other):
        return self.share

    def integers(self, high):
        return self.middle.pop(0)


@pytest.mark.parametrize("own", [0.3, 0.9, 0.0, 1.0])
@pytest.mark.parametrize("middle", [None, (0, 0), (5, 3), (7, 9)], ids=["mixup", "corner", "inside", "other corner"])
def test_mixup_and_cutmix_are_those_of_timm(own, middle, monkeypatch):
    torch.manual_seed(0)
    # All boxes have even sides: older versions of timm cut others one pixel short.
    images, labels = torch.randn(6, 3, 8, 20), torch.tensor([0, 1, 2, 3, 4, 0])
    mixing = draw_mixing((8, 20), 1.0, cut=middle is not None, numbers=Fixed(own, *(middle or ())))
    found, shares = mix(images, labels, mixing, classes=5)
    expected, smoothed = timm_with(monkeypatch, own, middle is not None, middle or ())(images.clone(), labels)
    assert torch.equal(found, expected)
    # The loss smooths what timm smooths before it.
    torch.testing.assert_close(shares * 0.9 + 0.1 / 5, smoothed)
    logits = torch.randn(6, 5)
    torch.testing.assert_close(
        F.cross_entropy(logits, shares, label_smoothing=0.1), SoftTargetCrossEntropy()(logits, smoothed)
    )


def test_a_box_of_an_odd_side_is_whole():
    mixing = draw_mixing((9, 5), 1.0, cut=True, numbers=Fixed(0.0, 4, 2))
    assert (mixing.box, mixing.share) == ((0, 9, 0, 5), 0.0)


def test_shares_and_boxes_are_drawn_from_their_distributions():
    numbers = np.random.default_rng(0)
    shares = np.array([draw_mixing((8, 8), 0.4, cut=False, numbers=numbers).share for _ in range(20_000)])
    # A beta distribution with both parameters alpha has the mean 1/2 and the variance 1/(8 alpha + 4).
    assert shares.mean() == pytest.approx(0.5, abs=0.01)
    assert shares.var() == pytest.approx(1 / (8 * 0.4 + 4), abs=0.003)
    rows = [draw_mixing((8, 40), 1.0, cut=True, numbers=numbers).box for _ in range(5_000)]
    assert max(bottom for _, bottom, _, _ in rows) == 8
    assert max(right for _, _, _, right in rows) == 40


@pytest.mark.parametrize(
    ("options", "cut"),
    [
        ({"mixup": 0.2}, 0.0),
        ({"cutmix": 0.2}, 1.0),
        ({"mixup": 0.2, "cutmix": 1.0}, 0.5),
        ({"mixup": 0.2, "cutmix": 1.0, "mixup_switch_prob": 0.9}, 0.9),
    ],
    ids=str,
)
def test_a_coin_chooses_between_mixup_and_cutmix(options, cut):
    choices = Augmentation((8, 8), **options).choices(2, seed=0, device="cpu")
    drawn = [next(choices).mixing for _ in range(2_000)]
    assert sum(mixing.box is not None for mixing in drawn) / 2_000 == pytest.approx(cut, abs=0.03 if 0 < cut < 1 else 0)
    # Each is drawn with its own alpha: with 0.2 shares are near 0 or 1, with 1 they are uniform.
    if cut == 0.5:
        shares = np.array([mixing.share for mixing in drawn if mixing.box is None])
        assert shares.var() == pytest.approx(1 / (8 * 0.2 + 4), abs=0.02)


def test_choices_follow_from_the_seed():
    def drawn(seed):
        augmentation = Augmentation((8, 8), crop_padding=2, hflip=0.5, cutout=2, mixup=1.0, cutmix=1.0)
        choices = augmentation.choices(16, seed=seed, device="cpu")
        return [next(choices) for _ in range(3)]

    one, same, other = drawn(0), drawn(0), drawn(1)
    for a, b in zip(one, same, strict=True):
        assert torch.equal(
            torch.stack([a.top, a.left, a.flip, *a.centre]), torch.stack([b.top, b.left, b.flip, *b.centre])
        )
        assert a.mixing == b.mixing
    assert len({choice.mixing for choice in one + other}) == 6
    assert not torch.equal(one[0].centre, other[0].centre)
    assert not torch.equal(one[0].centre, one[1].centre)


@pytest.mark.parametrize("options", [{"mixup": 1.0}, {"cutmix": 1.0}, {"cutout": 3}], ids=str)
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


def test_random_crops_have_the_sizes_and_places_of_the_recipe(tmp_path):
    pixels_of_places(tmp_path / "places.png")
    files = ImageFiles([str(tmp_path / "places.png")] * 300, [0] * 300)
    crops = files.decode(range(300), (32, 32), crop_scale=0.35, seed=3).float()
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
    files = ImageFiles([str(tmp_path / "places.png")] * 4, [0] * 4)
    options = {"size": (16, 16), "crop_scale": 0.08}
    one = files.decode([0, 1, 2, 3], seed=5, **options)
    assert torch.equal(files.decode([3, 1], seed=5, **options), one[[3, 1]])
    assert len(one.flatten(1).unique(dim=0)) == 4
    assert not torch.equal(files.decode([0], seed=6, **options)[0], one[0])
    # A worker hands on the seed of the epoch.
    loader = ImageLoader(files, (16, 16), workers=1, device=CPU, crop_scale=0.08)
    for seed in (5, 6):
        ((images, _),) = loader.batches([torch.tensor([2, 0])], seed=seed)
        assert torch.equal(images, files.decode([2, 0], seed=seed, **options))


def test_a_run_with_random_crops_repeats_itself_and_evaluates_without(image_folder, tmp_path):
    base = Settings(
        data=str(image_folder), batch_size=36, epochs=1, img_size=16, device="cpu", train_crop="resized", workers=1
    )
    lines, found = [], {}
    for name, options in {"one": {}, "same": {}, "other": {"crop_scale": 0.9}, "pad": {"train_crop": "pad"}}.items():
        train(replace(base, output=str(tmp_path / name), **options), lines.append)
        found[name] = read_checkpoint(tmp_path / name / "last.pth")["model"]["conv1.weight"]
    assert torch.equal(found["one"], found["same"])
    assert not torch.equal(found["one"], found["other"])
    assert not torch.equal(found["one"], found["pad"])
    # Where only training crops at random, what is evaluated is held in memory.
    train(replace(base, workers=None, output=str(tmp_path / "default")), lines.append)
    kept = [line.rpartition(", ")[2].split()[0] for line in lines if line.startswith(("training", "evaluation"))]
    assert kept[-2:] == ["in", "decoded"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop_scale": 0.5}, "crop_scale applies to train_crop resized, and train_crop is 'pad'"),
        (
            {"crop_padding": 2, "train_crop": "resized"},
            "crop_padding applies to train_crop pad, and train_crop is 'resized'",
        ),
        (
            {"dataset": "cifar10", "train_crop": "resized"},
            "train_crop applies to dataset folder, and dataset is 'cifar10'",
        ),
    ],
)
def test_settings_of_crops_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Settings(data="images", **options)

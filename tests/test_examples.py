"""Every script that trains runs, as its header says, on small data."""

import functools
import importlib
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import timm
import torch
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, Normalize, ToTensor
from torchvision.transforms.functional import pil_to_tensor

import vision_attn as va
from vision_attn.networks.models import create_model
from vision_attn.tools import cli
from vision_attn.tools.comparison import runs
from vision_attn.tools.training import digits, folder, network, settings
from vision_attn.tools.training.data import open_image
from vision_attn.tools.training.settings import Settings

ROOT = Path(__file__).resolve().parents[1]

#: Arguments that make an example small.
EXAMPLES = {
    "train_cifar.py": ["--epochs", "1", "--batch-size", "24", "--seeds", "2", "--lr", "0.05"],
    "finetune_folder.py": ["--model", "resnet20", "--epochs", "1", "3", "--batch-size", "12", "--workers", "0"],
    "classify.py": [],
    "evidence.py": ["--epochs", "1", "--seeds", "0", "--jobs", "1"],
    "denoise.py": ["--sigmas", "50", "--seeds", "0", "1", "--steps", "1"],
}  # fmt: skip


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Runs an example as a program, but in this process: its exit code and what it says."""

    def run_here(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        except SystemExit as end:
            code = end.code
            if isinstance(code, str):  # as Python ends
                code, _ = 1, print(code, file=sys.stderr)
        return code, *capsys.readouterr()

    return run_here


def test_every_example_is_tested():
    scripts = {path.name for path in (ROOT / "examples").glob("*.py") if not path.read_text().startswith("# %%")}
    assert scripts == set(EXAMPLES)  # the others are walkthroughs


@pytest.fixture
def small_digit_pairs(monkeypatch):
    """Few canvases, and no curves drawn, which take longer than training on them."""
    monkeypatch.setattr(digits, "TRAIN_CANVASES", 256)
    monkeypatch.setattr(digits, "EVAL_CANVASES", 100)
    monkeypatch.setattr(folder, "save_figure", lambda figure, path: path.write_bytes(b""))


@pytest.fixture
def small_cifar(image_folder, tmp_path):
    """A folder as the script wants it: train and test of 32×32 images."""
    for name, half in (("train", "train"), ("test", "val")):
        (tmp_path / name).symlink_to(image_folder / half)
    return tmp_path


def test_train_cifar(small_cifar, run_here):
    arguments = "train_cifar.py", *EXAMPLES["train_cifar.py"], "--data", small_cifar, "--device", "cpu"
    code, out, err = run_here(*arguments)
    assert (code, err) == (0, "")
    assert "3 blocks inserted" in out
    scores = [float(score) for score in re.findall(r"seed \d: top-1 ([\d.]+) %", out)]
    assert float(re.findall(r"top-1 ([\d.]+) ± .* over 2 seed", out)[0]) == pytest.approx(sum(scores) / 2, abs=0.01)
    assert "inserted" not in run_here(*arguments, "--plain", "--images", "24")[1]


# --- finetune_folder.py -----------------------------------------------------------------------------------------------


@pytest.fixture
def zoo(tmp_path):
    """A checkpoint for other classes."""
    torch.manual_seed(0)
    torch.save(create_model("resnet20", num_classes=10).state_dict(), tmp_path / "zoo.pth")
    return tmp_path / "zoo.pth"


@pytest.fixture
def finetune(run_here, monkeypatch, zoo):
    """Runs the example beside the checkpoint: what it says, and its score."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.chdir(zoo.parent)

    def finetune(folder, *flags):
        arguments = [*EXAMPLES["finetune_folder.py"], "--data", folder, "--weights", zoo, "--output", "tuned", *flags]
        code, out, err = run_here("finetune_folder.py", *arguments)
        assert (code, err) == (0, "")
        return out, score_of(out)

    return finetune


def score_of(out):
    assert "2 new by design: fc.weight, fc.bias" in out
    (score,) = re.findall(r"^top-1 (.*) %, in tuned\.(?:pth|safetensors)$", out, re.MULTILINE)
    return float(score)


@torch.no_grad()
def accuracy(model, folder):
    statistics = create_model("resnet20", num_classes=3).pretrained_cfg
    transform = Compose([ToTensor(), Normalize(statistics["mean"], statistics["std"])])
    images = ImageFolder(folder, transform)
    right = [int(model(image[None]).argmax()) == label for image, label in images]
    return 100 * sum(right) / len(right)


def with_attention():
    model = create_model("resnet20", num_classes=3).eval()
    va.insert_(model, stages=-1, example_input=(1, 3, 32, 32))
    return model


def test_finetune_folder_trains_what_is_new_and_then_all(image_folder, zoo, finetune):
    out, score = finetune(image_folder)
    assert out.count("  epoch ") == 4
    assert score > 90
    model = with_attention()
    va.load_checkpoint(model, zoo.parent / "tuned.pth")
    assert accuracy(model, image_folder / "val") == pytest.approx(score, abs=0.01)
    assert va.inserted(model)["layer3.2"].attn.proj.weight.abs().max() > 0
    # All of it was trained, not only what is new.
    given = torch.load(zoo, weights_only=True)
    assert not torch.equal(model.conv1.weight, given["conv1.weight"])


def test_finetune_folder_leaves_an_adapter_for_the_backbone_that_it_was_given(image_folder, zoo, finetune):
    out, score = finetune(image_folder, "--adapter-only")
    assert out.count("  epoch ") == 1
    model = create_model("resnet20", num_classes=3).eval()
    va.load_checkpoint(model, zoo, fresh="fc.*")
    report = va.load_adapter_(model, zoo.parent / "tuned.safetensors")
    assert {"fc.weight", "layer3.2.inserted.gate"} <= set(report.loaded)
    assert accuracy(model, image_folder / "val") == pytest.approx(score, abs=0.01)


@pytest.mark.slow
def test_finetune_folder_runs_on_two_processes(image_folder, zoo):
    # 25 images to evaluate on, which neither processes nor batches divide, and the last one of them not in its class.
    folder = shutil.copytree(image_folder, zoo.parent / "images")
    shutil.copy(folder / "val" / "blue" / "0.png", folder / "val" / "red" / "z.png")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = [*EXAMPLES["finetune_folder.py"], "--data", folder, "--weights", zoo, "--output", "tuned"]
    command = [*launcher, ROOT / "examples/finetune_folder.py", *arguments, "--batch-size", "6", "--epochs", "1", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=zoo.parent)
    assert done.returncode == 0, done.stderr
    score = score_of(done.stdout)
    assert "2 process(es) on cpu" in done.stdout
    assert done.stdout.count("  epoch ") == 3  # each said once
    model = with_attention()
    va.load_checkpoint(model, zoo.parent / "tuned.pth")
    assert accuracy(model, folder / "val") == pytest.approx(score, abs=0.01)
    assert score < 100


def test_finetune_folder_says_what_it_cannot_train_on(image_folder, zoo, run_here, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    arguments = [
        "finetune_folder.py",
        *EXAMPLES["finetune_folder.py"],
        "--weights",
        zoo,
        "--output",
        tmp_path / "tuned",
    ]
    arguments += ["--data"]
    code, _, err = run_here(*arguments, image_folder, "--batch-size", "73")
    assert (code, err) == (
        1, "--batch-size must be at most 72, so that the 72 training images fill one in each process\n"
    )  # fmt: skip
    folder = shutil.copytree(image_folder, tmp_path / "images")
    (folder / "val" / "blue").rename(folder / "val" / "violet")
    code, _, err = run_here(*arguments, folder)
    assert (code, err) == (1, "val must have the classes of train, blue, green, red; it has green, red, violet\n")


# --- evidence.py and denoise.py ---------------------------------------------------------------------------------------


@pytest.fixture
def evidence(monkeypatch):
    monkeypatch.setenv("EVIDENCE_MAPS", "")  # the plan sets it
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setitem(settings.CHOICES, "block", settings.CHOICES["block"])
    monkeypatch.setattr(network, "BLOCKS", dict(network.BLOCKS))
    return importlib.import_module("evidence")


@pytest.mark.parametrize("plan", ["cifar", "positions", "adapters"])
def test_a_plan_makes_the_runs_that_it_says(evidence, image_folder, tmp_path, monkeypatch, plan):
    """Each network is made and takes an image; none is trained."""
    made = {}

    def outcome(settings):
        source = SimpleNamespace(classes=("a", "b", "c"), channels=3, size=None)
        settings = replace(settings, weights=None, reset_head=False, freeze_backbone=False)
        built = network.build_network(settings, source, lambda line: None)
        made[settings.folder.name] = settings, [type(block).__name__ for block in va.inserted(built.model).values()]
        # Without data, as a run counts them at its end; a network by itself would read its maps.
        multiply_adds = runs.count_multiply_adds(built.model, (1, 3, *built.size)) if plan == "positions" else 0
        return runs.Outcome(50.0, 1.0, built.parameters, multiply_adds, 1.0, 1.0, None)

    monkeypatch.setattr(runs, "run", outcome)
    (tmp_path / "data").mkdir()
    for half in ("train", "test"):
        (tmp_path / "data" / half).symlink_to(image_folder / "train")
    torch.manual_seed(0)
    torch.save(timm.create_model("resnet20").state_dict(), tmp_path / "net.pth")
    arguments = [plan, "--data", str(tmp_path / "data"), "--output", str(tmp_path / "runs")]
    arguments += ["--weights", str(tmp_path / "net.pth")]
    evidence.main([*arguments, *EXAMPLES["evidence.py"]])
    ways, seeds = {name: blocks for name, (_, blocks) in made.items()}, {one.seed for one, _ in made.values()}
    if plan == "cifar":
        assert {name: len(blocks) for name, blocks in ways.items() if name.endswith("-0")} == {
            "in the last stage-0": 3, "at two ends-0": 2, "botnet-0": 3, "augmented-0": 6, "beside se-0": 10,
            "gating-0": 3, "attention pool-0": 0,
        }  # fmt: skip
        held_out = {one.seed: one.hold_out for one, _ in made.values()}
        assert held_out == {0: 0.1, 10: None}  # what is chosen by is not what is reported
        assert [name for name in ways if name.endswith("-10")][:2] == ["plain-10", "convolution-10"]
        assert ways["gating-0"] == ["Gating"] * 3
    else:
        assert len(ways) == 9
        assert seeds == {0}
    if plan == "positions":
        canvases = list((tmp_path / "runs" / "canvases").glob("*/*/*.png"))
        assert len(canvases) == 72
        with Image.open(canvases[0]) as image:
            assert image.size == (64, 64)
            pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 255
        mean, std = (torch.tensor(evidence.CIFAR10[name]).view(3, 1, 1) for name in ("mean", "std"))
        both = torch.cat([pixels, pixels.flip(3)]).sub(mean).div(std)
        plain, remembering = (timm.create_model(name).eval() for name in ("resnet20", "remembering_resnet20"))
        plain.load_state_dict(torch.load(tmp_path / "net.pth"))
        maps = remembering.requires_grad_(False).forward_features(both)  # read, not made by these random weights
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            wanted = plain.forward_features(both).float()
        assert (maps - wanted).norm() / wanted.norm() < 0.02  # bfloat16, by kernels of the processor


def test_a_canvas_shows_what_its_class_says(evidence, image_folder, tmp_path):
    (tmp_path / "test").symlink_to(image_folder / "train")
    evidence.make_canvases(tmp_path, tmp_path / "canvases")
    pairs = {"row": (0, 1), "column": (0, 2), "diagonal": (0, 3)}
    for path in (tmp_path / "canvases").glob("*/*/*.png"):
        with Image.open(path) as image:
            pixels = np.asarray(image).astype(float).reshape(2, 32, 2, 32, 3).transpose(0, 2, 1, 3, 4)
        colours = pixels.reshape(4, -1, 3).mean(1).argmax(1)  # of the photographs; their class is their colour
        assert [(one, other) for one in range(4) for other in range(4) if one < other and colours[one] == colours[other]
                and one == 0] == [pairs[path.parent.name]]  # fmt: skip
        assert len(set(colours)) == 2


def test_denoising_is_noted_run_by_run(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "examples")
    denoise = importlib.import_module("denoise")
    monkeypatch.setattr(denoise, "photograph", lambda name: torch.rand(1, 1, 51, 50))
    arms = {arm: denoise.network(arm, 0) for arm in denoise.ARMS}
    x, level = torch.rand(1, 1, 48, 48), torch.full((1, 1, 1, 1), 0.2)
    assert {tuple(model(x, level).shape) for model in arms.values()} == {(1, 1, 48, 48)}
    sizes = {arm: sum(p.numel() for p in model.parameters()) for arm, model in arms.items()}
    assert all(abs(size - sizes["attention"]) < 150 for arm, size in sizes.items() if arm != "plain")
    arguments = [*EXAMPLES["denoise.py"], "--arms", "plain", "convolution", "--output", str(tmp_path)]
    denoise.main(arguments)
    text = (tmp_path / "denoise.md").read_text()
    assert "| convolution − plain |" in text
    monkeypatch.setattr(denoise, "run", None)  # all is noted already
    denoise.main(arguments)
    assert (tmp_path / "denoise.md").read_text() == text


# --- the five commands ------------------------------------------------------------------------------------------------


def five_commands():
    page = (ROOT / "docs/training.md").read_text()
    (block,) = re.findall(r"^# Train\n.*?^```text\n(vision-attn inspect.*?)^```", page, re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for line in block.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("held_out", [True, False], ids=["with val", "without val"])
def test_the_five_commands_lead_from_a_folder_of_images_to_a_model_in_use(
    image_folder, zoo, tmp_path, monkeypatch, capsys, run_here, held_out
):
    """Word for word, on another folder, with fewer epochs and smaller batches."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flowers").mkdir()
    for half in ("train", *["val"] * held_out):
        (tmp_path / "flowers" / half).symlink_to(image_folder / half)
    shutil.copyfile(image_folder / "val" / "red" / "0.png", "rose.jpg")  # its name does not matter
    zoo.rename("cifar10_resnet20.pth")
    commands = five_commands()
    assert [words[1] for words in commands] == ["inspect", "train", "train", "predict", "export"]
    said = []
    for words in commands:
        assert cli.main(words[1:] + (["--epochs", "8", "--batch-size", "16"] if "--epochs" in words else [])) == 0
        said.append(capsys.readouterr().out)
    _, trained, evaluated, predicted, exported = said
    assert "epoch 8/8" in trained
    best = re.findall(r"best epoch: top-1 ([\d.]+) %", trained)
    assert re.findall(r"top-1 ([\d.]+) %", evaluated)[0] == best[0]
    assert re.findall(r"\w+(?= \d+\.\d+ %)", predicted)[0] == "red"
    assert "the largest difference of a logit" in exported
    monkeypatch.setitem(sys.modules, "torch", None)  # which classify.py needs not
    code, out, err = run_here("classify.py", "flowers.onnx", *sorted(image_folder.glob("val/*/*.png")))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    right = [line.split("  ")[1].startswith(Path(line.split("  ")[0]).parent.name) for line in lines]
    assert len(lines) == 24
    assert sum(right) > 20
    if held_out:
        assert 100 * sum(right) / 24 == pytest.approx(float(best[0]), abs=0.01)


# --- classify.py ------------------------------------------------------------------------------------------------------


STATISTICS = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
CLASSES = ["blue", "green", "red"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A network, and the file that is exported of it with these flags, once for all tests."""
    folder = tmp_path_factory.mktemp("classify")
    torch.manual_seed(0)
    model = create_model("tiny", num_classes=3).eval()
    of_run = Settings(data="", model="tiny").as_dict()
    about = {"settings": of_run, "classes": CLASSES, "input_size": [3, 32, 32], **STATISTICS}
    torch.save({"model": model.state_dict(), **about}, folder / "best.pth")

    @functools.cache
    def exported(*flags):
        path = folder / f"net{''.join(flags)}.onnx"
        assert cli.main(["export", str(folder / "best.pth"), "--output", str(path), *flags]) == 0
        return model, path

    return exported


@pytest.fixture
def pictures(tmp_path):
    """A photograph that lies on its side, and a picture of 16 bits a pixel."""
    noise = np.random.default_rng(0).integers(0, 256, (40, 120, 3), dtype=np.uint8)
    noise[:, :60] //= 4
    photograph = Image.fromarray(noise)
    exif = photograph.getexif()
    exif[0x0112] = 6
    photograph.save(tmp_path / "photograph.png", exif=exif)
    deep = np.linspace(0, 2**16 - 1, 36 * 32).reshape(36, 32).astype(np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    return [tmp_path / "photograph.png", tmp_path / "deep.png"]


@pytest.mark.parametrize("flags", [(), ("--no-normalize",)], ids=str)
def test_classifying_sees_images_as_training_does(exported, image_folder, pictures, run_here, flags):
    model, network = exported(*flags)
    paths = [image_folder / "val" / "red" / "0.png", *pictures]
    images = torch.stack([pil_to_tensor(open_image(path)) for path in paths])
    mean, std = (torch.tensor(STATISTICS[name]).view(3, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        shares = model((images / 255 - mean) / std).softmax(1)
    expected = [
        "  ".join([str(path), *(f"{CLASSES[i]} {100 * row[i]:.1f} %" for i in row.argsort(descending=True))])
        for path, row in zip(paths, shares, strict=True)
    ]
    code, out, err = run_here("classify.py", network, *paths)
    assert (code, out.splitlines(), err) == (0, expected, "")


def test_classifying_says_what_it_cannot_read(exported, pictures, run_here, tmp_path):
    _, network = exported()
    Image.fromarray(np.full((32, 32), 255, np.int32)).save(tmp_path / "deep.tif")
    (tmp_path / "half.png").write_bytes(pictures[0].read_bytes()[:500])
    for name, reason in (
        ("deep.tif", "32 bits a pixel, whose range is not known"),
        ("half.png", "truncated"),
        ("none.png", "No such file"),
    ):
        code, out, err = run_here("classify.py", network, pictures[0], tmp_path / name)
        assert (code, out.count("\n"), err.count("\n")) == (1, 1, 1)
        assert err.startswith(f"{tmp_path / name}: a damaged or no image (")
        assert reason in err
    model = onnx.load(network)
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "other.onnx")
    for path in (tmp_path / "other.onnx", tmp_path / "none.onnx", pictures[0]):
        code, out, err = run_here("classify.py", path, pictures[0])
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert err.startswith(f"{path}: no network that vision-attn export wrote (")


@pytest.mark.parametrize("name", ["resnet20", "resnet56_a", "digit_pairs_attention"])
def test_torch_hub_finds_the_networks(name):
    model = torch.hub.load(str(ROOT), name, source="local", trust_repo=True)
    assert sum(p.numel() for p in model.parameters()) > 20_000


@pytest.mark.gpu
@pytest.mark.parametrize("options", [[], ["--compile"]])
def test_train_cifar_on_a_gpu(small_cifar, run_here, options):
    code, out, err = run_here("train_cifar.py", *EXAMPLES["train_cifar.py"], *options, "--data", small_cifar)
    assert code == 0, err
    assert "over 2 seed(s)" in out

"""Every script that trains runs, as its header says, on small data."""

import importlib
import json
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
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.datasets import ImageFolder

import vision_attn as va
from vision_attn.networks.models import create_model
from vision_attn.tools import cli
from vision_attn.tools.comparison import experiments, runs
from vision_attn.tools.training.data import open_data, open_image
from vision_attn.tools.training.network import build_network

ROOT = Path(__file__).resolve().parents[1]

#: Arguments that make an example small.
EXAMPLES = {
    "train_cifar.py": "--epochs 1 --batch-size 24 --seeds 2 --lr 0.05",
    "finetune_folder.py": "--model resnet20 --epochs 1 3 --batch-size 12 --workers 0",
    "classify.py": "",
    "evidence.py": "--epochs 1 --seeds 0 --jobs 1",
    "recall.py": "--variants linear matching --seeds 0 --steps 20 --jobs 1",
    "mosaic.py": "--variants 'nearest neighbour' matching --seeds 0 --steps 1 --thaw 1 --jobs 1",
    "stereo.py": "--variants cost-volume matching --seeds 0 --steps 1 --jobs 1",
    "denoise.py": "--sigmas 50 --seeds 0 1 --steps 1 --variants plain convolution",
    "colour_by_reference.py": "--steps 1 --jobs 1 --seeds 0",
}
EXAMPLES = {name: shlex.split(flags) for name, flags in EXAMPLES.items()}


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Runs an example as a program, but in this process: its exit code and what it says."""

    def run_here(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, (*EXAMPLES[name], *arguments))])
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


@pytest.fixture(autouse=True)
def few_timed_steps(monkeypatch):
    monkeypatch.setattr(experiments, "ROUNDS", 5)


def test_every_example_is_tested():
    scripts = {path.name for path in (ROOT / "examples").glob("*.py") if not path.read_text().startswith("# %%")}
    assert scripts == set(EXAMPLES)  # the others are walkthroughs


@pytest.mark.parametrize("name", ["resnet20", "resnet56_a", "recall_attention"])
def test_torch_hub_finds_the_networks(name):
    model = torch.hub.load(str(ROOT), name, source="local", trust_repo=True)
    assert sum(p.numel() for p in model.parameters()) > 20_000


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_train_cifar_ends_with_mean_and_deviation_over_seeds(image_folder, tmp_path, run_here, device):
    for name, half in (("train", "train"), ("test", "val")):
        (tmp_path / name).symlink_to(image_folder / half)
    code, out, err = run_here("train_cifar.py", "--data", tmp_path, "--device", device)
    assert (code, err) == (0, "")
    assert "3 blocks inserted" in out
    scores = [float(score) for score in re.findall(r"seed \d: top-1 ([\d.]+) %", out)]
    assert float(re.findall(r"top-1 ([\d.]+) ± .* over 2 seed", out)[0]) == pytest.approx(sum(scores) / 2, abs=0.01)
    assert "inserted" not in run_here("train_cifar.py", "--data", tmp_path, "--plain", "--images", "24")[1]


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
        code, out, err = run_here("finetune_folder.py", "--data", folder, "--weights", zoo, "--output", "tuned", *flags)
        assert (code, err) == (0, "")
        return out, score_of(out)

    return finetune


def score_of(out):
    assert "2 new by design: fc.weight, fc.bias" in out
    (score,) = re.findall(r"^top-1 (.*) %, in tuned\.(?:pth|safetensors)$", out, re.MULTILINE)
    return float(score)


@torch.no_grad()
def accuracy(model, folder):
    images = ImageFolder(folder, timm.data.create_transform(**timm.data.resolve_data_config(model=model)))
    return 100 * sum(int(model(image[None]).argmax()) == label for image, label in images) / len(images)


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
    assert va.inserted_blocks(model)["layer3.2"].attn.proj.weight.abs().max() > 0
    # All of it was trained, not only what is new.
    assert not torch.equal(model.conv1.weight, torch.load(zoo, weights_only=True)["conv1.weight"])


def test_finetune_folder_leaves_an_adapter_for_the_backbone_that_it_was_given(image_folder, zoo, finetune):
    out, score = finetune(image_folder, "--adapter-only")
    assert out.count("  epoch ") == 1
    model = create_model("resnet20", num_classes=3).eval()
    va.load_checkpoint(model, zoo, skip="fc.*")
    report = va.load_adapter_(model, zoo.parent / "tuned.safetensors")
    assert {"fc.weight", "layer3.2.inserted.gate"} <= set(report.loaded)
    assert accuracy(model, image_folder / "val") == pytest.approx(score, abs=0.01)


@pytest.mark.slow
def test_finetune_folder_runs_on_two_processes(image_folder, zoo):
    # 25 images to evaluate on, which neither processes nor batches divide; the last is not in its class.
    folder = shutil.copytree(image_folder, zoo.parent / "images")
    shutil.copy(folder / "val" / "blue" / "0.png", folder / "val" / "red" / "z.png")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [ROOT / "examples/finetune_folder.py", *EXAMPLES["finetune_folder.py"], "--data", folder]
    command += ["--weights", zoo, "--output", "tuned", "--batch-size", "6", "--epochs", "1", "2"]
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
    arguments = ["finetune_folder.py", "--weights", zoo, "--output", tmp_path / "tuned", "--data"]
    said = "--batch-size must be at most 72, so that the 72 training images fill one in each process\n"
    code, _, err = run_here(*arguments, image_folder, "--batch-size", "73")
    assert (code, err) == (1, said)
    folder = shutil.copytree(image_folder, tmp_path / "images")
    (folder / "val" / "blue").rename(folder / "val" / "violet")
    code, _, err = run_here(*arguments, folder)
    assert (code, err) == (1, "val must have the classes of train, blue, green, red; it has green, red, violet\n")


# --- denoise.py -------------------------------------------------------------------------------------------------------


def test_denoising_is_noted_run_by_run(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    denoise = importlib.import_module("denoise")
    monkeypatch.setattr(denoise, "photograph", lambda name: torch.rand(1, 1, 51, 50))
    variants = {variant: denoise.network(variant, 0) for variant in denoise.VARIANTS}
    x, level = torch.rand(1, 1, 48, 48), torch.full((1, 1, 1, 1), 0.2)
    assert {tuple(model(x, level).shape) for model in variants.values()} == {(1, 1, 48, 48)}
    sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in variants.items()}
    assert all(abs(size - sizes["attention"]) < 150 for name, size in sizes.items() if name != "plain")
    arguments = [*EXAMPLES["denoise.py"], "--output", str(tmp_path)]
    denoise.main(arguments)
    text = (tmp_path / "denoise.md").read_text()
    assert "| convolution − plain |" in text
    monkeypatch.setattr(denoise, "run", None)  # all is noted already
    denoise.main(arguments)
    assert (tmp_path / "denoise.md").read_text() == text


# --- colour_by_reference.py -------------------------------------------------------------------------------------------


@pytest.fixture
def reference(monkeypatch):
    """The example, with noise in the place of photographs."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    reference, draw = importlib.import_module("colour_by_reference"), np.random.default_rng(0)
    monkeypatch.setattr(reference, "photograph", lambda name: draw.integers(0, 256, (120, 130, 3), dtype=np.uint8))
    monkeypatch.setattr(reference, "HARDLY_ANY", 0.02)
    monkeypatch.setattr(reference, "CANVASES", 2)
    reference.photographs.cache_clear()
    yield reference
    reference.photographs.cache_clear()


@pytest.mark.parametrize("train", [True, False])
def test_each_grey_photograph_has_one_coloured_twin(reference, monkeypatch, train):
    monkeypatch.setattr(reference, "NOISE", 0.0)
    given, left = reference.canvases(3, train, torch.Generator().manual_seed(0))
    assert torch.equal(given[:, 0, :, :48], left[:, 0])
    assert given[:, 1:, :, :48].abs().max() == 0
    flips = set()
    for canvas in range(3):
        seen = given[canvas, :, :, 48:].unfold(1, 18, 1).unfold(2, 18, 1)  # whatever may be a twin
        places = set()
        for photograph in left[canvas].unfold(1, 24, 24).unfold(2, 24, 24).flatten(1, 2).unbind(1):
            small = F.interpolate(photograph[None], (18, 18), mode="area")[0]
            for flipped in (False, True):
                twin = small.flip(2) if flipped else small
                found = ((seen - twin[:, None, None]).abs().amax((0, 3, 4)) < 1e-6).nonzero().tolist()
                places |= {(y // 24, x // 24) for y, x in found}
                flips |= {flipped} if found else set()
        assert len(places) == 4
    assert flips == {False, True}


def test_colours_are_given_by_reference(reference, tmp_path):
    arguments = [*EXAMPLES["colour_by_reference.py"], "--output", str(tmp_path)]
    reference.main([*arguments, "--variants", "plain", "attention"])
    assert re.search(
        r"\| attention +\| +\d+ \| +[\d,]+ \| +\d+\.\d+ \| +1 \|", (tmp_path / "comparison.md").read_text()
    )
    reference.main([*arguments, "--picture", str(tmp_path / "colours.png")])
    with Image.open(tmp_path / "colours.png") as image:
        assert image.width > 1_000


# --- recall.py, mosaic.py and stereo.py -------------------------------------------------------------------------------


def test_blocks_for_retrieval_are_inserted_without_changing_the_output(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 6)
    for block, options in importlib.import_module("recall").retrieval_blocks(6).values():
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 1), torch.nn.ReLU())
        before = model(x)
        if block is not None:
            va.insert_(model, block, names="0", example_input=x, **options)
        torch.testing.assert_close(model.eval()(x), before)


def test_recall_draws_its_curve_and_resumes(tmp_path, run_here, monkeypatch):
    monkeypatch.setattr("vision_attn.tools.comparison.recall.BATCH", 4)
    code, out, _ = run_here("recall.py", "--output", tmp_path)
    assert (code, len(re.findall(r"^\| (?:linear|matching) \|.* 1 \|$", out, re.MULTILINE))) == (0, 2)
    with Image.open(tmp_path / "curve.png") as picture:
        assert picture.width > 900
    assert run_here("recall.py", "--beginnings", tmp_path / "beginnings.png")[0] == 0
    with Image.open(tmp_path / "beginnings.png") as picture:
        assert picture.width > 1200
    monkeypatch.setattr(torch.optim, "AdamW", None)  # nothing is trained again
    assert run_here("recall.py", "--output", tmp_path)[1].endswith(out[out.index("\n| variant") :])
    code, _, err = run_here("recall.py", "--output", tmp_path, "--steps", "40")
    assert (code, "holds a run with {'steps': 20}, not {'steps': 40}" in err) == (2, True)


def test_labels_of_a_mosaic_are_those_of_its_examples(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    mosaic = importlib.import_module("mosaic")
    for name in range(22):  # of one colour a class, which tells it
        folder = tmp_path / "data" / "train" / f"{name:02}"
        folder.mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (32, 32), (11 * name, 255 - 11 * name, 40 * number)).save(folder / f"{number}.png")
    torch.save(timm.create_model("resnet20").state_dict(), tmp_path / "net.pth")
    for name, value in {"HELD_OUT": 11, "MOSAICS": 8}.items():
        monkeypatch.setattr(mosaic, name, value)
    arguments = ["--data", str(tmp_path / "data"), "--weights", str(tmp_path / "net.pth"), "--output", str(tmp_path)]
    mosaic.main([*arguments, *EXAMPLES["mosaic.py"]])
    found = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert set(found) == {"nearest neighbour", "matching"}
    assert all(set(one["0"]) == {"parameters", "right %", "thawed %"} for one in found.values())
    kept, seen = torch.load(tmp_path / "photographs-1.pt"), mosaic.Seen()
    seen.thaw(tmp_path / "net.pth", parts=1)  # from the maps it makes the features that are kept, and learns
    features = seen.features(kept["maps"])
    torch.testing.assert_close(features, kept["features"], atol=0.02, rtol=0.02)
    features.sum().backward()
    assert all(parameter.grad is not None for parameter in seen.parameters())
    mosaic.keep(tmp_path / "data", tmp_path / "net.pth", tmp_path / "wide.pt", 4)
    wide = torch.load(tmp_path / "wide.pt")["features"]
    torch.testing.assert_close(wide.unflatten(2, (64, 16)).mean(3), kept["features"], atol=1e-5, rtol=1e-5)
    for arm, width in {"narrow": 256, "matching": 512, "whole": 1024}.items():
        (block,) = va.inserted_blocks(mosaic.begin(arm, 0, parts=4)).values()
        assert (block.attn.proj.in_channels, block.attn.proj.out_channels) == (width, 1024)
    pool = torch.eye(64)[:11, None].expand(-1, 3, -1)  # every photograph of a class alike
    features, given, asked = mosaic.mosaics(8, pool, torch.Generator().manual_seed(0))
    assert (given.sum((1, 2)) == 5).all()
    assert ((given.sum(2) == 1) == (asked == mosaic.NOTHING)).all()
    right = mosaic.Nearest()(features, given).argmax(1) == asked
    assert right[asked != mosaic.NOTHING].all()


def test_stereo_measures_synthetic_pairs_and_the_real_one(tmp_path, monkeypatch):
    pytest.importorskip("skimage")
    monkeypatch.syspath_prepend(ROOT / "examples")
    stereo = importlib.import_module("stereo")
    monkeypatch.setattr(stereo, "TESTED", 2)
    stereo.main([*EXAMPLES["stereo.py"], "--output", str(tmp_path)])
    found = json.loads((tmp_path / "runs.json").read_text())
    assert set(found["runs"]["matching"]["0"]) == {"parameters", "synthetic px", "real px", "real within 3 px %"}
    left, right, disparity = stereo.pair(torch.Generator().manual_seed(1))
    column = torch.arange(stereo.WIDTH).expand_as(disparity)
    seen = (column - disparity).round().long()  # what is at a place of the left view is that much further left
    same = (right.gather(2, seen.clamp(0).expand(3, -1, -1)) - left).abs().mean(0)[seen >= 0]
    assert same.median() < 0.1 < (right - left).abs().mean()


# --- evidence.py ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["cifar", "positions", "matching", "adapters"])
def test_a_plan_makes_the_runs_that_it_says(image_folder, tmp_path, monkeypatch, plan):
    """Each network is made; none is trained."""
    monkeypatch.setenv("EVIDENCE_MAPS", "")  # the plan sets it
    monkeypatch.syspath_prepend(ROOT / "examples")
    evidence, made = importlib.import_module("evidence"), {}

    def build(settings):
        plain = replace(settings, weights=None, reset_head=False, freeze_backbone=False)
        model = build_network(plain, open_data(plain, train=True), lambda line: None).model
        made[settings.output.name] = settings, list(va.inserted_blocks(model).values())
        disabled, final = None, SimpleNamespace(top1=50.0)
        rows = [{"images_per_second": 1}]
        return SimpleNamespace(model=model, input_size=(3, 32, 32), rows=rows, disabled=disabled, final=final)

    monkeypatch.setattr(runs, "run_training", build)
    (tmp_path / "data").mkdir()
    for half in ("train", "test"):
        (tmp_path / "data" / half).symlink_to(image_folder / "train")
    torch.manual_seed(0)
    torch.save(timm.create_model("resnet20").state_dict(), tmp_path / "net.pth")
    arguments = [plan, "--data", str(tmp_path / "data"), "--output", str(tmp_path / "runs")]
    evidence.main([*arguments, "--weights", str(tmp_path / "net.pth"), *EXAMPLES["evidence.py"]])
    if plan == "cifar":
        assert {name: len(blocks) for name, (_, blocks) in made.items() if name.endswith("-0")} == {
            "in the last stage-0": 3, "at two ends-0": 2, "botnet-0": 3, "augmented-0": 6, "beside se-0": 10,
            "gating-0": 3, "attention pool-0": 0,
        }  # fmt: skip
        # What is chosen by is not what is reported.
        assert {one.seed: one.val_share for one, _ in made.values()} == {0: 0.1, 10: None}
        assert [name for name in made if name.endswith("-10")][:2] == ["plain-10", "convolution-10"]
        assert {(type(one), one.attn.num_heads) for one in made["gating-0"][1]} == {(evidence.Gating, 4)}
    else:
        assert (len(made), {one.seed for one, _ in made.values()}) == (2 if plan == "matching" else 9, {0})
    if plan == "matching":
        qk_norms = {name: blocks[0].attn.qk_norm for name, (_, blocks) in made.items()}
        assert qk_norms == {"matching-0": "match", "attention with positions-0": False}
    canvases = list((tmp_path / "runs" / "canvases").glob("*/*/*.png"))
    assert len(canvases) == (72 if plan in ("positions", "matching") else 0)
    for path in canvases:  # what their class says
        with Image.open(path) as image:
            pixels = np.asarray(image).astype(float).reshape(2, 32, 2, 32, 3).transpose(0, 2, 1, 3, 4)
        colours = pixels.reshape(4, -1, 3).mean(1).argmax(1)  # of the photographs; their class is their colour
        partner = {"row": 1, "column": 2, "diagonal": 3}[path.parent.name]
        assert [place for place in (1, 2, 3) if colours[place] == colours[0]] == [partner]
        assert len(set(colours)) == 2


# --- the five commands, and classify.py -------------------------------------------------------------------------------


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
    block, *_ = re.findall(r"^```text\n(.*?)^```", (ROOT / "docs/training.md").read_text(), re.MULTILINE | re.DOTALL)
    commands = [shlex.split(line) for line in block.splitlines()]
    assert [words[1] for words in commands] == ["inspect", "train", "evaluate", "predict", "export"]
    said = []
    for words in commands:
        assert cli.main(words[1:] + (["--epochs", "8", "--batch-size", "16"] if "--epochs" in words else [])) == 0
        said.append(capsys.readouterr().out)
    _, trained, evaluated, predicted, exported = said
    best = re.findall(r"best epoch, \d+: top-1 ([\d.]+) %", trained)
    assert re.findall(r"top-1 ([\d.]+) %", evaluated)[0] == best[0]
    assert re.findall(r"\w+(?= \d+\.\d+ %)", predicted)[0] == "red"
    assert "the largest difference from the network's output" in exported
    monkeypatch.setitem(sys.modules, "torch", None)  # which classify.py needs not
    code, out, err = run_here("classify.py", "flowers.onnx", *sorted(image_folder.glob("val/*/*.png")))
    assert (code, err) == (0, "")
    right = [line.split("  ")[1].startswith(Path(line.split("  ")[0]).parent.name) for line in out.splitlines()]
    assert len(right) == 24
    assert sum(right) > 20


@pytest.mark.parametrize("flags", [(), ("--no-normalize",)], ids=str)
def test_classifying_sees_images_as_the_library_does(tmp_path, run_here, flags):
    """A photograph that lies on its side, and a picture of 16 bits a pixel."""
    pictures = [tmp_path / "photograph.png", tmp_path / "deep.png"]
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 120, 3), dtype=np.uint8))
    exif = noise.getexif()
    exif[0x0112] = 6
    noise.save(pictures[0], exif=exif)
    Image.fromarray(np.linspace(0, 2**16 - 1, 36 * 32).reshape(36, 32).astype(np.uint16)).save(pictures[1])
    model = create_model("tiny", num_classes=3).eval()
    model.pretrained_cfg |= {"crop_pct": 0.9, "interpolation": "bicubic", "mean": (0.1, 0.2, 0.3)}
    model = va.load_model(va.save_model(model, tmp_path / "net", classes=["blue", "green", "red"]))
    assert cli.main(["export", str(tmp_path / "net"), "--output", str(tmp_path / "net.onnx"), *flags]) == 0
    with torch.no_grad():
        shares = model(torch.stack([model.transform(open_image(path)) for path in pictures])).softmax(1)
    expected = [
        "  ".join([str(path), *(f"{model.classes[i]} {100 * row[i]:.1f} %" for i in row.argsort(descending=True))])
        for path, row in zip(pictures, shares, strict=True)
    ]
    code, out, err = run_here("classify.py", tmp_path / "net.onnx", *pictures)
    assert (code, out.splitlines(), err) == (0, expected, "")
    (tmp_path / "half.png").write_bytes(pictures[0].read_bytes()[:500])
    code, out, err = run_here("classify.py", tmp_path / "net.onnx", tmp_path / "half.png")
    assert (code, out, err.partition(" (")[0]) == (1, "", f"{tmp_path / 'half.png'}: a damaged or no image")
    code, out, err = run_here("classify.py", pictures[0], pictures[0])
    assert (code, out, err.partition(" (")[0]) == (1, "", f"{pictures[0]}: no network that vision-attn export wrote")

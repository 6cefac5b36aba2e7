"""Exported networks, run as a stranger would run them: the same logits, the classes with them, or no file at all."""

import functools
import json
import os
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

import vision_attn as va
from vision_attn.errors import CheckpointError, ExportError
from vision_attn.networks.models import create_model
from vision_attn.tools import cli
from vision_attn.tools.export import formats
from vision_attn.tools.export.classifier import Classifier, load_run
from vision_attn.tools.export.export import export_classifier
from vision_attn.tools.training.data import open_data
from vision_attn.tools.training.images import open_image, prepare
from vision_attn.tools.training.settings import Settings
from vision_attn.tools.training.train import train

pytestmark = pytest.mark.usefixtures("no_pictures")

FILES = {"onnx": "net.onnx", "torch-export": "net.pt2", "folder": "net", "safetensors": "net.safetensors"}
MEAN, STD = (0.2, 0.3, 0.4), (0.5, 0.6, 0.7)
CLASSES = ["blue", "green", "red"]


def settings_of(image_folder, **options):
    common = {"model": "tiny", "insert": ("layer2",), "num_heads": 4, "mean": MEAN, "std": STD}
    return Settings(data=str(image_folder), device="cpu", **{**common, **options})


def save_checkpoint(path, settings, model, **further):
    """A checkpoint as a run writes it, of a network whose blocks do much to its output."""
    with torch.no_grad():
        for block in va.inserted(model).values():
            block.attn.proj.weight.normal_(std=0.1)
    about = {
        "settings": settings.as_dict(),
        "classes": CLASSES,
        "input_size": [3, 32, 32],
        "mean": list(MEAN),
        "std": list(STD),
    }
    torch.save({"model": model.state_dict(), **about, **further}, path)
    return path


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    model = create_model("tiny", num_classes=3)
    va.insert_(model, names="layer2", num_heads=4, example_input=(1, 3, 32, 32))
    return model.eval()


def small_classifier():
    """A network that no registry knows, with a block that does something."""
    torch.manual_seed(0)
    body, head = torch.nn.Conv2d(3, 8, 3, stride=4), torch.nn.Linear(8, 2)
    model = torch.nn.Sequential(body, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), head)
    va.insert_(model, names="0", num_heads=4, gate_init=0.5, example_input=(1, 3, 16, 24))
    return Classifier(model.eval(), ("cat", "dog"), (3, 16, 24), MEAN, STD)


@pytest.fixture
def checkpoint(image_folder, network, tmp_path):
    return save_checkpoint(tmp_path / "best.pth", settings_of(image_folder), network)


@pytest.fixture(scope="module")
def exported(image_folder, network, tmp_path_factory):
    """What is written as a format, once for all tests, what is said of it, and what of: a graph of a small network.

    The others, which cost little, are written by the command.
    """

    @functools.cache
    def exported(format):
        folder, said = tmp_path_factory.mktemp("exported"), StringIO()
        path = folder / "out" / FILES[format]
        if format in ("onnx", "torch-export"):
            classifier = small_classifier()
            return path, str(export_classifier(classifier, path)), classifier
        checkpoint = save_checkpoint(folder / "best.pth", settings_of(image_folder), network)
        with redirect_stdout(said):
            assert cli.main(["export", str(checkpoint), "--output", str(path)]) == 0
        return path, said.getvalue(), Classifier(network, tuple(CLASSES), (3, 32, 32), MEAN, STD, "tiny")

    return exported


def export(capsys, checkpoint, output, *flags):
    code = cli.main(["export", str(checkpoint), "--output", str(output), *flags])
    out, err = capsys.readouterr()
    return code, out, err


def run(path, images):
    """What the exported file makes of images, by nothing of ours but the registered network."""
    if path.suffix == ".onnx":
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
    with torch.no_grad():
        if path.suffix == ".pt2":
            return torch.export.load(path).module()(images)
        if path.is_dir():
            return timm.create_model(f"local-dir:{path}", pretrained=True).eval()(images)
        model = create_model("tiny", num_classes=3).eval()
        va.insert_(model, names="layer2", num_heads=4, example_input=(1, 3, 32, 32))
        model.load_state_dict(load_file(path), strict=True)
        return model(images)


def normalized(pixels):
    return (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


@pytest.mark.parametrize("format", FILES)
def test_what_is_exported_computes_what_the_network_does(exported, format):
    path, out, classifier = exported(format)
    assert f"{path}: {format}, " in out
    assert "the largest difference of a logit from the network's is " in out
    pixels = torch.rand(5, *classifier.input_size)
    with torch.no_grad():
        expected = classifier.model(normalized(pixels))
    found = run(path, pixels if format in ("onnx", "torch-export") else normalized(pixels))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def about(path):
    if path.suffix == ".onnx":
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return json.loads(session.get_modelmeta().custom_metadata_map["classifier"])
    if path.suffix == ".pt2":
        files = {"classifier": ""}
        torch.export.load(path, extra_files=files)
        return json.loads(files["classifier"])
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["classifier"])


@pytest.mark.parametrize("format", ["onnx", "torch-export", "safetensors"])
def test_a_file_says_what_must_be_known_to_use_it(exported, format):
    path, _, classifier = exported(format)
    found = about(path)
    assert found.pop("library") == f"vision_attn {va.__version__}"
    assert found.pop("mean") == pytest.approx(MEAN)
    assert found.pop("std") == pytest.approx(STD)
    assert found == {
        "classes": list(classifier.classes),
        "input_size": list(classifier.input_size),
        "pixels": "0…1, then (pixels - mean) / std" if format == "safetensors" else "0…1",
        "architecture": classifier.architecture,
        "inserted": [*va.inserted(classifier.model)],
    }


def test_a_folder_says_it_in_the_words_of_timm(tmp_path):
    # A network whose own configuration says 224 pixels, bicubic and a margin around the centre.
    classifier = Classifier(
        create_model("test_resnet", num_classes=3), tuple(CLASSES), (3, 96, 96), MEAN, STD, architecture="test_resnet"
    )
    export_classifier(classifier, tmp_path / "net")
    model = timm.create_model(f"local-dir:{tmp_path / 'net'}")
    assert model.pretrained_cfg["label_names"] == CLASSES
    assert model.pretrained_cfg["num_classes"] == 3
    config = timm.data.resolve_data_config(model=model)
    assert tuple(config["input_size"]) == (3, 96, 96)
    assert (config["mean"], config["std"]) == (pytest.approx(MEAN), pytest.approx(STD))
    # Timm prepares an image as training's evaluation does.
    noise = np.random.default_rng(0).integers(0, 256, (150, 150, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    found = timm.data.create_transform(**config)(Image.open(tmp_path / "noise.png"))
    pixels = prepare(open_image(tmp_path / "noise.png"), (96, 96), None) / 255
    torch.testing.assert_close(found, normalized(pixels))


@pytest.mark.parametrize("format", ["folder", "safetensors"])
def test_what_computes_something_else_leaves_no_file(capsys, checkpoint, tmp_path, monkeypatch, format):
    form = formats.FORMATS[format]

    def with_a_weaker_gate(classifier, normalize, path):
        other = classifier.to_export()
        with torch.no_grad():
            other.model.layer2[2].inserted.gate.mul_(0.99)
        form.write(other, normalize, path)

    monkeypatch.setitem(formats.FORMATS, format, replace(form, write=with_a_weaker_gate))
    path = tmp_path / "out" / FILES[format]
    code, out, err = export(capsys, checkpoint, path)
    assert (code, out) == (1, "")
    assert "what was written computes something else: a logit differs by " in err
    assert list(path.parent.iterdir()) == []


def for_one_batch(classifier, normalize, path):
    program = torch.export.export(classifier.model, (torch.zeros(2, *classifier.input_size),))
    torch.export.save(program, path)


def half_way(classifier, normalize, path):
    path.write_bytes(b"the beginning of a graph")
    raise RuntimeError("data-dependent control flow")


@pytest.mark.parametrize(
    ("write", "message"), [(half_way, r"\(RuntimeError: data-dependent control flow\)"), (for_one_batch, r"\(\w+: ")]
)
def test_an_old_file_survives_a_failure(tmp_path, monkeypatch, write, message):
    form = formats.FORMATS["torch-export"]
    monkeypatch.setitem(formats.FORMATS, "torch-export", replace(form, write=write))
    path = tmp_path / "net.pt2"
    path.write_bytes(b"old")
    with pytest.raises(ExportError, match="the network cannot be exported " + message):
        export_classifier(small_classifier(), path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["net.pt2"]
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("format", ["folder", "safetensors"])
def test_what_is_there_is_replaced_whole_or_not_at_all(network, tmp_path, monkeypatch, format):
    classifier = Classifier(network, tuple(CLASSES), (3, 32, 32), MEAN, STD, architecture="tiny")
    path = tmp_path / "out" / FILES[format]
    export_classifier(classifier, path)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    old, replace_file, replaced = {}, os.replace, []
    for file in files:
        old[file] = (file.read_bytes(), file.write_bytes(b"old"))[0]

    def full(source, target):
        if Path(target) in files:
            replaced.append(Path(target))
            if len(replaced) == len(files):
                raise OSError("no space left")
        return replace_file(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        export_classifier(classifier, path)
    assert [file.read_bytes() for file in replaced] == [old[file] for file in replaced[:-1]] + [b"old"]
    assert (sorted(path.iterdir()) if path.is_dir() else [*path.parent.iterdir()]) == files
    monkeypatch.undo()
    export_classifier(classifier, path)
    assert [file.read_bytes() for file in files] == [old[file] for file in files]


@pytest.mark.parametrize(
    ("output", "flags", "message"),
    [
        ("..", [], "holds more than an export (best.pth, here): choose another --output"),
        ("new/..", [], "holds more than an export (file, mine, net.onnx): choose another --output"),
        ("mine", [], "mine holds more than an export (notes.txt): choose another --output"),
        ("net.onnx", [], "net.onnx is a folder, and what is written a file: choose another --output"),
        ("mine", ["--format", "onnx"], "mine is a folder, and what is written a file: choose another --output"),
        ("file", [], "file is a file, and what is written a folder: choose another --output"),
    ],
)
def test_nothing_but_an_export_is_written_over(capsys, checkpoint, tmp_path, monkeypatch, output, flags, message):
    here = tmp_path / "here"
    for folder in (here / "mine", here / "net.onnx"):
        folder.mkdir(parents=True)
    (here / "mine" / "notes.txt").touch()
    (here / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(here)
    for name, form in list(formats.FORMATS.items()):  # refused before the work
        monkeypatch.setitem(formats.FORMATS, name, replace(form, write=None))
    code, out, err = export(capsys, checkpoint, output, *flags)
    assert (code, out) == (2, "")
    assert message in err
    assert sorted(tmp_path.rglob("*")) == before


def test_timm_is_told_apart_what_only_differs_in_heads(capsys, image_folder, tmp_path):
    torch.manual_seed(0)
    model = create_model("tiny", num_classes=3)
    va.insert_(model, names="layer2", num_heads=8, example_input=(1, 3, 32, 32))
    checkpoint = save_checkpoint(tmp_path / "best.pth", settings_of(image_folder, num_heads=8), model.eval())
    code, _, err = export(capsys, checkpoint, tmp_path / "net", "--format", "timm")
    assert code == 2
    assert "timm alone knows no tiny with the blocks at layer2.2: choose a folder, which load_run reads" in err
    assert not (tmp_path / "net").exists()
    assert export(capsys, checkpoint, tmp_path / "net")[0] == 0
    assert va.inserted(load_run(tmp_path / "net").model)["layer2.2"].attn.num_heads == 8
    # What a checkpoint says of its blocks is compared with what its settings say.
    save_checkpoint(checkpoint, settings_of(image_folder, num_heads=4), model)
    code, _, err = export(capsys, checkpoint, tmp_path / "other")
    assert (code, "has num_heads=8 in the file and 4 in the model" in err) == (1, True)


def test_the_plain_network_and_other_channels_go_to_timm_too(image_folder, tmp_path):
    torch.manual_seed(0)
    model = create_model("test_convnext", num_classes=3, in_chans=1).eval()
    settings = settings_of(
        image_folder, model="test_convnext", insert=(), num_heads=8, img_size=64, mean=None, std=None
    )
    checkpoint = save_checkpoint(tmp_path / "best.pth", settings, model, input_size=[1, 64, 64], mean=[0.4], std=[0.3])
    export_classifier(load_run(checkpoint), tmp_path / "net")
    images = torch.randn(2, 1, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(run(tmp_path / "net", images), model(images))


def test_a_run_is_exported_as_it_was_evaluated(capsys, image_folder, tmp_path):
    settings = settings_of(
        image_folder,
        epochs=1,
        batch_size=16,
        lr=0.05,
        model_ema=True,
        model_ema_decay=0.6,
        output=str(tmp_path / "run"),
    )
    result = train(settings, lambda line: None)
    best, last = tmp_path / "best.safetensors", tmp_path / "last.safetensors"
    assert export(capsys, tmp_path / "run", best)[0] == 0
    assert export(capsys, tmp_path / "run" / "last.pth", last)[0] == 0
    data = open_data(settings, train=False).read((32, 32))
    best, last = (run(path, normalized(data.images / 255)) for path in (best, last))
    assert 100 * float((best.argmax(1) == data.labels).double().mean()) == pytest.approx(result.best.top1)
    # The moving average is what counts in the last epoch.
    with torch.no_grad():
        expected = result.model(result.normalize(data.images))
    torch.testing.assert_close(last, expected, rtol=1e-4, atol=1e-3)


def test_a_run_that_began_from_other_files_is_exported_without_them(image_folder, network, tmp_path):
    gone = str(tmp_path / "gone.pth")
    settings = settings_of(image_folder, weights=gone, reset_head=True, freeze_backbone=True)
    classifier = load_run(save_checkpoint(tmp_path / "best.pth", settings, network))
    for key, value in network.state_dict().items():
        assert torch.equal(classifier.model.state_dict()[key], value)
    assert (classifier.classes, classifier.input_size) == (tuple(CLASSES), (3, 32, 32))
    va.save_adapter(network, tmp_path / "adapter.safetensors")
    with pytest.raises(CheckpointError, match=r"is no checkpoint of a run.*give its best\.pth or last\.pth"):
        load_run(tmp_path / "adapter.safetensors")


def test_a_network_is_exported_in_float32_with_any_batch_without_its_wrapper_and_normalisation(tmp_path):
    classifier = small_classifier()
    half = classifier.model.bfloat16()
    va.set_impl_(half, "einx")  # which fixes the sizes
    wrapped = replace(classifier, model=torch.nn.DataParallel(half))
    report = export_classifier(wrapped, tmp_path / "net.pt2", normalize=False)
    assert report.difference < 1e-4
    assert "normalised by mean and std before" in str(report)
    (block,) = va.inserted(half).values()
    assert (half[3].weight.dtype, block.attn.impl) == (torch.bfloat16, "einx")
    images = torch.randn(4, 3, 16, 24)
    with torch.no_grad():
        expected = half.float()(images)
    torch.testing.assert_close(run(tmp_path / "net.pt2", images), expected, rtol=1e-4, atol=1e-4)


def test_any_network_can_be_exported_in_python(tmp_path):
    classifier = small_classifier()
    va.freeze_backbone_(classifier.model.train(), also_train="3.*")
    modes = [module.training for module in classifier.model.modules()]
    report = export_classifier(classifier, tmp_path / "net.pt2")
    assert report.input_size == (3, 16, 24)
    assert run(tmp_path / "net.pt2", torch.rand(1, 3, 16, 24)).shape == (1, 2)
    assert [module.training for module in classifier.model.modules()] == modes
    with pytest.raises(ValueError, match=r"classes: the network gives \(2,\) numbers .* and 3 classes are named"):
        export_classifier(replace(classifier, classes=("a", "b", "c")), tmp_path / "other.pt2")
    with pytest.raises(ValueError, match="architecture must be a name that timm knows; got None"):
        export_classifier(classifier, tmp_path / "folder")
    for std in ((0.5,), (0.5, 0.0, 0.5)):
        with pytest.raises(ValueError, match="mean and std must have a value for each of the 3 channels"):
            replace(classifier, std=std)
    assert [path.name for path in tmp_path.iterdir()] == ["net.pt2"]


@pytest.mark.parametrize(
    ("output", "flags", "message"),
    [
        (
            "net.pth",
            [],
            "output must end in .onnx, .pt2, .safetensors, or in nothing for a folder, or format",
        ),
        ("net.onnx", ["--format", "timm"], "format: 'net.onnx' has the ending of onnx; got 'timm'"),
        ("net", ["--normalize"], "normalize applies to onnx and torch-export, which are graphs; got folder"),
        ("net.safetensors", ["--no-normalize"], "normalize applies to onnx and torch-export"),
    ],
)
def test_what_makes_no_sense_exits_with_2(capsys, checkpoint, tmp_path, output, flags, message):
    code, out, err = export(capsys, checkpoint, tmp_path / "out" / output, *flags)
    assert (code, out) == (2, "")
    assert message in err
    assert not (tmp_path / "out").exists()


def test_the_format_may_be_named(checkpoint, tmp_path):
    classifier = load_run(checkpoint)
    assert export_classifier(classifier, tmp_path / "NET.SafeTensors").format == "safetensors"
    report = export_classifier(classifier, tmp_path / "net-v1.2", format="timm")
    assert report.format == "timm"
    assert sorted(path.name for path in (tmp_path / "net-v1.2").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    with pytest.raises(ValueError, match=r"one of onnx, torch-export, folder, timm, safetensors; got .*'tflite'"):
        export_classifier(classifier, tmp_path / "net", format="tflite")
    for name in formats.FORMATS:
        assert cli.parser().parse_args(["export", "best.pth", "--output", "net", "--format", name]).format == name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.pop("settings"), "is no checkpoint of a run of vision-attn train (it lacks settings)"),
        (lambda content: content["settings"].update(depth=3), "to be opened with that: there is no setting 'depth'"),
        (lambda content: content["settings"].update(lr="fast"), "lr must be a number from 1e-12 to 1,000; got 'fast'"),
        (lambda content: content["settings"].update(num_heads=torch.ones(2)), "num_heads must be a whole number from"),
        (lambda content: content.update(settings=["lr"]), "settings must be names with values; got ['lr']"),
        (lambda content: content["model"].pop("fc.bias"), "does not fit the model"),
        (lambda content: content.update(model=None), "and holds 0"),
        (lambda content: content["settings"].update(model="wrn16_4"), "and holds"),
        (lambda content: content["settings"].update(img_size=2**14), "on images of (16384, 16384)"),
    ],
)
def test_what_is_no_run_exits_with_1(capsys, checkpoint, tmp_path, change, message):
    content = torch.load(checkpoint, weights_only=True)
    change(content)
    torch.save(content, checkpoint)
    code, _, err = export(capsys, checkpoint, tmp_path / "net.pt2")
    assert code == 1
    assert message in err
    code, _, err = export(capsys, tmp_path / "nothing", tmp_path / "net.pt2")
    assert code == 1
    assert "there is no such checkpoint file" in err


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_package_that_onnx_needs_is_named(capsys, checkpoint, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    code, _, err = export(capsys, checkpoint, tmp_path / "out" / "net.onnx")
    assert code == 1
    assert "pip install 'vision-attn[export]'" in err
    assert not (tmp_path / "out").exists()


def test_a_difference_that_is_no_number_is_a_failure(network, tmp_path):
    classifier = Classifier(network, tuple(CLASSES), (3, 32, 32), MEAN, STD).to_export()
    with torch.no_grad():
        classifier.model.fc.bias.fill_(np.nan)
    with pytest.raises(ExportError, match="differs by nan"):
        export_classifier(classifier, tmp_path / "net.safetensors")
    assert list(tmp_path.iterdir()) == []

"""Exported networks, run without this library: the same output, with the classes, or no file."""

import json
import sys

import onnxruntime
import pytest
import torch
from torch import nn
from torchvision.transforms.v2.functional import normalize as normalize_images

import vision_attn as va
from vision_attn.errors import ExportError
from vision_attn.networks.models import create_model
from vision_attn.tools.export import export as module
from vision_attn.tools.export.export import export_model

MEAN, STD = (0.2, 0.3, 0.4), (0.5, 0.6, 0.7)


def small_network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    va.insert_(model, names="0", num_heads=4, gate_init=0.5, example_input=(1, 3, 16, 24))
    model.classes, model.pretrained_cfg = ("cat", "dog"), {"input_size": (3, 16, 24), "mean": MEAN, "std": STD}
    return model.eval()


def run(path, images):
    if path.suffix == ".onnx":
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
    with torch.no_grad():
        return torch.export.load(path).module()(images)


def about(path):
    if path.suffix == ".onnx":
        return json.loads(onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map["classifier"])
    files = {"classifier": ""}
    torch.export.load(path, extra_files=files)
    return json.loads(files["classifier"])


def assert_computes(path, model, pixels, normalize=True):
    images = normalize_images(pixels, MEAN, STD) if normalize else pixels
    with torch.no_grad():
        torch.testing.assert_close(run(path, pixels), model(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ending", module.FORMATS)
def test_a_graph_computes_what_the_network_does_and_describes_its_use(tmp_path, monkeypatch, ending):
    path = tmp_path / "new" / f"net{ending}"
    report = export_model(small_network(), path)
    assert_computes(path, small_network(), torch.rand(5, 3, 16, 24))
    assert f"{report.difference:.1e}" in str(report)
    assert report.difference <= 1e-4 * report.largest
    assert [*path.parent.iterdir()] == [path]
    assert about(path) == {
        "classes": ["cat", "dog"], "input_size": [3, 16, 24], "mean": list(MEAN), "std": list(STD), "pixels": "0…1",
        "crop_pct": 1.0, "crop_mode": "center", "interpolation": "bilinear",
        "architecture": None, "inserted": ["0"], "library": f"vision_attn {va.__version__}",
    }  # fmt: skip
    # A graph that computes something else, that of the network with its original gate, is not written.
    _, reopen = module.FORMATS[ending]
    before = path.read_bytes()
    monkeypatch.setitem(module.FORMATS, ending, (lambda network, images, about: before, reopen))
    network = small_network()
    network[0].inserted.gate.data.mul_(0.99)
    with pytest.raises(ExportError, match=r"computes something else: .* \d\.\de-\d\d "):
        export_model(network, tmp_path / f"net{ending}")
    assert [*tmp_path.iterdir()] == [path.parent]


@pytest.mark.parametrize(
    ("name", "bias", "error", "message"),
    [
        ("net.pth", 0.0, ValueError, r"\.onnx or \.pt2; got 'net\.pth'"),
        ("net.pt2", torch.nan, ExportError, "not finite"),
        ("net.pt2", 0.0, ExportError, "RuntimeError: data-dependent control flow"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_an_old_file_survives(tmp_path, monkeypatch, name, bias, error, message):
    def fail(network, images, about):
        raise RuntimeError("data-dependent control flow")

    monkeypatch.setitem(module.FORMATS, ".pt2", (fail, module.open_program))
    (tmp_path / name).write_bytes(b"old")
    network = small_network()
    nn.init.constant_(network[-1].bias, bias)
    with pytest.raises(error, match=message):
        export_model(network, tmp_path / name)
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [(name, b"old")]


def test_a_wrapped_network_in_half_precision_is_exported_in_float32_and_stays_as_it_was(tmp_path):
    half, path = small_network().bfloat16(), tmp_path / "net.pt2"
    va.set_impl_(half, "einx")  # which fixes the sizes
    va.freeze_backbone_(half.train(), also_train="3.*")
    modes = [module.training for module in half.modules()]
    assert "before" in str(export_model(nn.DataParallel(half), path, normalize=False))
    assert about(path)["pixels"] == "0…1, then (pixels - mean) / std"
    assert (half[3].weight.dtype, half[0].inserted.attn.impl) == (torch.bfloat16, "einx")
    assert [module.training for module in half.modules()] == modes
    assert_computes(path, half.float().eval(), torch.randn(4, 3, 16, 24), normalize=False)


def test_a_loaded_network_has_its_classes_statistics_and_crop(tmp_path):
    model = create_model("tiny", num_classes=2)
    va.insert_(model, names="layer2", num_heads=4, gate_init=0.5, example_input=(1, 3, 32, 32))
    crop = {"crop_pct": 0.9, "crop_mode": "squash", "interpolation": "bicubic"}
    model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (3, 32, 32), "mean": MEAN, "std": STD, **crop}
    loaded = va.load_model(va.save_model(model, tmp_path / "net", classes=["cat", "dog"]))
    report = export_model(loaded, tmp_path / "net.PT2")
    found = about(report.path)
    assert (found["classes"], found["mean"], found["architecture"]) == (["cat", "dog"], list(MEAN), "tiny")
    assert {name: found[name] for name in crop} == crop
    assert_computes(report.path, model.eval(), torch.rand(2, 3, 32, 32))


@pytest.mark.parametrize("package", ["onnxscript", "onnxruntime"])
def test_a_package_that_onnx_needs_is_named(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=package):
        export_model(small_network(), tmp_path / "net.onnx")
    assert list(tmp_path.iterdir()) == []

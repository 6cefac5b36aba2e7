"""Exported files: outputs in other runtimes, metadata and errors."""

import dataclasses
import json
import sys
from pathlib import Path
from unittest import mock

import onnxruntime
import pytest
import torch
from torch import nn
from torchvision.transforms.v2.functional import normalize as normalize_images

import vision_attn as va
from vision_attn import cli
from vision_attn.networks.models import create_model
from vision_attn.recipes import export
from vision_attn.recipes.export import FORMATS

MEAN, STD = (0.2, 0.3, 0.4), (0.5, 0.6, 0.7)


def small_network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    va.insert_(model, names="0", num_heads=4, gate_init=0.5, example_input=(1, 3, 16, 24))
    statistics = {"mean": MEAN, "std": STD, "architecture": "small"}
    model.classes, model.pretrained_cfg = ("cat", "dog"), {"input_size": (3, 16, 24), **statistics}
    return model.eval()


def run(path, images):
    if path.suffix == ".onnx":
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
    return torch.export.load(path).module()(images)


def about(path):
    if path.name.endswith(".onnx"):
        return json.loads(onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map["classifier"])
    files = {"classifier": ""}
    torch.export.load(path, extra_files=files)
    return json.loads(files["classifier"])


def assert_computes(path, model, pixels, normalize=True):
    images = normalize_images(pixels, MEAN, STD) if normalize else pixels
    with torch.no_grad():
        torch.testing.assert_close(run(path, pixels), model(images), rtol=1e-4, atol=1e-4)


ABOUT = {
    "classes": ["cat", "dog"], "input_size": [3, 16, 24], "mean": list(MEAN), "std": list(STD), "pixels": "0…1",
    "crop_pct": 1.0, "crop_mode": "center", "interpolation": "bilinear",
    "architecture": "small", "inserted": ["0"], "library": f"vision_attn {va.__version__}",
}  # fmt: skip


@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_an_exported_file_matches_the_network_and_a_different_file_is_rejected(tmp_path, monkeypatch, suffix):
    path = tmp_path / "new" / "folder" / f"net{suffix}"
    report = va.export_model(small_network(), path)
    assert_computes(path, small_network(), torch.rand(5, 3, 16, 24))
    assert f"{report.difference:.1e}" in str(report)
    assert f"{path.stat().st_size / 1e6:.2f} MB, input (batch, 3, 16, 24), pixels in 0…1" in str(report)
    assert report.difference <= 1e-4 * report.largest
    assert report.images == 4  # batches of one and three
    assert ([*path.parent.iterdir()], about(path)) == ([path], ABOUT)
    # A graph with a different output, here that of the network with its original gate, is not written.
    before = path.read_bytes()
    corrupted = dataclasses.replace(FORMATS[suffix], write=lambda program, file, about: file.write_bytes(before))
    monkeypatch.setitem(FORMATS, suffix, corrupted)
    network = small_network()
    network[0].inserted.gate.data.mul_(0.99)
    (tmp_path / f"net{suffix}").write_bytes(b"old")
    with pytest.raises(va.errors.ExportError, match=r"has a different output in .* \d\.\de-\d\d, "):
        va.export_model(network, tmp_path / f"net{suffix}")
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "new", tmp_path / f"net{suffix}"])
    assert (tmp_path / f"net{suffix}").read_bytes() == b"old"


@pytest.mark.slow
def test_only_dynamic_dimensions_can_vary(tmp_path):
    images = {"batch": torch.rand(3, 3, 16, 24), "size": torch.rand(1, 3, 21, 37), None: torch.rand(1, 3, 16, 24)}
    for dynamic, compared in (((), 2), (("batch",), 4), (("size",), 6), (("batch", "size"), 12)):
        report = va.export_model(small_network(), tmp_path / "net.pt2", dynamic=dynamic)
        assert f"on {compared} random images: " in str(report)
        assert ("3, height, width)" in str(report)) == ("size" in dynamic)
        for name, batch in images.items():
            if name is None or name in dynamic:
                assert_computes(report.file, small_network(), batch)
            else:
                with pytest.raises(AssertionError, match="Guard failed"):
                    run(report.file, batch)


@pytest.mark.parametrize(("size", "shape"), [((), None), ((40,), (1, 3, 40, 40)), ((40, 48), (1, 3, 40, 48))])
def test_the_command_passes_its_flags_and_the_given_side_or_height_and_width(tmp_path, size, shape):
    va.save_model(create_model("tiny"), tmp_path / "net")
    flags = ["--dynamic", "size", "--no-normalize", *["--img-size"] * bool(size), *map(str, size)]
    with mock.patch.object(export, "export_model") as exporter:
        assert cli.main(["export", str(tmp_path / "net"), "-o", str(tmp_path / "net.pt2"), *flags]) == 0
    assert exporter.call_args.kwargs == {"example_input": shape, "dynamic": ("size",), "normalize": False}


@pytest.mark.parametrize(("bias", "message"), [(torch.nan, "not finite"), (0.0, r"RuntimeError: control flow\)")])
def test_a_failed_export_keeps_an_existing_file(tmp_path, monkeypatch, bias, message):
    fail = mock.Mock(side_effect=RuntimeError("control flow\nat 0"))
    monkeypatch.setitem(FORMATS, ".pt2", dataclasses.replace(FORMATS[".pt2"], write=fail))
    file, network = tmp_path / "net.pt2", small_network()
    file.write_bytes(b"old")
    nn.init.constant_(network[-1].bias, bias)
    with pytest.raises(va.errors.ExportError, match=message):
        va.export_model(network, file)
    assert [(entry, entry.read_bytes()) for entry in tmp_path.iterdir()] == [(file, b"old")]


def test_a_feature_map_with_one_position_may_grow_in_an_exported_file(tmp_path):
    blocks = va.AttentionBlock2d(4, 1), va.blocks.LinearAttention2d(4, 1)  # the latter has no sdpa
    network = nn.Sequential(nn.Conv2d(3, 4, 8, 8), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    options = {"example_input": (1, 3, 8, 8), "dynamic": ("batch", "size")}
    assert va.export_model(network, tmp_path / "net.onnx", **options).difference < 1e-5
    assert onnxruntime.InferenceSession(tmp_path / "net.onnx").get_inputs()[0].shape == ["batch", 3, "height", "width"]
    with pytest.raises(va.errors.ExportError, match=r"Guard failed: input.size\(\)\[2\] >= 16"):
        va.export_model(network, tmp_path / "net.pt2", **options)


def test_images_that_the_network_cannot_process_and_other_shapes_are_rejected(tmp_path):
    network = nn.Sequential(nn.Conv2d(3, 4, 9), nn.Flatten(), nn.LazyLinear(2)).eval()
    with pytest.raises(ValueError, match=r"^example_input is required for a model without pretrained_cfg, such as \(1"):
        va.export_model(network, tmp_path / "net.pt2")
    network.pretrained_cfg = {"input_size": (3, 16, 16), "mean": MEAN, "std": STD}
    network(torch.zeros(1, 3, 16, 16))
    for options in ({"example_input": (1, 3, 8, 8)}, {"dynamic": ["size"]}):
        with pytest.raises(va.errors.ExportError, match=r"cannot process images of 3×.*RuntimeError"):
            va.export_model(network, tmp_path / "net.pt2", **options)
    for shape, axes in (((3, 8, 8), "3, 8, 8"), ((1, 3, 8, 8, 8), "1, 3, 8, 8, 8")):
        with pytest.raises(ValueError, match=rf"example_input must be images \(b, c, h, w\).* got \({axes}\)"):
            va.export_model(network, tmp_path / "net.onnx", example_input=shape)
    assert list(tmp_path.iterdir()) == []


def test_a_network_without_a_configuration_is_exported_with_an_example_input(tmp_path):
    network = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()  # a segmentation model
    va.insert_(network, names="0", num_heads=2, gate_init=0.5, example_input=(1, 1, 12, 20))
    report = va.export_model(network, tmp_path / "net.pt2", example_input=torch.rand(2, 1, 12, 20))
    assert "input (batch, 1, 12, 20), pixels in the range of the network" in str(report)
    assert_computes(report.file, network, torch.rand(3, 1, 12, 20), normalize=False)
    found = about(report.file)
    assert (found["classes"], found["mean"], found["inserted"]) == ([], None, ["0"])
    with pytest.raises(ValueError, match=r"normalize requires model\.pretrained_cfg"):
        va.export_model(network, tmp_path / "net.pt2", example_input=(1, 1, 12, 20), normalize=True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_full_disk_is_named_with_the_file_and_a_remedy(tmp_path, monkeypatch, capsys):
    write = lambda program, file, about: Path("/dev/full").write_bytes(b"weights")  # noqa: E731
    monkeypatch.setitem(FORMATS, ".pt2", dataclasses.replace(FORMATS[".pt2"], write=write))
    monkeypatch.chdir(tmp_path)
    va.save_model(create_model("tiny"), tmp_path / "run")
    assert cli.main(["export", "run", "-o", "net.pt2"]) == 1
    expected = "No space left on device: 'net.pt2'. Free disk space, or write to another disk"
    assert capsys.readouterr().err == f"vision-attn: error: {expected}\n"
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


def test_a_wrapped_half_precision_network_is_exported_in_float32_and_unchanged(tmp_path):
    half, path = small_network().bfloat16(), tmp_path / "net.PT2"
    va.set_impl_(half, "einx")  # traces static shapes
    va.freeze_backbone_(half.train(), also_train="3.*")
    modes = [module.training for module in half.modules()]
    report = va.export_model(nn.DataParallel(half), path, normalize=False)
    assert "pixels in 0…1, then (pixels - mean) / std" in str(report)
    assert about(path)["pixels"] == "0…1, then (pixels - mean) / std"
    assert (half[3].weight.dtype, half[0].inserted.attn.impl) == (torch.bfloat16, "einx")
    assert [module.training for module in half.modules()] == modes
    assert_computes(path, half.float().eval(), torch.randn(4, 3, 16, 24), normalize=False)


@pytest.mark.parametrize("classes", [2, {"cat": 0}, [0, 1]], ids=str)
def test_classes_that_are_not_names_are_not_exported(classes):
    network = small_network()
    network.classes = classes
    assert export.make_metadata(network, None, True)["classes"] == []


@pytest.mark.parametrize("package", ["onnxscript", "onnxruntime"])
def test_a_missing_package_is_named(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf'requires the package {package}. Install it: pip install "vision-attn\['):
        va.export_model(small_network(), tmp_path / "net.onnx")
    assert list(tmp_path.iterdir()) == []

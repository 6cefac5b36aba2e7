"""Exported networks, run as a stranger would run them: the same output, the classes with them, or no file at all."""

import functools
import json
import os
import sys
import threading

import onnxruntime
import pytest
import torch
from torch import nn

import vision_attn as va
from vision_attn.errors import ExportError
from vision_attn.networks.models import create_model
from vision_attn.tools.export import export as module
from vision_attn.tools.export.export import export_model

MEAN, STD = (0.2, 0.3, 0.4), (0.5, 0.6, 0.7)
IMAGES = {"input_size": (3, 16, 24), "mean": MEAN, "std": STD, "classes": ("cat", "dog")}
ENDINGS = (".onnx", ".pt2")


def small_network():
    """A network that no registry knows, with a block that does something."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    va.insert_(model, names="0", num_heads=4, gate_init=0.5, example_input=(1, 3, 16, 24))
    return model.eval()


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A graph of the small network by its ending, once for all tests, and what is said of it."""

    @functools.cache
    def exported(ending):
        path = tmp_path_factory.mktemp("exported") / "new" / f"net{ending}"
        return path, export_model(small_network(), path, **IMAGES)

    return exported


def run(path, images):
    """What the exported file makes of images, by nothing of ours."""
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


def normalized(pixels):
    return (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_graph_computes_what_the_network_does_and_says_what_must_be_known(exported, ending):
    path, report = exported(ending)
    pixels = torch.rand(5, 3, 16, 24)
    with torch.no_grad():
        expected = small_network()(normalized(pixels))
    torch.testing.assert_close(run(path, pixels), expected, rtol=1e-4, atol=1e-4)
    assert f"{path}: " in str(report)
    assert "the largest difference from the network's output is " in str(report)
    assert report.difference <= 1e-4 * report.largest
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert about(path) == {
        "classes": ["cat", "dog"], "input_size": [3, 16, 24], "mean": list(MEAN), "std": list(STD), "pixels": "0…1",
        "crop_pct": 1.0, "crop_mode": "center", "interpolation": "bilinear",
        "architecture": None, "inserted": ["0"], "library": f"vision_attn {va.__version__}",
    }  # fmt: skip


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_computes_something_else_leaves_no_file(exported, tmp_path, monkeypatch, ending):
    _, reopen = module.FORMATS[ending]
    before = exported(ending)[0].read_bytes()  # of the network with its gate as it was

    def with_a_weaker_gate(network, images, about):
        return before

    monkeypatch.setitem(module.FORMATS, ending, (with_a_weaker_gate, reopen))
    network = small_network()
    with torch.no_grad():
        next(iter(va.inserted_blocks(network).values())).gate.mul_(0.99)
    with pytest.raises(ExportError, match="what was written computes something else: an output differs by "):
        export_model(network, tmp_path / f"net{ending}", **IMAGES)
    assert list(tmp_path.iterdir()) == []


def test_a_network_that_diverged_is_refused_by_that_name(tmp_path):
    network = small_network()
    nn.init.constant_(network[-1].bias, torch.nan)
    with pytest.raises(ExportError, match="The output of the network is not finite: training may have diverged"):
        export_model(network, tmp_path / "net.pt2", **IMAGES)
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_is_written_through_and_stays(tmp_path):
    pipe, found = tmp_path / "net.pt2", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()), daemon=True)
    reader.start()
    export_model(small_network(), pipe, **IMAGES)
    assert pipe.is_fifo()
    reader.join()
    (tmp_path / "copy.pt2").write_bytes(found[0])
    assert about(tmp_path / "copy.pt2")["classes"] == ["cat", "dog"]


def test_a_file_that_cannot_be_written_is_said_before_the_network_runs(tmp_path):
    (tmp_path / "net.pt2").symlink_to("/proc/net.pt2")
    network = small_network()
    network.register_forward_pre_hook(lambda *given: pytest.fail("it runs"))
    with pytest.raises(OSError, match=r"net\.pt2") as caught:
        export_model(network, tmp_path / "net.pt2", **IMAGES)
    assert caught.value.filename == str(tmp_path / "net.pt2")


def half_way(network, images, about):
    raise RuntimeError("data-dependent control flow")


def test_an_old_file_survives_a_failure(tmp_path, monkeypatch):
    monkeypatch.setitem(module.FORMATS, ".pt2", (half_way, module.open_program))
    path = tmp_path / "net.pt2"
    path.write_bytes(b"old")
    with pytest.raises(
        ExportError, match=r"the network cannot be exported \(RuntimeError: data-dependent control flow"
    ):
        export_model(small_network(), path, **IMAGES)
    assert [entry.name for entry in tmp_path.iterdir()] == ["net.pt2"]
    assert path.read_bytes() == b"old"


def test_a_network_is_exported_in_float32_with_any_batch_without_its_wrapper_and_normalisation(tmp_path):
    half = small_network().bfloat16()
    va.set_impl_(half, "einx")  # which fixes the sizes
    va.freeze_backbone_(half.train(), also_train="3.*")
    modes = [module.training for module in half.modules()]
    report = export_model(nn.DataParallel(half), tmp_path / "net.pt2", normalize=False, **IMAGES)
    assert "normalised by mean and std before" in str(report)
    assert about(tmp_path / "net.pt2")["pixels"] == "0…1, then (pixels - mean) / std"
    (block,) = va.inserted_blocks(half).values()
    assert (half[3].weight.dtype, block.attn.impl) == (torch.bfloat16, "einx")
    assert [module.training for module in half.modules()] == modes
    images = torch.randn(4, 3, 16, 24)
    with torch.no_grad():
        expected = half.float().eval()(images)
    torch.testing.assert_close(run(tmp_path / "net.pt2", images), expected, rtol=1e-4, atol=1e-4)


def test_a_network_that_was_loaded_says_everything_itself(tmp_path):
    torch.manual_seed(0)
    model = create_model("tiny", num_classes=2)
    va.insert_(model, names="layer2", num_heads=4, gate_init=0.5, example_input=(1, 3, 32, 32))
    model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (3, 32, 32), "mean": MEAN, "std": STD}
    loaded = va.load_model(export_model(model, tmp_path / "net", classes=["cat", "dog"]))
    report = export_model(loaded, tmp_path / "net.PT2")
    found = about(report.path)
    assert (found["classes"], found["mean"], found["architecture"]) == (["cat", "dog"], list(MEAN), "tiny")
    pixels = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(run(report.path, pixels), model.eval()(normalized(pixels)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "further", "message"),
    [
        ("net.pth", {}, "output must end in .onnx or .pt2, or in nothing for a folder; got 'net.pth'"),
        ("net.pt2", {"classes": ("a", "b", "c")}, "classes must be 2, as many as outputs; got 3"),
        ("net.pt2", {"mean": None, "std": None}, "mean and std must be given: the network has no pretrained_cfg"),
        ("net", {}, "architecture must be a name that timm knows; got None"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path, name, further, message):
    with pytest.raises(ValueError, match=message):
        export_model(small_network(), tmp_path / name, **{**IMAGES, **further})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", ["onnxscript", "onnxruntime"])
def test_a_package_that_onnx_needs_is_named(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=package):
        export_model(small_network(), tmp_path / "net.onnx", **IMAGES)
    assert list(tmp_path.iterdir()) == []

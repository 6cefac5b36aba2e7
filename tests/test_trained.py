"""A trained model in use: a run or a network as a folder, opened in a fresh process, and gone on with."""

import csv
import math
import shutil

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file

import vision_attn as va
import vision_attn.networks.insertion
import vision_attn.networks.models
from vision_attn.networks.models.registry import weights_folder
from vision_attn.tools import cli
from vision_attn.tools.training.images import prepare, rgb
from vision_attn.tools.training.settings import Settings
from vision_attn.tools.training.train import train

pytestmark = [pytest.mark.filterwarnings("ignore:the map at"), pytest.mark.usefixtures("no_pictures")]


def opened(model):
    """The same with blocks that do something."""
    torch.manual_seed(1)
    with torch.no_grad():
        for key in vision_attn.networks.insertion.inserted_keys(model):
            value = model.state_dict()[key]
            if value.is_floating_point():
                value.normal_(std=0.3)
    return model.eval()


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(image_folder, tmp_path_factory):
    """A run of a frozen network with blocks, a head and an adapter, and the settings of it."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    torch.save(timm.create_model("tiny", num_classes=7).state_dict(), folder / "base.pth")
    settings = Settings(
        data=str(image_folder), model="tiny", img_size=24, weights=str(folder / "base.pth"), reset_head=True,
        freeze_backbone=True, insert=("layer1",), num_heads=4, epochs=1, batch_size=36, lr=0.05, device="cpu",
        output=str(folder / "run"),
    )  # fmt: skip
    return settings, train(settings, lambda line: None)


def test_a_run_comes_back_from_its_folder_its_checkpoints_and_its_adapter(run, image_folder, tmp_path):
    settings, result = run
    with Image.open(image_folder / "val" / "red" / "1.png") as file:
        image = rgb(file)
    pixels = prepare(image, (24, 24), None)
    model = result.model.eval()
    with torch.no_grad():
        expected = model(result.normalize(pixels[None]))
        for name in (".", "best.pth", "last.pth", "adapter.safetensors"):
            trained = va.load_run(settings.folder / name)
            assert trained.classes == ("blue", "green", "red")
            assert not trained.model.training
            torch.testing.assert_close(trained.transform(image), result.normalize(pixels[None])[0])
            torch.testing.assert_close(trained.model(trained.transform(image)[None]), expected)
        # The network of an adapter may have moved; no other has its place.
        moved = tmp_path / "elsewhere.pth"
        moved.write_bytes((settings.folder.parent / "base.pth").read_bytes())
        trained = va.load_run(settings.folder / "adapter.safetensors", weights=str(moved))
        torch.testing.assert_close(trained.model(trained.transform(image)[None]), expected)
    torch.save(timm.create_model("tiny", num_classes=7).state_dict(), moved)
    with pytest.raises(va.CheckpointError, match="is for other weights of this network"):
        va.load_run(settings.folder / "adapter.safetensors", weights=str(moved))
    with pytest.raises(ValueError, match="weights apply to adapters"):
        va.load_run(settings.folder, weights=str(moved))


def test_an_adapter_of_pretrained_weights_asks_before_they_are_fetched(run, tmp_path):
    settings, result = run
    about = {**torch.load(settings.folder / "best.pth", weights_only=True)}
    about = {key: about[key] for key in ("settings", "classes", "input_size", "mean", "std")}
    about["settings"] |= {"weights": None, "reset_head": False, "pretrained": True}
    va.save_adapter(result.model, tmp_path / "adapter.safetensors", about=about)
    with pytest.raises(ValueError, match=r"name the checkpoint of tiny .*weights='pretrained'"):
        va.load_run(tmp_path / "adapter.safetensors")
    va.save_adapter(result.model, tmp_path / "adapter.safetensors")
    with pytest.raises(va.CheckpointError, match="is no checkpoint of a run of vision-attn train"):
        va.load_run(tmp_path / "adapter.safetensors")


@pytest.mark.parametrize("name", ["hf-hub:timm/resnet18.a1_in1k", "local-dir:/tmp/x", "timm/resnet18"])
def test_a_checkpoint_that_names_a_network_elsewhere_is_refused(run, name, tmp_path, monkeypatch):
    monkeypatch.setattr(timm, "create_model", lambda *given, **how: pytest.fail("it is made"))
    content = torch.load(run[0].folder / "best.pth", weights_only=True)
    content["settings"]["model"] = name
    torch.save(content, tmp_path / "best.pth")
    with pytest.raises(ValueError, match=f"model: there is no '{name}'"):
        va.load_run(tmp_path)


@pytest.mark.parametrize(
    "said", [{"input_size": [3, 10**5, 10**5]}, {"input_size": "photo"}, {"classes": 3}, {"mean": [0.5]}, {"std": None}]
)
def test_what_a_checkpoint_says_of_its_images_is_checked(run, said, tmp_path):
    content = torch.load(run[0].folder / "best.pth", weights_only=True)
    torch.save({**content, **said}, tmp_path / "best.pth")
    with pytest.raises(va.CheckpointError, match="is damaged in what it says of its images"):
        va.load_run(tmp_path)


def on_the_command_line(capsys, *arguments):
    code = cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_predictions_are_printed_and_written(run, image_folder, capsys, tmp_path):
    settings, _ = run
    code, out, err = on_the_command_line(
        capsys, "predict", settings.folder, image_folder / "val" / "red" / "1.png", image_folder / "val" / "blue",
        "--top", 2, "--output", tmp_path / "found.csv",
    )  # fmt: skip
    assert (code, err) == (0, "")
    lines, rows = out.splitlines(), list(csv.DictReader((tmp_path / "found.csv").read_text().splitlines()))
    assert len(lines) == len(rows) == 9
    trained = va.load_run(settings.folder)
    with torch.no_grad(), Image.open(image_folder / "val" / "red" / "1.png") as image:
        shares = trained.model(trained.transform(image)[None]).softmax(1)[0]
    best, second = (trained.classes[index] for index in shares.argsort(descending=True)[:2])
    assert lines[0] == (
        f"{image_folder / 'val' / 'red' / '1.png'}: {best} {100 * shares.max():.1f} %, "
        f"{second} {100 * shares.sort().values[-2]:.1f} %"
    )
    assert rows[0]["class_1"] == best
    assert float(rows[0]["probability_1"]) == pytest.approx(float(shares.max()), abs=1e-5)
    (tmp_path / "broken.png").write_bytes(b"no image")
    code, _, err = on_the_command_line(capsys, "predict", settings.folder, tmp_path / "broken.png")
    assert (code, "broken.png cannot be read as an image" in err) == (1, True)
    (tmp_path / "empty").mkdir()
    code, _, err = on_the_command_line(capsys, "predict", settings.folder, tmp_path / "empty")
    assert (code, "empty has no images" in err) == (1, True)
    assert on_the_command_line(capsys, "predict", tmp_path / "gone", tmp_path / "broken.png")[0] == 1


@pytest.mark.parametrize("name", ["", "last.pth", "adapter.safetensors"])
def test_a_run_is_evaluated_by_its_name_alone(run, name, capsys):
    settings, result = run
    code, out, err = on_the_command_line(capsys, "train", settings.folder / name, "--test-only")
    assert (code, err) == (0, "")
    assert str(result.final) in out
    code, _, err = on_the_command_line(capsys, "train", settings.folder / name)
    assert (code, "RUN goes with --test-only; to go on with a run, --resume" in err) == (2, True)


def test_data_that_may_be_fetched_is_named_before_it_is(run, capsys, tmp_path):
    content = torch.load(run[0].folder / "last.pth", weights_only=True)
    content["settings"] |= {"dataset": "hfds/someone/photos", "data": None}
    torch.save(content, tmp_path / "last.pth")
    for arguments in ((tmp_path / "last.pth", "--test-only"), ("--resume", tmp_path / "last.pth")):
        code, _, err = on_the_command_line(capsys, "train", *arguments)
        assert code == 2
        assert "names hfds/someone/photos, which may be fetched: give --dataset as well" in err


def test_a_run_goes_on_from_its_file_alone_and_is_extended(run, capsys, tmp_path, monkeypatch):
    last = shutil.copytree(run[0].folder, tmp_path / "run") / "last.pth"
    # All of the run is in its checkpoint: the weights that it began from are not read again.
    monkeypatch.setattr("vision_attn.tools.training.network.load_file", lambda *given: pytest.fail("it reads them"))
    code, out, err = on_the_command_line(capsys, "train", "--resume", last, "--epochs", 2)
    assert (code, err) == (0, "")
    assert "resumed after epoch 1" in out
    assert "epoch 2/2: train loss" in out
    rows = torch.load(last, weights_only=True)["rows"]
    assert [row["epoch"] for row in rows] == [1, 2]
    # At the last step of the first epoch the cosine was that of two steps, at that of the second it is that of four.
    rates = [0.05 * (1 + math.cos(math.pi * share)) / 2 for share in (1 / 2, 3 / 4)]
    assert [float(row["lr"]) for row in rows] == pytest.approx(rates, rel=1e-4)
    code, _, err = on_the_command_line(capsys, "train", "--resume", last, "--epochs", 1)
    assert (code, f"but epochs differ from {last}" in err) == (2, True)
    code, _, err = on_the_command_line(capsys, "train", "--resume", last, "--lr", 0.1)
    assert (code, "but lr differ from" in err) == (2, True)


def test_a_run_is_exported_as_a_folder_and_that_again(run, capsys, tmp_path):
    settings, result = run
    code, out, err = on_the_command_line(capsys, "export", settings.folder, "--output", tmp_path / "net")
    assert (code, err) == (0, "")
    assert "net: folder, " in out
    images = torch.randn(2, 3, 24, 24)
    with torch.no_grad():
        assert torch.equal(va.load_model(tmp_path / "net")(images), result.model.eval()(images))
    assert on_the_command_line(capsys, "export", tmp_path / "net", "--output", tmp_path / "net.safetensors")[0] == 0
    found = load_file(tmp_path / "net.safetensors")
    assert all(torch.equal(found[key], value) for key, value in result.model.state_dict().items())
    code, _, err = on_the_command_line(
        capsys, "export", settings.folder, "--output", tmp_path / "x", "--format", "timm"
    )
    assert (code, "timm alone knows no tiny with the blocks at layer1.2" in err) == (2, True)
    adapter = settings.folder / "adapter.safetensors"
    assert on_the_command_line(capsys, "export", adapter, "--output", tmp_path / "adapted.safetensors")[0] == 0
    found = load_file(tmp_path / "adapted.safetensors")
    assert all(torch.equal(found[key], value) for key, value in result.model.state_dict().items())


def test_the_librarys_own_folders_are_models_that_are_ready_to_use():
    run = va.load_run(weights_folder() / "resnet20_attention_cifar100")
    assert len(run.classes) == 100
    assert run.transform(Image.new("L", (60, 40))).shape == (3, 32, 32)

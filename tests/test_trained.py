"""A trained model in use: a run or a network as a folder, opened in a fresh process, and gone on with."""

import csv
import json
import math
import shutil
import subprocess
import sys
import types
from pathlib import Path

import crafted
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

import vision_attn as va
import vision_attn.networks.insertion
import vision_attn.networks.models
from vision_attn.networks.models.registry import weights_folder
from vision_attn.tools import cli
from vision_attn.tools.comparison.controls import ConvBlock2d
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


# --- save_model and load_model ----------------------------------------------------------------------------------------

BLOCKS = {
    "branch, position": (
        "resnet20",
        {"in_chans": 1, "img_size": None},
        lambda m: va.insert_(m, names="layer2.0", at="branch", num_heads=2, position=va.RelPosTable((14, 14))),
    ),
    "instead": ("resnet20", {}, lambda m: va.replace_(m, names="layer3.0.conv2", num_heads=2)),
    "control": ("tiny", {"drop_path_rate": 0.1}, lambda m: va.insert_(m, ConvBlock2d, stages=-1)),
    "tokens": ("test_vit", {"img_size": 64}, lambda m: va.insert_(m, names="blocks.1", num_heads=2)),
    "none": ("test_efficientnet", {"global_pool": "max"}, lambda m: None),
    "another than its own": (
        "digit_pairs_attention",
        {},
        lambda m: (va.remove_(m), va.insert_(m, names="stage1", num_heads=2, pattern="rows")),
    ),
}


@pytest.mark.parametrize("case", BLOCKS)
def test_a_network_with_whatever_blocks_comes_back_bit_for_bit(case, tmp_path):
    name, given, insert = BLOCKS[case]
    torch.manual_seed(0)
    given = {key: value for key, value in given.items() if value is not None}
    model = timm.create_model(name, num_classes=3, **given)
    insert(model)
    opened(model)
    assert va.save_model(model, tmp_path / "net", classes=["a", "b", "c"]) == tmp_path / "net"
    again = va.load_model(tmp_path / "net")
    images = torch.randn(2, *again.pretrained_cfg["input_size"])
    assert torch.equal(again(images), model(images))
    assert list(va.inserted(again)) == list(va.inserted(model))
    assert again.state_dict().keys() == model.state_dict().keys()
    assert tuple(again.pretrained_cfg["label_names"]) == ("a", "b", "c")
    assert not again.training
    assert sorted(path.name for path in (tmp_path / "net").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["net"]


def test_a_folder_that_an_older_timm_writes_has_the_models_configuration(tmp_path, monkeypatch):
    def older(model, path, config, model_args):  # as timm 1.0.26: what is given takes the place of what it knows
        said = {"architecture": model.pretrained_cfg["architecture"], "num_classes": model.num_classes, **config}
        path.write_text(json.dumps(said))

    monkeypatch.setattr("vision_attn.networks.models.folder.save_config_for_hf", older)
    model = timm.create_model("resnet20", num_classes=3)
    va.insert_(model, stages=-1)
    again = va.load_model(va.save_model(model, tmp_path / "net"))
    for name in ("input_size", "mean", "std", "classifier"):
        assert again.pretrained_cfg[name] == model.pretrained_cfg[name]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder, and the network in it."""
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=3)
    va.insert_(model, stages=-2, num_heads=4, example_input=(1, 3, 32, 32))
    return va.save_model(opened(model), tmp_path_factory.mktemp("saved") / "net", classes=["a", "b", "c"]), model


def test_a_folder_and_an_adapter_come_back_in_a_fresh_process_bit_for_bit(saved, tmp_path):
    folder, model = saved
    image = Image.effect_noise((70, 50), 90).convert("RGB")
    image.save(tmp_path / "image.png")
    run = va.load_run(folder)
    config = timm.data.resolve_data_config(model=model)
    expected = timm.data.create_transform(**config)(image)
    assert torch.equal(run.transform(image), expected), "an image is prepared as timm prepares it for the network"
    other = crafted.network()
    va.insert_(other, names="2", num_heads=4, position=va.RelPosDecomposed((8, 8)), example_input=(1, 3, 8, 8))
    nn.init.normal_(va.inserted(other)["2"].attn.proj.weight)
    va.save_adapter(other, tmp_path / "adapter.safetensors")
    with torch.no_grad():
        small = torch.randn(2, 3, 8, 8)
        values = {"logits": model(expected[None]), "small": small, "other": other(small)}
    save_file(values, tmp_path / "expected.safetensors")
    code = (
        "import sys, torch, vision_attn as va; from PIL import Image; from safetensors.torch import load_file\n"
        "run = va.load_run(sys.argv[1])\n"
        f"torch.set_num_threads({torch.get_num_threads()})\n"
        "with torch.no_grad(): logits = run.model(run.transform(Image.open(sys.argv[2] + '/image.png'))[None])\n"
        "expected = load_file(sys.argv[2] + '/expected.safetensors')\n"
        "assert torch.equal(logits, expected['logits'])\n"
        "assert run.classes == ('a', 'b', 'c') and 'accelerate' not in sys.modules\n"
        "import crafted\n"
        "other = crafted.network()\n"
        "report = va.load_adapter_(other, sys.argv[2] + '/adapter.safetensors')\n"
        "with torch.no_grad(): assert torch.equal(other(expected['small']), expected['other'])\n"
        "assert report.compared == 4\n"
    )
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", code, folder, tmp_path], capture_output=True, text=True, check=False, cwd=here
    )
    assert done.returncode == 0, done.stderr


def test_a_type_is_kept_and_a_card_of_ones_own_too(saved, tmp_path):
    model = timm.create_model("test_resnet", num_classes=3)
    va.insert_(model, stages=-2, num_heads=4, example_input=(1, 3, 32, 32))
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "README.md").write_text("mine")
    va.save_model(nn.DataParallel(model.bfloat16()), tmp_path / "net")
    again = va.load_model(tmp_path / "net")
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    assert (tmp_path / "net" / "README.md").read_text() == "mine"
    text = (saved[0] / "README.md").read_text()
    assert "# test_resnet with attention" in text
    assert "layer3.0  AttentionBlock2d" in text
    assert "3 classes: a, b, c." in text


class Foreign(va.AttentionBlock2d):
    pass


def test_blocks_of_another_library_come_back_with_their_class(tmp_path):
    model = timm.create_model("test_resnet", num_classes=3)
    va.insert_(model, Foreign, stages=-2, num_heads=4, example_input=(1, 3, 32, 32))
    va.save_model(opened(model), tmp_path / "net")
    with pytest.raises(va.CheckpointError, match=r"holds Foreign, which is no block of this library: give its class"):
        va.load_model(tmp_path / "net")
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(va.load_model(tmp_path / "net", block=Foreign)(images), model(images))
    assert va.load_run(tmp_path / "net", block=Foreign).classes == ("0", "1", "2")


def test_what_could_not_be_read_back_is_not_written(saved, tmp_path):
    _, model = saved
    with pytest.raises(ValueError, match="architecture must be a name that timm knows; got None: of other networks"):
        va.save_model(nn.Sequential(nn.Conv2d(3, 8, 1)), tmp_path / "net")
    other = timm.create_model("test_resnet", num_classes=3)
    other.act1 = nn.Sigmoid()
    with pytest.raises(ValueError, match=r"'test_resnet' with these blocks computes something else.*model_args"):
        va.save_model(other, tmp_path / "net")
    other.layer1[0].conv1 = nn.Conv2d(32, 32, 5)
    with pytest.raises(ValueError, match=r"timm makes another network of 'test_resnet'.*layer1.0.conv1.weight"):
        va.save_model(other, tmp_path / "net")
    with pytest.raises(ValueError, match="classes must name the 3 classes of the model; got 2"):
        va.save_model(model, tmp_path / "net", classes=["a", "b"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "hf-hub:timm/resnet18.a1_in1k"}, "must name a network of timm's"),
        ({"architecture": "local-dir:/tmp"}, "must name a network of timm's"),
        ({"model_args": {"pretrained": True}}, r"fetch nothing \['pretrained'\]"),
        ({"model_args": {"checkpoint_path": "/tmp/x"}}, "fetch nothing"),
        ({"model_args": {"pretrained_cfg": {"url": "http://x"}}}, "fetch nothing"),
        ({"model_args": {"layers": [10**9, 1, 1, 1]}}, "of a size that there is none of"),
        ({"model_args": {"no_such": 1}}, "cannot be made"),
        ({"architecture": "resnet18"}, "differ in gate"),
        ({"model_args": {"num_classes": 4}, "label_names": None}, "another network than it names: fc.weight, fc.bias"),
        ({"model_args": {"num_classes": 10**12}}, "of a size that there is none of"),
        ({"label_names": ["a"]}, "1 label_names for 3 classes"),
        ({"pretrained_cfg": {"input_size": [3, 10**6, 10**6], "mean": [0], "std": [1]}}, "input_size must be channels"),
        ({"label_names": [1]}, "label_names must be a list of texts"),
        ({"vision_attn": {"format": 2, "library": "9"}}, "written by vision_attn 9: upgrade"),
        ({"vision_attn": {"format": 1, "blocks": [{}]}}, "cannot be made"),
        ({"vision_attn": {"format": 1, "blocks": []}}, "of another network than it names: .*inserted"),
    ],
)
def test_what_a_folder_says_is_checked_and_fetches_nothing(saved, change, message, tmp_path, monkeypatch):
    monkeypatch.setattr("timm.models._builder.load_pretrained", lambda *given, **how: pytest.fail("it fetches"))
    config = {**json.loads((saved[0] / "config.json").read_text()), **change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((saved[0] / "model.safetensors").read_bytes())
    with pytest.raises(va.CheckpointError, match=message):
        va.load_model(tmp_path)
    for text in ("", "[]", "{", "3"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(va.CheckpointError, match=r"config\.json is damaged"):
            va.load_model(tmp_path)


def test_it_is_uploaded_by_huggingface_hub(saved, tmp_path, monkeypatch):
    calls = []

    class HfApi:
        def __init__(self, **about):
            pass

        def create_repo(self, repository, **how):
            calls.append((repository, how))

        def upload_folder(self, **how):
            calls.append(how)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(HfApi=HfApi))
    va.save_model(saved[1], tmp_path / "net", push_to_hub="me/net")
    assert calls[0] == ("me/net", {"exist_ok": True})
    assert (calls[1]["repo_id"], calls[1]["folder_path"]) == ("me/net", tmp_path / "net")


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

"""Our networks through timm, and the accuracies that zoo checkpoints were published with."""

import hashlib
import json
import zipfile
from pathlib import Path

import pytest
import timm
import torch

import vision_attn as va
from vision_attn.networks.models import CifarResNet, DigitPairsNet, WideResNet, create_model
from vision_attn.networks.models.folder import save_model
from vision_attn.networks.models.registry import weights_folder
from vision_attn.tools.training.data import image_folder
from vision_attn.tools.training.evaluation import Normalize, evaluate
from vision_attn.tools.training.settings import Settings
from vision_attn.tools.training.train import train

ROOT = Path(__file__).parents[1]
#: What weights/ holds.
FOLDERS = sorted(path for path in weights_folder().iterdir() if path.is_dir())
#: Parameters in thousands: for option A as He et al. count them, section 4.2, table 6; option B adds the projections.
PARAMETERS = {"20": 0.27, "32": 0.46, "44": 0.66, "56": 0.85}


@pytest.mark.parametrize("depth", PARAMETERS)
def test_cifar_resnets_have_the_papers_size(depth):
    plain = timm.create_model(f"resnet{depth}_a", num_classes=10)
    assert round(sum(p.numel() for p in plain.parameters()) / 1e6, 2) == PARAMETERS[depth]
    projected = timm.create_model(f"resnet{depth}", num_classes=10)
    extra = 16 * 32 + 32 * 64 + 2 * (32 + 64)
    assert sum(p.numel() for p in projected.parameters()) - sum(p.numel() for p in plain.parameters()) == extra


def test_the_two_families_have_the_keys_of_their_zoos():
    a, b = (set(timm.create_model(name, num_classes=10).state_dict()) for name in ("resnet20_a", "resnet20"))
    assert {key for key in a if not key.startswith(("conv1", "bn1", "layer"))} == {"linear.weight", "linear.bias"}
    assert {key for key in b if not key.startswith(("conv1", "bn1", "layer"))} == {"fc.weight", "fc.bias"}
    assert not any("downsample" in key for key in a)
    assert "layer2.0.downsample.0.weight" in b
    assert "layer3.0.downsample.1.running_var" in b
    assert "layer1.0.downsample.0.weight" not in b


def test_a_padded_shortcut_takes_every_second_cell_and_puts_zeros_around_its_channels():
    shortcut = timm.create_model("resnet20_a").layer2[0].downsample
    x = torch.randn(2, 16, 6, 6)
    y = shortcut(x)
    assert torch.equal(y[:, 8:24], x[:, :, ::2, ::2])
    assert y.shape == (2, 32, 3, 3)
    assert (y[:, :8] == 0).all()
    assert (y[:, 24:] == 0).all()


@pytest.mark.parametrize("name", ["resnet20", "wrn16_4"])
def test_dropout_is_of_features_and_a_drop_path_of_the_branches_of_blocks(name):
    model = timm.create_model(name, num_classes=7, in_chans=1, drop_rate=0.5, drop_path_rate=0.2)
    y = torch.ones(2, model.num_features, 2, 2)
    assert 0 < (model.forward_head(y, pre_logits=True) == 0).sum() < 2 * model.num_features
    assert (model.eval().forward_head(y, pre_logits=True) == 1).all()
    drops = [block.drop_path for layer in (model.layer1, model.layer2, model.layer3) for block in layer]
    assert drops[0] is None
    rates = [drop.drop_prob for drop in drops[1:]]
    assert rates == pytest.approx([0.2 * n / len(rates) for n in range(1, len(rates) + 1)])
    block = model.layer3[-1].train()
    block.drop_path.drop_prob = 1.0
    x = torch.rand(2, model.num_features, 4, 4)
    assert torch.equal(block(x), x)


@pytest.mark.parametrize("name", ["digit_pairs", "digit_pairs_attention"])
def test_the_maps_of_the_digit_networks_are_those_of_their_four_stages(name):
    features = timm.create_model(name, features_only=True)
    shapes = [tuple(f.shape[1:]) for f in features(torch.randn(2, 1, 8, 44))]
    assert shapes == [(16, 8, 44), (32, 4, 22), (32, 2, 11), (32, 2, 11)]


@pytest.mark.parametrize(
    ("network", "arguments", "message"),
    [
        (CifarResNet, {"depth": 21}, r"depth must be 6n \+ 2"),
        (CifarResNet, {"depth": 2}, r"depth must be 6n \+ 2"),
        (CifarResNet, {"depth": 20, "option": "C"}, "option must be 'A' .* or 'B' .*; got 'C'"),
        (CifarResNet, {"depth": 20, "global_pool": ""}, "global_pool must be given with num_classes=10: ''"),
        (DigitPairsNet, {"drop_path_rate": 0.1}, "drop_path_rate must be 0: .*; got 0.1"),
        (WideResNet, {"depth": 20, "width": 4}, r"depth must be 6n \+ 4: .*; got 20"),
        (WideResNet, {"depth": 16, "width": 0}, "width must be a whole number of at least 1; got 0"),
    ],
)
def test_bad_arguments_are_refused(network, arguments, message):
    with pytest.raises(ValueError, match=message):
        network(**arguments)


def test_a_name_without_a_tag_takes_the_one_for_its_classes():
    assert create_model("resnet20", num_classes=100).pretrained_cfg["tag"] == "cifar100"
    assert create_model("resnet20", num_classes=10).pretrained_cfg["tag"] == "cifar10"
    assert create_model("resnet20.cifar100", num_classes=3).pretrained_cfg["mean"] == (0.5070, 0.4865, 0.4409)
    assert create_model("resnet18", num_classes=5).num_classes == 5


def test_the_trained_network_is_loaded_by_name_and_does_what_its_card_says():
    result = train(
        Settings(dataset="digit-pairs", model="digit_pairs_attention", pretrained=True, test_only=True, device="cpu"),
        lambda line: None,
    )
    card = (weights_folder() / "digit_pairs_attention" / "README.md").read_text()
    assert f"{result.final.top1:.2f} %" in card
    assert result.final.top1 > 95


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_card_names_its_file_and_the_page_names_the_card(folder):
    (file,) = folder.glob("*.safetensors")
    card = (folder / "README.md").read_text()
    assert hashlib.sha256(file.read_bytes()).hexdigest() in card
    assert f"`{file.name}`" in card
    assert f"]({folder.name}/README.md)" in (weights_folder() / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "folder", "size", "sites"),
    [
        ("digit_pairs_attention", "digit_pairs_attention", [1, 8, 44], ["stage3.1.2"]),
        ("resnet20_attention.cifar100", "resnet20_attention_cifar100", [3, 32, 32], [f"layer3.{i}" for i in range(3)]),
    ],
)
def test_a_trained_network_is_loaded_by_name_as_a_folder_and_by_torch_hub(name, folder, size, sites):
    ours = timm.create_model(name, pretrained=True).eval()
    theirs = timm.create_model(f"local-dir:{weights_folder() / folder}", pretrained=True).eval()
    from_hub = torch.hub.load(str(ROOT), name.partition(".")[0], source="local", pretrained=True).eval()
    x = torch.rand(4, *size)
    assert torch.equal(ours(x), theirs(x))
    assert torch.equal(ours(x), from_hub(x))
    assert [*theirs.pretrained_cfg["input_size"]] == size
    assert list(va.inserted(ours)) == sites
    assert all(block.share > 0.01 for block in va.contribution(ours, x).blocks)


@pytest.mark.thorough
def test_the_network_of_our_own_training_scores_what_its_card_says(real_data, tmp_path):
    with zipfile.ZipFile(real_data / "cifar100-test.zip") as archive:
        archive.extractall(tmp_path)
    images = image_folder(tmp_path / "cifar100" / "test").read((32, 32))
    network = timm.create_model("resnet20_attention.cifar100", pretrained=True)
    normalize = Normalize(network.pretrained_cfg["mean"], network.pretrained_cfg["std"], 3)
    top1 = evaluate(network, normalize, images)[0].top1
    card = weights_folder() / "resnet20_attention_cifar100" / "README.md"
    assert f"| {top1:.2f} % (seed 0) |" in card.read_text()


def test_a_network_is_saved_as_a_folder_that_timm_reads(tmp_path):
    torch.manual_seed(0)
    model = timm.create_model("resnet20.cifar100", num_classes=5).eval()
    save_model(model, tmp_path / "saved", architecture="resnet20")
    again = timm.create_model(f"local-dir:{tmp_path / 'saved'}", pretrained=True).eval()
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(again(x), model(x))
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (config["architecture"], config["num_classes"]) == ("resnet20", 5)
    with pytest.raises(ValueError, match="architecture must be a name that timm knows; got 'resnet21'"):
        save_model(model, tmp_path / "other", architecture="resnet21")
    assert not (tmp_path / "other").exists()


#: Data, network, checkpoint, and the accuracy that it was published with, in percent.
ZOO = (
    ("cifar10-test", "resnet20_a", "A_cifar10_resnet20-12fca82f.th", 91.73),
    ("cifar10-test", "resnet20", "B_cifar10_resnet20.pth", 92.60),
    ("cifar100-test", "resnet20", "B_cifar100_resnet20.pth", 68.83),
    ("cifar100-test", "resnet56", "B_cifar100_resnet56.pth", 72.63),
)


@pytest.mark.thorough
def test_zoo_checkpoints_score_what_was_published_before_and_after_insertion(real_data, tmp_path):
    for data in ("cifar10-test", "cifar100-test"):
        with zipfile.ZipFile(real_data / f"{data}.zip") as archive:
            archive.extractall(tmp_path)
    found = {}
    for data, model, weights, _ in ZOO:
        folder = tmp_path / data.split("-")[0]
        settings = Settings(
            data=str(folder), model=model, weights=str(real_data / "zoo" / weights), test_only=True, device="cpu"
        )
        result = train(settings, lambda line: None)
        found[weights] = round(result.final.top1, 2)
        network = result.network.model.eval()
        images = torch.randn(64, 3, 32, 32)
        with torch.no_grad():
            before = network(images)
            va.insert_(network, names=["layer1", "layer2", "layer3"], num_heads=4, example_input=images)
            assert torch.equal(network(images), before)
    assert found == {weights: top1 for _, _, weights, top1 in ZOO}

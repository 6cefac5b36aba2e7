"""Networks of this library: sizes, keys, pretrained weights and published accuracies."""

import hashlib
import runpy
import zipfile
from pathlib import Path

import pytest
import timm
import torch
from recall_task import PAIRS, accuracy
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, Normalize, ToTensor

import vision_attn as va
from vision_attn.networks import models
from vision_attn.networks.models import CifarResNet, create_model
from vision_attn.networks.models.registry import weights_folder

ROOT = Path(__file__).parents[3]


def millions(model):
    return sum(p.numel() for p in model.parameters()) / 1e6


def on_meta(name, **options):
    with torch.device("meta"):
        return timm.create_model(name, **options)


SIZES = {"resnet20_a": 0.27, "resnet32_a": 0.46, "resnet44_a": 0.66, "resnet56_a": 0.85}
PROJECTED = {"resnet20": 0.27, "resnet32": 0.47, "resnet44": 0.66, "resnet56": 0.86}


@pytest.mark.parametrize(("name", "size"), (SIZES | PROJECTED).items())
def test_networks_have_the_sizes_of_their_papers(name, size):
    """He et al., table 6, for option A; the projections of option B add 2,752 parameters."""
    assert round(millions(on_meta(name)), 2) == size


def test_cifar_resnets_have_the_keys_of_model_zoos():
    plain, projected = (on_meta(name).state_dict().keys() for name in ("resnet20_a", "resnet20"))
    assert plain - projected == {"linear.weight", "linear.bias"}
    added = {key.rpartition(".")[0] for key in projected - plain} - {"fc"}
    assert added == {f"layer{stage}.0.downsample.{part}" for stage in (2, 3) for part in (0, 1)}


def test_dropout_applies_to_features_and_drop_path_to_residual_branches():
    model = timm.create_model("resnet20", drop_rate=0.5, drop_path_rate=0.2)
    y = torch.ones(2, model.num_features, 2, 2)
    assert 0 < (model.forward_head(y, pre_logits=True) == 0).sum() < 2 * model.num_features
    first, *drops = [block.drop_path for layer in (model.layer1, model.layer2, model.layer3) for block in layer]
    assert first is None
    assert [drop.drop_prob for drop in drops] == pytest.approx([0.2 * n / len(drops) for n in range(1, len(drops) + 1)])
    drops[-1].drop_prob = 1.0
    assert torch.equal(model.layer3[-1](y), y)


@pytest.mark.parametrize("make", [lambda: CifarResNet(21), lambda: CifarResNet(20, "C")])
def test_bad_arguments_are_rejected(make):
    with pytest.raises(ValueError, match=r"^(depth|option) must be .*, got (21|'C')$"):
        make()


def test_errors_name_the_model_and_the_reason():
    with pytest.raises(ValueError, match=r"^model: 'resnet21' does not exist\. Did you mean 'resnet"):
        create_model("resnet21")
    with pytest.raises(ValueError, match=r"^model: 'resnet20' cannot be created \(.*pretrained"):
        create_model("resnet20", pretrained=True)
    with pytest.raises(ValueError, match=r"^model: 'resnet20' cannot be created \(.*blok"):
        create_model("resnet20", blok=3)


def test_the_number_of_classes_determines_a_missing_tag():
    assert create_model("resnet20", num_classes=100).pretrained_cfg["tag"] == "cifar100"
    cifar10 = create_model("resnet20", num_classes=10).pretrained_cfg
    cifar100 = create_model("resnet20.cifar100", num_classes=3).pretrained_cfg
    # The statistics of the published weights, https://github.com/chenyaofo/image-classification-codebase
    mean, std = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
    assert (cifar10["tag"], cifar10["mean"], cifar10["std"]) == ("cifar10", mean, std)
    assert (cifar100["mean"], cifar100["std"]) == ((0.5070, 0.4865, 0.4409), (0.2673, 0.2564, 0.2761))
    assert create_model("resnet18", num_classes=5).num_classes == 5


def test_model_cards_name_their_file_and_are_linked():
    for folder in filter(Path.is_dir, weights_folder().iterdir()):
        (file,) = folder.glob("*.safetensors")
        assert hashlib.sha256(file.read_bytes()).hexdigest() in (folder / "README.md").read_text()
        assert f"]({folder.name}/README.md)" in (weights_folder() / "README.md").read_text()


def test_a_trained_network_is_loaded_by_name_as_a_folder_and_by_torch_hub():
    ours = timm.create_model("resnet20_attention.cifar100", pretrained=True).eval()
    folder = weights_folder() / "resnet20_attention_cifar100"
    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    from_hub = torch.hub.load(str(ROOT), "resnet20_attention", source="local", pretrained=True).eval()
    x = torch.rand(4, *ours.pretrained_cfg["input_size"])
    assert torch.equal(ours(x), theirs(x))
    assert torch.equal(ours(x), from_hub(x))
    torch.testing.assert_close(va.load_model(folder)(x), ours(x))  # the blocks may have another implementation
    assert all(block.ratio > 0.01 for block in va.contribution(ours, x).blocks)


@torch.no_grad()
def top1(model, batches):
    """Return the top-1 accuracy in percent."""
    model.eval()
    right = torch.cat([model(images).argmax(1) == labels for images, labels in batches])
    return round(100 * right.double().mean().item(), 2)


def cifar_images(real_data, name, folder, config):
    with zipfile.ZipFile(real_data / f"{name}-test.zip") as archive:
        archive.extractall(folder)
    transform = Compose([ToTensor(), Normalize(config["mean"], config["std"])])
    return torch.utils.data.DataLoader(ImageFolder(folder / name / "test", transform), batch_size=500)


@pytest.mark.slow
def test_the_recall_network_has_the_accuracy_on_its_card():
    model = timm.create_model("recall_attention", pretrained=True)
    card = (ROOT / "examples/experiments/recall_attention/README.md").read_text()
    assert "100.0 % of 4 pairs, 99.8 % of 8 and of 16, 99.5 % of 32" in card
    assert [f"{accuracy(model, pairs, 512):.1f}" for pairs in PAIRS] == ["100.0", "99.8", "99.8", "99.5"]


@pytest.mark.thorough
def test_the_cifar_network_has_the_accuracy_on_its_card(real_data, tmp_path):
    network = timm.create_model("resnet20_attention.cifar100", pretrained=True)
    found = top1(network, cifar_images(real_data, "cifar100", tmp_path, network.pretrained_cfg))
    assert f"| {found:.2f} % (seed 0)" in (weights_folder() / "resnet20_attention_cifar100" / "README.md").read_text()


#: Data set, network, checkpoint, and published accuracy in percent.
ZOO = (
    ("cifar10", "resnet20_a", "A_cifar10_resnet20-12fca82f.th", 91.73),
    ("cifar10", "resnet20", "B_cifar10_resnet20.pth", 92.60),
    ("cifar100", "resnet20", "B_cifar100_resnet20.pth", 68.83),
    ("cifar100", "resnet56", "B_cifar100_resnet56.pth", 72.63),
)


@pytest.mark.thorough
@pytest.mark.parametrize(("data", "name", "weights", "published"), ZOO)
def test_zoo_checkpoints_have_the_published_accuracy(data, name, weights, published, real_data, tmp_path):
    network = create_model(name, num_classes=int(data.removeprefix("cifar")))
    va.load_checkpoint_(network, real_data / "zoo" / weights)
    assert top1(network, cifar_images(real_data, data, tmp_path, network.pretrained_cfg)) == published


def test_pretrained_without_a_tag_loads_the_available_weights():
    model = timm.create_model("resnet20_attention", pretrained=True)
    assert (model.num_classes, model.pretrained_cfg["tag"]) == (100, "cifar100")
    assert list(va.inserted_blocks(model)) == ["layer3.0", "layer3.1", "layer3.2"]
    with pytest.raises(RuntimeError, match="No pretrained weights exist for resnet20_attention"):
        on_meta("resnet20_attention.cifar10", pretrained=True)


def test_replaced_convolutions_of_a_resnet_have_the_sizes_of_the_papers():
    """Srinivas et al.: 20.8 M, without projections after attention. Bello et al., table 2: 25.8 M."""
    botnet, augmented = on_meta("resnet50"), on_meta("resnet50")
    options = {"position": va.RelPosDecomposed(), "qkv_bias": False}
    va.replace_(botnet, names="layer4.*.conv2", num_heads=4, **options)
    blocks = va.inserted_blocks(botnet).values()
    projections = sum(p.numel() for block in blocks for p in block.attn.proj.parameters()) / 1e6
    assert millions(botnet) - projections == pytest.approx(20.8, abs=0.06)
    assert [block.stride for block in blocks] == [2, 1, 1]
    assert [block.attn.position.config.feat_size for block in blocks] == [(14, 14), (7, 7), (7, 7)]
    for stage, values in ((2, 16), (3, 24), (4, 48)):
        widths = {"key_channels": 160, "value_channels": values, "bias": False}
        va.replace_(augmented, va.blocks.AugmentedConv2d, names=f"layer{stage}.*.conv2", **widths, **options)
    assert round(millions(augmented), 1) == 25.8


def test_torch_hub_lists_every_network():
    functions = {name for name in models.__all__ if name[0].islower() and name != "create_model"}
    assert {name for name in runpy.run_path(str(ROOT / "hubconf.py")) if timm.is_model(name)} == functions

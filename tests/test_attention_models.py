"""Ready networks with attention: what they begin as, whose weights they take, and how large papers say they are."""

import copy
import pickle
import runpy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from timm.layers import BatchNormAct2d, create_conv2d
from timm.models.resnetv2 import DownsampleConv, PreActBasic
from torch import nn

import vision_attn as va
from vision_attn.attention.blocks import StridedAttention2d
from vision_attn.networks import models
from vision_attn.networks.models.folder import load_model, save_model

#: By network: the modules that blocks follow.
SITES = {
    "resnet18": ["layer3.1", "layer4.1"],
    "resnet50": ["layer3.5", "layer4.2"],
    "convnext_atto": ["stages.2", "stages.3"],
    "convnext_tiny": ["stages.2", "stages.3"],
    "efficientnet_b0": ["blocks.4.2", "blocks.6.0"],
    "resnet20": ["layer3.0", "layer3.1", "layer3.2"],
    "resnet56": [f"layer3.{block}" for block in range(9)],
    "wrn16_4": ["layer3.0", "layer3.1"],
    "wrn28_10": [f"layer3.{block}" for block in range(4)],
}
#: One of each family that is run here, and the side of an image for it.
SIDES = {"resnet18": 64, "convnext_atto": 64, "efficientnet_b0": 64, "resnet20": 32}


def quick(names, chosen):
    """Names as parameters: those that are not chosen are for thorough tests."""
    return [pytest.param(name, marks=[pytest.mark.thorough] * (name not in chosen)) for name in names]


def millions(model):
    return sum(p.numel() for p in model.parameters()) / 1e6


def on_meta(name, **options):
    with torch.device("meta"):
        return timm.create_model(name, **options)


def trained(name, num_classes=3):
    """A network of the kind that a block is inserted in, with parameters and statistics unlike those at the start."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=num_classes)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.running_mean, -0.1, 0.1)
    return model.eval()


def open_gates(model):
    for block in va.inserted(model).values():
        nn.init.normal_(block.attn.proj.weight, std=0.1)


# --- attention inserted in a network that there is --------------------------------------------------------------------


@pytest.fixture(params=quick(SIDES, {"convnext_atto", "resnet20"}), scope="module")
def base(request, tmp_path_factory):
    """A network's name, the network, a file of its weights, and an image for it."""
    model = trained(request.param)
    path = tmp_path_factory.mktemp("weights") / "base.pth"
    torch.save(model.state_dict(), path)
    side = SIDES[request.param]
    return request.param, model, path, torch.randn(1, 3, side, side)


def from_file(name, path, num_classes=3, **options):
    overlay = {"file": str(path), "num_classes": num_classes}
    return timm.create_model(
        name, pretrained=True, pretrained_cfg_overlay=overlay, **{"num_classes": num_classes, **options}
    ).eval()


def test_with_its_bases_weights_it_computes_what_the_base_does(base):
    name, plain, path, x = base
    model = from_file(f"{name}_attention", path)
    assert list(va.inserted(model)) == SITES[name]
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
        with va.capture(model) as maps:
            model(x)
        assert len(maps) == len(SITES[name])
        open_gates(model)
        assert not torch.equal(model(x), plain(x))


def test_without_weights_it_begins_as_its_base_begins(base):
    name, _, _, x = base
    networks = []
    for full in (name, f"{name}_attention"):
        torch.manual_seed(1)
        networks.append(timm.create_model(full, num_classes=3, drop_rate=0.1).eval())
    with torch.no_grad():
        assert torch.equal(networks[0](x), networks[1](x))


def test_its_features_are_those_of_its_base(base):
    name, _, path, x = base
    plain, ours = (from_file(full, path, features_only=True) for full in (name, f"{name}_attention"))
    assert ours.feature_info.channels() == plain.feature_info.channels()
    assert ours.feature_info.reduction() == plain.feature_info.reduction()
    with torch.no_grad():
        for found, expected in zip(ours(x), plain(x), strict=True):
            assert torch.equal(found, expected)
    blocks = [module for module in ours.modules() if isinstance(module, va.AttentionBlock2d)]
    assert len(blocks) == len(SITES[name])
    with torch.no_grad():
        blocks[-1].attn.proj.weight.normal_(std=0.1)
        assert not torch.equal(ours(x)[-1], plain(x)[-1])
    some = timm.create_model(f"{name}_attention", features_only=True, out_indices=(0, 2))
    assert len(some(x)) == 2


def test_timm_adapts_its_classifier_and_its_first_convolution(base):
    name, plain, path, x = base
    model = timm.create_model(
        f"{name}_attention",
        pretrained=True,
        pretrained_cfg_overlay={"file": str(path), "num_classes": 3},
        num_classes=5,
        in_chans=1,
    ).eval()
    with torch.no_grad():
        assert model(x[:, :1]).shape == (1, 5)
        model.reset_classifier(2)
        assert model(x[:, :1]).shape == (1, 2)
        gray = x[:, :1].expand(-1, 3, -1, -1)
        torch.testing.assert_close(model.forward_features(x[:, :1]), plain.forward_features(gray), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("lost", ["fc.weight", "layer1.0.conv1.weight", "layer3.2.inserted.gate"])
def test_a_checkpoint_is_whole_or_refused(lost, tmp_path):
    state = timm.create_model("resnet20_attention", num_classes=3).state_dict()
    del state[lost]
    torch.save(state, tmp_path / "part.pth")
    with pytest.raises(RuntimeError, match=f'Missing key.*"{lost}"'):
        from_file("resnet20_attention", tmp_path / "part.pth")


@pytest.mark.parametrize("name", quick(SITES, {"resnet18", "convnext_atto", "efficientnet_b0", "resnet20"}))
def test_its_configurations_are_those_of_its_base(name):
    assert list(va.inserted(on_meta(f"{name}_attention"))) == SITES[name]
    ours, plain = (timm.models.get_arch_pretrained_cfgs(full) for full in (f"{name}_attention", name))
    assert {full.replace("_attention", "") for full in ours} == set(plain)
    for mine in ours.values():
        theirs = plain[f"{name}.{mine.tag}"]
        kept = ("hf_hub_id", "url", "mean", "std", "input_size", "num_classes", "classifier", "tag")
        assert [getattr(mine, key) for key in kept] == [getattr(theirs, key) for key in kept]
        assert mine.architecture == f"{name}_attention"
    default, expected = (timm.get_pretrained_cfg(full) for full in (f"{name}_attention", name))
    assert (default.tag, default.num_classes) == (expected.tag, expected.num_classes)
    assert timm.is_model_pretrained(f"{name}_attention") == timm.is_model_pretrained(name)
    assert f"{name}_attention" in timm.list_models("*_attention")


@pytest.mark.parametrize("name", ["resnet20", "convnext_atto"])
def test_it_is_a_folder_that_timm_reads(name, tmp_path):
    x = torch.randn(1, 3, 32, 32)
    torch.manual_seed(2)
    model = timm.create_model(f"{name}_attention", num_classes=4).eval()
    open_gates(model)
    folder = save_model(model, tmp_path / "saved", architecture=f"{name}_attention")
    again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(again(x), model(x))


def test_a_folder_of_another_network_is_not_written(tmp_path):
    model = timm.create_model("resnet20", num_classes=4)
    with pytest.raises(ValueError, match=r"makes another network of 'resnet32'.*layer1.3.conv1.weight.*model_args"):
        save_model(model, tmp_path / "saved", architecture="resnet32")
    assert not list(tmp_path.iterdir())
    grey = timm.create_model("resnet20", in_chans=1)
    assert load_model(save_model(nn.DataParallel(grey), tmp_path / "saved")).conv1.in_channels == 1


def test_it_is_copied_and_pickled():
    model = timm.create_model("resnet20_attention").eval()
    open_gates(model)
    x = torch.randn(1, 3, 32, 32)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(x), model(x))


def test_weights_asked_for_without_a_tag_are_those_that_there_are():
    model = timm.create_model("resnet20_attention", pretrained=True)
    assert (model.num_classes, model.pretrained_cfg["tag"]) == (100, "cifar100")
    assert timm.create_model("resnet20_attention").num_classes == 10
    with pytest.raises(RuntimeError, match="No pretrained weights exist for resnet20_attention"):
        timm.create_model("resnet20_attention.cifar10", pretrained=True)


def test_weights_that_do_not_exist_are_not_made_up():
    with pytest.raises(RuntimeError, match="No pretrained weights exist for resnet32_attention"):
        timm.create_model("resnet32_attention", pretrained=True)


# --- networks of papers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "size"), [("wrn16_4", 2.7), ("wrn28_10", 36.5), ("wrn40_2", 2.2)])
def test_wide_resnets_have_the_papers_size(name, size):
    """Zagoruyko and Komodakis, tables 4 and 5."""
    assert round(millions(on_meta(name)), 1) == size


def test_a_wide_resnets_blocks_are_timms():
    torch.manual_seed(0)
    model = timm.create_model("wrn16_4").eval()
    conv = partial(create_conv2d, bias=False)
    x = torch.randn(2, 3, 16, 16)
    y = model.conv1(x)
    for layer, (channels, stride) in zip(
        (model.layer1, model.layer2, model.layer3), ((64, 1), (128, 2), (256, 2)), strict=True
    ):
        for number, block in enumerate(layer):
            theirs = PreActBasic(
                y.shape[1],
                channels,
                stride=1 if number else stride,
                conv_layer=conv,
                norm_layer=BatchNormAct2d,
                proj_layer=DownsampleConv,
            ).eval()
            for module in (block.bn1, block.bn2):
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
            names = {"bn1": "norm1", "bn2": "norm2", "downsample": "downsample.conv"}
            state = {
                ".".join([names.get(name.partition(".")[0], name.partition(".")[0]), name.partition(".")[2]]): value
                for name, value in block.state_dict().items()
            }
            theirs.load_state_dict(state, strict=True)
            with torch.no_grad():
                y = theirs(y)
    with torch.no_grad():
        torch.testing.assert_close(model.forward_features(x), torch.relu(model.bn(y)))
        torch.testing.assert_close(model(x), model.fc(torch.relu(model.bn(y)).mean((2, 3))))


def test_dropout_in_a_wide_resnet_is_between_its_convolutions():
    model = timm.create_model("wrn16_4", block_drop_rate=1.0)
    x = torch.randn(1, 64, 8, 8)
    block = model.layer1[1]
    given = []
    block.conv2.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    block(x)
    block.eval()(x)
    assert given[0].count_nonzero() == 0
    assert given[1].count_nonzero() > 0


def test_botnet_has_the_papers_size():
    """Srinivas et al.: 20.8 M, without projections after attention."""
    model = on_meta("botnet50")
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, StridedAttention2d)}
    assert list(blocks) == [f"layer4.{number}.conv2" for number in range(3)]
    projections = sum(block.attn.proj.weight.numel() for block in blocks.values()) / 1e6
    assert millions(model) - projections == pytest.approx(20.8, abs=0.06)
    assert [block.stride for block in blocks.values()] == [2, 1, 1]
    sizes = [block.attn.position.specification.feat_size for block in blocks.values()]
    assert sizes == [(14, 14), (7, 7), (7, 7)]


def test_the_augmented_resnet_has_the_papers_size():
    """Bello et al., table 2: 25.8 M."""
    model = on_meta("aa_resnet50")
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, va.AugmentedConv2d)}
    assert len(blocks) == 4 + 6 + 3
    assert {name.partition(".")[0] for name in blocks} == {"layer2", "layer3", "layer4"}
    assert round(millions(model), 1) == 25.8
    by_stage = {name: block.attn for name, block in blocks.items() if name.endswith(".0.conv2")}
    assert [attn.key_dim for attn in by_stage.values()] == [20, 20, 20]
    assert [attn.out_channels for attn in by_stage.values()] == [16, 24, 48]
    assert [attn.position.specification.feat_size for attn in by_stage.values()] == [(28, 28), (14, 14), (7, 7)]


@pytest.mark.parametrize("name", ["botnet50", "aa_resnet50"])
def test_timms_ways_of_using_them_work(name, tmp_path):
    torch.manual_seed(0)
    given = {"img_size": (40, 56), "layers": (1, 1, 1, 2)}
    model = timm.create_model(name, num_classes=3, drop_path_rate=0.1, **given).eval()
    x = torch.randn(1, 3, 40, 56)
    seen = {}
    with torch.no_grad(), va.capture(model, queries=[(0, 0)]) as maps:
        y = model(x)
        seen.update(maps)
    sizes = {path: model.get_submodule(path).position.specification.feat_size for path in seen}
    assert sizes == {path: tuple(found.weights.shape[3:]) for path, found in seen.items()}
    assert sizes["layer4.1.conv2.attn"] == (2, 2)

    folder = save_model(model, tmp_path / "saved", architecture=name, model_args=given)
    again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(again(x), y)
        model.reset_classifier(2)
        assert model(x).shape == (1, 2)

    features = on_meta(name, features_only=True, out_indices=(3, 4))
    assert features.feature_info.channels() == [1024, 2048]
    assert features.feature_info.reduction() == [16, 32]
    assert [f.shape[2] for f in features(torch.empty(1, 3, 64, 64, device="meta"))] == [4, 2]
    with pytest.raises(RuntimeError, match=f"No pretrained weights exist for {name}"):
        on_meta(name, pretrained=True)


def test_dilation_goes_with_attention_and_not_with_augmented_convolutions():
    model = on_meta("botnet50", output_stride=16)
    assert [model.layer4[number].conv2.stride for number in range(3)] == [1, 1, 1]
    assert model.layer4[2].conv2.attn.position.specification.feat_size == (14, 14)
    with pytest.raises(ValueError, match="output_stride must be 32"):
        on_meta("aa_resnet50", output_stride=16)


def test_torch_hub_knows_every_network():
    path = Path(__file__).resolve().parents[1] / "hubconf.py"
    hubconf = SimpleNamespace(**runpy.run_path(str(path)))
    functions = {name for name in models.__all__ if name[0].islower() and name != "create_model"}
    assert {name for name in vars(hubconf) if timm.is_model(name)} == functions
    assert all(timm.is_model(name) for name in functions)

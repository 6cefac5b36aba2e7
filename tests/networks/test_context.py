"""A second feature map for inserted blocks: the output of another module, or a map from outside the network."""

import pytest
import timm
import torch
from reach import tensors
from small_networks import Net, resnet
from torch import nn

import vision_attn as va

IMAGE = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
SWIN = {"img_size": 64, "window_size": 2, "embed_dim": 24, "depths": (1, 1, 1, 1)}
NETWORKS = {
    "resnet18": (resnet, "layer3.1", "layer1.1"),
    "convnext": (lambda: timm.create_model("convnext_atto", num_classes=5), "stages.3", "stages.1"),
    "swin": (lambda: timm.create_model("swin_tiny_patch4_window7_224", **SWIN), "layers.3", "layers.1"),
    "vit": (lambda: timm.create_model("vit_tiny_patch16_224", img_size=64, depth=3), "blocks.1", "blocks.0"),
    "features only": (lambda: resnet(features_only=True), "layer4", "layer2"),
}


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x == "convnext")) for x in NETWORKS])
def test_blocks_read_another_module_of_the_same_forward_pass(name):
    make, names, context = NETWORKS[name]
    model = make().eval()
    before, keys = tensors(model(IMAGE)), list(model.state_dict())
    report = va.insert_(model, names=names, context=context, example_input=IMAGE)
    (record,), (block,) = report.blocks, va.inserted_blocks(model).values()
    assert record.second.path.startswith(context)
    assert block.attn.context_channels == record.context_shape[0]
    assert report.verified == "verified in evaluation and training mode"
    assert all(map(torch.equal, tensors(model(IMAGE)), before))
    nn.init.normal_(block.attn.proj.weight, std=0.1)
    assert not torch.equal(tensors(model(IMAGE))[-1], before[-1])
    va.remove_(model)
    assert all(map(torch.equal, tensors(model(IMAGE)), before))
    assert list(model.state_dict()) == keys


def test_a_missing_map_from_outside_is_named():
    """``test_networks.py`` compares the outputs and the gradients of maps from outside."""
    model = resnet()
    va.insert_(model, names="layer3", context_channels=16, example_input=IMAGE)
    with pytest.raises(va.errors.SiteError, match=r"'layer3.1' requires a context\. .*va\.context"):
        model(IMAGE)
    va.remove_(model)
    with pytest.raises(TypeError, match=r"features must be a tensor .* got list"):
        va.context(model, [IMAGE])
    with pytest.raises(ValueError, match="no block that requires a context"):
        va.context(model, torch.randn(2, 16, 7, 1))


@pytest.mark.filterwarnings("ignore")  # warnings of the exporter
def test_features_are_an_input_of_an_exported_graph_or_refused():
    def run(net, images, features):
        with va.context(net.model, features):
            return net.model(images)

    model, images = nn.Sequential(Net(lambda net, x: net.conv(x), conv=nn.Conv2d(3, 8, 3))), torch.randn(1, 3, 8, 8)
    first, second = torch.randn(2, 1, 4, 3, 3)
    va.insert_(model, names="0", context_channels=4, num_heads=2, gate_init=1.0, example_input=images)
    program = torch.export.export(both := Net(run, model=model), (images, first)).module()
    torch.testing.assert_close(program(images, second), both(images, second))
    for trace in (lambda: torch.export.export(model, (images,)), lambda: torch.fx.symbolic_trace(model)):
        with pytest.raises(va.errors.SiteError, match="would be a constant of the graph"), va.context(model, first):
            trace()


def test_a_part_that_fails_leaves_no_context_to_a_later_call():
    part = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Identity(), nn.Conv2d(8, 8, 1))
    model = nn.ModuleDict({"part": part})
    model.forward = part.forward
    va.insert_(model, names="part.2", context="part.0", num_heads=2, example_input=IMAGE)
    part[1].register_forward_pre_hook(lambda *_: [][0])
    with pytest.raises(IndexError):
        part(IMAGE)
    with pytest.raises(va.errors.SiteError, match=r"'part\.0' did not run before it"):
        part[2](torch.randn(2, 8, 64, 64))
    loops = Net(lambda net, xs: [net.top(y) for y in [net.stem(x) for x in xs]], stem=part[0], top=nn.Conv2d(8, 8, 1))
    with pytest.raises(va.errors.SiteError, match="'stem' did not run before it"):
        va.insert_(loops, names="top", context="stem", num_heads=2, example_input=([IMAGE] * 2,))


#: Options of va.insert_, and the error.
REFUSED = [
    ({"names": "layer2", "context": "layer4"}, va.errors.SiteError, "'layer4.1' does not run before 'layer2.1'"),
    ({"names": "layer2", "context": "layer2"}, va.errors.SiteError, "does not run before"),
    ({"names": "layer4", "context": "layer9"}, va.errors.SiteError, "context: no module matches 'layer9'"),
    ({"names": "layer4", "context": "layer[12]"}, va.errors.SiteError, "matches 2 modules: layer1, layer2"),
    ({"names": "layer4", "context": "layer1", "block": "se"}, TypeError, "context_channels"),
    ({"names": "layer4", "context": "layer1", "block": va.Attention2d}, ValueError, "as AttentionBlock2d does, got A"),
    ({"names": "layer4", "context": "fc"}, va.errors.SiteError, "no feature map"),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED)
def test_other_contexts_are_refused(options, error, message):
    model = resnet()
    with pytest.raises(error, match=message):
        va.insert_(model, **options)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_context_that_runs_less_often_than_the_block_is_refused():
    conv = nn.Conv2d(8, 8, 1)
    with pytest.raises(va.errors.SiteError, match="context: '0' does not run before '1' and equally often"):
        va.insert_(nn.Sequential(nn.Conv2d(3, 8, 4, 4), conv, conv), names="1", context="0")


def test_the_cost_of_a_block_with_a_context_is_that_of_both_maps():
    model = resnet()
    plain = va.insert_(model, names="layer4", dry_run=True)
    report = va.insert_(model, names="layer4", context="layer3", dry_run=True)
    assert report.blocks[0].context_shape == (32, 14, 14)
    assert report.macs > plain.macs
    assert report.blocks[0].cost.saved_bytes > 0
    assert not va.inserted_blocks(model)

"""Attention in place of modules of a backbone: shapes, state-dict keys, and restoring the modules."""

import copy
from functools import partial

import pytest
import timm
import torch
import torchvision
from reach import as_after_training
from small_networks import Net, assert_same
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import vision_attn as va
from vision_attn.networks.insertion.registry import inserted_keys, records, replaced_modules

resnet18 = torchvision.models.resnet18
bottlenecks = partial(torchvision.models.ResNet, torchvision.models.resnet.Bottleneck, [1, 1, 1, 2], width_per_group=8)
dilated = partial(bottlenecks, replace_stride_with_dilation=[False, False, True])

#: Networks, their convolutions, and the channels and strides of the convolutions.
CONVOLUTIONS = {
    "bottlenecks, stride 2 in the first": (bottlenecks, "layer4.*.conv2", [(64, 64, 2), (64, 64, 1)]),
    "grouped": (lambda: timm.create_model("convnext_atto"), "stages.3.blocks.*.conv_dw", [(320, 320, 1)] * 2),
    "dilated": (dilated, "layer4.1.conv2", [(64, 64, 1)]),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
@torch.no_grad()
def test_a_convolution_is_replaced_with_its_stride_and_channels(case):
    make, names, shapes = CONVOLUTIONS[case]
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(1, 3, 96, 96)
    before, modules, state = model(x), dict(model.named_modules()), model.state_dict()
    report, new = va.replace_(model, names=names, num_heads=4, example_input=x), va.inserted_blocks(model)
    assert [(b.attn.channels, b.attn.out_channels, b.stride) for b in new.values()] == shapes
    assert [b.attn.groups for b in new.values()] == [modules[site].groups for site in new]
    assert {block.target.at for block in report.blocks} == {"replace"}
    assert report.added.parameters == sum(p.numel() for p in model.parameters()) - report.model_cost.parameters
    assert (records(model), replaced_modules(model)) == (report.blocks, {site: modules[site] for site in new})
    gone = {f"{site}.{key}" for site in new for key in modules[site].state_dict()}
    assert [key for key in model.state_dict() if key not in inserted_keys(model)] == [x for x in state if x not in gone]
    replaced = model(x)
    assert replaced.shape == before.shape
    assert not torch.equal(replaced, before)
    assert (va.remove_(model).blocks, dict(model.named_modules())) == (report.blocks, modules)
    assert_same(model.state_dict(), state)
    assert torch.equal(model(x), before)


@torch.no_grad()
def test_squeeze_and_excitation_becomes_a_gated_block():
    model, x = torchvision.models.mobilenet_v3_small().eval(), torch.randn(1, 3, 96, 96)
    as_after_training(model)
    before = model(x)
    assert len(va.replace_(model, names="features.[89].block.2", example_input=x).blocks) == 2
    # The block is an identity at initialization, so the output is that of the network without squeeze and excitation.
    without = model(x)
    assert not torch.equal(without, before)
    for site, block in va.inserted_blocks(model).items():
        assert type(block) is va.AttentionBlock2d
        model.set_submodule(site, nn.Identity())
    torch.testing.assert_close(without, model(x))


def test_restored_modules_have_the_dtype_and_mode_of_the_model():
    model, x = timm.create_model("resnet20"), torch.randn(1, 3, 32, 32, dtype=torch.float64)
    norm = model.layer3[1].bn2.eval()  # A norm that is frozen by its mode keeps the mode.

    def convolution(channels, stride, out_channels, device, dtype):
        return nn.Conv2d(channels, out_channels, 1, stride)

    va.replace_(model, convolution, names="layer3.2.conv2")
    va.replace_(model, lambda channels, device, dtype: nn.Identity(), names="layer3.1")
    va.remove_(model.double())
    assert model.layer3[2].conv2.weight.dtype == torch.float64
    assert model.layer3[2].conv2.training
    assert not norm.training
    va.replace_(model, names="layer3.2.conv2")
    va.remove_(model.eval())
    assert not model.layer3[2].conv2.training
    assert model(x).dtype == torch.float64


def test_a_restored_module_keeps_its_dtype_if_no_parameter_determines_another():
    """A block without parameters left the dtype of the first parameter of the model, or of torch, to the module."""
    double = lambda: nn.Conv2d(3, 3, 1, dtype=torch.float64)  # noqa: E731
    mixed = nn.Sequential(nn.Conv2d(3, 3, 1), Net(lambda net, x: x.double()), double(), double())
    for model, name in (mixed, "3"), (nn.Sequential(double()), "0"):
        x = torch.randn(1, 3, 8, 8, dtype=model[0].weight.dtype)
        va.replace_(model, lambda channels, **options: nn.Identity(), names=name, example_input=x)
        va.remove_(model)
        assert model[int(name)].weight.dtype == torch.float64


def test_a_restored_module_that_was_not_saved_is_reported_until_its_weights_are_loaded(tmp_path):
    model = timm.create_model("test_resnet", num_classes=5)
    torch.save(model.state_dict(), tmp_path / "net.pth")
    va.replace_(model, names="layer3.0.conv2", num_heads=2)
    loaded = va.load_model(va.save_model(model, tmp_path / "net", model_args={"num_classes": 5}))
    with pytest.warns(UserWarning, match=r"save 'layer3\.0\.conv2', so .* random weights"):
        va.remove_(copy.deepcopy(loaded))
    va.load_checkpoint_(loaded, tmp_path / "net.pth")
    va.remove_(loaded)
    assert_same(loaded.state_dict(), torch.load(tmp_path / "net.pth"))


def test_blocks_are_inserted_after_replaced_modules():
    torch.manual_seed(0)
    model, x = timm.create_model("resnet20").eval(), torch.randn(1, 3, 32, 32)
    plain = model(x)
    va.replace_(model, names="layer3.2.conv2")
    before = model(x)
    va.insert_(model, names="layer3")
    assert torch.equal(model(x), before)
    message = "'layer3.2.conv2' cannot be replaced: it is or contains an inserted block"
    with pytest.raises(va.errors.SiteError, match=message):
        va.replace_(model, names="layer3.2.conv?")
    assert sorted(va.inserted_blocks(model)) == ["layer3.2", "layer3.2.conv2"]
    assert len(va.remove_(model).blocks) == 2
    assert torch.equal(model(x), plain)


class Scaled(nn.Sequential):
    """A network whose first module is called with a tensor, or with a number by name."""

    def forward(self, x):
        x = x[..., ::16, ::16]
        return self[0](x, x.mean()) if len(self) > 1 else self[0](x, scale=2)


def aliased(part):
    """Return a network that calls its module through a list, as detectron2 does."""
    return Net(lambda net, x: [part][0](x[..., ::16, ::16]), part=part)


SCALE = Net(lambda net, x, scale: x * scale)
WRAPPED = checkpoint_wrapper(nn.Conv2d(3, 3, 3, padding=1, device="meta"))
#: A network, names of modules, and the message of the error.
NOT_REPLACED = [
    (resnet18, "layer2", r"Sequential returns 'b c h w' of shape \(1, 128, 28, 28\)"),
    (lambda: nn.Sequential(nn.Conv2d(3, 8, 1, stride=(2, 1))), "0", "must return a feature map"),
    (resnet18, ["layer3.1.conv2", "layer3.1"], "'layer3.1' cannot be replaced: .* another selected module"),
    (lambda: Scaled(SCALE), "0", "'0' cannot be replaced: .*unexpected keyword argument 'scale'"),
    (lambda: Scaled(SCALE, nn.Identity()), "0", "'0' .*: it receives 2 tensors"),
    (lambda: Net(lambda net, x: net.part(2, x), part=Net(lambda part, scale, x: x)), "part", "Net returns 'b c h"),
    (lambda: timm.create_model("hrnet_w18_small"), "stage2", "'stage2'"),  # The feature map is in a list.
    (lambda: timm.create_model("test_vit"), "blocks.3.attn", r"Attention returns 'b \(1 \+ h w\) c' of shape"),
    (lambda: aliased(nn.Conv2d(3, 3, 1)), "part", "'part' .* calls this module through another reference"),
    (lambda: nn.Sequential(WRAPPED), "0", "'0' .*wraps this layer. Call va.replace_ before"),
    (lambda: nn.Sequential(WRAPPED), "0._checkpoint_wrapped_module", "wraps this layer. Call va.replace_ before"),
]


@pytest.mark.parametrize(("make", "names", "message"), NOT_REPLACED)
def test_unsupported_replacements_are_rejected_by_name_without_changes(make, names, message):
    with torch.device("meta"):
        model = make()
    modules = dict(model.named_modules())
    with pytest.raises(ValueError, match=message):
        va.replace_(model, names=names, num_heads=1)
    assert dict(model.named_modules()) == modules


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, partial(torch.compile, backend="eager")])
def test_a_replacement_that_is_wrapped_is_saved_and_removed(wrap, tmp_path):
    network = lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1)).eval()  # noqa: E731
    model, plain, x = network(), network(), torch.randn(1, 3, 6, 6)
    plain.load_state_dict(model.state_dict())
    before, modules = model(x), dict(model.named_modules())
    va.replace_(model, names="1", num_heads=2, example_input=x)
    after = model(x)
    model[1] = wrap(model[1])
    assert list(va.inserted_blocks(model)) == ["1"]
    va.load_adapter_(plain, va.save_adapter(model, tmp_path / "adapter.safetensors"))
    torch.testing.assert_close(plain(x), after)
    assert (len(va.remove_(model).blocks), dict(model.named_modules())) == (1, modules)
    assert torch.equal(model(x), before)


def test_a_replacement_in_a_wrapper_of_peft_is_restored_there():
    """The wrapper shows the attributes of the block, so that ``remove_`` deleted the wrapper and left no module."""
    peft = pytest.importorskip("peft")
    model, x = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1)).eval(), torch.randn(1, 3, 6, 6)
    before = model(x)
    va.replace_(model, names="1", num_heads=2, example_input=x)
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"], r=1, modules_to_save=["1"]))
    assert list(va.inserted_blocks(model)) == ["1.original_module", "1.modules_to_save.default"]
    va.remove_(model)
    torch.testing.assert_close(model(x), before)


def test_a_sequential_is_replaced_as_a_whole():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()))
    va.replace_(model, names="1", exclude="1.1", num_heads=2, example_input=(1, 3, 4, 4))
    assert inserted_keys(model[1]) == {*model[1].state_dict()}

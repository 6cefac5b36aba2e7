"""Adapters and saved networks are restored bitwise identically, only from files of the current format."""

import copy
import json
import os
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import small_networks
import timm
import torch
from controls import ConvBlock2d
from crafted import read_entry, rewrite
from PIL import Image
from small_networks import Net, assert_same, copied
from tiny import Tiny
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations

import vision_attn as va
from vision_attn.attention.position import PositionEncoding
from vision_attn.networks.checkpoints.adapter import unwrap_state
from vision_attn.networks.checkpoints.option_code import from_code, to_code
from vision_attn.networks.insertion.registry import inserted_keys, records

#: Some feature maps of the small networks in these tests are 2×2; torch.compile reads gradients.
pytestmark = pytest.mark.filterwarnings("ignore:attention has little effect", "ignore:The .grad attribute")

IMAGES = (1, 3, 32, 32)


def small_network(classes=3):
    """Return a network of four residual blocks and a classifier, with the same weights at every call."""
    torch.manual_seed(0)
    how = {"channels": (8, 8, 8, 16), "num_classes": classes, "zero_init_last": False}
    return timm.models.ResNet(timm.models.resnet.BasicBlock, [1, 1, 1, 1], **how).eval()


def train(model, also=()):
    """Set random values for all tensors of the blocks, and for additional keys."""
    torch.manual_seed(1)
    state = unwrap_state(model)
    for key in [*sorted(inserted_keys(model)), *also]:
        if state[key].is_floating_point():
            nn.init.normal_(state[key], std=0.3)


def network_with_block(names="layer3.0"):
    model = small_network()
    va.insert_(model, names=names, num_heads=2, example_input=IMAGES)
    train(model)
    return model


def assert_rejected(message, path, model=None, **options):
    small_networks.assert_rejected(va.load_adapter_, message, model or small_network(), path, **options)


def network_with_many_blocks():
    """Return a network with blocks after, before and instead of modules, in a branch, and with a context."""
    model, common = small_network(), {"num_heads": 2, "example_input": IMAGES}
    va.replace_(model, names=["layer2.0.conv2", "layer4.0.conv1"], **common)
    va.insert_(model, va.blocks.TransformerBlock2d, names=["layer1", "layer3"], **common)
    va.insert_(model, names="layer2", num_heads=1, gate_init=0.5, example_input=(2, 3, 64, 32))
    va.insert_(model, names="conv1", pattern=va.Window(2), position=va.RelPosTable(), example_input=IMAGES)
    va.insert_(model, names="layer3.0.conv1", at="before", **common)
    va.insert_(model, names="layer3.0.bn2", **common)
    va.insert_(model, names="layer4", context="layer2", **common)
    train(model)
    return model


def test_blocks_are_restored_and_completely_removed(tmp_path):
    model = network_with_many_blocks()
    va.save_adapter(model, tmp_path / "adapter.safetensors")

    other = small_network()
    before, random = copied(other), torch.get_rng_state()
    other.forward = None  # never called
    report = va.load_adapter_(other, tmp_path / "adapter.safetensors")
    del other.forward
    assert torch.equal(torch.get_rng_state(), random)
    assert_same(other.state_dict(), model.state_dict())
    assert (records(other), set(report.loaded)) == (records(model), inserted_keys(model))
    assert not report.changed_tensors
    assert "loaded, for an input of" in str(report)
    assert not re.search("optimizers now|set to zero|before inserting", str(report))  # the blocks are trained
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(other(x), model(x))
    assert not torch.equal(other(x), small_network()(x))
    with pytest.raises(ValueError, match=r"got blocks at 'conv1', .*Call va.remove_\(model\)"):
        va.load_adapter_(other, tmp_path / "adapter.safetensors")
    va.remove_(other)
    assert_same(other.state_dict(), before)


@pytest.fixture
def model():
    return network_with_block()


@pytest.fixture
def adapter(model, tmp_path):
    return va.save_adapter(model, tmp_path / "adapter.safetensors")


def test_a_new_head_is_saved_with_the_blocks(model, tmp_path):
    train(model, also=["fc.weight", "fc.bias"])
    path = va.save_adapter(model, tmp_path / "adapter.safetensors", also="fc.*")
    assert va.save_adapter(model, tmp_path / "head.safetensors", also="head").read_bytes() == path.read_bytes()
    other = small_network()
    nn.init.zeros_(other.fc.weight)  # the new head is not part of the fingerprint
    va.load_adapter_(other, path)
    assert_same(other.state_dict(), model.state_dict())
    assert_rejected(r"another network: .*fc.weight \(model \(5, 16\), adapter \(3, 16", path, small_network(classes=5))
    other.alias = other.fc.weight  # another name of a tensor of the new head
    again = copy.deepcopy(other)
    va.remove_(again)
    nn.init.ones_(other.alias)
    va.load_adapter_(again, va.save_adapter(other, tmp_path / "shared.safetensors", also="fc.*"))
    assert_same(again.state_dict(), other.state_dict())
    with pytest.raises(ValueError, match=r"also='head.*' .*classifier .*'fc'; pass also=\"head\""):
        va.save_adapter(model, path, also=["fc.*", "head.*"])
    with pytest.raises(ValueError, match=r"adapter\.pth"):
        va.save_adapter(model, tmp_path / "adapter.pth")


def compile_layer(model, name="layer3"):
    setattr(model, name, torch.compile(getattr(model, name), backend="eager"))
    return model


@pytest.mark.parametrize("change", [lambda backbone: compile_layer(backbone, "layer2"), lambda backbone: backbone])
def test_an_adapter_of_a_backbone_that_was_taken_out_or_wrapped_is_loaded(change, tmp_path):
    outer = nn.Sequential(small_network())
    va.insert_(outer, names="0.layer3.0", context="0.layer2", num_heads=2, example_input=IMAGES)
    va.insert_(outer, names="0.bn1", num_heads=2, example_input=IMAGES)
    va.insert_(outer, va.blocks.LinearAttention2d, names="0.layer4.0", num_heads=2, example_input=IMAGES)
    train(outer)
    other, backbone = small_network(), change(outer[0])
    va.load_adapter_(other, va.save_adapter(backbone, tmp_path / "adapter.safetensors"))
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(other(x), backbone(x))
    with pytest.raises(ValueError, match=r"the AttentionBlock2d at '0' cannot be saved: .*outside this part"):
        va.save_adapter(backbone.layer3, tmp_path / "adapter.safetensors")


def quantized(scale=1):
    """Return a network whose linear layers are quantized, with a block."""
    model = small_network()
    model.fc.weight.data *= scale
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})


@pytest.mark.filterwarnings("ignore:.*deprecated", "ignore:the output of the network does not depend")
def test_quantized_networks_are_compared_but_not_saved(tmp_path):
    model = quantized()
    va.insert_(model, names="layer3.0", num_heads=2, example_input=IMAGES)
    path = va.save_adapter(model, tmp_path / "adapter.safetensors")
    assert not va.load_adapter_(quantized(), path).changed_tensors
    with pytest.raises(va.errors.CheckpointError, match=r"1 of .* tensors differ, fc\._packed_params"):
        va.load_adapter_(quantized(-3), path)
    with pytest.raises(ValueError, match=r"fc\._packed_params\..*cannot be saved: quantized.* before quantizing it"):
        va.save_model(model, tmp_path / "network", network=small_network)


def test_an_adapter_is_not_saved_from_a_graph_that_runs_a_block(model, tmp_path):
    traced = torch.fx.symbolic_trace(model)
    keys = inserted_keys(traced)
    assert len(keys) == 7
    va.freeze_backbone_(traced)
    assert {key for key, p in traced.named_parameters() if p.requires_grad} == keys
    with pytest.raises(ValueError, match=r"no inserted blocks to save\. .* before tracing"):
        va.save_adapter(traced, tmp_path / "adapter.safetensors")


def test_an_adapter_is_loaded_completely_or_not_at_all(model, tmp_path):
    train(model, also=["fc.weight"])
    path, other = va.save_adapter(model, tmp_path / "a.safetensors", also="fc.weight"), small_network()
    other.fc.weight = nn.Parameter(torch.ones(1, 16).expand(3, 16))
    assert_rejected(r"fc\.weight cannot be written, because it is expanded", path, other)


def test_blocks_inserted_or_loaded_in_inference_mode_can_be_trained(adapter, saved):
    network, other = small_network(), small_network()
    with torch.inference_mode():
        va.load_adapter_(network, adapter.parent)
        va.insert_(other, names="layer2", num_heads=2, example_input=IMAGES)
        networks = network, other, va.load_model(saved[0])
    for one in networks:
        one(torch.randn(IMAGES)).sum().backward()
        assert all(p.grad is not None for block in va.inserted_blocks(one).values() for p in block.parameters())


@pytest.mark.parametrize("what", ["names", "values", "types"])
def test_another_network_is_rejected_before_it_is_changed(what, adapter):
    model, message, differing = small_network(), "67 of 67 tensors.*bfloat16 in the model, float32 in the adapter", 67
    if what == "names":
        model.classifier, message, differing = model.fc, "another network: .*fc.weight .*classifier.weight ", 0
        del model.fc
    elif what == "values":
        message, differing = r"2 of 67 tensors.* bn1.running_mean, layer2.0.conv1.weight ", 2
        nn.init.ones_(model.to(memory_format=torch.channels_last).layer2[0].conv1.weight)
        model.bn1.running_mean.add_(1)
        model.bn1.num_batches_tracked.add_(7)  # counters and the memory format are not compared
    else:
        model.bfloat16()
    before = copied(model)
    for strict in (True, False)[: 1 if differing else 2]:
        assert_rejected(message, adapter, model, strict=strict)
    if differing:
        report = va.load_adapter_(model, adapter, strict=False)
        assert (len(report.changed_tensors), report.num_compared) == (differing, 67)
        assert f"{differing} of 67 tensors" in str(report)
        assert va.inserted_blocks(model)["layer3.0"].gate.dtype == model.conv1.weight.dtype
        va.remove_(model)
        assert_same(model.state_dict(), before)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_late_failure_leaves_the_model_unchanged(error, tmp_path, monkeypatch):
    model = network_with_many_blocks()
    train(model, also=["fc.weight"])
    path = va.save_adapter(model, tmp_path / "adapter.safetensors", also="fc.*")

    def fail(*arguments):
        raise error("late")

    monkeypatch.setattr("vision_attn.networks.checkpoints.adapter.records", fail)
    assert_rejected("late", path, error=va.errors.CheckpointError if error is RuntimeError else error)


def test_other_and_damaged_files_are_rejected(adapter, tmp_path):
    other = tmp_path / "other.safetensors"
    safetensors.torch.save_file({"weight": torch.zeros(1)}, other)
    assert_rejected(r"is not an adapter\. .*load_checkpoint_ .*load_model", other)
    for number in (1, 4, 6):
        rewrite(adapter, other, library="9.0", format=number)
        assert_rejected(rf"expected 5, got {number}\. .* vision_attn 9\.0", other)
    (block,) = read_entry(adapter)["blocks"]
    wrong = [{"options": {"c": 3}}, {"layout": 3}, {"element": [1]}, {"more": 1}]
    wrong = [{"blocks": [{**block, **change}]} for change in wrong]
    wrong += {"blocks": [{}]}, {"blocks": 3}, {"also": ["fc.weight"]}, {"base": [1]}, {"arguments": {"a": 3}}
    for changes in wrong:
        assert_rejected("is damaged", rewrite(adapter, other, **changes))
    assert_rejected(r"nothing\.safetensors", tmp_path / "nothing.safetensors", error=FileNotFoundError)
    with pytest.raises(va.errors.CheckpointError, match=r"is an adapter\. .*load_adapter_"):
        va.load_checkpoint_(small_network(), adapter)


#: A change of the record of a block, and the message of the error.
WRONG_SITES = [
    ({"at": "nowhere"}, "'nowhere'"),
    ({"site": "no.such"}, "no.such"),
    ({"block_path": "no.such.inserted"}, "no module 'no.such'"),
    ({"channels": 10**6}, r"differ in .*\(3000000, 1000000, 1, 1\)"),
    ({"site": "layer1", "block_path": "layer1.inserted"}, "record of the block is invalid"),
    ({"site": "layer1"}, "record of the block is invalid"),
    ({"options": {"num_heads": "os.system('d')"}}, "is not a valid value"),
    ({}, r"differ in fc\.bias"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_SITES)
def test_a_file_can_insert_blocks_only_at_sites(change, message, adapter, tmp_path):
    (block,) = read_entry(adapter)["blocks"]
    more = {} if change else {"fc.bias": torch.ones(3)}  # fc.bias is not listed in ``also``
    assert_rejected(message, rewrite(adapter, tmp_path / "other.safetensors", more, blocks=[{**block, **change}]))


class Added(Net):
    """Adds a convolution; :class:`Tanh` has the same parameters and another output."""

    def __init__(self, channels, run=lambda net, x: x + net.conv(x)):
        super().__init__(run, conv=nn.Conv2d(channels, channels, 1))


class Tanh(Added):
    def __init__(self, channels):
        super().__init__(channels, lambda net, x: x + net.conv(x).tanh())


@dataclass(frozen=True)
class Near:
    """A position encoding and its module, which subtracts the distance along rows from the logits."""

    slope: float = 0.5

    def build(self, block, device=None, dtype=None):
        return NearEncoding(self)


class NearEncoding(PositionEncoding):
    def forward(self, q, k, grouping):
        return q * self.config.slope, k, None


def test_several_custom_classes_are_used_by_name(tmp_path):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))

    model, x = build(), torch.randn(2, 3, 16, 16)
    va.insert_(model, Added, names="0", example_input=(1, 3, 16, 16))
    va.insert_(model, Tanh, names="1", example_input=(1, 3, 16, 16))
    va.insert_(model, names="2", num_heads=2, position=Near(3.0), example_input=(1, 3, 16, 16))
    train(model)
    file = va.save_adapter(model, tmp_path / "blocks.safetensors")
    va.save_model(model, tmp_path / "net", network=build)  # its own check uses the classes of the network
    names = {"Added": Added, "Near": Near, "Tanh": Tanh}
    for block in ([Tanh, Near, Added], names):
        assert torch.equal(va.load_model(tmp_path / "net", block=block, network=build)(x), model.eval()(x))
        other = build()
        report = va.load_adapter_(other, file, block=block)
        assert [record.block for record in report.insertion.blocks] == ["Added", "Tanh", "AttentionBlock2d"]
        assert torch.equal(other.eval()(x), model(x))
    for block in (Added, [Added, Tanh], lambda channels, **how: Added(channels), None, names | {"More": Added}):
        assert_rejected(r"custom classes Added, Near, Tanh.*\[Added, Near, Tanh\]", file, build(), block=block)
    report = va.load_adapter_(build(), file, block=names | {"Added": type("Renamed", (Added,), {})})
    assert report.insertion.blocks[0].block == "Renamed"  # what was built
    wider = names | {"Added": lambda channels, **how: Added(channels + 1)}
    assert_rejected(r"differ in conv.weight \(9, 9, 1, 1\)", file, build(), block=wider)
    plain = va.save_adapter(network_with_block(), tmp_path / "plain.safetensors")
    assert_rejected("block must be None", plain, block=Added)


def AttentionBlock2d(channels, num_heads):  # noqa: N802 - the class of this name refuses three heads
    return va.AttentionBlock2d(channels, 2)


def normalized(norm, end):
    """Return a function that normalizes a layer of the block."""
    return lambda model: norm(next(part for path, part in model.named_modules() if path.endswith(end)))


NORMS = parametrizations.spectral_norm, nn.utils.spectral_norm, nn.utils.weight_norm  # Self-Attention-GAN#31
#: Options of a block, a change of the network, and the reason why its adapter is not saved.
NOT_SAVED = [
    ({"block": nn.BatchNorm2d, "momentum": torch.tensor(2.0)}, nn.Module.eval, r"momentum=tensor\(2.\)"),
    ({"num_heads": 2}, lambda model: model.to("meta"), "model has tensors without values"),
    ({"block": lambda channels, **how: va.AttentionBlock2d(channels, 4)}, nn.Module.eval, "Block2d at .*function"),
    ({"block": AttentionBlock2d, "num_heads": 3}, nn.Module.eval, "^the AttentionBlock2d at .* built by a function"),
    ({"block": type("AttentionBlock2d", (va.AttentionBlock2d,), {})}, nn.Module.eval, "another class of this name"),
    ({"block": "cbam"}, normalized(NORMS[0], "fc1"), "cbam at 'layer3.0' .*parametrization"),
    *(({}, normalized(norm, "proj"), r"'layer3.0' .*attn\.proj\..* remove parametrizations") for norm in NORMS),
]


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize(("options", "change", "message"), NOT_SAVED)
def test_blocks_that_cannot_be_saved_are_rejected_by_name(options, change, message, tmp_path):
    model = small_network()
    with pytest.raises(ValueError, match="no inserted blocks to save"):
        va.save_adapter(model, tmp_path / "adapter.safetensors")
    va.insert_(model, names="layer3.0", example_input=IMAGES, **options)
    change(model)
    with pytest.raises(ValueError, match=message):
        va.save_adapter(model, tmp_path / "adapter.safetensors")
    assert not list(tmp_path.iterdir())


class Attend(Net):
    """A custom block with an option that the shapes of its weights do not reveal."""

    def __init__(self, channels, heads=1):
        super().__init__(lambda net, x: x + net.attn(x), attn=va.Attention2d(channels, heads))


def test_custom_blocks_with_another_configuration_are_rejected(tmp_path):
    model, other, make = small_network(), small_network(), partial(Attend, heads=4)
    va.insert_(model, make, names="layer3.0", example_input=IMAGES)
    train(model)
    path = va.save_adapter(model, tmp_path / "adapter.safetensors")
    assert_rejected(r"layer3\.0\.inserted.*: num_heads=4 in the check.*, 1 in the model.* block=", path, block=Attend)
    va.load_adapter_(other, path, block=make)
    assert torch.equal(other(x := torch.randn(IMAGES)), model(x))
    with pytest.raises(ValueError, match=r"(?s)num_heads=4 .* function that builds custom blocks as block$"):
        va.save_model(model, tmp_path / "net", network=small_network)
    va.save_model(model, tmp_path / "net", network=small_network, block=make)
    va.insert_(model, Attend, names="layer2.0", example_input=IMAGES)
    with pytest.raises(ValueError, match=r"Attend at 'layer3\.0' cannot be saved: .* configured differently"):
        va.save_adapter(model, path)


def checkpoint_layer(model):
    model.layer3[0] = checkpoint_wrapper(model.layer3[0])
    return model


@pytest.mark.parametrize("names", ["layer3.0", "layer3.0.bn2"])
def test_adapters_fit_networks_with_and_without_wrappers(names, tmp_path):
    """torch.compile and activation checkpointing add parts to the keys: ``layer3._orig_mod.0.bn1``."""
    model = network_with_block(names)
    path, again = va.save_adapter(model, tmp_path / "plain.safetensors"), tmp_path / "copy.safetensors"
    va.set_impl_(model, "einsum")  # the implementation is not saved
    for wrap in (nn.DataParallel, torch.compile, compile_layer, checkpoint_layer):
        assert va.save_adapter(wrap(network_with_block(names)), again).read_bytes() == path.read_bytes()
        other = wrap(small_network())
        report = va.load_adapter_(other, path)
        assert (set(report.loaded), report.changed_tensors) == (inserted_keys(model), ())
        plain = {re.sub(r"_orig_mod\.|^module\.", "", key): value for key, value in other.state_dict().items()}
        assert_same(plain, model.state_dict())
        assert va.save_adapter(other, again).read_bytes() == path.read_bytes()


def test_a_block_whose_parametrization_was_removed_is_saved(model, tmp_path):
    block = va.inserted_blocks(model)["layer3.0"]
    parametrizations.spectral_norm(block.attn.proj)
    nn.utils.parametrize.remove_parametrizations(block.attn.proj, "weight")
    block.attn = torch.compile(block.attn)
    other = small_network()
    va.load_adapter_(other, va.save_adapter(model, tmp_path / "again.safetensors"))
    state = {key.replace("_orig_mod.", ""): value for key, value in model.state_dict().items()}
    assert_same(dict(sorted(other.state_dict().items())), dict(sorted(state.items())))


def replace_block(model):
    va.remove_(model)
    va.insert_(model, names="layer1", num_heads=2, pattern="rows")


class CustomBlock(ConvBlock2d):
    """A block that the library does not know."""


NETWORKS = {
    "gray": ("tiny", {"in_chans": 1}, lambda m: va.insert_(m, names="layer2.1", num_heads=2)),
    "instead": ("tiny", {}, lambda m: va.replace_(m, names="layer2.0", num_heads=2)),
    "context": ("tiny", {}, lambda m: va.insert_(m, names="layer2", num_heads=2, context="layer1")),
    "custom": ("tiny", {"drop_path_rate": 0.1}, lambda m: va.insert_(m, CustomBlock, stages=-1)),
    "tokens": ("test_vit", {"img_size": 64}, lambda m: va.insert_(m, names="blocks.1", num_heads=2)),
    "none": ("test_efficientnet", {"global_pool": "max"}, lambda m: None),
    "another block": ("tiny_attention", {}, replace_block),
}
#: With older versions of timm, ``save_model`` requires ``model_args=``.
is_old = tuple(map(int, timm.__version__.split(".")[:3])) < (1, 0, 31)
notes_arguments = pytest.mark.skipif(is_old, reason="timm does not record the arguments")


@notes_arguments
@pytest.mark.parametrize("case", NETWORKS)
def test_networks_with_any_blocks_are_restored_bitwise(case, tmp_path):
    name, given, insert = NETWORKS[case]
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3, **given)
    insert(model)
    train(model.eval())
    state = torch.get_rng_state()
    assert va.save_model(model, tmp_path / "net", classes=["a", "b", "c"]) == tmp_path / "net"
    how = {"block": CustomBlock} if case == "custom" else {}
    if how:
        with pytest.raises(va.errors.CheckpointError, match=r"custom classes CustomBlock, got none\. Pass block="):
            va.load_model(tmp_path / "net")
    again = va.load_model(tmp_path / "net", **how)
    assert torch.equal(torch.get_rng_state(), state)
    blocks = records(model)
    images = torch.randn(2, *(blocks[0].target.input_shape[1:] if blocks else again.pretrained_cfg["input_size"]))
    assert torch.equal(again(images), model(images))
    assert (records(again), again.state_dict().keys()) == (blocks, model.state_dict().keys())
    assert (again.classes, again.training) == (("a", "b", "c"), False)
    assert {file.name for file in tmp_path.rglob("*")} == {"net", "README.md", "config.json", "model.safetensors"}
    va.save_model(again, tmp_path / "again")
    assert va.load_model(tmp_path / "again", **how).classes == again.classes


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a folder and the network that was saved to it."""
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=3)
    va.insert_(model, stages=-2, num_heads=4, example_input=IMAGES)
    train(model.eval())
    return va.save_model(model, tmp_path_factory.mktemp("saved") / "net", classes=["a", "b", "c"]), model


#: A change of the configuration, the size of images, and a part of the transform.
TRANSFORMS = [
    ({"crop_pct": 0.5, "interpolation": "bicubic"}, (3, 24, 24), "size=48, interpolation=bicubic"),
    ({"mean": (0.3,), "std": (0.2,)}, (1, 8, 44), "Grayscale"),
]


@pytest.mark.parametrize(("change", "size", "steps"), TRANSFORMS)
def test_the_transform_follows_the_configuration(change, size, steps, tmp_path):
    model = timm.create_model("resnet20", num_classes=3, in_chans=size[0])
    model.pretrained_cfg |= {**change, "input_size": size}
    (tmp_path / "run").mkdir()
    va.save_model(model, tmp_path / "run" / "model", model_args={"in_chans": size[0]})
    again = va.load_model(tmp_path / "run")  # the folder of a training run
    assert (again.classes, {name: again.pretrained_cfg[name] for name in change}) == (None, change)
    assert re.search(steps, str(again.transform))
    for mode in ("RGB", "LA", "P", "1", "CMYK"):
        assert again.transform(Image.new(mode, (60, 40))).shape == size, mode


def tiny_network(seed, pattern="full"):
    """Return a small network with different weights for each seed."""
    torch.manual_seed(seed)
    model = timm.create_model("tiny", num_classes=3).eval()
    va.insert_(model, names="layer1", num_heads=2, pattern=pattern)
    train(model)
    nn.init.constant_(model.fc.bias, seed)
    return model


@notes_arguments
@pytest.mark.parametrize("killed_at", range(4))
def test_if_the_writer_is_killed_the_folder_has_the_old_or_the_new_network(killed_at, tmp_path):
    """The process is killed at each call of ``os.replace`` in turn."""
    models = [tiny_network(0), tiny_network(1, "rows")]
    va.save_model(models[0], tmp_path / "net", classes=["a", "b", "c"])
    if not os.fork():
        real, left = os.replace, iter(range(killed_at))
        os.replace = lambda *paths: real(*paths) if next(left, None) is not None else os._exit(0)
        va.save_model(models[1], tmp_path / "net", classes=["d", "e", "f"])
        os._exit(0)
    os.wait()
    images = torch.rand(2, 3, 32, 32)
    # Three calls: the temporary weights, the final weights, config.json.
    mixed = pytest.warns(UserWarning, match="config.json differs .* model.safeten.* save the network again")
    with mixed if killed_at == 2 else nullcontext() as warned:
        again = va.load_model(tmp_path / "net")
    assert not warned or warned[0].filename == __file__
    assert again.classes == (("a", "b", "c") if killed_at < 2 else ("d", "e", "f"))
    assert torch.equal(again(images), models[killed_at >= 2](images))
    assert [file.name for file in tmp_path.iterdir()] == ["net"]
    va.save_model(models[1], tmp_path / "net", classes=["d", "e", "f"])
    names = {file.name for file in (tmp_path / "net").iterdir() if not file.name.startswith(".vision_attn-")}
    assert names == {"README.md", "config.json", "model.safetensors"}


@notes_arguments
def test_saves_at_the_same_time_all_succeed_and_leave_one_of_the_networks(tmp_path):
    models, folder, failed = [tiny_network(seed).train() for seed in range(3)], tmp_path / "net", []

    def save(seed):
        try:
            va.save_model(models[seed], folder, classes=[f"{seed} {one}" for one in "abc"])
        except Exception as error:
            failed.append(error)

    for seed in range(3):
        if not os.fork():
            for _ in range(3):
                save(seed)
            os._exit(len(failed))
    with ThreadPoolExecutor(6) as threads:
        threads.map(save, (0, 1, 2, 0, 1, 2))
    assert ([os.wait()[1] for _ in range(3)], failed) == ([0, 0, 0], [])
    assert all(module.training for model in models for module in model.modules())
    images = torch.rand(2, 3, 32, 32)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # config.json may be that of another network
        again = va.load_model(folder)
    assert torch.equal(again(images), models[int(again.classes[0][0])].eval()(images))
    assert {path.name for path in folder.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    assert list(tmp_path.iterdir()) == [folder]


def test_only_files_of_the_library_change(saved, tmp_path):
    """Open log files, README.md, links, permissions, the dtype of the network and keys of compiled layers are kept."""
    folder, model = tmp_path / "net", compile_layer(copy.deepcopy(saved[1]).bfloat16())
    folder.mkdir()
    for name in ("README.md", "config.json"):
        (folder / name).write_text("mine")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    (folder / "config.json").chmod(0o600)
    inode = folder.stat().st_ino
    with open(folder / "log.txt", "a", buffering=1) as log:
        for epoch in range(2):
            log.write(f"epoch {epoch}\n")
            va.save_model(nn.DataParallel(model), folder)
    assert (folder / "log.txt").read_text() == "epoch 0\nepoch 1\n"
    assert (folder / "README.md").read_text() == "mine"
    assert (folder.stat().st_ino, (folder / "config.json").stat().st_mode & 0o777) == (inode, 0o600)
    assert (folder / "model.safetensors").is_symlink()
    expected = {key: value.bfloat16() for key, value in saved[1].state_dict().items() if value.is_floating_point()}
    assert_same({key: value for key, value in va.load_model(folder).state_dict().items() if key in expected}, expected)


def test_errors_name_folders_that_cannot_be_written(saved, tmp_path, monkeypatch):
    """Test the current folder, the longest possible name, links, and paths that cannot be folders."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        va.load_model(tmp_path)
    Path("x" * 250).mkdir()
    Path("file").touch()
    Path("dangling").symlink_to(Path("x" * 250) / "new")
    for name in ("x" * 250, "dangling", "."):
        assert va.save_model(saved[1], name) == Path(name)
        va.load_model(name)
    assert not list(tmp_path.glob(".*"))
    for folder in (tmp_path / "file", Path("/proc/nothing")):
        with pytest.raises(OSError, match=r"exists|directory") as caught:
            va.save_model(saved[1], folder)
        assert caught.value.filename == str(folder)


def test_a_network_that_diverged_is_saved_with_a_warning(tmp_path):
    model = timm.create_model("test_resnet", num_classes=3)
    nn.init.constant_(model.fc.bias, torch.nan)
    with pytest.warns(UserWarning, match="not finite"):
        va.save_model(model, tmp_path / "net")
    states = [net.state_dict() for net in (va.load_model(tmp_path / "net"), model)]
    assert_same(*({key: value.nan_to_num(7) for key, value in state.items()} for state in states))


@notes_arguments
def test_a_warning_of_the_network_appears_once(tmp_path, monkeypatch):
    """``load_model`` builds the network twice, first on the meta device."""
    va.save_model(tiny_network(0), tmp_path / "net")
    init = Tiny.__init__
    monkeypatch.setattr(Tiny, "__init__", lambda *args, **how: warnings.warn("old", stacklevel=2) or init(*args, **how))
    with warnings.catch_warnings(record=True, action="always") as caught:
        va.load_model(tmp_path / "net")
    assert [str(warning.message) for warning in caught] == ["old"]


def test_networks_that_timm_does_not_build_are_not_written(saved, tmp_path):
    _, model = saved
    with pytest.raises(ValueError, match=r"classifier of timm, got Sequential .*architecture None"):
        va.save_model(nn.Sequential(nn.Conv2d(3, 8, 1)), tmp_path / "net")
    other = timm.create_model("test_resnet", num_classes=3)
    other.act1 = nn.Sigmoid()
    with pytest.raises(ValueError, match=r"'test_resnet' is not this network \(its output differs\)"):
        va.save_model(other, tmp_path / "net")
    with pytest.raises(ValueError, match=r"classes .* 3 .*got 1"):
        va.save_model(model, tmp_path / "net", classes="abc")
    assert list(tmp_path.iterdir()) == []
    features = timm.create_model("test_resnet", features_only=True)
    with pytest.raises(ValueError, match=r"model must be a classifier of timm, got FeatureListNet.*network="):
        va.save_model(features, tmp_path / "net")


class TwoHeads(nn.Module):
    """A network that timm cannot create, with two outputs and an input that its layers do not declare."""

    def __init__(self, widths, act="relu"):
        super().__init__()
        torch.zeros(1).item()  # cannot run on the meta device
        self.conv = nn.Sequential(nn.Conv2d(2, widths[0], 3, padding=1), {"relu": nn.ReLU, "silu": nn.SiLU}[act]())
        self.heads = nn.ModuleList(nn.Linear(widths[0] * 64, width) for width in widths[1:])

    def forward(self, x):
        return {f"head {i}": head(self.conv(x).flatten(1)) for i, head in enumerate(self.heads)}


def test_a_network_with_a_context_from_outside_is_saved(tmp_path):
    model = timm.create_model("resnet20", num_classes=3).eval()
    va.insert_(model, names="layer3", context_channels=6, num_heads=2, gate_init=0.5, example_input=(1, 3, 32, 32))
    x, features = torch.rand(1, 3, 32, 32), torch.randn(1, 6, 7, 1)
    va.save_model(model, tmp_path / "outside")
    with va.context(model, features):
        expected = model(x)
        va.save_model(model, tmp_path / "inside")
    for folder in ("outside", "inside"):
        loaded = va.load_model(tmp_path / folder)
        with va.context(loaded, features):
            assert torch.equal(loaded(x), expected)


def test_a_network_of_any_class_is_saved_with_its_arguments(saved, tmp_path):
    torch.manual_seed(0)
    model, how = TwoHeads([8, 3, 2], act="silu").eval(), {"network": TwoHeads, "example_input": (1, 2, 8, 8)}
    va.insert_(model, names="conv.0", num_heads=2, pattern="rows", gate_init=0.5, example_input=(1, 2, 8, 8))
    arguments = {"widths": (8, 3, 2), "act": "silu"}
    va.save_model(model, tmp_path / "net", model_args=arguments, classes=["a", "b"], **how)
    state, again = torch.random.get_rng_state(), va.load_model(tmp_path / "net", network=TwoHeads)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (again.classes, again.transform, again.training) == (("a", "b"), None, False)
    assert_same(again.state_dict(), model.state_dict())
    image = torch.randn(1, 2, 8, 8)
    assert_same(again(image), model(image))
    va.save_model(again, tmp_path / "again", model_args=arguments, **how)
    assert va.load_model(tmp_path / "again", network=TwoHeads).classes == ("a", "b")

    given = partial(TwoHeads, (8, 3, 2), act="silu")
    va.save_model(again, tmp_path / "again", network=given, example_input=(1, 2, 8, 8))
    assert_same(va.load_model(tmp_path / "again", network=given).state_dict(), model.state_dict())

    with pytest.raises(va.errors.CheckpointError, match=r"network .*test_saved\.TwoHeads, .* network=TwoHeads\)"):
        va.load_model(tmp_path / "net")
    for folder, other in ((tmp_path / "net", lambda widths, act: TwoHeads([8, 3, 4])), (saved[0], small_network)):
        with pytest.raises(va.errors.CheckpointError, match=r"do not match the network|cannot create the network"):
            va.load_model(folder, network=other)
    with pytest.raises(ValueError, match=r"TwoHeads.* is not this network \(its output differs\)"):
        va.save_model(model, tmp_path / "other", model_args={"widths": [8, 3, 2]}, **how)
    with pytest.raises(ValueError, match=r"shape \(1, 2, 224, 224\) failed .* example_input"):
        va.save_model(TwoHeads([8, 3]), tmp_path / "other", network=TwoHeads, model_args={"widths": [8, 3]})
    with pytest.raises(TypeError, match="JSON"):
        va.save_model(model, tmp_path / "other", model_args={"act": nn.ReLU}, **how)
    assert {path.name for path in tmp_path.iterdir()} == {"net", "again"}


def other_names(classes=4):
    """Return a network that stores something else as ``classes`` and ``transform``."""
    run = lambda net, x: net.transform(x).mean((2, 3)).view(len(x), net.classes)  # noqa: E731
    return Net(run, classes=classes, transform=nn.Conv2d(3, classes, 1))


def test_attributes_of_the_network_named_classes_and_transform_are_kept(tmp_path):
    va.save_model(other_names(), tmp_path / "net", network=other_names, example_input=(1, 3, 8, 8))
    loaded = va.load_model(tmp_path / "net", network=other_names)
    assert (loaded.classes, loaded(torch.rand(2, 3, 8, 8)).shape) == (4, (2, 4))


def phases():
    """Return a network with a complex parameter."""
    run = lambda net, x: net.head((net.conv(x) * net.phase).abs().mean((2, 3)).to(net.head.weight.dtype))  # noqa: E731
    phase = nn.Parameter(torch.randn(4, 1, 1, dtype=torch.complex64))
    return Net(run, conv=nn.Conv2d(2, 4, 1), head=nn.Linear(4, 3), phase=phase)


@pytest.mark.skipif(torch.complex64 not in safetensors.torch._SIZE, reason="an old version of safetensors")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_keeps_its_dtype(dtype, tmp_path):
    model = phases().eval()
    model.head.to(dtype)
    va.save_model(model, tmp_path, network=phases, example_input=(1, 2, 4, 4))
    assert_same(va.load_model(tmp_path, network=phases).state_dict(), model.state_dict())


def test_a_block_of_another_dtype_than_its_network_is_restored_exactly(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 8, 1)).bfloat16()
    va.insert_(model, names="0", num_heads=2, example_input=(1, 3, 8, 8))
    model[0].inserted.float().requires_grad_(False).attn.qkv.weight.normal_()
    path, state = va.save_adapter(model, tmp_path / "a.safetensors"), copied(model)
    va.remove_(model)
    va.load_adapter_(model, path)
    assert_same(model.state_dict(), state)


@pytest.mark.parametrize("names", [5, "abc", [1, 2, 3]], ids=str)
def test_invalid_names_of_classes_are_not_reported(saved, names, tmp_path):
    path = rewrite(saved[0] / "model.safetensors", tmp_path / "net.safetensors", metadata={"label_names": names})
    assert va.load_checkpoint_(copy.deepcopy(saved[1]), path).classes == ()


#: A change of the configuration, and the message of the error.
WRONG_CONFIGURATIONS = [
    ({"architecture": "hf-hub:timm/resnet18.a1_in1k"}, "architecture"),
    ({"model_args": {"pretrained": True}}, r"model_args .*\['pretrained'\]"),
    ({"model_args": {"layers": [10**9, 1, 1, 1]}}, "model_args .* too large"),
    ({"model_args": {"drop_rate": 10**6, "drop_path_rate": -(10**6)}}, "model_args .* too large"),
    ({"model_args": {"no_such": 1}}, "no_such"),
    ({"model_args": {"num_classes": 4}, "label_names": None}, "do not match the network .*: fc.weight, fc.bias"),
    ({"label_names": [1, 2, 3]}, "label_names .* 3 classes"),
    ({"pretrained_cfg": {"input_size": [3, 10**6, 10**6], "mean": [0], "std": [1]}}, "input_size"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_CONFIGURATIONS)
@pytest.mark.parametrize("inside", [False, True])
def test_the_configuration_of_a_folder_is_checked(saved, change, message, inside, tmp_path, monkeypatch):
    """It is in ``model.safetensors``, or in ``config.json`` for folders of timm, and causes no download."""
    monkeypatch.setattr("timm.models._builder.load_pretrained", lambda *_, **options: pytest.fail("a download"))
    config = {**json.loads((saved[0] / "config.json").read_text()), **change}
    (tmp_path / "config.json").write_text(json.dumps(config, indent=2))
    rewrite(saved[0] / "model.safetensors", tmp_path / "model.safetensors", metadata=config if inside else {})
    with pytest.raises(va.errors.CheckpointError, match=message):
        va.load_model(tmp_path)
    for text in ("", "3") if not inside else ():
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(va.errors.CheckpointError, match=r"config\.json is damaged"):
            va.load_model(tmp_path)


def test_a_loaded_network_does_not_name_the_source_of_other_weights(saved, tmp_path):
    config = json.loads((saved[0] / "config.json").read_text())
    config["pretrained_cfg"] |= {"url": "https://example.com/net.pth", "hf_hub_id": "owner/net"}
    (tmp_path / "config.json").write_text(json.dumps(config, indent=2))
    rewrite(saved[0] / "model.safetensors", tmp_path / "model.safetensors", metadata={})
    found = va.load_model(tmp_path).pretrained_cfg
    assert {found.get("url"), found.get("hf_hub_id")} <= {"", None}


CONFIG_CLASSES = [
    *(va.Window((4, 8), 3), va.Grid((2, 3, 4)), va.Halo(8, 3), va.Neighborhood(7), va.Neighborhood(7, (3, 5), 2, True)),
    *(va.AbsPos(7), va.RelPosDecomposed(), va.RelPosTable((7, 9)), va.Rope(1e4, (2, 4)), va.SinCos(2.5)),
    va.Rope(100.0, normalized=True),
    *(va.ConditionalPos(3), va.Pattern("b n d h (w s) -> (b s) n (h w) d", s=7)),
]
PLAIN = [None, True, -7, 1j, b"bytes", {1, 2}, 10**30, 1e-300, -0.5, "é'\"\\\n\0"]
PLAIN += [(), (1,), [[]], {"a": {}, -1: (None, [2.5])}]


def test_values_are_restored_from_their_code_and_others_refused_by_name():
    for value in (*CONFIG_CLASSES, *PLAIN, {"more": tuple(PLAIN)}):
        again = from_code(to_code("option", value))
        assert (again, repr(again), type(again)) == (value, repr(value), type(value))
    numbers = (float("nan"), torch.float32, torch.zeros(2), torch.Size((2, 2)))
    for value in (*numbers, nn.GELU, len, {1, nn}, {"pattern": va.Window(7)}, type("Window", (va.Window,), {})(7)):
        with pytest.raises(ValueError, match=r"^activation="):
            to_code("activation", value)


CODE = ["__import__('os').system('touch witness')", "Window(__import__('os').getpid())", "Window.__init__(1)", "7 + 7"]
CODE += ["(lambda: 1)()", "Window(*(7,))", "SinCos(**{})", "{**{1: 2}}", "Window", "f'{7}'", "Window(0)", "{[]: 1}", ""]


@pytest.mark.parametrize("code", [*CODE, "(" * 500 + ")" * 500, "-" * 50_000 + "1"])
def test_nothing_else_is_evaluated(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="is not a valid value"):
        from_code(code)
    assert not list(tmp_path.iterdir())

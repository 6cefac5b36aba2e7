"""Insertion and removal: the output stays the same until training, and removal restores every object."""

import re
import warnings
from dataclasses import replace

import pytest
import timm
import torch
import torchvision
from reach import anatomy
from small_networks import NarrowResNet, Net, convolutions
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.overrides import TorchFunctionMode

import vision_attn as va
from vision_attn.networks.insertion.record import CHILD
from vision_attn.networks.insertion.registry import attach_records_, inserted_keys
from vision_attn.networks.inspection.selection import glob_matches

SMALL = {"num_heads": 2, "example_input": (1, 3, 8, 8)}


def test_the_report_is_a_table_with_the_cost_of_each_block():
    with torch.device("meta"):
        report = va.insert_(timm.create_model("resnet50"), stages=[-2, -1])
        assert report.model_cost == (25_557_032, 4_089_184_256)
        assert "\ntotal +24.7 % parameters, +16.1 % MACs\n" in str(report)
        report = va.insert_(torchvision.models.resnet18(), stages=[2, -1], num_heads=4)
    small, large = report.blocks
    assert (small.site, small.channels, small.map_size, small.tokens) == ("layer2.1", 128, (28, 28), 784)
    # The attention has 4c² + 4c parameters, the norm 2c and the gate c.
    assert small.cost.parameters == 4 * 128**2 + 7 * 128
    # The projections take 4c² MACs per token, and the two products of attention 2c per pair of tokens.
    assert small.cost.macs == 4 * 128**2 * 784 + 2 * 128 * 784**2
    lines = str(report).splitlines()
    assert lines[2].split() == ["layer2.1", "AttentionBlock2d", "128", "28×28", "784", "66,432", "208,732,160"]
    assert (lines[4].split(), large.tokens) == (["total", f"{report.parameters:,}", f"{report.macs:,}"], 49)


#: Options of the block, and True if they lead to a warning.
LARGE_MAPS = [
    ({}, True),
    pytest.param({"block": va.blocks.TransformerBlock2d, "mlp_ratio": 1}, True, marks=pytest.mark.slow),
    ({"kv_stride": 4}, False),
    ({"pattern": va.Window(8)}, False),
]


@pytest.mark.parametrize(("options", "warned"), LARGE_MAPS)
def test_full_attention_on_a_large_map_is_a_warning_with_its_cost(options, warned):
    side, model = 68, nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.AvgPool2d(2))
    with warnings.catch_warnings(record=True, action="always") as caught:
        report = va.insert_(model, names=["0", "1", "2"], num_heads=2, example_input=(1, 3, side, side), **options)
    macs = sum(block.cost.macs for block in report.blocks[:2]) / 1e9
    cost = f"{side**2:,} tokens and costs {macs:,.1f} GMACs. "
    where = f"full attention at '0' ({side}×{side}), '1' ({side}×{side}) compares up to {cost}"
    assert [str(x.message) for x in caught] == list(report.warnings)
    assert "warning" not in str(report)  # Warnings are issued separately.
    assert [x.startswith(where) and "va.Window(7)" in x for x in report.warnings] == [True] * warned


#: Channels, options of the block, and the expected heads, key channels and value channels.
WIDTHS = [
    (2048, {}, (8, 64, 64)),
    (768, {"num_heads": 12}, (12, 40, 40)),  # Rotary positions and kernels prefer a multiple of 8.
    (1024, {"num_heads": 128}, (128, 4, 4)),
    (1024, {"key_dim": 32}, (8, 32, 64)),
    (1024, {"value_dim": 128, "num_heads": 2}, (2, 256, 128)),
    (1030, {"key_dim": None, "value_dim": None}, (5, 206, 206)),
    (512, {}, (8, 64, 64)),
    (640, {"block": va.blocks.TransformerBlock2d}, (8, 80, 80)),  # A custom block has other defaults.
]


@pytest.mark.parametrize(("channels", "options", "expected"), WIDTHS)
def test_a_default_block_has_at_most_512_attention_channels(channels, options, expected):
    model, block = convolutions(3, channels), options.get("block", va.AttentionBlock2d)
    (record,) = va.insert_(model, names="0", example_input=(1, 3, 4, 4), **options).blocks
    attention = va.inserted_blocks(model)["0"].attn
    assert (attention.num_heads, attention.key_dim, attention.value_dim) == expected
    # A block is rebuilt with the widths in its record; without them, it attends in all channels.
    va.remove_(model)
    for old, key_dim in ((record, expected[1]), (replace(record, options={"num_heads": 2}), channels // 2)):
        attach_records_(model, [old], {record.block: block})
        assert va.inserted_blocks(model)["0"].attn.key_dim == key_dim
        va.remove_(model)


#: Globs, and the sites that they match.
GLOBS = [
    ("layer3", ["layer3.2"]),
    ("layer[12].0.bn?", ["layer1.0.bn1", "layer1.0.bn2", "layer2.0.bn1", "layer2.0.bn2"]),
    ("**.2.conv2", ["layer1.2.conv2", "layer2.2.conv2", "layer3.2.conv2"]),
    (["layer1", "layer1.2"], ["layer1.2"]),
    (re.compile(r"layer[13]\.2"), ["layer1.2", "layer3.2"]),
]


@pytest.mark.parametrize(("names", "sites"), GLOBS)
def test_names_are_globs_on_module_paths(names, sites):
    assert [block.site for block in va.insert_(timm.create_model("resnet20"), names=names).blocks] == sites


def test_a_glob_of_many_parts_is_matched_in_few_steps():
    """Match a glob from a file in linear time; with backtracking it would take years."""
    path = ".".join(map(str, range(40)))
    globs = {"**." * 200 + "39": True, "**." * 200 + "40": False, "**.3?.**.39.**": True, "39.**": False}
    assert {glob: glob_matches(glob, path) for glob in globs} == globs


#: Options of va.insert_, and the message of the error.
WRONG_OPTIONS = [
    ({"stages": 9}, "no stage 9. The stages are 0 'relu', 1 'layer1'"),
    ({"names": re.compile("layr")}, "names: no module matches 'layr'. Top-level modules: conv1, bn1"),
    ({"where": lambda name, module: False}, "where"),
    ({"names": "unused"}, "'unused' is not called"),
    ({"names": "fc"}, r"'fc' returns \(1, 10\)"),
    ({"names": "fc", "at": "before"}, r"'fc' receives \(1, 64\)"),
    ({"stages": 1, "at": "beside"}, "at must be .* 'after', 'before', got 'beside'"),
    ({"names": ["layer1", "layer2"], "num_heads": 128}, r"'layer1\.1' cannot be built for 8 channels: num_heads"),
    ({"block": lambda channels, **_: nn.Conv2d(8, 5, 1), "stages": 1}, r"\(1, 8.* at 'layer1.1'; Conv2d .*\(1, 5, 16"),
    ({"stages": 1, "block": lambda channels, **_: None}, "block"),
    ({"stages": 1, "block": lambda _: Net(lambda net, x: (x, x))}, "return a feature map at .*got tuple from Net"),
    ({"stages": 1, "names": "fc"}, "exactly one of stages, names and where, got stages and names"),
    ({"names": []}, "names"),
    ({"names": 5}, "names"),
    ({"stages": 1, "example_input": (3, 32, 32)}, "example_input"),
    ({"stages": 1, "example_input": 64}, "example_input must be .* got 64"),
    ({"stages": 1, "example_input": (1, 3, 0, 32)}, r"example_input must be .*\(1, 3, 0, 32\)"),
    ({"stages": 1, "example_input": torch.zeros(0, 3, 32, 32)}, r"at least one image, got .*\(0, 3, 32, 32\)"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS)
def test_an_error_names_its_cause_and_does_not_change_the_model(options, message):
    model = NarrowResNet()
    model.unused = nn.Conv2d(3, 3, 1)
    before = anatomy(model)
    with pytest.raises(ValueError, match=message):
        va.insert_(model, **{"example_input": (1, 3, 64, 64), **options})
    assert anatomy(model) == before
    wrapped = type("DistributedDataParallel", (nn.Sequential,), {})(model)
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        va.insert_(wrapped, stages=1)


def test_the_layout_with_equal_channels_and_rows_is_inferred():
    with torch.device("meta"):
        (block,) = va.insert_(convolutions(3, 16), names="0", example_input=(1, 3, 16, 16)).blocks
        assert (block.channels, block.target.layout) == (16, "b c h w")
        # 96 channels on 96×96 positions are ambiguous; the other feature maps of the network decide.
        swin = timm.create_model("swin_tiny_patch4_window7_224", img_size=384, depths=(1, 1, 1, 1))
        (block,) = va.insert_(swin, names="layers.0", example_input=(1, 3, 384, 384), pattern="rows").blocks
    assert (block.channels, block.map_size, block.target.layout) == (96, (96, 96), "b h w c")


def test_a_model_that_ran_compiled_runs_its_new_blocks():
    model, x = convolutions(3, 8, 8), torch.randn(2, 3, 12, 16)
    compiled = torch.compile(model, backend="eager")
    expected = compiled(x)
    va.insert_(compiled, names="2", num_heads=2, gate_init=1.0, example_input=x)
    assert not torch.equal(compiled(x), expected)
    va.remove_(compiled)
    assert torch.equal(compiled(x), expected)


def test_an_attribute_named_inserted_is_kept():
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Identity())
    model[1].inserted, model[1].other = 5, nn.ReLU()
    va.insert_(model, names="1", **SMALL)
    assert model[1].inserted == 5
    va.remove_(model)
    assert not model.state_dict().keys() - {"0.weight", "0.bias"}
    model[1].other.inserted_1 = 5  # Now the module inside has an attribute of this name, too.
    with pytest.raises(va.errors.SiteError, match="'1' cannot have a child 'inserted'"):
        va.insert_(model, names="1", **SMALL)


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())


def hooked():
    model = plain()
    model[0].register_forward_hook(lambda module, args, y: 2 * y)
    model[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model[2].register_forward_hook(lambda module, args, kwargs, y: y - 1, with_kwargs=True, always_call=True)
    return model


def compiled():
    model = plain()
    model[2].compile(backend="eager")
    return model


KINDS = {
    "half precision": lambda: plain().half(),
    "channels last": lambda: plain().to(memory_format=torch.channels_last),
    "compiled": compiled,
    "data parallel": lambda: nn.DataParallel(plain()),
    "hooks": hooked,
    "shared module": lambda: nn.Sequential(*(model := plain()), model[2]),
    "spectral norm": lambda: nn.Sequential(*(model := plain())[:2], parametrizations.spectral_norm(model[2])),
    "pruned": lambda: nn.Sequential(*(model := plain())[:2], prune.random_unstructured(model[2], "weight", 0.5)),
    "dropout": lambda: nn.Sequential(*plain(), nn.Dropout2d(0.5), nn.BatchNorm2d(8, momentum=None)),
    "traced by fx": lambda: torch.fx.symbolic_trace(plain()),
}
CHANGES = {
    "insert_": lambda model: va.insert_(model, where=lambda name, module: name in ("0", "2"), **SMALL),
    "insert_ before": lambda model: va.insert_(model, names="2", at="before", **SMALL),
    "replace_": lambda model: va.replace_(model, names="2", **SMALL),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_inserted_into_and_removed_from_many_networks(kind, change):
    model, x = KINDS[kind]().eval(), torch.randn(1, 3, 8, 8)
    x = x.to(next(model.parameters()))
    before, expected = anatomy(model), model(x)
    report, y = CHANGES[change](model), model(x)
    assert torch.equal(y, expected) == (change != "replace_")
    assert kind != "channels last" or y.is_contiguous(memory_format=torch.channels_last)
    parameters = [p for block in va.inserted_blocks(model).values() for p in block.parameters()]
    assert {p.dtype for p in parameters} == {x.dtype}
    if change != "replace_":
        new = {key for key in model.state_dict() if f".{CHILD}" in key}
        assert {key.removeprefix("module.") for key in new} == inserted_keys(model)
        assert [key for key in model.state_dict() if key not in new] == [key for key, *_ in before[1]]
        assert report.parameters == sum(p.numel() for p in parameters)
    y.square().sum().backward()
    assert any(p.grad is not None for p in parameters)
    removed = va.remove_(model)
    assert ((removed.blocks, removed.output_change), anatomy(model)) == ((report.blocks, 0), before)
    assert torch.equal(model(x), expected)


class Failing(TorchFunctionMode):
    """Make one call of a torch function fail, by its number."""

    def __init__(self, number=None):
        super().__init__()
        self.number, self.count = number, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not torch._C._set_grad_enabled:  # Contexts call it when they exit.
            self.count += 1
            if self.count == self.number:
                raise FloatingPointError(f"call {self.number}")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("change", CHANGES)
def test_a_failure_at_any_step_does_not_change_the_network(change):
    with Failing() as counting:
        CHANGES[change](hooked())
    model = hooked()
    before = anatomy(model)
    last = range(counting.count - 45, counting.count)  # after the blocks are attached and compared
    for number in (*range(1, last[0], max(1, counting.count // 15)), *last):
        try:
            with Failing(number):
                CHANGES[change](model)
            va.remove_(model)  # The failed call was not necessary.
        except (FloatingPointError, ValueError, RuntimeError):
            pass
        assert anatomy(model) == before
        assert torch.is_grad_enabled()


def minding(count):
    """Return a convolution whose output depends on a count of the module's children or parameters."""
    return Net(lambda net, x: net.conv(x) / len([*count(net)]), conv=nn.Conv2d(3, 8, 3, padding=1))


def test_a_module_that_counts_its_children_has_a_nested_block_or_is_rejected():
    looping = Net(lambda net, x: nn.Sequential(*net.children())(x), conv=nn.Conv2d(3, 8, 3, padding=1))
    for model in map(nn.Sequential, (minding(nn.Module.children), looping)):
        x = torch.randn(2, 3, 8, 8)
        before = model(x)
        va.insert_(model, names="0", **SMALL)
        assert torch.equal(model(x), before)
        assert list(model[0].conv._modules) == [f"{CHILD}_0"]
    model = nn.Sequential(minding(nn.Module.parameters))
    before = anatomy(model)
    with pytest.raises(va.errors.SiteError, match="'0' cannot have a block as its child"):
        va.insert_(model, names="0", **SMALL)
    assert anatomy(model) == before

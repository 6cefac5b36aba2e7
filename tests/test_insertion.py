"""Into a backbone and out again: nothing changes until it is trained, and nothing is left afterwards."""

import copy
import functools
import re
import warnings
from dataclasses import replace

import pytest
import timm
import torch
import torchvision
from reach import anatomy, as_after_training
from torch import nn
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode

import vision_attn as va
import vision_attn.networks.models
from vision_attn.networks.insertion import CHILD, attach_records_, inserted_keys
from vision_attn.networks.insertion.sites import glob_matches

#: Made once: what it is refused for leaves it as it is.
resnet18 = functools.cache(torchvision.models.resnet18)

BACKBONES = {
    "torchvision resnet18": (lambda: copy.deepcopy(resnet18()), 64),
    "timm resnet14t, with bottlenecks": (lambda: timm.create_model("resnet14t"), 64),
    "cifar resnet20": (lambda: timm.create_model("resnet20"), 32),
}


def network(name):
    make, size = BACKBONES[name]
    torch.manual_seed(0)
    model = make()
    as_after_training(model)
    return model.eval(), torch.randn(2, 3, size, size)


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.filterwarnings("ignore:little to attend")
def test_inserting_changes_no_output_and_no_key_and_comes_out_clean(backbone):
    model, x = network(backbone)
    before = anatomy(model)
    expected = model(x)
    chosen = ("layer1", "layer2.0", "layer4")
    report = va.insert_(model, where=lambda name, module: name in chosen, example_input=tuple(x.shape))
    assert torch.equal(model(x), expected)
    assert [key for key, *_ in before[1]] == [key for key in model.state_dict() if f".{CHILD}." not in key]
    new = {key for key in model.state_dict() if f".{CHILD}." in key}
    assert new == inserted_keys(model)
    assert len(new) == 7 * len(report)
    assert report.parameters == sum(
        p.numel() for block in va.inserted_blocks(model).values() for p in block.parameters()
    )
    removed = va.remove_(model)
    assert removed.blocks == report.blocks
    assert anatomy(model) == before
    assert torch.equal(model(x), expected)


def test_the_report_is_a_table_with_the_cost_of_each_block():
    model, _ = network("torchvision resnet18")
    report = va.insert_(model, stages=[2, -1], num_heads=4)
    small, large = report.blocks
    assert (small.site, small.channels, small.map_size, small.tokens) == ("layer2.1", 128, (28, 28), 784)
    # 4c² + 4c of the attention, 2c of the norm, c of the gate.
    assert small.parameters == 4 * 128**2 + 7 * 128
    # The projections, 4c² a token, and the two products of attention, 2c a pair of tokens.
    assert small.multiply_adds == 4 * 128**2 * 784 + 2 * 128 * 784**2
    lines = str(report).splitlines()
    assert lines[0] == "2 blocks inserted, for an input of 3×224×224"
    assert lines[1].split() == ["where", "block", "channels", "map", "tokens", "parameters", "multiply-adds"]
    assert lines[2].split() == ["layer2.1", "AttentionBlock2d", "128", "28×28", "784", "66,432", "208,732,160"]
    assert lines[4].split() == ["together", f"{report.parameters:,}", f"{report.multiply_adds:,}"]
    assert large.tokens == 49


def test_a_map_of_two_by_two_is_warned_of():
    model, _ = network("torchvision resnet18")
    with pytest.warns(UserWarning, match=r"attend to at 'layer4.1' \(2×2\): .* earlier site or a larger input"):
        report = va.insert_(model, stages=[-2, -1], example_input=(1, 3, 64, 64))
    assert report.warnings[0] in str(report)
    assert "'layer3.1'" not in "".join(report.warnings)


REMEDY = "take pattern=va.Window(7), a kv_stride or another site"


@pytest.mark.parametrize(
    ("options", "announced"),
    [
        ({}, True),
        ({"block": va.TransformerBlock2d, "mlp_ratio": 1}, True),
        ({"kv_stride": 2}, True),
        ({"kv_stride": 4}, False),
        ({"pattern": va.Window(8)}, False),
        ({"block": va.LinearAttention2d}, False),
    ],
)
def test_full_attention_on_a_large_map_is_announced_with_its_cost(options, announced):
    side = 68 if "block" in options else 112  # what is no residual block runs
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.AvgPool2d(2))
    with warnings.catch_warnings(record=True, action="always") as warned:
        report = va.insert_(model, names=["0", "1", "2"], num_heads=2, example_input=(1, 3, side, side), **options)
    cost = f"{side**2:,} tokens, {sum(block.multiply_adds for block in report.blocks[:2]) / 1e9:,.1f} G multiply-adds: "
    where = f"'0' ({side}×{side}), '1' ({side}×{side})"
    said = [f"full attention at {where} compares up to {cost}{REMEDY}"] if announced else []
    assert [str(one.message) for one in warned] == said
    assert list(report.warnings) == said


@pytest.mark.parametrize(
    ("channels", "asked", "expected"),
    [
        (2048, {}, (8, 64, 64)),
        (520, {}, (8, 64, 64)),
        (768, {"num_heads": 12}, (12, 40, 40)),  # a multiple of 8, as rotary positions and kernels like it
        (2048, {"num_heads": 4}, (4, 128, 128)),
        (1024, {"num_heads": 128}, (128, 4, 4)),
        (1024, {"key_dim": 32}, (8, 32, 64)),
        (1024, {"value_dim": 128, "num_heads": 2}, (2, 256, 128)),
        (1024, {"key_dim": None, "value_dim": None}, (8, 128, 128)),
        (1030, {"key_dim": None, "value_dim": None}, (5, 206, 206)),
        (2048, {"block": va.TransformerBlock2d}, (8, 256, 256)),  # what a user gives has its own defaults
        (2048, {"block": lambda channels, **options: va.AttentionBlock2d(channels, **options)}, (8, 256, 256)),
    ],
)
def test_a_default_block_attends_in_512_channels_at_most(channels, asked, expected):
    model, block = nn.Sequential(nn.Conv2d(3, channels, 1)), asked.get("block", va.AttentionBlock2d)
    (record,) = va.insert_(model, names="0", example_input=(1, 3, 4, 4), **asked).blocks
    attention = va.inserted_blocks(model)["0"].attn
    assert (attention.num_heads, attention.key_dim, attention.value_dim) == expected
    # The record has the numbers: a block is made again as it was, and of a record without them in all channels.
    va.remove_(model)
    for old, key_dim in ((record, expected[1]), (replace(record, options={"num_heads": 2}), channels // 2)):
        attach_records_(model, [old], {record.block: block})
        assert va.inserted_blocks(model)["0"].attn.key_dim == key_dim
        va.remove_(model)


def test_two_default_blocks_are_cheap_in_a_resnet50_and_it_is_said():
    with torch.device("meta"):
        model = timm.create_model("resnet50")
    report = va.insert_(model, stages=[-2, -1])
    assert report.whole == (25_557_032, 4_089_184_256)
    assert report.parameters < 7e6
    assert "\ntogether +24.7 % parameters, +16.1 % multiply-adds\n" in str(report)


@pytest.mark.parametrize("training", [True, False])
def test_the_dry_run_leaves_modes_and_statistics_alone(training):
    model, _ = network("torchvision resnet18")
    model.train(training)
    model.layer1.eval()
    before = anatomy(model)
    va.insert_(model, stages=-1, example_input=(1, 3, 128, 128))
    assert va.inserted_blocks(model)["layer4.1"].training is training
    va.remove_(model)
    assert anatomy(model) == before


@pytest.mark.parametrize(
    ("names", "sites"),
    [
        ("layer3", ["layer3.2"]),
        ("layer3.*", ["layer3.0", "layer3.1", "layer3.2"]),
        ("layer[12].0.bn?", ["layer1.0.bn1", "layer1.0.bn2", "layer2.0.bn1", "layer2.0.bn2"]),
        ("**.2.conv2", ["layer1.2.conv2", "layer2.2.conv2", "layer3.2.conv2"]),
        (["layer1", "layer1.2"], ["layer1.2"]),
        (re.compile(r"layer[13]\.2"), ["layer1.2", "layer3.2"]),
    ],
)
def test_names_are_globs_on_module_paths(names, sites):
    model, _ = network("cifar resnet20")
    assert [block.site for block in va.insert_(model, names=names).blocks] == sites


def test_a_glob_of_many_parts_is_matched_in_few_steps():
    """As a file may name one: tried part by part, it takes longer than anyone lives."""
    path = [str(number) for number in range(40)]
    for glob, matches in {
        "**." * 200 + "39": True,
        "**." * 200 + "40": False,
        "**.3?.**.39.**": True,
        "39.**": False,
    }.items():
        assert glob_matches(glob.split("."), path) == matches


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.unused = nn.Conv2d(3, 3, 1)
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.conv(self.conv(x)).mean((2, 3)))


class Encoders(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, one, other):
        return self.encoder(one) + self.encoder(other)


REFUSALS = {
    "unknown stage": (resnet18, {"stages": 9}, "stages: there is no stage 9; the stages are 0 'relu', 1 'layer1'"),
    "no stages": (
        lambda: nn.Sequential(nn.Flatten()),
        {"stages": -1},
        r"most of its modules give tokens or no map: choose .* those of model.named_modules\(\)",
    ),
    "unknown name": (resnet18, {"names": "layr*"}, r"'layr\*' matches no module; at the top .*layer1"),
    "nowhere": (resnet18, {"where": lambda name, module: False}, "where is true for none"),
    "tokens of two grids": (
        lambda: Encoders(timm.create_model("test_vit", dynamic_img_size=True)),
        {"names": "encoder.blocks.0", "example_input": (torch.rand(1, 3, 64, 64), torch.rand(1, 3, 96, 96))},
        r"'encoder.blocks.0' is called 2 times .* va.insert_\(model.encoder",
    ),
    "never called": (Twice, {"names": "unused"}, "'unused' is not called"),
    "a vector": (resnet18, {"names": "fc"}, r"'fc' returns \(1, 1000\) .* no feature map"),
    "takes a vector": (resnet18, {"names": "fc", "at": "before"}, r"'fc' takes \(1, 512\)"),
    "no branch": (resnet18, {"names": "layer1.0.bn1", "at": "branch"}, "'layer1.0.bn1' has no branch"),
    "unknown place": (resnet18, {"stages": 1, "at": "beside"}, "at must be one of 'after', 'before', 'branch'"),
    "wrapped for many processes": (
        lambda: type("DistributedDataParallel", (nn.Sequential,), {})(nn.Conv2d(3, 8, 1)),
        {"names": "0"},
        "wrapped in DistributedDataParallel",
    ),
    "heads": (
        resnet18,
        {"names": ["layer1", "layer2"], "num_heads": 128},
        r"block at 'layer1\.1', for 64 channels: num_heads must divide channels",
    ),
    "another shape": (
        resnet18,
        {"block": lambda channels, device, dtype: nn.Conv2d(channels, 5, 1), "stages": 1},
        r"block must return a map \(1, 64, 16, 16\) at 'layer1.1'; Conv2d makes \(1, 5, 16, 16\)",
    ),
    "no new block": (resnet18, {"stages": 1, "block": lambda channels, **_: None}, "make a new module for each site"),
    "no site": (resnet18, {}, "exactly one of stages, names and where"),
    "no names": (resnet18, {"names": []}, r"names must be a glob or a compiled regular expression, or several"),
    "a number for a name": (resnet18, {"names": 5}, "names must be a glob"),
    "shape": (resnet18, {"stages": 1, "example_input": (3, 32, 32)}, "example_input must be"),
    "a side for a shape": (resnet18, {"stages": 1, "example_input": 64}, "example_input must be images, .* got 64"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_done_is_refused_by_name_and_leaves_the_model_alone(case):
    make, arguments, message = REFUSALS[case]
    model = make()
    before = anatomy(model)
    with pytest.raises(ValueError, match=message):
        va.insert_(model, **{"example_input": (1, 3, 64, 64), **arguments})
    assert anatomy(model) == before


def test_a_network_that_draws_random_numbers_takes_blocks_and_draws_as_before():
    class Noisy(nn.Sequential):
        def forward(self, x):
            return super().forward(x + torch.randn_like(x))

    model = Noisy(nn.Conv2d(3, 8, 1))
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    va.stage_names(model, (1, 3, 8, 8))
    assert torch.equal(torch.rand(3), expected)
    assert len(va.insert_(model, names="0", num_heads=2, example_input=(1, 3, 8, 8))) == 1


def small_network():
    torch.manual_seed(0)
    convolutions = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
    return nn.Sequential(*convolutions, nn.ReLU()).eval(), torch.randn(2, 3, 12, 16)


def test_a_dynamic_forward_compiles_whole_and_exports():
    model, x = small_network()
    va.insert_(model, names="1", num_heads=2, gate_init=0.5, example_input=x)
    expected = model(x)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-5)


def test_a_map_with_as_many_channels_as_rows_is_told_apart():
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 16, 1))
        (block,) = va.insert_(model, names="0", example_input=(1, 3, 16, 16)).blocks
        assert (block.channels, block.layout) == (16, "b c h w")
        # 96 channels on 96×96 cells, and a network that takes one size only: as its other maps lie.
        swin = timm.create_model("swin_tiny_patch4_window7_224", img_size=384)
    (block,) = va.insert_(swin, names="layers.0", example_input=(1, 3, 384, 384), pattern="rows").blocks
    assert (block.channels, block.map_size, block.layout) == (96, (96, 96), "b h w c")


def test_a_model_that_ran_compiled_runs_its_new_blocks():
    model, x = small_network()
    compiled = torch.compile(model, backend="eager")
    expected = compiled(x)
    va.insert_(compiled, names="1", num_heads=2, gate_init=1.0, example_input=x)
    assert not torch.equal(compiled(x), expected)
    va.remove_(compiled)
    assert torch.equal(compiled(x), expected)


def test_a_site_takes_one_block_and_what_a_network_calls_inserted_itself_stays():
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Identity())
    model[1].inserted, model[1].other = 5, nn.ReLU()
    va.insert_(model, names="0", num_heads=4, example_input=(1, 3, 8, 8))
    with pytest.raises(va.SiteError, match="'0' already has a block"):
        va.insert_(model, names="0", num_heads=4, example_input=(1, 3, 8, 8))
    va.insert_(model, names="1", num_heads=4, example_input=(1, 3, 8, 8))
    assert model[1].inserted == 5
    va.remove_(model)
    assert not model.state_dict().keys() - {"0.weight", "0.bias"}
    model[1].other.inserted_1 = 5  # and no module inside it is free either
    with pytest.raises(va.SiteError, match="'1' takes no child"):
        va.insert_(model, names="1", num_heads=4, example_input=(1, 3, 8, 8))


def test_blocks_are_attached_again_from_their_records_without_a_run_of_the_network():
    def network():
        return timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2).eval()

    model, other = network(), network()
    report = va.insert_(model, stages=[0], num_heads=4, gate_init=0.5, example_input=(1, 3, 64, 64))
    other.forward = None  # never called
    assert attach_records_(other, report.blocks, {"AttentionBlock2d": va.AttentionBlock2d}) == report.blocks
    del other.forward
    other.load_state_dict(model.state_dict())
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(other(images), model(images), rtol=0, atol=0)
    with pytest.raises(va.SiteError, match="already"):
        attach_records_(other, report.blocks, {"AttentionBlock2d": va.AttentionBlock2d})


def test_records_that_do_not_fit_leave_the_model_as_it_was():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU())
    record = va.insert_(copy.deepcopy(model), names="0", example_input=(1, 3, 8, 8)).blocks[0]
    before = str(model)
    for wrong in (
        replace(record, site="7"),
        replace(record, held="missing.inserted"),
        replace(record, at="instead of"),
    ):
        with pytest.raises(va.SiteError):
            attach_records_(model, [record, wrong], {"AttentionBlock2d": va.AttentionBlock2d})
        assert str(model) == before
        assert not model[0]._forward_hooks


# --- networks of every make, and failures at every step ---------------------------------------------------------------


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())


def changed(change):
    model = plain()
    model[2] = change(model[2]) or model[2]
    return model


def hooked():
    model = plain()
    model[0].register_forward_hook(lambda module, args, y: 2 * y)
    model[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model[2].register_forward_hook(lambda module, args, kwargs, y: y - 1, with_kwargs=True, always_call=True)
    return model


def shared_weight():
    model = nn.Sequential(*plain(), nn.Conv2d(8, 8, 3, padding=1))
    model[4].weight = model[2].weight
    return model


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


MAKES = {
    "hooks": hooked,
    "shared weight": shared_weight,
    "parametrization": lambda: changed(lambda m: nn.utils.parametrize.register_parametrization(m, "weight", Doubled())),
    "weight norm": lambda: changed(nn.utils.parametrizations.weight_norm),
    "spectral norm": lambda: changed(nn.utils.parametrizations.spectral_norm),
    "pruned": lambda: changed(lambda m: prune.random_unstructured(m, "weight", 0.5)),
    "dropout": lambda: nn.Sequential(*plain(), nn.Dropout2d(0.5), nn.BatchNorm2d(8, momentum=None)),
    "traced by fx": lambda: torch.fx.symbolic_trace(plain()),
}
CHANGES = {
    "insert_": lambda model, x: va.insert_(model, names=["0", "2"], num_heads=2, example_input=x),
    "insert_ before": lambda model, x: va.insert_(model, names="2", at="before", num_heads=2, example_input=x),
    "replace_": lambda model, x: va.replace_(model, names="2", num_heads=2, example_input=x),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("make", MAKES)
def test_networks_of_every_make_take_blocks_and_give_them_back(make, change):
    model, x = MAKES[make]().eval(), torch.randn(1, 3, 8, 8)
    if make == "traced by fx" and change == "replace_":
        return  # its code calls modules by their paths
    before, expected = anatomy(model), model(x)
    CHANGES[change](model, x)
    assert torch.equal(model(x), expected) == (change != "replace_")
    model(x).square().sum().backward()
    assert any(p.grad is not None for block in va.inserted_blocks(model).values() for p in block.parameters())
    va.remove_(model)
    assert anatomy(model) == before
    assert torch.equal(model(x), expected)


class Failing(TorchFunctionMode):
    """Lets one call of torch fail, by its number."""

    def __init__(self, number=None):
        super().__init__()
        self.number, self.count = number, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not torch._C._set_grad_enabled:  # with which contexts are left
            self.count += 1
            if self.count == self.number:
                raise FloatingPointError(f"call {self.number}")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("change", CHANGES)
def test_a_failure_at_any_step_leaves_the_network_as_it_was(change):
    x = torch.randn(1, 3, 8, 8)
    with Failing() as counting:
        CHANGES[change](hooked(), x)
    model = hooked()
    before = anatomy(model)
    for number in range(1, counting.count, max(1, counting.count // 15)):
        try:
            with Failing(number):
                CHANGES[change](model, x)
            va.remove_(model)  # it did without that call
        except (FloatingPointError, ValueError, RuntimeError):
            pass
        assert anatomy(model) == before
        assert torch.is_grad_enabled()


class Minding(nn.Module):
    """A convolution whose output depends on what is counted in the module, as a block that is held there would be."""

    def __init__(self, count):
        super().__init__()
        self.conv, self.count = nn.Conv2d(3, 8, 3, padding=1), count

    def forward(self, x):
        return self.conv(x) / self.count(self)


def test_a_module_that_counts_its_children_gives_the_same_bits():
    model, x = nn.Sequential(Minding(lambda module: len(module._modules))), torch.randn(2, 3, 8, 8)
    before = model(x)
    va.insert_(model, names="0", num_heads=2, example_input=(1, 3, 8, 8))
    assert torch.equal(model(x), before)


def test_a_network_whose_output_a_block_would_change_is_refused_and_left_as_it_was():
    model, x = nn.Sequential(Minding(lambda module: len(list(module.parameters())))), torch.randn(2, 3, 8, 8)
    before, keys = model(x), list(model.state_dict())
    with pytest.raises(va.SiteError, match="loops over or counts its own"):
        va.insert_(model, names="0", num_heads=2, example_input=(1, 3, 8, 8))
    assert torch.equal(model(x), before)
    assert (list(model.state_dict()), va.inserted_blocks(model)) == (keys, {})

"""Adapters: what was inserted comes back bit for bit, onto its own network and no other."""

import copy
import json
import os

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import vision_attn as va
import vision_attn.networks.insertion
import vision_attn.networks.models
from vision_attn.networks.checkpoints import load_adapter_, save_adapter
from vision_attn.networks.checkpoints.adapter_file import fingerprint, hash_of
from vision_attn.networks.checkpoints.placements import BLOCKS
from vision_attn.networks.checkpoints.specification import SPECIFICATIONS, from_code, to_code
from vision_attn.networks.insertion.freezing import freeze_backbone_

#: The networks here are so small that some of their maps are 2×2.
pytestmark = pytest.mark.filterwarnings("ignore:the map at")

IMAGES = (1, 3, 32, 32)


def small_network(width=8, classes=3):
    """Two residual blocks and a classifier, the same at every call."""
    torch.manual_seed(0)
    network = timm.models.ResNet(
        timm.models.resnet.BasicBlock,
        [1, 1, 1, 1],
        channels=(width, width, width, width),
        num_classes=classes,
        zero_init_last=False,
    )
    return network.eval()


def train(model, also=()):
    """Other values in every tensor of the blocks, and in what is trained beside them."""
    torch.manual_seed(1)
    state = model.state_dict()
    for key in [*sorted(vision_attn.networks.insertion.inserted_keys(model)), *also]:
        if state[key].is_floating_point():
            nn.init.normal_(state[key], std=0.3)


def assert_same(state, other):
    assert state.keys() == other.keys()
    assert all(torch.equal(value, other[key]) for key, value in state.items())


def copied(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


PLACES = {
    "after": lambda model: va.insert_(model, stages=[-2, -1], num_heads=4, example_input=IMAGES),
    "before": lambda model: va.insert_(model, names="layer3.0", at="before", num_heads=2, example_input=IMAGES),
    "branch": lambda model: va.insert_(model, names="layer3.0", at="branch", num_heads=2, example_input=IMAGES),
    "instead": lambda model: va.replace_(model, names="layer[23].0.conv2", num_heads=2, example_input=IMAGES),
    "pattern and position": lambda model: va.insert_(
        model,
        names=["layer1", "layer2"],
        num_heads=2,
        pattern=va.Window(2, shift=1),
        position=va.RelPosTable(),
        example_input=IMAGES,
    ),
    "alike but for one thing": lambda model: (
        va.insert_(model, names="layer1", num_heads=2, example_input=IMAGES),
        va.insert_(model, names="layer2", num_heads=4, example_input=IMAGES),
        va.insert_(model, names="layer3.0.conv1", at="before", num_heads=2, example_input=IMAGES),
        va.insert_(model, names="layer4", num_heads=2, example_input=(1, 3, 64, 64)),
    ),
    "several at once": lambda model: (
        va.replace_(model, names="layer4.0.conv1", num_heads=4, example_input=IMAGES),
        va.insert_(model, va.ConvBlock2d, names=["layer1", "layer3"], example_input=IMAGES),
        va.insert_(model, names="layer2", num_heads=1, gate_init=0.5, example_input=(2, 3, 64, 32)),
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_what_was_inserted_comes_back_and_leaves_no_trace(place, tmp_path):
    model = small_network()
    PLACES[place](model)
    train(model)
    save_adapter(model, tmp_path / "adapter.safetensors")

    other = small_network()
    before = copied(other)
    report = load_adapter_(other, tmp_path / "adapter.safetensors")
    assert_same(other.state_dict(), model.state_dict())
    assert vision_attn.networks.insertion.records(other) == vision_attn.networks.insertion.records(model)
    assert set(report.loaded) == vision_attn.networks.insertion.inserted_keys(model)
    assert not report.differing
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(other(x), model(x))
    assert not torch.equal(other(x), small_network()(x))
    va.remove_(other)
    assert_same(other.state_dict(), before)


def test_a_module_that_loops_over_its_children_has_its_block_back(tmp_path):
    def dense_network():
        torch.manual_seed(0)
        return timm.models.DenseNet(growth_rate=4, block_config=(2, 2), num_classes=3).eval()

    model = dense_network()
    va.replace_(model, names="features.denseblock2.denselayer1.conv2", num_heads=1, example_input=IMAGES)
    va.insert_(model, names=["features.denseblock1", "features.denseblock2"], num_heads=1, example_input=IMAGES)
    assert any(".inserted_" in key for key in vision_attn.networks.insertion.inserted_keys(model))
    train(model)
    save_adapter(model, tmp_path / "adapter.safetensors")
    other = dense_network()
    load_adapter_(other, tmp_path / "adapter.safetensors")
    assert_same(other.state_dict(), model.state_dict())


def test_blocks_and_a_head_are_trained_on_a_frozen_network_and_go_onto_it(tmp_path):
    model = small_network()
    base = copied(model)
    va.insert_(model, stages=-2, num_heads=2, example_input=IMAGES)
    freeze_backbone_(model, also_train="fc.*")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    for _ in range(2):
        model.train()(torch.randn(4, 3, 32, 32)).square().mean().backward()
        optimizer.step()
    path = save_adapter(model.eval(), tmp_path / "adapter.safetensors", also="fc.*")
    other = small_network()
    other.load_state_dict(base)
    assert not load_adapter_(other, path).differing
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(other(x), model(x))
    assert not torch.equal(other.fc.weight, base["fc.weight"])


def test_an_adapter_is_small(tmp_path):
    torch.manual_seed(0)
    model = timm.create_model("resnet18", num_classes=10)
    va.insert_(model, names="layer2", num_heads=4, example_input=IMAGES)
    save_adapter(model, save_whole(model, tmp_path).with_name("adapter.safetensors"))
    weights = sum(4 * parameter.numel() for parameter in va.inserted(model)["layer2.1"].parameters())
    adapter, whole = ((tmp_path / f"{name}.safetensors").stat().st_size for name in ("adapter", "whole"))
    assert weights < adapter < weights + 20_000
    assert adapter < whole / 100


def save_whole(model, folder):
    path = folder / "whole.safetensors"
    vision_attn.networks.checkpoints.save_weights(model, path)
    return path


def test_a_new_head_goes_with_the_blocks(tmp_path):
    model = small_network()
    va.insert_(model, stages=-2, num_heads=2, example_input=IMAGES)
    train(model, also=["fc.weight", "fc.bias"])
    path = save_adapter(model, tmp_path / "adapter.safetensors", also="fc.*")
    other = small_network()
    nn.init.zeros_(other.fc.weight)  # a head is new, so its values are no part of what the network is
    load_adapter_(other, path)
    assert_same(other.state_dict(), model.state_dict())
    with pytest.raises(va.CheckpointError, match=r"another network: .*fc.weight \(model \(5, 8\), adapter \(3, 8"):
        load_adapter_(small_network(classes=5), path)
    with pytest.raises(ValueError, match=r"also: 'head.*' matches no key of the model; it has conv1.weight"):
        save_adapter(model, path, also=["fc.*", "head.*"])


@pytest.fixture
def adapter(tmp_path):
    model = small_network()
    va.insert_(model, stages=-2, num_heads=2, example_input=IMAGES)
    train(model)
    return save_adapter(model, tmp_path / "adapter.safetensors")


def reshaped(model):
    model.layer4[0].conv2 = nn.Conv2d(8, 8, 5, padding=2, bias=False)


def retrained(model):
    nn.init.ones_(model.layer2[0].conv1.weight)
    model.bn1.running_mean.add_(1)


def renamed(model):
    model.classifier = model.fc
    del model.fc


OTHERS = {
    "names": (renamed, "another network: .*fc.weight .*classifier.weight "),
    "shapes": (reshaped, r"another network: layer4.0.conv2.weight \(model \(8, 8, 5, 5\), adapter \(8, 8, 3"),
    "values": (retrained, r"other weights .* 2 of 67 tensors.* bn1.running_mean, layer2.0.conv1.weight "),
    "types": (nn.Module.bfloat16, "67 of 67 tensors.*bfloat16 in the model, float32 in the adapter"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_network_is_refused_in_words_before_it_is_touched(what, adapter):
    change, message = OTHERS[what]
    model = small_network()
    change(model)
    before = copied(model)
    with pytest.raises(va.CheckpointError, match=message):
        load_adapter_(model, adapter)
    assert_same(model.state_dict(), before)
    assert not va.inserted(model)
    if what in ("names", "shapes"):
        with pytest.raises(va.CheckpointError, match=message):
            load_adapter_(model, adapter, strict=False)
    else:
        report = load_adapter_(model, adapter, strict=False)
        assert len(report.differing) == (2 if what == "values" else 67)
        assert "tensors of the network are not those it was trained on: " in str(report)
        dtypes = {value.dtype for value in va.inserted(model)["layer3.0"].state_dict().values()}
        assert dtypes == {torch.bfloat16 if what == "types" else torch.float32}
        va.remove_(model)
        assert_same(model.state_dict(), before)


def test_a_network_in_half_precision_has_adapters_of_its_own(tmp_path):
    model = small_network().bfloat16()
    va.insert_(model, stages=-2, num_heads=2, example_input=IMAGES)
    train(model)
    path = save_adapter(model, tmp_path / "adapter.safetensors")
    other = small_network().bfloat16()
    load_adapter_(other, path)
    assert_same(other.state_dict(), model.state_dict())


def test_batches_that_were_counted_are_no_part_of_the_network(adapter):
    model = small_network()
    model.bn1.num_batches_tracked.add_(7)
    assert not load_adapter_(model, adapter).differing


def test_the_memory_layout_is_no_part_of_the_network(adapter):
    model = small_network().to(memory_format=torch.channels_last)
    assert not load_adapter_(model, adapter).differing


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_a_wrapped_model_is_saved_and_loaded_as_the_network_in_it(wrap, adapter, tmp_path):
    model = small_network()
    load_adapter_(wrap(model), adapter)
    again = save_adapter(wrap(model), tmp_path / "again.safetensors")
    assert again.read_bytes() == adapter.read_bytes()


def test_a_network_in_training_on_several_devices_is_saved_and_not_changed(adapter, tmp_path):
    """DistributedDataParallel has counted its parameters: new ones would not be trained."""
    model = small_network()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(vision_attn.networks.insertion.SiteError, match="DistributedDataParallel"):
            load_adapter_(nn.parallel.DistributedDataParallel(model), adapter)
        load_adapter_(model, adapter)
        parallel = nn.parallel.DistributedDataParallel(model)
        again = save_adapter(parallel, tmp_path / "again.safetensors")
        vision_attn.networks.checkpoints.save_weights(parallel, tmp_path / "whole.safetensors")
        loaded = va.load_checkpoint(parallel, tmp_path / "whole.safetensors").loaded
        assert set(loaded) == model.state_dict().keys()
    finally:
        torch.distributed.destroy_process_group()
    assert again.read_bytes() == adapter.read_bytes()


def test_a_model_with_blocks_is_refused(adapter):
    model = small_network()
    load_adapter_(model, adapter)
    with pytest.raises(ValueError, match=r"nothing inserted; it has blocks at 'layer3.0': remove_\(model\) first"):
        load_adapter_(model, adapter)


@pytest.mark.parametrize(
    ("step", "error"), [("insert_", RuntimeError), ("insert_", KeyboardInterrupt), ("records", RuntimeError)]
)
def test_what_fails_halfway_leaves_the_model_as_it_was(step, error, tmp_path, monkeypatch):
    model = small_network()
    va.replace_(model, names="layer2.0.conv2", num_heads=2, example_input=IMAGES)
    va.insert_(model, names=["layer1", "layer3"], num_heads=2, example_input=IMAGES)
    va.insert_(model, names="layer4.0.bn1", num_heads=4, example_input=(1, 3, 64, 64))
    train(model)
    nn.init.ones_(model.fc.weight)
    path = save_adapter(model, tmp_path / "adapter.safetensors", also="fc.*")

    room = vision_attn.networks.checkpoints.placements if step == "insert_" else va.checkpoints.adapter
    real = getattr(room, step)
    calls = []

    def fails_at_last(*arguments, **options):
        calls.append(step)
        if step == "insert_" and len(calls) == 1:
            return real(*arguments, **options)
        raise error("the lights went out")

    monkeypatch.setattr(room, step, fails_at_last)
    other = small_network()
    modules, before = dict(other.named_modules()), copied(other)
    expected = va.CheckpointError if error is RuntimeError else error
    with pytest.raises(expected, match="the lights went out"):
        load_adapter_(other, path)
    assert len(calls) == (2 if step == "insert_" else 1)
    assert dict(other.named_modules()) == modules
    assert_same(other.state_dict(), before)


def said_in(adapter):
    with safe_open(adapter, "pt") as file:
        return json.loads(file.metadata()["vision_attn_adapter"])


def rewritten(adapter, target, more=None, **changes):
    """The same adapter that says something else or holds more, with a hash that is right again."""
    with safe_open(adapter, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()} | (more or {})  # noqa: SIM118
    said = {**said_in(adapter), **changes}
    del said["file_hash"]
    said["file_hash"] = hash_of([said, fingerprint(tensors)])
    save_file(tensors, target, {"vision_attn_adapter": json.dumps(said)})
    return target


def test_files_that_are_none_or_of_another_form_are_refused(adapter, tmp_path):
    model = small_network()
    other = tmp_path / "other.safetensors"
    save_file({"weight": torch.zeros(1)}, other)
    with pytest.raises(va.CheckpointError, match=r"is no adapter.*load_checkpoint reads checkpoints"):
        load_adapter_(model, other)
    with pytest.raises(
        va.CheckpointError, match=r"vision_attn 9\.0 as an adapter of form 2, and .* upgrade vision_attn"
    ):
        load_adapter_(model, rewritten(adapter, other, library="9.0", format=2))
    block = {"site": "a", "at": "after", "block": "b", "options": {"c": "os.system('d')"}, "input_shape": [1]}
    for changes in ({"blocks": [{}]}, {"blocks": 3}, {"blocks": [block]}, {"also": ["fc.weight"]}, {"base": []}):
        with pytest.raises(va.CheckpointError, match="is a damaged adapter"):
            load_adapter_(model, rewritten(adapter, other, **changes))
    with pytest.raises(FileNotFoundError, match=r"nothing\.safetensors"):
        load_adapter_(model, tmp_path / "nothing.safetensors")
    with pytest.raises(va.CheckpointError, match=r"is an adapter, blocks without their network: .*load_adapter_"):
        va.load_checkpoint(model, adapter)
    assert not va.inserted(model)


def test_options_in_a_file_cannot_say_where_blocks_go(adapter, tmp_path):
    blocks = said_in(adapter)["blocks"]
    blocks[0]["options"]["names"] = "'**'"
    with pytest.raises(va.CheckpointError, match=r"multiple values for keyword argument 'names'"):
        load_adapter_(small_network(), rewritten(adapter, tmp_path / "other.safetensors", blocks=blocks))


def test_a_file_cannot_change_more_of_a_network_than_it_says(adapter, tmp_path):
    model = small_network()
    before = copied(model)
    other = rewritten(adapter, tmp_path / "other.safetensors", more={"fc.bias": torch.ones(3)})
    with pytest.raises(va.CheckpointError, match=r"differ in fc\.bias"):
        load_adapter_(model, other)
    assert_same(model.state_dict(), before)


def test_damage_anywhere_is_found(adapter):
    content = adapter.read_bytes()
    generator = torch.Generator().manual_seed(0)
    model = small_network()
    before = copied(model)
    for place in torch.randint(len(content), (150,), generator=generator).tolist():
        damaged = bytearray(content)
        damaged[place] ^= 1 << (place % 7)
        adapter.write_bytes(damaged)
        with pytest.raises(va.CheckpointError):
            load_adapter_(model, adapter)
    for share in (0.0, 0.3, 0.999):
        adapter.write_bytes(content[: int(share * len(content))])
        with pytest.raises(va.CheckpointError, match=r"truncated or no checkpoint"):
            load_adapter_(model, adapter)
    assert_same(model.state_dict(), before)


def test_an_adapter_is_written_whole_or_not_at_all(adapter, monkeypatch):
    def full_disk(*arguments):
        raise OSError(28, "No space left on device")

    model, before = small_network(), adapter.read_bytes()
    va.insert_(model, stages=-1, num_heads=2, example_input=IMAGES)
    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_adapter(model, adapter)
    assert adapter.read_bytes() == before
    assert [file.name for file in adapter.parent.iterdir()] == [adapter.name]


class Scale(nn.Module):
    def __init__(self, channels, start=1.0, device=None, dtype=None):
        super().__init__()
        self.scale = nn.Parameter(torch.full((channels, 1, 1), start, device=device, dtype=dtype))

    def forward(self, x):
        return self.scale * x


def test_a_block_of_ones_own_needs_its_class(adapter, tmp_path):
    model = small_network()
    va.insert_(model, Scale, stages=[-2, -1], start=2.0, example_input=IMAGES)
    train(model)
    path = save_adapter(model, tmp_path / "own.safetensors")
    other = small_network()
    with pytest.raises(va.CheckpointError, match=r"holds Scale, which is no block of this library.*block=Scale"):
        load_adapter_(other, path)
    load_adapter_(other, path, block=Scale)
    assert_same(other.state_dict(), model.state_dict())
    with pytest.raises(va.CheckpointError, match=r"cannot be put into the model .*start"):
        load_adapter_(small_network(), path, block=va.AttentionBlock2d)
    with pytest.raises(ValueError, match=r"block: .*of this library only \(AttentionBlock2d\): leave it out"):
        load_adapter_(small_network(), adapter, block=Scale)


def test_a_block_that_is_not_the_saved_one_is_refused(tmp_path):
    model = small_network()
    va.insert_(model, Scale, stages=-2, example_input=IMAGES)
    path = save_adapter(model, tmp_path / "own.safetensors")

    other = small_network()
    with pytest.raises(
        va.CheckpointError, match=r"the block made here and the saved ones differ in weight \(8,\), bias"
    ):
        load_adapter_(other, path, block=lambda channels, **options: nn.BatchNorm2d(channels, **options))
    assert not va.inserted(other)


@pytest.mark.parametrize(
    "make",
    [
        lambda channels, **options: va.AttentionBlock2d(channels, num_heads=4, **options),
        lambda channels, heads=4, **options: va.AttentionBlock2d(channels, heads, **options),
    ],
)
def test_a_block_that_a_function_made_is_refused_when_it_would_come_back_as_another(make, tmp_path):
    model = small_network()
    va.insert_(model, make, stages=-2, example_input=IMAGES)
    with pytest.raises(
        ValueError, match=r"the AttentionBlock2d at 'layer3.0' is not what its class makes of no options"
    ):
        save_adapter(model, tmp_path / "adapter.safetensors")
    assert not list(tmp_path.iterdir())


def test_the_way_it_runs_may_have_been_changed(tmp_path):
    model = small_network()
    va.insert_(model, stages=-2, num_heads=2, example_input=IMAGES)
    va.set_impl_(model, "einsum")
    path = save_adapter(model, tmp_path / "adapter.safetensors")
    load_adapter_(small_network(), path)
    assert va.inserted(model)["layer3.0"].attn.impl == "einsum"


def test_what_cannot_be_saved_is_said(tmp_path):
    model = small_network()
    with pytest.raises(ValueError, match=r"no inserted block to save: insert_ one"):
        save_adapter(model, tmp_path / "adapter.safetensors")
    va.insert_(model, Scale, stages=-2, start=torch.tensor(2.0), example_input=IMAGES)
    with pytest.raises(ValueError, match=r"start=tensor\(2.\) cannot be written down: options must be plain numbers"):
        save_adapter(model, tmp_path / "adapter.safetensors")
    with pytest.raises(ValueError, match=r"path must end in \.safetensors; got 'adapter.pth'"):
        save_adapter(model, tmp_path / "adapter.pth")
    with pytest.raises(ValueError, match="model has tensors without values"):
        save_adapter(copy.deepcopy(model).to("meta"), tmp_path / "adapter.safetensors")
    assert not list(tmp_path.iterdir())


def test_every_block_and_every_specification_is_known():
    modules = {
        name for name in dir(va) if isinstance(getattr(va, name), type) and issubclass(getattr(va, name), nn.Module)
    }
    assert modules <= BLOCKS.keys()
    frozen = {name for name in dir(va) if hasattr(getattr(va, name), "__dataclass_fields__")}
    patterns = {"Window", "Grid", "Halo", "Neighborhood", "Pattern"}
    positions = {"RelPosDecomposed", "RelPosTable", "AbsPos", "Rope2d", "SinCos", "ConditionalPos"}
    assert patterns | positions == set(SPECIFICATIONS) <= frozen


sides = st.integers(1, 64)
sizes = sides | st.tuples(sides, sides) | st.tuples(sides, sides, sides)
specifications = st.one_of(
    st.builds(va.Window, sizes),
    st.integers(0, 7).flatmap(lambda shift: st.builds(va.Window, st.integers(shift + 1, 64), st.just(shift))),
    st.builds(va.Grid, sizes),
    st.builds(va.Neighborhood, sizes, sizes),
    st.builds(va.Neighborhood, st.just(7), sides, st.integers(1, 7), st.booleans() | st.just((True, False))),
    st.builds(va.Halo, sizes, sizes),
    st.builds(va.AbsPos, sizes),
    st.builds(lambda s: va.Pattern("b n d h (w s) -> (b s) n (h w) d", s=s), sides),
    st.builds(va.Pattern, st.just("b n d h w -> (b w) n h d")),
    st.builds(va.RelPosDecomposed, st.none() | sizes),
    st.builds(va.RelPosTable, st.none() | sizes),
    st.builds(va.Rope2d, st.floats(1.5, 1e9), st.none() | sides | st.tuples(sides, sides)),
    st.builds(va.ConditionalPos, st.integers(0, 9).map(lambda k: 2 * k + 1)),
    st.builds(va.SinCos, st.floats(1.5, 1e9)),
)
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(
    plain | specifications,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(max_examples=30)
@given(values)
def test_values_come_back_from_their_code(value):
    again = from_code(to_code("option", value))
    assert again == value
    assert repr(again) == repr(value)
    assert type(again) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        torch.float32,
        torch.zeros(2),
        torch.Size((2, 2)),
        nn.GELU,
        len,
        lambda x: x,
        {1, 2},
        b"bytes",
        1j,
        type("Window", (va.Window,), {})(7),
    ],
)
def test_other_values_are_refused_by_name(value):
    with pytest.raises(ValueError, match=r"^activation=.*cannot be written down"):
        to_code("activation", value)


@pytest.mark.parametrize(
    "code",
    [
        "__import__('os').system('touch witness')",
        "Window(__import__('os').getpid())",
        "Window.__init__(1)",
        "(lambda: 1)()",
        "[x for x in (1,)]",
        "Window(*(7,))",
        "Window(**{'size': 7})",
        "SinCos(**{})",
        "{**{1: 2}}",
        "Window",
        "int('7')",
        "7 + 7",
        "f'{7}'",
        "Window(0)",
        "Window(size=7, colour=3)",
        "{[]: 1}",
        "1; 2",
        "",
        "(" * 500 + ")" * 500,
        "-" * 50_000 + "1",
    ],
)
def test_nothing_else_is_evaluated(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="is not the code of a value"):
        from_code(code)
    assert not list(tmp_path.iterdir())


# --- several adapters on one network ----------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path):
    """Files of two adapters, each with a head, and what networks with them give."""
    files, outputs, x = {}, {}, torch.randn(2, 3, 32, 32)
    for name, place in (("pets", "several at once"), ("birds", "branch")):
        model = small_network()
        PLACES[place](model)
        train(model, also=["fc.weight", "fc.bias"] if name == "birds" else [])
        files[name] = save_adapter(model, tmp_path / f"{name}.safetensors", also="fc.*" if name == "birds" else ())
        outputs[name] = model(x)
    return files, outputs | {None: small_network()(x)}, x


def test_adapters_are_switched_and_closed(two):
    files, outputs, x = two
    model = small_network()
    before, keys = copied(model), {}
    for name, path in files.items():
        load_adapter_(model, path, name=name)
        keys[name] = list(model.state_dict())
    assert torch.equal(model(x), outputs["birds"]), "the one that was loaded last is in it"
    parameters = {id(p) for p in model.parameters()}
    for name in ("pets", None, "birds", "pets", "pets", None, "birds"):
        va.set_adapter(model, name)
        assert torch.equal(model(x), outputs[name]), name
        assert set(model.state_dict()) == set(keys.get(name, before)), "a state dict has nothing of those aside"
    assert {id(p) for p in model.parameters()} == parameters, "an optimizer stays valid"
    other = copy.deepcopy(model)
    va.set_adapter(other, "pets")
    assert torch.equal(other(x), outputs["pets"])
    assert torch.equal(model(x), outputs["birds"])
    va.set_adapter(model, None)
    assert_same(model.state_dict(), before)


def test_an_adapter_is_trained_put_aside_and_saved(two, tmp_path):
    files, outputs, x = two
    model = small_network()
    for name, path in files.items():
        load_adapter_(model, path, name=name)
    with torch.no_grad():
        model.fc.bias.add_(1.0)
        next(iter(va.inserted(model).values())).gate.mul_(2.0)
    expected = model(x)
    va.set_adapter(model, "pets")
    assert torch.equal(model(x), outputs["pets"])
    model.train().double()
    va.set_adapter(model, "birds")
    model.eval()
    assert all(module.training is False for module in model.modules())
    torch.testing.assert_close(model(x.double()).float(), expected)
    model.float()
    save_adapter(model, tmp_path / "again.safetensors", also="fc.*")
    again = small_network()
    load_adapter_(again, tmp_path / "again.safetensors")
    assert torch.equal(again(x), expected)


def test_names_of_adapters_are_minded(two, tmp_path):
    files, outputs, x = two
    model = small_network()
    with pytest.raises(ValueError, match=r"it has none: load_adapter_\(model, path, name=…\) first; got 'pets'"):
        va.set_adapter(model, "pets")
    load_adapter_(model, files["pets"], name="pets")
    with pytest.raises(ValueError, match=r"it has 'pets'; got 'cats'"):
        va.set_adapter(model, "cats")
    for name in ("pets", None):
        with pytest.raises(ValueError, match=r"name must be one that none of the model's adapters has \(pets\)"):
            load_adapter_(model, files["birds"], name=name)
    # What cannot be loaded leaves the one that is in the network.
    (tmp_path / "damaged.safetensors").write_bytes(files["birds"].read_bytes()[:-3])
    with pytest.raises(va.CheckpointError):
        load_adapter_(model, tmp_path / "damaged.safetensors", name="birds")
    assert torch.equal(model(x), outputs["pets"])


def test_the_share_of_what_is_trained_is_printed_as_peft_does(capsys):
    model = small_network()
    va.insert_(model, names="layer4", num_heads=2, example_input=IMAGES)
    va.freeze_backbone_(model)
    va.print_trainable_parameters(model)
    total, new = (sum(p.numel() for p in one.parameters()) for one in (model, *va.inserted(model).values()))
    expected = f"trainable params: {new:,d} || all params: {total:,d} || trainable%: {100 * new / total:.4f}\n"
    assert capsys.readouterr().out == expected

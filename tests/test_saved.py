"""Adapters and saved networks are restored bitwise identically, from files of the current format only."""

import copy
import json
import math
import os
import re
import shutil
import threading
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import timm
import torch
from crafted import rewritten, said_in
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import prune

import vision_attn as va
import vision_attn.networks.models
from vision_attn.networks.checkpoints import load_adapter_, save_adapter
from vision_attn.networks.checkpoints.specification import from_code, to_code
from vision_attn.networks.insertion import inserted_keys, records
from vision_attn.tools.comparison.controls import ConvBlock2d

#: The networks here are so small that some of their maps are 2×2.
pytestmark = pytest.mark.filterwarnings("ignore:little to attend")

IMAGES = (1, 3, 32, 32)


def small_network(width=8, classes=3):
    """Four residual blocks and a classifier, the same at every call."""
    torch.manual_seed(0)
    basic, how = timm.models.resnet.BasicBlock, {"num_classes": classes, "zero_init_last": False}
    return timm.models.ResNet(basic, [1, 1, 1, 1], channels=(width,) * 4, **how).eval()


def train(model, also=()):
    """Other values in every tensor of the blocks, and in what is trained beside them."""
    torch.manual_seed(1)
    state = model.state_dict()
    for key in [*sorted(inserted_keys(model)), *also]:
        if state[key].is_floating_point():
            nn.init.normal_(state[key], std=0.3)


def assert_same(state, other):
    assert state.keys() == other.keys()
    assert all(torch.equal(value, other[key]) for key, value in state.items())


def copied(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


PLACES = {
    "before": lambda model: va.insert_(model, names="layer3.0", at="before", num_heads=2, example_input=IMAGES),
    "branch": lambda model: va.insert_(model, names="layer3.0", at="branch", num_heads=2, example_input=IMAGES),
    "instead": lambda model: va.replace_(model, names="layer[23].0.conv2", num_heads=2, example_input=IMAGES),
    "several at once": lambda model: (
        va.replace_(model, names="layer4.0.conv1", num_heads=4, example_input=IMAGES),
        va.insert_(model, va.TransformerBlock2d, names=["layer1", "layer3"], num_heads=2, example_input=IMAGES),
        va.insert_(model, names="layer2", num_heads=1, gate_init=0.5, example_input=(2, 3, 64, 32)),
        va.insert_(model, names="conv1", pattern=va.Window(2), position=va.RelPosTable(), example_input=IMAGES),
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
    random = torch.get_rng_state()
    report = load_adapter_(other, tmp_path / "adapter.safetensors")
    assert torch.equal(torch.get_rng_state(), random)
    assert_same(other.state_dict(), model.state_dict())
    assert records(other) == records(model)
    assert set(report.loaded) == inserted_keys(model)
    assert not report.differing
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(other(x), model(x))
    assert not torch.equal(other(x), small_network()(x))
    with pytest.raises(ValueError, match=r"nothing inserted; it has blocks at '.*': remove_\(model\) first"):
        load_adapter_(other, tmp_path / "adapter.safetensors")
    va.remove_(other)
    assert_same(other.state_dict(), before)


@pytest.fixture
def model():
    model = small_network()
    va.insert_(model, stages=-2, num_heads=2, example_input=IMAGES)
    train(model)
    return model


@pytest.fixture
def adapter(model, tmp_path):
    return save_adapter(model, tmp_path / "adapter.safetensors")


def test_a_new_head_goes_with_the_blocks(model, tmp_path):
    train(model, also=["fc.weight", "fc.bias"])
    path = save_adapter(model, tmp_path / "adapter.safetensors", also="fc.*")
    other = small_network()
    nn.init.zeros_(other.fc.weight)  # a head is new, so its values are no part of what the network is
    load_adapter_(other, path)
    assert_same(other.state_dict(), model.state_dict())
    with pytest.raises(va.CheckpointError, match=r"another network: .*fc.weight \(model \(5, 8\), adapter \(3, 8"):
        load_adapter_(small_network(classes=5), path)
    with pytest.raises(ValueError, match=r"also='head.*' matches no parameter; the model has conv1.weight"):
        save_adapter(model, path, also=["fc.*", "head.*"])


def retrained(model):
    nn.init.ones_(model.layer2[0].conv1.weight)
    model.bn1.running_mean.add_(1)


def renamed(model):
    model.classifier = model.fc
    del model.fc


OTHERS = {
    "names": (renamed, "another network: .*fc.weight .*classifier.weight "),
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
    assert not va.inserted_blocks(model)
    if what == "names":
        with pytest.raises(va.CheckpointError, match=message):
            load_adapter_(model, adapter, strict=False)
        return
    report = load_adapter_(model, adapter, strict=False)
    assert f"{2 if what == 'values' else 67} of 67 tensors of the network are not those" in str(report)
    assert va.inserted_blocks(model)["layer3.0"].gate.dtype == model.conv1.weight.dtype
    va.remove_(model)
    assert_same(model.state_dict(), before)


def test_counted_batches_and_the_memory_layout_are_no_part_of_the_network(adapter):
    model = small_network().to(memory_format=torch.channels_last)
    model.bn1.num_batches_tracked.add_(7)
    assert not load_adapter_(model, adapter).differing


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_a_wrapped_model_is_saved_and_loaded_as_the_network_in_it(wrap, adapter, tmp_path):
    model = small_network()
    load_adapter_(wrap(model), adapter)
    va.set_impl_(model, "einsum")  # which is no part of what a block is
    again = save_adapter(wrap(model), tmp_path / "again.safetensors")
    assert again.read_bytes() == adapter.read_bytes()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_what_fails_at_the_end_leaves_the_model_as_it_was(error, tmp_path, monkeypatch):
    model = small_network()
    PLACES["several at once"](model)
    train(model, also=["fc.weight"])
    path = save_adapter(model, tmp_path / "adapter.safetensors", also="fc.*")

    def fails(*arguments):
        raise error("the lights went out")

    monkeypatch.setattr("vision_attn.networks.checkpoints.adapter.records", fails)
    other = small_network()
    modules, before = dict(other.named_modules()), copied(other)
    with pytest.raises(va.CheckpointError if error is RuntimeError else error, match="the lights went out"):
        load_adapter_(other, path)
    assert dict(other.named_modules()) == modules
    assert_same(other.state_dict(), before)


def test_files_that_are_none_or_of_another_form_are_refused(adapter, tmp_path):
    model = small_network()
    other = tmp_path / "other.safetensors"
    save_file({"weight": torch.zeros(1)}, other)
    with pytest.raises(va.CheckpointError, match=r"is no adapter: load_checkpoint reads checkpoints"):
        load_adapter_(model, other)
    for number in (1, 2, 4):
        with pytest.raises(va.CheckpointError, match=rf"expected 3, got {number}\. .* vision_attn 9\.0"):
            load_adapter_(model, rewritten(adapter, other, library="9.0", format=number))
    (block,) = said_in(adapter)["blocks"]
    wrong = [{"options": {"c": "os.system('d')"}}, {"layout": 3}, {"held": None}, {"element": [1]}, {"more": 1}]
    for changes in (
        *({"blocks": [{**block, **change}]} for change in wrong),
        *({"blocks": [{name: block[name] for name in block if name != "map_size"}]},),
        *({"blocks": [{}]}, {"blocks": 3}, {"also": ["fc.weight"]}, {"base": [1]}, {"arguments": {"a": 3}}),
    ):
        with pytest.raises(va.CheckpointError, match="is damaged"):
            load_adapter_(model, rewritten(adapter, other, **changes))
    with pytest.raises(FileNotFoundError, match=r"nothing\.safetensors"):
        load_adapter_(model, tmp_path / "nothing.safetensors")
    with pytest.raises(va.CheckpointError, match=r"is an adapter: .*load_adapter_"):
        va.load_checkpoint(model, adapter)
    assert not va.inserted_blocks(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"options": {"names": "'**'"}}, "unexpected keyword argument 'names'"),
        ({"at": "nowhere"}, "block .*'nowhere' a module"),
        ({"site": "no.such"}, "has no place for a block there"),
        ({"held": "bn1"}, "as its child 'bn1'"),
        ({"held": "no.such.inserted"}, "has no place for a block there"),
        ({"channels": 10**6}, "the block made here and the saved ones differ in"),
        ({"site": "layer1"}, "the blocks made here and the saved ones differ in"),
        ({}, r"differ in fc\.bias"),
    ],
)
def test_a_file_puts_blocks_nowhere_but_where_blocks_go(change, message, adapter, tmp_path):
    (block,) = said_in(adapter)["blocks"]
    model = small_network()
    modules, before = dict(model.named_modules()), copied(model)
    more = {} if change else {"fc.bias": torch.ones(3)}  # which it does not say
    other = rewritten(adapter, tmp_path / "other.safetensors", more, blocks=[{**block, **change}])
    with pytest.raises(va.CheckpointError, match=message):
        load_adapter_(model, other)
    assert dict(model.named_modules()) == modules
    assert_same(model.state_dict(), before)


class Scale(nn.Module):
    def __init__(self, channels, start=1.0, device=None, dtype=None):
        super().__init__()
        self.scale = nn.Parameter(torch.full((channels, 1, 1), start, device=device, dtype=dtype))

    def forward(self, x):
        return self.scale * x


def test_a_block_of_ones_own_needs_its_class(tmp_path):
    model = small_network()
    va.insert_(model, Scale, stages=[-2, -1], start=2.0, example_input=IMAGES)
    train(model)
    path = save_adapter(model, tmp_path / "own.safetensors")
    other = small_network()
    with pytest.raises(va.CheckpointError, match=r"holds Scale, which is no block of this library.*block=Scale"):
        load_adapter_(other, path)
    load_adapter_(other, path, block=Scale)
    assert_same(other.state_dict(), model.state_dict())
    with pytest.raises(va.CheckpointError, match=r"cannot be put into the model .*unexpected.*start"):
        load_adapter_(small_network(), path, block=va.AttentionBlock2d)
    with pytest.raises(va.CheckpointError, match=r"cannot be put into the model .*saved ones differ in weight \(8,\)"):
        load_adapter_(small_network(), path, block=lambda channels, start, **how: nn.BatchNorm2d(channels, **how))


def test_blocks_inserted_with_a_large_example_come_back(tmp_path):
    """Their records say where they go; before, the network was run again on as many images, and the file refused."""

    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 3, stride=16), nn.ReLU()).eval()

    model, images = network(), torch.rand(1, 3, 64, 64)
    va.insert_(model, names="0", num_heads=2, example_input=(128, 3, 224, 224))
    train(model)
    path = save_adapter(model, tmp_path / "adapter.safetensors")
    other = network()
    load_adapter_(other, path)
    assert torch.equal(other(images), model(images))


def test_what_cannot_be_saved_is_said(tmp_path):
    model = small_network()
    with pytest.raises(ValueError, match=r"no inserted block to save: insert_ one"):
        save_adapter(model, tmp_path / "adapter.safetensors")
    va.insert_(model, Scale, stages=-2, start=torch.tensor(2.0), example_input=IMAGES)
    with pytest.raises(ValueError, match=r"start=tensor\(2.\) cannot be written down: options must be numbers"):
        save_adapter(model, tmp_path / "adapter.safetensors")
    with pytest.raises(ValueError, match=r"path must end in \.safetensors; got 'adapter.pth'"):
        save_adapter(model, tmp_path / "adapter.pth")
    with pytest.raises(ValueError, match="model has tensors without values"):
        save_adapter(copy.deepcopy(model).to("meta"), tmp_path / "adapter.safetensors")
    model = small_network()
    va.insert_(model, lambda channels, **how: va.AttentionBlock2d(channels, 4, **how), stages=-2, example_input=IMAGES)
    with pytest.raises(ValueError, match=r"the AttentionBlock2d at 'layer3.0' .*was made by a function or changed s"):
        save_adapter(model, tmp_path / "adapter.safetensors")
    assert not list(tmp_path.iterdir())


def compiled(model):
    model.layer3 = torch.compile(model.layer3)
    return model


def checkpointed(model):
    model.layer3[0] = checkpoint_wrapper(model.layer3[0])
    return model


def compiled_in_place(model):
    model.layer3.compile()
    return model


WRAPPERS = {
    "plain": lambda model: model,
    "compiled": compiled,
    "checkpointed": checkpointed,
    "in place": compiled_in_place,
}


@pytest.mark.parametrize("at", ["after", "before", "branch"])
@pytest.mark.parametrize("one", WRAPPERS)
def test_adapters_fit_networks_with_and_without_wrapped_layers(one, at, tmp_path):
    """Their names have parts of torch.compile and of activation checkpointing in them: ``layer3._orig_mod.0.bn1``."""
    model = small_network()
    va.insert_(model, names="layer3.0", at=at, num_heads=2, example_input=IMAGES)
    train(model)
    expected, saved_alone = model.state_dict(), save_adapter(model, tmp_path / "plain.safetensors")
    path = save_adapter(WRAPPERS[one](model), tmp_path / "adapter.safetensors")
    assert path.read_bytes() == saved_alone.read_bytes()
    for wrap in WRAPPERS.values():
        other = wrap(small_network())
        report = load_adapter_(other, path)
        assert set(report.loaded) == inserted_keys(small_with_block(at))
        assert not report.differing
        assert_same({re.sub(r"_orig_mod\.", "", key): value for key, value in other.state_dict().items()}, expected)
        again = save_adapter(other, tmp_path / "again.safetensors")
        assert again.read_bytes() == path.read_bytes()


def small_with_block(at):
    model = small_network()
    va.insert_(model, names="layer3.0", at=at, num_heads=2, example_input=IMAGES)
    return model


def test_blocks_inserted_into_a_compiled_layer_come_back_without_it(tmp_path):
    model = compiled(small_network())
    va.insert_(model, names="layer3", num_heads=2, example_input=IMAGES)
    train(model)
    path = save_adapter(model, tmp_path / "adapter.safetensors")
    (block,) = said_in(path)["blocks"]
    assert (block["site"], block["held"]) == ("layer3.0", "inserted")
    other, images = small_network(), torch.randn(2, 3, 32, 32)
    load_adapter_(other, path)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        assert torch.equal(other(images), model(images))
    assert records(other)[0].site == "layer3.0"
    # Files of before have the names of the compiled layer in them.
    before = {"blocks": [{**block, "site": "layer3._orig_mod.0"}]}
    before["base"] = {key.replace("layer3.", "layer3._orig_mod."): x for key, x in said_in(path)["base"].items()}
    raw = {key.replace("layer3.", "layer3._orig_mod."): value for key, value in load_file(path).items()}
    save_file(raw, tmp_path / "raw.safetensors", {"vision_attn": json.dumps(said_in(path))})
    load_adapter_(
        compiled(small_network()), rewritten(tmp_path / "raw.safetensors", tmp_path / "old.safetensors", **before)
    )


def test_a_network_with_a_compiled_layer_is_saved_as_the_network_without(tmp_path):
    model = timm.create_model("resnet20_a", num_classes=3).eval()
    va.insert_(model, stages=-1, num_heads=4)
    va.save_model(model, tmp_path / "plain")
    model.layer3 = torch.compile(model.layer3)
    va.save_model(model, tmp_path / "net")
    assert_same(va.load_model(tmp_path / "net").state_dict(), va.load_model(tmp_path / "plain").state_dict())


PARAMETRIZED = {
    "spectral_norm": lambda block: nn.utils.parametrizations.spectral_norm(block.attn.proj),
    "weight_norm": lambda block: nn.utils.parametrizations.weight_norm(block.attn.qkv),
    "orthogonal": lambda block: nn.utils.parametrizations.orthogonal(block.attn.proj),
    "older spectral_norm": lambda block: nn.utils.spectral_norm(block.attn.proj),
    "older weight_norm": lambda block: nn.utils.weight_norm(block.attn.qkv),
    "pruning": lambda block: prune.l1_unstructured(block.attn.qkv, "weight", 0.5),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("name", PARAMETRIZED)
def test_blocks_with_a_parametrization_are_refused_by_name(name, model, tmp_path):
    """Self-Attention-GAN#31 has all of its layers in spectral norms."""
    PARAMETRIZED[name](va.inserted_blocks(model)["layer3.0"])
    with pytest.raises(ValueError, match=r"'layer3.0' cannot be saved: it has a parametrization, .*attn\.(proj|qkv)\."):
        save_adapter(model, tmp_path / "adapter.safetensors")


def test_a_parametrization_that_is_removed_and_blocks_of_timm(model, tmp_path):
    block = va.inserted_blocks(model)["layer3.0"]
    nn.utils.parametrizations.spectral_norm(block.attn.proj)
    nn.utils.parametrize.remove_parametrizations(block.attn.proj, "weight")
    path, other = save_adapter(model, tmp_path / "adapter.safetensors"), small_network()
    load_adapter_(other, path)
    assert_same(other.state_dict(), model.state_dict())
    model = small_network()
    va.insert_(model, "cbam", names="layer3.0", example_input=IMAGES)
    nn.utils.parametrizations.spectral_norm(
        next(m for m in va.inserted_blocks(model)["layer3.0"].modules() if hasattr(m, "bias"))
    )
    with pytest.raises(ValueError, match=r"the cbam at 'layer3.0' cannot be saved: it has a parametrization"):
        save_adapter(model, path)


def test_a_block_that_is_compiled_inside_is_saved_as_it_was(model, adapter, tmp_path):
    block = va.inserted_blocks(model)["layer3.0"]
    block.attn = torch.compile(block.attn)
    assert save_adapter(model, tmp_path / "again.safetensors").read_bytes() == adapter.read_bytes()


def with_branch(model):
    va.insert_(model, names="layer2.0", at="branch", num_heads=2, position=va.RelPosTable((14, 14)))


def with_another(model):
    va.remove_(model)
    va.insert_(model, names="stage1", num_heads=2, pattern="rows")


NETWORKS = {
    "branch, position": ("resnet20", {"in_chans": 1}, with_branch),
    "instead": ("resnet20", {}, lambda m: va.replace_(m, names="layer3.0.conv2", num_heads=2)),
    "control": ("tiny", {"drop_path_rate": 0.1}, lambda m: va.insert_(m, ConvBlock2d, stages=-1)),
    "tokens": ("test_vit", {"img_size": 64}, lambda m: va.insert_(m, names="blocks.1", num_heads=2)),
    "none": ("test_efficientnet", {"global_pool": "max"}, lambda m: None),
    "another than its own": ("recall_attention", {}, with_another),
}


#: Before, ``model_args=`` of ``save_model`` has to say it.
notes_arguments = pytest.mark.skipif(
    tuple(map(int, timm.__version__.split(".")[:3])) < (1, 0, 31),
    reason="timm does not note what a network is made with",
)


@notes_arguments
@pytest.mark.parametrize("case", NETWORKS)
def test_a_network_with_whatever_blocks_comes_back_bit_for_bit(case, tmp_path):
    name, given, insert = NETWORKS[case]
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3, **given)
    insert(model)
    train(model.eval())
    state = torch.get_rng_state()
    assert va.save_model(model, tmp_path / "net", classes=["a", "b", "c"]) == tmp_path / "net"
    how = {"block": ConvBlock2d} if case == "control" else {}
    if how:
        with pytest.raises(va.CheckpointError, match=r"block=ConvBlock2d, .* vision_attn\.tools\.comparison\.controls"):
            va.load_model(tmp_path / "net")
    again = va.load_model(tmp_path / "net", **how)
    assert torch.equal(torch.get_rng_state(), state), "neither draws random numbers of the user's"
    blocks = records(model)
    images = torch.randn(2, *(blocks[0].input_shape[1:] if blocks else again.pretrained_cfg["input_size"]))
    assert torch.equal(again(images), model(images))
    assert records(again) == blocks
    assert again.state_dict().keys() == model.state_dict().keys()
    assert (again.classes, again.training) == (("a", "b", "c"), False)
    assert {file.name for file in tmp_path.rglob("*")} == {"net", "README.md", "config.json", "model.safetensors"}
    va.save_model(again, tmp_path / "again")
    assert va.load_model(tmp_path / "again", **how).classes == again.classes


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder, and the network in it."""
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=3)
    va.insert_(model, stages=-2, num_heads=4, example_input=IMAGES)
    train(model.eval())
    return va.save_model(model, tmp_path_factory.mktemp("saved") / "net", classes=["a", "b", "c"]), model


@pytest.mark.parametrize(
    ("change", "size", "steps"),
    [
        ({"crop_pct": 0.5, "interpolation": "bicubic"}, (3, 24, 24), "size=48, interpolation=bicubic"),
        ({"crop_mode": "squash"}, (3, 24, 16), r"Resize\(size=\(24, 16\)"),
        ({"mean": (0.3,), "std": (0.2,)}, (1, 8, 44), "Grayscale"),
    ],
)
def test_images_are_prepared_as_the_configuration_of_the_network_says(change, size, steps, tmp_path):
    model = timm.create_model("resnet20", num_classes=3, in_chans=size[0])
    model.pretrained_cfg |= {**change, "input_size": size}
    (tmp_path / "run").mkdir()
    va.save_model(model, tmp_path / "run" / "model", model_args={"in_chans": size[0]})
    again = va.load_model(tmp_path / "run")  # as a run keeps its best network
    assert again.classes is None
    assert {name: again.pretrained_cfg[name] for name in change} == change
    assert re.search(steps, str(again.transform))
    for mode in ("RGB", "RGBA", "L", "LA", "P", "1", "CMYK"):
        assert again.transform(Image.new(mode, (60, 40))).shape == size, mode


def test_a_type_is_kept_and_other_files_in_the_folder_too(tmp_path):
    model = timm.create_model("test_resnet", num_classes=3)
    va.insert_(model, stages=-2, num_heads=4, example_input=IMAGES)
    (tmp_path / "net" / "more").mkdir(parents=True)
    files = [tmp_path / "net" / "README.md", tmp_path / "net" / "more" / "notes.txt"]
    for file in files:
        file.write_text("mine")
    va.save_model(nn.DataParallel(model.bfloat16()), tmp_path / "net")
    assert {p.dtype for p in va.load_model(tmp_path / "net").parameters()} == {torch.bfloat16}
    assert [file.read_text() for file in files] == ["mine", "mine"]


def tiny_network(seed, pattern="full"):
    """A small network, trained in another way for each seed."""
    torch.manual_seed(seed)
    model = timm.create_model("tiny", num_classes=3).eval()
    va.insert_(model, names="layer1", num_heads=2, pattern=pattern)
    train(model)
    nn.init.constant_(model.fc.bias, seed)
    return model


@notes_arguments
@pytest.mark.parametrize("dies", range(4))
def test_a_folder_is_the_old_network_or_the_new_one_wherever_its_writer_dies(dies, tmp_path):
    """Each renaming in turn is one that the process does not live to see; before, weights were of the one and more."""
    models = [tiny_network(0), tiny_network(1, "rows")]
    va.save_model(models[0], tmp_path / "net", classes=["a", "b", "c"])
    if not os.fork():
        real, left = os.replace, iter(range(dies))
        os.replace = lambda *paths: real(*paths) if next(left, None) is not None else os._exit(0)
        va.save_model(models[1], tmp_path / "net", classes=["d", "e", "f"])
        os._exit(0)
    os.wait()
    images = torch.rand(2, 3, 32, 32)
    # Of three renamings: the weights to be compared, the weights, config.json.
    mixed = pytest.warns(UserWarning, match="config.json and model.safetensors are from different saves")
    with mixed if dies == 2 else nullcontext():
        again = va.load_model(tmp_path / "net")
    assert again.classes == (("a", "b", "c") if dies < 2 else ("d", "e", "f"))
    assert torch.equal(again(images), models[dies >= 2](images))
    va.save_model(models[1], tmp_path / "net", classes=["d", "e", "f"])
    assert va.load_model(tmp_path / "net").classes == ("d", "e", "f")
    assert [file.name for file in tmp_path.iterdir()] == ["net"]


@notes_arguments
def test_files_of_two_saves_are_told_apart_and_the_weights_decide(tmp_path):
    """As two processes may leave them that save into one folder; a configuration that a user edited is used."""
    models = [tiny_network(seed) for seed in range(2)]
    folders = [va.save_model(model, tmp_path / str(seed), classes=[*"abc"]) for seed, model in enumerate(models)]
    images = torch.rand(2, 3, 32, 32)
    shutil.copy(folders[0] / "config.json", folders[1] / "config.json")
    with pytest.warns(UserWarning, match="are from different saves. The configuration in model.safetensors is used"):
        again = va.load_model(folders[1])
    assert torch.equal(again(images), models[1](images))
    config = json.loads((folders[0] / "config.json").read_text())
    (folders[0] / "config.json").write_text(json.dumps({**config, "label_names": [*"xyz"]}))
    assert va.load_model(folders[0]).classes == ("x", "y", "z")


@notes_arguments
@pytest.mark.parametrize("where", ["threads", "processes"])
def test_saves_at_the_same_time_all_succeed_and_leave_one_of_the_networks(where, tmp_path):
    """Before, 12 of 18 failed: "what timm makes of 'resnet18' is not this network"."""
    models, folder, failed = [tiny_network(seed) for seed in range(3)], tmp_path / "net", []

    def save(seed):
        try:
            va.save_model(models[seed], folder, classes=[f"{seed} {one}" for one in "abc"])
        except Exception as error:
            failed.append(error)

    if where == "threads":
        models = [model.train() for model in models]
        threads = [threading.Thread(target=save, args=(seed,)) for seed in (0, 1, 2, 0, 1, 2)]
        for call in (threading.Thread.start, threading.Thread.join):
            for thread in threads:
                call(thread)
        assert failed == []
        assert all(module.training for model in models for module in model.modules())
        models = [model.eval() for model in models]
    else:
        for seed in range(3):
            if not os.fork():
                for _ in range(3):
                    save(seed)
                os._exit(len(failed))
        assert [os.wait()[1] for _ in range(3)] == [0, 0, 0]
    images = torch.rand(2, 3, 32, 32)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "config.json and model.safetensors are from different saves")
        again = va.load_model(folder)
    assert torch.equal(again(images), models[int(again.classes[0][0])](images))
    assert {path.name for path in folder.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    assert list(tmp_path.iterdir()) == [folder]


def test_only_files_of_the_library_change(saved, tmp_path):
    """An open log or TensorBoard file loses nothing, and links and modes stay; before, the folder was replaced."""
    folder = tmp_path / "net"
    folder.mkdir()
    (tmp_path / "elsewhere").write_bytes(b"")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    (folder / "config.json").write_bytes(b"")
    (folder / "config.json").chmod(0o600)
    inode = folder.stat().st_ino
    with open(folder / "log.txt", "a", buffering=1) as log:
        for epoch in range(2):
            log.write(f"epoch {epoch}\n")
            va.save_model(saved[1], folder)
    assert (folder / "log.txt").read_text() == "epoch 0\nepoch 1\n"
    assert (folder.stat().st_ino, (folder / "config.json").stat().st_mode & 0o777) == (inode, 0o600)
    assert (folder / "model.safetensors").is_symlink()
    va.load_model(folder)


@pytest.mark.parametrize("name", [".", "x" * 250, "link", "dangling"])
def test_any_folder_can_be_saved_into(name, saved, tmp_path, monkeypatch):
    """The current one, which could not be replaced before, and one with as long a name as a name may be."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"config\.json: there is no such file: give a folder that save_model"):
        va.load_model(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to(Path("real") / "new")
    assert va.save_model(saved[1], name) == Path(name)
    va.load_model(name)
    assert not list(tmp_path.glob(".*"))


def test_a_folder_that_cannot_be_written_is_named(saved, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for folder in (tmp_path / "file", tmp_path / "file" / "net", Path("/proc/nothing")):
        with pytest.raises(OSError, match=r"exists|directory") as caught:
            va.save_model(saved[1], folder)
        assert caught.value.filename == str(folder)


def test_a_network_that_diverged_is_saved_with_a_warning(tmp_path):
    """Before: "atol must be greater than or equal to zero, but got -nan"."""
    model = timm.create_model("test_resnet", num_classes=3)
    nn.init.constant_(model.fc.bias, math.nan)
    with pytest.warns(UserWarning, match="The output is not finite: training may have diverged"):
        va.save_model(model, tmp_path / "net")
    assert_same(
        {key: value.nan_to_num(7) for key, value in va.load_model(tmp_path / "net").state_dict().items()},
        {key: value.nan_to_num(7) for key, value in model.state_dict().items()},
    )


def test_what_could_not_be_read_back_is_not_written(saved, tmp_path):
    _, model = saved
    with pytest.raises(ValueError, match="architecture must be a name that timm knows; got None"):
        va.save_model(nn.Sequential(nn.Conv2d(3, 8, 1)), tmp_path / "net")
    other = timm.create_model("test_resnet", num_classes=3)
    other.act1 = nn.Sigmoid()
    with pytest.raises(ValueError, match=r"'test_resnet' is not this network \(it computes something else\)"):
        va.save_model(other, tmp_path / "net")
    with pytest.raises(ValueError, match="classes must name the 3 classes of the model; got 2"):
        va.save_model(model, tmp_path / "net", classes=["a", "b"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "hf-hub:timm/resnet18.a1_in1k"}, "must name a network of timm's"),
        ({"model_args": {"pretrained": True}}, r"fetch nothing \['pretrained'\]"),
        ({"model_args": {"pretrained_cfg": {"url": "http://x"}}}, "fetch nothing"),
        ({"model_args": {"layers": [10**9, 1, 1, 1]}}, "of a size that there is none of"),
        ({"model_args": {"no_such": 1}}, "cannot be made"),
        ({"architecture": "resnet18"}, "of another network than it names"),
        ({"model_args": {"num_classes": 4}, "label_names": None}, "another network than it names: fc.weight, fc.bias"),
        ({"label_names": [1, 2, 3]}, "label_names must be the names of its 3 classes"),
        ({"pretrained_cfg": {"input_size": [3, 10**6, 10**6], "mean": [0], "std": [1]}}, "input_size must be channels"),
        *(({"vision_attn": {"format": n, "library": "9"}}, f"expected 3, got {n}\\. .* vision_attn 9") for n in (1, 4)),
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


SPECIFICATIONS = [
    *(va.Window(7), va.Window((4, 8), 3), va.Grid((2, 3, 4)), va.Halo(8, 3), va.Pattern("b n d h w -> b n (h w) d")),
    *(va.Neighborhood(7), va.Neighborhood(7, (3, 5), 2, True), va.Pattern("b n d h (w s) -> (b s) n (h w) d", s=7)),
    *(va.AbsPos(7), va.RelPosDecomposed(), va.RelPosTable((7, 9)), va.Rope2d(1e4, (2, 4)), va.SinCos(2.5)),
    va.ConditionalPos(3),
]
PLAIN = [None, True, -7, 10**30, 1e-300, -0.5, "", "é'\"\\\n\0", (), (1,), [[]], {"a": {}, -1: (None, [2.5])}]


def test_values_come_back_from_their_code():
    for value in (*SPECIFICATIONS, *PLAIN, {"pattern": SPECIFICATIONS, "more": tuple(PLAIN)}):
        again = from_code(to_code("option", value))
        assert (again, repr(again), type(again)) == (value, repr(value), type(value))


def test_other_values_are_refused_by_name():
    numbers = (float("nan"), float("inf"), torch.float32, torch.zeros(2), torch.Size((2, 2)), 1j)
    for value in (*numbers, nn.GELU, len, lambda x: x, {1, 2}, b"bytes", type("Window", (va.Window,), {})(7)):
        with pytest.raises(ValueError, match=r"^activation=.*cannot be written down"):
            to_code("activation", value)


@pytest.mark.parametrize(
    "code",
    [
        *("__import__('os').system('touch witness')", "Window(__import__('os').getpid())", "Window.__init__(1)"),
        *("(lambda: 1)()", "[x for x in (1,)]", "Window(*(7,))", "Window(**{'size': 7})", "SinCos(**{})"),
        *("{**{1: 2}}", "Window", "int('7')", "7 + 7", "f'{7}'", "Window(0)", "Window(size=7, colour=3)", "{[]: 1}"),
        *("1; 2", "", "(" * 500 + ")" * 500, "-" * 50_000 + "1"),
    ],
)
def test_nothing_else_is_evaluated(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="is not the code of a value"):
        from_code(code)
    assert not list(tmp_path.iterdir())

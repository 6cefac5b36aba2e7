"""Checkpoints of every shape that circulates, and files that must not get in."""

import argparse
import hashlib
import os
import pickle

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

import vision_attn as va
import vision_attn.networks.insertion
import vision_attn.networks.models
from vision_attn.networks.safe import read_checkpoint, write_atomically


def small_network(classes=3):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes)
    )


@pytest.fixture
def trained():
    torch.manual_seed(1)
    model = small_network()
    model(torch.randn(4, 3, 8, 8))
    return model.eval()


def assert_loaded(model, trained):
    theirs = trained.state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in model.state_dict().items())


def averaged(state):
    return {key: value + 1 if value.is_floating_point() else value for key, value in state.items()}


FORMS = {
    "plain": (lambda state: state, ""),
    "state_dict": (lambda state: {"state_dict": state, "epoch": 3, "best_prec1": 91.7}, "state_dict"),
    "model": (lambda state: {"model": state, "optimizer": {"state": {}, "param_groups": []}}, "model"),
    "model beside its average": (lambda state: {"model_ema": averaged(state), "model": state}, "model"),
    "average alone": (lambda state: {"model_ema": state}, "model_ema"),
    "data parallel": (lambda state: {"state_dict": {f"module.{k}": v for k, v in state.items()}}, "state_dict"),
    "compiled": (lambda state: {f"_orig_mod.{k}": v for k, v in state.items()}, ""),
    "compiled and parallel": (lambda state: {f"module._orig_mod.{k}": v for k, v in state.items()}, ""),
    "parallel and compiled": (lambda state: {f"_orig_mod.module.{k}": v for k, v in state.items()}, ""),
    "torch's AveragedModel": (
        lambda state: {"model": {"n_averaged": torch.tensor(3), **{f"module.{k}": v for k, v in state.items()}}},
        "model",
    ),
    "with the settings of argparse": (lambda state: {"model": state, "args": argparse.Namespace(lr=0.1)}, "model"),
    "with scores of numpy": (lambda state: {"model": state, "best": np.float64(91.7), "n": np.int64(3)}, "model"),
    "from before batches were counted": (
        lambda state: {k: v for k, v in state.items() if "num_batches_tracked" not in k},
        "",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_checkpoint_is_read(form, trained, tmp_path):
    make, entry = FORMS[form]
    torch.save(make(trained.state_dict()), tmp_path / "file.pth")
    model = small_network()
    report = va.load_checkpoint(model, tmp_path / "file.pth")
    assert report.entry == entry
    assert (report.new, report.missing, report.unexpected, report.mismatched) == ((), (), (), {})
    model[1].num_batches_tracked.copy_(trained[1].num_batches_tracked)
    assert_loaded(model, trained)


#: The ways in which a file of tensors is written.
WRITE = {
    "zip": torch.save,
    "legacy": lambda state, path: torch.save(state, path, _use_new_zipfile_serialization=False),
    "safetensors": save_file,
}


@pytest.mark.parametrize(
    ("form", "suffix"),
    [
        ("zip", ".pt"),
        ("zip", ".pth"),
        ("zip", ".bin"),
        ("legacy", ".th"),
        ("legacy", ".tar"),
        ("safetensors", ".safetensors"),
    ],
)
def test_every_ending_is_read(form, suffix, trained, tmp_path):
    path = tmp_path / f"file{suffix}"
    WRITE[form](trained.state_dict(), path)
    model = small_network()
    assert len(va.load_checkpoint(model, str(path)).loaded) == len(trained.state_dict())
    assert_loaded(model, trained)


def test_the_average_is_taken_on_request_only(trained, tmp_path):
    state = trained.state_dict()
    torch.save({"model": averaged(state), "model_ema": state}, tmp_path / "file.pth")
    model = small_network()
    assert va.load_checkpoint(model, tmp_path / "file.pth", ema=True).entry == "model_ema"
    assert_loaded(model, trained)
    torch.save({"model": state}, tmp_path / "plain.pth")
    with pytest.raises(va.CheckpointError, match=r"ema=True: .*the file has model"):
        va.load_checkpoint(model, tmp_path / "plain.pth", ema=True)


def test_a_wrapped_model_is_loaded_into(trained, tmp_path):
    torch.save(trained.state_dict(), tmp_path / "file.pth")
    for wrap in (nn.DataParallel, torch.compile):
        model = small_network()
        va.load_checkpoint(wrap(model), tmp_path / "file.pth")
        assert_loaded(model, trained)


@pytest.mark.parametrize("name", ["resnet20", "resnet20_a"])
def test_loading_before_or_after_insertion_gives_the_same_model(name, tmp_path):
    torch.manual_seed(0)
    source = timm.create_model(name, num_classes=10)
    torch.save(source.state_dict(), tmp_path / "base.pth")
    models = [timm.create_model(name, num_classes=10).eval() for _ in range(2)]
    va.load_checkpoint(models[0], tmp_path / "base.pth")
    va.insert_(models[0], stages=-1)
    va.insert_(models[1], stages=-1)
    report = va.load_checkpoint(models[1], tmp_path / "base.pth")
    assert len(report.new) == 7
    assert all(".inserted." in key for key in report.new)
    assert not report.missing
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(models[0](x), models[1](x))
    assert torch.equal(models[0](x), source.eval()(x))

    # What was trained with blocks goes into a model with blocks, all of it.
    nn.init.normal_(va.inserted(models[1])["layer3.2"].attn.proj.weight, std=0.1)
    torch.save(models[1].state_dict(), tmp_path / "inserted.pth")
    assert not va.load_checkpoint(models[0], tmp_path / "inserted.pth").new
    assert torch.equal(models[0](x), models[1](x))
    plain = timm.create_model(name, num_classes=10)
    with pytest.raises(va.CheckpointError, match=r"saved with blocks inserted at 'layer3.2': insert_\(model, names="):
        va.load_checkpoint(plain, tmp_path / "inserted.pth")


def test_the_report_separates_what_is_new_missing_left_over_and_of_another_shape(trained, tmp_path):
    state = trained.state_dict()
    del state["0.bias"]
    state["extra.weight"] = torch.zeros(2)
    state["1.weight"] = torch.zeros(5)
    torch.save(state, tmp_path / "file.pth")
    model = small_network()
    va.insert_(model, names="1", example_input=(1, 3, 8, 8))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(va.CheckpointError) as caught:
        va.load_checkpoint(model, tmp_path / "file.pth")
    for part in (
        "nothing was loaded",
        "7 new by design: 1.inserted.gate",
        "1 missing in the checkpoint: 0.bias",
        "1 unexpected in the checkpoint: extra.weight",
        "1 of another shape: 1.weight (model (8,), checkpoint (5,))",
        "strict=False",
    ):
        assert part in str(caught.value)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())

    report = va.load_checkpoint(model, tmp_path / "file.pth", strict=False)
    assert report.missing == ("0.bias",)
    assert report.unexpected == ("extra.weight",)
    assert report.mismatched == {"1.weight": ((8,), (5,))}
    assert len(report.new) == 7
    assert set(report.loaded) == set(trained.state_dict()) - {"0.bias", "1.weight"}
    assert torch.equal(model[0].weight, trained[0].weight)
    assert torch.equal(model[0].bias, before["0.bias"])


def test_another_class_count_is_refused_with_the_remedy_and_the_remedy_works(trained, tmp_path):
    torch.save(trained.state_dict(), tmp_path / "file.pth")
    model = small_network(classes=5)
    with pytest.raises(va.CheckpointError, match=r'trained for 3 classes and the model has 5: .*fresh=\["4\.\*"\]'):
        va.load_checkpoint(model, tmp_path / "file.pth")
    head = model[4].weight.clone()
    report = va.load_checkpoint(model, tmp_path / "file.pth", fresh=["4.*"])
    assert report.new == ("4.weight", "4.bias")
    assert torch.equal(model[4].weight, head)
    assert torch.equal(model[0].weight, trained[0].weight)
    with pytest.raises(ValueError, match="fresh: 'head"):
        va.load_checkpoint(model, tmp_path / "file.pth", fresh=["head.*"])


class RunsCode:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_a_pickle_that_runs_code_is_refused_and_does_not_run(tmp_path):
    witness = tmp_path / "witness"
    for name, protocol in (("new.pth", None), ("legacy.pth", 2), ("bare.pkl", 4)):
        content = {"weight": torch.zeros(1), "evil": RunsCode(f"touch {witness}")}
        if name == "bare.pkl":
            (tmp_path / name).write_bytes(pickle.dumps({"evil": content["evil"]}, protocol=2))
        else:
            torch.save(content, tmp_path / name, _use_new_zipfile_serialization=protocol is None)
        with pytest.raises(va.CheckpointError, match=r"asks to run 'posix.system' on loading, and was not loaded"):
            va.load_checkpoint(nn.Linear(1, 1), tmp_path / name)
    assert not witness.exists()


@pytest.mark.parametrize("form", WRITE)
def test_a_truncated_file_is_refused_and_nothing_is_changed(form, trained, tmp_path):
    path = tmp_path / ("file.safetensors" if form == "safetensors" else "file.pth")
    WRITE[form](trained.state_dict(), path)
    content = path.read_bytes()
    model = small_network()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for share in (0.0, 0.01, 0.3, 0.9, 0.999):
        path.write_bytes(content[: int(len(content) * share)])
        with pytest.raises(va.CheckpointError, match=r"truncated or no checkpoint.*fetch or save it again"):
            va.load_checkpoint(model, path)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.zeros(1)], "holds a list, expected a dictionary of tensors"),
        ({"epoch": 3, "names": ["a"]}, "holds no weights.*the file has epoch, names"),
        (
            {"other.gamma": torch.zeros(1)},
            "another architecture; the model has weight, bias; the checkpoint has other",
        ),
    ],
)
def test_a_file_of_something_else_is_refused(content, message, tmp_path):
    torch.save(content, tmp_path / "file.pth")
    with pytest.raises(va.CheckpointError, match=message):
        va.load_checkpoint(nn.Linear(1, 1), tmp_path / "file.pth")


def test_a_file_that_is_not_there_is_said_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no such checkpoint file"):
        read_checkpoint(tmp_path / "nothing.pth")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(FileNotFoundError, match="no checkpoint file in the folder"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_folder_of_hugging_faces_form_is_read(name, trained, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    if name == "model.safetensors":
        save_file(trained.state_dict(), tmp_path / name)
        torch.save({"other": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    else:
        torch.save(trained.state_dict(), tmp_path / name)
    model = small_network()
    assert va.load_checkpoint(model, tmp_path).path == str(tmp_path / name)
    assert_loaded(model, trained)


def test_a_folder_of_our_own_is_read(tmp_path):
    source = timm.create_model("resnet20", num_classes=10)
    va.save_model(source, tmp_path / "saved")
    model = timm.create_model("resnet20", num_classes=10)
    assert not va.load_checkpoint(model, tmp_path / "saved").missing
    assert_loaded(model, source)


@pytest.mark.parametrize("ending", [".pth", ".th", ".pth.tar"])
def test_a_hash_in_the_name_is_verified(ending, trained, tmp_path):
    save_file(trained.state_dict(), tmp_path / "plain.safetensors")
    torch.save(trained.state_dict(), tmp_path / "plain")
    digest = hashlib.sha256((tmp_path / "plain").read_bytes()).hexdigest()
    length = next(length for length in range(8, 64) if not digest[:length].isdecimal())
    path = (tmp_path / "plain").rename(tmp_path / f"resnet-{digest[:length]}{ending}")
    model = small_network()
    report = va.load_checkpoint(model, path)
    assert report.verified == digest[:length]
    assert f"its SHA-256 begins with {digest[:length]}, as its name says" in str(report)
    assert va.load_checkpoint(model, tmp_path / "plain.safetensors").verified == ""

    wrong = path.rename(tmp_path / f"resnet-deadbeef{ending}")
    message = rf"says that its SHA-256 begins with deadbeef, and it begins with {digest[:8]}.*[Ff]etch .* or rename"
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for read in (read_checkpoint, lambda file: va.load_checkpoint(model, file)):
        with pytest.raises(va.CheckpointError, match=message):
            read(wrong)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["run-20260131.pth", "resnet-abcdef1.pth", "deadbeef.pth", "step-deadbeef-last.pth"])
def test_other_endings_of_a_name_are_no_hash(name, trained, tmp_path):
    torch.save(trained.state_dict(), tmp_path / name)
    assert va.load_checkpoint(small_network(), tmp_path / name).verified == ""


@pytest.mark.parametrize("prefix", ["backbone.", "model.", "encoder.net."])
@pytest.mark.parametrize("wrapper", ["", "module."])
def test_a_prefix_that_all_names_share_is_taken_off(prefix, wrapper, trained, tmp_path):
    state = {f"{wrapper}{prefix}{key}": value for key, value in trained.state_dict().items()}
    torch.save({"state_dict": state}, tmp_path / "file.pth")
    model = small_network()
    report = va.load_checkpoint(model, tmp_path / "file.pth")
    assert report.prefix == f"{wrapper}{prefix}"
    assert f"prefix '{wrapper}{prefix}' taken off" in str(report)
    assert_loaded(model, trained)


def test_names_that_are_the_models_own_keep_their_prefix(trained, tmp_path):
    model = nn.ModuleDict({"backbone": small_network()})
    torch.save({f"backbone.{key}": value for key, value in trained.state_dict().items()}, tmp_path / "file.pth")
    assert va.load_checkpoint(model, tmp_path / "file.pth").prefix == ""
    assert_loaded(model["backbone"], trained)


def test_a_module_that_was_compiled_inside_the_model_keeps_its_name(trained, tmp_path):
    model = nn.Sequential(torch.compile(nn.Linear(2, 3)))
    torch.save(model.state_dict(), tmp_path / "file.pth")
    assert va.load_checkpoint(model, tmp_path / "file.pth").loaded == ("0._orig_mod.weight", "0._orig_mod.bias")


@pytest.mark.parametrize(
    ("wrapper", "prefix"),
    [
        ("", "backbone"),
        ("", "backbone."),
        ("module.", "backbone."),
        ("module.", "module.backbone."),
        ("_orig_mod.", "backbone"),
    ],
)
def test_a_part_of_what_was_saved_is_read_by_its_prefix(wrapper, prefix, trained, tmp_path):
    state = {f"{wrapper}backbone.{key}": value for key, value in trained.state_dict().items()}
    state |= {f"{wrapper}head.weight": torch.zeros(2), f"{wrapper}backbones": torch.zeros(1)}
    if wrapper == "module.":
        state["n_averaged"] = torch.tensor(3)
    torch.save(state, tmp_path / "file.pth")
    model = small_network()
    with pytest.raises(va.CheckpointError, match="another architecture"):
        va.load_checkpoint(model, tmp_path / "file.pth")
    report = va.load_checkpoint(model, tmp_path / "file.pth", prefix=prefix)
    assert (report.prefix, report.aside) == (
        f"{wrapper}backbone.".removeprefix("_orig_mod."),
        ("head.weight", "backbones"),
    )
    assert "2 left aside: head.weight, backbones" in str(report)
    assert_loaded(model, trained)
    with pytest.raises(
        va.CheckpointError,
        match=r"prefix 'body.' begins none of its keys.*backbone, head",
    ):
        va.load_checkpoint(model, tmp_path / "file.pth", prefix="body.")


def test_the_report_says_which_weights_were_not_taken(trained, tmp_path):
    state = trained.state_dict()
    torch.save(
        {"model": state, "model_ema": state, "teacher": state, "optimizer": {"state": {}}}, tmp_path / "file.pth"
    )
    report = va.load_checkpoint(small_network(), tmp_path / "file.pth")
    assert (report.entry, report.others) == ("model", ("model_ema", "teacher"))
    assert "not taken: the weights under model_ema, teacher (ema=True takes the moving average)" in str(report)
    report = va.load_checkpoint(small_network(), tmp_path / "file.pth", ema=True)
    assert (report.entry, report.others) == ("model_ema", ("model", "teacher"))
    assert "ema=True" not in str(report)
    torch.save({"model_ema": state, "ema": state}, tmp_path / "averages.pth")
    assert str(va.load_checkpoint(small_network(), tmp_path / "averages.pth")).endswith("the weights under ema")


def test_blocks_in_a_file_are_told_by_the_sites_they_were_inserted_at(tmp_path):
    def dense_network():
        return timm.models.DenseNet(growth_rate=4, block_config=(2, 2), num_classes=3)

    model = dense_network()
    sites = ["features.denseblock1.denselayer2", "features.denseblock2"]
    va.insert_(model, names=sites, num_heads=1, example_input=(1, 3, 128, 128))
    va.replace_(model, names="features.denseblock1.denselayer1.conv2", num_heads=1, example_input=(1, 3, 128, 128))
    torch.save(model.state_dict(), tmp_path / "file.pth")
    with pytest.raises(va.CheckpointError) as caught:
        va.load_checkpoint(dense_network(), tmp_path / "file.pth")
    told = ", ".join(map(repr, va.inserted(model)))
    for site in va.inserted(model):
        assert repr(site) in str(caught.value), told
    assert "insert_(model, names=[" in str(caught.value)
    assert "replace_(model, names=['features.denseblock1.denselayer1.conv2']) first" in str(caught.value)


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_weights_are_written_whole_or_not_at_all(step, trained, tmp_path, monkeypatch):
    path = tmp_path / "weights.safetensors"
    save_weights(trained, path)
    weights = read_checkpoint(path)
    assert weights.keys() == trained.state_dict().keys()
    assert all(torch.equal(weights[key], value) for key, value in trained.state_dict().items())

    def full_disk(*arguments):
        raise OSError(28, "No space left on device")

    before = path.read_bytes()
    monkeypatch.setattr(os, step, full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"half of")
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["weights.safetensors"]


def test_weights_are_written_as_safetensors_only(trained, tmp_path):
    with pytest.raises(ValueError, match=r"path must end in \.safetensors; got 'weights.pth'"):
        save_weights(trained, tmp_path / "weights.pth")
    trained[4].__class__ = type("Counting", (nn.Linear,), {"get_extra_state": lambda layer: {"steps": 3}})
    with pytest.raises(
        ValueError, match=r"model must have nothing but tensors in its state dict.*; got 4\._extra_state"
    ):
        save_weights(trained, tmp_path / "weights.safetensors")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(3, 2).to_sparse(), "asks to run 'torch._utils._rebuild_sparse_tensor'.* save the state dict"),
        (torch.zeros(3, 2, dtype=torch.int8), "weight is a whole-number tensor"),
        (torch.zeros(3, 2, dtype=torch.complex64), "weight is a complex tensor"),
    ],
)
def test_tensors_of_another_kind_are_refused_before_anything_is_loaded(value, message, tmp_path):
    torch.save({"bias": torch.ones(3), "weight": value}, tmp_path / "file.pth")
    model = nn.Linear(2, 3)
    before = model.bias.clone()
    with pytest.raises(va.CheckpointError, match=message):
        va.load_checkpoint(model, tmp_path / "file.pth")
    assert torch.equal(model.bias, before)


@pytest.mark.parametrize("make", [lambda: small_network().to("meta"), lambda: nn.LazyLinear(2)], ids=["meta", "lazy"])
def test_a_model_without_values_is_refused(make, trained, tmp_path):
    torch.save(trained.state_dict(), tmp_path / "file.pth")
    with pytest.raises(ValueError, match="model has tensors without values"):
        va.load_checkpoint(make(), tmp_path / "file.pth")


UNWRITABLE = {
    "sparse": lambda: nn.Buffer(torch.eye(2).to_sparse()),
    "nested": lambda: nn.Buffer(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    "expanded": lambda: nn.Buffer(torch.ones(1).expand(3)),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("what", UNWRITABLE)
def test_a_model_with_a_tensor_that_cannot_be_written_is_refused_before_anything_is_loaded(what, tmp_path):
    model = nn.Linear(2, 2)
    model.odd = UNWRITABLE[what]()
    before = model.weight.clone()
    torch.save({"weight": torch.ones(2, 2), "bias": torch.ones(2), "odd": torch.ones(3)}, tmp_path / "net.pth")
    with pytest.raises(ValueError, match=f"model: 'odd' is {what}"):
        va.load_checkpoint(model, tmp_path / "net.pth")
    assert torch.equal(model.weight, before)


def test_two_tensors_for_one_name_are_refused(tmp_path):
    """As a script saves that adds its keys to those of another run: which of them is meant, nobody knows."""
    content = {"_orig_mod.weight": torch.ones(2, 2), "weight": torch.zeros(2, 2), "bias": torch.ones(2)}
    for prefix in ("", "module."):
        torch.save({prefix + key: value for key, value in content.items()}, tmp_path / "net.pth")
        with pytest.raises(va.CheckpointError, match=r"has several tensors for one name of the network: .*weight"):
            va.load_checkpoint(nn.Linear(2, 2), tmp_path / "net.pth")


def test_a_models_own_name_is_not_taken_for_a_prefix(tmp_path):
    model = nn.ModuleDict({"module": nn.Linear(2, 3)})
    torch.save(model.state_dict(), tmp_path / "file.pth")
    assert va.load_checkpoint(model, tmp_path / "file.pth").loaded == ("module.weight", "module.bias")


@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_a_damaged_file_is_refused_however_the_reader_fails(form, trained, tmp_path):
    path = tmp_path / "file.pth"
    WRITE[form](trained.state_dict(), path)
    content = path.read_bytes()
    generator = np.random.default_rng(0)
    refused = 0
    for _ in range(100):
        damaged = bytearray(content)
        for position in generator.integers(0, len(content), 4):
            damaged[position] = generator.integers(256)
        path.write_bytes(damaged)
        try:
            read_checkpoint(path)
        except va.CheckpointError:
            refused += 1
    assert refused > 15


def replaced_network(seed=0):
    """A network with attention in the place of a convolution, and the key of what it stands in for."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
    va.replace_(model, names="1", num_heads=2, example_input=(1, 3, 8, 8))
    return model


def test_loading_before_or_after_replacement_leaves_the_same_model_behind(tmp_path):
    torch.manual_seed(1)
    source = timm.create_model("resnet20", num_classes=10)
    torch.save(source.state_dict(), tmp_path / "base.pth")
    models = [timm.create_model("resnet20", num_classes=10) for _ in range(2)]
    va.load_checkpoint(models[0], tmp_path / "base.pth")
    for model in models:
        va.replace_(model, names="layer3.1.conv2", num_heads=2)
    report = va.load_checkpoint(models[1], tmp_path / "base.pth")
    assert report.replaced == ("layer3.1.conv2.weight",)
    assert "1 for modules that are replaced, loaded for when they come back: layer3.1.conv2.weight" in str(report)
    assert not report.unexpected
    assert set(report.new) == vision_attn.networks.insertion.inserted_keys(models[1])
    assert "layer3.1.conv2.weight" not in report.loaded
    for model in models:
        va.remove_(model)
        assert_loaded(model, source)


def test_what_was_replaced_must_fit_and_be_whole(tmp_path):
    model = replaced_network()
    state = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 5), nn.BatchNorm2d(8)).state_dict()
    torch.save(state, tmp_path / "file.pth")
    with pytest.raises(va.CheckpointError, match=r"1 of another shape: 1.weight \(model \(8, 8, 3, 3\), checkpoint"):
        va.load_checkpoint(model, tmp_path / "file.pth")
    kept = {key: value.clone() for key, value in model[1].replaced.state_dict().items()}
    report = va.load_checkpoint(model, tmp_path / "file.pth", strict=False)
    assert report.replaced == ("1.bias",)
    assert torch.equal(model[1].replaced.weight, kept["weight"])
    assert torch.equal(model[1].replaced.bias, state["1.bias"])

    del state["1.weight"]
    torch.save(state, tmp_path / "part.pth")
    with pytest.raises(va.CheckpointError, match=r"1 missing in the checkpoint: 1\.weight"):
        va.load_checkpoint(model, tmp_path / "part.pth")
    assert "1.weight" in va.load_checkpoint(model, tmp_path / "part.pth", fresh="1.*").new

    # What was saved with attention in the place of the convolution knows nothing of that.
    torch.save(replaced_network(seed=2).state_dict(), tmp_path / "with.pth")
    report = va.load_checkpoint(model, tmp_path / "with.pth")
    assert (report.new, report.replaced, report.missing) == ((), (), ())


def test_what_was_replaced_under_two_names_is_loaded(tmp_path):
    shared = nn.Conv2d(3, 3, 1)
    model = nn.Sequential(shared, nn.ReLU(), nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()))
    state = {key: value + 1 for key, value in model.state_dict().items()}
    va.replace_(model, names="0", num_heads=1, example_input=(1, 3, 8, 8))
    model.append(model[0])
    torch.save(state | {"3.weight": state["0.weight"], "3.bias": state["0.bias"]}, tmp_path / "file.pth")
    assert va.load_checkpoint(model, tmp_path / "file.pth").replaced == ("0.weight", "0.bias", "3.weight", "3.bias")
    assert torch.equal(shared.weight, state["0.weight"])


def test_a_block_in_part_is_missing_and_one_that_is_not_there_is_new(tmp_path):
    model = small_network()
    va.insert_(model, names=["0", "1"], num_heads=2, example_input=(1, 3, 8, 8))
    state = model.state_dict()
    whole = {key: value for key, value in state.items() if not key.startswith("1.inserted.")}
    torch.save(whole, tmp_path / "one.pth")
    report = va.load_checkpoint(model, tmp_path / "one.pth")
    assert set(report.new) == state.keys() - whole.keys()

    torch.save({key: value for key, value in whole.items() if key != "0.inserted.gate"}, tmp_path / "part.pth")
    with pytest.raises(va.CheckpointError, match=r"1 missing in the checkpoint: 0\.inserted\.gate"):
        va.load_checkpoint(model, tmp_path / "part.pth")
    report = va.load_checkpoint(model, tmp_path / "part.pth", strict=False)
    assert report.missing == ("0.inserted.gate",)
    assert set(report.new) == state.keys() - whole.keys()


def test_tied_weights_are_written_and_read(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    save_weights(model, tmp_path / "tied.safetensors")
    weights = read_checkpoint(tmp_path / "tied.safetensors")
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())


# --- what a block is, beyond its shapes -------------------------------------------------------------------------------

BLOCK = {"num_heads": 4, "pattern": va.Window(4), "position": va.RelPosDecomposed(4), "scale": 0.3, "num_kv_heads": 2}


def with_block(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU())
    va.insert_(model, names="0", example_input=(1, 3, 8, 8), **{**BLOCK, **options})
    return model


def saved_block(form, path, model):
    if form == "safetensors":
        save_weights(model, path.with_suffix(".safetensors"))
        return path.with_suffix(".safetensors")
    state = nn.DataParallel(model).state_dict() if form == "parallel" else model.state_dict()
    state = dict(state) if form == "plain" else state
    torch.save({"state_dict": state, "epoch": 3}, path)
    return path


@pytest.mark.parametrize("form", ["torch", "parallel", "safetensors"])
@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            {"num_heads": 8, "num_kv_heads": 4, "position": None, "key_dim": 4, "value_dim": 4},
            "num_heads=4 in the file and 8",
        ),
        ({"pattern": va.Grid(4)}, r"pattern=Window\(size=4, shift=0\) in the file and Grid\(size=4\) in the model"),
        (
            {"pattern": va.Window(4, shift=2)},
            r"pattern=Window\(size=4, shift=0\) in the file and Window\(size=4, shift=2\)",
        ),
        ({"position": va.Rope2d()}, r"position=RelPosDecomposed\(feat_size=None\) in the file and Rope2d"),
        ({"scale": None}, "scale=0.3 in the file and its default in the model"),
        ({"scale": 0.7}, "scale=0.3 in the file and 0.7 in the model"),
        ({"causal": True}, "causal=its default in the file and True in the model"),
    ],
)
def test_blocks_that_shapes_do_not_tell_apart_are_refused_by_name(form, other, said, tmp_path):
    path = saved_block(form, tmp_path / "net.pth", with_block())
    model = with_block(**other)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(va.CheckpointError, match=rf"1 made otherwise: 0\.inserted\.attn has .*{said}"):
        va.load_checkpoint(model, path)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    report = va.load_checkpoint(model, path, strict=False)
    assert len(report.differing) == 1
    assert report.trusted == ()
    same = with_block()
    report = va.load_checkpoint(same, path)
    assert (report.differing, report.trusted) == ((), ())
    assert "trust" not in str(report)


def test_what_a_file_does_not_say_of_its_blocks_is_taken_on_trust_and_said(tmp_path):
    path = saved_block("plain", tmp_path / "net.pth", with_block())
    report = va.load_checkpoint(with_block(pattern=va.Grid(4)), path)
    assert report.trusted == ("0.inserted.attn",)
    assert "taken on trust, as the file does not say them: 0.inserted.attn" in str(report)
    plain = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU())
    torch.save(plain.state_dict(), tmp_path / "plain.pth")
    assert va.load_checkpoint(with_block(), tmp_path / "plain.pth").trusted == ()


def test_a_block_keeps_its_keys_and_says_what_it_is_by_itself(tmp_path):
    block = va.Attention2d(8, 2)
    assert list(block.state_dict()) == ["qkv.weight", "qkv.bias", "proj.weight", "proj.bias"]
    torch.save(block.state_dict(), tmp_path / "block.pth")
    torch.load(tmp_path / "block.pth", weights_only=True)
    with pytest.raises(va.CheckpointError, match="the block has num_heads=2 in the file and 4 in the model"):
        va.load_checkpoint(va.Attention2d(8, 4), tmp_path / "block.pth")
    torch.save(va.LinearAttention2d(8, 2).state_dict(), tmp_path / "linear.pth")
    with pytest.raises(va.CheckpointError, match="attention='linear' in the file and its default in the model"):
        va.load_checkpoint(block, tmp_path / "linear.pth")
    # An implementation is none of a block's properties, nor is what happens in training alone.
    other = va.Attention2d(8, 2, impl="bmm", attn_drop=0.1)
    assert va.load_checkpoint(other, tmp_path / "block.pth").trusted == ()
    torch.save(va.StridedAttention2d(8, 2, stride=2).state_dict(), tmp_path / "strided.pth")
    with pytest.raises(va.CheckpointError, match="stride=2 in the file and 1 in the model"):
        va.load_checkpoint(va.StridedAttention2d(8, 2), tmp_path / "strided.pth")


@pytest.mark.parametrize("said", [3, {"block": 3}, {"block": {"num_heads": 4}}, {"block": {3: "4"}}, []])
def test_what_is_no_word_on_a_block_is_refused(said, tmp_path):
    block = va.Attention2d(8, 2)
    state = block.state_dict()
    state._metadata[""] = said
    torch.save(state, tmp_path / "block.pth")
    if said == []:
        assert va.load_checkpoint(block, tmp_path / "block.pth").trusted == ("Attention2d",)
        return
    with pytest.raises(va.CheckpointError, match="damaged in what it says of its blocks"):
        va.load_checkpoint(block, tmp_path / "block.pth")

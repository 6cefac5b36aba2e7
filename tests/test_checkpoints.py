"""Checkpoints of every shape that circulates: found, compared in full, loaded as a whole or refused in words."""

import argparse

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

import vision_attn as va
import vision_attn.networks.models
from vision_attn.networks.checkpoints.form import Saved, write_saved
from vision_attn.networks.checkpoints.specification import arguments_of
from vision_attn.networks.insertion import inserted_keys


def small_network(classes=3):
    parts = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes)
    return nn.Sequential(*parts)


@pytest.fixture
def trained():
    torch.manual_seed(1)
    model = small_network()
    model(torch.randn(4, 3, 8, 8))
    return model.eval()


def copied(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


def assert_same(model, theirs):
    assert all(torch.equal(value, theirs[key]) for key, value in model.state_dict().items())


def saved(content, folder, **how):
    torch.save(content, folder / "file.pth", **how)
    return folder / "file.pth"


def averaged(state):
    return {key: value + 1 if value.is_floating_point() else value for key, value in state.items()}


def named(begin, state):
    return {f"{begin}{key}": value for key, value in state.items()}


def before_batches_were_counted(state):
    return {key: value for key, value in state.items() if "num_batches_tracked" not in key}


def of_swa(state):
    return {"model": {"n_averaged": torch.tensor(3), **named("module.", state)}}


def of_a_script(state):
    settings = argparse.Namespace(lr=0.1)
    return {"state_dict": state, "epoch": 3, "args": settings, "best": np.float64(91.7), "optimizer": {"state": {}}}


#: What a file holds, the entry that the weights are found under, and what is taken off their names.
FORMS = {
    "plain": (lambda state: state, "", ""),
    "of a script": (of_a_script, "state_dict", ""),
    "model beside its average": (lambda state: {"model_ema": averaged(state), "model": state}, "model", ""),
    "average alone": (lambda state: {"model_ema": state}, "model_ema", ""),
    "data parallel": (lambda state: {"state_dict": named("module.", state)}, "state_dict", "module."),
    "compiled": (lambda state: named("_orig_mod.", state), "", ""),
    "parallel and compiled": (lambda state: named("_orig_mod.module.", state), "", "module."),
    "a part in parallel": (lambda state: named("module.backbone.", state), "", "module.backbone."),
    "torch's AveragedModel": (of_swa, "model", "module."),
    "from before batches were counted": (before_batches_were_counted, "", ""),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_checkpoint_is_read(form, trained, tmp_path):
    make, entry, prefix = FORMS[form]
    model = small_network()
    report = va.load_checkpoint(model, saved(make(trained.state_dict()), tmp_path))
    assert (report.entry, report.prefix) == (entry, prefix)
    assert (f"prefix '{prefix}' taken off" in str(report)) == bool(prefix)
    assert (report.new, report.missing, report.unexpected, report.mismatched) == ((), (), (), {})
    model[1].num_batches_tracked.copy_(trained[1].num_batches_tracked)
    assert_same(model, trained.state_dict())


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_a_folder_is_read_into_a_wrapped_model(wrap, name, trained, tmp_path):
    torch.save({"other": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    (save_file if name == "model.safetensors" else torch.save)(trained.state_dict(), tmp_path / name)
    model = small_network()
    assert va.load_checkpoint(wrap(model), tmp_path).path == str(tmp_path / name)
    assert_same(model, trained.state_dict())


def test_the_average_is_taken_on_request_and_what_was_not_taken_is_said(trained, tmp_path):
    state = trained.state_dict()
    path = saved({"model": averaged(state), "model_ema": state, "teacher": state}, tmp_path)
    report = va.load_checkpoint(small_network(), path)
    assert (report.entry, report.others) == ("model", ("model_ema", "teacher"))
    assert "not taken: the weights under model_ema, teacher (ema=True takes the moving average)" in str(report)
    model = small_network()
    assert va.load_checkpoint(model, path, ema=True).others == ("model", "teacher")
    assert_same(model, state)
    with pytest.raises(va.CheckpointError, match=r"ema=True: .*the file has model"):
        va.load_checkpoint(model, saved({"model": state}, tmp_path), ema=True)


def test_names_that_are_the_models_own_keep_their_beginning(tmp_path):
    parts = {"module": nn.Linear(2, 3), "backbone": torch.compile(nn.Linear(2, 3))}
    for model in (nn.ModuleDict(parts), torch.optim.swa_utils.AveragedModel(nn.Linear(2, 3))):
        report = va.load_checkpoint(model, saved(model.state_dict(), tmp_path))
        assert (set(report.loaded), report.prefix) == (model.state_dict().keys(), "")


@pytest.mark.parametrize(
    ("wrapper", "prefix"),
    [("", "backbone"), ("module.", "backbone"), ("module.", "module.backbone."), ("_orig_mod.", "backbone.")],
)
def test_a_part_of_what_was_saved_is_read_by_its_prefix(wrapper, prefix, trained, tmp_path):
    state = named(f"{wrapper}backbone.", trained.state_dict())
    state |= {f"{wrapper}head.weight": torch.zeros(2), f"{wrapper}backbones": torch.zeros(1)}
    path = saved(state | ({"n_averaged": torch.tensor(3)} if wrapper == "module." else {}), tmp_path)
    model, taken = small_network(), wrapper.removeprefix("_orig_mod.")
    with pytest.raises(va.CheckpointError, match="another architecture"):
        va.load_checkpoint(model, path)
    report = va.load_checkpoint(model, path, prefix=prefix)
    assert report.prefix == f"{taken}backbone."
    assert f"2 left aside: {taken}head.weight, {taken}backbones" in str(report)
    assert_same(model, trained.state_dict())
    with pytest.raises(va.CheckpointError, match=r"prefix 'body.' begins none of its keys, which begin (backb|module)"):
        va.load_checkpoint(model, path, prefix="body.")


def test_the_report_separates_what_is_new_missing_left_over_and_of_another_shape(trained, tmp_path):
    state = trained.state_dict()
    del state["0.bias"]
    state["extra.weight"] = torch.zeros(2)
    state["1.weight"] = torch.zeros(5)
    path, model = saved(state, tmp_path), small_network()
    va.insert_(model, names="1", example_input=(1, 3, 8, 8))
    before = copied(model)
    with pytest.raises(va.CheckpointError) as caught:
        va.load_checkpoint(model, path)
    for part in ("nothing was loaded", "7 new", "1 missing", "1 unexpected", "(model (8,), checkpoint (5,))"):
        assert part in str(caught.value)
    assert_same(model, before)

    report = va.load_checkpoint(model, path, strict=False)
    assert (report.missing, report.unexpected, len(report.new)) == (("0.bias",), ("extra.weight",), 7)
    assert set(report.loaded) == set(trained.state_dict()) - {"0.bias", "1.weight"}
    assert torch.equal(model[0].bias, before["0.bias"])


def test_another_class_count_is_refused_with_the_remedy_and_the_remedy_works(trained, tmp_path):
    path, model = saved(trained.state_dict(), tmp_path), small_network(classes=5)
    with pytest.raises(va.CheckpointError, match=r'trained for 3 classes and the model has 5: .*fresh=\["4\.\*"\]'):
        va.load_checkpoint(model, path)
    head = model[4].weight.clone()
    assert va.load_checkpoint(model, path, fresh=["4.*"]).new == ("4.weight", "4.bias")
    assert torch.equal(model[4].weight, head)
    with pytest.raises(ValueError, match="fresh: 'head"):
        va.load_checkpoint(model, path, fresh=["head.*"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.zeros(1)], "holds a list, expected a dictionary of tensors"),
        ({"epoch": 3, "names": ["a"]}, "holds no weights.*the file has epoch, names"),
        ({"other.gamma": torch.zeros(1)}, "another architecture; the model has weight, bias; the checkpoint has other"),
        ({"bias": torch.ones(3), "weight": torch.zeros(3, 2).to_sparse()}, "to run 'torch._utils._rebuild_sparse"),
        ({"bias": torch.ones(3), "weight": torch.zeros(3, 2, dtype=torch.int8)}, "weight is whole-number there and fl"),
        ({"_orig_mod.weight": torch.ones(3, 2), "weight": torch.ones(3, 2)}, "several tensors for one name.*weight"),
    ],
)
def test_a_file_of_something_else_is_refused_before_anything_is_loaded(content, message, tmp_path):
    model = nn.Linear(2, 3)
    before = copied(model)
    with pytest.raises(va.CheckpointError, match=message):
        va.load_checkpoint(model, saved(content, tmp_path))
    assert_same(model, before)


def test_what_cannot_be_written_into_leaves_the_model_as_it_was(tmp_path):
    model = nn.Linear(2, 2)
    model.odd = nn.Buffer(torch.ones(1).expand(3))
    before = copied(model)
    path = saved({"weight": torch.ones(2, 2), "bias": torch.ones(2), "odd": torch.zeros(3)}, tmp_path)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor refers to a single memory"):
        va.load_checkpoint(model, path)
    assert_same(model, before)
    for empty in (nn.Linear(2, 2, device="meta"), nn.LazyLinear(2)):
        with pytest.raises(ValueError, match="model has tensors without values"):
            va.load_checkpoint(empty, path)


def test_loading_before_or_after_insertion_gives_the_same_model(tmp_path):
    torch.manual_seed(0)
    source = timm.create_model("resnet20_a", num_classes=10)
    path, models = saved(source.state_dict(), tmp_path), [timm.create_model("resnet20_a").eval() for _ in range(2)]
    va.load_checkpoint(models[0], path)
    for model in models:
        va.insert_(model, stages=-1)
    report = va.load_checkpoint(models[1], path)
    assert (set(report.new), report.missing) == (inserted_keys(models[1]), ())
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(models[0](x), models[1](x))
    assert torch.equal(models[0](x), source.eval()(x))

    # What was trained with blocks goes into a model with blocks, all of it.
    nn.init.normal_(va.inserted(models[1])["layer3.2"].attn.proj.weight, std=0.1)
    path = saved(models[1].state_dict(), tmp_path)
    assert not va.load_checkpoint(models[0], path).new
    assert torch.equal(models[0](x), models[1](x))
    with pytest.raises(va.CheckpointError, match=r"saved with blocks inserted at 'layer3.2': insert_\(model, names="):
        va.load_checkpoint(timm.create_model("resnet20_a"), path)


def test_a_block_in_part_is_missing_and_one_that_is_not_there_is_new(tmp_path):
    model = small_network()
    va.insert_(model, names=["0", "1"], num_heads=2, example_input=(1, 3, 8, 8))
    state = model.state_dict()
    whole = {key: value for key, value in state.items() if not key.startswith("1.inserted.")}
    assert set(va.load_checkpoint(model, saved(whole, tmp_path)).new) == state.keys() - whole.keys()
    path = saved({key: value for key, value in whole.items() if key != "0.inserted.gate"}, tmp_path)
    with pytest.raises(va.CheckpointError, match=r"1 missing in the checkpoint: 0\.inserted\.gate"):
        va.load_checkpoint(model, path)


def test_loading_before_or_after_replacement_leaves_the_same_model_behind(tmp_path):
    torch.manual_seed(1)
    source = timm.create_model("resnet20", num_classes=10)
    path, models = saved(source.state_dict(), tmp_path), [timm.create_model("resnet20") for _ in range(2)]
    va.load_checkpoint(models[0], path)
    for model in models:
        va.replace_(model, names="layer3.1.conv2", num_heads=2)
    report = va.load_checkpoint(models[1], path)
    assert (report.replaced, report.unexpected) == (("layer3.1.conv2.weight",), ())
    assert (set(report.new), "layer3.1.conv2.weight" in report.loaded) == (inserted_keys(models[1]), False)
    for model in models:
        va.remove_(model)
        assert_same(model, source.state_dict())


BLOCK = {"num_heads": 4, "pattern": va.Window(4), "position": va.RelPosDecomposed(4), "scale": 0.3, "num_kv_heads": 2}


def with_block(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU())
    va.insert_(model, names="0", example_input=(1, 3, 8, 8), **{**BLOCK, **options})
    return model


def saved_block(form, folder, model):
    if form == "safetensors":
        state = model.state_dict()
        write_saved(folder / "net.safetensors", Saved(state, (), arguments=arguments_of(state)))
        return folder / "net.safetensors"
    state = nn.DataParallel(model).state_dict() if form == "parallel" else model.state_dict()
    return saved({"state_dict": dict(state) if form == "plain" else state, "epoch": 3}, folder)


OTHERS = [
    ({"num_heads": 8, "num_kv_heads": 4, "position": None, "key_dim": 4, "value_dim": 4}, "num_heads=4 in .* and 8"),
    ({"pattern": va.Grid(4)}, r"pattern=Window\(size=4, shift=0\) in the file and Grid\(size=4\) in the model"),
    ({"position": va.Rope2d()}, r"position=RelPosDecomposed\(feat_size=None\) in the file and Rope2d"),
    ({"scale": None}, "scale=0.3 in the file and its default in the model"),
    ({"causal": True}, "causal=its default in the file and True in the model"),
]


@pytest.mark.parametrize("form", ["torch", "parallel", "safetensors"])
@pytest.mark.parametrize(("other", "said"), OTHERS)
def test_blocks_that_shapes_do_not_tell_apart_are_refused_by_name(form, other, said, tmp_path):
    path, model = saved_block(form, tmp_path, with_block()), with_block(**other)
    before = copied(model)
    with pytest.raises(va.CheckpointError, match=rf"1 made otherwise: 0\.inserted\.attn has .*{said}"):
        va.load_checkpoint(model, path)
    assert_same(model, before)
    report = va.load_checkpoint(model, path, strict=False)
    assert (len(report.differing), report.unchecked) == (1, ())
    report = va.load_checkpoint(with_block(), path)
    assert (report.differing, report.unchecked) == ((), ())


def test_what_a_file_does_not_say_of_its_blocks_is_said(tmp_path):
    report = va.load_checkpoint(with_block(pattern=va.Grid(4)), saved_block("plain", tmp_path, with_block()))
    assert report.unchecked == ("0.inserted.attn",)
    assert "heads and pattern not compared, as the file does not say them: 0.inserted.attn" in str(report)


def test_a_block_keeps_its_keys_and_says_what_it_is_by_itself(tmp_path):
    block = va.Attention2d(8, 2)
    assert list(block.state_dict()) == ["qkv.weight", "qkv.bias", "proj.weight", "proj.bias"]
    path = saved(block.state_dict(), tmp_path)
    with pytest.raises(va.CheckpointError, match="the block has num_heads=2 in the file and 4 in the model"):
        va.load_checkpoint(va.Attention2d(8, 4), path)
    # An implementation is none of a block's properties, nor is what happens in training alone.
    assert va.load_checkpoint(va.Attention2d(8, 2, impl="bmm", attn_drop=0.1), path).unchecked == ()
    with pytest.raises(va.CheckpointError, match="attention='linear' in the file and its default in the model"):
        va.load_checkpoint(block, saved(va.LinearAttention2d(8, 2).state_dict(), tmp_path))


@pytest.mark.parametrize("said", [3, {"block": 3}, {"block": {"num_heads": 4}}, {"block": {3: "4"}}])
def test_what_is_no_word_on_a_block_is_refused(said, tmp_path):
    block = va.Attention2d(8, 2)
    state = block.state_dict()
    state._metadata[""] = said
    with pytest.raises(va.CheckpointError, match="damaged in what it says of its blocks"):
        va.load_checkpoint(block, saved(state, tmp_path))

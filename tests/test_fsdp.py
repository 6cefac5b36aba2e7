"""Networks that FSDP2 has sharded: checkpoints go in, adapters come out, and files of shards are refused by name."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import vision_attn as va
from vision_attn.networks.safe import read_checkpoint

fsdp = pytest.importorskip("torch.distributed.fsdp")
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")

#: pytorch#136336 and others: plain tensors and DTensors are not mixed, and DTensors have no numpy().
IMAGES = (2, 3, 8, 8)


@pytest.fixture(autouse=True)
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 7, 1)).eval()


def sharded(model, *parts):
    for part in (*parts, model):
        fsdp.fully_shard(part)
    return model


def complete(model):
    return {
        key: getattr(value, "full_tensor", lambda value=value: value)() for key, value in model.state_dict().items()
    }


def assert_same(state, other):
    assert state.keys() == other.keys()
    assert all(torch.equal(value, other[key]) for key, value in state.items())


@pytest.mark.parametrize("form", ["file.pth", "file.safetensors"])
def test_a_checkpoint_is_loaded_into_a_sharded_model(form, tmp_path):
    source, model = network(1), network()
    if form == "file.pth":
        torch.save(source.state_dict(), tmp_path / form)
    else:
        from safetensors.torch import save_file

        save_file(source.state_dict(), tmp_path / form)
    sharded(model, model[0])
    assert len(va.load_checkpoint(model, tmp_path / form).loaded) == 9
    assert_same(complete(model), source.state_dict())
    images = torch.randn(IMAGES)
    assert torch.equal(model(images), source(images))


def test_a_checkpoint_that_does_not_fit_leaves_a_sharded_model_as_it_was(tmp_path):
    model = sharded(network())
    before = {key: value.clone() for key, value in complete(model).items()}
    torch.save({**network(1).state_dict(), "3.bias": torch.ones(5)}, tmp_path / "file.pth")
    with pytest.raises(va.CheckpointError, match=r"1 of another shape: 3.bias \(model \(7,\), checkpoint \(5,\)\)"):
        va.load_checkpoint(model, tmp_path / "file.pth")
    assert_same(complete(model), before)


@pytest.mark.parametrize("apart", [False, True])
def test_the_adapter_of_a_sharded_model_is_that_of_the_plain_one(apart, tmp_path):
    model = network()
    va.insert_(model, names="0", num_heads=2, example_input=IMAGES)
    for parameter in model[0].inserted.parameters():
        nn.init.normal_(parameter)
    plain = va.save_adapter(model, tmp_path / "plain.safetensors", also="3.*")
    sharded(model, *([model[0].inserted, model[0]] if apart else []))
    path = va.save_adapter(model, tmp_path / "sharded.safetensors", also="3.*")
    assert path.read_bytes() == plain.read_bytes()
    other, images = network(), torch.randn(IMAGES)
    va.load_adapter_(other, path)
    assert torch.equal(other(images), model(images))
    with pytest.raises(va.SiteError, match="is wrapped in FSDPSequential: insert into the network and wrap it then"):
        va.load_adapter_(sharded(network()), path)


def test_a_file_of_sharded_tensors_is_refused_with_the_function_that_gathers_them(tmp_path):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model = sharded(network(1))
    torch.save(model.state_dict(), tmp_path / "file.pth")
    call = r"get_model_state_dict\(model, options=StateDictOptions\(full_state_dict=True\)\)"
    with pytest.raises(va.CheckpointError, match=rf"to run 'torch._tensor._rebuild_from_type.*{call}"):
        va.load_checkpoint(network(), tmp_path / "file.pth")
    torch.save(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), tmp_path / "file.pth")
    assert_same(dict(read_checkpoint(tmp_path / "file.pth")), network(1).state_dict())

"""Networks sharded by FSDP2, and networks in DistributedDataParallel.

FSDP2: loading checkpoints, saving adapters, and errors for files that contain shards. DistributedDataParallel: changes
that the wrapper would not synchronize are refused by name.
"""

import gc

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from small_networks import NarrowResNet, assert_same
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import vision_attn as va
from vision_attn.networks.safe import read_file

fsdp = pytest.importorskip("torch.distributed.fsdp")
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")

#: pytorch#136336 and others: plain tensors and DTensors are not mixed, and DTensors have no numpy().
IMAGES = (2, 3, 8, 8)


@pytest.fixture(autouse=True)
def one_process():
    gc.freeze()  # the library collects garbage to find wrappers
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 7, 1)).eval()


def insert_block(model, seed):
    va.insert_(model, names="0", num_heads=2, example_input=IMAGES)
    torch.manual_seed(seed)
    for parameter in model[0].inserted.parameters():
        nn.init.normal_(parameter)
    return model


def sharded(model, *parts):
    for part in (*parts, model):
        fsdp.fully_shard(part)
    return model


def complete(model):
    whole = {key: value.full_tensor() for key, value in model.state_dict().items() if hasattr(value, "full_tensor")}
    return {**model.state_dict(), **whole}


@pytest.mark.parametrize("write", [lambda state, path: torch.save(state, f"{path}.pth"), save_file])
def test_a_checkpoint_is_loaded_into_a_sharded_model(write, tmp_path):
    source, model, images = network(1), network(), torch.randn(IMAGES)
    write(source.state_dict(), tmp_path / "file.safetensors")
    (path,) = tmp_path.iterdir()
    sharded(model, model[0])
    assert len(va.load_checkpoint_(model, path).loaded) == 9
    assert_same(complete(model), source.state_dict())
    assert torch.equal(model(images), source(images))
    torch.save({**network(2).state_dict(), "3.bias": torch.ones(5)}, tmp_path / "other.pth")
    with pytest.raises(va.errors.CheckpointError, match=r"3.bias .*\(7,\), .*\(5,\)"):
        va.load_checkpoint_(model, tmp_path / "other.pth")
    assert_same(complete(model), source.state_dict())


@pytest.mark.parametrize("apart", [False, True])
def test_the_adapter_of_a_sharded_model_equals_that_of_the_plain_model(apart, tmp_path):
    model, other, images = insert_block(network(), 3), network(), torch.randn(IMAGES)
    plain = va.save_adapter(model, tmp_path / "plain.safetensors", also="3.*")
    sharded(model, *([model[0].inserted, model[0]] if apart else []))
    path = va.save_adapter(model, tmp_path / "sharded.safetensors", also="3.*")
    assert path.read_bytes() == plain.read_bytes()
    va.load_adapter_(other, path)
    assert torch.equal(other(images), model(images))
    with pytest.raises(va.errors.SiteError, match=r"FSDPSequential, .*Call va.load_adapter_ on the network before"):
        va.load_adapter_(sharded(network()), path)


def test_an_error_for_sharded_tensors_names_the_function_that_gathers_them(tmp_path):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model, path = sharded(network(1)), tmp_path / "file.pth"
    torch.save(model.state_dict(), path)
    with pytest.raises(va.errors.CheckpointError, match=r"DTensor instead of a tensor\. .*full_tensor\(\)"):
        va.load_checkpoint_(network(), path)
    torch.save(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), path)
    assert_same(dict(read_file(path).content), network(1).state_dict())


def save_and_load_in_one_of_two(rank, folder):
    """Run in each of two processes: every parameter is divided between them."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    model, images = insert_block(network(1), 4), torch.randn(IMAGES, generator=torch.Generator().manual_seed(3))
    expected = model(images).detach()
    if rank == 0:
        va.save_adapter(model, f"{folder}/plain.safetensors", also="3.*")
        save_file(network(2).state_dict(), f"{folder}/other.safetensors")
    gate = va.measure_blocks(model, images)["0"]["gate"]
    sharded(model, model[0].inserted, model[0])
    assert va.measure_blocks(model, images)["0"]["gate"] == pytest.approx(gate)
    assert model[0].weight.to_local().shape[0] == 4, "half of the channels"
    torch.testing.assert_close(model(images), expected)
    va.save_adapter(model, f"{folder}/sharded-{rank}.safetensors", also="3.*")
    dist.barrier()
    assert len(va.load_checkpoint_(model, f"{folder}/other.safetensors").loaded) == 9
    loaded, expected = complete(model), network(2).state_dict()
    assert all(torch.equal(loaded[key], expected[key]) for key in ("3.weight", "1.weight"))
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_save_and_load_a_sharded_model(tmp_path):
    torch.multiprocessing.spawn(save_and_load_in_one_of_two, (str(tmp_path),), nprocs=2)
    plain = (tmp_path / "plain.safetensors").read_bytes()
    assert all((tmp_path / f"sharded-{rank}.safetensors").read_bytes() == plain for rank in range(2))


# --- DistributedDataParallel ------------------------------------------------------------------------------------------

#: Site and options of a block.
SITE = {"names": "layer2", "num_heads": 2, "example_input": (1, 3, 32, 32)}


def resnet(insert=False):
    model = NarrowResNet()
    if insert:
        va.insert_(model, **SITE)
    return model


CALLS = {
    "va.insert_": lambda model, path: va.insert_(model, **SITE),
    "va.replace_": lambda model, path: va.replace_(model, names="layer3.0.conv2", num_heads=2),
    "va.load_adapter_": lambda model, path: va.load_adapter_(model, va.save_adapter(resnet(True), path)),
    "va.swap_": lambda model, path: va.swap_(model),
    "va.unswap_": lambda model, path: va.unswap_(model),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("inside", [False, True])
def test_modules_are_not_changed_after_wrapping(call, inside, tmp_path):
    """DistributedDataParallel does not average the gradients of parameters that it does not know."""
    model = resnet()
    wrapper = DistributedDataParallel(nn.Sequential(model))
    with pytest.raises(va.errors.SiteError, match=f"wrapped in DistributedDataParallel.* {call} on the network before"):
        CALLS[call](model if inside else wrapper, tmp_path / "adapter.safetensors")


def test_parameters_are_not_unfrozen_after_wrapping():
    model = resnet(True)
    va.freeze_backbone_(model)
    wrapper, message = DistributedDataParallel(model), r"DistributedDataParallel.* va\.(un)?freeze_backbone_ on"
    for call in (va.unfreeze_backbone_, lambda given: va.freeze_backbone_(given, also_train="fc.*")):
        for given in (wrapper, model, model.layer1):
            if given is not model.layer1 or call is va.unfreeze_backbone_:
                with pytest.raises(ValueError, match=message):
                    call(given)
    assert not model.layer1[0].conv1.weight.requires_grad
    before = [p.requires_grad for p in model.parameters()]
    va.freeze_backbone_(wrapper)  # the same parameters
    assert [p.requires_grad for p in model.parameters()] == before


def test_a_network_that_was_taken_out_of_its_wrapper_can_be_changed():
    model = resnet()
    wrapper = DistributedDataParallel(model)
    wrapper.itself = [wrapper]  # a cycle, so that only the garbage collector frees it
    del wrapper
    va.insert_(model, **SITE)
    assert len(va.inserted_blocks(model)) == 1

"""Networks in DistributedDataParallel: changes that the wrapper would not synchronize are refused by name."""

import pytest
import torch.distributed as dist
from small_networks import NarrowResNet
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import vision_attn as va

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
SITE = {"names": "layer2", "num_heads": 2, "example_input": (1, 3, 32, 32)}


@pytest.fixture(autouse=True)
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def network(insert=False):
    model = NarrowResNet()
    if insert:
        va.insert_(model, **SITE)
    return model


def adapter(folder):
    return va.save_adapter(network(True), folder / "adapter.safetensors")


CALLS = {
    "va.insert_": lambda model, folder: va.insert_(model, **SITE),
    "va.replace_": lambda model, folder: va.replace_(model, names="layer3.0.conv2", num_heads=2),
    "va.load_adapter_": lambda model, folder: va.load_adapter_(model, adapter(folder)),
    "va.swap_": lambda model, folder: va.swap_(model),
    "va.unswap_": lambda model, folder: va.unswap_(model),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("inside", [False, True])
def test_modules_are_not_changed_after_wrapping(call, inside, tmp_path):
    """DistributedDataParallel does not average the gradients of parameters that it does not know."""
    model = network()
    wrapper = DistributedDataParallel(nn.Sequential(model))
    with pytest.raises(
        va.errors.SiteError, match=rf"wrapped in DistributedDataParallel.* {call} on the network before"
    ):
        CALLS[call](model if inside else wrapper, tmp_path)


def test_parameters_are_not_unfrozen_after_wrapping():
    model = network(True)
    va.freeze_backbone_(model)
    wrapper = DistributedDataParallel(model)
    for call in (va.unfreeze_backbone_, lambda given: va.freeze_backbone_(given, also_train="fc.*")):
        for given in (wrapper, model, model.layer1):
            if given is not model.layer1 or call is va.unfreeze_backbone_:
                with pytest.raises(
                    ValueError, match=r"DistributedDataParallel.* va\.(un)?freeze_backbone_ on the network"
                ):
                    call(given)
    assert not model.layer1[0].conv1.weight.requires_grad
    before = [p.requires_grad for p in model.parameters()]
    va.freeze_backbone_(wrapper)  # the same parameters
    assert [p.requires_grad for p in model.parameters()] == before


def test_a_network_that_was_taken_out_of_its_wrapper_can_be_changed():
    model = network()
    wrapper = DistributedDataParallel(model)
    wrapper.itself = [wrapper]  # a cycle, so that only the garbage collector frees it
    del wrapper
    va.insert_(model, **SITE)
    assert len(va.inserted_blocks(model)) == 1

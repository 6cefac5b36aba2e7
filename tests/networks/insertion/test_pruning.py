"""Pruning of networks with blocks, by torch's masks and by torch-pruning, which removes channels."""

import copy
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from small_networks import resnet
from torch import nn
from torch.nn.utils import prune

import vision_attn as va

PAGE = Path(__file__).resolve().parents[3] / "docs" / "insert.md"
#: Number of channels at the sites, and in the network of the page.
CHANNELS, CHANNELS_OF_PAGE = 32, 256
SHAPE = (1, 3, 128, 128)

#: Warnings of torch-pruning.
pytestmark = pytest.mark.filterwarnings("ignore:Unwrapped parameters", "ignore::DeprecationWarning")


network = partial(resnet, num_classes=10, zero_init_last=False)


def with_blocks(**options):
    """Return a network whose blocks change the output."""
    model = network()
    va.insert_(model, example_input=SHAPE, **options)
    for block in va.inserted_blocks(model).values():
        nn.init.normal_(block.attn.proj.weight, std=0.02)
    return model


def assert_adapter_restores(model, images, expected, path):
    va.save_adapter(model, path)
    va.remove_(model)
    assert not torch.equal(model(images), expected)
    va.load_adapter_(model, path)
    assert torch.equal(model(images), expected)


@pytest.mark.parametrize("of_blocks", [False, True])
@torch.no_grad()
def test_torch_masks_on_the_network_or_its_blocks(of_blocks, tmp_path):
    model, images = with_blocks(stages=-2), torch.randn(SHAPE)
    roots = va.inserted_blocks(model).values() if of_blocks else [model.layer1]
    masked = [(m, "weight") for root in roots for m in root.modules() if isinstance(m, nn.Conv2d)]
    prune.global_unstructured(masked, pruning_method=prune.L1Unstructured, amount=0.5)
    pruned, clone = model(images), copy.deepcopy(model)
    va.remove_(clone)
    assert torch.equal(clone(images), network()(images)) == of_blocks
    for module, name in masked:
        prune.remove(module, name)
    assert torch.equal(model(images), pruned)
    assert_adapter_restores(model, images, pruned, tmp_path / "adapter.safetensors")


def prune_channels(model, *ignored):
    tp = pytest.importorskip("torch_pruning")
    importance, layers = tp.importance.MagnitudeImportance(), [model.fc, *ignored]
    options = {"importance": importance, "pruning_ratio": 0.3, "round_to": 8, "ignored_layers": layers}
    tp.pruner.MagnitudePruner(model, torch.randn(SHAPE), **options).step()
    return model


#: If the blocks are not ignored, the first call never returns (Torch-Pruning#430).
OPTIONS = [
    {"stages": [-2, -1], "impl": "bmm", "position": va.RelPosDecomposed(8)},
    {"stages": -2, "output_gate": True, "kv_stride": 2, "num_kv_heads": 2},
    {"names": "layer3.*.bn2"},
    pytest.param({"names": "layer3.1.conv1"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("options", OPTIONS, ids=repr)
def test_torch_pruning_prunes_around_ignored_blocks(options, tmp_path):
    model, images = with_blocks(**options), torch.randn(SHAPE)
    blocks = va.inserted_blocks(model)
    before = {key: value.clone() for key, value in model.state_dict().items() if ".inserted." in key}
    sites = [module for module in map(model.get_submodule, blocks) if isinstance(module, nn.Conv2d)]
    prune_channels(model, *blocks.values(), *sites)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert model.conv1.out_channels < 64
    expected = model(images)
    expected.sum().backward()
    assert_adapter_restores(model, images, expected, tmp_path / "adapter.safetensors")


def test_a_block_rejects_a_pruned_number_of_channels():
    """Test that a convolution at a site is pruned although its block is ignored (Torch-Pruning#503)."""
    model = with_blocks(names="layer3.1.conv1")
    prune_channels(model, *va.inserted_blocks(model).values())
    with pytest.raises(ValueError, match=rf"\(batch, {CHANNELS}, height, width\), got \(1, 1"):
        model(torch.randn(SHAPE))


@pytest.mark.slow
def test_the_code_of_the_page_runs():
    pytest.importorskip("torch_pruning")
    codes, page = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.M | re.S), {}
    exec(next(code for code in codes if "torch_pruning" in code), page)
    site = page["model"].layer3[1]
    assert site.conv2.out_channels == CHANNELS_OF_PAGE > site.conv1.out_channels
    assert page["model"](torch.randn(1, 3, 224, 224)).shape == (1, 10)

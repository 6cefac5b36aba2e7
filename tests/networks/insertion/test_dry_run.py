"""Dry runs of an insertion: counts equal measurements, and nothing changes."""

from functools import partial

import pytest
import timm
import torch
import torchvision
from small_networks import Net, assert_same, copied, resnet
from torch import nn

import vision_attn as va
from vision_attn.networks.inspection.costs import count_saved_bytes


def bytes_really_saved(block, x, impl):
    """Return the bytes that autograd saves in a forward pass on the CPU, without parameters and buffers."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*block.parameters(), *block.buffers())}
    storages = {}

    def hold(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
        return tensor

    with va.use_impl(block, impl), torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        block(x)
    return sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in own)


#: The window needs padding.
OPTIONS = [
    {"pattern": va.Window(5)}, {"pattern": va.Neighborhood(3)}, {"kv_stride": 2},
    {"position": va.RelPosDecomposed((12, 12))}, {"position": va.RelPosTable((12, 12)), "attn_drop": 0.1},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_counted_bytes_equal_those_that_autograd_saves(options, monkeypatch):
    """Compare the counts with a GPU's, which adds relative positions to queries and keys; a CPU computes chunks."""
    monkeypatch.setattr("vision_attn.attention.dispatch.CHUNKED_DEVICES", ())
    for dtype, others in ((torch.float32, ("einsum", "einx")), (torch.bfloat16, ())):
        block = va.AttentionBlock2d(32, 4, dtype=dtype, **options)
        x = torch.randn(2, 32, 12, 12, dtype=dtype, requires_grad=True)
        for counted_as, impls in (("bmm", ("bmm", *others)), ("sdpa", ("sdpa",))):
            with va.use_impl(block, counted_as):
                counted = count_saved_bytes(block, tuple(x.shape), dtype)
            for impl in impls:
                assert counted == pytest.approx(bytes_really_saved(block, x, impl), rel=0.02), impl


def with_gradients(net, x):
    """Run a network that computes gradients, and attention with values of another width."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = net.stem(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
    q = (y.mean() * gradient).detach().flatten(2).mT
    return nn.functional.scaled_dot_product_attention(q, q, q[..., :2])


def test_fused_kernels_and_several_images_are_counted():
    timms = timm.create_model("vit_tiny_patch16_224", depth=1)
    torchs = torchvision.models.VisionTransformer(224, 16, 1, 4, 192, 768)
    # MACs of the patch embedding, of a block (12c² per token and 2c per pair of tokens), and of the head.
    expected = 196 * 768 * 192 + 197 * 12 * 192**2 + 2 * 192 * 197**2 + 192 * 1000
    for model, images in ((timms, 1), (torchs, 2)):
        assert va.insert_(model, dry_run=True, example_input=(images, 3, 224, 224)).model_cost.macs == expected
    # MACs of a convolution and its gradient, and of the products of queries, keys and values.
    net = Net(with_gradients, stem=nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(inplace=True)))
    cost = va.insert_(net, names="stem.0", example_input=(2, 3, 4, 4)).model_cost
    assert cost == (3 * 8 + 8, 2 * 16 * 3 * 8 + 16**2 * (3 + 2))


def test_small_and_large_feature_maps_raise_warnings():
    (small,) = va.insert_(resnet(), dry_run=True, example_input=(1, 3, 32, 32)).warnings
    assert small.startswith("attention has little effect on small feature maps: 'layer3.1' (2×2), 'layer4.1' (1×1). ")
    report = va.insert_(resnet(), dry_run=True)
    (large,) = report.warnings
    assert large.startswith("full attention at 'act1' (112×112) compares")
    assert f"warning: {large}" in str(report).splitlines()


def test_a_dry_run_changes_nothing_and_its_costs_are_those_of_the_insertion():
    model = timm.create_model("resnet20")
    modules, state = dict(model.named_modules()), copied(model)
    dry = va.insert_(model, stages=[0, -1], num_heads=4, dry_run=True)
    replaced = va.replace_(model, names="layer3.*.conv2", num_heads=4, dry_run=True)
    assert dict(model.named_modules()) == modules
    assert_same(model.state_dict(), state)
    assert all(block.cost.saved_bytes for block in (*dry.blocks, *replaced.blocks))
    assert f" {dry.blocks[0].cost.saved_bytes / 2**20:.1f}\n" in str(dry)
    tiled = Net(lambda net, x: net.body(x.view(-1, 3, 32, 32)), body=model)
    (tiles,) = va.insert_(tiled, names="body.layer1", num_heads=4, dry_run=True, example_input=(1, 3, 64, 64)).blocks
    assert tiles.cost.saved_bytes == 4 * dry.blocks[0].cost.saved_bytes
    report = va.insert_(model, stages=[0, -1], num_heads=4)
    assert (report.blocks, report.model_cost) == (dry.blocks, dry.model_cost)
    va.remove_(model)
    assert va.replace_(model, names="layer3.*.conv2", num_heads=4).macs == replaced.macs


def test_stages_counted_from_the_end_have_an_effect():
    # The head of a ViT reads only the class token of the last block.
    make = partial(timm.create_model, "vit_tiny_patch16_224", embed_dim=48, depth=3, img_size=64)
    both = ["blocks.0", "blocks.1"]
    for stages, sites in ((-1, both[1:]), ([-2, -1], both), ([0, -1], both)):
        report = va.insert_(make(), stages=stages, num_heads=3)
        assert [block.site for block in report.blocks if block.target.used] == sites


def test_a_convolution_with_two_strides_has_its_channels_second():
    (block,) = va.insert_(nn.Sequential(nn.Conv2d(1, 16, 3, (2, 1), 1)), names="0", example_input=(1, 1, 32, 32)).blocks
    assert (block.target.layout, block.channels, block.size) == ("b c h w", 16, "16×32")


def test_networks_with_flex_blocks_are_inspected():
    """torch's counter of operations does not support FlexAttention."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU())
    x = torch.rand(1, 3, 16, 16)
    va.insert_(model, names="0", impl="flex", num_heads=1, example_input=x)
    report = va.insert_(model, names="2", num_heads=1, example_input=x)
    assert report.verified == "verified in evaluation and training mode"
    assert va.inserted_blocks(model)["0"].attn.impl == "flex"

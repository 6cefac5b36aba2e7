"""Inspection of a network before insertion: counts equal measurements, and proposals can be executed."""

import dataclasses
from functools import cache

import pytest
import timm
import torch
import torchvision
from torch import nn

import vision_attn as va
import vision_attn.networks.models
from vision_attn.attention import dispatch
from vision_attn.attention.blocks import AttentionBlock2d, use_impl
from vision_attn.networks.inspection import count_saved_bytes, inspect_model

#: Inspections are cached for several tests.
look = cache(inspect_model)


def bytes_really_saved(block, x, impl):
    """Return the bytes that autograd saves in a forward pass on the CPU, without parameters and buffers."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*block.parameters(), *block.buffers())}
    storages = {}

    def hold(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
        return tensor

    with use_impl(block, impl), torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        block(x)
    return sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in own)


@pytest.mark.parametrize(
    "options",
    [
        {"pattern": va.Window(5)},  # This window needs padding.
        {"pattern": va.Neighborhood(3)},
        {"kv_stride": 2},
        {"position": va.RelPosDecomposed(feat_size=(12, 12))},
        {"position": va.RelPosTable(feat_size=(12, 12)), "attn_drop": 0.1},
    ],
    ids=str,
)
def test_counted_bytes_equal_those_that_autograd_saves(options, monkeypatch):
    """Compare the counts with a GPU's, which adds relative positions to queries and keys; a CPU computes chunks."""
    monkeypatch.setattr(dispatch, "can_chunk", lambda q: False)
    for dtype in (torch.float32, torch.bfloat16):
        block = AttentionBlock2d(32, 4, dtype=dtype, **options)
        x = torch.randn(2, 32, 12, 12, dtype=dtype, requires_grad=True)
        for impl, counted_as in (("bmm", "bmm"), ("einsum", "bmm"), ("einx", "bmm"), ("sdpa", "sdpa")):
            with use_impl(block, counted_as):
                counted = count_saved_bytes(block, tuple(x.shape), dtype)
            assert counted == pytest.approx(bytes_really_saved(block, x, impl), rel=0.02), impl


def test_buffers_saved_by_autograd_are_not_counted():
    # Autograd saves only the input.
    assert count_saved_bytes(nn.BatchNorm2d(512).eval(), (2, 512, 1, 1)) == 2 * 512 * 4


def test_the_network_itself_is_counted():
    model, products = timm.create_model("resnet20").eval(), []
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.register_forward_hook(
                lambda module, args, out: products.append(out.numel() * module.weight[0].numel())
            )
    found = look("resnet20")
    with torch.no_grad():
        model(torch.zeros(1, 3, 32, 32))
    assert found.model_cost == (sum(p.numel() for p in model.parameters()), sum(products))
    assert [site.site for site in found.sites] == ["layer1", "layer2", "layer3"]


class Gradients(nn.Module):
    """A network that computes gradients in its forward pass, and attention with values of another width."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(inplace=True))

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = self.stem(x)
            (gradient,) = torch.autograd.grad(y.sum(), x)
        q = (y.mean() * gradient).detach().flatten(2).mT
        return nn.functional.scaled_dot_product_attention(q, q, q[..., :2])


def test_fused_kernels_and_several_images_are_counted():
    timms = timm.create_model("vit_tiny_patch16_224", depth=1)
    torchs = torchvision.models.VisionTransformer(224, 16, 1, 4, 192, 768)
    # MACs of the patch embedding, of a block (12c² per token and 2c per pair of tokens), and of the head.
    expected = 196 * 768 * 192 + 197 * 12 * 192**2 + 2 * 192 * 197**2 + 192 * 1000
    for model, images in ((timms, 1), (torchs, 2)):
        assert inspect_model(model, batch_size=1, example_input=(images, 3, 224, 224)).model_cost.macs == expected
    # MACs of a convolution and its gradient, and of the products of queries, keys and values.
    cost = va.insert_(Gradients(), names="stem.0", example_input=(2, 3, 4, 4)).model_cost
    assert cost == (3 * 8 + 8, 2 * 16 * 3 * 8 + 16**2 * (3 + 2))


def test_the_image_has_the_input_shape_of_the_network():
    gray_model = timm.create_model("resnet18", in_chans=1)
    assert inspect_model(gray_model, input_size=(96, 64), batch_size=1).input_shape == (1, 1, 96, 64)


def test_small_feature_maps_and_high_memory_raise_warnings():
    (small,) = look("resnet18", input_size=32).warnings
    assert small.startswith("attention has little effect on small feature maps: 'layer3' (2×2), 'layer4' (1×1). ")
    large = look("resnet18", batch_size=1).warnings
    assert [line.partition(" compares")[0] for line in large] == ["full attention at 'act1' (112×112)"]
    found = look("resnet20", impl="sdpa")
    assert dataclasses.replace(found, memory_limit=round(0.2 * 2**30)).warnings == ()
    (warning,) = dataclasses.replace(found, memory_limit=round(0.02 * 2**30)).warnings
    assert warning.startswith("in training, a block saves 0.06 GiB at 'layer1', 0.03 GiB at 'layer2', more than")


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [
        # The last feature map is too small, and the stem has a suitable size but no parameters.
        ("resnet18", 64, [{"stages": [1, 2]}]),
        ("resnet18", 16, []),
        ("resnet18", 224, [{"stages": [-2, -1]}, {"stages": [1], "pattern": va.Window(7)}]),
    ],
)
def test_proposed_stages(name, size, expected):
    found = [dict(proposal.arguments) for proposal in look(name, input_size=size, batch_size=1).proposals]
    assert found == expected


def test_a_proposal_can_be_executed_and_is_printed():
    found = look("resnet20", input_size=96, batch_size=1)
    assert len(found.proposals) == 2
    for proposal in found.proposals:
        call = proposal.call(found.input_shape)
        assert call in str(found)
        report = eval(call, {"va": va, "model": timm.create_model("resnet20")})
        assert (report.parameters, report.macs) == proposal.added
        assert [block.map_size for block in report.blocks] == [site.map_size for site in proposal.sites]


def test_stages_with_a_block_are_not_proposed():
    model = timm.create_model("resnet20")
    va.insert_(model, stages=-1)
    found = inspect_model(model, batch_size=1)
    assert [site.occupied for site in found.sites] == [False, False, True]
    assert [proposal.arguments for proposal in found.proposals] == [{"stages": [0, -2]}]
    assert "layer3 (has a block)" in str(found)
    lines = str(look("resnet20")).splitlines()
    assert lines[0] == "resnet20 on images of 3×32×32: 272,474 parameters, 40,813,184 MACs per image"
    row = "2 layer3 64 8×8 8 16,832 +6.2 % 1,572,864 +3.9 %"
    assert any(" ".join(line.split()).startswith(row) for line in lines)
    text = str(inspect_model("resnet20", num_heads=4, position=va.Rope2d(), batch_size=1))
    assert "va.insert_(model, stages=[-2, -1], num_heads=4, position=va.Rope2d(" in text


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": "resnet21"}, ValueError, "'resnet21' does not exist. Did you mean "),
        ({"model": "resnet20.cifar10.x"}, ValueError, "'resnet20' has no tag 'cifar10.x'. Available: resnet20.cifar10"),
        ({"input_size": (1, 2, 3)}, ValueError, "input_size"),
        ({"input_size": 0}, ValueError, "input_size"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"heads": 3}, TypeError, "heads"),
        (
            {"model": nn.Sequential(nn.Flatten(), nn.Linear(48, 2)), "input_size": 4},
            va.errors.SiteError,
            "declares no stages",
        ),
    ],
)
def test_unsupported_inspections_raise_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        inspect_model(**{"model": "resnet20", **arguments})

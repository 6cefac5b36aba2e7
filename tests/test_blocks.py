"""The block's contract: its parameters, its errors, its memory format, and the residual blocks around it."""

import copy
import pickle

import pytest
import torch
from torch import nn

import vision_attn as va
from vision_attn.attend.registry import _ATTEND


class PlainBmmAttention(nn.Module):
    """The block as a page of torch would write it: these keys, this order of rows, nothing of ours."""

    def __init__(self, channels, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Conv2d(channels, 3 * channels, kernel_size=1)
        self.proj = nn.Conv2d(channels, channels, kernel_size=1)

    def forward(self, x):
        batch, channels, height, width = x.shape
        width_of_head = channels // self.num_heads
        rows = self.qkv(x).reshape(batch, 3, self.num_heads, width_of_head, height * width)
        q, k, v = (rows[:, part].flatten(0, 1).transpose(1, 2) for part in range(3))
        weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)) / width_of_head**0.5, dim=2)
        y = torch.bmm(weights, v).transpose(1, 2)
        return self.proj(y.reshape(batch, channels, height, width))


@pytest.mark.parametrize("impl", va.IMPLS)
def test_a_plain_blocks_state_dict_loads_strictly_and_gives_the_same_output(impl):
    torch.manual_seed(0)
    plain = PlainBmmAttention(16, 4)
    block = va.Attention2d(16, 4, impl=impl)
    block.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(block.state_dict(), strict=True)
    x = torch.randn(2, 16, 8, 5)
    with torch.no_grad():
        torch.testing.assert_close(block(x), plain(x), rtol=0, atol=1e-6)


def test_the_state_dict_is_the_contract():
    shapes = {key: tuple(value.shape) for key, value in va.Attention2d(12, 3).state_dict().items()}
    assert shapes == {
        "qkv.weight": (36, 12, 1, 1),
        "qkv.bias": (36,),
        "proj.weight": (12, 12, 1, 1),
        "proj.bias": (12,),
    }
    assert "qkv.bias" not in va.Attention2d(12, 3, qkv_bias=False).state_dict()


@pytest.mark.parametrize("impl", va.IMPLS)
def test_rows_are_ordered_qkv_then_heads_then_head_dim(impl):
    # Only one row of the projection is not zero: the value of head 1, element 2.
    block = va.Attention2d(8, 2, impl=impl, qkv_bias=False)
    with torch.no_grad():
        block.qkv.weight.zero_()
        block.qkv.weight[2 * 8 + 1 * 4 + 2] = 1.0
        block.proj.weight.copy_(torch.eye(8)[:, :, None, None])
        block.proj.bias.zero_()
        y = block(torch.ones(1, 8, 2, 3))
    assert torch.nonzero(y[0, :, 0, 0]).flatten().tolist() == [6]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"channels": 10, "num_heads": 4},
            "num_heads must divide channels.*got channels=10 and num_heads=4.* 1, 2, 5, 10",
        ),
        ({"channels": 0}, "channels must be a whole number of at least 1; got 0"),
        ({"channels": 8.0}, "channels must be a whole number of at least 1; got 8.0"),
        ({"channels": 8, "num_heads": 0}, "num_heads must be a whole number of at least 1; got 0"),
        ({"channels": 8, "num_heads": True}, "num_heads must be a whole number of at least 1; got True"),
        (
            {"channels": 8, "impl": "flash"},
            "impl must be one of 'einx', 'bmm', 'einsum', 'sdpa', 'flex'.*; got 'flash'",
        ),
        (
            {"channels": 8, "pattern": "spiral"},
            "pattern must be one of 'full', 'rows', 'columns', a Window.* got 'spiral'",
        ),
        ({"channels": 8, "attn_drop": 1.5}, "attn_drop must be a probability between 0 and 1; got 1.5"),
        ({"channels": 8, "proj_drop": -0.1}, "proj_drop must be a probability between 0 and 1; got -0.1"),
    ],
)
def test_bad_arguments_are_refused_at_construction(arguments, message):
    with pytest.raises(ValueError, match=message):
        va.Attention2d(**arguments)


def test_an_argument_that_does_not_exist_is_refused_by_name():
    with pytest.raises(TypeError, match="heads"):
        va.Attention2d(8, heads=2)
    with pytest.raises(TypeError, match="heads"):
        va.AttentionBlock2d(8, heads=2)


@pytest.mark.parametrize("shape", [(2, 7, 4, 4), (8, 4, 4), (1, 2, 8, 4, 4)])
def test_an_input_that_is_no_map_is_refused(shape):
    with pytest.raises(ValueError, match=r"x must be maps of shape \(batch, 8, height, width\); got"):
        va.Attention2d(8, 2)(torch.zeros(shape))


@pytest.mark.parametrize("impl", va.IMPLS)
@pytest.mark.parametrize("block", [va.Attention2d, va.AttentionBlock2d])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_memory_format_in_is_memory_format_out(block, impl, memory_format):
    x = torch.randn(2, 8, 3, 5).contiguous(memory_format=memory_format)
    with torch.no_grad():
        y = block(8, 2, impl=impl)(x)
    assert y.is_contiguous(memory_format=memory_format)


def test_fused_attention_reads_views_of_one_tensor(monkeypatch):
    # In channels-last nothing is copied between the projection and the kernel.
    seen = []

    def spy(q, k, v, **options):
        seen.extend((q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    monkeypatch.setitem(_ATTEND, "sdpa", spy)
    va.Attention2d(16, 2)(torch.randn(2, 16, 5, 6))
    assert len({x.untyped_storage().data_ptr() for x in seen}) == 1
    assert all(x.stride(-1) == 1 for x in seen)


def test_set_impl_reaches_every_block_and_counts_those_that_changed():
    model = nn.Sequential(va.Attention2d(8, 2), va.AttentionBlock2d(8, 2, impl="bmm"), nn.ReLU())
    assert va.set_impl(model, "bmm") == 1
    assert [model[0].impl, model[1].attn.impl] == ["bmm", "bmm"]
    assert va.set_impl(model, "bmm") == 0
    with pytest.raises(ValueError, match="impl must be one of"):
        va.set_impl(model, "flash")
    assert model[0].impl == "bmm"


def test_use_impl_gives_each_block_its_own_back_also_after_an_error():
    model = nn.Sequential(va.Attention2d(8, 2), va.Attention2d(8, 2, impl="bmm"))
    with va.use_impl(model, "einsum"):
        assert [block.impl for block in model] == ["einsum", "einsum"]
    assert [block.impl for block in model] == ["sdpa", "bmm"]
    with pytest.raises(RuntimeError, match="on purpose"), va.use_impl(model, "einsum"):
        raise RuntimeError("on purpose")
    assert [block.impl for block in model] == ["sdpa", "bmm"]


@pytest.mark.parametrize("block", [va.AttentionBlock2d, va.ConvBlock2d, va.SqueezeExciteBlock2d])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_closed_gate_is_the_identity_bit_for_bit(block, dtype):
    torch.manual_seed(0)
    x = torch.randn(2, 16, 4, 5, dtype=dtype) * 100
    y = block(16, dtype=dtype)(x)
    assert y.dtype == dtype
    assert torch.equal(y, x)


@pytest.mark.parametrize("block", [va.AttentionBlock2d, va.ConvBlock2d, va.SqueezeExciteBlock2d])
def test_the_gate_learns_first_and_the_branch_follows(block):
    torch.manual_seed(0)
    module = block(16)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    x, target = torch.randn(4, 16, 3, 3), torch.randn(4, 16, 3, 3)
    for step in range(2):
        optimizer.zero_grad()
        (module(x) - target).square().mean().backward()
        reached = {name for name, p in module.named_parameters() if p.grad.abs().max() > 0}
        assert reached == ({"gate"} if step == 0 else {name for name, _ in module.named_parameters()})
        optimizer.step()


@pytest.mark.parametrize("block", [va.AttentionBlock2d, va.ConvBlock2d, va.SqueezeExciteBlock2d])
def test_autocast_keeps_the_type_of_the_map(block):
    x = torch.randn(1, 16, 4, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert block(16, gate_init=1.0)(x).dtype == torch.bfloat16


@pytest.mark.parametrize("channels", [8, 16, 32, 64, 256, 1024])
@pytest.mark.parametrize("control", [va.ConvBlock2d, va.SqueezeExciteBlock2d])
def test_the_controls_have_as_many_parameters(control, channels):
    attention, found = (
        sum(p.numel() for p in block(channels).parameters()) for block in (va.AttentionBlock2d, control)
    )
    # One hidden channel more or less is 2c + 11 parameters, or 2c + 1.
    assert abs(attention - found) <= (2 * channels + 11) / 2 + 1


def test_squeeze_and_excitation_is_that_of_its_paper():
    torch.manual_seed(0)
    block, x = va.SqueezeExciteBlock2d(8, gate_init=0.5), torch.randn(2, 8, 3, 4)
    y = block.norm(x)
    hidden = torch.relu(y.mean((2, 3)) @ block.excite.fc1.weight.flatten(1).T + block.excite.fc1.bias)
    scale = torch.sigmoid(hidden @ block.excite.fc2.weight.flatten(1).T + block.excite.fc2.bias)
    torch.testing.assert_close(block(x), x + 0.5 * y * scale[:, :, None, None])


def test_layer_norm_is_over_channels_at_each_position():
    torch.manual_seed(0)
    x = torch.randn(2, 8, 3, 4)
    y = va.AttentionBlock2d(8).norm(x)
    expected = torch.stack([nn.functional.layer_norm(x[:, :, i, j], (8,)) for i in range(3) for j in range(4)], dim=2)
    torch.testing.assert_close(y, expected.unflatten(2, (3, 4)))


@pytest.mark.parametrize("impl", va.IMPLS)
def test_a_block_survives_deepcopy_and_pickle(impl):
    block = va.Attention2d(8, 2, impl=impl)
    x = torch.randn(1, 8, 3, 3)
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        with torch.no_grad():
            assert torch.equal(other(x), block(x))
        assert repr(other) == repr(block)


def test_device_and_dtype_are_honoured():
    block = va.AttentionBlock2d(8, 2, device="meta", dtype=torch.float16)
    assert {(p.device.type, p.dtype) for p in block.parameters()} == {("meta", torch.float16)}
    assert block(torch.empty(2, 8, 3, 3, device="meta", dtype=torch.float16)).shape == (2, 8, 3, 3)


def test_the_same_seed_gives_the_weights_of_two_plain_convolutions():
    torch.manual_seed(0)
    block = va.Attention2d(8, 2)
    torch.manual_seed(0)
    plain = PlainBmmAttention(8, 2)
    assert all(torch.equal(block.state_dict()[key], value) for key, value in plain.state_dict().items())


@pytest.mark.gpu
@pytest.mark.parametrize("impl", va.IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_on_a_gpu_the_block_gives_what_it_gives_on_the_cpu(impl, dtype, masked):
    # 8×8 tokens and a mask in bfloat16 is where cuDNN's kernel has given NaN gradients (pytorch/pytorch#196678).
    torch.manual_seed(0)
    block = va.Attention2d(64, 2, impl=impl)
    x = torch.randn(2, 64, 8, 8, requires_grad=True)
    mask = torch.rand(64, 64) < 0.5 if masked else None
    if mask is not None:
        mask[0] = False
    expected = block(x, mask)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), x)
    moved, there = block.to("cuda", dtype), x.detach().to("cuda", dtype).requires_grad_()
    found = moved(there, None if mask is None else mask.cuda())
    (gradient,) = torch.autograd.grad(found.sum(), there)
    tolerance = 2e-3 if dtype == torch.float32 else 4 * 2**-8
    for ours, theirs in ((found, expected), (gradient, expected_gradient)):
        assert (ours.float().cpu() - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("impl", va.IMPLS)
@pytest.mark.parametrize(
    "options",
    [
        {"qk_norm": True, "num_kv_heads": 1},
        {"position": va.RelPosDecomposed(feat_size=8), "causal": True},
        {"position": va.Rope2d(), "output_gate": True, "kv_stride": 2},
        {"pattern": va.Window(5, shift=2), "position": va.RelPosTable()},
        {"pattern": va.Neighborhood(3), "position": va.RelPosDecomposed()},
    ],
    ids=str,
)
def test_on_a_gpu_under_autocast_every_option_gives_what_it_gives_on_the_cpu(impl, options):
    torch.manual_seed(0)
    block = va.Attention2d(64, 4, **options)
    x = torch.randn(2, 64, 8, 8, requires_grad=True)
    expected = block(x)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), x)
    va.set_impl(block.cuda(), impl)
    there = x.detach().cuda().requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = block(there)
    (gradient,) = torch.autograd.grad(found.float().sum(), there)
    for ours, theirs in ((found, expected), (gradient, expected_gradient)):
        assert (ours.float().cpu() - theirs).abs().max() <= 8 * 2**-8 * theirs.abs().max()

"""The implementations against each other, against NumPy and against torch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import vision_attn as va
from vision_attn import reference
from vision_attn.attend import attend, attention_weights
from vision_attn.attend.registry import _ATTEND

SHAPES = {
    "square": {"channels": 32, "num_heads": 4, "size": (6, 6), "batch": 2},
    "non-square": {"channels": 24, "num_heads": 3, "size": (3, 7), "batch": 2},
    "batch of one": {"channels": 16, "num_heads": 2, "size": (5, 4), "batch": 1},
    "one head": {"channels": 16, "num_heads": 1, "size": (4, 5), "batch": 2},
    "heads = channels": {"channels": 8, "num_heads": 8, "size": (4, 3), "batch": 2},
    "one token": {"channels": 8, "num_heads": 2, "size": (1, 1), "batch": 3},
}
#: FlexAttention has no backward pass on the CPU.
DIFFERENTIABLE = tuple(impl for impl in va.IMPLS if impl != "flex")
MASKS = ("none", "bool", "bool by head", "additive", "fully masked rows", "additive fully masked rows")


def make_mask(kind, batch, heads, tokens, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    if kind == "none":
        return None
    allowed = torch.rand(batch, heads, tokens, tokens, generator=generator) < 0.6
    allowed |= torch.eye(tokens, dtype=torch.bool)
    if kind == "bool":
        return allowed[:1, :1]
    if kind == "bool by head":
        return allowed
    if kind == "additive":
        return torch.randn(batch, 1, tokens, tokens, generator=generator, dtype=torch.float64).to(dtype)
    allowed[:, :, 0] = False
    if kind == "fully masked rows":
        return allowed
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, -torch.inf)


def make_block(shape, dtype):
    torch.manual_seed(0)
    block = va.Attention2d(shape["channels"], shape["num_heads"], dtype=dtype)
    x = torch.randn(shape["batch"], shape["channels"], *shape["size"], dtype=dtype)
    return block, x


def forward_and_gradients(block, x, mask, impl):
    """The output, and the gradients of the input and of every parameter, for a fixed random cotangent."""
    if impl not in DIFFERENTIABLE:
        with va.use_impl(block, impl), torch.no_grad():
            return {"output": block(x, mask)}
    x = x.clone().requires_grad_()
    with va.use_impl(block, impl):
        y = block(x, mask)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(y.dtype)
    names, parameters = zip(*block.named_parameters(), strict=True)
    gradients = torch.autograd.grad((y * weight).sum(), [x, *parameters])
    return {"output": y.detach(), "x": gradients[0], **dict(zip(names, gradients[1:], strict=True))}


def worst(found, expected):
    """Largest difference, as a share of the largest value where that is above one."""
    return max(
        float((value - expected[name].double()).abs().max() / max(1.0, float(expected[name].abs().max())))
        for name, value in ((name, value.double()) for name, value in found.items())
    )


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
def test_implementations_are_equal_forward_and_backward(shape, mask, dtype, tolerance):
    block, x = make_block(SHAPES[shape], dtype)
    mask = make_mask(mask, len(x), block.num_heads, x[0, 0].numel(), dtype)
    expected = forward_and_gradients(block, x, mask, "bmm")
    assert all(torch.isfinite(value).all() for value in expected.values())
    for impl in va.IMPLS:
        assert worst(forward_and_gradients(block, x, mask, impl), expected) <= tolerance, impl


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("impl", va.IMPLS)
def test_implementations_equal_the_numpy_definition(impl, shape, mask):
    block, x = make_block(SHAPES[shape], torch.float64)
    mask = make_mask(mask, len(x), block.num_heads, x[0, 0].numel())
    state = {key: value.numpy() for key, value in block.state_dict().items()}
    expected = reference.attention_map(x.numpy(), state, block.num_heads, mask=None if mask is None else mask.numpy())
    with va.use_impl(block, impl), torch.no_grad():
        found = block(x, mask).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("impl", va.IMPLS)
def test_bfloat16_is_within_its_rounding_of_float32(impl, mask):
    block, x = make_block(SHAPES["non-square"], torch.bfloat16)
    mask = make_mask(mask, len(x), block.num_heads, x[0, 0].numel(), torch.bfloat16)
    found = forward_and_gradients(block, x, mask, impl)
    mask = mask.float() if mask is not None and mask.dtype != torch.bool else mask
    expected = forward_and_gradients(block.float(), x.float(), mask, "bmm")
    for name, value in found.items():
        assert value.dtype == torch.bfloat16
        # Every value on the way is rounded to eight bits once or twice.
        assert (value.float() - expected[name]).abs().max() <= 4 * 2**-8 * expected[name].abs().max(), name


@settings(max_examples=40, deadline=None)
@given(
    impl=st.sampled_from(va.IMPLS),
    batch=st.integers(1, 3),
    heads=st.integers(1, 4),
    width=st.integers(1, 5),
    height=st.integers(1, 5),
    columns=st.integers(1, 5),
    mask=st.sampled_from(MASKS),
    channels_last=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_shape_equals_the_numpy_definition(impl, batch, heads, width, height, columns, mask, channels_last, seed):
    torch.manual_seed(seed)
    block = va.Attention2d(heads * width, heads, impl=impl, dtype=torch.float64)
    x = torch.randn(batch, heads * width, height, columns, dtype=torch.float64)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    mask = make_mask(mask, batch, heads, height * columns)
    state = {key: value.numpy() for key, value in block.state_dict().items()}
    expected = reference.attention_map(x.numpy(), state, heads, mask=None if mask is None else mask.numpy())
    with torch.no_grad():
        np.testing.assert_allclose(block(x, mask).numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("impl", DIFFERENTIABLE)
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_are_those_of_finite_differences(impl, masked):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = make_mask("fully masked rows", 1, 2, 5) if masked else None
    assert torch.autograd.gradcheck(lambda q, k, v: attend(q, k, v, impl=impl, mask=mask), (q, k, v))


@pytest.mark.parametrize("impl", va.IMPLS)
def test_the_block_is_torchs_multihead_attention_on_tokens(impl):
    torch.manual_seed(0)
    block = va.Attention2d(24, 3, impl=impl, dtype=torch.float64)
    theirs = nn.MultiheadAttention(24, 3, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(block.qkv.weight[:, :, 0, 0])
        theirs.in_proj_bias.copy_(block.qkv.bias)
        theirs.out_proj.weight.copy_(block.proj.weight[:, :, 0, 0])
        theirs.out_proj.bias.copy_(block.proj.bias)
    x = torch.randn(2, 24, 3, 5, dtype=torch.float64)
    allowed = make_mask("bool by head", 2, 3, 15)
    tokens = x.flatten(2).mT
    expected, weights = theirs(tokens, tokens, tokens, attn_mask=~allowed.flatten(0, 1), average_attn_weights=False)
    with torch.no_grad():
        found = block(x, allowed)
    torch.testing.assert_close(found, expected.mT.unflatten(2, (3, 5)), rtol=0, atol=1e-12)
    torch.testing.assert_close(block.attention_weights(x, allowed), weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("impl", DIFFERENTIABLE)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_a_fully_masked_query_gives_zeros_and_finite_gradients(impl, dtype, kind):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 6, 4, dtype=dtype, requires_grad=True) for _ in range(3))
    allowed = torch.ones(6, 6, dtype=torch.bool)
    allowed[[0, 3]] = False
    mask = allowed if kind == "bool" else torch.zeros(6, 6, dtype=dtype).masked_fill(~allowed, -torch.inf)
    y = attend(q, k, v, impl=impl, mask=mask)
    assert (y[:, :, [0, 3]] == 0).all()
    assert (y[:, :, [1, 2, 4, 5]] != 0).all()
    gradients = torch.autograd.grad(y.float().square().sum(), (q, k, v))
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert (gradients[0][:, :, [0, 3]] == 0).all()


@pytest.mark.parametrize("impl", va.IMPLS)
def test_a_nan_is_not_hidden_by_a_mask(impl):
    q, k, v = (torch.randn(1, 1, 3, 2) for _ in range(3))
    q[0, 0, 1, 0] = torch.nan
    y = attend(q, k, v, impl=impl, mask=torch.ones(3, 3, dtype=torch.bool))
    assert torch.isnan(y[0, 0, 1]).all()
    assert torch.isfinite(y[0, 0, [0, 2]]).all()


@pytest.mark.parametrize("impl", va.IMPLS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_holds_logits_that_it_cannot_itself(impl, dtype):
    # Logits of a million: beyond float16, and in bfloat16 further apart than the keys are.
    q = torch.full((1, 1, 2, 4), 500.0, dtype=dtype)
    k = torch.tensor([[500.0] * 4, [502.0] * 4], dtype=dtype)[None, None]
    v = torch.tensor([[1.0], [2.0]], dtype=dtype)[None, None]
    expected = 2.0 if k[0, 0, 1, 0] > k[0, 0, 0, 0] else 1.5
    assert attend(q, k, v, impl=impl, scale=1.0).flatten().tolist() == [expected, expected]


@pytest.mark.parametrize("impl", DIFFERENTIABLE)
def test_an_additive_mask_has_a_gradient(impl):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 4, 3, dtype=torch.float64) for _ in range(3))
    bias = torch.randn(1, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda bias: attend(q, k, v, impl=impl, mask=bias), (bias,))


def test_dropout_drops_the_same_weights_in_the_implementations_that_hold_them():
    torch.manual_seed(0)
    block = va.Attention2d(16, 2, attn_drop=0.5).train()
    x = torch.randn(2, 16, 4, 4)
    outputs = []
    for impl in ("einx", "bmm", "einsum"):
        torch.manual_seed(3)
        with va.use_impl(block, impl):
            outputs.append(block(x))
    torch.testing.assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(outputs[2], outputs[0])


@pytest.mark.parametrize("impl", DIFFERENTIABLE)
def test_dropout_keeps_the_mean_and_is_off_in_evaluation(impl):
    torch.manual_seed(0)
    block = va.Attention2d(8, 2, impl=impl, attn_drop=0.3)
    x = torch.randn(1, 8, 3, 3)
    with torch.no_grad():
        exact = block.eval()(x)
        torch.testing.assert_close(block(x), exact, rtol=0, atol=0)
        batch = x.expand(20_000, -1, -1, -1)
        dropped = block.train()(batch)
    assert not torch.equal(dropped[0], dropped[1])
    torch.testing.assert_close(dropped.mean(0, keepdim=True), exact, rtol=0, atol=0.01)


@pytest.mark.parametrize("probability", [0.0, 1.0])
@pytest.mark.parametrize("impl", DIFFERENTIABLE)
def test_dropping_every_weight_leaves_nothing(impl, probability):
    q = k = v = torch.ones(1, 1, 3, 2)
    y = attend(q, k, v, impl=impl, dropout=probability)
    torch.testing.assert_close(y, v if probability == 0.0 else torch.zeros_like(v))


def test_attention_weights_sum_to_one_and_make_the_output():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 4, dtype=torch.float64) for _ in range(3))
    weights = attention_weights(q, k)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 5, dtype=torch.float64))
    torch.testing.assert_close(weights @ v, attend(q, k, v))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(9, 9), None),
        (torch.ones(9), None),
        (torch.ones(2, 1, 1, 9), None),
        (torch.ones(9, 9, dtype=torch.int64), r"mask must be bool .* got torch.int64.*mask.bool\(\)"),
        (torch.ones(4, 9, dtype=torch.bool), r"mask must broadcast to .*\(2, 2, 9, 9\); got \(4, 9\)"),
        (torch.ones(3, 1, 9, 9), r"mask must broadcast to .*; got \(3, 1, 9, 9\)"),
        (torch.ones(1, 1, 1, 9, 9), r"mask must broadcast to .*; got \(1, 1, 1, 9, 9\)"),
        (torch.tensor(True), r"mask must broadcast to .*; got \(\)"),
    ],
)
def test_a_mask_fits_by_broadcasting_or_is_refused(mask, message):
    block = va.Attention2d(8, 2)
    x = torch.randn(2, 8, 3, 3)
    if message is None:
        for impl in va.IMPLS:
            with va.use_impl(block, impl), torch.no_grad():
                torch.testing.assert_close(block(x, mask), block(x))
        return
    with pytest.raises(ValueError, match=message):
        block(x, mask)


def test_an_unknown_implementation_is_refused_with_the_known_ones():
    q = torch.ones(1, 1, 1, 1)
    with pytest.raises(ValueError, match=r"impl must be one of 'einx', 'bmm', 'einsum', 'sdpa', 'flex'.*; got 'flash'"):
        attend(q, q, q, impl="flash")


@pytest.mark.parametrize("impl", va.IMPLS)
def test_autocast_does_not_take_the_logits_to_half_precision(impl):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 30, 16, dtype=torch.bfloat16) for _ in range(3))
    q *= 10
    exact = attend(q.double(), k.double(), v.double(), impl=impl)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attend(q, k, v, impl=impl)
        weights = attention_weights(q, k)
    assert found.dtype == torch.bfloat16
    assert (found.double() - exact).abs().max() < 0.03
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, attention_weights(q, k))


@pytest.mark.parametrize("impl", va.IMPLS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lowest", [-1e5, float(torch.finfo(torch.float32).min)])
def test_a_large_finite_mask_value_is_not_minus_infinity(impl, dtype, lowest):
    # A row of one and the same finite value masks nothing: the softmax is that of the logits alone.
    torch.manual_seed(0)
    q, k = (torch.zeros(1, 1, 4, 2, dtype=dtype) for _ in range(2))
    v = torch.randn(1, 1, 4, 2, dtype=dtype)
    mask = torch.full((4, 4), lowest)
    mask[1] = torch.tensor([0.0, lowest, lowest, lowest])
    y = attend(q, k, v, impl=impl, mask=mask)
    torch.testing.assert_close(y[0, 0, 0], v.float().mean((0, 1, 2)).to(dtype), rtol=0.02, atol=0.01)
    torch.testing.assert_close(y[0, 0, 1], v[0, 0, 0])


def test_flex_refuses_by_name_what_it_cannot_do():
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match="impl='flex' has no backward pass on the CPU: use impl='sdpa'"):
        attend(q, q, q, impl="flex")
    with pytest.raises(ValueError, match=r"attn_drop must be 0 with impl='flex'.*got 0.5: use impl='sdpa'"):
        attend(q.detach(), q.detach(), q.detach(), impl="flex", dropout=0.5)
    with pytest.raises(ValueError, match="attn_drop must be 0 with impl='flex'"):
        va.Attention2d(8, 2, impl="flex", attn_drop=0.1)
    with torch.no_grad():
        torch.testing.assert_close(attend(q, q, q, impl="flex"), attend(q, q, q))


def test_flex_gives_zeros_for_a_fully_masked_query():
    q = torch.randn(2, 2, 6, 4)
    allowed = torch.ones(6, 6, dtype=torch.bool)
    allowed[[0, 3]] = False
    y = attend(q, q, q, impl="flex", mask=allowed)
    assert (y[:, :, [0, 3]] == 0).all()
    assert (y[:, :, [1, 2, 4, 5]] != 0).all()


@pytest.mark.parametrize("impl", va.IMPLS)
def test_causal_attention_is_torchs(impl):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 7, 4, dtype=torch.float64) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attend(q, k, v, impl=impl, causal=True), expected, rtol=0, atol=1e-12)
    allowed = torch.rand(2, 1, 7, 7) < 0.7
    expected = attend(q, k, v, impl="bmm", mask=allowed & torch.ones(7, 7, dtype=torch.bool).tril())
    torch.testing.assert_close(attend(q, k, v, impl=impl, mask=allowed, causal=True), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("impl", va.IMPLS)
def test_shared_heads_are_torchs_grouped_heads(impl):
    torch.manual_seed(0)
    q = torch.randn(2, 6, 5, 4, dtype=torch.float64)
    k, v = (torch.randn(2, 2, 5, 4, dtype=torch.float64) for _ in range(2))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(attend(q, k, v, impl=impl), expected, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="q must have a multiple of the heads of k and v; got 6 and 4"):
        attend(q, torch.randn(2, 4, 5, 4), torch.randn(2, 4, 5, 4), impl=impl)


@pytest.fixture
def registered():
    """A further implementation, forgotten after the test."""

    def twice(q, k, v, *, scale, mask, causal, dropout):
        return 2 * attend(q, k, v, impl="bmm", scale=scale, mask=mask, causal=causal, dropout=dropout)

    va.register_impl("twice", twice)
    yield "twice"
    del _ATTEND["twice"]


def test_an_implementation_from_outside_is_available_to_every_block(registered):
    model = torch.nn.Sequential(va.Attention2d(8, 2), va.AttentionBlock2d(8, 2, pattern=va.Window(2), gate_init=1.0))
    assert va.set_impl(model, registered) == 2
    block, x = model[0], torch.randn(1, 8, 3, 3)
    torch.nn.init.zeros_(block.proj.bias)
    found = block(x)
    va.set_impl(model, "bmm")
    torch.testing.assert_close(found, 2 * block(x))


@pytest.mark.parametrize("name", ["", "bmm", None])
def test_a_registered_name_must_be_new(name):
    with pytest.raises(ValueError, match=r"name must be a new one, none of 'einx', 'bmm'.*; got"):
        va.register_impl(name, lambda q, k, v, **options: v)


def test_a_registered_function_must_take_the_arguments():
    with pytest.raises(ValueError, match=r"function must take \(q, k, v, \*, scale, mask, causal, dropout\); got"):
        va.register_impl("short", lambda q, k, v: v)
    assert "short" not in _ATTEND


@pytest.mark.parametrize("impl", va.IMPLS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["none", "bool", "additive", "causal"])
def test_logits_of_ten_thousand_and_rows_of_nothing_are_finite_in_half_precision(impl, dtype, kind):
    torch.manual_seed(0)
    sign = torch.randint(0, 2, (2, 2, 9, 4)) * 2 - 1
    q, k = (100.0 * sign.to(dtype) * torch.rand(2, 2, 9, 4).add(0.5).to(dtype) for _ in range(2))
    v = torch.randn(2, 2, 9, 4).to(dtype)
    assert (q.float() @ k.float().mT).abs().max() > 1e4
    mask = None
    if kind in ("bool", "additive"):
        mask = torch.rand(2, 1, 9, 9) < 0.5
        mask[:, :, ::2] = False
    if kind == "additive":
        mask = (torch.randint(0, 2, mask.shape) * 2e4 - 1e4).masked_fill(~mask, -torch.inf).to(dtype)
    inputs = tuple(x.requires_grad_(impl in DIFFERENTIABLE) for x in (q, k, v))
    y = attend(*inputs, impl=impl, scale=1.0, mask=mask, causal=kind == "causal")
    exact = attend(*(x.detach().double() for x in inputs), scale=1.0, mask=mask, causal=kind == "causal")
    assert y.dtype == dtype
    assert torch.isfinite(y).all()
    assert (y.double() - exact).abs().max() <= 0.03
    if mask is not None:
        assert (y[:, :, ::2] == 0).all()
    if impl in DIFFERENTIABLE:
        for gradient in torch.autograd.grad(y.float().square().sum(), inputs):
            assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("impl", va.IMPLS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"position": va.RelPosDecomposed(feat_size=(5, 6))},
        {"pattern": va.Window(4, shift=2), "position": va.RelPosTable()},
        {"pattern": va.Neighborhood(3), "position": va.RelPosDecomposed()},
        {"position": va.Rope2d(), "causal": True},
    ],
    ids=str,
)
def test_blocks_with_positions_are_finite_in_half_precision_whatever_the_logits(impl, dtype, options):
    torch.manual_seed(0)
    block = va.Attention2d(16, 2, impl=impl, dtype=dtype, qkv_bias=False, **options)
    x = torch.randn(2, 16, 5, 6).to(dtype)
    with torch.no_grad():
        block.qkv.weight[:32] *= 60.0
        for parameter in () if block.position is None else block.position.parameters():
            parameter.copy_(
                1e4 * torch.randn_like(parameter) if parameter.shape[1] == 2 else 100 * torch.randn_like(parameter)
            )
    mask = torch.rand(30, 30) < 0.7
    mask[::3] = False
    with torch.set_grad_enabled(impl in DIFFERENTIABLE):
        y = block(x, mask)
    assert torch.isfinite(y).all()
    bias = block.proj.bias.view(1, -1, 1, 1)
    torch.testing.assert_close(y.flatten(2)[:, :, ::3], bias.flatten(2).expand(2, -1, 10))
    if impl in DIFFERENTIABLE:
        for gradient in torch.autograd.grad(y.float().square().sum(), list(block.parameters())):
            assert torch.isfinite(gradient).all()


def test_a_mask_that_is_no_tensor_is_refused():
    q = torch.ones(1, 1, 2, 2)
    with pytest.raises(ValueError, match="mask must be a tensor, or None; got list"):
        attend(q, q, q, mask=[[True, False], [True, True]])


@pytest.mark.parametrize("impl", va.IMPLS)
def test_two_finite_masks_of_half_precision_do_not_make_an_infinite_one(impl):
    torch.manual_seed(0)
    block = va.Attention2d(8, 2, impl=impl, position=va.RelPosTable(feat_size=2), dtype=torch.float16)
    with torch.no_grad():
        block.position.relative_position_bias_table.fill_(-60.0)
        x, lowest = torch.randn(1, 8, 2, 2).half(), torch.full((4, 4), torch.finfo(torch.float16).min).half()
        torch.testing.assert_close(block(x, lowest), block(x), rtol=0.02, atol=0.01)

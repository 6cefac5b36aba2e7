"""Attention between tokens: equality with torch, masks, half precision, dropout, memory, custom implementations."""

from unittest import mock

import pytest
import torch
from impls import CPU_IMPLS
from launches import Operations
from small_networks import close
from torch.nn import functional as F

import vision_attn as va
from vision_attn.attention import dispatch
from vision_attn.attention.blocks.linear import attend_linear
from vision_attn.attention.implementations import IMPLEMENTATIONS, attend
from vision_attn.attention.kernels import FLASH_FROM_KEYS, align_widths, to_4d_mask

HALVES = (torch.float16, torch.bfloat16)
#: Tolerances for values that are rounded a few times.
ROUNDING = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
each_implementation = pytest.mark.parametrize("impl", CPU_IMPLS)


def heads(*shapes, dtype=torch.float32, grad=False):
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_(grad) for shape in shapes]


# --- equality with torch ----------------------------------------------------------------------------------------------


@each_implementation
def test_causal_and_grouped_query_attention_equal_torch(impl):
    q, k, v = heads((2, 6, 7, 4), (2, 2, 7, 4), (2, 2, 7, 4), dtype=torch.float64)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    close(attend(q, k, v, impl=impl, causal=True), expected)
    allowed = torch.rand(2, 1, 7, 7) < 0.7
    expected = attend(q, k, v, impl="bmm", mask=allowed & torch.ones(7, 7, dtype=torch.bool).tril())
    close(attend(q, k, v, impl=impl, mask=allowed, causal=True), expected)
    more = torch.randn(2, 2, 9, 4, dtype=torch.float64)  # keys than queries: the first of them are not later
    expected = F.scaled_dot_product_attention(q, more, more, is_causal=True, enable_gqa=True)
    close(attend(q, more, more, impl=impl, causal=True), expected)
    for wrong, message in (((q, more[..., :3], more), "k must"), ((q, k, more), "v must"), ((q.int(), k, v), "q must")):
        with pytest.raises(ValueError, match=message):
            attend(*wrong, impl=impl)
    with pytest.raises(ValueError, match=r"impl must be .*'sdpa'.*, got 'none'"):
        attend(q, k, v, impl="none")
    with pytest.raises(ValueError, match=r"q must .*heads of k and v, got 6 and 4"):
        attend(q, *heads((2, 4, 5, 4), (2, 4, 5, 4)), impl=impl)


@pytest.mark.parametrize(("pattern", "logits"), [("full", 1152), ("rows", 288), (va.Window(3), 648)], ids=str)
@pytest.mark.parametrize("mask_shape", [(5, 1, 24, 1), (1, 2, 24, 24), (5, 2, 1, 24)], ids=str)
def test_bmm_computes_a_few_images_at_a_time_on_a_cpu(pattern, logits, mask_shape, monkeypatch):
    mask, x = torch.randn(mask_shape, requires_grad=True), torch.randn(5, 8, 4, 6)
    block = va.Attention2d(8, 2, pattern=pattern, impl="bmm")
    expected = block(x, mask)
    monkeypatch.setattr(dispatch, "attend_bmm", bmm := mock.Mock(wraps=dispatch.attend_bmm))
    monkeypatch.setattr(dispatch, "CHUNK_LOGITS", 2 * logits)
    va.set_impl_(block, "auto")
    close(block(x, mask), expected, 1e-6)
    assert bmm.call_count == 3
    q, options = torch.randn(9, 2, 4, 3), {"mask": None, "scale": 1.0, "causal": False, "dropout": 0.0}
    monkeypatch.setattr(dispatch, "CHUNK_LOGITS", 5 * 2 * 4 * 4)
    close(dispatch.attend_bmm_chunked(q, q, q, **options), bmm(q, q, q, **options), 1e-6)
    assert bmm.call_count == 3 + 2 + 1


def test_many_small_groups_are_multiplied_in_training_only():
    q = torch.randn(512, 1, 4, 8, requires_grad=True)
    assert dispatch.select_auto(q, q, None, 0.0) is dispatch.attend_bmm
    assert dispatch.select_auto(q.detach(), q, None, 0.0) is dispatch.attend_fused
    with torch.no_grad():
        assert dispatch.select_auto(q, q, None, 0.0) is dispatch.attend_fused


# --- numerical edge cases ---------------------------------------------------------------------------------------------


@each_implementation
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_rows_with_large_negative_values_fully_masked_rows_and_nan(impl, dtype):
    q, k, v = heads(*[(1, 2, 6, 4)] * 3, dtype=dtype, grad=True)
    mask = torch.zeros(6, 6)
    mask[2] = -1e9
    mask[4, 1:] = -1e9
    zeros = torch.where(mask.amax(1, keepdim=True) < 0, 0.0, mask)
    found, expected = (attend(q, k, v, impl=impl, mask=given).float().sin().sum() for given in (mask, zeros))
    close(*(torch.autograd.grad(y, (q, k, v)) for y in (found, expected)), ROUNDING[dtype])
    for nothing in (mask > -1, mask.to(dtype).masked_fill(mask < -1, -torch.inf)):
        y = attend(q, k, v, impl=impl, mask=nothing)
        assert (y[:, :, 2] == 0).all()
        assert (y[:, :, [0, 1, 3, 4, 5]] != 0).all()
        gradients = torch.autograd.grad(y.float().square().sum(), (q, k, v))
        assert all(torch.isfinite(gradient).all() for gradient in gradients)
        assert (gradients[0][:, :, 2] == 0).all()
    q.data[0, 0, 1, 0] = torch.nan
    y = attend(q, k, v, impl=impl, mask=torch.ones(6, 6, dtype=torch.bool))  # NaN must be visible in the output
    assert torch.isnan(y[0, 0]).all(1).tolist() == [False, True, False, False, False, False]


@each_implementation
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_is_exact_up_to_rounding_forward_and_backward(impl, dtype):
    strided = [x[..., ::2] for x in heads((2, 4, 5, 16), (2, 2, 33, 16), (2, 2, 33, 8), dtype=dtype)]
    strided[0] *= 30  # logits above 100, which half precision rounds to multiples of about 0.1
    mask, (slope,) = torch.randn(2, 4, 5, 33), heads((2, 4, 5, 4), dtype=dtype)
    lowest = mask.index_fill(2, torch.tensor([1, 3]), torch.finfo(torch.float32).min)
    for given, autocast in ((None, False), (None, True), (mask > 0, False), (1e5 * mask, False), (lowest, False)):
        results = []
        for x, how in ((strided, impl), ([x.double() for x in strided], "bmm")):
            leaves = [one.detach().requires_grad_() for one in x]
            with torch.autocast("cpu", dtype=dtype, enabled=autocast):
                y = attend(*leaves, impl=how, scale=-0.5, mask=given)
            assert y.dtype == x[0].dtype
            results.append([y, *torch.autograd.grad(y, leaves, slope.to(y.dtype))])
        q, k, v, weight = (float(x.abs().max()) for x in (*strided, slope))
        # The tolerance is relative to the terms of each sum, because the sum itself can be close to zero.
        for found, expected, terms in zip(*results, (v, weight * v * k, weight * v * q, weight), strict=True):
            assert (found.double() - expected).abs().max() <= ROUNDING[dtype] * terms
    # Logits of 10^6 exceed the range of float16, and bfloat16 rounds them more coarsely than their difference.
    q, v = torch.full((1, 1, 2, 4), 500.0, dtype=dtype), torch.tensor([[[[1.0], [2.0]]]], dtype=dtype)
    k = torch.tensor([[[[500.0] * 4, [502.0] * 4]]], dtype=dtype)
    expected = 2.0 if k[0, 0, 1, 0] > k[0, 0, 0, 0] else 1.5
    assert attend(q, k, v, impl=impl, scale=1.0).flatten().tolist() == [expected, expected]


POSITIONED = [
    {"position": va.RelPosDecomposed(feat_size=(5, 6))},
    {"pattern": va.Window(4, shift=2), "position": va.RelPosTable()},
    {"pattern": va.Neighborhood(3), "position": va.RelPosDecomposed()},
    {"position": va.Rope(), "causal": True},
]


@each_implementation
@pytest.mark.parametrize("options", POSITIONED, ids=str)
def test_blocks_with_positions_are_finite_in_half_precision_for_large_logits(impl, options):
    mask = torch.rand(30, 30) < 0.7
    mask[::3] = False
    for dtype in HALVES:
        block = va.Attention2d(16, 2, impl=impl, dtype=dtype, qkv_bias=False, **options)
        with torch.no_grad():
            block.qkv.weight[:32] *= 60.0
            for parameter in block.position.parameters():
                # Position logits exceed the range of float16, either directly or after the product with the query.
                parameter.copy_((3e4 if parameter.shape[1] == 2 else 1e3) * torch.randn_like(parameter).clamp(-2, 2))
        y = block(torch.randn(2, 16, 5, 6).to(dtype), mask)
        torch.testing.assert_close(y.flatten(2)[:, :, ::3], block.proj.bias[:, None].expand(2, -1, 10))
        for one in (y, *torch.autograd.grad(y.float().square().sum(), list(block.parameters()))):
            assert torch.isfinite(one).all()


# --- dropout ----------------------------------------------------------------------------------------------------------


@each_implementation
def test_dropout_keeps_the_mean_and_is_off_in_evaluation(impl):
    block, x = va.Attention2d(8, 2, impl=impl, attn_drop=0.3), torch.randn(1, 8, 3, 3)
    with torch.no_grad():
        exact = block.eval()(x)
        assert torch.equal(block(x), exact)
        dropped = block.train()(x.expand(5_000, -1, -1, -1))
    assert not torch.equal(dropped[0], dropped[1])
    close(dropped.mean(0, keepdim=True), exact, 0.02)
    if impl != "sdpa":  # implementations that store the weights drop the same weights
        q, k, v = heads(*[(2, 2, 16, 8)] * 3)
        outputs = []
        for named in (impl, "bmm"):
            torch.manual_seed(3)
            outputs.append(attend(q, k, v, impl=named, dropout=0.5))
        torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("case", ["plain", "dropout", "a bias with gradients"])
@pytest.mark.parametrize("chunked", [("cpu",), ()], ids=str)  # as outside and inside of graphs
def test_a_named_implementation_runs_and_auto_selects_one(case, chunked):
    """On a CPU, torch has no fused kernel with dropout or gradients of a mask, so auto selects bmm."""
    q, k, v = heads(*[(2, 2, 6, 8)] * 3)
    mask = torch.randn(1, 2, 6, 6, requires_grad=True) if case.startswith("a bias") else None
    for impl, expected in (("sdpa", True), ("bmm", False), ("auto", case == "plain")):
        with (
            mock.patch.object(F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention) as fused,
            mock.patch.object(torch, "bmm", wraps=torch.bmm) as bmm,
            mock.patch.object(dispatch, "CHUNKED_DEVICES", chunked),
        ):
            attend(q, k, v, impl=impl, mask=mask, dropout=0.5 if case == "dropout" else 0.0)
        assert (fused.called, bmm.called) == (expected, not expected), impl


#: Widths of keys and of values, numbers of keys relative to ``FLASH_FROM_KEYS``, and the padded width of the values.
PADDED = [(64, 32, 0, 64), (64, 32, -1, 32), (32, 64, 0, 64), (264, 32, 4000, 32)]


@pytest.mark.parametrize(("d", "e", "more", "width"), PADDED)
def test_values_are_padded_to_the_width_of_many_keys_for_flash_attention(d, e, more, width):
    keys = FLASH_FROM_KEYS + more
    q, k, v = heads((1, 1, 2, d), (1, 1, keys, d), (1, 1, keys, e), dtype=torch.float16)
    q, k, padded = align_widths(q, k, v, None)
    assert (q.shape[3], k.shape[3], padded.shape[3]) == (d, d, width)
    assert torch.equal(padded[..., :e], v)


@pytest.mark.parametrize(("stride", "keys", "copied"), [(256, 1025, True), (255, 1025, False), (256, 1024, False)])
def test_many_keys_with_large_strides_are_copied_for_the_fused_kernel_on_a_cpu(stride, keys, copied):
    q, k, v = (torch.randn(1, 1, tokens, stride)[..., :16] for tokens in (2, keys, keys))
    with mock.patch.object(F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention) as fused:
        attend(q, k, v, impl="sdpa")
    assert [x.is_contiguous() for x in fused.call_args.args] == [copied] * 3


@pytest.mark.parametrize(("keys", "dtype"), [(8, torch.bool), (7, torch.bool), (7, torch.float32)], ids=str)
def test_masks_for_fused_kernels_on_a_gpu_are_additive_with_aligned_rows(keys, dtype):
    q, k, v = (torch.empty(2, 3, tokens, 4, device="meta") for tokens in (6, keys, keys))
    mask = to_4d_mask(q, k, v, torch.empty(2, 1, 1, 6, keys, dtype=dtype, device="meta"))[3]
    assert (mask.shape, mask.dtype, mask.stride(2) % 8) == ((2, 1, 6, keys), q.dtype, 0)


# --- memory -----------------------------------------------------------------------------------------------------------


LARGE = [
    (va.Attention2d, {"qk_norm": True, "output_gate": True, "num_kv_heads": 1, "value_dim": 12}, (32, 32)),
    (va.Attention2d, {"position": va.RelPosDecomposed(feat_size=(3, 4))}, (32, 32)),
    (va.Attention2d, {"pattern": va.Window(8, shift=4), "position": va.RelPosTable()}, (32, 32)),
    (va.Attention2d, {"pattern": va.Neighborhood(5), "position": va.RelPosDecomposed()}, (32, 32)),
    (va.blocks.LinearAttention2d, {"impl": "bmm"}, (32, 32)),
]


@pytest.mark.parametrize(("block", "options", "size"), LARGE)
def test_no_tensor_of_size_queries_times_keys_is_allocated_forward_or_backward(block, options, size):
    block, x, elements = block(16, 2, **options), torch.randn(1, 16, *size, requires_grad=True), []

    def record(func, inputs, outputs):
        elements.extend(tensor.untyped_storage().nbytes() // tensor.itemsize for tensor in outputs)

    with Operations(record):
        block(x).sum().backward()
    assert max(elements) < 1024**2
    if "qk_norm" in options:  # the test detects such a tensor with bmm
        with va.use_impl(block, "bmm"), Operations(record):
            block(x)
        assert max(elements) >= 1024**2


# --- custom implementations, linear attention -------------------------------------------------------------------------


def test_a_custom_implementation_is_available_to_every_block(monkeypatch):
    def twice(q, k, v, *, scale, mask, causal, dropout):
        assert mask is None or mask.dim() == 4
        return 2 * attend(q, k, v, impl="bmm", scale=scale, mask=mask, causal=causal, dropout=dropout)

    monkeypatch.setitem(IMPLEMENTATIONS, "twice", None)  # removed after the test
    del IMPLEMENTATIONS["twice"]
    va.implementations.register_impl("twice", twice)
    windows = {"pattern": va.Window(2, shift=1), "position": va.RelPosTable()}
    model = torch.nn.Sequential(*(va.Attention2d(8, 2, proj_bias=False, **options) for options in ({}, windows)))
    assert va.set_impl_(model, "twice") == 2
    x, mask = torch.randn(3, 8, 3, 3), torch.rand(9, 9) < 0.7
    found = [block(x, mask) for block in model]
    va.set_impl_(model, "bmm")
    torch.testing.assert_close(found, [2 * block(x, mask) for block in model])
    with pytest.raises(ValueError, match=r"name must .*'einx', 'bmm'"):
        va.implementations.register_impl("bmm", twice)


@pytest.mark.parametrize("impl", ["einx", "bmm"])
@pytest.mark.parametrize("kept", [65_536, 1])
def test_sums_over_a_large_feature_map_are_in_the_range_of_half_precision(impl, kept):
    q, k, v = (torch.rand(1, 1, 65_536, 2) + 1 for _ in range(3))
    options = {"impl": impl, "feature_map": "elu", "mask": (torch.arange(65_536) < kept)[:, None]}
    half = attend_linear(q.half(), k.half(), v.half(), **options)
    torch.testing.assert_close(half.float(), attend_linear(q, k, v, **options), rtol=2e-3, atol=0)


def test_features_near_zero_have_finite_weights():
    q, k, v = torch.tensor([[[[1.0, 1e-6]]]]), torch.tensor([[[[0.0, 1.0], [0.0, 2.0]]]]), torch.ones(1, 1, 2, 1)
    assert attend_linear(q.half(), k.half(), v.half(), feature_map="relu").isfinite().all()
    assert torch.equal(attend_linear(q, k, k), attend_linear(q, k, k, feature_map="softmax"))
    torch.testing.assert_close(attend_linear(q - 40, k - 40, v, feature_map="elu"), torch.ones(1, 1, 1, 1))

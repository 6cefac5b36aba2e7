"""Attention between tokens: implementations against each other and torch, masks, half precision, dropout, memory."""

import pytest
import torch
from impls import CPU_IMPLS
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import vision_attn as va
from vision_attn.attention.blocks.linear import attend_linear
from vision_attn.attention.implementations import IMPLEMENTATIONS, attend

HALVES = (torch.float16, torch.bfloat16)
each_implementation = pytest.mark.parametrize("impl", CPU_IMPLS)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def heads(*shapes, dtype=torch.float32, grad=False):
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_(grad) for shape in shapes]


def rounding(dtype):
    """How far from the exact result a value of this type may be, where it is rounded a few times."""
    return {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]


# --- against each other -----------------------------------------------------------------------------------------------

GRID = {
    "plain": {},
    "shared heads, norms, a gate": {"num_kv_heads": 1, "qk_norm": True, "output_gate": True, "key_dim": 6},
    "causal, table": {"causal": True, "position": va.RelPosTable(feat_size=(4, 5))},
    "decomposed, no biases": {"position": va.RelPosDecomposed(feat_size=3), "qkv_bias": False, "proj_bias": False},
    "strided keys, rotary": {"kv_stride": 2, "position": va.Rope2d(), "scale": 0.1},
    "shifted window, table": {"pattern": va.Window(3, shift=1), "position": va.RelPosTable(), "num_kv_heads": 2},
    "shifted window, matching": {"pattern": va.Window(3, shift=1), "qk_norm": "match", "num_kv_heads": 2},
    "causal grid": {"pattern": va.Grid((2, 3)), "causal": True, "position": va.RelPosDecomposed()},
    "neighborhood, decomposed": {"pattern": va.Neighborhood(3), "position": va.RelPosDecomposed(), "value_dim": 5},
    "rows, convolution, groups": {"pattern": "rows", "position": va.ConditionalPos(3), "groups": 2},
}


@pytest.mark.parametrize("options", GRID)
def test_implementations_are_equal_forward_and_backward(options):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        block, x = va.Attention2d(16, 4, dtype=dtype, **GRID[options]), torch.randn(2, 16, 5, 7, dtype=dtype)
        keys = block.keys_size(x)
        bool_mask = torch.rand(2, 1, 35, keys[0] * keys[1]) < 0.6
        bool_mask[0, :, 3] = False
        masks = (None, bool_mask, torch.randn(4, *bool_mask.shape[2:], dtype=dtype))
        for mask in masks if dtype == torch.float64 else masks[1:2]:
            results = {}
            for impl in CPU_IMPLS:
                leaf = x.clone().requires_grad_()
                with va.use_impl(block, impl):
                    y = block(leaf, mask)
                results[impl] = [y, *torch.autograd.grad(y.sin().sum(), [leaf, *block.parameters()])]
            for impl in CPU_IMPLS:
                for found, expected in zip(results[impl], results["bmm"], strict=True):
                    assert torch.isfinite(found).all()
                    largest = max(1.0, float(expected.detach().abs().max()))
                    assert (found - expected).abs().max() <= tolerance * largest, impl


@each_implementation
def test_causal_attention_and_shared_heads_are_torchs(impl):
    q, k, v = heads((2, 6, 7, 4), (2, 2, 7, 4), (2, 2, 7, 4), dtype=torch.float64)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(attend(q, k, v, impl=impl, causal=True), expected, rtol=0, atol=1e-12)
    allowed = torch.rand(2, 1, 7, 7) < 0.7
    expected = attend(q, k, v, impl="bmm", mask=allowed & torch.ones(7, 7, dtype=torch.bool).tril())
    torch.testing.assert_close(attend(q, k, v, impl=impl, mask=allowed, causal=True), expected, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="q must have a multiple of the heads of k and v; got 6 and 4"):
        attend(q, *heads((2, 4, 5, 4), (2, 4, 5, 4)), impl=impl)


# --- numbers that a kernel may get wrong in silence -------------------------------------------------------------------


@each_implementation
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_rows_of_a_billion_below_zero_and_rows_of_nothing(impl, dtype):
    q, k, v = heads(*[(1, 2, 6, 4)] * 3, dtype=dtype, grad=True)
    mask = torch.zeros(6, 6)
    mask[2] = -1e9
    mask[4, 1:] = -1e9
    zeros = torch.where(mask.amax(1, keepdim=True) < 0, 0.0, mask)
    found, expected = (
        torch.autograd.grad(attend(q, k, v, impl=impl, mask=given).float().sin().sum(), (q, k, v))
        for given in (mask, zeros)
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=rounding(dtype))
    for nothing in (mask > -1, mask.to(dtype).masked_fill(mask < -1, -torch.inf)):
        y = attend(q, k, v, impl=impl, mask=nothing)
        assert (y[:, :, 2] == 0).all()
        assert (y[:, :, [0, 1, 3, 4, 5]] != 0).all()
        gradients = torch.autograd.grad(y.float().square().sum(), (q, k, v))
        assert all(torch.isfinite(gradient).all() for gradient in gradients)
        assert (gradients[0][:, :, 2] == 0).all()


@each_implementation
def test_a_nan_is_not_hidden_by_a_mask(impl):
    q, k, v = heads(*[(1, 1, 3, 2)] * 3)
    q[0, 0, 1, 0] = torch.nan
    y = attend(q, k, v, impl=impl, mask=torch.ones(3, 3, dtype=torch.bool))
    assert torch.isnan(y[0, 0, 1]).all()
    assert torch.isfinite(y[0, 0, [0, 2]]).all()


@each_implementation
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_has_logits_of_float32_under_autocast_too(impl, dtype):
    # Logits of a million: beyond float16, and in bfloat16 further apart than the keys are.
    q = torch.full((1, 1, 2, 4), 500.0, dtype=dtype)
    k = torch.tensor([[500.0] * 4, [502.0] * 4], dtype=dtype)[None, None]
    v = torch.tensor([[1.0], [2.0]], dtype=dtype)[None, None]
    expected = 2.0 if k[0, 0, 1, 0] > k[0, 0, 0, 0] else 1.5
    assert attend(q, k, v, impl=impl, scale=1.0).flatten().tolist() == [expected, expected]
    q, k, v = heads(*[(2, 2, 30, 16)] * 3, dtype=dtype)
    q *= 8
    exact = attend(q.double(), k.double(), v.double())
    with torch.autocast("cpu", dtype=dtype):
        found = attend(q, k, v, impl=impl)
    assert found.dtype == dtype
    assert (found.double() - exact).abs().max() < 0.03


@each_implementation
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_is_exact_but_for_its_rounding_forward_and_backward(impl, dtype):
    strided = [x[..., ::2] for x in heads((2, 4, 5, 16), (2, 2, 33, 16), (2, 2, 33, 8), dtype=dtype)]
    strided[0] *= 30  # logits of a hundred and more, which half precision tells apart by a tenth
    mask, (slope,) = torch.randn(2, 4, 5, 33), heads((2, 4, 5, 4), dtype=dtype)
    lowest = mask.index_fill(2, torch.tensor([1, 3]), torch.finfo(torch.float32).min)
    for given in (None, mask > 0, 1e5 * mask, lowest):
        results = []
        for x, how in ((strided, impl), ([x.double() for x in strided], "bmm")):
            leaves = [one.detach().requires_grad_() for one in x]
            y = attend(*leaves, impl=how, scale=-0.5, mask=given)
            results.append([y, *torch.autograd.grad(y, leaves, slope.to(y.dtype))])
        q, k, v, weight = (float(x.abs().max()) for x in (*strided, slope))
        # What gradients are sums of: with one key alone in a row, little is left of it.
        for found, expected, terms in zip(*results, (v, weight * v * k, weight * v * q, weight), strict=True):
            assert (found.double() - expected).abs().max() <= rounding(dtype) * terms


@each_implementation
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
def test_blocks_with_positions_are_finite_in_half_precision_whatever_the_logits(impl, options):
    mask = torch.rand(30, 30) < 0.7
    mask[::3] = False
    for dtype in HALVES:
        block = va.Attention2d(16, 2, impl=impl, dtype=dtype, qkv_bias=False, **options)
        with torch.no_grad():
            block.qkv.weight[:32] *= 60.0
            for parameter in block.position.parameters():
                # One logit of a position is beyond float16, one by one or in the product with its query.
                parameter.copy_((3e4 if parameter.shape[1] == 2 else 1e3) * torch.randn_like(parameter).clamp(-2, 2))
        y = block(torch.randn(2, 16, 5, 6).to(dtype), mask)
        assert torch.isfinite(y).all()
        torch.testing.assert_close(y.flatten(2)[:, :, ::3], block.proj.bias[:, None].expand(2, -1, 10))
        for gradient in torch.autograd.grad(y.float().square().sum(), list(block.parameters())):
            assert torch.isfinite(gradient).all()


# --- dropout ----------------------------------------------------------------------------------------------------------


def test_dropout_drops_the_same_weights_where_they_are_held():
    q, k, v = heads(*[(2, 2, 16, 8)] * 3)
    outputs = []
    for impl in ("einx", "bmm", "einsum"):
        torch.manual_seed(3)
        outputs.append(attend(q, k, v, impl=impl, dropout=0.5))
    torch.testing.assert_close(outputs[1:], [outputs[0]] * 2)


@each_implementation
def test_dropout_keeps_the_mean_and_is_off_in_evaluation(impl):
    block, x = va.Attention2d(8, 2, impl=impl, attn_drop=0.3), torch.randn(1, 8, 3, 3)
    with torch.no_grad():
        exact = block.eval()(x)
        assert torch.equal(block(x), exact)
        dropped = block.train()(x.expand(20_000, -1, -1, -1))
    assert not torch.equal(dropped[0], dropped[1])
    torch.testing.assert_close(dropped.mean(0, keepdim=True), exact, rtol=0, atol=0.01)


@pytest.mark.parametrize("case", ["plain", "dropout", "a bias with gradients"])
def test_a_named_implementation_is_the_one_that_runs_and_auto_chooses(case):
    """On the CPU torch has no fused kernel with dropout or gradients of a mask: auto takes bmm there."""
    q, k, v = heads(*[(2, 2, 6, 8)] * 3)
    mask = torch.randn(1, 2, 6, 6, requires_grad=True) if case.startswith("a bias") else None
    called = set()

    class Called(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            called.add(func)
            return func(*args, **(kwargs or {}))

    for impl, expected in (("sdpa", True), ("bmm", False), ("auto", case == "plain")):
        called.clear()
        with Called():
            attend(q, k, v, impl=impl, mask=mask, dropout=0.5 if case == "dropout" else 0.0)
        assert (F.scaled_dot_product_attention in called, torch.bmm in called) == (expected, not expected), impl


# --- memory, by count -------------------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements in memory that any tensor had which an operator made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.itemsize)
        return result


class MasksOfTheKernel(TorchFunctionMode):
    """Records how many elements the masks of the fused kernel hold in memory, and its queries, keys and values."""

    def __init__(self):
        super().__init__()
        self.elements = []
        self.inputs = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            mask = kwargs["attn_mask"]
            self.elements.append(mask.untyped_storage().nbytes() // mask.itemsize)
            self.inputs.append(sum(x.numel() for x in args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("block", "options", "size"),
    [
        (va.Attention2d, {"qk_norm": True, "output_gate": True, "num_kv_heads": 1, "value_dim": 12}, (32, 32)),
        (va.Attention2d, {"causal": True, "position": va.Rope2d()}, (32, 32)),
        (va.Attention2d, {"position": va.RelPosDecomposed(feat_size=(3, 4))}, (32, 32)),
        (va.Attention2d, {"pattern": va.Window(8, shift=4), "position": va.RelPosTable()}, (32, 32)),
        (va.Attention2d, {"pattern": va.Neighborhood(5), "position": va.RelPosDecomposed()}, (32, 32)),
        (va.Attention1d, {}, (1024,)),
        (va.Attention3d, {}, (4, 16, 16)),
        (va.LinearAttention2d, {}, (32, 32)),
    ],
)
def test_no_tensor_of_queries_by_keys_is_made_forward_or_backward(block, options, size):
    block, x = block(16, 2, **options), torch.randn(1, 16, *size, requires_grad=True)
    with LargestTensor() as largest:
        block(x).sum().backward()
    assert largest.elements < 1024**2
    in_parts = "pattern" in options or isinstance(options.get("position"), va.RelPosDecomposed)
    if not in_parts and not isinstance(block, va.LinearAttention2d):  # as the mode does see with bmm
        with va.use_impl(block, "bmm"), LargestTensor() as largest:
            block(x)
        assert largest.elements >= 1024**2


@pytest.mark.parametrize(
    ("options", "is_repeated"),
    [
        ({"pattern": va.Window(3, shift=1), "position": va.RelPosTable()}, True),
        ({"pattern": va.Neighborhood(3)}, True),
        ({"pattern": va.Grid(4), "position": va.RelPosTable(), "causal": True}, True),
        ({"pattern": va.Window(8, shift=4), "position": va.RelPosTable()}, False),
        ({"pattern": va.Neighborhood(7)}, False),
        ({"pattern": va.Grid(8), "causal": True}, False),
        ({"position": va.RelPosTable(feat_size=8)}, False),
    ],
    ids=str,
)
def test_masks_and_tables_of_a_pattern_are_repeated_over_the_batch_only_where_that_is_less_than_the_inputs(
    options, is_repeated
):
    block, found = va.Attention2d(16, 2, **options), []
    for batch in (1, 8):
        with MasksOfTheKernel() as masks, torch.no_grad():
            block(torch.randn(batch, 16, 16, 16))
        found.append((masks.elements, masks.inputs))
    ((one,), _), ((many,), (inputs,)) = found
    assert (many <= inputs) if is_repeated else (one == many)


# --- masks that do not fit, implementations from outside --------------------------------------------------------------


@each_implementation
def test_a_mask_fits_by_broadcasting(impl):
    block, x = va.Attention2d(8, 2, impl=impl), torch.randn(2, 8, 3, 3)
    for shape in ((9, 9), (9,), (2, 1, 1, 9), (1, 2, 9, 1)):
        torch.testing.assert_close(block(x, torch.ones(shape)), block(x))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[True]], "mask must be a tensor or None.* got list"),
        (torch.ones(9, 9, dtype=torch.int64), r"mask must be bool .* got torch.int64.*mask.bool\(\)"),
        (torch.ones(4, 9, dtype=torch.bool), r"mask must broadcast to .*\(2, 2, 9, 9\); got \(4, 9\)"),
        (torch.ones(3, 1, 9, 9), r"mask must broadcast to .*; got \(3, 1, 9, 9\)"),
        (torch.tensor(True), r"mask must broadcast to .*; got \(\)"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(mask, message):
    q = torch.randn(2, 2, 9, 4)
    for refused in (lambda: va.Attention2d(8, 2)(torch.randn(2, 8, 3, 3), mask), lambda: attend(q, q, q, mask=mask)):
        with pytest.raises(ValueError, match=message):
            refused()


def test_an_implementation_from_outside_is_available_to_every_block(monkeypatch):
    def twice(q, k, v, *, scale, mask, causal, dropout):
        assert mask is None or mask.dim() == 4
        return 2 * attend(q, k, v, impl="bmm", scale=scale, mask=mask, causal=causal, dropout=dropout)

    monkeypatch.setitem(IMPLEMENTATIONS, "twice", None)  # so that it is forgotten after the test
    del IMPLEMENTATIONS["twice"]
    va.register_impl("twice", twice)
    model = torch.nn.Sequential(
        va.Attention2d(8, 2, proj_bias=False),
        va.Attention2d(8, 2, pattern=va.Window(2, shift=1), position=va.RelPosTable(), proj_bias=False),
    )
    assert va.set_impl_(model, "twice") == 2
    x, mask = torch.randn(3, 8, 3, 3), torch.rand(9, 9) < 0.7
    found = [block(x, mask) for block in model]
    va.set_impl_(model, "bmm")
    for y, block in zip(found, model, strict=True):
        torch.testing.assert_close(y, 2 * block(x, mask))


def test_what_is_no_implementation_is_refused():
    q = torch.ones(1, 1, 1, 1)
    with pytest.raises(
        ValueError, match=r"impl must be one of 'einx', 'bmm', 'einsum', 'sdpa', 'flex', 'auto'.*; got 'flash'"
    ):
        attend(q, q, q, impl="flash")
    for name in ("", "bmm", None):
        with pytest.raises(ValueError, match=r"name must be a new one, none of 'einx', 'bmm'.*; got"):
            va.register_impl(name, lambda q, k, v, **options: v)
    with pytest.raises(ValueError, match=r"function must take \(q, k, v, \*, scale, mask, causal, dropout\); got"):
        va.register_impl("short", lambda q, k, v: v)


@pytest.mark.parametrize("impl", CPU_IMPLS)
def test_nothing_is_attended_to_by_nobody(impl):
    for b, i, j in ((0, 3, 3), (2, 0, 3), (2, 3, 0)):
        q, k, v = (torch.randn(b, n, tokens, 4, requires_grad=True) for n, tokens in ((2, i), (1, j), (1, j)))
        y = attend(q, k, v, impl=impl, causal=i == j)
        y.sum().backward()
        assert (y.shape, y.abs().sum(), v.grad.shape) == ((b, 2, i, 4), 0, (b, 1, j, 4))
    for pattern in ("full", "rows", va.Window(2), va.Grid(2), va.Neighborhood(3)):
        assert va.Attention2d(8, 2, pattern=pattern, impl=impl)(torch.randn(1, 8, 0, 4)).shape == (1, 8, 0, 4)


@pytest.mark.parametrize("impl", ["einx", "bmm"])
def test_feature_maps_of_linear_attention_are_what_their_names_say(impl):
    q, k, v = heads((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 2), dtype=torch.float64, grad=True)
    allowed = torch.tensor([True, True, False, True, False, True])[:, None]
    for feature_map, feature in (("none", lambda x: x), ("elu", lambda x: F.elu(x) + 1)):
        weights = feature(q) @ feature(k).mT * allowed.mT  # of every query to every key, which are never held
        weights = weights / weights.sum(-1, keepdim=True) if feature_map == "elu" else weights
        found = attend_linear(q, k, v, impl=impl, feature_map=feature_map, mask=allowed[None, None])
        for one, other in zip(
            *((y, *torch.autograd.grad(y.sin().sum(), (q, k, v))) for y in (found, weights @ v)), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-11)
    block = va.LinearAttention2d(8, 2, impl=impl, feature_map="elu")
    assert block.get_config()["feature_map"] == "elu"
    assert not block(torch.randn(1, 8, 3, 4), torch.zeros(12, dtype=torch.bool)).isnan().any()


@pytest.mark.parametrize("impl", ["einx", "bmm"])
@pytest.mark.parametrize("kept", [65_536, 1])
def test_sums_over_a_large_map_fit_into_half_precision(impl, kept):
    q, k, v = (torch.rand(1, 1, 65_536, 2) + 1 for _ in range(3))
    options = {"impl": impl, "feature_map": "elu", "mask": (torch.arange(65_536) < kept)[:, None]}
    half = attend_linear(q.half(), k.half(), v.half(), **options)
    torch.testing.assert_close(half.float(), attend_linear(q, k, v, **options), rtol=2e-3, atol=0)

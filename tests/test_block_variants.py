"""Blocks around attention, and attention from another map: against torch where torch has it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vision_attn as va

DIFFERENTIABLE = tuple(impl for impl in va.IMPLS if impl != "flex")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def randomized(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


# --- the transformer block --------------------------------------------------------------------------------------------


def weights_of_encoder_layer(layer):
    """Torch's names in ours: a linear layer is a 1×1 convolution."""
    names = {
        "attn.qkv.weight": layer.self_attn.in_proj_weight,
        "attn.qkv.bias": layer.self_attn.in_proj_bias,
        "attn.proj.weight": layer.self_attn.out_proj.weight,
        "attn.proj.bias": layer.self_attn.out_proj.bias,
        "fc1.weight": layer.linear1.weight,
        "fc1.bias": layer.linear1.bias,
        "fc2.weight": layer.linear2.weight,
        "fc2.bias": layer.linear2.bias,
        **{
            f"{name}.{kind}": getattr(getattr(layer, name), kind)
            for name in ("norm1", "norm2")
            for kind in ("weight", "bias")
        },
    }
    return {
        name: value[:, :, None, None] if value.dim() == 2 else value
        for name, value in names.items()
        if value is not None
    }


@pytest.mark.parametrize("impl", DIFFERENTIABLE)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_transformer_block_is_torchs_encoder_layer(impl, norm_first, activation, bias, masked):
    theirs = nn.TransformerEncoderLayer(
        24,
        3,
        40,
        dropout=0.0,
        activation=activation,
        batch_first=True,
        norm_first=norm_first,
        bias=bias,
        dtype=torch.float64,
    )
    randomized(theirs)
    ours = va.TransformerBlock2d(
        24,
        3,
        mlp_ratio=40 / 24,
        norm_first=norm_first,
        activation=activation,
        bias=bias,
        impl=impl,
        dtype=torch.float64,
    )
    ours.load_state_dict(weights_of_encoder_layer(theirs), strict=True)
    x = torch.randn(2, 24, 3, 5, dtype=torch.float64)
    allowed = torch.rand(15, 15) < 0.7 if masked else None
    results = []
    for run in (
        lambda x: ours(x, allowed),
        lambda x: theirs(x.flatten(2).mT, src_mask=None if allowed is None else ~allowed).mT.unflatten(2, (3, 5)),
    ):
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        results.append((y, *torch.autograd.grad(y.sin().sum(), leaf)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_dropout_of_the_transformer_block_is_on_in_training_only():
    block = va.TransformerBlock2d(16, 2, mlp_drop=0.5)
    x = torch.randn(1, 16, 3, 3)
    assert not torch.equal(block(x), block(x))
    assert torch.equal(block.eval()(x), block(x))


# --- linear attention -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["einx", "bmm"])
def test_linear_attention_is_its_matrix_of_weights_times_the_values(impl):
    block = va.LinearAttention2d(16, 2, impl=impl, dtype=torch.float64)
    x = torch.randn(2, 16, 3, 5, dtype=torch.float64)
    mask = torch.rand(2, 1, 1, 15) < 0.7
    for allowed in (None, mask):
        q, k, v = (y.unflatten(1, (2, 8)).flatten(3).mT for y in block.qkv(x).chunk(3, 1))
        k = k if allowed is None else k.masked_fill(~allowed.mT, -torch.inf)
        weights = q.softmax(-1) @ k.softmax(-2).mT
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 15, dtype=torch.float64))
        expected = block.proj((weights @ v).mT.reshape(2, 16, 3, 5))
        torch.testing.assert_close(block(x, allowed), expected, rtol=0, atol=1e-12)


def test_the_forms_of_linear_attention_are_equal_forward_and_backward():
    block, x = va.LinearAttention2d(16, 2, dtype=torch.float64), torch.randn(2, 16, 4, 3, dtype=torch.float64)
    mask = torch.rand(1, 2, 1, 12) < 0.5
    mask[0, 0] = False  # a head that sees nothing
    results = []
    for impl in ("einx", "bmm"):
        leaf = x.clone().requires_grad_()
        with va.use_impl(block, impl):
            y = block(leaf, mask)
        results.append((y, *torch.autograd.grad(y.sin().sum(), [leaf, *block.parameters()])))
    for one, other in zip(*results, strict=True):
        assert torch.isfinite(one).all()
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(block, (x[:1, :, :2].requires_grad_(),))


def test_linear_attention_has_the_state_dict_of_attention_and_its_own_implementations():
    linear, softmax = va.LinearAttention2d(16, 2), va.Attention2d(16, 2)
    softmax.load_state_dict(linear.state_dict(), strict=True)
    model = nn.Sequential(linear, softmax)
    assert va.set_impl(model, "einx") == 2
    with pytest.raises(
        ValueError,
        match=r"impl must be one of 'einx', 'bmm' for linear attention; got 'sdpa' \(in 0: LinearAttention2d",
    ):
        va.set_impl(model, "sdpa")
    assert (linear.impl, softmax.impl) == ("einx", "einx")


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.zeros(1, 1, 1, 12), "mask must be bool .* for linear attention; got torch.float32"),
        (torch.ones(12, 12, dtype=torch.bool), r"cannot mask a key for one query alone; got \(12, 12\)"),
        (torch.ones(1, 1, 1, 1, 12, dtype=torch.bool), "mask must broadcast to"),
        (torch.ones(3, 1, 1, 12, dtype=torch.bool), "mask must broadcast to"),
    ],
)
def test_linear_attention_refuses_masks_that_it_cannot_apply(mask, message):
    with pytest.raises(ValueError, match=message):
        va.LinearAttention2d(16, 2)(torch.randn(2, 16, 4, 3), mask)


def test_linear_attention_makes_no_tensor_of_queries_by_keys():
    block, x = va.LinearAttention2d(16, 2), torch.randn(1, 16, 32, 32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        block(x)
    assert max(saved) < 1024 * 1024


# --- attention from another map ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", DIFFERENTIABLE)
def test_a_context_of_the_same_map_is_self_attention(impl):
    block = va.Attention2d(
        16, 2, impl=impl, pattern=va.Window(3, shift=1), position=va.RelPosTable(), dtype=torch.float64
    )
    x = torch.randn(2, 16, 5, 7, dtype=torch.float64)
    torch.testing.assert_close(block(x, context=x), block(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("impl", DIFFERENTIABLE)
def test_a_context_of_another_size_gives_one_weight_for_each_of_its_positions(impl):
    block = va.Attention2d(16, 2, impl=impl, dtype=torch.float64)
    x, context = torch.randn(2, 16, 3, 4, dtype=torch.float64), torch.randn(2, 16, 5, 2, dtype=torch.float64)
    weights = block.attention_weights(x, context=context)
    assert weights.shape == (2, 2, 12, 10)
    values = block.qkv(context)[:, 32:].unflatten(1, (2, 8)).flatten(3).mT
    expected = block.proj((weights @ values).mT.reshape(2, 16, 3, 4))
    torch.testing.assert_close(block(x, context=context), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [(6, 8), (5, 7)])
def test_keys_of_a_strided_map_are_those_of_its_average(size):
    block = va.Attention2d(16, 2, kv_stride=2, dtype=torch.float64)
    x = torch.randn(2, 16, *size, dtype=torch.float64)
    context = F.avg_pool2d(x, 2, ceil_mode=True)
    plain = va.Attention2d(16, 2, dtype=torch.float64)
    plain.load_state_dict(block.state_dict())
    torch.testing.assert_close(block(x), plain(x, context=context), rtol=0, atol=1e-12)
    mask = torch.rand(x[0, 0].numel(), context[0, 0].numel()) < 0.5
    torch.testing.assert_close(block(x, mask), plain(x, mask, context), rtol=0, atol=1e-12)


def test_capture_shows_the_keys_map_of_strided_attention():
    block, x = va.Attention2d(16, 2, kv_stride=2), torch.randn(1, 16, 6, 7)
    with va.capture(block, queries=[(0, 0)]) as maps:
        block(x)
    assert maps[""].weights.shape == (1, 2, 1, 3, 4)


def test_capture_shows_that_a_window_is_looked_at_and_nothing_else():
    block, x = va.Attention2d(16, 2, pattern=va.Window(3)), torch.randn(1, 16, 6, 7)
    with va.capture(block, queries=[(4, 1)]) as maps:
        block(x)
    weights = maps[""].weights[0, 0, 0]
    inside = torch.zeros(6, 7, dtype=torch.bool)
    inside[3:6, 0:3] = True
    assert (weights[inside] > 0).all()
    assert (weights[~inside] == 0).all()


@pytest.mark.parametrize(
    ("options", "context", "message"),
    [
        ({"context_channels": 8}, None, "context must be given to a block with context_channels=8"),
        ({"context_channels": 8}, (2, 16, 3, 3), r"context must be maps of shape \(batch, 8, height, width\); got"),
        ({}, (2, 16, 3), "context must be maps of shape"),
        ({}, (1, 16, 3, 3), "context must hold as many maps as x, 2; got 1"),
        ({"pattern": "rows"}, (2, 16, 3, 3), r"context must have the size of x, \(4, 5\), .* got \(3, 3\)"),
        ({"causal": True}, (2, 16, 3, 3), "context must have the size of x"),
        ({"position": va.RelPosTable(4)}, (2, 16, 3, 3), "context must have the size of x"),
    ],
)
def test_a_context_that_does_not_fit_is_refused(options, context, message):
    block = va.Attention2d(16, 2, **options)
    with pytest.raises(ValueError, match=message):
        block(torch.randn(2, 16, 4, 5), context=None if context is None else torch.randn(context))


# --- augmented convolution --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stride", "size"), [(1, (5, 7)), (2, (5, 7)), (2, (6, 8)), (3, (7, 8))])
def test_an_augmented_convolution_is_its_two_parts_side_by_side(stride, size):
    block = va.AugmentedConv2d(
        8, 12, 5, stride=stride, num_heads=2, key_channels=8, value_channels=4, dtype=torch.float64
    )
    x = torch.randn(2, 8, *size, dtype=torch.float64)
    y = block(x)
    plain = nn.Conv2d(8, 12, 5, stride=stride, padding=2, dtype=torch.float64)
    assert y.shape == plain(x).shape
    torch.testing.assert_close(y[:, :8], block.conv(x))
    seen = F.avg_pool2d(x, stride, ceil_mode=True)
    torch.testing.assert_close(y[:, 8:], block.attn(seen))


# --- what is refused, argument by argument ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: va.Attention2d(8, 2, key_dim=0), "key_dim must be a whole number of at least 1; got 0"),
        (lambda: va.Attention2d(8, 2, value_dim=2.5), "value_dim must be a whole number of at least 1; got 2.5"),
        (lambda: va.Attention2d(8, 2, num_kv_heads=0), "num_kv_heads must be a whole number"),
        (lambda: va.Attention2d(8, 4, num_kv_heads=3), "num_kv_heads must divide num_heads; .* from 1, 2, 4"),
        (lambda: va.Attention2d(8, 2, out_channels=-1), "out_channels must be a whole number"),
        (lambda: va.Attention2d(8, 2, context_channels="8"), "context_channels must be a whole number"),
        (lambda: va.Attention2d(8, 2, kv_stride=0), "kv_stride must be a whole number of at least 1; got 0"),
        (
            lambda: va.Attention2d(8, 2, kv_stride=2, pattern="rows"),
            "pattern must be 'full' with kv_stride=2; got 'rows'",
        ),
        (lambda: va.Attention2d(8, 2, kv_stride=2, causal=True), "causal must be False where keys are not"),
        (lambda: va.Attention2d(8, 2, context_channels=8, causal=True), "causal must be False where keys are not"),
        (lambda: va.Attention2d(8, 2, scale=float("nan")), "scale must be a finite number; got nan"),
        (lambda: va.Attention2d(8, 2, scale="1"), "scale must be a finite number"),
        (lambda: va.Attention2d(8, 2, qkv_bias=1), "qkv_bias must be True or False; got 1"),
        (lambda: va.Attention2d(8, 2, proj_bias=None), "proj_bias must be True or False; got None"),
        (lambda: va.Attention2d(8, 2, qk_norm="layer"), "qk_norm must be True or False; got 'layer'"),
        (lambda: va.Attention2d(8, 2, causal=1), "causal must be True or False; got 1"),
        (lambda: va.Attention2d(8, 2, output_gate=0), "output_gate must be True or False; got 0"),
        (lambda: va.Attention2d(8, 2, attn_drop=True), "attn_drop must be a probability between 0 and 1; got True"),
        (lambda: va.Attention2d(8, 2, proj_drop="0"), "proj_drop must be a probability"),
        (lambda: va.AttentionBlock2d(8, 2, out_channels=4), "out_channels must be left out of AttentionBlock2d"),
        (lambda: va.AttentionBlock2d(0, 2), "channels must be a whole number of at least 1; got 0"),
        (lambda: va.TransformerBlock2d(8, 2, out_channels=4), "out_channels must be left out of TransformerBlock2d"),
        (lambda: va.TransformerBlock2d(8, 2, mlp_ratio=0), "mlp_ratio must be a finite number above 0; got 0"),
        (
            lambda: va.TransformerBlock2d(8, 2, activation="silu"),
            "activation must be one of 'gelu', 'relu'; got 'silu'",
        ),
        (lambda: va.TransformerBlock2d(8, 2, norm_first=1), "norm_first must be True or False"),
        (lambda: va.TransformerBlock2d(8, 2, mlp_drop=2), "mlp_drop must be a probability"),
        (lambda: va.TransformerBlock2d(8, 2, mlp_ratio=float("inf")), "mlp_ratio must be a finite number above 0"),
        (lambda: va.TransformerBlock2d(8, 2, eps=-1.0), "eps must be a finite number above 0; got -1.0"),
        (lambda: va.TransformerBlock2d(8, 2, activation=["gelu"]), "activation must be one of"),
        (lambda: va.AttentionBlock2d(8, 2, gate_init="x"), "gate_init must be a finite number; got 'x'"),
        (lambda: va.Attention2d(8, 2, impl=["bmm"]), r"impl must be one of .* got \['bmm'\]"),
        (lambda: va.LinearAttention2d(8, 3), "num_heads must divide channels; .* from 1, 2, 4, 8"),
        (
            lambda: va.LinearAttention2d(8, 2, impl="sdpa"),
            "impl must be one of 'einx', 'bmm' for linear attention; got",
        ),
        (lambda: va.LinearAttention2d(8, 2, qkv_bias=None), "qkv_bias must be True or False"),
        (lambda: va.AugmentedConv2d(8, 8, 2, key_channels=8, value_channels=4), "kernel_size must be odd"),
        (
            lambda: va.AugmentedConv2d(8, 8, num_heads=2, key_channels=7, value_channels=4),
            "num_heads must divide key_channels",
        ),
        (
            lambda: va.AugmentedConv2d(8, 8, num_heads=2, key_channels=8, value_channels=3),
            "num_heads must divide value_ch",
        ),
        (
            lambda: va.AugmentedConv2d(8, 8, num_heads=2, key_channels=8, value_channels=8),
            "value_channels must be fewer than",
        ),
        (
            lambda: va.AugmentedConv2d(8, 8, key_channels=8, value_channels=4, key_dim=3),
            "key_dim must be left out of Augm",
        ),
        (lambda: va.AugmentedConv2d(8, 8, stride=0, key_channels=8, value_channels=8), "stride must be a whole number"),
    ],
)
def test_bad_arguments_are_refused_at_construction(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_argument_that_does_not_exist_is_refused_by_name():
    with pytest.raises(TypeError, match="padding"):
        va.AugmentedConv2d(8, 8, num_heads=2, key_channels=8, value_channels=4, padding=1)
    with pytest.raises(TypeError, match="mlp"):
        va.TransformerBlock2d(8, 2, mlp=4)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "block",
    [
        lambda: va.TransformerBlock2d(8, 2),
        lambda: va.TransformerBlock2d(8, 2, norm_first=False),
        lambda: va.LinearAttention2d(8, 2),
        lambda: va.Attention2d(8, 2, pattern=va.Window(2, shift=1), position=va.RelPosTable()),
        lambda: va.Attention2d(8, 2, pattern=va.Neighborhood(3), out_channels=4),
    ],
)
def test_memory_format_in_is_memory_format_out(block, channels_last):
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(2, 8, 5, 3).contiguous(memory_format=memory_format)
    assert block()(x).is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize(
    "block",
    [
        lambda: va.TransformerBlock2d(16, 2),
        lambda: va.TransformerBlock2d(16, 2, norm_first=False, position=va.RelPosDecomposed(4)),
        lambda: va.AttentionBlock2d(
            16, 2, gate_init=1.0, qk_norm=True, pattern=va.Window(3), position=va.RelPosTable()
        ),
        lambda: va.AttentionBlock2d(16, 2, gate_init=1.0, position=va.Rope2d(), num_kv_heads=1),
        lambda: va.Attention2d(16, 2, pattern=va.Neighborhood(3), position=va.RelPosDecomposed(), output_gate=True),
        lambda: va.LinearAttention2d(16, 2),
    ],
)
def test_blocks_run_under_autocast_and_stay_near(block):
    block, x = block(), torch.randn(2, 16, 4, 5)
    expected = block(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = block(x)
        gradients = torch.autograd.grad(found.float().sum(), list(block.parameters()), allow_unused=True)
    assert (found.float() - expected).abs().max() < 0.05 * expected.abs().max()
    assert all(torch.isfinite(gradient).all() for gradient in gradients if gradient is not None)


def test_a_slice_of_a_channels_last_map_is_in_that_format():
    x = torch.randn(2, 16, 5, 3).contiguous(memory_format=torch.channels_last).chunk(2, dim=1)[0]
    assert va.Attention2d(8, 2)(x).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("impl", va.IMPLS)
@pytest.mark.parametrize("options", [{}, {"pattern": va.Window(2, shift=1), "position": va.RelPosTable()}], ids=str)
def test_an_empty_batch_gives_an_empty_batch(impl, options):
    block = va.Attention2d(8, 2, impl=impl, **options)
    with torch.no_grad():
        assert block(torch.randn(0, 8, 3, 5), torch.ones(15, 15, dtype=torch.bool)).shape == (0, 8, 3, 5)


@pytest.mark.parametrize("pattern", ["full", va.Window(2)], ids=str)
@pytest.mark.parametrize(
    "queries", [torch.tensor([-1]), torch.tensor([12]), torch.tensor(4), torch.ones(12).bool(), torch.ones(1)]
)
def test_queries_that_are_no_tokens_are_refused(pattern, queries):
    with pytest.raises(ValueError, match="queries must be indices of"):
        va.Attention2d(8, 2, pattern=pattern).attention_weights(torch.randn(1, 8, 3, 4), queries=queries)


def test_queries_that_are_no_tensor_are_refused():
    with pytest.raises(ValueError, match="queries must be a tensor of indices, or None for all; got list"):
        va.Attention2d(8, 2).attention_weights(torch.randn(1, 8, 3, 4), queries=[1])


def test_a_short_axis_is_averaged_as_it_is():
    block = va.Attention3d(8, 2, kv_stride=2)
    x = torch.randn(1, 8, 1, 4, 4)
    assert block(x).shape == x.shape
    assert block.keys_size(x) == (1, 2, 2)


def test_dropout_and_flex_are_refused_together_whichever_comes_first():
    model = nn.Sequential(va.Attention2d(8, 2, attn_drop=0.5))
    with pytest.raises(ValueError, match=r"attn_drop must be 0 with impl='flex'.*\(in 0: Attention2d\)"):
        va.set_impl(model, "flex")
    assert model[0].impl == "sdpa"


def test_whole_numbers_of_numpy_are_whole_numbers():
    np = pytest.importorskip("numpy")
    assert va.Attention2d(np.int64(8), np.int64(2), scale=np.float32(0.5))(torch.randn(1, 8, 2, 2)).shape == (
        1,
        8,
        2,
        2,
    )


def test_two_different_blocks_print_differently():
    shown = repr(va.Attention2d(16, 4, num_kv_heads=2, causal=True, scale=1.0, kv_stride=1, attn_drop=0.1))
    assert "num_kv_heads=2, scale=1.0, causal=True, attn_drop=0.1" in shown


def in_groups(weight, groups):
    """The weight of a grouped projection as that of a dense one, which is zero between the groups."""
    parts = weight.chunk(groups)
    return torch.block_diag(*(part.flatten(1) for part in parts))[:, :, None, None]


@pytest.mark.parametrize(
    "options", [{}, {"kv_stride": 2}, {"qkv_bias": False, "out_channels": 8}, {"key_dim": 4, "value_dim": 4}]
)
@pytest.mark.parametrize("impl", ["einx", "bmm", "einsum", "sdpa"])
@pytest.mark.parametrize("heads", [2, 4, 1])
def test_grouped_projections_are_dense_ones_with_zeros_between_the_groups(heads, impl, options):
    torch.manual_seed(0)
    grouped = va.Attention2d(16, heads, groups=4, impl=impl, dtype=torch.float64, **options)
    dense = va.Attention2d(16, heads, impl=impl, dtype=torch.float64, **options)
    weights = dict(grouped.state_dict())
    assert weights["qkv.weight"].shape[1] == 4
    weights["qkv.weight"] = torch.cat([in_groups(part, 4) for part in weights["qkv.weight"].chunk(3)])
    weights["proj.weight"] = in_groups(weights["proj.weight"], 4)
    dense.load_state_dict(weights)
    x = torch.randn(2, 16, 5, 6, dtype=torch.float64)
    torch.testing.assert_close(grouped(x), dense(x), rtol=1e-12, atol=1e-12)
    other = torch.randn(2, 16, 3, 4, dtype=torch.float64)
    torch.testing.assert_close(grouped(x, context=other), dense(x, context=other), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 3}, "groups must divide channels"),
        ({"groups": 4, "out_channels": 6}, "groups must divide out_channels"),
        ({"groups": 8, "key_dim": 1, "value_dim": 1}, "groups must divide num_heads · key_dim"),
        ({"groups": 2, "num_kv_heads": 1}, "groups must be 1 with num_kv_heads"),
        ({"groups": 2, "context_channels": 8}, "groups must be 1 with num_kv_heads, value_dim or context_channels"),
        ({"groups": 0}, "groups must be"),
    ],
)
def test_groups_that_do_not_go_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        va.Attention2d(16, 4, **options)
